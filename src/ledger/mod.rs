//! The ledger: one row for every request with a valid key. A row, its place in the chain and its
//! part of the sums are one transaction (append.rs), which it shares with the rows that wait at the
//! same time (writer.rs).

pub mod append;
mod days;
mod gateways;
pub mod listing;
mod queue;
pub mod report;
mod retention;
mod verify;
mod writer;

use serde::Serialize;
use sha2::{Digest, Sha256};

pub use append::Ledger;
pub use days::{Filter, Span, SpanSums, Sums};
pub use gateways::{CLOCK_SLACK, Gateway};
pub use listing::{CODES, Listing, Matching, RowFilter};
pub use report::{Grouping, Groups, UsageRow};
pub use retention::{RetentionState, retention_held};
pub use verify::{ChainHead, HeadStatus, UnprovenDays, Verification, check_newest, verify};
pub use writer::Writer;

use crate::database::{Row, Schema, Value, values};
use crate::error::Result;

/// The tables of the ledger, the keys, the audit and the console's sessions.
pub const SCHEMA: Schema = Schema {
    tables: include_str!("schema.sql"),
    version: 11,
    // None was released yet.
    steps: &[],
};

/// A query for the number of rows of a ledger, of any version.
pub const ROWS: &str = "SELECT count(*) FROM usage";

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

/// A request as the ledger has it.
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
    /// `always` or `match`; `None` if there was no search.
    pub search_reason: Option<String>,
    /// The number of passages that were found; `None` if Search was unavailable.
    pub search_results: Option<i64>,
    pub search_ms: Option<f64>,
    /// Its place in the chain; `None` before it is written.
    pub seq: Option<i64>,
    pub gateway: String,
    /// The reason why it was refused or failed, as one word.
    pub cause: Option<String>,
    /// The calendar date of `created`, in the database's time zone.
    pub day: String,
}

impl LedgerRow {
    /// The names of its fields, in the order in which they are stored.
    pub fn fields() -> impl Iterator<Item = &'static str> {
        COLUMNS.split(", ").filter(|column| *column != "hash")
    }
}

/// Columns in the order in which they are stored, read and hashed. One that is a field of a field
/// names that one too. The hash is the last column.
macro_rules! columns {
    ($($column:ident $(@ $within:ident)?),+) => {
        const COLUMNS: &str = concat!($(stringify!($column), ", ",)+ "hash");

        impl LedgerRow {
            /// The values of all columns but the hash.
            fn values(&self) -> Vec<Value> {
                values![$(self$(.$within)?.$column),+].into()
            }

            /// Reads [`COLUMNS`]; the hash is left.
            fn read(mut row: Row) -> Result<Self> {
                let mut found = Self::default();
                $(found$(.$within)?.$column = row.column()?;)+
                Ok(found)
            }
        }
    };
}

columns!(
    request_id, key_id, key_name, created, status, error_code, prompt_tokens @ tokens,
    completion_tokens @ tokens, total_tokens @ tokens, duration_ms, queue_ms, runtime_ms, grounded,
    search_reason, search_results, search_ms, seq, gateway, cause, day
);

/// A place in a chain.
///
/// Each row has a hash over its content and its predecessor's hash, so a row that was changed,
/// removed or inserted breaks the chain at its place. Anyone who may write the database could
/// compute a new chain. A head that an operator has noted elsewhere, as `usage verify` prints it, is
/// not part of such a chain.
#[derive(Clone, Copy)]
struct ChainLink {
    pub seq: i64,
    pub hash: [u8; 32],
}

impl ChainLink {
    pub fn read(mut row: Row) -> Result<Self> {
        Ok(Self {
            seq: row.column()?,
            hash: row.column()?,
        })
    }

    /// Gives a row the place that follows. Returns the values of [`COLUMNS`] and that place.
    pub fn append(&self, row: &LedgerRow) -> (Vec<Value>, Self) {
        let seq = self.seq + 1;
        let placed = LedgerRow {
            seq: Some(seq),
            ..row.clone()
        };
        let mut values = placed.values();
        let link = self.following(&values);
        values.push(Value::Blob(link.hash.into()));
        (values, link)
    }

    /// The place that follows, for a row with these values. Each has its length, so that no two
    /// rows have the same bytes.
    pub fn following(&self, values: &[Value]) -> Self {
        let mut hasher = Sha256::new_with_prefix(self.hash);
        let mut add = |bytes: Option<&[u8]>| {
            let length = bytes.map_or(u64::MAX, |bytes| bytes.len() as u64);
            hasher.update(length.to_le_bytes());
            hasher.update(bytes.unwrap_or_default());
        };
        for value in values {
            match value {
                Value::Null => add(None),
                Value::Integer(number) => add(Some(&number.to_le_bytes())),
                Value::Real(number) => add(Some(&number.to_le_bytes())),
                Value::Text(text) => add(Some(text.as_bytes())),
                Value::Blob(bytes) => add(Some(bytes)),
            }
        }
        Self {
            seq: self.seq + 1,
            hash: hasher.finalize().into(),
        }
    }
}
