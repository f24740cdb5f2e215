//! The host and the route: the API has one operation.

use crate::error::{ApiError, Failure, FailureCause};
use crate::http::RequestHead;

pub fn check_host(head: &RequestHead, api_hosts: &[String]) -> Result<(), Failure> {
    if api_hosts
        .iter()
        .any(|host| host.eq_ignore_ascii_case(head.host()))
    {
        return Ok(());
    }
    let message = "The API is not served on this host. Check the base address that you were given.";
    Err(Failure::new(
        ApiError::NotFound,
        FailureCause::Host,
        message,
    ))
}

pub fn check_route(head: &RequestHead) -> Result<(), Failure> {
    if head.method() == "POST" && head.path() == "/v1/chat/completions" {
        return Ok(());
    }
    let message = "Not found. The API has one operation: POST /v1/chat/completions.";
    Err(Failure::new(
        ApiError::NotFound,
        FailureCause::Route,
        message,
    ))
}
