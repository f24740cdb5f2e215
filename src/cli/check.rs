//! `check`: prints the results of the checks, with an exit code for scripts.

use super::shared::{advice_if_denied, become_owner, note, print, print_json};
use crate::checks::{self, Finding, Verdict};
use crate::config::Config;
use crate::database::{Problem, Result};
use crate::text::count;

/// Test every part that a completion needs
///
/// It names what fails and how to fix it: configuration, hosts, clock, database, Search, runtime.
/// It warns about secrets in files that every user can read, about an address that other hosts can
/// reach, about keys that have expired or expire within ten days, about budgets that miss
/// completions, about retention that removes nothing, and about an index of documents that nothing
/// uses. It leaves no row in the ledger. Run by root, it tests as the owner of the folder of a
/// SQLite database, the service's user.
#[derive(clap::Args)]
pub(super) struct CheckOptions {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(&CheckOptions { json }: &CheckOptions, config: Result<Config>) -> Result<()> {
    if json && let Err(error) = &config {
        print_json(&[Finding::fail("configuration", error.to_string())])?;
    }
    let config = config?;
    if let Some(owner) = become_owner(&config.database)? {
        note(format_args!(
            "Testing as {owner}, the owner of the database's folder."
        ));
    }
    let findings = checks::check_all(&config);
    if json {
        print_json(&findings)?;
    } else {
        print(&findings.iter().map(line).collect::<String>())?;
    }
    let failed: Vec<&Finding> = findings
        .iter()
        .filter(|finding| finding.status == Verdict::Fail)
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
        Verdict::Ok => "ok",
        Verdict::Warn => "warn",
        Verdict::Fail => "FAIL",
    };
    format!("{word:<4}  {:<13}  {}\n", finding.part, finding.message)
}
