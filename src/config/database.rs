//! The settings of the database and of the gateway's name in it.

use std::io;
use std::path::{Path, PathBuf};

use rustix::system::uname;

use super::raw_setting::{RawSetting, WrongSetting};
use super::settings::Settings;
use crate::database::DatabaseLocation;
use crate::files;
use crate::secret::Secret;

pub(super) fn read(settings: &mut Settings) -> (DatabaseLocation, Option<PathBuf>) {
    let (mut database, in_file) = settings.value("database", |written| {
        let database = DatabaseLocation::parse(written.text_or_default()?)
            .map_err(|accepted| written.refuse_for(&accepted))?;
        Ok((database, written.file().map(PathBuf::from)))
    });
    let has_password =
        matches!(&database, DatabaseLocation::Postgres(uri) if uri.password.is_some());
    if has_password {
        settings.secret_files.extend(in_file);
    }
    let name = "database_password_file";
    let file = settings.take_file(name, "database-password", !has_password);
    let file = file.and_then(|written| settings.accept(read_password(&written, &mut database)));
    settings.secret_files.extend(file.clone());
    if database.file().is_some() {
        // Only PostgreSQL needs one.
        settings.unread_files.clear();
    }
    (database, file)
}

/// Reads the password from its file, and returns the file's path.
fn read_password(
    written: &RawSetting,
    database: &mut DatabaseLocation,
) -> Result<PathBuf, WrongSetting> {
    let path = PathBuf::from(written.text()?);
    let password = password_in(&path).map_err(|error| written.refuse_because(error))?;
    if let (DatabaseLocation::Postgres(uri), Some(password)) = (database, password) {
        if uri.password.is_some() {
            return Err(
                written.refuse_for("no file, because the URI of database has a password too")
            );
        }
        uri.password = Some(password);
    }
    Ok(path)
}

/// Reads the password in a file. The packaged service always has the file; it is empty if no
/// password is needed.
pub fn password_in(path: &Path) -> io::Result<Option<Secret>> {
    let text = files::read_text(path)?;
    let text = text.trim_end_matches(['\r', '\n']);
    Ok((!text.is_empty()).then(|| Secret::new(text)))
}

pub(super) fn host_name() -> String {
    uname().nodename().to_string_lossy().into_owned()
}

/// Reads the name of this gateway, by default the host's; empty if no other gateway can share the
/// database.
pub(super) fn read_gateway(settings: &mut Settings, database: &DatabaseLocation) -> String {
    let host = host_name();
    let name = settings.value("gateway", |written| {
        written.parse(|text| (text.is_empty() || is_gateway_name(text)).then(|| text.to_owned()))
    });
    match database {
        DatabaseLocation::Sqlite(_) => String::new(),
        DatabaseLocation::Postgres(_) if !name.is_empty() => name,
        DatabaseLocation::Postgres(_) if is_gateway_name(&host) => host,
        DatabaseLocation::Postgres(_) => "gateway".into(),
    }
}

/// Returns true for a name that can be parsed out of a list, and out of a chain head that `usage
/// verify` prints.
fn is_gateway_name(name: &str) -> bool {
    let is_good = |c: char| !c.is_control() && !c.is_whitespace() && c != ':' && c != ',';
    (1..=64).contains(&name.chars().count()) && name.chars().all(is_good)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_gateways() {
        let long = "x".repeat(64);
        for name in ["a", "gateway-1.example", "vrata-\u{161}", &long] {
            assert!(is_gateway_name(name), "{name}");
        }
        for name in [
            "",
            "a b",
            "a:1",
            "a,b",
            "a\n",
            "a\u{2003}b",
            &(long.clone() + "x"),
        ] {
            assert!(!is_gateway_name(name), "{name:?}");
        }
    }
}
