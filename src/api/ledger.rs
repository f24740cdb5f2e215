//! The request's row in the ledger: made before an inference is spent, completed before its answer is sent. What a client
//! is told where one of the two fails.

use crate::error::Failure;
use crate::store::StoreError;

/// What a request turns into when its row could not be made. The runtime was not asked.
pub fn not_opened(error: &StoreError) -> Failure {
    Failure::unavailable(
        "Usage can't be recorded at the moment, so the request was not run. Try again later.",
        format!("ledger, before the call: {error}"),
    )
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
