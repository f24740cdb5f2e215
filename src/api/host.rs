//! The API is served on its own hosts and on no other.

use crate::error::{ApiError, Failure, FailureCause};
use crate::http::RequestHead;

pub fn check(head: &RequestHead, api_hosts: &[String]) -> Result<(), Failure> {
    if api_hosts.iter().any(|host| host.eq_ignore_ascii_case(head.host())) {
        return Ok(());
    }
    Err(Failure::new(
        ApiError::NotFound,
        FailureCause::Host,
        "The API is not served on this host. Check the base address that you were given.",
    ))
}
