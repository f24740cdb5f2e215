//! The boundary to a database: values, rows and statements, without the name of any database library.
//!
//! Statements are written once, with `$1`, `$2` … as parameters that first appear in this order, in SQL that SQLite and
//! PostgreSQL both accept. An engine provides
//!
//! - `read`: statements that all see the same state;
//! - `write` and `transaction`: statements that are done together or not at all;
//! - `group`: the same for a group of the ledger, which is settled if the answer to its commit was lost;
//! - what is its own: opening, durability, checkpoints, backup, and the mapping of its errors to `StoreError`.

mod database;
pub mod postgres;
pub mod sqlite;
mod table;
mod value;

use std::time::{Duration, Instant};

pub use database::{Database, ServeLock};
use postgres::Postgres;
use sqlite::Sqlite;
pub use sqlite::SyncTurn;
pub use table::Table;
pub use value::{FromValue, Row, SqlValue};

use super::StoreError;

/// Parameters of different types.
macro_rules! values {
    ($($value:expr),* $(,)?) => { [$($crate::store::engine::SqlValue::from($value)),*] };
}
pub(in crate::store) use values;

/// The tables and their version, for a new database. An engine fills in its types.
const SCHEMA: &str = include_str!("../schema.sql");
pub const SCHEMA_VERSION: i64 = 9;

/// The oldest version that can be upgraded.
const OLDEST_VERSION: i64 = 8;

/// What an open may do to the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Create it, or upgrade it: only for a process that holds the lock of `serve`.
    Serve,
    /// Create it.
    Create,
    /// Upgrade it: only for a copy that no other process uses.
    Upgrade,
    /// Neither.
    Existing,
}

impl Access {
    /// Whether it may create a database.
    fn may_create(self) -> bool {
        matches!(self, Self::Serve | Self::Create)
    }

    /// Whether it may upgrade a database of this version. A running service of that version would fail from then on.
    fn check_upgrade(self, found: i64) -> Result<(), StoreError> {
        match self {
            _ if found < OLDEST_VERSION => Err(StoreError::Unreleased(found)),
            Self::Serve | Self::Upgrade => Ok(()),
            Self::Create | Self::Existing => Err(StoreError::Older { found, known: SCHEMA_VERSION }),
        }
    }
}

/// The connections to PostgreSQL: the leaders of the two groups, strangers, two for the console, and background tasks.
const CONNECTIONS: usize = 8;

pub enum Engine {
    Sqlite(Box<Sqlite>),
    Postgres(Postgres),
}

impl Engine {
    pub fn open(database: &Database, access: Access) -> Result<Self, StoreError> {
        Ok(match database {
            Database::Sqlite(path) => Self::Sqlite(Box::new(Sqlite::open(path, access)?)),
            Database::Postgres(uri) => Self::Postgres(Postgres::open(uri, CONNECTIONS, access)?),
        })
    }

    /// Fails if the schema was changed since the database was opened, so that this program does not know it.
    pub fn check_version(&self, session: &dyn SqlSession) -> Result<(), StoreError> {
        let (version, known) = match self {
            Self::Sqlite(_) => ("PRAGMA user_version", SCHEMA_VERSION..=SCHEMA_VERSION),
            Self::Postgres(_) => ("SELECT oldest_known FROM schema_version", 0..=SCHEMA_VERSION),
        };
        match session.value(version, &[])? {
            found if known.contains(&found) => Ok(()),
            found => Err(StoreError::VersionChanged { found, known: SCHEMA_VERSION }),
        }
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
    pub fn read<T>(
        &self,
        work: impl FnOnce(&dyn SqlSession) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        match self {
            Self::Sqlite(sqlite) => sqlite.read(work),
            Self::Postgres(postgres) => postgres.read(work),
        }
    }

    /// The same for work that may take minutes.
    pub fn report<T>(
        &self,
        work: impl FnOnce(&dyn SqlSession) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        match self {
            Self::Sqlite(sqlite) => sqlite.read(work),
            Self::Postgres(postgres) => postgres.report(work),
        }
    }

    /// Writes statements together. Returns how many rows the last one changed.
    pub fn write(&self, write: Write) -> Result<usize, StoreError> {
        match self {
            Self::Sqlite(sqlite) => sqlite.transaction(write.durable, |session| {
                let changed = session.run(&bound(&write.statements), &mut |_, _| Ok(()))?;
                Ok(changed.last().copied().unwrap_or(0))
            }),
            Self::Postgres(postgres) => postgres.write(&write),
        }
    }

    /// Runs `work`, and the statements that it returns, in one transaction that ends before the deadline. It is not synced.
    /// If the answer to the commit was lost, `work` gets the value that it returned before, and has to find out whether that
    /// was done. If `waits_if_lost`, it waits for a database that is lost.
    pub fn group<T: Clone>(
        &self,
        deadline: Instant,
        waits_if_lost: bool,
        work: impl Fn(&dyn SqlSession, Option<&T>) -> Result<(T, Vec<Statement>), StoreError>,
    ) -> Result<T, StoreError> {
        match self {
            Self::Sqlite(sqlite) => sqlite.transaction_until(deadline, |session| {
                let (value, last) = work(session, None)?;
                session.run(&bound(&last), &mut |_, _| Ok(()))?;
                Ok(value)
            }),
            Self::Postgres(postgres) => postgres.group(deadline, waits_if_lost, work),
        }
    }

    /// How long a group may take; a member of one that waits_if_lost a lost database has cost an inference.
    pub fn write_timeout(&self, waits_if_lost: bool) -> Duration {
        match self {
            Self::Sqlite(sqlite) => sqlite.write_timeout,
            Self::Postgres(_) => postgres::write_timeout(waits_if_lost),
        }
    }

    /// Makes every earlier commit durable.
    pub fn sync(&self) -> Result<(), StoreError> {
        self.sync_turn().map_or(Ok(()), SyncTurn::sync)
    }

    /// Waits until no other sync runs. Returns `None` on PostgreSQL, where a commit is durable.
    pub fn sync_turn(&self) -> Option<SyncTurn<'_>> {
        self.sqlite().map(Sqlite::sync_turn)
    }

