//! `audit`: who changed what.

use std::{env, fs};

use rustix::process::geteuid;

use super::{CliError, open_to_read, parse_when, print, print_json, text_table};
use crate::config::Config;
use crate::store::{Actor, AuditRow, KeyName};
use crate::when::{self, When};

/// Show who changed what: keys, password, settings, sign-ins
///
/// The oldest change is first: keys created, changed and revoked, passwords set, sign-ins to the console, settings reloaded and
/// backups restored, with the address of the browser or the user of the system. If sudo ran the command, the user is SUDO_USER "as"
/// the user that it ran as. Failed sign-ins are summed by address, and written with the next sign-in or after 15 minutes.
#[derive(clap::Args)]
pub(super) struct Options {
    /// Only changes since then: 24h, 7d, a date, a time, or a time of today, as for usage
    #[arg(long, value_name = "WHEN", value_parser = parse_when)]
    since: Option<When>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(options: &Options, config: &Config) -> Result<(), CliError> {
    let since = options.since.map_or(i64::MIN, |since| since.ago(when::now()));
    let mut rows = Vec::new();
    open_to_read(config)?.audit(since, |row| rows.push(row))?;
    if options.json {
        return print_json(&rows);
    }
    print(&text_table::with_heading("time,action,via,by,key,details", rows.iter().map(line)))
}

fn line(row: &AuditRow) -> Vec<String> {
    let key = match (&row.key_id, &row.key_name) {
        (Some(id), Some(name)) => format!("{id} ({name})"),
        _ => "-".into(),
    };
    vec![
        when::format_minute(Some(row.created)),
        row.description(),
        row.via.clone(),
        row.actor.clone(),
        key,
        row.details.clone(),
    ]
}

/// Returns the user who runs this command, and with sudo also the user before: anyone could set `SUDO_USER` alone.
pub(super) fn actor() -> Actor {
    let user = user_name(geteuid().as_raw(), &fs::read_to_string("/etc/passwd").unwrap_or_default());
    let before = env::var("SUDO_USER").ok().filter(|name| *name != user && KeyName::parse(name).is_some());
    Actor::command(before.map_or(user.clone(), |before| format!("{before} as {user}")))
}

/// Looks up a user's name in the text of /etc/passwd. Returns the number if it is not there.
fn user_name(uid: u32, passwd: &str) -> String {
    let uid = uid.to_string();
    let name = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)? == uid).then(|| name.to_owned())
    };
    passwd.lines().find_map(name).unwrap_or(format!("user {uid}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_have_names() {
        let passwd = "root:x:0:0:root:/root:/bin/bash\n# a comment\n\nana:x:1000:1000::/home/ana:/bin/sh\n";
        for (uid, name) in [(0, "root"), (1000, "ana"), (7, "user 7")] {
            assert_eq!(user_name(uid, passwd), name);
        }
    }
}
