//! Opens the database for a command.

use super::error::CliError;
use super::output::note;
use crate::checks;
use crate::config::Config;
use crate::database::{Access, DatabaseError};
use crate::progress::Progress;
use crate::store::Store;

/// For a command that only reads: the file or its folder may be read-only.
pub fn open_store(config: &Config) -> Result<Store, CliError> {
    open_with(config, Access::Read)
}

pub fn open_with(config: &Config, access: Access) -> Result<Store, CliError> {
    let store =
        Store::open_with(&config.database, access, &Progress::in_log()).map_err(|error| {
            let message = checks::store_failed(config, &error);
            match error {
                // The setting names an old database, and a supervisor need not try again.
                DatabaseError::Moved { .. } => CliError::config(message),
                _ => CliError::from_access(&error, message),
            }
        })?;
    if store.database.is_new() {
        let name = config.database_name();
        match access {
            Access::Serve => log::warn!(
                "{name} is a new, empty database: no key works yet. If it should not be, correct database \
                 (ADRIATICUM_DATABASE); else create a key: adriaticum keys create NAME"
            ),
            _ => note(format_args!("Created the database {name}.")),
        }
    }
    Ok(store)
}
