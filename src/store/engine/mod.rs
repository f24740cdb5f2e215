//! The boundary to a database: values, rows and statements, without the name of any database library.
//!
//! Statements are written once, with `$1`, `$2` … as parameters, in SQL that SQLite and PostgreSQL both accept. An
//! engine provides
//!
//! - `read`: statements that all see the same state;
//! - `write`: statements that may share a transaction with those of other threads (group commit);
//! - `transaction`: statements that have a transaction to themselves;
//! - what is its own: opening, durability, checkpoints, backup, and the mapping of its errors to `StoreError`.

mod database;
pub mod postgres;
pub mod sqlite;
mod table;
mod value;

use std::path::Path;

pub use database::{Database, ServeLock};
use postgres::Postgres;
use sqlite::Sqlite;
pub use table::Table;
pub use value::{FromValue, Row, Value};

use super::StoreError;

/// Parameters of different types.
macro_rules! values {
    ($($value:expr),* $(,)?) => { [$($crate::store::engine::Value::from($value)),*] };
}
pub(in crate::store) use values;

/// The tables and their version, for a new database. An engine fills in its types.
const SCHEMA: &str = include_str!("../schema.sql");
const SCHEMA_VERSION: i64 = 8;

/// What happens if there is no database where one is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IfMissing {
    Create,
    Fail,
}

/// The connections to PostgreSQL besides those of the workers: two for the console, sealing, and one to spare.
const OTHER_CONNECTIONS: usize = 4;

pub enum Engine {
    Sqlite(Box<Sqlite>),
    Postgres(Postgres),
}

impl Engine {
    pub fn open(database: &Database, workers: usize, if_missing: IfMissing) -> Result<Self, StoreError> {
        Ok(match database {
            Database::Sqlite(path) => Self::Sqlite(Box::new(Sqlite::open(path, if_missing)?)),
            Database::Postgres(uri) => {
                Self::Postgres(Postgres::open(uri, workers + OTHER_CONNECTIONS, if_missing)?)
            }
        })
    }

    /// The time by the database's clock, in Unix seconds, as an expression.
    pub fn clock(&self) -> &'static str {
        match self {
            Self::Sqlite(_) => "unixepoch()",
            Self::Postgres(_) => postgres::CLOCK,
        }
    }

    /// The same with fractions, by the clock of another host; `None` if the database is a file.
    pub fn precise_time(&self) -> Result<Option<f64>, StoreError> {
        let time = "SELECT CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION)";
        match self {
            Self::Sqlite(_) => Ok(None),
            Self::Postgres(postgres) => postgres.read(|session| session.value(time, &[])).map(Some),
        }
    }

    /// Runs `work` on one state of the database.
    pub fn read<T>(&self, work: impl FnOnce(&dyn Session) -> Result<T, StoreError>) -> Result<T, StoreError> {
        match self {
            Self::Sqlite(sqlite) => sqlite.read(work),
            Self::Postgres(postgres) => postgres.read(work),
        }
    }

    /// The same for work that may take minutes.
    pub fn report<T>(
        &self,
        work: impl FnOnce(&dyn Session) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        match self {
            Self::Sqlite(sqlite) => sqlite.read(work),
            Self::Postgres(postgres) => postgres.report(work),
        }
    }

    /// Writes in a transaction that other threads may share. Returns how many rows the last statement changed.
    pub fn write(&self, write: Write) -> Result<usize, StoreError> {
        match self {
            Self::Sqlite(sqlite) => sqlite.write(write),
            Self::Postgres(postgres) => postgres.write(&write),
        }
    }

    /// Runs `work` in a transaction of its own, again if another one got in its way; if `durable`, it is on the disk when
    /// this returns.
    pub fn transaction<T>(
        &self,
        durable: bool,
        work: impl Fn(&dyn Session) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        match self {
            Self::Sqlite(sqlite) => sqlite.transaction(durable, work),
            Self::Postgres(postgres) => postgres.transaction(work),
        }
    }

    /// Why every request would fail now; `None` if that is not known without a try.
    pub fn lost(&self) -> Option<StoreError> {
        match self {
            Self::Sqlite(_) => None,
            Self::Postgres(postgres) => postgres.lost(),
        }
    }

    /// Whether this transaction is the only one of all gateways that removes old rows.
    pub fn is_only_remover(&self, session: &dyn Session) -> Result<bool, StoreError> {
        match self {
            Self::Sqlite(_) => Ok(true),
            Self::Postgres(_) => session.value(postgres::TRY_RETENTION_LOCK, &[]),
        }
    }

    /// Whether a write hangs. On PostgreSQL every statement has a deadline.
    pub fn is_stuck(&self) -> bool {
        matches!(self, Self::Sqlite(sqlite) if sqlite.is_stuck())
    }

    /// Whether the files are sound. PostgreSQL checks its own files.
    pub fn check(&self) -> Result<(), StoreError> {
        match self {
            Self::Sqlite(sqlite) => sqlite.check(),
            Self::Postgres(_) => Ok(()),
        }
    }

    /// Runs `work` once, in a durable transaction of its own that gets in no other's way.
    pub fn try_write(
        &self,
        work: impl FnOnce(&dyn Session) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        match self {
            Self::Sqlite(sqlite) => sqlite.transaction(true, work),
            Self::Postgres(postgres) => postgres.try_write(work),
        }
    }

    /// Fails every write from now on if the lock's file is removed or replaced. A session lock is not a file.
    pub fn watch(&mut self, lock: &ServeLock) -> Result<(), StoreError> {
        match (self, lock) {
            (Self::Sqlite(sqlite), ServeLock::File(lock)) => sqlite.watch(lock),
            _ => Ok(()),
        }
    }

    pub fn backup(&self, to: &Path) -> Result<i64, StoreError> {
        match self {
            Self::Sqlite(sqlite) => sqlite.backup(to),
            Self::Postgres(_) => Err(StoreError::Other(
                "the database is PostgreSQL, which has its own backups: use pg_dump, or those of the cluster"
                    .into(),
            )),
        }
    }

    /// Gives space back to the file system.
    pub fn shrink(&self) -> Result<(), StoreError> {
        match self {
            Self::Sqlite(sqlite) => sqlite.shrink(),
            Self::Postgres(_) => Ok(()),
        }
    }

    /// The engine, for what only SQLite has: checkpoints and their WAL.
    pub fn sqlite(&self) -> Option<&Sqlite> {
        match self {
            Self::Sqlite(sqlite) => Some(sqlite),
            Self::Postgres(_) => None,
        }
    }
}

