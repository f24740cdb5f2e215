//! `audit`: who changed what.

use std::{env, fs};

use rustix::process::geteuid;

use super::{Args, CliError, Opt, open_store, print, print_json, text_table};
use crate::store::{Actor, AuditRow, KeyName};
use crate::when::{self, When};

const HELP: &str = "\
Prints who changed what, the oldest first: keys created, changed and revoked, passwords set, sign-ins, failed sign-ins
summed by address, settings reloaded and backups restored.

Usage: adriaticum audit [--since WHEN] [--json]

Options:
  --since WHEN   Only changes since then: 24h, 7d, a date (2026-11-16), a time (2026-11-16T13:00Z), or a
                 time of today (13:00), in UTC
  --json         Print JSON
";

pub fn run(mut args: Args) -> Result<(), CliError> {
    let (mut json, mut since) = (false, i64::MIN);
    let mut set_since = |text: &str| {
        since = When::parse(text).ok_or(When::TAKES)?.ago(when::now());
        Ok(())
    };
    let mut options = [Opt::Flag("json", &mut json), Opt::Value("since", &mut set_since)];
    let [] = args.words(HELP, [], &mut options)?;
    let mut rows = Vec::new();
    open_store(&args.config()?)?.audit(since, |row| rows.push(row))?;
    if json {
        return print_json(&rows);
    }
    let heading = ["time", "action", "via", "by", "key", "details"];
    let mut lines = vec![heading.map(String::from).to_vec()];
    lines.extend(rows.iter().map(line));
    print(&text_table::lay_out(&lines))
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

/// The user who runs this command. If sudo changed the user, both: `SUDO_USER` alone could be set by anyone.
pub fn actor() -> Actor {
    let user = user_name(geteuid().as_raw(), &fs::read_to_string("/etc/passwd").unwrap_or_default());
    let before = env::var("SUDO_USER").ok().filter(|name| *name != user && KeyName::parse(name).is_some());
    Actor::command(before.map_or(user.clone(), |before| format!("{before} as {user}")))
}

/// A user's name by the text of /etc/passwd, else the number.
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
