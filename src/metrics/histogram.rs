//! A histogram of durations.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The bounds in seconds: from the time of a refusal to that of a slow runtime, at most a factor of
/// 3 apart.
pub const BOUNDS: [f64; 18] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0, 120.0, 300.0,
];

#[derive(Default)]
pub struct Histogram {
    /// The number of times up to each bound and longer than the one before it; last, of those
    /// longer than every bound.
    buckets: [AtomicU64; BOUNDS.len() + 1],
    nanoseconds: AtomicU64,
}

impl Histogram {
    pub fn observe(&self, time: Duration) {
        let index = BOUNDS.partition_point(|bound| *bound < time.as_secs_f64());
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.buckets[index].fetch_add(1, Ordering::Relaxed);
        self.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    pub fn observe_milliseconds(&self, time: Option<f64>) {
        time.inspect(|time| self.observe(Duration::from_secs_f64(time / 1000.0)));
    }

    /// Returns the number of times up to each bound and, last, of all times; and their sum in
    /// seconds. The numbers all come from the buckets, so that they agree while other threads
    /// continue to count.
    pub fn read(&self) -> ([u64; BOUNDS.len() + 1], f64) {
        let mut count = 0;
        let counts = self.buckets.each_ref().map(|bucket| {
            count += bucket.load(Ordering::Relaxed);
            count
        });
        (
            counts,
            self.nanoseconds.load(Ordering::Relaxed) as f64 / 1e9,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_in_the_first_bucket_that_holds_it() {
        assert!(BOUNDS.is_sorted_by(|one, next| one < next && *next <= one * 3.0));
        for (time, bound) in [
            (Duration::ZERO, Some(0.0005)),
            (Duration::from_micros(500), Some(0.0005)),
            (Duration::from_nanos(500_001), Some(0.001)),
            (Duration::from_millis(25), Some(0.025)),
            (Duration::from_secs(299), Some(300.0)),
            (Duration::from_secs(300), Some(300.0)),
            (Duration::from_nanos(300_000_000_001), None),
            (Duration::MAX, None),
        ] {
            let histogram = Histogram::default();
            histogram.observe(time);
            let (counts, _) = histogram.read();
            let first = BOUNDS
                .iter()
                .zip(counts)
                .find(|(_, count)| *count > 0)
                .map(|(bound, _)| *bound);
            assert_eq!((first, counts[BOUNDS.len()]), (bound, 1), "{time:?}");
        }
    }
}
