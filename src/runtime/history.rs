//! The last calls of a runtime, for the status page.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Duration;

use super::{Generated, RuntimeError};
use crate::client::CallError;
use crate::mutex::lock;
use crate::when;

/// The number of answers in the median.
const KEPT: usize = 100;

#[derive(Default)]
pub(super) struct History(Mutex<Calls>);

#[derive(Default)]
struct Calls {
    answer_times: VecDeque<Duration>,
    last_error: Option<(i64, String)>,
    is_failing: bool,
}

/// The status of a runtime.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RuntimeStatus {
    pub url: String,
    pub in_progress: usize,
    /// A connection could not be made lately, so others are asked first.
    pub is_unreachable: bool,
    /// The last call failed.
    pub is_failing: bool,
    /// The median of its last answers, at most 100 of them; `None` if there were none since the start.
    pub median: Option<Duration>,
    /// When a call last failed since the start, in Unix seconds, and why.
    pub last_error: Option<(i64, String)>,
}

impl History {
    /// A prompt that is too long, or a client that has gone, says nothing about the runtime.
    pub fn note(&self, time: Duration, result: &Result<Generated, RuntimeError>) {
        let mut calls = lock(&self.0);
        match result {
            Ok(_) => {
                calls.answer_times.truncate(KEPT - 1);
                calls.answer_times.push_front(time);
                calls.is_failing = false;
            }
            Err(RuntimeError::Call(CallError::Cancelled) | RuntimeError::ContextExceeded(_)) => {}
            Err(error) => {
                calls.last_error = Some((when::now(), error.to_string()));
                calls.is_failing = true;
            }
        }
    }

    pub fn status(&self) -> RuntimeStatus {
        let calls = lock(&self.0);
        let mut times: Vec<Duration> = calls.answer_times.iter().copied().collect();
        times.sort();
        RuntimeStatus {
            is_failing: calls.is_failing,
            median: times.get(times.len() / 2).copied(),
            last_error: calls.last_error.clone(),
            ..RuntimeStatus::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Tokens;

    #[test]
    fn the_median_of_the_last_answers_and_the_last_error() {
        let history = History::default();
        assert_eq!(history.status(), RuntimeStatus::default());
        let answer = || Ok(Generated { content: "x".into(), finish_reason: None, tokens: Tokens::default() });
        for number in 0..300 {
            history.note(Duration::from_millis(number), &answer());
        }
        assert_eq!(history.status().median, Some(Duration::from_millis(250)));
        history.note(Duration::from_secs(9), &Err(RuntimeError::Status(500)));
        for no_fault in [RuntimeError::Call(CallError::Cancelled), RuntimeError::ContextExceeded(None)] {
            history.note(Duration::ZERO, &Err(no_fault));
        }
        let status = history.status();
        assert!(status.is_failing && status.median == Some(Duration::from_millis(250)), "{status:?}");
        assert_eq!(status.last_error.expect("an error").1, "it answered with HTTP status 500");
        history.note(Duration::ZERO, &answer());
        assert!(
            !history.status().is_failing && history.status().last_error.is_some(),
            "the error stays to be seen"
        );
    }
}
