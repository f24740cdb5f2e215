//! Runs statements on a connection: their values and errors.

use std::io;
use std::sync::Arc;

use rusqlite::types::{ToSqlOutput, ValueRef};
use rusqlite::{Connection, ErrorCode, ToSql, ffi, params_from_iter};

use super::database_files::Files;
use super::read_only_file::ReadOnlyFile;
use crate::database::error::{DatabaseError, Result};
use crate::database::statement::{EachRow, Statement};
use crate::database::value::{Row, SqlValue};

#[derive(Clone, Copy)]
pub struct SqliteSession<'a> {
    pub(super) connection: &'a Connection,
    /// `None` while a database is opened or restored.
    pub(super) files: Option<&'a Files>,
    /// Set if SQLite reads the database without locks.
    pub(super) read_only: Option<&'a ReadOnlyFile>,
}

impl<'a> SqliteSession<'a> {
    /// On a connection that nothing else uses.
    pub(super) fn alone(connection: &'a Connection) -> Self {
        Self {
            connection,
            files: None,
            read_only: None,
        }
    }

    pub fn run_script(&self, script: &str) -> Result<()> {
        Ok(self.connection.execute_batch(script)?)
    }

    pub fn run(&self, statements: &[Statement], each: EachRow) -> Result<Vec<usize>> {
        let result = run_on(self.connection, statements, each);
        // SQLite also syncs outside COMMIT: when a write begins the WAL again.
        let result = match self.files {
            Some(files) => files.remember_failed_sync(result),
            None => result,
        };
        // Another process may have written to the file, which SQLite would not notice.
        self.read_only.map_or(Ok(()), ReadOnlyFile::check)?;
        result
    }
}

fn run_on(connection: &Connection, statements: &[Statement], each: EachRow) -> Result<Vec<usize>> {
    let mut changed = Vec::with_capacity(statements.len());
    for statement in statements {
        let Statement {
            text, parameters, ..
        } = statement;
        let mut prepared = connection.prepare_cached(text)?;
        // For SQLite `$1` is a name, and names are numbered in the order in which they first
        // appear.
        debug_assert!(
            (1..=parameters.len()).all(|n| prepared.parameter_name(n) == Some(&format!("${n}"))),
            "the parameters first appear in another order than their numbers: {text}"
        );
        let columns = prepared.column_count();
        let mut rows = prepared.query(params_from_iter(parameters))?;
        while let Some(row) = rows.next()? {
            let values: rusqlite::Result<Vec<SqlValue>> = (0..columns)
                .map(|column| row.get_ref(column).map(SqlValue::from))
                .collect();
            each(changed.len(), Row::new(values?))?;
        }
        changed.push(connection.changes() as usize);
    }
    Ok(changed)
}

impl From<ValueRef<'_>> for SqlValue {
    fn from(value: ValueRef) -> Self {
        match value {
            ValueRef::Null => Self::Null,
            ValueRef::Integer(number) => Self::Int(number),
            ValueRef::Real(number) => Self::Real(number),
            ValueRef::Text(text) => Self::Text(String::from_utf8_lossy(text).into_owned()),
            ValueRef::Blob(bytes) => Self::Blob(bytes.to_vec()),
        }
    }
}

impl ToSql for SqlValue {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(ToSqlOutput::Borrowed(match self {
            Self::Null => ValueRef::Null,
            Self::Int(number) => ValueRef::Integer(*number),
            Self::Real(number) => ValueRef::Real(*number),
            Self::Text(text) => ValueRef::Text(text.as_bytes()),
            Self::Blob(bytes) => ValueRef::Blob(bytes),
        }))
    }
}

impl From<rusqlite::Error> for DatabaseError {
    fn from(error: rusqlite::Error) -> Self {
        let extended = error.sqlite_error().map(|error| error.extended_code);
        if let Some(ffi::SQLITE_IOERR_FSYNC | ffi::SQLITE_IOERR_DIR_FSYNC) = extended {
            return Self::NotSynced(Arc::new(io::Error::other(error.to_string())));
        }
        match error.sqlite_error_code() {
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => Self::Busy,
            Some(ErrorCode::DiskFull) => Self::Full,
            Some(ErrorCode::ReadOnly) => Self::ReadOnly,
            Some(ErrorCode::CannotOpen) => Self::CannotOpen,
            Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => {
                Self::Damaged(error.to_string())
            }
            _ => Self::Other(error.to_string()),
        }
    }
}
