//! Whether an answer has to rest on Search, and what Search found for it. Where it has to and Search is
//! unavailable, there is no answer: the model is never left to make one up.

mod decision;
mod quoted;

use std::time::Instant;

use regex_lite::Regex;

pub use quoted::Quoted;

use crate::config::{GroundingMode, SearchConfig};
use crate::error::{ApiError, Failure};
use crate::runtime::{Chat, Role, Runtimes, Spent};
use crate::search::{self, Search};
use crate::store::Searched;
use crate::when::milliseconds;

/// Everything that grounding uses; with grounding off, there is none.
pub struct Grounding {
    search: Box<dyn Search>,
    mode: GroundingMode,
    patterns: Vec<Regex>,
}

impl Grounding {
    pub fn new(config: &SearchConfig, workers: usize) -> Option<Self> {
        if config.grounding == GroundingMode::Off {
            return None;
        }
        let search = search::configured(config, workers)?;
        Some(Self { search, mode: config.grounding, patterns: config.patterns.clone() })
    }

    /// Asks Search where the conversation needs it, and puts what was found into the conversation. `searched`
    /// gets what is to be kept of it, whatever comes of it.
    pub fn ground(
        &self,
        runtimes: &Runtimes,
        chat: &mut Chat,
        spent: &mut Spent,
        searched: &mut Option<Searched>,
    ) -> Result<Option<Quoted>, Failure> {
        let Some((reason, words)) = self.need(runtimes, chat, spent)? else {
            return Ok(None);
        };
        let asked = Instant::now();
        let found = self.search.find(&words, &spent.cancellation);
        *searched = Some(Searched {
            reason,
            results: found.as_ref().ok().map(|passages| passages.len() as i64),
            time_ms: milliseconds(asked.elapsed()),
        });
        match found {
            Ok(passages) => Ok(Some(Quoted::put(passages, chat))),
            Err(error) => Err(Failure {
                cause: Some(format!("search: {error}")),
                no_retry: true,
                ..Failure::new(
                    ApiError::SearchUnavailable,
                    "This answer needs Search, and Search is out of reach. Try again later.",
                )
            }),
        }
    }

    /// Why Search is needed, as the ledger has it, and what it is to be asked. Returns `None` if it is not needed.
    fn need(
        &self,
        runtimes: &Runtimes,
        chat: &Chat,
        spent: &mut Spent,
    ) -> Result<Option<(&'static str, String)>, Failure> {
        let Some(asked) = chat.messages.iter().rfind(|message| message.role == Role::User) else {
            return Ok(None);
        };
        let words = &asked.content;
        if self.mode == GroundingMode::Always {
            return Ok(Some(("always", words.to_string())));
        }
        if self.patterns.iter().any(|pattern| pattern.is_match(words)) {
            return Ok(Some(("match", words.to_string())));
        }
        if self.mode == GroundingMode::Match {
            return Ok(None);
        }
        let query = decision::ask(runtimes, chat, spent)?;
        Ok(query.map(|query| ("model", query.unwrap_or_else(|| words.to_string()))))
    }
}
