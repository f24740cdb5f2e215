//! `backup`, `restore` and `move`: the database as a whole.

use std::path::{Path, PathBuf};

use super::shared::{about, become_owner, note, open_as_owner, print};
use crate::audit::Actor;
use crate::checks;
use crate::config::{Config, SecretsNeeded};
use crate::database::sqlite::FileLock;
use crate::database::sqlite::backup::Backup;
use crate::database::sqlite::{OpenFile, backup};
use crate::database::{Access, DatabaseLocation, DatabaseUri};
use crate::error::{Problem, ProblemKind, Result};
use crate::ledger::ROWS;
use crate::progress::Progress;
use crate::recovery::{MoveResult, move_to, restore};
use crate::store::Store;
use crate::text::{count, grouped, may_hold_a_secret};

/// Make a consistent copy of the database while it is used
///
/// The copy has the keys and the ledger, and the version of the database, also if that is older
/// than this program. The command prints its path, the number of its rows and its size. If root
/// runs it, the copy belongs to root. To restore it, stop the service and run adriaticum restore.
#[derive(clap::Args)]
pub(super) struct BackupOptions {
    /// A new file, in a folder that exists
    file: PathBuf,
}

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

/// Copy a SQLite database to PostgreSQL, verify the copy, and mark the source as moved
///
/// Stop the service first. Keys, ledger, sums, chain, password and sessions are copied in one
/// transaction: if the move is interrupted, the new database is still empty, and the move can be
/// repeated. The old database stays as it is, with a mark: it can be read, but serve and every
/// command that changes something refuse it and name the new one. Then set database in the
/// configuration to the new one, and start the service.
#[derive(clap::Args)]
pub(super) struct MoveOptions {
    /// The path of the SQLite database
    #[arg(long, value_name = "DATABASE", value_parser = parse_location)]
    from: DatabaseLocation,
    /// The postgresql:// URI of an empty database. Its password can also come from the file that
    /// database_password_file names, or from database-password, as for the service
    #[arg(long, value_name = "DATABASE", value_parser = parse_location)]
    to: DatabaseLocation,
}

impl BackupOptions {
    /// Root writes the copy to any folder, but reads the database as the owner of its folder.
    pub fn run(&self, config: &Config) -> Result<()> {
        let path = sqlite_file(config, "use pg_dump, or the backups of the cluster")?;
        let source = open_as_owner(&config.database, || OpenFile::to_read(path))
            .map_err(|problem| checks::store_failed(config, problem))?;
        source.copy_to(&self.file, &Progress::on_stderr())?;
        let copy = self.file.display();
        let rows = backup::count(&self.file, ROWS).map_err(about(&copy))?;
        let bytes = self.file.metadata().map_err(about(&copy))?.len();
        print(&format!(
            "{copy}: {}, {} bytes\n",
            count(rows, "row"),
            grouped(bytes as i64)
        ))
    }
}

impl RestoreOptions {
    pub fn run(&self, config: &Config, by: &Actor) -> Result<()> {
        let path = sqlite_file(
            config,
            "restore it with pg_restore, or with the backups of the cluster",
        )?;
        let unchanged = |problem: Problem| Problem {
            text: format!("{problem}. Nothing was restored"),
            ..problem
        };
        let name = match self.file.display().to_string() {
            name if may_hold_a_secret(&name) => "…".into(),
            name => name,
        };
        // Before root becomes another user, who may not be able to open it.
        let backup = Backup::open(&self.file, name, path).map_err(unchanged)?;
        become_owner(&config.database)?;
        let restored = restore(path, backup, by, &Progress::on_stderr()).map_err(unchanged)?;
        print(&(restored.report.join("\n") + "\n"))?;
        restored.synced
    }
}

fn sqlite_file<'a>(config: &'a Config, otherwise: &str) -> Result<&'a Path> {
    config.database.file().ok_or_else(|| {
        let name = config.database_name();
        Problem::other(format!("the database {name} is PostgreSQL: {otherwise}"))
    })
}

fn parse_location(text: &str) -> Result<DatabaseLocation, String> {
    DatabaseLocation::parse(text).map_err(|accepted| format!("expected {accepted}"))
}

impl MoveOptions {
    pub fn run(self, load: impl FnOnce(SecretsNeeded) -> Result<Config>) -> Result<()> {
        match (self.from, self.to) {
            (from @ DatabaseLocation::Sqlite(_), DatabaseLocation::Postgres(mut to)) => {
                let needed = match &to.password {
                    Some(_) => SecretsNeeded::Nothing,
                    None => SecretsNeeded::Password,
                };
                to.password = load(needed)?.database_password.or(to.password);
                move_database(&from, &to)
            }
            (DatabaseLocation::Postgres(_), _) => Err(Problem::usage(
                "--from takes a SQLite database. To copy a PostgreSQL database, use pg_dump and pg_restore",
            )),
            (_, DatabaseLocation::Sqlite(_)) => Err(Problem::usage(
                "--to takes the postgresql:// URI of an empty database. To copy a SQLite database, use adriaticum backup",
            )),
        }
    }
}

fn move_database(from: &DatabaseLocation, to: &DatabaseUri) -> Result<()> {
    become_owner(from)?;
    let store = Store::open(from, Access::Existing).map_err(|problem| match problem.kind {
        ProblemKind::Missing => Problem::other(format!(
            "there is no database at {from}. --from takes the path of the SQLite database to be moved"
        )),
        _ => Problem::other(format!("{from}: {problem}")),
    })?;
    let _lock = from
        .file()
        .map(FileLock::take)
        .transpose()
        .map_err(about(from))?;
    let MoveResult { found, marked } =
        move_to(&store.database, to, &Progress::on_stderr()).map_err(about(to))?;
    let keys = count(store.keys.list()?.len() as i64, "key");
    let rows = count(found.rows as i64, "row");
    print(&format!(
        "{keys} and {rows} moved from {from} to {to} and verified.\n"
    ))?;
    if let Some(fault) = found.fault {
        note(format!(
            "The ledger had a fault before, and so has its copy: {fault}."
        ));
    }
    marked.map_err(|error| {
        Problem::other(format!(
            "{from} could not be marked as moved: {error}. Do not start the service with it: rename it or take it away"
        ))
    })?;
    note(
        "Next: set database to the new one and start the service. Keep the old one as a backup: it can be read, and serve \
         refuses it.",
    );
    Ok(())
}
