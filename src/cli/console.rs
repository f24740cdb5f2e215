//! `console password` and `audit`: the operator's password, and who changed what.

use std::io::{self, IsTerminal};

use super::shared::{note, open_store, open_to_change, print, print_json, read_secret, time_or};
use crate::audit::Actor;
use crate::config::Config;
use crate::console::password;
use crate::database::{Access, Problem, Result};
use crate::report::rows;
use crate::when::{self, Range, When};

/// Set the console's password
#[derive(clap::Subcommand)]
pub(super) enum ConsoleCommand {
    /// Set the console's password, and end all of its sessions
    ///
    /// The password is asked for twice on the terminal, without an echo. If standard input is not a
    /// terminal, its first line is the password. It has at least 12 characters.
    Password,
}

pub(super) fn set_password(config: &Config, by: &Actor) -> Result<()> {
    let store = open_to_change(config, Access::Create, by)?;
    let text = read_secret("New password for the console: ")?;
    password::check(&text).map_err(Problem::other)?;
    if io::stdin().is_terminal() && read_secret("Repeat it: ")? != text {
        return Err(Problem::other(
            "the two passwords differ. Nothing was changed",
        ));
    }
    password::set(&store, password::hash(&text), by)?;
    let database = config.database_name();
    note(format!(
        "The password is set in {database}. All console sessions have ended: sign in again."
    ));
    Ok(())
}

/// Show who changed what: keys, password, settings, sign-ins
///
/// The oldest change is first: keys created, changed, rotated and revoked, passwords set, sign-ins to the
/// console, settings reloaded and backups restored, with the address of the browser or the user of
/// the system. If sudo ran the command, the user is SUDO_USER "as" the user that it ran as. Failed
/// sign-ins are in the log.
#[derive(clap::Args)]
pub(super) struct AuditOptions {
    /// Only changes since then: 24h, 7d, a date, a time, or a time of today, as for usage
    #[arg(long, value_name = "WHEN", value_parser = time_or(""))]
    since: Option<When>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn audit(options: &AuditOptions, config: &Config) -> Result<()> {
    let store = open_store(config)?;
    let Range { since, .. } =
        Range::between(options.since, None, when::now(), &store.zone).map_err(Problem::usage)?;
    let mut rows = Vec::new();
    store.audit.list(since, |row| rows.push(row))?;
    if options.json {
        return print_json(&rows);
    }
    print(&rows::audit(&rows, &store.zone).to_text("time,action,via,by,key,details"))
}
