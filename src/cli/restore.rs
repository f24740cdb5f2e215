//! `restore`: replaces the database with a backup, and lists what that undoes.

use std::path::PathBuf;

use super::audit::actor;
use super::error::CliError;
use super::output::print;
use crate::config::Config;
use crate::database::{DatabaseLocation, Problem};
use crate::progress::Progress;
use crate::recovery::restore;
use crate::text::may_hold_a_secret;

/// Replace the SQLite database with a backup, and list what that undoes
///
/// Stop the service first. A backup is one file, made with adriaticum backup: one with a -wal or
/// -journal beside it is refused. It is copied, checked and verified; the file itself is not
/// changed. Keys that were revoked since stay revoked, those that were rotated keep their present
/// secret, and the console keeps its present password. What else the audit has since is listed and
/// undone, and the requests that the backup lacks are counted. All console sessions end.
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
    let failed =
        |error: Problem, end: &str| CliError::from_access(&error, format!("{error}.{end}"));
    let restored = restore::restore(path, (file, &backup), &actor(), &Progress::on_stderr())
        .map_err(|error| failed(error, " Nothing was restored."))?;
    print(&(restored.report.join("\n") + "\n"))?;
    restored.synced.map_err(|error| failed(error, ""))
}
