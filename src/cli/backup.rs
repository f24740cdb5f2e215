//! `backup`: a consistent copy of the database while the service runs.

use std::path::PathBuf;

use super::error::CliError;
use super::output::print;
use crate::checks;
use crate::config::Config;
use crate::database::sqlite::{OpenFile, backup};
use crate::database::{DatabaseLocation, Problem};
use crate::ledger::ROWS;
use crate::progress::Progress;
use crate::text::{count, grouped};

/// Make a consistent copy of the database while it is used
///
/// The copy has the keys and the ledger, and the version of the database, also if that is older
/// than this program. The command prints its path, the number of its rows and its size. To restore
/// it, stop the service and run adriaticum restore.
#[derive(clap::Args)]
pub(super) struct BackupOptions {
    /// A new file, in a folder that exists
    file: PathBuf,
}

pub(super) fn run(
    BackupOptions { file: path }: &BackupOptions,
    config: &Config,
) -> Result<(), CliError> {
    let file = path.display();
    let DatabaseLocation::Sqlite(database) = &config.database else {
        return Err(CliError::failed(format!(
            "the database {} is PostgreSQL: use pg_dump, or the backups of the cluster.",
            config.database_name()
        )));
    };
    let source = OpenFile::to_read(database)
        .map_err(|error| CliError::from_access(&error, checks::store_failed(config, &error)))?;
    let failed = |error: Problem| CliError::from_access(&error, format!("{error}."));
    source
        .copy_to(path, &Progress::on_stderr())
        .map_err(failed)?;
    let rows = backup::count(path, ROWS).map_err(|error| failed(error.of(&file)))?;
    let bytes = path
        .metadata()
        .map_err(|error| failed(Problem::from(error).of(&file)))?
        .len();
    print(&format!(
        "{file}: {}, {} bytes\n",
        count(rows, "row"),
        grouped(bytes as i64)
    ))
}
