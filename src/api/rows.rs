//! The row of a request: the failures if it can't be written, and a limit on the rows of requests
//! that cost nothing.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::database::Problem;
use crate::error::Failure;
use crate::mutex::lock;
use crate::rate_limiter::RateLimiter;

/// The rows of one key's requests without a measured token.
const ROWS: RateLimiter = RateLimiter::new(100, Duration::from_millis(100));

const LINES: RateLimiter = RateLimiter::new(1, Duration::from_secs(60));

/// Limits the rows of a key's requests that ended without a measured token: a client that sends only
/// invalid requests, or retries while the runtime is down, must not fill the disk.
#[derive(Default)]
pub struct RowLimits(Mutex<RowLimitState>);

struct RowLimitState {
    /// The keys that had such requests lately.
    rows: HashMap<String, RateLimiter>,
    /// Requests without a row since the last line in the log.
    unlogged: u64,
    lines: RateLimiter,
}

impl Default for RowLimitState {
    fn default() -> Self {
        Self {
            rows: HashMap::new(),
            unlogged: 0,
            lines: LINES,
        }
    }
}

impl RowLimits {
    /// Returns true if such a request of this key gets a row. The others are counted in a log line
    /// once a minute.
    pub fn allow(&self, key_id: &str, now: Instant) -> bool {
        let mut state = lock(&self.0);
        if !state.rows.contains_key(key_id) {
            state.rows.retain(|_, rows| !rows.is_full(now));
        }
        let rows = state.rows.entry(key_id.to_owned()).or_insert(ROWS);
        if rows.allow(now) {
            return true;
        }
        state.unlogged += 1;
        if state.lines.allow(now) {
            log::warn!(
                "requests without a measured token that were not recorded: {} since the last line",
                state.unlogged
            );
            state.unlogged = 0;
        }
        false
    }
}

/// The failure while the ledger is unavailable. The runtime is not called.
pub fn unavailable(error: &Problem) -> Failure {
    Failure::unavailable(
        error.cause(),
        "Usage can't be recorded at the moment, so the request was not run. Try again later.",
        error.details("ledger, before the call"),
    )
}

/// The failure if the row of a completion could not be written, so it is not sent. An automatic
/// retry would only spend another inference.
pub fn not_written(error: &Problem) -> Failure {
    Failure {
        no_retry: true,
        ..Failure::unavailable(
            error.cause(),
            "The usage of this completion could not be recorded, so it was not sent. Try again later.",
            error.details("ledger, after the call"),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_and_then_some_per_second() {
        let limits = RowLimits::default();
        let start = Instant::now();
        let rows = |key: &str, count: usize, second: u64| {
            let now = start + Duration::from_secs(second);
            (0..count).filter(|_| limits.allow(key, now)).count()
        };
        assert_eq!(rows("a", 150, 0), 100);
        assert_eq!(rows("b", 1, 0), 1, "each key has its own");
        assert_eq!(rows("a", 50, 1), 10);
        assert_eq!(rows("a", 50, 1), 0);
        assert_eq!(rows("a", 30, 3), 20);
        assert_eq!(rows("a", 200, 3600), 100, "never more than the burst");
        assert_eq!(rows("c", 1, 7200), 1);
        let state = limits.0.lock().expect("no panic");
        assert_eq!(
            state.rows.keys().collect::<Vec<_>>(),
            ["c"],
            "the full ones are dropped"
        );
        assert_eq!(
            state.unlogged, 99,
            "there was a line for the first of these"
        );
    }
}
