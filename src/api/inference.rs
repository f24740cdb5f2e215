//! Asks the runtime, and says what its failures mean to a client.

use crate::error::{ApiError, Failure};
use crate::runtime::{Chat, Generated, RuntimeError, Runtimes, Spent};

/// Fails if no runtime is configured.
pub fn configured(runtimes: Option<&Runtimes>) -> Result<&Runtimes, Failure> {
    runtimes.ok_or_else(|| {
        Failure::unavailable(
            "The inference service is not configured. Tell the operator of this service.",
            "no runtime is configured: set runtime.url",
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
            Ok(generated) => return Ok(Generated { tokens: spent.tokens.unwrap_or_default(), ..generated }),
            Err((_, RuntimeError::ContextExceeded(_))) if shorten(chat) => {}
            Err(failure) => return Err(failure.into()),
        }
    }
}

impl From<(String, RuntimeError)> for Failure {
    fn from((url, error): (String, RuntimeError)) -> Self {
        let message = match error {
            RuntimeError::ContextExceeded(figures) => return too_long(figures),
            RuntimeError::Unreachable(_) => "The inference service can't be reached. Try again later.",
            RuntimeError::TimedOut => {
                "The inference service did not answer in time. Try again, or ask for fewer tokens."
            }
            RuntimeError::Cancelled => "The client has gone.",
            RuntimeError::Broken(_) => "The connection to the inference service broke off. Try again.",
            RuntimeError::Status(_) => "The inference service reported an error. Try again later.",
            RuntimeError::Unreadable(_) => "The inference service gave no usable answer. Try again later.",
        };
        Self {
            cause: Some(format!("runtime {url}: {error}")),
            ..Self::new(ApiError::InferenceError, message)
        }
    }
}

fn too_long(figures: Option<(u64, u64)>) -> Failure {
    let measured = match figures {
        Some((sent, most)) => format!(": {sent} tokens, but at most {most} fit"),
        None => String::new(),
    };
    Failure::invalid(format!(
        "messages: together they are longer than the model's context{measured}. Send fewer or shorter ones."
    ))
}
