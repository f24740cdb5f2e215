//! `search`: shows what Search finds.

use super::shared::print;
use super::shared::print_json;
use crate::client::Cancellation;
use crate::config::Config;
use crate::database::{Problem, ProblemKind, Result};
use crate::search::{Passage, Search};

/// Ask Search, as grounding does
#[derive(clap::Subcommand)]
pub(super) enum SearchCommand {
    /// Show the passages that Search finds
    Query {
        /// The words to look for
        #[arg(required = true)]
        words: Vec<String>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

impl SearchCommand {
    pub fn run(self, config: &Config) -> Result<()> {
        let Self::Query { words, json } = self;
        let search = Search::new(&config.search, config.worker_share()).ok_or_else(|| {
            let text = "search.url is not set: set it to folder:PATH or to the address of a SearXNG instance";
            Problem::new(ProblemKind::Setting, text)
        })?;
        let found = search.find(&words.join(" "), &Cancellation::default())?;
        if json {
            return print_json(&found);
        }
        if found.is_empty() {
            eprintln!("Nothing found.");
        }
        let numbered = (1..).zip(&found).map(|(number, passage)| {
            let Passage {
                title,
                source,
                text,
            } = passage;
            format!("[{number}] {title} ({source})\n{text}\n")
        });
        print(&numbered.collect::<Vec<_>>().join("\n"))
    }
}
