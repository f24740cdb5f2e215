//! Opens the database for a command.

use std::path::Path;

use super::audit::actor;
use super::error::CliError;
use super::output::note;
use crate::checks;
use crate::config::Config;
use crate::database::{Access, ProblemKind};
use crate::store::Store;
use crate::time_zone::{self, Rules, ZONEINFO};

/// For a command that only reads: the file or its folder may be read-only.
pub fn open_store(config: &Config) -> Result<Store, CliError> {
    open_with(config, Access::Read)
}

/// Refuses a time zone that is not installed, before a file is made that should be of it.
pub fn check_time_zone(config: &Config) -> Result<(), CliError> {
    let is_missing = config.database.file().is_some_and(|file| !file.exists());
    match config.time_zone.as_deref().filter(|_| is_missing) {
        Some(name) => Rules::installed(Path::new(ZONEINFO), name)
            .map(drop)
            .map_err(|problem| CliError::config(format!("{problem}."))),
        None => Ok(()),
    }
}

pub fn open_with(config: &Config, access: Access) -> Result<Store, CliError> {
    if access.may_create() {
        check_time_zone(config)?;
    }
    let store = Store::open(&config.database, access).map_err(|error| {
        let message = checks::store_failed(config, &error);
        match error.kind {
            // The setting names an old database, and a supervisor need not try again.
            ProblemKind::Moved => CliError::config(message),
            _ => CliError::from_access(&error, message),
        }
    })?;
    if store.database.is_new {
        let name = config.database_name();
        match access {
            Access::Serve => log::warn!(
                "{name} is a new, empty database: no key works yet. If it should not be, correct database \
                 (ADRIATICUM_DATABASE); else create a key: adriaticum keys create NAME"
            ),
            _ => note(format_args!("Created the database {name}.")),
        }
    }
    if access == Access::Serve || store.database.is_new {
        let (setting, host) = (config.time_zone.as_deref(), Path::new(ZONEINFO));
        let zone = time_zone::settle(&store.database, setting, host, &actor());
        return zone
            .map(|zone| store.in_zone(zone))
            .map_err(|problem| match problem.kind {
                ProblemKind::Setting => CliError::config(format!("{problem}.")),
                _ => CliError::failed(checks::database_failed(config, &problem)),
            });
    }
    Ok(store)
}
