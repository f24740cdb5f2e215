//! Search: passages that an answer can be grounded in. They come from a SearXNG instance, or from
//! the index of a folder with the operator's own documents, for a host without a network.

pub mod cleaning;
pub mod documents;
mod folder;
mod index;
mod searxng;

use std::fmt;
use std::sync::Arc;

use serde::Serialize;

use self::folder::Folder;
use self::searxng::SearXng;
use crate::client::Cancellation;
use crate::config::{SearchBackend, SearchConfig};
use crate::error::{FailureCause, Problem};

/// The most characters of a query.
const MAX_QUERY: usize = 256;

pub enum Search {
    SearXng(Box<SearXng>),
    Folder(Arc<Folder>),
}

impl Search {
    /// Returns `None` if Search is not configured.
    pub fn new(config: &SearchConfig, worker_share: usize) -> Option<Self> {
        Some(match config.backend.as_ref()? {
            SearchBackend::SearXng(url) => {
                Self::SearXng(Box::new(SearXng::new(url, config, worker_share)))
            }
            SearchBackend::Folder(path) => Self::Folder(Arc::new(Folder::new(path, config))),
        })
    }

    /// Returns the passages that fit the words, the best first. The words come from a person:
    /// nothing in them is syntax.
    pub fn find(
        &self,
        words: &str,
        cancellation: &Cancellation,
    ) -> Result<Vec<Passage>, SearchError> {
        match self {
            Self::SearXng(instance) => instance.find(words, cancellation),
            // A query of the index is too short to be cancelled.
            Self::Folder(folder) => folder.find(words),
        }
    }

    /// Brings the index of a folder up to date, on a thread of its own.
    pub fn refresh(&self) {
        if let Self::Folder(folder) = self {
            folder.refresh();
        }
    }

    /// The reason why the index of a folder is not up to date.
    pub fn trouble(&self) -> Option<String> {
        match self {
            Self::SearXng(_) => None,
            Self::Folder(folder) => folder.trouble(),
        }
    }
}

/// A piece of a text that others wrote. It may contain anything.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Passage {
    pub title: String,
    /// An address, or a document's path below the folder.
    pub source: String,
    pub text: String,
}

/// The reason why Search is unavailable, for the operator. It contains nothing of the query, nor of
/// an answer, which may repeat the query.
#[derive(Debug, PartialEq, Eq)]
pub struct SearchError {
    pub cause: FailureCause,
    details: String,
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
