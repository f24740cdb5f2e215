//! The record of a request while it goes through the steps, for its row, its log line and its metrics.

use std::cell::OnceCell;
use std::net::IpAddr;
use std::time::{Duration, Instant, SystemTime};

use log::Level;

use crate::error::{ApiError, Failure};
use crate::id::RequestId;
use crate::logging;
use crate::metrics::Times;
use crate::runtime::{Generated, Spent};
use crate::store::{Key, LedgerRow, Searched, StoreError};
use crate::when::milliseconds;

pub(super) struct Record {
    pub id: RequestId,
    pub received: Instant,
    /// The time from its receipt to its outcome, before the row is written: one figure for the row and the log.
    total: OnceCell<Duration>,
    pub queue: Duration,
    pub client: Option<IpAddr>,
    /// The id and the name of its valid key.
    key: Option<(String, String)>,
    pub searched: Option<Searched>,
    /// The cost of the calls to the runtime.
    pub spent: Spent,
    /// The write to the ledger.
    pub ledger: Option<Duration>,
    /// The client went away before there was an outcome.
    pub is_abandoned: bool,
    /// It was refused because the ledger is unavailable.
    pub has_no_row: bool,
    /// It gets no line in the log.
    pub is_quiet: bool,
}

/// The `error_code` of a row whose client went away.
const ABANDONED: &str = "abandoned";

impl Record {
    pub fn new(client: Option<IpAddr>, received: Instant) -> Self {
        let queue = received.elapsed();
        Self {
            id: RequestId::at(SystemTime::now() - queue),
            received,
            total: OnceCell::new(),
            queue,
            client,
            key: None,
            searched: None,
            spent: Spent::default(),
            ledger: None,
            is_abandoned: false,
            has_no_row: false,
            is_quiet: false,
        }
    }

    /// The result of Search, unless it was cancelled.
    pub fn searched(&self) -> Option<&Searched> {
        self.searched
            .as_ref()
            .filter(|searched| !self.is_abandoned || searched.results.is_some())
    }

    pub fn set_key(&mut self, key: &Key) {
        self.key = Some((key.id.clone(), key.name.clone()));
    }

    pub fn row(&self, result: Result<(), &Failure>) -> LedgerRow {
        let (status, error_code, cause) = match result {
            _ if self.is_abandoned => (None, Some(ABANDONED), None),
            Ok(()) => (Some(200), None, None),
            Err(Failure { error, cause, .. }) => {
                (Some(error.status()), Some(error.code()), Some(cause))
            }
        };
        let (key_id, key_name) = self.key.clone().unwrap_or_default();
        let search = self.searched();
        let found = search.and_then(|search| search.results);
        LedgerRow {
            request_id: self.id.to_string(),
            key_id,
            key_name,
            created: self.id.created(),
            status: status.map(i64::from),
            error_code: error_code.map(String::from),
            tokens: self.spent.tokens.unwrap_or_default(),
            duration_ms: Some(milliseconds(
                *self.total.get_or_init(|| self.received.elapsed()),
            )),
            queue_ms: Some(milliseconds(self.queue)),
            runtime_ms: self.spent.time.map(milliseconds),
            grounded: status == Some(200) && found.is_some_and(|found| found > 0),
            search_reason: search.map(|search| search.reason.into()),
            search_results: found,
            search_ms: search.map(|search| search.time_ms),
            cause: cause.map(ToString::to_string),
            ..LedgerRow::default()
        }
    }

    pub fn times(&self) -> Times {
        let Self { queue, ledger, .. } = *self;
        Times {
            whole: self.received.elapsed(),
            queue,
            runtime: self.spent.time,
            ledger,
        }
    }

    pub fn server_timing(&self) -> String {
        let search = |searched: &Searched| Duration::from_secs_f64(searched.time_ms / 1000.0);
        let parts = [
            ("queue", Some(self.queue)),
            ("search", self.searched.as_ref().map(search)),
            ("runtime", self.spent.time),
            ("ledger", self.ledger),
            ("total", Some(self.received.elapsed())),
        ];
        let format = |(name, time): (&str, Option<Duration>)| {
            let time = time?;
            // Formatting integers takes a fraction of the time of formatting floats.
            let (milliseconds, fraction) = (time.as_millis(), time.subsec_micros() % 1000);
            Some(format!("{name};dur={milliseconds}.{fraction:03}"))
        };
        parts
            .into_iter()
            .filter_map(format)
            .collect::<Vec<_>>()
            .join(", ")
    }

    /// Writes one line for a request, with nothing in it that the client wrote; and another one with the details of a
    /// 5xx. A refusal without a valid key may have none, unless the level is `debug`.
    pub fn log(&self, result: &Result<Generated, Failure>) {
        let failure = result.as_ref().err();
        let has_line = failure.is_none_or(|failure| self.has_line(failure));
        let level = if has_line { Level::Info } else { Level::Debug };
        let row = self.row(result.as_ref().map(drop));
        let key = self
            .key
            .as_ref()
            .map(|(id, _)| id)
            .or_else(|| failure?.key_id.as_ref());
        let id = self.id;
        log::log!(
            target: logging::REQUEST,
            level,
            "id={id} client={} status={} error={} cause={} key={} total_ms={} queue_ms={} runtime_ms={} \
             ledger_ms={} prompt_tokens={} completion_tokens={} total_tokens={}{}",
            or_dash(self.client),
            or_dash(row.status),
            or_dash(row.error_code),
            or_dash(row.cause),
            or_dash(key),
            or_dash(row.duration_ms),
            or_dash(row.queue_ms),
            or_dash(row.runtime_ms),
            or_dash(self.ledger.map(milliseconds)),
            or_dash(row.tokens.prompt_tokens),
            or_dash(row.tokens.completion_tokens),
            or_dash(row.tokens.total_tokens),
            self.searched().map_or(String::new(), |Searched { reason, results, time_ms }| format!(
                " search={reason} search_results={} search_ms={time_ms}",
                or_dash(*results)
            )),
        );
        if let Some(Failure {
            error,
            details: Some(details),
            ..
        }) = failure
            && has_line
            && !self.is_abandoned
        {
            let level = match error {
                ApiError::InferenceError | ApiError::SearchUnavailable => Level::Warn,
                _ => Level::Error,
            };
            log::log!(level, "id={id} details={details:?}");
        }
    }

    /// Logs that the outcome of a request that got an error anyway could not be written.
    pub fn log_ledger_error(&self, error: &StoreError) {
        log::error!("id={} details={:?}", self.id, format!("ledger: {error}"));
    }

    /// Returns true if a refused request has a line of its own.
    fn has_line(&self, failure: &Failure) -> bool {
        // The listener has a line with the number of shed requests.
        !failure.cause.is_shed()
            && (self.key.is_some() || logging::allow_refusal_line(failure.cause, self.client))
    }
}

fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or("-".into(), |value| value.to_string())
}
