//! The setting of the database.

use std::fs;

use super::settings::Settings;
use super::{ConfigError, Secret};
use crate::store::Database;

pub(super) fn read(settings: &mut Settings) -> Result<Database, ConfigError> {
    let mut database = match settings.take("database") {
        Some(written) if !written.text()?.is_empty() => {
            Database::parse(written.text()?).map_err(|takes| written.refuse(&takes))?
        }
        _ => Database::Sqlite("adriaticum.db".into()),
    };
    if let Some(written) = settings.take_variable("database_password_file") {
        let text = fs::read_to_string(written.text()?)
            .map_err(|error| written.refuse(&format!("the path of a file that can be read ({error})")))?;
        let password = text.trim_end_matches(['\r', '\n']);
        match &mut database {
            Database::Postgres(uri) if !password.is_empty() => {
                if uri.password.is_some() {
                    return Err(written.refuse("nothing while the URI of database has a password too"));
                }
                uri.password = Some(Secret::new(password));
            }
            // The packaged service always names a file, which is empty if no password is needed.
            _ => {}
        }
    }
    // `Debug` does not show the password.
    let password = match &database {
        Database::Postgres(uri) => uri.password.as_ref().map(Secret::expose),
        Database::Sqlite(_) => None,
    };
    settings.note("database", &(&database, password));
    Ok(database)
}
