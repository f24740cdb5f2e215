//! The boundary to a database: values, rows and statements, without the name of any database library.
//!
//! Statements are written once, with `$1`, `$2` … as parameters that first appear in this order, in SQL that SQLite and
//! PostgreSQL both accept. An engine begins transactions, and maps its errors to `DatabaseError`. What runs in them, and what
//! follows if the answer to a commit was lost, is the same for both.

mod database;
pub mod postgres;
pub mod sqlite;
mod statement;
mod value;

use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

pub use database::{DatabaseLocation, ServeLock};
use postgres::Postgres;
use sqlite::Sqlite;
pub use statement::{BoundStatement, EachRow, SqlSession, Statement, bound};
pub use value::{FromValue, Row, SqlValue};

use super::{DatabaseError, Result, upgrades};
use crate::progress::Progress;

/// Parameters of different types.
macro_rules! values {
    ($($value:expr),* $(,)?) => { [$($crate::store::engine::SqlValue::from($value)),*] };
}
pub(in crate::store) use values;

/// The tables and their version, for a new database. An engine fills in its types.
const SCHEMA: &str = include_str!("../schema.sql");
pub const SCHEMA_VERSION: i64 = 10;

/// The changes that an open may make to the database.
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
    /// Nothing at all: also for a file that can't be written.
    Read,
}

impl Access {
    fn may_create(self) -> bool {
        matches!(self, Self::Serve | Self::Create)
    }

    /// Returns whether a database of this version can be used as it is: by programs that know `oldest_known`. Fails if it
    /// can't and may not be upgraded. A running service of that version would fail from then on.
    fn is_current(self, found: i64, oldest_known: i64) -> Result<bool> {
        match self {
            _ if oldest_known > SCHEMA_VERSION => Err(DatabaseError::Newer(found)),
            _ if found >= SCHEMA_VERSION => Ok(true),
            _ if found < upgrades::OLDEST_VERSION => Err(DatabaseError::Unreleased(found)),
            Self::Serve | Self::Upgrade => Ok(false),
            Self::Create | Self::Existing | Self::Read => Err(DatabaseError::Older(found)),
        }
    }
}

/// The connections to PostgreSQL: the leader of a group, look-ups of keys, two for the console, and background tasks.
const CONNECTIONS: usize = 8;

/// The time until a row has to be durable, with all attempts: an inference was spent on it, so it waits for a planned
/// switchover.
const APPEND_TIMEOUT: Duration = Duration::from_secs(20);

/// The time for looking up a key, with all attempts.
const LOOK_UP_TIMEOUT: Duration = Duration::from_secs(5);

pub fn open(
    database: &DatabaseLocation,
    access: Access,
    progress: &Progress,
) -> Result<Box<dyn Engine>> {
    Ok(match database {
        DatabaseLocation::Sqlite(path) => Box::new(Sqlite::open(path, access, progress)?),
        DatabaseLocation::Postgres(uri) => Box::new(Postgres::open(uri, CONNECTIONS, access)?),
    })
}

/// A database. `impl dyn Engine` runs transactions on it, and has the SQL that differs.
pub trait Engine: Send + Sync {
    /// Begins a transaction, which is rolled back if it is dropped before its commit.
    fn begin(&self, mode: TransactionMode) -> Result<Box<dyn Transaction + '_>>;

    /// Returns whether this open created the tables.
    fn is_new(&self) -> bool;

    /// The time that a write may take, with all its attempts.
    fn write_timeout(&self) -> Duration;

    fn append_timeout(&self) -> Duration {
        APPEND_TIMEOUT
    }

    /// The reason why every request would fail now; `None` if that is not known without a try.
    fn lost(&self) -> Option<DatabaseError> {
        None
    }

    /// Drops every connection after an outcome that stays unknown.
    fn lose(&self, _cause: &str) {}

    /// The engine, for its own features: checkpoints and files.
    fn sqlite(&self) -> Option<&Sqlite> {
        None
    }

    #[cfg(test)]
    fn sqlite_mut(&mut self) -> Option<&mut Sqlite> {
        None
    }
}

#[derive(Clone, Copy)]
pub enum TransactionMode {
    /// One statement that reads, without BEGIN and COMMIT.
    Statement,
    /// All statements see the same state.
    Read,
    /// A read whose statements may take minutes.
    Report,
    Write,
    /// A write that waits until its deadline, also for a database that is lost.
    WriteUntil(Instant),
    /// The same for a group of rows, with a connection that nothing else can use.
    Append(Instant),
}

pub trait Transaction: SqlSession {
    /// Commits after the last statements, on PostgreSQL in one round trip. Returns how many rows each of them changed.
    fn commit(&self, last: &[Statement]) -> Result<Vec<usize>>;

    /// Returns whether the connection can't be used any more.
    fn is_lost(&self) -> bool {
        false
    }
}

