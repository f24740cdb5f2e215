//! `backup`: a consistent copy of the database while the service runs.

use std::path::Path;

use super::{Args, CliError, open_store, print};
use crate::text::{count, grouped};

const HELP: &str = "\
Makes a consistent copy of the database, with keys and ledger, while the service uses it. To restore it, stop the
service and replace the database with the copy.

Usage: adriaticum backup FILE
";

pub fn run(mut args: Args) -> Result<(), CliError> {
    let [file] = args.words(HELP, ["the new FILE"], &mut [])?;
    let failed = |error: &dyn ToString| {
        let error = error.to_string();
        CliError::Failed(format!("{file}: {error}. The copy needs a new file in a folder that exists."))
    };
    let path = Path::new(&file);
    let rows = open_store(&args.config()?)?.backup(path).map_err(|error| failed(&error))?;
    let bytes = path.metadata().map_err(|error| failed(&error))?.len();
    print(&format!("{file}: {}, {} bytes\n", count(rows, "row"), grouped(bytes as i64)))
}
