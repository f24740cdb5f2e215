//! `backup`: a consistent copy of the database while the service runs.

use std::io::ErrorKind::{AlreadyExists, IsADirectory, NotADirectory, NotFound};
use std::path::PathBuf;

use super::error::CliError;
use super::output::print;
use crate::checks;
use crate::config::Config;
use crate::database::sqlite::backup::backup;
use crate::database::{BackupError, DatabaseError, DatabaseLocation};
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
    let failed = |error: BackupError| match error {
        BackupError::Database(error) => {
            CliError::from_access(&error, checks::store_failed(config, &error))
        }
        BackupError::Copy(DatabaseError::Io(error))
            if matches!(
                error.kind(),
                AlreadyExists | NotFound | NotADirectory | IsADirectory
            ) =>
        {
            CliError::failed(format!(
                "{file}: {error}. The copy needs a new file in a folder that exists."
            ))
        }
        BackupError::Copy(error) => CliError::from_access(&error, format!("{file}: {error}.")),
    };
    let rows = backup(database, path, ROWS, &Progress::on_stderr()).map_err(failed)?;
    let bytes = path
        .metadata()
        .map_err(|error| failed(BackupError::Copy(error.into())))?
        .len();
    print(&format!(
        "{file}: {}, {} bytes\n",
        count(rows, "row"),
        grouped(bytes as i64)
    ))
}
