//! The request's row in the ledger: made before an inference is spent, completed before its answer is sent.

use std::sync::Arc;

use crate::error::Failure;
use crate::store::{NewRow, Store, StoreError};

/// Makes the row. Where that fails, the runtime must not be asked.
pub fn open(store: &Store, row: Arc<NewRow>) -> Result<(), Failure> {
    store.open_row(row).map_err(|error| {
        Failure::unavailable(
            "Usage can't be recorded at the moment, so the request was not run. Try again later.",
            format!("ledger, before the call: {error}"),
        )
    })
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
