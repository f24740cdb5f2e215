//! What Search returns: passages, or the reason why it is unavailable.

use std::fmt;

use serde::Serialize;

use crate::error::{FailureCause, Problem};

/// A piece of a text that others wrote. It may contain anything.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Passage {
    pub title: String,
    /// An address, or a document's name.
    pub source: String,
    pub text: String,
}

/// The reason why Search is unavailable, for the operator. It contains nothing of the query, nor of
/// an answer, which may repeat the query.
#[derive(Debug, PartialEq, Eq)]
pub struct SearchError {
    pub cause: FailureCause,
    pub(super) details: String,
}

impl SearchError {
    pub fn new(cause: FailureCause, details: impl Into<String>) -> Self {
        Self {
            cause,
            details: details.into(),
        }
    }
}

impl fmt::Display for SearchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.details)
    }
}

impl From<SearchError> for Problem {
    fn from(error: SearchError) -> Self {
        Self::other(error.details)
    }
}
