//! Feeds systemd's watchdog from the event loop, also while no event comes.
//!
//! The watchdog is not fed if a restart would help: the event loop hangs, or every worker is
//! overdue, as it is if a write to the database hangs. On a full disk or a locked database, writes
//! fail in time; a restart would only lose running requests.

use std::time::{Duration, Instant};

pub struct Watchdog {
    /// Half of systemd's interval.
    pause: Duration,
    next: Instant,
    /// The last logged reason why it is not fed.
    trouble: Option<&'static str>,
    feed: Box<dyn Fn() + Send>,
}

impl Watchdog {
    /// `interval` is the time after which systemd ends a service that does not feed it.
    pub fn new(interval: Duration, feed: impl Fn() + Send + 'static) -> Self {
        Self {
            pause: interval / 2,
            next: Instant::now(),
            trouble: None,
            feed: Box::new(feed),
        }
    }

    /// Returns when it has to run next.
    pub fn due(&self) -> Instant {
        self.next
    }

    pub fn run(&mut self, now: Instant, are_workers_stuck: bool) {
        self.next = now + self.pause;
        let trouble = if are_workers_stuck {
            Some("every worker has been busy with one request for longer than a request may take")
        } else {
            (self.feed)();
            None
        };
        if trouble != self.trouble {
            match trouble {
                Some(trouble) => log::error!("the watchdog is not fed: {trouble}"),
                None => log::info!("the watchdog is fed again"),
            }
            self.trouble = trouble;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn it_is_fed_twice_an_interval_unless_a_restart_would_help() {
        let fed = Arc::new(AtomicU32::new(0));
        let feeds = Arc::clone(&fed);
        let feed = move || _ = feeds.fetch_add(1, Ordering::Relaxed);
        let mut watchdog = Watchdog::new(Duration::from_secs(30), feed);
        let mut now = watchdog.due();
        for (are_workers_stuck, expected) in [(false, 1), (true, 1), (false, 2)] {
            watchdog.run(now, are_workers_stuck);
            assert_eq!(fed.load(Ordering::Relaxed), expected);
            now += Duration::from_secs(15);
            assert_eq!(watchdog.due(), now);
        }
    }
}
