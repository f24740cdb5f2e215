//! The size of the body.

use crate::error::{ApiError, Failure, FailureCause};
use crate::http::{Framing, MAX_BODY, Request, RequestHead};

pub fn check_declared_size(head: &RequestHead) -> Result<(), Failure> {
    match head.framing {
        Framing::Length(length) if length > MAX_BODY as u64 => Err(too_large()),
        _ => Ok(()),
    }
}

/// Returns the body, if it is not too large.
pub fn check_size(request: &Request) -> Result<&[u8], Failure> {
    request.body.as_deref().ok_or_else(too_large)
}

fn too_large() -> Failure {
    let message = format!(
        "The request body is larger than {MAX_BODY} bytes. Send fewer or shorter messages."
    );
    Failure::new(ApiError::PayloadTooLarge, FailureCause::TooLarge, message)
}