impl dyn Engine + '_ {
    /// Runs `work` on one state of the database.
    pub fn read<T>(&self, work: impl FnOnce(&dyn SqlSession) -> Result<T>) -> Result<T> {
        self.run(TransactionMode::Read, work)
    }

    /// The first row of one statement. If the connection was lost, it runs again on another one.
    pub fn look_up<T>(
        &self,
        statement: &str,
        parameters: &[SqlValue],
        read: impl Fn(Row) -> Result<T>,
    ) -> Result<Option<T>> {
        let deadline = Instant::now() + LOOK_UP_TIMEOUT;
        loop {
            let session = self.begin(TransactionMode::Statement)?;
            match (&*session as &dyn SqlSession).first(statement, parameters, &read) {
                Err(_) if session.is_lost() && Instant::now() < deadline => {}
                found => {
                    let found = found?;
                    session.commit(&[])?;
                    return Ok(found);
                }
            }
        }
    }

    /// Runs `work` in a transaction of its own, again if another one got in its way. It is durable when this returns.
    pub fn transaction<T>(&self, work: impl Fn(&dyn SqlSession) -> Result<T>) -> Result<T> {
        let deadline = Instant::now() + self.write_timeout();
        let value = loop {
            match self.run(TransactionMode::Write, &work) {
                Err(DatabaseError::Busy) if Instant::now() < deadline => {}
                result => break result?,
            }
        };
        self.checkpoint_if_due();
        Ok(value)
    }

    /// Runs `work` once, in a transaction.
    pub fn run<T>(
        &self,
        mode: TransactionMode,
        work: impl FnOnce(&dyn SqlSession) -> Result<T>,
    ) -> Result<T> {
        let transaction = self.begin(mode)?;
        let value = work(&*transaction)?;
        transaction.commit(&[])?;
        Ok(value)
    }

    /// Runs statements in one transaction. Returns how many rows the last one changed; all of it is durable then. If the
    /// answer to the commit was lost, they run again, so a repetition has to have the same result, or to change nothing if
    /// they were done.
    pub fn write(&self, statements: &[Statement]) -> Result<usize> {
        let mode = TransactionMode::WriteUntil(Instant::now() + self.write_timeout());
        let done = statements.last().and_then(|last| last.done.as_deref());
        let (settled, changed) = self.group(mode, |session, before: Option<&Option<usize>>| {
            if before.is_none() {
                return Ok((None, statements.to_vec()));
            }
            let mut changed = session
                .run(&bound(statements), &mut |_, _| Ok(()))?
                .pop()
                .unwrap_or(0);
            if let Some(done) = done.filter(|_| changed == 0) {
                // The commit of this write proves that the row, if it is found, is durable.
                session.execute(postgres::TRY_WRITE, &[])?;
                changed = session
                    .rows(&done.text, &done.parameters, |_| Ok(()))?
                    .len();
            }
            Ok((Some(changed), Vec::new()))
        })?;
        self.checkpoint_if_due();
        Ok(settled.or(changed.last().copied()).unwrap_or(0))
    }

    /// Runs `work`, and then the statements that it returns together with COMMIT, until the deadline of the mode. An
    /// answer that was lost before COMMIT was sent means that nothing was done: the server's process has to read COMMIT
    /// first. If the answer to COMMIT was lost, `work` runs again with the value that it returned, and finds out. Also
    /// returns how many rows each of the statements changed.
    pub fn group<T>(
        &self,
        mode: TransactionMode,
        work: impl Fn(&dyn SqlSession, Option<&T>) -> Result<(T, Vec<Statement>)>,
    ) -> Result<(T, Vec<usize>)> {
        let mut doubt: Option<(T, DatabaseError)> = None;
        loop {
            let transaction = match self.begin(mode) {
                Ok(transaction) => transaction,
                Err(error) => return Err(doubt.map_or(error, |(_, unknown)| unknown)),
            };
            let error = match work(&*transaction, doubt.as_ref().map(|(value, _)| value)) {
                Ok((value, last)) => match transaction.commit(&last) {
                    Ok(changed) => return Ok((value, changed)),
                    Err(error) => {
                        if matches!(error, DatabaseError::Unknown(_)) {
                            doubt = Some((value, error.clone()));
                        }
                        error
                    }
                },
                Err(error) => error,
            };
            let can_help = transaction.is_lost() || matches!(error, DatabaseError::Busy);
            if !can_help || mode.is_over() {
                if let DatabaseError::Unknown(cause) = &error {
                    self.lose(cause);
                }
                return Err(doubt.map_or(error, |(_, unknown)| unknown));
            }
        }
    }

    /// Moves the WAL into the database if it has become large. PostgreSQL has its own checkpoints.
    pub fn checkpoint_if_due(&self) {
        if let Some(sqlite) = self.sqlite() {
            sqlite.checkpoint_if_due();
        }
    }

    /// The time by the database's clock, in Unix seconds, as an expression.
    pub fn clock(&self) -> &'static str {
        if self.sqlite().is_some() {
            "unixepoch()"
        } else {
            postgres::CLOCK
        }
    }

    /// A query for the schema's version, and the versions that this program knows.
    pub fn known_versions(&self) -> (&'static str, RangeInclusive<i64>) {
        match self.sqlite() {
            Some(_) => ("PRAGMA user_version", SCHEMA_VERSION..=SCHEMA_VERSION),
            None => (
                "SELECT oldest_known FROM schema_version",
                0..=SCHEMA_VERSION,
            ),
        }
    }

    /// A query that may end with ` FOR UPDATE` or the like, which locks its rows until the transaction ends. SQLite does not
    /// know such a clause: its transactions lock everything.
    pub fn locking<'a>(&self, query: &'a str) -> &'a str {
        let without = query.split(" FOR ").next().unwrap_or(query);
        if self.sqlite().is_some() {
            without
        } else {
            query
        }
    }

    /// A hint for reading the days of one key from `usage_rollup`. Without statistics, which PostgreSQL has, SQLite would read
    /// the days of all keys by the primary key.
    pub fn days_hint(&self) -> &'static str {
        if self.sqlite().is_some() {
            "INDEXED BY rollup_days"
        } else {
            ""
        }
    }
}

impl TransactionMode {
    fn is_over(self) -> bool {
        match self {
            Self::WriteUntil(deadline) | Self::Append(deadline) => deadline <= Instant::now(),
            _ => true,
        }
    }
}