    /// A query that may end with ` FOR UPDATE` or the like, which locks its rows until the transaction ends. SQLite does not
    /// know such a clause: its transactions lock everything.
    pub fn locking<'a>(&self, query: &'a str) -> &'a str {
        match self {
            Self::Sqlite(_) => query.split(" FOR ").next().unwrap_or(query),
            Self::Postgres(_) => query,
        }
    }

    /// Runs `work` in a transaction of its own, again if another one got in its way; if `durable`, it is on the disk when
    /// this returns.
    pub fn transaction<T>(
        &self,
        durable: bool,
        work: impl Fn(&dyn SqlSession) -> Result<T, StoreError>,
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

    /// Fails every write from now on if the lock's file is removed or replaced. A session lock is not a file.
    pub fn watch(&mut self, lock: &ServeLock) -> Result<(), StoreError> {
        match (self, lock) {
            (Self::Sqlite(sqlite), ServeLock::File(lock)) => sqlite.watch(lock),
            _ => Ok(()),
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

/// A statement's text and its parameters.
pub type BoundStatement<'a> = (&'a str, &'a [SqlValue]);

/// Runs statements, in a transaction or on one state of the database.
pub trait SqlSession {
    /// Runs statements one after the other, on PostgreSQL in one round trip. Calls `each` with the number of the statement
    /// and every row of it, until that returns an error. Returns how many rows each statement changed.
    fn run(
        &self,
        statements: &[BoundStatement],
        each: &mut dyn FnMut(usize, Row) -> Result<(), StoreError>,
    ) -> Result<Vec<usize>, StoreError>;
}

impl dyn SqlSession + '_ {
    /// Returns how many rows were changed.
    pub fn execute(&self, statement: &str, parameters: &[SqlValue]) -> Result<usize, StoreError> {
        Ok(self.run(&[(statement, parameters)], &mut |_, _| Ok(()))?.pop().unwrap_or(0))
    }

    /// Calls `each` with every row, until it returns an error.
    pub fn query(
        &self,
        statement: &str,
        parameters: &[SqlValue],
        each: &mut dyn FnMut(Row) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.run(&[(statement, parameters)], &mut |_, row| each(row)).map(drop)
    }

    pub fn rows<T>(
        &self,
        statement: &str,
        parameters: &[SqlValue],
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
        parameters: &[SqlValue],
        read: impl FnMut(Row) -> Result<T, StoreError>,
    ) -> Result<Option<T>, StoreError> {
        Ok(self.rows(statement, parameters, read)?.into_iter().next())
    }

    /// The only value of a statement that always has one row.
    pub fn value<T: FromValue>(&self, statement: &str, parameters: &[SqlValue]) -> Result<T, StoreError> {
        self.first(statement, parameters, |mut row| row.next())?.ok_or(StoreError::NoRow)
    }
}

/// Statements that are written together or not at all.
pub struct Write {
    pub statements: Vec<Statement>,
    /// Whether they have to be on the disk when the call returns.
    pub durable: bool,
}

pub fn bound(statements: &[Statement]) -> Vec<BoundStatement<'_>> {
    statements.iter().map(|statement| (statement.text, statement.parameters.as_slice())).collect()
}

pub struct Statement {
    pub text: &'static str,
    pub parameters: Vec<SqlValue>,
    /// A query that finds a row if the statement was done.
    pub done: Option<Box<Statement>>,
}

impl Statement {
    pub fn new(text: &'static str, parameters: impl Into<Vec<SqlValue>>) -> Self {
        Self { text, parameters: parameters.into(), done: None }
    }

    /// With a query that tells whether it was done, if the answer was lost and a repetition changes nothing. A statement
    /// without one can be repeated with the same result.
    pub fn settled_by(self, query: &'static str, parameters: impl Into<Vec<SqlValue>>) -> Self {
        Self { done: Some(Box::new(Self::new(query, parameters))), ..self }
    }
}
