//! `check`: prints the results of the checks, with an exit code for scripts.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::{self, Command};

use super::{CliError, DENIED, print, print_json};
use crate::checks::{self, Finding, Verdict};
use crate::config::{Config, ConfigError, KEY_FILE};
use crate::files;
use crate::text::count;

/// Test every part that a completion needs
///
/// It names what fails and how to fix it: configuration, hosts, clock, database, Search, runtime. It warns about secrets in files
/// that every user can read, about an address that other hosts can reach, about keys that have expired or expire within ten days,
/// about budgets that miss completions, about retention that removes nothing, and about an index of documents that nothing uses. It
/// leaves no row in the ledger. Run by root, it tests as the user who owns the folder of a SQLite database.
#[derive(clap::Args)]
pub(super) struct Options {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(&Options { json }: &Options, config: Result<Config, ConfigError>) -> Result<(), CliError> {
    if json && let Err(error) = &config {
        print_json(&[Finding::fail("configuration", error.to_string())])?;
    }
    let config = config?;
    let not_as_owner = check_as_owner(&config, json);
    let mut findings = checks::check_all(&config);
    findings.extend(not_as_owner);
    if json {
        print_json(&findings)?;
    } else {
        print(&findings.iter().map(line).collect::<String>())?;
    }
    let failed: Vec<&Finding> = findings.iter().filter(|finding| finding.status == Verdict::Fail).collect();
    let reason = if failed.iter().any(|finding| finding.message.contains(DENIED)) { DENIED } else { "" };
    match failed.len() {
        0 => Ok(()),
        number => Err(CliError::Failed(
            format!("{} failed. {reason}", count(number as i64, "part")).trim_end().into(),
        )),
    }
}

/// Runs the check again as the service's user, the owner of the folder with the database, and ends with its exit code: root
/// can open every file. Returns a finding if that is not possible. With PostgreSQL no folder reveals the service's user.
fn check_as_owner(config: &Config, json: bool) -> Option<Finding> {
    let folder = files::folder(config.database.file()?);
    let owner = fs::metadata(folder).ok()?;
    if !rustix::process::geteuid().is_root() || owner.uid() == 0 {
        return None;
    }
    let (user, folder) = (owner.uid(), folder.display());
    eprintln!("Checking as user {user}, who owns {folder}.");
    let mut command = Command::new("/proc/self/exe");
    command.arg("check").args(json.then_some("--json")).uid(user).gid(owner.gid());
    if let Some(file) = &config.file {
        command.arg("--config").arg(file);
        // Only root may be able to read the service's own key file, which systemd passes to the service.
        if let Some(key) = config
            .runtime
            .api_key
            .as_ref()
            .filter(|_| config.secret_files.contains(&file.with_file_name(KEY_FILE)))
        {
            command
                .env("ADRIATICUM_RUNTIME_API_KEY", key.expose())
                .env("ADRIATICUM_RUNTIME_API_KEY_FILE", "");
        }
    }
    match command.status() {
        Ok(status) => process::exit(status.code().unwrap_or(1)),
        Err(error) => Some(Finding::warn(
            "user",
            format!(
                "checked as root, not as user {user}, who owns {folder}: {error}. Run the command as that user"
            ),
        )),
    }
}

fn line(Finding { part, status, message, .. }: &Finding) -> String {
    let word = match status {
        Verdict::Ok => "ok",
        Verdict::Warn => "warn",
        Verdict::Fail => "FAIL",
    };
    format!("{word:<4}  {part:<13}  {message}\n")
}
