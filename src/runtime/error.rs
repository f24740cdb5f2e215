//! The failure of a call to a runtime: its message for the client, its cause for the ledger, and
//! its diagnosis for the operator.

use std::{fmt, io};

use crate::client::CallError;
use crate::error::{ApiError, Failure, FailureCause};

/// The reason why there is no answer. It contains nothing that the runtime sent, because that may
/// repeat the prompt.
#[derive(Debug)]
pub enum RuntimeError {
    /// There is no answer, or not a whole one.
    Call(CallError),
    Status(u16),
    /// It answered with this status that it does not have the model.
    UnknownModel(u16),
    /// It answered 200, and not with JSON of the expected form.
    NotJson,
    /// It answered 200, and without a choice or without text.
    NoText,
    /// The prompt does not fit: how many tokens it has and how many fit, if the runtime says so.
    ContextExceeded(Option<(u64, u64)>),
}

impl RuntimeError {
    /// Returns true if another runtime may be tried: nothing was sent, or the runtime is loading,
    /// stopping or busy.
    pub(super) fn is_refusal(&self) -> bool {
        matches!(
            self,
            Self::Call(CallError::Unreachable(_)) | Self::Status(429 | 503)
        )
    }

    /// Returns true if no inference can have been spent: nothing was sent, or it was refused.
    pub(super) fn cost_nothing(&self) -> bool {
        self.is_refusal()
            || matches!(
                self,
                Self::ContextExceeded(_) | Self::UnknownModel(_) | Self::Status(400..500)
            )
    }

    pub fn cause(&self) -> FailureCause {
        match self {
            Self::Call(error) => error.cause(),
            Self::Status(status) | Self::UnknownModel(status) => FailureCause::Status(*status),
            Self::NotJson => FailureCause::NotJson,
            Self::NoText => FailureCause::NoText,
            Self::ContextExceeded(_) => FailureCause::Context,
        }
    }

    /// The message for the operator, the same in `check`, on the status page and in the log: the
    /// error and what to look at.
    pub fn diagnosis(&self) -> String {
        let advice = match self {
            // The connector's own errors are those of TLS.
            Self::Call(CallError::Unreachable(error)) if error.kind() == io::ErrorKind::Other => {
                "Check that it serves HTTPS, with a certificate of a CA in runtime.ca, or without that setting, of the system"
            }
            Self::Call(CallError::Unreachable(_)) => {
                "Check that it runs, and that runtime.url is its address"
            }
            Self::Call(CallError::TimedOut(_)) => {
                "If it hangs, read its log; if it needs more time, raise runtime.timeout"
            }
            Self::Call(CallError::TooLarge) => "Raise buffer_limit, or configure fewer workers",
            Self::Status(401 | 403) => "It refuses the key: check runtime.api_key",
            Self::Status(300..=399 | 404) | Self::NotJson | Self::NoText => {
                "Check runtime.url: it is the base address of an OpenAI-compatible API and ends in /v1"
            }
            Self::Status(503) => "It is loading its model, or is busy: wait, or read its log",
            Self::Status(429) => "It is busy: wait, or configure fewer workers",
            Self::UnknownModel(_) => "Set runtime.model to a model that it has",
            Self::ContextExceeded(_) => "Start it with a larger context",
            Self::Status(_) | Self::Call(CallError::Cancelled | CallError::Broken(_)) => {
                "Read its log"
            }
        };
        format!("{self}. {advice}")
    }
}

impl fmt::Display for RuntimeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Call(error) => error.fmt(f),
            Self::Status(status) => write!(f, "it answered with HTTP status {status}"),
            Self::UnknownModel(status) => {
                write!(f, "it does not have the model (HTTP status {status})")
            }
            Self::NotJson => {
                f.write_str("its answer is not a completion: it is not JSON of the expected form")
            }
            Self::NoText => f.write_str("its answer is not a completion: it has no text"),
            Self::ContextExceeded(_) => f.write_str("the prompt is longer than its context"),
        }
    }
}

