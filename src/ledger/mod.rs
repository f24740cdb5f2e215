//! The ledger: one row for every request with a valid key. A row, its place in the chain and its
//! part of the sums are one transaction (append.rs), which it shares with the rows that wait at the
//! same time (group_commit.rs).

pub mod append;
mod availability;
mod chain;
mod division;
mod fault;
mod gateways;
mod group_commit;
mod grouping;
pub mod listing;
pub mod report;
mod retention;
mod rollup;
mod row;
mod schema;
mod serve_lock;
mod sums;
mod sums_check;
mod test_write;
mod thread_primitives;
mod verify;

pub use append::Ledger;
pub use chain::ChainHead;
pub use fault::Fault;
pub use gateways::{CLOCK_SLACK, Gateway};
pub use grouping::Grouping;
pub use listing::{Listing, Matching, RowFilter, SEARCHED_ROWS};
pub use report::UsageRow;
pub use retention::RetentionState;
pub use rollup::Span;
pub use row::{LedgerRow, Tokens};
pub use schema::SCHEMA;
pub use serve_lock::ServeLock;
pub use sums::{Filter, RollupRow, Sums};
pub use sums_check::UnprovenSums;
pub use verify::{HeadStatus, Verification, verify};

/// A query for the number of rows of a ledger, of any version.
pub const ROWS: &str = "SELECT count(*) FROM usage";
