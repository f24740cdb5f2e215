//! `check`: prints the results of the checks, with an exit code for scripts.

use super::error::CliError;
use super::output::{print, print_json};
use super::sudo::with_sudo;
use crate::checks::{self, Finding, Verdict};
use crate::config::{Config, ConfigError};
use crate::text::count;

/// Test every part that a completion needs
///
/// It names what fails and how to fix it: configuration, hosts, clock, database, Search, runtime.
/// It warns about secrets in files that every user can read, about an address that other hosts can
/// reach, about keys that have expired or expire within ten days, about budgets that miss
/// completions, about retention that removes nothing, and about an index of documents that nothing
/// uses. It leaves no row in the ledger. It also names files that the service's user, the owner of
/// the folder of a SQLite database, can't read and write, with the command that corrects them. Run
/// by root, it prints the command line that tests as that user.
#[derive(clap::Args)]
pub(super) struct CheckOptions {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(
    &CheckOptions { json }: &CheckOptions,
    config: Result<Config, ConfigError>,
) -> Result<(), CliError> {
    if json && let Err(error) = &config {
        print_json(&[Finding::fail("configuration", error.to_string())])?;
    }
    let config = config?;
    let findings = checks::check_all(&config);
    if json {
        print_json(&findings)?;
    } else {
        print(&findings.iter().map(line).collect::<String>())?;
    }
    if let Some(user) = checks::user_for_sudo(&config) {
        eprintln!(
            "Checked as root, who can open every file. As the service's user: {}",
            with_sudo(&format!("-u {user} "))
        );
    }
    let failed: Vec<&Finding> = findings
        .iter()
        .filter(|finding| finding.status == Verdict::Fail)
        .collect();
    if failed.is_empty() {
        return Ok(());
    }
    let message = format!("{} failed.", count(failed.len() as i64, "part"));
    Err(CliError {
        is_denied: failed.iter().any(|finding| finding.is_denied),
        ..CliError::failed(message)
    })
}

fn line(finding: &Finding) -> String {
    let word = match finding.status {
        Verdict::Ok => "ok",
        Verdict::Warn => "warn",
        Verdict::Fail => "FAIL",
    };
    format!("{word:<4}  {:<13}  {}\n", finding.part, finding.message)
}
