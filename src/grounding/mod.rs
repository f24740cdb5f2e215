//! Decides whether an answer has to be grounded, and asks Search. If Search is needed and
//! unavailable, there is no answer: the model would make one up.

mod quotation;

use std::sync::Mutex;
use std::time::Instant;

use regex_lite::Regex;

pub use quotation::Quotation;

use crate::config::{GroundingMode, SearchConfig};
use crate::error::{ApiError, Failure};
use crate::ledger::LedgerRow;
use crate::mutex::lock;
use crate::runtime::{Chat, RequestCost, Role};
use crate::search::Search;
use crate::when::milliseconds;

pub struct Grounding {
    search: Search,
    mode: GroundingMode,
    patterns: Vec<Regex>,
    /// The reason why the last search failed; `None` if it was answered.
    last_failure: Mutex<Option<String>>,
}

impl Grounding {
    /// Returns `None` if no answer is grounded.
    pub fn new(config: &SearchConfig, worker_share: usize) -> Option<Self> {
        if config.grounding == GroundingMode::Off {
            return None;
        }
        let search = Search::new(config, worker_share)?;
        Some(Self {
            search,
            mode: config.grounding,
            patterns: config.patterns.clone(),
            last_failure: Mutex::default(),
        })
    }

    /// Asks Search if the conversation needs it, and adds the passages to the conversation. The row
    /// gets the figures of the search, even if it fails.
    pub fn ground(
        &self,
        chat: &mut Chat,
        cost: &mut RequestCost,
        row: &mut LedgerRow,
    ) -> Result<Option<Quotation>, Failure> {
        let Some((reason, query)) = self.query(chat) else {
            return Ok(None);
        };
        let started = Instant::now();
        let found = self.search.find(&query, &cost.cancellation);
        row.search_ms = Some(milliseconds(started.elapsed()));
        row.search_reason = Some(reason.to_owned());
        if !cost.cancellation.is_cancelled() {
            *lock(&self.last_failure) = found.as_ref().err().map(ToString::to_string);
        }
        let passages = found.map_err(|error| Failure {
            details: Some(format!("search: {error}")),
            no_retry: true,
            ..Failure::new(
                ApiError::SearchUnavailable,
                error.cause,
                "This answer needs Search, which is unavailable. Try again later.",
            )
        })?;
        row.search_results = Some(passages.len() as i64);
        Ok(Some(Quotation::insert(passages, chat)))
    }

    /// The reason why the last search failed.
    pub fn last_failure(&self) -> Option<String> {
        lock(&self.last_failure).clone()
    }

    /// The reason why the index of a folder is not up to date.
    pub fn index_trouble(&self) -> Option<String> {
        self.search.trouble()
    }

    /// Brings the index of a folder up to date.
    pub fn refresh(&self) {
        self.search.refresh();
    }

    /// Returns why Search is needed, in the ledger's words, and the query. Returns `None` if it is
    /// not needed.
    fn query(&self, chat: &Chat) -> Option<(&'static str, String)> {
        let mut messages = chat.messages.iter();
        let question = messages.rfind(|message| message.role == Role::User)?;
        let text = question.content.to_string();
        match self.mode {
            GroundingMode::Always => Some(("always", text)),
            GroundingMode::Match => {
                let is_needed = self.patterns.iter().any(|pattern| pattern.is_match(&text));
                is_needed.then_some(("match", text))
            }
            GroundingMode::Off => None,
        }
    }
}
