//! The boundary to a database: values, rows and statements, without the name of any database library.
//!
//! Statements are written once, with `$1`, `$2` … as parameters that first appear in this order, in SQL that SQLite and
//! PostgreSQL both accept. An engine begins transactions, and maps its errors to `StoreError`. What runs in them, and what
//! follows if the answer to a commit was lost, is the same for both.

mod database;
pub mod postgres;
pub mod sqlite;
mod statement;
mod table;
mod value;

use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

pub use database::{Database, ServeLock};
use postgres::Postgres;
use sqlite::Sqlite;
pub use sqlite::SyncTurn;
pub use statement::{BoundStatement, SqlSession, Statement, bound};
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
}

impl Access {
    fn may_create(self) -> bool {
        matches!(self, Self::Serve | Self::Create)
    }

    /// Fails if it may not upgrade a database of this version. A running service of that version would fail from then on.
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

pub fn open(database: &Database, access: Access) -> Result<Box<dyn Engine>, StoreError> {
    Ok(match database {
        Database::Sqlite(path) => Box::new(Sqlite::open(path, access)?),
        Database::Postgres(uri) => Box::new(Postgres::open(uri, CONNECTIONS, access)?),
    })
}

/// A database. `impl dyn Engine` runs transactions on it.
pub trait Engine: Send + Sync {
    /// Begins a transaction, which is rolled back if it is dropped before its commit.
    fn begin(&self, mode: TransactionMode) -> Result<Box<dyn Transaction + '_>, StoreError>;

    /// The time that a write may take. One that waits for a lost database has cost an inference.
    fn write_timeout(&self, waits_if_lost: bool) -> Duration;

    /// The time by the database's clock, in Unix seconds, as an expression.
    fn clock(&self) -> &'static str;

    /// A query for the schema's version, and the versions that this program knows.
    fn known_versions(&self) -> (&'static str, RangeInclusive<i64>);

    /// A query for the time with fractions, by the clock of another host; `None` if the database is a file.
    fn precise_time(&self) -> Option<&'static str> {
        None
    }

    /// A query that may end with ` FOR UPDATE` or the like, which locks its rows until the transaction ends.
    fn locking<'a>(&self, query: &'a str) -> &'a str {
        query
    }

    /// A hint for reading the days of one key from `usage_rollup`.
    fn days_hint(&self) -> &'static str {
        ""
    }

    /// The reason why every request would fail now; `None` if that is not known without a try.
    fn lost(&self) -> Option<StoreError> {
        None
    }

    /// Drops every connection after an outcome that stays unknown.
    fn lose(&self, _cause: &str) {}

    /// The engine, for its own features: checkpoints, syncs and files.
    fn sqlite(&self) -> Option<&Sqlite> {
        None
    }

    fn sqlite_mut(&mut self) -> Option<&mut Sqlite> {
        None
    }
}

#[derive(Clone, Copy)]
pub enum TransactionMode {
    /// All statements see the same state.
    Read,
    /// A read whose statements may take minutes.
    Report,
    Write,
    /// A write that waits until its deadline, for a lost database only if it says so.
    WriteUntil {
        deadline: Instant,
        waits_if_lost: bool,
    },
}

pub trait Transaction: SqlSession {
    /// Commits after the last statements, on PostgreSQL in one round trip. Returns how many rows each of them changed.
    fn commit(&self, last: &[Statement]) -> Result<Vec<usize>, StoreError>;

    /// Returns whether the connection can't be used any more.
    fn is_lost(&self) -> bool {
        false
    }
}

impl dyn Engine + '_ {
    /// Runs `work` on one state of the database.
    pub fn read<T>(
        &self,
        work: impl FnOnce(&dyn SqlSession) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.run(TransactionMode::Read, work)
    }

    /// Runs a read that may take minutes.
    pub fn report<T>(
        &self,
        work: impl FnOnce(&dyn SqlSession) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.run(TransactionMode::Report, work)
    }

    /// Runs `work` in a transaction of its own, again if another one got in its way; if `durable`, it is on the disk when
    /// this returns.
    pub fn transaction<T>(
        &self,
        durable: bool,
        work: impl Fn(&dyn SqlSession) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let deadline = Instant::now() + self.write_timeout(false);
        let value = loop {
            match self.run(TransactionMode::Write, &work) {
                Err(StoreError::Busy) if Instant::now() < deadline => {}
                result => break result?,
            }
        };
        if durable {
            self.sync()?;
        }
        Ok(value)
    }

    /// Runs `work` once, in a transaction.
    pub fn run<T>(
        &self,
        mode: TransactionMode,
        work: impl FnOnce(&dyn SqlSession) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let transaction = self.begin(mode)?;
        let value = work(&*transaction)?;
        transaction.commit(&[])?;
        Ok(value)
    }

    /// Runs statements in one transaction. Returns how many rows the last one changed. If the answer to the commit was lost,
    /// they run again, so a repetition has to have the same result, or to change nothing if they were done.
    pub fn write(&self, durable: bool, statements: &[Statement]) -> Result<usize, StoreError> {
        let deadline = Instant::now() + self.write_timeout(durable);
        let done = statements.last().and_then(|last| last.done.as_deref());
        let (settled, changed) =
            self.group(deadline, durable, |session, before: Option<&Option<usize>>| {
                if before.is_none() {
                    return Ok((None, statements.to_vec()));
                }
                let mut changed = session.run(&bound(statements), &mut |_, _| Ok(()))?.pop().unwrap_or(0);
                if let Some(done) = done.filter(|_| changed == 0) {
                    // The commit of this write proves that the row, if it is found, is durable.
                    session.execute(postgres::TRY_WRITE, &[])?;
                    changed = session.rows(&done.text, &done.parameters, |_| Ok(()))?.len();
                }
                Ok((Some(changed), Vec::new()))
            })?;
        if durable {
            self.sync()?;
        }
        Ok(settled.or(changed.last().copied()).unwrap_or(0))
    }

    /// Runs `work`, and then the statements that it returns together with COMMIT, until the deadline. It is not synced. An
    /// answer that was lost before COMMIT was sent means that nothing was done: the server's process has to read COMMIT
    /// first. If the answer to COMMIT was lost, `work` runs again with the value that it returned, and finds out. If
    /// `waits_if_lost`, it waits for a database that is lost. Also returns how many rows each of the statements changed.
    pub fn group<T>(
        &self,
        deadline: Instant,
        waits_if_lost: bool,
        work: impl Fn(&dyn SqlSession, Option<&T>) -> Result<(T, Vec<Statement>), StoreError>,
    ) -> Result<(T, Vec<usize>), StoreError> {
        let mut doubt: Option<(T, StoreError)> = None;
        loop {
            let transaction = match self.begin(TransactionMode::WriteUntil { deadline, waits_if_lost }) {
                Ok(transaction) => transaction,
                Err(error) => return Err(doubt.map_or(error, |(_, unknown)| unknown)),
            };
            let error = match work(&*transaction, doubt.as_ref().map(|(value, _)| value)) {
                Ok((value, last)) => match transaction.commit(&last) {
                    Ok(changed) => return Ok((value, changed)),
                    Err(error) => {
                        if matches!(error, StoreError::Unknown(_)) {
                            doubt = Some((value, error.clone()));
                        }
                        error
                    }
                },
                Err(error) => error,
            };
            let can_help = transaction.is_lost() || matches!(error, StoreError::Busy);
            if !can_help || deadline <= Instant::now() {
                if let StoreError::Unknown(cause) = &error {
                    self.lose(cause);
                }
                return Err(doubt.map_or(error, |(_, unknown)| unknown));
            }
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
}
