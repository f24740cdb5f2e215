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

    /// Takes one, if there is one.
    pub fn allow(&mut self, now: Instant) -> bool {
        let is_left = self.wait(0, now).is_zero();
        if is_left {
            self.full_at = Some(self.full_at.map_or(now, |at| at.max(now)) + self.interval);
        }
        is_left
    }

    /// The time until one can be taken that leaves at least `reserve`.
    pub fn wait(&self, reserve: u32, now: Instant) -> Duration {
        let used = self
            .full_at
            .map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
        (used + (1 + reserve) * self.interval).saturating_sub(self.burst * self.interval)
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
    fn a_reserve_is_left() {
        let (mut limiter, now) = (RateLimiter::new(5, Duration::from_secs(2)), Instant::now());
        assert!(limiter.is_full(now));
        for left in (0..5).rev() {
            assert!(limiter.wait(left, now).is_zero() && limiter.allow(now));
            assert_eq!(limiter.wait(left, now), Duration::from_secs(2));
        }
        assert!(!limiter.is_full(now));
        assert!(limiter.is_full(now + Duration::from_secs(10)));
    }
}
