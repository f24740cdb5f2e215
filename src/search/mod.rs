//! Search: passages that an answer can be grounded in. They come from a SearXNG instance, or from
//! the embedded index of the operator's own documents, for a host without a network.

pub mod cleaning;
pub mod documents;
mod html;
mod index;
mod markdown;
mod outline;
mod passages;
mod query;
mod ranking;
mod results;
mod searxng;

pub use self::index::{Added, Document, Index};
pub use self::results::{Passage, SearchError};
use self::searxng::SearXng;
use crate::client::Cancellation;
use crate::config::{SearchBackend, SearchConfig};

pub enum Search {
    SearXng(Box<SearXng>),
    Index(Index),
}

impl Search {
    /// Returns `None` if Search is not configured.
    pub fn new(config: &SearchConfig, worker_share: usize) -> Option<Self> {
        Some(match config.backend.as_ref()? {
            SearchBackend::SearXng(url) => {
                Self::SearXng(Box::new(SearXng::new(url, config, worker_share)))
            }
            SearchBackend::Index => Self::Index(Index::new(config)),
        })
    }

    /// Returns the passages that fit the words, the best first. The words come from a person or a
    /// model: nothing in them is syntax.
    pub fn find(
        &self,
        words: &str,
        cancellation: &Cancellation,
    ) -> Result<Vec<Passage>, SearchError> {
        match self {
            Self::SearXng(instance) => instance.find(words, cancellation),
            // A query of the index is too short to be cancelled.
            Self::Index(index) => index.find(words),
        }
    }
}
