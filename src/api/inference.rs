//! Asks the runtime for the completion.

use crate::error::{Failure, FailureCause};
use crate::runtime::{Chat, Generated, RequestCost, RuntimeError, Runtimes};

pub fn configured(runtimes: Option<&Runtimes>) -> Result<&Runtimes, Failure> {
    runtimes.ok_or_else(|| {
        Failure::unavailable(
            FailureCause::NoRuntime,
            "The inference service is not configured. Contact the operator of this service.",
            Some("no runtime is configured: set runtime.url".into()),
        )
    })
}

/// Runs the completion. If the prompt is too long for the runtime, shortens it and retries until
/// `shorten` has nothing left to remove.
pub fn run(
    runtimes: &Runtimes,
    chat: &mut Chat,
    mut shorten: impl FnMut(&mut Chat) -> bool,
    cost: &mut RequestCost,
) -> Result<Generated, Failure> {
    loop {
        match runtimes.complete(chat, None, cost) {
            Err((_, RuntimeError::ContextExceeded(_))) if shorten(chat) => {}
            result => return result.map_err(Failure::from),
        }
    }
}
