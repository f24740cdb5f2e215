//! The PostgreSQL engine: a pool of connections to the primary of a cluster.
//!
//! The server makes every commit durable. What is left to do here is to find the primary, and to settle writes whose
//! answer was lost.

mod auth;
mod encoding;
mod pool;
mod protocol;
mod schema;
mod session_lock;
mod startup;
mod stream;
#[cfg(all(test, feature = "test-postgres"))]
mod tests;
mod tls;
mod uri;

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::encoding::SqlError;
use self::pool::{PgPool, Pooled};
use self::schema::Tables;
pub use self::session_lock::SessionLock;
pub use self::uri::DatabaseUri;
use super::{
    Access, BoundStatement, EachRow, Engine, Row, SqlSession, Statement, Transaction,
    TransactionMode, bound,
};
use crate::store::{DatabaseError, Result};

/// The time that a start has to find a host that answers.
const START_TIMEOUT: Duration = Duration::from_secs(10);

const STATEMENT_TIMEOUT: Duration = Duration::from_secs(3);

const REPORT_TIMEOUT: Duration = Duration::from_secs(600);

/// The time that a read or a transaction waits for a connection.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(2);

/// The timeout of a write, with all its attempts: it waits for a planned switchover.
const WRITE_TIMEOUT: Duration = Duration::from_secs(20);

/// Changes nothing. Its commit proves that the server is the primary, and that all earlier commits on it are durable.
pub(super) const TRY_WRITE: &str = "UPDATE schema_version SET version = version";

/// The time by the server's clock, in Unix seconds.
pub(super) const CLOCK: &str = "CAST(floor(extract(epoch FROM clock_timestamp())) AS BIGINT)";

const READ: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";

/// Every statement sees what was committed before it, so what a lock protects is current once the lock is held.
const WRITE: &str = "BEGIN ISOLATION LEVEL READ COMMITTED";

pub struct Postgres {
    pool: Arc<PgPool>,
    is_new: bool,
}

impl Postgres {
    /// Connects; creates or upgrades the tables if `access` allows that.
    pub fn open(uri: &DatabaseUri, most_connections: usize, access: Access) -> Result<Self> {
        let pool = PgPool::new(uri, most_connections)?;
        let mut pooled = pool.start()?;
        let tables = schema::prepare(pooled.connection(), access)?;
        if tables == Tables::Old {
            schema::upgrade(pooled)?;
        }
        Ok(Self {
            pool,
            is_new: tables == Tables::Created,
        })
    }

    /// Creates the tables in an empty database and runs `fill`, in one transaction: if that fails, or this process ends, the
    /// database is still empty. Programs that open it meanwhile wait.
    pub fn create_with<T>(
        uri: &DatabaseUri,
        fill: impl FnOnce(&dyn SqlSession) -> Result<T>,
    ) -> Result<T> {
        let mut pooled = PgPool::new(uri, 1)?.start()?;
        schema::begin_and_create(pooled.connection())?;
        let session = PgSession::begun(pooled);
        let value = fill(&session)?;
        session.commit(&[])?;
        Ok(value)
    }
}

impl Engine for Postgres {
    fn begin(&self, mode: TransactionMode) -> Result<Box<dyn Transaction + '_>> {
        let deadline = match mode {
            TransactionMode::WriteUntil(deadline) | TransactionMode::Append(deadline) => deadline,
            _ => Instant::now() + CONNECTION_TIMEOUT,
        };
        let pooled = self.pool.get(deadline, mode)?;
        let (begin, time) = match mode {
            TransactionMode::Statement => (None, STATEMENT_TIMEOUT),
            TransactionMode::Read => (Some(READ), STATEMENT_TIMEOUT),
            TransactionMode::Report => (Some(READ), REPORT_TIMEOUT),
            TransactionMode::Write => (Some(WRITE), STATEMENT_TIMEOUT),
            TransactionMode::WriteUntil(_) | TransactionMode::Append(_) => (
                Some(WRITE),
                STATEMENT_TIMEOUT.min(deadline.saturating_duration_since(Instant::now())),
            ),
        };
        Ok(Box::new(PgSession {
            pooled: RefCell::new(Some(pooled)),
            begin: Cell::new(begin),
            time,
        }))
    }

    fn is_new(&self) -> bool {
        self.is_new
    }

    fn write_timeout(&self) -> Duration {
        WRITE_TIMEOUT
    }

    fn lost(&self) -> Option<DatabaseError> {
        self.pool.lost()
    }

    fn lose(&self, cause: &str) {
        self.pool.lose(cause.to_owned());
    }
}

