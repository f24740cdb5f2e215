//! A body has at most 256 KB.

use crate::error::{ApiError, Failure};
use crate::http::{MAX_BODY, Request};

/// The body, where it is not too large.
pub fn check(request: &Request) -> Result<&[u8], Failure> {
    request.body.as_deref().ok_or_else(|| {
        Failure::new(
            ApiError::PayloadTooLarge,
            format!("The request body is larger than {MAX_BODY} bytes. Send fewer or shorter messages."),
        )
    })
}
