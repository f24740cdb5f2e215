//! `restore`: replaces the database with a backup, and lists what that undoes.

use std::fmt::Display;
use std::path::PathBuf;

use super::audit::actor;
use super::error::CliError;
use super::output::print;
use crate::config::Config;
use crate::database::{DatabaseError, DatabaseLocation};
use crate::keys::{Key, KeyState};
use crate::progress::Progress;
use crate::recovery::restore::{
    self, Comparison, KeyDifferences, LedgerExtent, Restoration, RestoreError,
};
use crate::text::{count, may_hold_a_secret};
use crate::when;

/// Replace the SQLite database with a backup, and list what that undoes
///
/// Stop the service first. A backup is one file, made with adriaticum backup: one with a -wal or
/// -journal beside it is refused. It is copied, checked, verified and, if its version is older,
/// upgraded; the file itself is not changed. Then the command lists what the present database has
/// and the backup does not: keys created, revoked or changed since, and rows. Keys revoked since
/// stay revoked and the console keeps its present password, but keys created since are gone, other
/// changes are undone, and all console sessions end.
///
/// The present database is kept beside the new one; the last lines say how to go back. If the
/// command fails or is interrupted before that, the present database is still in place.
#[derive(clap::Args)]
pub(super) struct RestoreOptions {
    /// The backup
    file: PathBuf,
}

pub(super) fn run(
    RestoreOptions { file }: &RestoreOptions,
    config: &Config,
) -> Result<(), CliError> {
    let backup = match file.display().to_string() {
        name if may_hold_a_secret(&name) => "…".into(),
        name => name,
    };
    let DatabaseLocation::Sqlite(path) = &config.database else {
        return Err(CliError::failed(format!(
            "the database {} is PostgreSQL: restore it with pg_restore, or with the backups of the cluster.",
            config.database_name()
        )));
    };
    let name = config.database_name();
    let restored =
        restore::restore(path, file, &actor(), &Progress::on_stderr()).map_err(|error| {
            let file: &dyn Display = match error {
                RestoreError::Backup(_) | RestoreError::Incomplete(_) | RestoreError::Faulty(_) => {
                    &backup
                }
                RestoreError::Locked(_) | RestoreError::Present(_) => &name,
            };
            CliError::from_access(&error, format!("{file}: {error}. Nothing was restored."))
        })?;
    print(&report(&restored, &backup, &name))?;
    match restored.unsynced {
        None => Ok(()),
        Some(error) => Err(CliError::failed(format!(
            "{name}: the backup is in place, but its folder could not be synced ({error}), so after a power failure the \
             former database may be there again. Check the disk, then run sync."
        ))),
    }
}

fn report(restored: &Restoration, file: &str, database: &str) -> String {
    let upgraded = restored.upgraded_from.map_or(String::new(), |version| {
        format!(" Its version {version} was upgraded in the copy; {file} is as it was.")
    });
    let mut lines = vec![format!(
        "{file}: {}, verified.{upgraded}",
        extent(&restored.restored)
    )];
    lines.extend(comparison_lines(&restored.present));
    let password = match restored.present.password {
        Ok(None) => "The console had no password, so it has that of the backup, if there is one. ",
        _ if restored.keeps_password => "The console keeps its present password. ",
        _ => "",
    };
    lines.push(format!("{password}All console sessions have ended."));
    lines.push(format!("{database} is restored. Start the service."));
    if let Some(kept) = &restored.kept {
        let kept = kept.display();
        lines.push(format!("The former database is kept as {kept}"));
        let present = &restored.present;
        lines.push(
            match present.damage.is_none() && present.ledger.is_ok() && present.keys.is_ok() {
                true => format!("To go back: stop the service and run adriaticum restore {kept}"),
                false => format!(
                    "It is damaged. What can be read of it: sqlite3 {kept} .recover | sqlite3 NEW"
                ),
            },
        );
    }
    lines.join("\n") + "\n"
}

