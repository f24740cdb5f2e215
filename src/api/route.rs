//! The API has one operation.

use crate::error::{ApiError, Failure, FailureCause};
use crate::http::RequestHead;

pub fn check(head: &RequestHead) -> Result<(), Failure> {
    if head.method() == "POST" && head.path() == "/v1/chat/completions" {
        return Ok(());
    }
    Err(Failure::new(
        ApiError::NotFound,
        FailureCause::Route,
        "There is nothing here. The API has one operation: POST /v1/chat/completions.",
    ))
}
