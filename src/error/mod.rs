//! The errors of the API: the table of part 7 of the specification, closed, and the details of a
//! failure.

mod cause;
mod problem;

use std::borrow::Cow;

pub use cause::FailureCause;
pub use problem::{Problem, ProblemKind};

/// One row of the table: an error that a client can recognize.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApiError {
    InvalidRequest,
    InvalidApiKey,
    InsufficientPermission,
    NotFound,
    PayloadTooLarge,
    InferenceError,
    SearchUnavailable,
    ServiceUnavailable,
}

impl ApiError {
    /// In the order of the table, which is that of the variants.
    pub const ALL: [Self; 8] = [
        Self::InvalidRequest,
        Self::InvalidApiKey,
        Self::InsufficientPermission,
        Self::NotFound,
        Self::PayloadTooLarge,
        Self::InferenceError,
        Self::SearchUnavailable,
        Self::ServiceUnavailable,
    ];

    pub fn code(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request",
            Self::InvalidApiKey => "invalid_api_key",
            Self::InsufficientPermission => "insufficient_permission",
            Self::NotFound => "not_found",
            Self::PayloadTooLarge => "payload_too_large",
            Self::InferenceError => "inference_error",
            Self::SearchUnavailable => "search_unavailable",
            Self::ServiceUnavailable => "service_unavailable",
        }
    }

    pub fn status(self) -> u16 {
        match self {
            Self::InvalidRequest => 400,
            Self::InvalidApiKey => 401,
            Self::InsufficientPermission => 403,
            Self::NotFound => 404,
            Self::PayloadTooLarge => 413,
            Self::InferenceError => 502,
            Self::SearchUnavailable | Self::ServiceUnavailable => 503,
        }
    }
}

/// A request that got no completion: the message for the client, the word for the log and the
/// ledger, and the details for the operator.
#[derive(Debug)]
pub struct Failure {
    pub error: ApiError,
    /// For the client: what happened and what to do next. It may name a number, a length or a
    /// member.
    pub message: Cow<'static, str>,
    pub cause: FailureCause,
    /// For the operator, in a log line of its own: what happened and what to do, with nothing in it
    /// that a client wrote.
    pub details: Option<String>,
    /// For the log: the key of a 401, if it is known.
    pub key_id: Option<String>,
    /// Clients should not retry automatically: a retry would cost another inference, or query a
    /// Search that is down.
    pub no_retry: bool,
}

impl Failure {
    pub fn new(
        error: ApiError,
        cause: FailureCause,
        message: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self {
            error,
            message: message.into(),
            cause,
            details: None,
            key_id: None,
            no_retry: false,
        }
    }

    pub fn invalid(cause: FailureCause, message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ApiError::InvalidRequest, cause, message)
    }

    pub fn unavailable(
        cause: FailureCause,
        message: impl Into<Cow<'static, str>>,
        details: Option<String>,
    ) -> Self {
        Self {
            details,
            ..Self::new(ApiError::ServiceUnavailable, cause, message)
        }
    }

    /// The 503 for a request that is shed under overload, or a connection that is rejected. The
    /// body was not parsed.
    pub fn overloaded(cause: FailureCause) -> Self {
        let message = "The service has more requests than it can take. Try again shortly.";
        Self::unavailable(cause, message, None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_whole_and_in_the_order_of_the_variants() {
        assert!(
            ApiError::ALL
                .iter()
                .enumerate()
                .all(|(place, &error)| error as usize == place)
        );
        assert_eq!(
            ApiError::ServiceUnavailable as usize + 1,
            ApiError::ALL.len(),
            "the last variant"
        );
    }
}
