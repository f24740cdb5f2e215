//! A row of the ledger: as a request begins, its outcome, and as the table has it.

use serde::Serialize;

use super::Result;
use super::chain::ChainLink;
use super::engine::{Row, SqlValue, values};
use crate::error::FailureCause;

/// A request as it is known when it begins.
#[derive(Clone, Debug)]
pub struct NewRow {
    pub request_id: String,
    pub key_id: String,
    /// The key's name at the time.
    pub key_name: String,
    pub created: i64,
}

/// An open row, and how many requests of its key are processed at once.
#[derive(Clone, Debug)]
pub struct BegunRow {
    pub row: NewRow,
    pub concurrent: Option<u32>,
}

#[derive(Clone, Debug)]
pub struct LedgerOutcome {
    /// The HTTP status that is sent; `None` if the client has gone.
    pub status: Option<u16>,
    pub error_code: Option<&'static str>,
    /// The reason why it was refused or failed.
    pub cause: Option<FailureCause>,
    pub tokens: Tokens,
    pub duration_ms: f64,
    pub queue_ms: f64,
    pub runtime_ms: Option<f64>,
    pub grounded: bool,
    pub search: Option<Searched>,
}

#[derive(Clone, Debug)]
pub struct Searched {
    /// `always`, `match` or `model`.
    pub reason: &'static str,
    /// The number of passages that were found; `None` if Search was unavailable.
    pub results: Option<i64>,
    pub time_ms: f64,
}

/// Token figures as the runtime measured them; `None` if it did not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tokens {
    pub prompt_tokens: Option<i64>,
    pub completion_tokens: Option<i64>,
    pub total_tokens: Option<i64>,
}

impl Tokens {
    /// The sums of two calls. If one of them lacks a figure, its sum is unknown.
    pub fn plus(self, other: Self) -> Self {
        let sum = |one: Option<i64>, another: Option<i64>| one?.checked_add(another?);
        Self {
            prompt_tokens: sum(self.prompt_tokens, other.prompt_tokens),
            completion_tokens: sum(self.completion_tokens, other.completion_tokens),
            total_tokens: sum(self.total_tokens, other.total_tokens),
        }
    }
}

/// A row as it is in the table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LedgerRow {
    pub request_id: String,
    pub key_id: String,
    pub key_name: String,
    pub created: i64,
    pub status: Option<i64>,
    pub error_code: Option<String>,
    #[serde(flatten)]
    pub tokens: Tokens,
    pub duration_ms: Option<f64>,
    pub queue_ms: Option<f64>,
    pub runtime_ms: Option<f64>,
    pub grounded: bool,
    pub search_reason: Option<String>,
    pub search_results: Option<i64>,
    pub search_ms: Option<f64>,
    /// Its place in the chain; `None` while the request is running.
    pub seq: Option<i64>,
    pub gateway: String,
    /// The reason why it was refused or failed, as one word.
    pub cause: Option<String>,
}

pub const COLUMNS: &str = "request_id, key_id, key_name, created, status, error_code, prompt_tokens,
    completion_tokens, total_tokens, duration_ms, queue_ms, runtime_ms, grounded, search_reason,
    search_results, search_ms, seq, gateway, cause";

impl LedgerRow {
    /// A finished row that has no place in the chain yet.
    pub(super) fn new(new: &NewRow, outcome: &LedgerOutcome, gateway: &str) -> Self {
        let search = outcome.search.as_ref();
        Self {
            request_id: new.request_id.clone(),
            key_id: new.key_id.clone(),
            key_name: new.key_name.clone(),
            created: new.created,
            status: outcome.status.map(i64::from),
            error_code: outcome.error_code.map(String::from),
            tokens: outcome.tokens,
            duration_ms: Some(outcome.duration_ms),
            queue_ms: Some(outcome.queue_ms),
            runtime_ms: outcome.runtime_ms,
            grounded: outcome.grounded,
            search_reason: search.map(|search| search.reason.into()),
            search_results: search.and_then(|search| search.results),
            search_ms: search.map(|search| search.time_ms),
            seq: None,
            gateway: gateway.to_owned(),
            cause: outcome.cause.map(|cause| cause.to_string()),
        }
    }

    pub(super) fn as_new(&self) -> NewRow {
        NewRow {
            request_id: self.request_id.clone(),
            key_id: self.key_id.clone(),
            key_name: self.key_name.clone(),
            created: self.created,
        }
    }

    /// The parameters of the statement that finishes a row.
    pub(super) fn values(&self, ChainLink { seq, hash }: ChainLink) -> Vec<SqlValue> {
        values![
            self.status,
            self.error_code.as_deref(),
            self.tokens.prompt_tokens,
            self.tokens.completion_tokens,
            self.tokens.total_tokens,
            self.duration_ms,
            self.queue_ms,
            self.runtime_ms,
            self.grounded,
            self.search_reason.as_deref(),
            self.search_results,
            self.search_ms,
            seq,
            self.cause.as_deref(),
            hash,
            &self.request_id,
        ]
        .into()
    }
}

/// Reads [`COLUMNS`].
pub(super) fn read_row(mut row: Row) -> Result<LedgerRow> {
    Ok(LedgerRow {
        request_id: row.next()?,
        key_id: row.next()?,
        key_name: row.next()?,
        created: row.next()?,
        status: row.next()?,
        error_code: row.next()?,
        tokens: Tokens {
            prompt_tokens: row.next()?,
            completion_tokens: row.next()?,
            total_tokens: row.next()?,
        },
        duration_ms: row.next()?,
        queue_ms: row.next()?,
        runtime_ms: row.next()?,
        grounded: row.next()?,
        search_reason: row.next()?,
        search_results: row.next()?,
        search_ms: row.next()?,
        seq: row.next()?,
        gateway: row.next()?,
        cause: row.next()?,
    })
}
