//! A row of the ledger.

use serde::Serialize;

use crate::database::{Result, Row, SqlValue, values};
use crate::text::{cells, csv_line};
use crate::when;

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

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LedgerRow {
    pub request_id: String,
    pub key_id: String,
    /// The key's name at the time.
    pub key_name: String,
    pub created: i64,
    /// The HTTP status that is sent; `None` if the client has gone.
    pub status: Option<i64>,
    pub error_code: Option<String>,
    #[serde(flatten)]
    pub tokens: Tokens,
    pub duration_ms: Option<f64>,
    pub queue_ms: Option<f64>,
    pub runtime_ms: Option<f64>,
    pub grounded: bool,
    /// `always`, `match` or `model`; `None` if there was no search.
    pub search_reason: Option<String>,
    /// The number of passages that were found; `None` if Search was unavailable.
    pub search_results: Option<i64>,
    pub search_ms: Option<f64>,
    /// Its place in the chain; `None` before it is written.
    pub seq: Option<i64>,
    pub gateway: String,
    /// The reason why it was refused or failed, as one word.
    pub cause: Option<String>,
}

impl LedgerRow {
    /// The first line of a CSV file of rows.
    pub fn csv_heading() -> String {
        csv_line_with_time(columns().map(String::from).collect(), "created_utc".into())
    }

    pub fn csv_line(&self) -> String {
        csv_line_with_time(
            cells(self, columns()),
            when::iso(self.created).unwrap_or_default(),
        )
    }
}

fn columns() -> impl Iterator<Item = &'static str> {
    COLUMNS.split(',').map(str::trim)
}

/// A line of the CSV: the columns of the ledger and, beside the Unix time, a time that a
/// spreadsheet understands.
fn csv_line_with_time(mut cells: Vec<String>, time: String) -> String {
    let created = columns()
        .position(|name| name == "created")
        .expect("a row has its time");
    cells.insert(created + 1, time);
    csv_line(&cells)
}

macro_rules! columns {
    () => {
        "request_id, key_id, key_name, created, status, error_code, prompt_tokens,
         completion_tokens, total_tokens, duration_ms, queue_ms, runtime_ms, grounded,
         search_reason, search_results, search_ms, seq, gateway, cause"
    };
}
pub const COLUMNS: &str = columns!();

/// Inserts a row: [`COLUMNS`] and its hash.
pub(super) const INSERT: &str = concat!(
    "INSERT INTO usage (",
    columns!(),
    ", hash) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20)"
);

impl LedgerRow {
    /// The parameters of [`INSERT`], for a place in the chain.
    pub(super) fn values(&self, seq: i64, hash: [u8; 32]) -> Vec<SqlValue> {
        values![
            &self.request_id,
            &self.key_id,
            &self.key_name,
            self.created,
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
            &self.gateway,
            self.cause.as_deref(),
            hash,
        ]
        .into()
    }
}

/// Reads [`COLUMNS`].
pub(super) fn read_row(mut row: Row) -> Result<LedgerRow> {
    Ok(LedgerRow {
        request_id: row.column()?,
        key_id: row.column()?,
        key_name: row.column()?,
        created: row.column()?,
        status: row.column()?,
        error_code: row.column()?,
        tokens: Tokens {
            prompt_tokens: row.column()?,
            completion_tokens: row.column()?,
            total_tokens: row.column()?,
        },
        duration_ms: row.column()?,
        queue_ms: row.column()?,
        runtime_ms: row.column()?,
        grounded: row.column()?,
        search_reason: row.column()?,
        search_results: row.column()?,
        search_ms: row.column()?,
        seq: row.column()?,
        gateway: row.column()?,
        cause: row.column()?,
    })
}