/// Describes the former database, and how its keys and its password differ from the backup's, or
/// why that is not known.
fn comparison_lines(present: &Comparison) -> Vec<String> {
    let mut lines = Vec::new();
    match &present.ledger {
        Ok(ledger) => lines.push(format!("The former database: {}.", extent(ledger))),
        Err(DatabaseError::Missing) => lines.push("There was no database before.".into()),
        Err(error) => lines.push(format!(
            "The rows of the former database can't be read: {}.",
            cause(error)
        )),
    }
    match &present.keys {
        Ok(keys) => lines.extend(key_lines(keys)),
        Err(error) => {
            if !matches!(error, DatabaseError::Missing) {
                lines.push(format!(
                    "The keys of the former database can't be read: {}.",
                    cause(error)
                ));
            }
            lines.push(
                "So keys that were revoked or narrowed since the backup work as they did then: look through adriaticum \
                 keys list, and revoke them again."
                    .into(),
            );
        }
    }
    if let Err(error) = &present.password
        && !matches!(error, DatabaseError::Missing)
    {
        lines.push(format!(
            "The console's present password can't be read: {}. It is that of the backup.",
            cause(error)
        ));
    }
    lines
}

fn key_lines(keys: &KeyDifferences) -> Vec<String> {
    let named = |key: &Key| format!("  {} ({})", key.id, key.name);
    let change = |(now, then): &(Key, Key)| {
        let wider = if then.is_wider_than(now) {
            "; this allows more than before the restore"
        } else {
            ""
        };
        format!(
            "{}: {}{wider}",
            named(now),
            now.differences(then).join(", ")
        )
    };
    let again = |key: &Key| {
        let state = match key.state(when::now()) {
            KeyState::Revoked => "revoked",
            KeyState::Expired => "expired",
            KeyState::Active | KeyState::Expiring => "it works again",
        };
        format!("{}: {state}", named(key))
    };
    let lists = [
        (
            "Created since the backup, so these stop working:",
            keys.created.iter().map(named).collect::<Vec<_>>(),
        ),
        (
            "Revoked since the backup, and these stay revoked:",
            keys.revoked.iter().map(named).collect(),
        ),
        (
            "Changed since the backup, which is undone:",
            keys.changed.iter().map(change).collect(),
        ),
        (
            "Only in the backup:",
            keys.only_in_backup.iter().map(again).collect(),
        ),
    ];
    let mut lines = Vec::new();
    for (title, keys) in lists {
        if !keys.is_empty() {
            lines.push(title.into());
            lines.extend(keys);
        }
    }
    if lines.is_empty() {
        lines.push("The keys are the same.".into());
    }
    lines
}

fn extent(ledger: &LedgerExtent) -> String {
    let rows = count(ledger.rows, "row");
    if ledger.newest.is_none() {
        return rows;
    }
    let newest = when::format_minute(ledger.newest);
    format!("{rows}, the newest of {newest}")
}

/// Formats an error without its advice, which is for a database in use.
fn cause(error: &DatabaseError) -> String {
    match error {
        DatabaseError::Damaged(cause) => format!("it is damaged ({cause})"),
        DatabaseError::LostContent { .. } => "its file has lost its content".into(),
        error => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_valid_key_works_again() {
        let key = |name: &str, expires, revoked| Key {
            name: name.into(),
            expires,
            revoked,
            ..Key::example()
        };
        let lines = key_lines(&KeyDifferences {
            only_in_backup: vec![
                key("a", None, None),
                key("b", Some(9), None),
                key("c", Some(9), Some(8)),
            ],
            ..KeyDifferences::default()
        });
        let ends: Vec<&str> = lines[1..]
            .iter()
            .filter_map(|line| Some(line.split_once(": ")?.1))
            .collect();
        assert_eq!(ends, ["it works again", "expired", "revoked"]);
    }
}
