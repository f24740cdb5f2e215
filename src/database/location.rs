//! The location of a database.

use std::fmt;
use std::path::{Path, PathBuf};

use super::postgres::uri::DatabaseUri;
use crate::text::has_password;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DatabaseLocation {
    Sqlite(PathBuf),
    Postgres(DatabaseUri),
}

impl DatabaseLocation {
    /// A URI or the path of a file. The error says what is accepted, and repeats nothing of the
    /// text.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (scheme, rest) = text.split_once(':').unwrap_or(("", text));
        if DatabaseUri::is_scheme(scheme) && rest.starts_with("//") {
            return DatabaseUri::parse(text).map(Self::Postgres);
        }
        // The URI of another database, a mistyped one, or libpq's `host=… password=…`. As the name
        // of a file it would be printed with its password.
        if DatabaseUri::is_scheme(scheme.trim_start()) || text.contains("://") || has_password(text)
        {
            return Err(
                "the path of a SQLite file, or a URI that begins with postgresql://, such as \
                        postgresql://adriaticum@db.example/adriaticum"
                    .into(),
            );
        }
        Ok(Self::Sqlite(text.into()))
    }

    /// The path of a SQLite database; `None` for PostgreSQL.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::Sqlite(path) => Some(path),
            Self::Postgres(_) => None,
        }
    }
}

/// The location without the password.
impl fmt::Display for DatabaseLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sqlite(path) => path.display().fmt(f),
            Self::Postgres(uri) => uri.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_neither_a_uri_nor_a_path_is_refused() {
        for text in [
            " postgresql://u:sesame@a/",
            "postgresql:/u:sesame@a/",
            "mysql://u:sesame@a/",
            "file:///a.db?key=sesame",
            "host=a password=sesame",
            "host=a PASSWORD = 'sesame'",
        ] {
            let error = DatabaseLocation::parse(text).expect_err(text);
            assert!(
                error.contains("postgresql://") && !error.contains("sesame"),
                "{error}"
            );
        }
        for path in [
            "a.db",
            "/srv/password/a=b.db",
            "a@b:c.db",
            "postgres.db",
            "./a?b.db",
        ] {
            assert_eq!(
                DatabaseLocation::parse(path),
                Ok(DatabaseLocation::Sqlite(path.into()))
            );
        }
    }
}
