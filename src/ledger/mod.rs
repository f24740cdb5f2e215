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
mod row;
mod verify;
mod writer;

pub use append::Ledger;
pub use days::{Filter, Span, SpanSums, Sums};
pub use gateways::{CLOCK_SLACK, Gateway};
pub use listing::{CODES, Listing, Matching, RowFilter};
pub use report::{Grouping, Groups, UsageRow};
pub use retention::{RetentionState, retention_held};
pub use row::{LedgerRow, Tokens};
pub use verify::{ChainHead, HeadStatus, UnprovenDays, Verification, check_newest, verify};
pub use writer::Writer;

use crate::database::Schema;

/// The tables of the ledger, the keys, the audit and the console's sessions.
pub const SCHEMA: Schema = Schema {
    tables: include_str!("schema.sql"),
    version: 11,
    // None was released yet.
    steps: &[],
};

/// A query for the number of rows of a ledger, of any version.
pub const ROWS: &str = "SELECT count(*) FROM usage";
