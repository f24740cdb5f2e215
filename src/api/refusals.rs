//! Limits the ledger rows for refused requests of a key: a client that sends only invalid requests must not fill the disk.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The rows that a key's refusals get at once, and those that follow per second.
const BURST: f64 = 100.0;
const PER_SECOND: f64 = 10.0;

const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// A token bucket for each key that was refused lately.
#[derive(Default)]
pub struct Refusals(Mutex<RefusalState>);

#[derive(Default)]
struct RefusalState {
    buckets: HashMap<String, Bucket>,
    /// Refusals without a row since the last line in the log.
    unlogged: u64,
    last_line: Option<Instant>,
}

struct Bucket {
    tokens: f64,
    filled: Instant,
}

impl Bucket {
    fn fill(&mut self, now: Instant) {
        let more = now.saturating_duration_since(self.filled).as_secs_f64() * PER_SECOND;
        (self.tokens, self.filled) = ((self.tokens + more).min(BURST), now);
    }
}

impl Refusals {
    /// Whether a refused request of this key gets a row. Those that do not are counted in a log line once a minute.
    pub fn have_row(&self, key_id: &str, now: Instant) -> bool {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.buckets.contains_key(key_id) {
            // A full bucket is the same as none, so only keys that were refused lately have one.
            state.buckets.retain(|_, bucket| {
                bucket.fill(now);
                bucket.tokens < BURST
            });
            state.buckets.insert(key_id.to_owned(), Bucket { tokens: BURST, filled: now });
        }
        let bucket = state.buckets.get_mut(key_id).expect("it was just made if there was none");
        bucket.fill(now);
        if bucket.tokens >= 1.0 {
            bucket.tokens -= 1.0;
            return true;
        }
        state.unlogged += 1;
        if state.last_line.is_none_or(|last| now >= last + LOG_INTERVAL) {
            log::warn!("refused requests that were not recorded: {} since the last report", state.unlogged);
            (state.unlogged, state.last_line) = (0, Some(now));
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_and_then_some_per_second() {
        let refusals = Refusals::default();
        let start = Instant::now();
        let rows = |key: &str, count: usize, second: u64| {
            let now = start + Duration::from_secs(second);
            (0..count).filter(|_| refusals.have_row(key, now)).count()
        };
        assert_eq!(rows("a", 150, 0), 100);
        assert_eq!(rows("b", 1, 0), 1, "each key has its own");
        assert_eq!(rows("a", 50, 1), 10);
        assert_eq!(rows("a", 50, 1), 0);
        assert_eq!(rows("a", 30, 3), 20);
        assert_eq!(rows("a", 200, 3600), 100, "never more than the burst");
        assert_eq!(rows("c", 1, 7200), 1);
        let state = refusals.0.lock().expect("no panic");
        assert_eq!(state.buckets.keys().collect::<Vec<_>>(), ["c"], "the full ones are dropped");
        assert_eq!(state.unlogged, 99, "there was a line for the first of these");
    }
}
