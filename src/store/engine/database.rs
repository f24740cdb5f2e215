//! Where the database is, and the lock that keeps a second `serve` off it.

use std::fmt;
use std::path::{Path, PathBuf};

use super::postgres::{DatabaseUri, SessionLock};
use super::sqlite::{FileLock, LockError};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Database {
    Sqlite(PathBuf),
    Postgres(DatabaseUri),
}

impl Database {
    /// A URI or the path of a file. The error says what a URI takes, and repeats nothing of it.
    pub fn parse(text: &str) -> Result<Self, String> {
        match DatabaseUri::is_uri(text) {
            true => DatabaseUri::parse(text).map(Self::Postgres),
            false => Ok(Self::Sqlite(text.into())),
        }
    }

    /// Its file, if it is one.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::Sqlite(path) => Some(path),
            Self::Postgres(_) => None,
        }
    }
}

/// Without the password.
impl fmt::Display for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sqlite(path) => path.display().fmt(f),
            Self::Postgres(uri) => uri.fmt(f),
        }
    }
}

/// Keeps a second `serve` off a file, or off the name of a gateway. Held until the value is dropped.
pub enum ServeLock {
    File(FileLock),
    Session(Box<SessionLock>),
}

impl ServeLock {
    pub fn take(database: &Database, gateway: &str) -> Result<Self, LockError> {
        match database {
            Database::Sqlite(path) => FileLock::take(path).map(Self::File),
            Database::Postgres(uri) => SessionLock::take(uri, gateway).map(Box::new).map(Self::Session),
        }
    }
}