/// Runs statements on a connection, in one transaction that begins with the first; or one statement without.
struct PgSession {
    /// `None` if the connection can't be used any more.
    pooled: RefCell<Option<Pooled>>,
    begin: Cell<Option<&'static str>>,
    time: Duration,
}

impl PgSession {
    /// On a connection that is in a transaction already, for work that may take minutes.
    fn begun(pooled: Pooled) -> Self {
        Self {
            pooled: RefCell::new(Some(pooled)),
            begin: Cell::new(None),
            time: REPORT_TIMEOUT,
        }
    }

    fn send(
        &self,
        statements: &[BoundStatement],
        end: Option<&str>,
        each: &mut dyn FnMut(usize, Row),
    ) -> Result<Vec<usize>> {
        let mut borrowed = self
            .pooled
            .try_borrow_mut()
            .map_err(|_| DatabaseError::Other("a query within a query".into()))?;
        let pooled = borrowed
            .as_mut()
            .ok_or(DatabaseError::Unknown("the connection was lost".into()))?;
        let deadline = Instant::now() + self.time;
        let outcome =
            pooled
                .connection()
                .run_between(self.begin.take(), statements, end, deadline, each);
        if matches!(&outcome, Err(error) if matches!(error, SqlError::Unknown(_)) || error.is_of_host())
            && let Some(pooled) = borrowed.take()
        {
            pooled.distrust();
        }
        Ok(outcome?)
    }
}

impl Drop for PgSession {
    /// Ends the transaction after an error, so that the connection can be used again.
    fn drop(&mut self) {
        if let Some(pooled) = self.pooled.get_mut()
            && self.begin.get().is_none()
            && !pooled.connection().is_idle
        {
            let _ = pooled.connection().run_text(
                "ROLLBACK",
                Instant::now() + self.time.min(STATEMENT_TIMEOUT),
            );
        }
    }
}

impl Transaction for PgSession {
    fn commit(&self, last: &[Statement]) -> Result<Vec<usize>> {
        let is_idle = || {
            self.pooled
                .borrow_mut()
                .as_mut()
                .is_some_and(|pooled| pooled.connection().is_idle)
        };
        if last.is_empty() && (self.begin.get().is_some() || is_idle()) {
            // Nothing was sent, or one statement without a transaction.
            return Ok(Vec::new());
        }
        self.send(&bound(last), Some("COMMIT"), &mut |_, _| ())
    }

    fn is_lost(&self) -> bool {
        self.pooled.borrow().is_none()
    }
}

impl SqlSession for PgSession {
    fn run(&self, statements: &[BoundStatement], each: EachRow) -> Result<Vec<usize>> {
        if statements.is_empty() {
            // The server would not answer.
            return Ok(Vec::new());
        }
        let mut failure = None;
        let mut take = |number, row| {
            if failure.is_none() {
                failure = each(number, row).err();
            }
        };
        let changed = self.send(statements, None, &mut take)?;
        failure.map_or(Ok(changed), Err)
    }
}

impl From<SqlError> for DatabaseError {
    fn from(error: SqlError) -> Self {
        match (&error, error.state()) {
            (SqlError::NotSent(cause), _) => Self::Other(cause.clone()),
            (SqlError::Unknown(cause), _) => Self::Unknown(cause.clone()),
            (_, "53100") => Self::Full,
            // Another transaction was in the way, so that a retry helps: a serialization failure, a deadlock, or a lock that
            // was not free in time.
            (_, "40001" | "40P01" | "55P03") => Self::Busy,
            _ => Self::Other(error.to_string()),
        }
    }
}
