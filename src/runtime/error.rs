//! The failure of a call to a runtime, and everything that is said about it.

use std::borrow::Cow;
use std::io;

use crate::client::CallError;
use crate::error::{ApiError, Failure, FailureCause};
use crate::ledger::Tokens;

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
    /// It answered 200, without a choice or without text, and measured these tokens.
    NoText(Tokens),
    /// The prompt does not fit: how many tokens it has and how many fit, if the runtime says so.
    ContextExceeded(Option<(u64, u64)>),
}

/// Messages for clients that several errors have.
const REPORTED: &str = "The inference service reported an error. Try again later.";
const UNUSABLE: &str = "The inference service gave no usable answer. Try again later.";

const CHECK_URL: &str =
    "Check runtime.url: it is the base address of an OpenAI-compatible API and ends in /v1";

impl RuntimeError {
    /// The table of what is said about each error: its cause, for the ledger and the log; what
    /// happened and what to look at, for the operator; and the message for the client.
    fn words(
        &self,
    ) -> (
        FailureCause,
        Cow<'static, str>,
        &'static str,
        Cow<'static, str>,
    ) {
        let (cause, what, advice, message): (_, Cow<str>, _, &str) = match self {
            Self::Call(error) => {
                let (advice, message) = match error {
                    // The client's own errors are those of TLS.
                    CallError::Unreachable(error) if error.kind() == io::ErrorKind::Other => (
                        "Check that it serves HTTPS, with a certificate of a CA in runtime.ca, or without that setting, of the system",
                        "The inference service can't be reached. Try again later.",
                    ),
                    CallError::Unreachable(_) => (
                        "Check that it runs, and that runtime.url is its address",
                        "The inference service can't be reached. Try again later.",
                    ),
                    CallError::TimedOut(_) => (
                        "If it hangs, read its log; if it needs more time, raise runtime.timeout",
                        "The inference service did not answer in time. Try again later, or ask for fewer tokens.",
                    ),
                    CallError::Cancelled => ("Read its log", "The client has gone."),
                    CallError::TooLarge => {
                        ("Raise buffer_limit, or configure fewer workers", UNUSABLE)
                    }
                    CallError::Broken(_) => (
                        "Read its log",
                        "The connection to the inference service broke off. Try again.",
                    ),
                };
                (error.cause(), error.to_string().into(), advice, message)
            }
            Self::Status(status) => {
                let advice = match status {
                    401 | 403 => "It refuses the key: check runtime.api_key",
                    300..=399 | 404 => CHECK_URL,
                    503 => "It is loading its model, or is busy: wait, or read its log",
                    429 => "It is busy: wait, or configure fewer workers",
                    _ => "Read its log",
                };
                let what = format!("it answered with HTTP status {status}");
                (FailureCause::Status(*status), what.into(), advice, REPORTED)
            }
            Self::UnknownModel(status) => (
                FailureCause::Status(*status),
                format!("it does not have the model (HTTP status {status})").into(),
                "Set runtime.model to a model that it has",
                REPORTED,
            ),
            Self::NotJson => (
                FailureCause::NotJson,
                "its answer is not a completion: it is not JSON of the expected form".into(),
                CHECK_URL,
                UNUSABLE,
            ),
            Self::NoText(_) => (
                FailureCause::NoText,
                "its answer is not a completion: it has no text".into(),
                CHECK_URL,
                UNUSABLE,
            ),
            Self::ContextExceeded(figures) => {
                let in_figures = |(sent, most)| format!(": {sent} tokens, but at most {most} fit");
                let message = format!(
                    "messages: together they are longer than the model's context{}. Send fewer or shorter ones.",
                    figures.map_or(String::new(), in_figures)
                );
                return (
                    FailureCause::Context,
                    "the prompt is longer than its context".into(),
                    "Start it with a larger context",
                    message.into(),
                );
            }
        };
        (cause, what, advice, message.into())
    }

    pub fn cause(&self) -> FailureCause {
        self.words().0
    }

