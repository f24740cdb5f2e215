//! Runs SQL on SQLite and PostgreSQL: connections, transactions, files. It knows no table: these
//! are handed to it as a [`Schema`].
//!
//! Statements are written once, with `$1`, `$2` … as parameters that first appear in this order, in
//! SQL that both accept. What runs in a transaction, and what follows if the answer to a commit was
//! lost, is the same for both.

mod access;
mod error;
mod location;
pub mod postgres;
mod schema;
mod session;
pub mod sqlite;
mod statement;
mod value;

use std::time::{Duration, Instant};

pub use access::Access;
pub use error::{BackupError, DatabaseError, LockError, Result};
pub use location::DatabaseLocation;
use postgres::Postgres;
use postgres::session::PgSession;
pub use postgres::uri::DatabaseUri;
pub use schema::Schema;
pub use session::Session;
use sqlite::Sqlite;
pub use sqlite::WalFigures;
use sqlite::transaction::SqliteTransaction;
pub use statement::{Statement, TransactionMode};
pub(crate) use value::values;
pub use value::{FromValue, Row, SqlValue};

use crate::progress::Progress;

/// The connections to PostgreSQL: the leader of a group, look-ups of keys, two for the console, and
/// background tasks.
const CONNECTIONS: usize = 8;

/// The time for looking up a row, with all attempts.
const LOOK_UP_TIMEOUT: Duration = Duration::from_secs(5);

/// An open database.
pub enum Database {
    Sqlite(Box<Sqlite>),
    Postgres(Postgres),
}

/// A transaction, which is rolled back if it is dropped before its commit.
enum Transaction<'a> {
    Sqlite(SqliteTransaction<'a>),
    Postgres(Box<PgSession>),
}

impl Transaction<'_> {
    fn session(&self) -> Session<'_> {
        match self {
            Self::Sqlite(transaction) => Session::Sqlite(transaction.session()),
            Self::Postgres(session) => Session::Postgres(session),
        }
    }

    /// Runs the last statements and commits, on PostgreSQL in one round trip. Returns how many rows
    /// each of them changed.
    fn run_and_commit(&self, statements: &[Statement]) -> Result<Vec<usize>> {
        match self {
            Self::Sqlite(transaction) => transaction.run_and_commit(statements),
            Self::Postgres(session) => session.run_and_commit(statements),
        }
    }

    /// Returns whether the connection can't be used any more.
    fn is_lost(&self) -> bool {
        matches!(self, Self::Postgres(session) if session.is_lost())
    }
}

impl Database {
    pub fn open(
        location: &DatabaseLocation,
        schema: &Schema,
        access: Access,
        progress: &Progress,
    ) -> Result<Self> {
        Ok(match location {
            DatabaseLocation::Sqlite(path) => {
                Self::Sqlite(Box::new(Sqlite::open(path, schema, access, progress)?))
            }
            DatabaseLocation::Postgres(uri) => {
                Self::Postgres(Postgres::open(uri, schema, CONNECTIONS, access)?)
            }
        })
    }

    /// Returns whether a write hangs, for which only a restart helps. A full disk or a locked
    /// database does not count: that write fails in time.
    pub fn is_stuck(&self) -> bool {
        self.sqlite().is_some_and(Sqlite::is_stuck)
    }

    /// Returns figures about the WAL; zeros on PostgreSQL.
    pub fn wal_figures(&self) -> WalFigures {
        self.sqlite()
            .map(|sqlite| sqlite.wal.figures())
            .unwrap_or_default()
    }

