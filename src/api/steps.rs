//! The short steps: host, route, size, permission, budget, and the failures of the ledger.

use crate::database::DatabaseError;
use crate::error::{ApiError, Failure, FailureCause};
use crate::http::body::Framing;
use crate::http::{MAX_BODY, Request, RequestHead};
use crate::keys::{Budget, KeyBudget, Permission};
use crate::text::grouped;
use crate::when;

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

/// Refuses everything but the one operation of the API.
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

pub fn check_declared_size(head: &RequestHead) -> Result<(), Failure> {
    let is_too_large = matches!(head.framing, Framing::Length(length) if length > MAX_BODY as u64);
    if is_too_large {
        Err(too_large())
    } else {
        Ok(())
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

pub fn check_permission(permissions: &[Permission]) -> Result<(), Failure> {
    if permissions.contains(&Permission::Completions) {
        return Ok(());
    }
    let message = "This API key may not run completions. Use one that has the permission.";
    Err(Failure::new(
        ApiError::InsufficientPermission,
        FailureCause::Permission,
        message,
    ))
}

/// Refuses a key that has used its budget for the period in which the request was created.
pub fn check_budget(budget: Option<KeyBudget>, created: i64) -> Result<(), Failure> {
    let Some(KeyBudget {
        budget: Budget { tokens, per },
        used,
    }) = budget.filter(KeyBudget::is_used_up)
    else {
        return Ok(());
    };
    let message = format!(
        "This API key has used its budget: {} of {} tokens per {}. It is renewed at {}. If you need more \
         before then, ask the operator of this service to raise it.",
        grouped(used),
        grouped(tokens),
        per.as_str(),
        when::format_minute(Some(per.around(created).until)),
    );
    let failure = Failure::new(
        ApiError::InsufficientPermission,
        FailureCause::Budget,
        message,
    );
    Err(Failure {
        no_retry: true,
        ..failure
    })
}

/// The failure while the ledger is unavailable. The runtime is not called.
pub fn ledger_unavailable(error: &DatabaseError) -> Failure {
    Failure::unavailable(
        error.cause(),
        "Usage can't be recorded at the moment, so the request was not run. Try again later.",
        error.details("ledger, before the call"),
    )
}

/// The failure if the row of a completion could not be written, so it is not sent. An automatic retry would only spend
/// another inference.
pub fn row_not_written(error: &DatabaseError) -> Failure {
    Failure {
        no_retry: true,
        ..Failure::unavailable(
            error.cause(),
            "The usage of this completion could not be recorded, so it was not sent. Try again later.",
            error.details("ledger, after the call"),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_used_budget_is_refused_with_the_time_of_its_renewal() {
        let budget = |text, used| {
            Some(KeyBudget {
                budget: Budget::parse(text).expect("a budget"),
                used,
            })
        };
        // 2001-12-31, in the last second.
        let created = 1_009_843_199;
        for good in [None, budget("1000/day", 999)] {
            assert!(check_budget(good, created).is_ok());
        }
        for (text, used, part) in [
            (
                "1000/day",
                1000,
                "1,000 of 1,000 tokens per day. It is renewed at 2002-01-01 00:00Z.",
            ),
            (
                "1000000/month",
                1_000_250,
                "1,000,250 of 1,000,000 tokens per month. It is renewed at 2002-01-01 00:00Z.",
            ),
        ] {
            let failure = check_budget(budget(text, used), created).expect_err("it is used up");
            assert!(failure.message.contains(part), "{}", failure.message);
            assert!(
                !failure.message.contains("another key"),
                "{}",
                failure.message
            );
            assert_eq!(
                (failure.error.status(), failure.cause, failure.no_retry),
                (403, FailureCause::Budget, true)
            );
        }
    }
}
