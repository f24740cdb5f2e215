//! A session runs statements, in a transaction or on one state of the database.

use super::error::{DatabaseError, Result};
use super::postgres::session::PgSession;
use super::sqlite::session::SqliteSession;
use super::statement::{EachRow, Statement};
use super::value::{FromValue, Row, SqlValue};

/// The words of a script in which the engines differ, for SQLite and for PostgreSQL. Text is
/// ordered by its bytes in both.
const DIALECT: [(&str, &str, &str); 7] = [
    ("{INT}", "INTEGER", "BIGINT"),
    ("{TEXT}", "TEXT", "TEXT COLLATE \"C\""),
    ("{REAL}", "REAL", "DOUBLE PRECISION"),
    ("{BLOB}", "BLOB", "BYTEA"),
    ("{STRICT}", "STRICT", ""),
    ("{CLUSTERED}", "STRICT, WITHOUT ROWID", ""),
    (
        "{ZERO_HASH}",
        "zeroblob(32)",
        "decode(repeat('00', 32), 'hex')",
    ),
];

pub enum Session<'a> {
    Sqlite(SqliteSession<'a>),
    Postgres(&'a PgSession),
}

impl Session<'_> {
    /// Runs statements one after the other, on PostgreSQL in one round trip. Calls `each` with the
    /// number of the statement and every row of it, until that returns an error. Returns how many
    /// rows each statement changed.
    pub fn run(&self, statements: &[Statement], each: EachRow) -> Result<Vec<usize>> {
        match self {
            Self::Sqlite(session) => session.run(statements, each),
            Self::Postgres(session) => session.run(statements, each),
        }
    }

    /// Runs statements without parameters that are separated by semicolons. `{INT}` and the other
    /// words of `DIALECT` stand for the engine's own.
    pub fn run_script(&self, script: &str) -> Result<()> {
        let script = DIALECT
            .iter()
            .fold(script.to_owned(), |script, (word, sqlite, postgres)| {
                let own = match self {
                    Self::Sqlite(_) => sqlite,
                    Self::Postgres(_) => postgres,
                };
                script.replace(word, own)
            });
        match self {
            Self::Sqlite(session) => session.run_script(&script),
            Self::Postgres(session) => session.run_script(&script),
        }
    }

    /// Returns how many rows were changed.
    pub fn execute(&self, statement: &str, parameters: &[SqlValue]) -> Result<usize> {
        self.query(statement, parameters, &mut |_| Ok(()))
    }

    /// Calls `each` with every row, until it returns an error. Returns how many rows were changed.
    pub fn query(
        &self,
        statement: &str,
        parameters: &[SqlValue],
        each: &mut dyn FnMut(Row) -> Result<()>,
    ) -> Result<usize> {
        let statement = Statement::new(statement.to_owned(), parameters);
        let changed = self.run(&[statement], &mut |_, row| each(row))?;
        Ok(changed.first().copied().unwrap_or(0))
    }

    pub fn rows<T>(
        &self,
        statement: &str,
        parameters: &[SqlValue],
        mut read: impl FnMut(Row) -> Result<T>,
    ) -> Result<Vec<T>> {
        let mut found = Vec::new();
        self.query(statement, parameters, &mut |row| {
            found.push(read(row)?);
            Ok(())
        })?;
        Ok(found)
    }

    /// The first row, or `None`.
    pub fn first<T>(
        &self,
        statement: &str,
        parameters: &[SqlValue],
        read: impl FnMut(Row) -> Result<T>,
    ) -> Result<Option<T>> {
        Ok(self.rows(statement, parameters, read)?.into_iter().next())
    }

    /// The only value of a statement that always has one row.
    pub fn value<T: FromValue>(&self, statement: &str, parameters: &[SqlValue]) -> Result<T> {
        self.first(statement, parameters, |mut row| row.column())?
            .ok_or(DatabaseError::NoRow)
    }
}
