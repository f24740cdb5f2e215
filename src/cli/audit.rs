//! `audit`: who changed what.

use super::shared::{open_store, parse_when, print, print_json};
use crate::config::Config;
use crate::database::{Problem, Result};
use crate::report::rows;
use crate::when::{self, Range, When};

/// Show who changed what: keys, password, settings, sign-ins
///
/// The oldest change is first: keys created, changed, rotated and revoked, passwords set, sign-ins to the
/// console, settings reloaded and backups restored, with the address of the browser or the user of
/// the system. If sudo ran the command, the user is SUDO_USER "as" the user that it ran as. Failed
/// sign-ins are in the log.
#[derive(clap::Args)]
pub(super) struct AuditOptions {
    /// Only changes since then: 24h, 7d, a date, a time, or a time of today, as for usage
    #[arg(long, value_name = "WHEN", value_parser = parse_when)]
    since: Option<When>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(options: &AuditOptions, config: &Config) -> Result<()> {
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
