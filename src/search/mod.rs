//! Search: passages that an answer can be grounded in. They come from a SearXNG instance, or from the embedded index of the
//! operator's own documents, for a host without a network.

pub mod cleaning;
pub mod documents;
mod html;
mod index;
mod markdown;
pub mod passages;
mod query;
mod ranking;
mod searxng;

use std::fmt;

pub use index::{Added, Document, Index};
use searxng::SearXng;
use serde::Serialize;

use crate::client::Cancellation;
use crate::config::{SearchBackend, SearchConfig};
use crate::error::FailureCause;

/// The most characters that a query has.
const MAX_QUERY: usize = 256;

pub trait Search: Send + Sync {
    /// Returns the passages that fit the words, the best first. The words come from a person or a model: nothing in them
    /// is syntax. Queries that wait are served round robin by `key`, the id of the request's key, or empty without one.
    fn find(
        &self,
        words: &str,
        key: &str,
        cancellation: &Cancellation,
    ) -> Result<Vec<Passage>, SearchError>;
}

/// A piece of a text that others wrote. It may contain anything.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Passage {
    pub title: String,
    /// An address, or a document's name.
    pub source: String,
    pub text: String,
}

/// The reason why Search is unavailable, for the operator. It contains nothing of the query, nor of an answer, which may repeat
/// the query.
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

/// Returns the configured Search; `None` if it is not configured.
pub fn configured(
    config: &SearchConfig,
    workers: usize,
    worker_share: usize,
) -> Option<Box<dyn Search>> {
    Some(match config.backend.as_ref()? {
        SearchBackend::SearXng(url) => Box::new(SearXng::new(url, config, workers, worker_share)),
        SearchBackend::Index => Box::new(Index::new(config)),
    })
}
