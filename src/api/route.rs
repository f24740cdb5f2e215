//! The API has one operation.

use crate::error::{ApiError, Failure, FailureCause};
use crate::http::Head;

pub fn check(head: &Head) -> Result<(), Failure> {
    if head.method() == "POST" && head.path() == "/v1/chat/completions" {
        return Ok(());
    }
    Err(Failure::new(
        ApiError::NotFound,
        FailureCause::Route,
        "There is nothing here. The API has one operation: POST /v1/chat/completions.",
    ))
}
