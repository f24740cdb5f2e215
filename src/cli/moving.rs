//! `move`: copies a SQLite database to PostgreSQL.

use super::error::{CliError, failed};
use super::output::{note, print};
use crate::config::{self, Config};
use crate::database::sqlite::lock::FileLock;
use crate::database::{Access, DatabaseLocation, DatabaseUri, ProblemKind};
use crate::progress::Progress;
use crate::recovery::moving::{self, MoveResult};
use crate::store::Store;
use crate::text::count;

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
    #[arg(long, value_name = "DATABASE")]
    from: String,
    /// The postgresql:// URI of an empty database. Its password can also come from the file that
    /// database_password_file names, or from database-password beside the configuration
    #[arg(long, value_name = "DATABASE")]
    to: String,
}

pub(super) fn run(MoveOptions { from, to }: &MoveOptions, config: &Config) -> Result<(), CliError> {
    // The message does not repeat the value, which may contain a password.
    let database = |option: &str, text: &str| {
        DatabaseLocation::parse(text)
            .map_err(|accepted| CliError::usage(&format!("--{option}: expected {accepted}.")))
    };
    match (database("from", from)?, database("to", to)?) {
        (from @ DatabaseLocation::Sqlite(_), DatabaseLocation::Postgres(to)) => {
            move_database(&from, to, config)
        }
        (DatabaseLocation::Postgres(_), _) => Err(CliError::usage(
            "--from takes a SQLite database. To copy a PostgreSQL database, use pg_dump and pg_restore.",
        )),
        (_, DatabaseLocation::Sqlite(_)) => Err(CliError::usage(
            "--to takes the postgresql:// URI of an empty database. To copy a SQLite database, use adriaticum backup.",
        )),
    }
}

fn move_database(
    from: &DatabaseLocation,
    mut to: DatabaseUri,
    config: &Config,
) -> Result<(), CliError> {
    if let Some(path) = config
        .database_password_file
        .as_ref()
        .filter(|_| to.password.is_none())
    {
        to.password = config::password_in(path)
            .map_err(|error| CliError::config(format!("{}: {error}.", path.display())))?;
    }
    let store = Store::open(from, Access::Existing).map_err(|error| match error.kind {
        ProblemKind::Missing => CliError::failed(format!(
            "there is no database at {from}. --from takes the path of the SQLite database to be moved."
        )),
        _ => failed(from)(error),
    })?;
    let _lock = from
        .file()
        .map(FileLock::take)
        .transpose()
        .map_err(failed(from))?;
    let MoveResult { found, marked } =
        moving::move_to(&store.database, &to, &Progress::on_stderr()).map_err(failed(&to))?;
    let keys = count(store.keys.list()?.len() as i64, "key");
    let rows = count(found.rows as i64, "row");
    print(&format!(
        "{keys} and {rows} moved from {from} to {to} and verified.\n"
    ))?;
    if let Some(fault) = found.fault {
        note(format_args!(
            "The ledger had a fault before, and so has its copy: {fault}."
        ));
    }
    marked.map_err(|error| {
        CliError::failed(format!(
            "{from} could not be marked as moved: {error}. Do not start the service with it: rename it or take it away."
        ))
    })?;
    note(format_args!(
        "Next: set database to the new one and start the service. Keep the old one as a backup: it can be read, and serve \
         refuses it."
    ));
    Ok(())
}
