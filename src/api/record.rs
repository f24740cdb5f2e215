//! The record of a request while it goes through the steps: its row in the ledger, and what its log
//! line and the metrics need besides; and which requests get a row.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime};

use log::Level;

use super::validation::StreamOptions;
use crate::error::{ApiError, Failure, Problem};
use crate::id::RequestId;
use crate::keys::Budget;
use crate::ledger::LedgerRow;
use crate::locks::lock;
use crate::logging;
use crate::rate_limiter::RateLimiter;
use crate::runtime::RequestCost;
use crate::secret::SecretDigest;
use crate::when::milliseconds;

pub struct Record {
    /// Each step fills in its own part.
    pub row: LedgerRow,
    pub received: Instant,
    pub client: Option<IpAddr>,
    /// The digest of the secret that a valid key had.
    pub secret: Option<SecretDigest>,
    /// The key's budget, as its look-up found it.
    pub budget: Option<Budget>,
    /// The answer is sent as events.
    pub stream: Option<StreamOptions>,
    /// The cost of the calls to the runtime.
    pub cost: RequestCost,
    /// The time of the write to the ledger.
    pub ledger_time: Option<Duration>,
    /// The client went away before there was an outcome.
    pub is_abandoned: bool,
    /// It was refused because the ledger is unavailable.
    pub is_refused_by_outage: bool,
    /// It gets no line in the log.
    pub is_not_logged: bool,
}

/// The `error_code` of a row whose client went away.
const ABANDONED: &str = "abandoned";

impl Record {
    pub fn new(client: Option<IpAddr>, received: Instant) -> Self {
        let queue = received.elapsed();
        let id = RequestId::at(SystemTime::now() - queue);
        Self {
            row: LedgerRow {
                request_id: id.to_string(),
                created: id.created(),
                queue_ms: Some(milliseconds(queue)),
                ..LedgerRow::default()
            },
            received,
            client,
            secret: None,
            budget: None,
            stream: None,
            cost: RequestCost::default(),
            ledger_time: None,
            is_abandoned: false,
            is_refused_by_outage: false,
            is_not_logged: false,
        }
    }

    /// Fills in the rest of the row. The duration is the time to the first outcome, before the row
    /// is written: one figure for the row and the log.
    pub fn set_outcome(&mut self, failure: Option<&Failure>) {
        let row = &mut self.row;
        (row.status, row.error_code, row.cause) = match failure {
            _ if self.is_abandoned => (None, Some(ABANDONED.into()), None),
            None => (Some(200), None, None),
            Some(Failure { error, cause, .. }) => (
                Some(error.status().into()),
                Some(error.code().into()),
                Some(cause.to_string()),
            ),
        };
        let total = self.received.elapsed();
        row.duration_ms.get_or_insert_with(|| milliseconds(total));
        row.runtime_ms = self.cost.time.map(milliseconds);
        row.tokens = self.cost.tokens.unwrap_or_default();
        row.grounded = row.status == Some(200) && row.search_results > Some(0);
        if self.is_abandoned && row.search_results.is_none() {
            // The search was cancelled.
            (row.search_reason, row.search_ms) = (None, None);
        }
    }

    /// Writes one line for a request, with nothing in it that the client wrote; and another one if
    /// there is more for the operator. A refusal without a valid key may have none, unless the level is
    /// `debug`.
    pub fn log(&self, failure: Option<&Failure>) {
        let has_line = failure.is_none_or(|failure| self.has_line(failure));
        let level = if has_line { Level::Info } else { Level::Debug };
        let row = &self.row;
        let key = Some(&row.key_id).filter(|_| self.has_key());
        let search = row.search_reason.as_ref().map(|reason| {
            let (results, time) = (or_dash(row.search_results), or_dash(row.search_ms));
            format!(" search={reason} search_results={results} search_ms={time}")
        });
        log::log!(
            target: logging::REQUEST,
            level,
            "id={} client={} status={} error={} cause={} key={} total_ms={} queue_ms={} runtime_ms={} \
             ledger_ms={} prompt_tokens={} completion_tokens={} total_tokens={}{}",
            row.request_id,
            or_dash(self.client),
            or_dash(row.status),
            or_dash(row.error_code.as_ref()),
            or_dash(row.cause.as_ref()),
            or_dash(key.or_else(|| failure?.key_id.as_ref())),
            or_dash(row.duration_ms),
            or_dash(row.queue_ms),
            or_dash(row.runtime_ms),
            or_dash(self.ledger_time.map(milliseconds)),
            or_dash(row.tokens.prompt_tokens),
            or_dash(row.tokens.completion_tokens),
            or_dash(row.tokens.total_tokens),
            search.unwrap_or_default(),
        );
        if let Some(failure) = failure
            && let Some(details) = &failure.details
            && has_line
            && !self.is_abandoned
        {
            let level = match failure.error {
                ApiError::InferenceError | ApiError::SearchUnavailable | ApiError::NotFound => {
                    Level::Warn
                }
                _ => Level::Error,
            };
            log::log!(level, "id={} details={details:?}", row.request_id);
        }
    }

    /// Returns true if a refused request has a line of its own.
    fn has_line(&self, failure: &Failure) -> bool {
        // The listener has a line with the number of shed requests.
        !failure.cause.is_shed()
            && (self.has_key() || logging::allow_refusal_line(failure.cause, self.client))
    }

    /// Returns true if its key is valid.
    fn has_key(&self) -> bool {
        !self.row.key_id.is_empty()
    }
}

fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or("-".into(), |value| value.to_string())
}

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
