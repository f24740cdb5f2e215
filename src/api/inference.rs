//! Asks the runtime, and says what its failures mean to a client.

use crate::client::CallError;
use crate::error::{ApiError, Failure, FailureCause};
use crate::runtime::{Chat, Generated, RuntimeError, Runtimes, Spent};

pub fn configured(runtimes: Option<&Runtimes>) -> Result<&Runtimes, Failure> {
    runtimes.ok_or_else(|| {
        Failure::unavailable(
            FailureCause::NoRuntime,
            "The inference service is not configured. Contact the operator of this service.",
            Some("no runtime is configured: set runtime.url".into()),
        )
    })
}

/// Runs the completion. If the prompt is too long for the runtime, shortens it and retries until `shorten` has
/// nothing left to remove. The token figures are the sums over all calls of the request.
pub fn run(
    runtimes: &Runtimes,
    chat: &mut Chat,
    mut shorten: impl FnMut(&mut Chat) -> bool,
    spent: &mut Spent,
) -> Result<Generated, Failure> {
    loop {
        match runtimes.complete(chat, None, spent) {
            Ok(generated) => {
                return Ok(Generated {
                    tokens: spent.tokens.unwrap_or_default(),
                    ..generated
                });
            }
            Err((_, RuntimeError::ContextExceeded(_))) if shorten(chat) => {}
            Err(failure) => return Err(failure.into()),
        }
    }
}

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
