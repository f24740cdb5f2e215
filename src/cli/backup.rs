//! `backup`: a consistent copy of the database while the service runs.

use std::io::ErrorKind::{AlreadyExists, IsADirectory, NotADirectory, NotFound};
use std::path::Path;

use super::{Args, CliError, print};
use crate::checks;
use crate::progress::Progress;
use crate::store::StoreError;
use crate::text::{count, grouped};

pub(super) const HELP: &str = "\
Makes a consistent copy of the database, with keys and ledger, while the service uses it. The copy has the version of
the database, also if that is older than this program. To restore it, stop the service and run adriaticum restore.

Usage: adriaticum backup FILE
";

pub(super) fn run(mut args: Args) -> Result<(), CliError> {
    let [file] = args.words(["the new FILE"])?;
    let (path, config) = (Path::new(&file), args.config()?);
    if config.database.file().is_none() {
        return Err(CliError::Failed(format!(
            "the database {} is PostgreSQL: use pg_dump, or the backups of the cluster.",
            config.database_name()
        )));
    }
    let failed = |error: StoreError| {
        CliError::Failed(match &error {
            StoreError::Missing | StoreError::LostContent { .. } | StoreError::Damaged(_) => {
                checks::store_failed(&config, &error)
            }
            StoreError::Io(cause)
                if matches!(cause.kind(), AlreadyExists | NotFound | NotADirectory | IsADirectory) =>
            {
                format!("{file}: {error}. The copy needs a new file in a folder that exists.")
            }
            error => format!("{file}: {error}."),
        })
    };
    let rows = config.database.backup(path, &Progress::on_stderr()).map_err(failed)?;
    let bytes = path.metadata().map_err(|error| failed(error.into()))?.len();
    print(&format!("{file}: {}, {} bytes\n", count(rows, "row"), grouped(bytes as i64)))
}