/// The failure of a request whose call to the runtime at this address failed.
impl From<(String, RuntimeError)> for Failure {
    fn from((url, error): (String, RuntimeError)) -> Self {
        let message = match error {
            RuntimeError::ContextExceeded(figures) => return too_long(figures),
            RuntimeError::Call(CallError::Unreachable(_)) => {
                "The inference service can't be reached. Try again later."
            }
            RuntimeError::Call(CallError::TimedOut(_)) => {
                "The inference service did not answer in time. Try again later, or ask for fewer tokens."
            }
            RuntimeError::Call(CallError::Cancelled) => "The client has gone.",
            RuntimeError::Call(CallError::Broken(_)) => {
                "The connection to the inference service broke off. Try again."
            }
            RuntimeError::Status(_) | RuntimeError::UnknownModel(_) => {
                "The inference service reported an error. Try again later."
            }
            RuntimeError::Call(CallError::TooLarge)
            | RuntimeError::NotJson
            | RuntimeError::NoText => {
                "The inference service gave no usable answer. Try again later."
            }
        };
        Self {
            details: Some(format!("runtime {url}: {error}")),
            // A client that retries by itself would make three inferences of one slow call.
            no_retry: matches!(error, RuntimeError::Call(CallError::TimedOut(_))),
            ..Self::new(ApiError::InferenceError, error.cause(), message)
        }
    }
}

fn too_long(figures: Option<(u64, u64)>) -> Failure {
    let in_figures = |(sent, most)| format!(": {sent} tokens, but at most {most} fit");
    let message = format!(
        "messages: together they are longer than the model's context{}. Send fewer or shorter ones.",
        figures.map_or(String::new(), in_figures)
    );
    Failure::invalid(FailureCause::Context, message)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn refusals_cost_nothing() {
        let unreachable =
            || RuntimeError::Call(CallError::Unreachable(std::io::ErrorKind::Other.into()));
        for (error, is_refusal, cost_nothing) in [
            (unreachable(), true, true),
            (RuntimeError::Status(503), true, true),
            (RuntimeError::Status(429), true, true),
            (RuntimeError::Status(400), false, true),
            (RuntimeError::ContextExceeded(None), false, true),
            (RuntimeError::Status(500), false, false),
            (RuntimeError::Status(502), false, false),
            (
                RuntimeError::Call(CallError::TimedOut(Duration::ZERO)),
                false,
                false,
            ),
            (RuntimeError::UnknownModel(404), false, true),
            (
                RuntimeError::Call(CallError::Broken(String::new())),
                false,
                false,
            ),
            (RuntimeError::NotJson, false, false),
        ] {
            assert_eq!(
                (error.is_refusal(), error.cost_nothing()),
                (is_refusal, cost_nothing),
                "{error:?}"
            );
        }
    }

    #[test]
    fn a_diagnosis_names_the_setting() {
        let unreachable =
            |kind: io::ErrorKind| RuntimeError::Call(CallError::Unreachable(kind.into()));
        let late = || RuntimeError::Call(CallError::TimedOut(Duration::from_secs(120)));
        for (error, parts) in [
            (
                RuntimeError::Status(401),
                ["HTTP status 401", "runtime.api_key"],
            ),
            (
                RuntimeError::Status(403),
                ["HTTP status 403", "runtime.api_key"],
            ),
            (
                RuntimeError::Status(404),
                ["HTTP status 404", "runtime.url"],
            ),
            (
                RuntimeError::Status(308),
                ["HTTP status 308", "runtime.url"],
            ),
            (
                RuntimeError::Status(503),
                ["HTTP status 503", "loading its model"],
            ),
            (
                RuntimeError::Status(500),
                ["HTTP status 500", "Read its log"],
            ),
            (
                RuntimeError::UnknownModel(404),
                ["does not have the model", "Set runtime.model"],
            ),
            (RuntimeError::NotJson, ["not a completion", "runtime.url"]),
            (late(), ["no complete answer in 120.0 s", "runtime.timeout"]),
            (
                unreachable(io::ErrorKind::ConnectionRefused),
                ["no connection", "runtime.url"],
            ),
            (
                unreachable(io::ErrorKind::Other),
                ["no connection", "runtime.ca"],
            ),
        ] {
            let diagnosis = error.diagnosis();
            assert!(
                parts.iter().all(|part| diagnosis.contains(part)),
                "{diagnosis}"
            );
        }
    }
}
