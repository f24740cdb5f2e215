//! The request's row in the ledger: made before an inference is spent, completed before its answer is sent.

use crate::error::Failure;
use crate::store::{NewRow, Outcome, Store, StoreError};

/// Makes the row. Where that fails, the runtime must not be asked.
pub fn open(store: &Store, row: NewRow) -> Result<(), Failure> {
    store.open_row(row).map_err(|error| {
        Failure::unavailable(
            "Usage can't be recorded at the moment, so the request was not run. Try again later.",
            format!("ledger, before the call: {error}"),
        )
    })
}

/// Writes the outcome: into the row that is open, or as a row of its own where none was opened.
pub fn settle(store: &Store, is_open: bool, row: NewRow, outcome: Outcome) -> Result<(), StoreError> {
    if is_open { store.close_row(row, outcome) } else { store.add_row(row, outcome) }
}

/// What a completion turns into when its usage could not be kept. It must not be handed out, and a client
/// that tries again by itself would only spend another inference.
pub fn not_kept(error: &StoreError) -> Failure {
    Failure {
        no_retry: true,
        ..Failure::unavailable(
            "The usage of this completion could not be recorded, so it can't be handed out. Try again later.",
            format!("ledger, after the call: {error}"),
        )
    }
}
