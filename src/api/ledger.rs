//! What a client gets if its request's row can't be written.

use crate::error::Failure;
use crate::store::StoreError;

/// The open row could not be inserted. The runtime was not asked.
pub fn not_opened(error: &StoreError) -> Failure {
    Failure::unavailable(
        error.cause(),
        "Usage can't be recorded at the moment, so the request was not run. Try again later.",
        error.details("ledger, before the call"),
    )
}

/// The outcome of a completion could not be made durable, so it is not sent. An automatic retry would only spend another
/// inference.
pub fn not_kept(error: &StoreError) -> Failure {
    Failure {
        no_retry: true,
        ..Failure::unavailable(
            error.cause(),
            "The usage of this completion could not be recorded, so it was not sent. Try again later.",
            error.details("ledger, after the call"),
        )
    }
}