/// Runs statements, in a transaction or on one state of the database.
pub trait Session {
    /// Returns how many rows were changed.
    fn execute(&self, statement: &str, parameters: &[Value]) -> Result<usize, StoreError>;

    /// Calls `each` with every row, until it returns an error.
    fn query(
        &self,
        statement: &str,
        parameters: &[Value],
        each: &mut dyn FnMut(Row) -> Result<(), StoreError>,
    ) -> Result<(), StoreError>;
}

impl dyn Session + '_ {
    pub fn rows<T>(
        &self,
        statement: &str,
        parameters: &[Value],
        mut read: impl FnMut(Row) -> Result<T, StoreError>,
    ) -> Result<Vec<T>, StoreError> {
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
        parameters: &[Value],
        read: impl FnMut(Row) -> Result<T, StoreError>,
    ) -> Result<Option<T>, StoreError> {
        Ok(self.rows(statement, parameters, read)?.into_iter().next())
    }

    /// The only value of a statement that always has one row.
    pub fn value<T: FromValue>(&self, statement: &str, parameters: &[Value]) -> Result<T, StoreError> {
        self.first(statement, parameters, |mut row| row.next())?.ok_or(StoreError::NoRow)
    }
}

/// Statements that are written together or not at all.
pub struct Write {
    pub statements: Vec<Statement>,
    /// Whether they have to be on the disk when the call returns.
    pub durable: bool,
}

pub struct Statement {
    pub text: &'static str,
    pub parameters: Vec<Value>,
    /// A query that finds a row if the statement was done.
    pub done: Option<Box<Statement>>,
}

impl Statement {
    pub fn new(text: &'static str, parameters: impl Into<Vec<Value>>) -> Self {
        Self { text, parameters: parameters.into(), done: None }
    }

    /// With a query that tells whether it was done, if the answer was lost and a repetition changes nothing. A statement
    /// without one can be repeated with the same result.
    pub fn settled_by(self, query: &'static str, parameters: impl Into<Vec<Value>>) -> Self {
        Self { done: Some(Box::new(Self::new(query, parameters))), ..self }
    }
}
