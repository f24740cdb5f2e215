//! Decides whether an answer has to be grounded, and asks Search. If Search is needed and unavailable, there is no
//! answer: the model would make one up.

mod decision;
mod quotation;

use std::time::Instant;

use regex_lite::Regex;

pub use quotation::Quotation;

use self::decision::SearchDecision;
use crate::config::{GroundingMode, SearchConfig};
use crate::error::{ApiError, Failure};
use crate::runtime::{Chat, Role, Runtimes, Spent};
use crate::search::{self, Search};
use crate::store::Searched;
use crate::when::milliseconds;

/// Everything that grounding uses. There is none if grounding is off.
pub struct Grounding {
    search: Box<dyn Search>,
    mode: GroundingMode,
    patterns: Vec<Regex>,
}

impl Grounding {
    pub fn new(config: &SearchConfig, workers: usize, worker_share: usize) -> Option<Self> {
        if config.grounding == GroundingMode::Off {
            return None;
        }
        let search = search::configured(config, workers, worker_share)?;
        Some(Self {
            search,
            mode: config.grounding,
            patterns: config.patterns.clone(),
        })
    }

    /// Asks Search if the conversation needs it, and adds the passages to the conversation. `searched` gets the figures
    /// for the ledger, after a failure too.
    pub fn ground(
        &self,
        key_id: &str,
        runtimes: &Runtimes,
        chat: &mut Chat,
        spent: &mut Spent,
        searched: &mut Option<Searched>,
    ) -> Result<Option<Quotation>, Failure> {
        let Some((reason, words)) = self.need(runtimes, chat, spent)? else {
            return Ok(None);
        };
        let asked = Instant::now();
        let found = self.search.find(&words, key_id, &spent.cancellation);
        *searched = Some(Searched {
            reason,
            results: found.as_ref().ok().map(|passages| passages.len() as i64),
            time_ms: milliseconds(asked.elapsed()),
        });
        match found {
            Ok(passages) => Ok(Some(Quotation::put(passages, chat))),
            Err(error) => Err(Failure {
                details: Some(format!("search: {error}")),
                no_retry: true,
                ..Failure::new(
                    ApiError::SearchUnavailable,
                    error.cause,
                    "This answer needs Search, which is unavailable. Try again later.",
                )
            }),
        }
    }

    /// Returns why Search is needed, in the ledger's words, and the query, or `None` if it is not needed.
    fn need(
        &self,
        runtimes: &Runtimes,
        chat: &Chat,
        spent: &mut Spent,
    ) -> Result<Option<(&'static str, String)>, Failure> {
        let Some(asked) = chat
            .messages
            .iter()
            .rfind(|message| message.role == Role::User)
        else {
            return Ok(None);
        };
        let words = asked.content.to_string();
        Ok(match self.mode {
            GroundingMode::Always => Some(("always", words)),
            _ if self.patterns.iter().any(|pattern| pattern.is_match(&words)) => {
                Some(("match", words))
            }
            GroundingMode::Off | GroundingMode::Match => None,
            GroundingMode::Auto => match decision::ask(runtimes, chat, spent)? {
                SearchDecision::NotNeeded => None,
                SearchDecision::Query(query) => Some(("model", query)),
                SearchDecision::OwnWords => Some(("model", words)),
            },
        })
    }
}
