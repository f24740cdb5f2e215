//! `backup`: a copy of the database, of one moment, while the service goes on.

use std::path::Path;

use super::{Args, CliError, open_store};

const HELP: &str = "\
Makes a consistent copy of the database, keys and ledger, while the service goes on using it. To restore it, stop
the service and put the copy in the database's place.

Usage: adriaticum backup FILE
";

pub fn run(mut args: Args) -> Result<(), CliError> {
    let [file] = args.words(HELP, ["the new FILE"], &mut [])?;
    open_store(&args.config()?)?.backup(Path::new(&file)).map_err(|error| {
        CliError::Failed(format!("{file}: {error}. The copy needs a new file in a folder that exists."))
    })
}
