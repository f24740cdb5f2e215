//! A body has at most 256 KB.

use crate::error::{ApiError, Failure, FailureCause};
use crate::http::body::Framing;
use crate::http::{MAX_BODY, Request, RequestHead};

/// Refuses a body whose declared length is too large.
pub fn check_declared(head: &RequestHead) -> Result<(), Failure> {
    match head.framing {
        Framing::Length(length) if length > MAX_BODY as u64 => Err(too_large()),
        Framing::Length(_) | Framing::Chunked => Ok(()),
    }
}

/// The body, if it is not too large.
pub fn check(request: &Request) -> Result<&[u8], Failure> {
    request.body.as_deref().ok_or_else(too_large)
}

fn too_large() -> Failure {
    Failure::new(
        ApiError::PayloadTooLarge,
        FailureCause::TooLarge,
        format!("The request body is larger than {MAX_BODY} bytes. Send fewer or shorter messages."),
    )
}
