//! The rate limiter of the service: a token bucket.

use std::time::{Duration, Instant};

/// Allows a burst at once, and then one more per interval.
#[derive(Clone, Copy, Debug)]
pub struct RateLimiter {
    burst: u32,
    interval: Duration,
    /// When the whole burst is available again; `None` if none of it was used.
    full_at: Option<Instant>,
}

impl RateLimiter {
    pub const fn new(burst: u32, interval: Duration) -> Self {
        Self {
            burst,
            interval,
            full_at: None,
        }
    }

    pub fn allow(&mut self, now: Instant) -> bool {
        self.take(0, now).is_ok()
    }

    /// Takes one and leaves at least `reserve`, or returns the time to wait for that.
    pub fn take(&mut self, reserve: u32, now: Instant) -> Result<(), Duration> {
        match self.wait(reserve, now) {
            Duration::ZERO => {
                self.full_at = Some(self.full_at.map_or(now, |at| at.max(now)) + self.interval);
                Ok(())
            }
            wait => Err(wait),
        }
    }

    /// The time until one can be taken that leaves at least `reserve`.
    pub fn wait(&self, reserve: u32, now: Instant) -> Duration {
        let used = self
            .full_at
            .map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
        (used + (1 + reserve) * self.interval).saturating_sub(self.burst * self.interval)
    }

    pub fn give_back(&mut self) {
        self.full_at = self.full_at.and_then(|at| at.checked_sub(self.interval));
    }

    pub fn is_full(&self, now: Instant) -> bool {
        self.full_at.is_none_or(|at| at <= now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_and_then_one_per_interval() {
        let (mut limiter, start) = (RateLimiter::new(5, Duration::from_secs(2)), Instant::now());
        let mut allowed = |second: u64| {
            let now = start + Duration::from_secs(second);
            (0..100).filter(|_| limiter.allow(now)).count()
        };
        assert_eq!(
            (allowed(0), allowed(1), allowed(2), allowed(8)),
            (5, 0, 1, 3)
        );
        assert_eq!(
            (allowed(900), allowed(900)),
            (5, 0),
            "never more than the burst"
        );
    }

    #[test]
    fn a_reserve_is_left_and_what_is_given_back_can_be_taken_again() {
        let (mut limiter, now) = (RateLimiter::new(5, Duration::from_secs(2)), Instant::now());
        assert!(limiter.is_full(now));
        assert_eq!((0..9).filter(|_| limiter.take(3, now).is_ok()).count(), 2);
        assert_eq!(limiter.take(3, now), Err(Duration::from_secs(2)));
        assert_eq!(limiter.wait(4, now), Duration::from_secs(4));
        assert!(limiter.take(0, now).is_ok() && !limiter.is_full(now));
        limiter.give_back();
        assert_eq!(limiter.take(3, now), Err(Duration::from_secs(2)));
        limiter.give_back();
        assert!(limiter.take(3, now).is_ok());
        assert!(limiter.is_full(now + Duration::from_secs(4)));
    }
}