    fn begin(&self, mode: TransactionMode) -> Result<Transaction<'_>> {
        match self {
            Self::Sqlite(sqlite) => sqlite.begin(mode).map(Transaction::Sqlite),
            Self::Postgres(postgres) => Ok(Transaction::Postgres(Box::new(postgres.begin(mode)?))),
        }
    }

    /// Returns whether this open created the tables.
    pub fn is_new(&self) -> bool {
        match self {
            Self::Sqlite(sqlite) => sqlite.is_new,
            Self::Postgres(postgres) => postgres.is_new,
        }
    }

    /// The time that a write may take, with all its attempts.
    fn write_timeout(&self) -> Duration {
        match self {
            Self::Sqlite(sqlite) => sqlite.write_timeout,
            Self::Postgres(_) => postgres::WRITE_TIMEOUT,
        }
    }

    /// The reason why every request would fail now; `None` if that is not known without a try.
    pub fn lost(&self) -> Option<DatabaseError> {
        match self {
            Self::Sqlite(_) => None,
            Self::Postgres(postgres) => postgres.pool.lost(),
        }
    }

    /// The features that only a file has: checkpoints and checks of its pages.
    pub fn sqlite(&self) -> Option<&Sqlite> {
        match self {
            Self::Sqlite(sqlite) => Some(sqlite),
            Self::Postgres(_) => None,
        }
    }

    /// Runs `work` on one state of the database.
    pub fn read<T>(&self, work: impl FnOnce(&Session) -> Result<T>) -> Result<T> {
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
            let transaction = self.begin(TransactionMode::Statement)?;
            match transaction.session().first(statement, parameters, &read) {
                Err(_) if transaction.is_lost() && Instant::now() < deadline => {}
                found => {
                    let found = found?;
                    transaction.run_and_commit(&[])?;
                    return Ok(found);
                }
            }
        }
    }

    /// Runs `work` in a transaction of its own, again if another one got in its way. It is durable
    /// when this returns.
    pub fn transaction<T>(&self, work: impl Fn(&Session) -> Result<T>) -> Result<T> {
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
        work: impl FnOnce(&Session) -> Result<T>,
    ) -> Result<T> {
        let transaction = self.begin(mode)?;
        let value = work(&transaction.session())?;
        transaction.run_and_commit(&[])?;
        Ok(value)
    }

    /// Runs statements in one transaction. Returns how many rows the last one changed; all of it is
    /// durable then. If the answer to the commit was lost, they run again, so a repetition has to
    /// have the same result, or to change nothing if they were done.
    pub fn write(&self, statements: &[Statement]) -> Result<usize> {
        let mode = TransactionMode::WriteUntil(Instant::now() + self.write_timeout());
        let done = statements.last().and_then(|last| last.done.as_deref());
        let (settled, changed) =
            self.commit_with_retries(mode, |session, before: Option<&Option<usize>>| {
                if before.is_none() {
                    return Ok((None, statements.to_vec()));
                }
                let mut changed = session
                    .run(statements, &mut |_, _| Ok(()))?
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

    /// Runs `work`, and then the statements that it returns together with COMMIT, until the
    /// deadline of the mode. An answer that was lost before COMMIT was sent means that nothing was
    /// done: the server's process has to read COMMIT first. If the answer to COMMIT was lost,
    /// `work` runs again with the value that it returned, and finds out. Also returns how many rows
    /// each of the statements changed.
    pub fn commit_with_retries<T>(
        &self,
        mode: TransactionMode,
        work: impl Fn(&Session, Option<&T>) -> Result<(T, Vec<Statement>)>,
    ) -> Result<(T, Vec<usize>)> {
        let mut doubt: Option<(T, DatabaseError)> = None;
        loop {
            let transaction = match self.begin(mode) {
                Ok(transaction) => transaction,
                Err(error) => return Err(doubt.map_or(error, |(_, unknown)| unknown)),
            };
            let error = match work(
                &transaction.session(),
                doubt.as_ref().map(|(value, _)| value),
            ) {
                Ok((value, last)) => match transaction.run_and_commit(&last) {
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
            if !can_help || !mode.allows_retry() {
                if let (DatabaseError::Unknown(cause), Self::Postgres(postgres)) = (&error, self) {
                    postgres.pool.mark_lost(cause.clone());
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
        match self {
            Self::Sqlite(_) => "unixepoch()",
            Self::Postgres(_) => postgres::CLOCK,
        }
    }

    /// Fails if another program has changed the tables to a version that this one does not know.
    pub fn check_version(&self, session: &Session, schema: &Schema) -> Result<()> {
        let known = schema.version;
        let (query, usable) = match self {
            Self::Sqlite(_) => ("PRAGMA user_version", known..=known),
            Self::Postgres(_) => ("SELECT oldest_known FROM schema_version", 0..=known),
        };
        match session.value(query, &[])? {
            found if usable.contains(&found) => Ok(()),
            found => Err(DatabaseError::VersionChanged { found, known }),
        }
    }

    /// The clause of a query that locks its rows until the transaction ends. SQLite does not know
    /// it: its transactions lock everything.
    pub fn row_lock(&self, clause: &'static str) -> &'static str {
        match self {
            Self::Sqlite(_) => "",
            Self::Postgres(_) => clause,
        }
    }

    pub fn append_timeout(&self) -> Duration {
        match self {
            Self::Sqlite(sqlite) => sqlite.append_timeout,
            Self::Postgres(_) => postgres::WRITE_TIMEOUT,
        }
    }
}

#[cfg(test)]
pub mod tests {
    use std::path::Path;

    use super::*;
    use crate::ledger::SCHEMA;

    /// A new file.
    pub fn open(path: &Path) -> Result<Database> {
        let location = DatabaseLocation::Sqlite(path.to_owned());
        Database::open(&location, &SCHEMA, Access::Create, &Progress::hidden())
    }
}