    /// The message for the operator, the same in `check`, on the status page and in the log: the
    /// error and what to look at.
    pub fn diagnosis(&self) -> String {
        let (_, what, advice, _) = self.words();
        format!("{what}. {advice}")
    }

    /// Returns true if another runtime may be tried: nothing was sent, or the runtime is loading,
    /// stopping or busy.
    pub(super) fn is_refusal(&self) -> bool {
        matches!(
            self,
            Self::Call(CallError::Unreachable(_)) | Self::Status(429 | 503)
        )
    }

    /// Returns true if it says nothing about the runtime: it has refused this conversation, or the
    /// client has gone.
    pub(super) fn is_about_request(&self) -> bool {
        matches!(
            self,
            Self::Status(400 | 413 | 422)
                | Self::ContextExceeded(_)
                | Self::Call(CallError::Cancelled)
        )
    }

    /// The tokens that the call has cost; `None` if no inference can have been spent: nothing was
    /// sent, or it was refused.
    pub(super) fn cost(&self) -> Option<Tokens> {
        match self {
            Self::NoText(tokens) => Some(*tokens),
            Self::ContextExceeded(_) | Self::UnknownModel(_) | Self::Status(400..500) => None,
            error if error.is_refusal() => None,
            // It may have cost tokens, but no figure was received.
            _ => Some(Tokens::default()),
        }
    }
}

/// The failure of a request whose call to the runtime at this address failed.
impl From<(String, RuntimeError)> for Failure {
    fn from((url, error): (String, RuntimeError)) -> Self {
        let (cause, what, _, message) = error.words();
        if let RuntimeError::ContextExceeded(_) = error {
            return Self::invalid(cause, message);
        }
        Self {
            details: Some(format!("runtime {url}: {what}")),
            // A client that retries by itself would make three inferences of one slow call, or of
            // one that has no text.
            no_retry: matches!(
                error,
                RuntimeError::Call(CallError::TimedOut(_)) | RuntimeError::NoText(_)
            ),
            ..Self::new(ApiError::InferenceError, cause, message)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn unreachable(kind: io::ErrorKind) -> RuntimeError {
        RuntimeError::Call(CallError::Unreachable(kind.into()))
    }

    #[test]
    fn refusals_cost_nothing() {
        let measured = Tokens {
            total_tokens: Some(9),
            ..Tokens::default()
        };
        let unknown = Some(Tokens::default());
        for (error, is_refusal, cost) in [
            (unreachable(io::ErrorKind::Other), true, None),
            (RuntimeError::Status(503), true, None),
            (RuntimeError::Status(429), true, None),
            (RuntimeError::Status(400), false, None),
            (RuntimeError::ContextExceeded(None), false, None),
            (RuntimeError::Status(500), false, unknown),
            (RuntimeError::Status(502), false, unknown),
            (
                RuntimeError::Call(CallError::TimedOut(Duration::ZERO)),
                false,
                unknown,
            ),
            (RuntimeError::UnknownModel(404), false, None),
            (
                RuntimeError::Call(CallError::Broken(String::new())),
                false,
                unknown,
            ),
            (RuntimeError::NotJson, false, unknown),
            (RuntimeError::NoText(measured), false, Some(measured)),
        ] {
            let found = (error.is_refusal(), error.cost());
            assert_eq!(found, (is_refusal, cost), "{error:?}");
        }
    }

    #[test]
    fn clients_do_not_repeat_what_would_cost_another_inference() {
        for (error, no_retry) in [
            (
                RuntimeError::Call(CallError::TimedOut(Duration::ZERO)),
                true,
            ),
            (RuntimeError::NoText(Tokens::default()), true),
            (RuntimeError::Status(503), false),
            (RuntimeError::NotJson, false),
        ] {
            let failure = Failure::from(("http://a/v1".to_owned(), error));
            assert_eq!(failure.no_retry, no_retry, "{failure:?}");
        }
    }

    #[test]
    fn a_diagnosis_names_the_setting() {
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
