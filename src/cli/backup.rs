//! `backup`: a consistent copy of the database while the service runs.

use std::path::Path;

use super::{Args, CliError, print};
use crate::checks;
use crate::store::StoreError;
use crate::text::{count, grouped};

const HELP: &str = "\
Makes a consistent copy of the database, with keys and ledger, while the service uses it. The copy has the version of
the database, also if that is older than this program. To restore it, stop the service and replace the database with
the copy.

Usage: adriaticum backup FILE
";

pub fn run(mut args: Args) -> Result<(), CliError> {
    let [file] = args.words(HELP, ["the new FILE"], &mut [])?;
    let failed = |error: &dyn ToString| {
        let error = error.to_string();
        CliError::Failed(format!("{file}: {error}. The copy needs a new file in a folder that exists."))
    };
    let (path, config) = (Path::new(&file), args.config()?);
    let rows = config.database.backup(path).map_err(|error| match error {
        StoreError::Missing | StoreError::LostContent { .. } | StoreError::Damaged(_) => {
            CliError::Failed(checks::store_failed(&config, &error))
        }
        error => failed(&error),
    })?;
    let bytes = path.metadata().map_err(|error| failed(&error))?.len();
    print(&format!("{file}: {}, {} bytes\n", count(rows, "row"), grouped(bytes as i64)))
}
