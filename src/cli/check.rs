//! `check` and `search query`: test the parts that a completion needs, and show what Search finds.

use super::shared::{advice_if_denied, become_owner, note, print, print_json};
use crate::checks;
use crate::client::Cancellation;
use crate::config::Config;
use crate::error::{Problem, ProblemKind, Result};
use crate::health::{Finding, Status};
use crate::search::{Passage, Search};
use crate::text::count;

/// Test every part that a completion needs
///
/// It names what fails and how to fix it: configuration, certificate, clock, database, Search,
/// runtime. Each takes 15 s at most, and is printed as it ends. It warns about secrets in files that
/// every user can read, about an address that other hosts can reach, about keys that have expired or
/// expire within ten days, about budgets that miss completions, and about retention that removes
/// nothing. If the service runs, its own verdict is the last line. It leaves no row in the ledger.
/// Run by root, it tests as the owner of the folder of a SQLite database, the service's user.
#[derive(clap::Args)]
pub(super) struct CheckOptions {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Read every page of a SQLite database as well, which may take minutes
    #[arg(long)]
    database: bool,
}

pub(super) fn run(options: &CheckOptions, config: Result<Config>) -> Result<()> {
    let &CheckOptions { json, database } = options;
    if json && let Err(error) = &config {
        print_json(&[Finding::fail("configuration", error.to_string())])?;
    }
    let config = config?;
    if let Some(owner) = become_owner(&config.database)? {
        note(format_args!(
            "Testing as {owner}, the owner of the database's folder."
        ));
    }
    let (mut findings, mut printed) = (Vec::new(), Ok(()));
    checks::check_all(&config, database, |finding| {
        if !json && printed.is_ok() {
            printed = print(&line(&finding));
        }
        findings.push(finding);
    });
    printed?;
    if json {
        print_json(&findings)?;
    }
    let failed: Vec<&Finding> = findings
        .iter()
        .filter(|finding| finding.status == Status::Fail)
        .collect();
    let denied = |finding: &&Finding| advice_if_denied(&finding.message);
    if let Some(advice) = failed.iter().find_map(denied) {
        note(format_args!("{advice}"));
    }
    match failed.len() {
        0 => Ok(()),
        parts => Err(Problem::other(format!(
            "{} failed",
            count(parts as i64, "part")
        ))),
    }
}

fn line(finding: &Finding) -> String {
    let word = match finding.status {
        Status::Ok => "ok",
        Status::Warn => "warn",
        Status::Fail => "FAIL",
    };
    format!("{word:<4}  {:<13}  {}\n", finding.part, finding.message)
}

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
