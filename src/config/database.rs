//! The setting of the database.

use std::path::{Path, PathBuf};
use std::{fs, io};

use super::Secret;
use super::settings::Settings;
use super::written::{Problem, Written};
use crate::store::Database;

pub(super) fn read(settings: &mut Settings) -> Database {
    let mut database = Database::Sqlite("adriaticum.db".into());
    if let Some(written) = settings.take("database") {
        database = settings.accept(parse(&written)).flatten().unwrap_or(database);
        if password(&database).is_some() {
            settings.secret_files.extend(written.file().map(PathBuf::from));
        }
    }
    if let Some(written) = settings.take_variable("database_password_file") {
        let file = settings.accept(read_password(&written, &mut database));
        settings.secret_files.extend(file);
    }
    // `Debug` does not show the password.
    settings.note("database", &(&database, password(&database)));
    database
}

/// `None` for an empty text.
fn parse(written: &Written) -> Result<Option<Database>, Problem> {
    match written.text()? {
        "" => Ok(None),
        text => Database::parse(text).map(Some).map_err(|accepted| written.refuse(&accepted)),
    }
}

/// Reads the password from the file that a variable names. Returns the file.
fn read_password(written: &Written, database: &mut Database) -> Result<PathBuf, Problem> {
    let path = PathBuf::from(written.text()?);
    let password =
        password_in(&path).map_err(|error| written.refuse(&format!("a file that can be read ({error})")))?;
    if let (Database::Postgres(uri), Some(password)) = (database, password) {
        if uri.password.is_some() {
            return Err(written.refuse("no file, because the URI of database has a password too"));
        }
        uri.password = Some(password);
    }
    Ok(path)
}

/// The password in a file. The packaged service always names one, which is empty if no password is needed.
pub fn password_in(path: &Path) -> io::Result<Option<Secret>> {
    let text = fs::read_to_string(path)?;
    let text = text.trim_end_matches(['\r', '\n']);
    Ok((!text.is_empty()).then(|| Secret::new(text)))
}

fn password(database: &Database) -> Option<&str> {
    match database {
        Database::Postgres(uri) => uri.password.as_ref().map(Secret::expose),
        Database::Sqlite(_) => None,
    }
}
