//! What a client gets if its request's row can't be written.

use crate::error::{ApiError, Failure};
use crate::store::StoreError;

/// The open row could not be inserted. The runtime was not asked.
pub fn not_opened(error: &StoreError) -> Failure {
    Failure {
        cause: error.for_log("ledger, before the call"),
        ..Failure::new(
            ApiError::ServiceUnavailable,
            "Usage can't be recorded at the moment, so the request was not run. Try again later.",
        )
    }
}

/// The outcome of a completion could not be made durable, so it is not sent. An automatic retry would only spend another
/// inference.
pub fn not_kept(error: &StoreError) -> Failure {
    Failure {
        no_retry: true,
        cause: error.for_log("ledger, after the call"),
        ..Failure::new(
            ApiError::ServiceUnavailable,
            "The usage of this completion could not be recorded, so it was not sent. Try again later.",
        )
    }
}
