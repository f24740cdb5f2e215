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
use self::pool::{PgPool, Pooled, WhileLost};
pub use self::session_lock::{SessionLock, Sighting};
pub use self::uri::DatabaseUri;
use super::{Access, BoundStatement, Row, SqlSession, Statement, Write, bound};
use crate::store::StoreError;

/// What a start may take to find a host.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// What one statement may take.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(3);

/// What one statement of a report may take.
const REPORT_TIMEOUT: Duration = Duration::from_secs(600);

/// How long a read or a transaction waits for a connection.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a write may take, with all its attempts. A read takes no longer: 2 s and 3 s.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// The same for a write that has to be durable: an inference was spent on it, so it waits for a planned switchover.
const DURABLE_WRITE_TIMEOUT: Duration = Duration::from_secs(20);

/// Changes nothing. Its commit proves that the server is the primary, and that all earlier commits on it are durable.
const TRY_WRITE: &str = "UPDATE schema_version SET version = version";

/// The time by the server's clock, in Unix seconds.
pub const CLOCK: &str = "CAST(floor(extract(epoch FROM clock_timestamp())) AS BIGINT)";

const READ: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";

/// Every statement sees what was committed before it, so what a lock protects is current once the lock is held.
const TRANSACTION: &str = "BEGIN ISOLATION LEVEL READ COMMITTED";

/// How long a write may take.
pub fn write_timeout(waits_if_lost: bool) -> Duration {
    if waits_if_lost { DURABLE_WRITE_TIMEOUT } else { WRITE_TIMEOUT }
}

pub struct Postgres {
    pool: Arc<PgPool>,
}

impl Postgres {
    /// Connects; creates or upgrades the tables if `access` allows that.
    pub fn open(uri: &DatabaseUri, most_connections: usize, access: Access) -> Result<Self, StoreError> {
        let pool = PgPool::new(uri, most_connections)?;
        let (mut connection, _) =
            pool.connect(0, Instant::now() + START_TIMEOUT).map_err(StoreError::Unavailable)?;
        if !schema::is_current(&mut connection, access)? {
            schema::upgrade(pool.get(Instant::now() + START_TIMEOUT, WhileLost::Fail)?)?;
        }
        Ok(Self { pool })
    }

    /// Creates the tables in an empty database and runs `fill`, in one transaction: if that fails, or this process ends, the
    /// database is still empty. Programs that open it meanwhile wait.
    pub fn create_with<T>(
        uri: &DatabaseUri,
        fill: impl FnOnce(&dyn SqlSession) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut pooled = PgPool::new(uri, 1)?.get(Instant::now() + START_TIMEOUT, WhileLost::Fail)?;
        schema::begin_and_create(pooled.connection())?;
        let session = PgSession::begun(pooled);
        let value = fill(&session)?;
        session.commit(&[])?;
        Ok(value)
    }

    /// Runs `work` on one state of the database.
    pub fn read<T>(
        &self,
        work: impl FnOnce(&dyn SqlSession) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let session = PgSession::new(&self.pool, READ, STATEMENT_TIMEOUT)?;
        let value = work(&session)?;
        session.commit(&[])?;
        Ok(value)
    }

    /// The same for work that may take minutes.
    pub fn report<T>(
        &self,
        work: impl FnOnce(&dyn SqlSession) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let session = PgSession::new(&self.pool, READ, REPORT_TIMEOUT)?;
        let value = work(&session)?;
        session.commit(&[])?;
        Ok(value)
    }

    /// Writes in a transaction. Returns how many rows the last statement changed.
    pub fn write(&self, write: &Write) -> Result<usize, StoreError> {
        let while_lost = if write.durable { WhileLost::Wait } else { WhileLost::Fail };
        let deadline = Instant::now() + write_timeout(write.durable);
        let statements = bound(&write.statements);
        let done = write.statements.last().and_then(|last| last.done.as_deref());
        // Whether an earlier attempt may have been done.
        let mut doubt = None;
        loop {
            let mut pooled = match self.pool.get(deadline, while_lost) {
                Ok(pooled) => pooled,
                Err(error) => return Err(doubt.unwrap_or(error)),
            };
            let until = deadline.min(Instant::now() + STATEMENT_TIMEOUT);
            let mut outcome = pooled.connection().run(None, &statements, until, &mut |_| ());
            if let (Some(done), Some(_)) = (done, &doubt)
                && did_nothing(&outcome)
            {
                // The commit of the first proves that what the second finds is durable.
                let look: [BoundStatement; 2] = [(TRY_WRITE, &[]), (done.text, &done.parameters)];
                outcome = pooled.connection().run(None, &look, until, &mut |_| ());
            }
            match outcome {
                Err(SqlError::Unknown(cause)) => {
                    pooled.distrust();
                    doubt = Some(StoreError::Unknown(cause.clone()));
                    if deadline <= Instant::now() {
                        self.pool.lose(cause);
                        return Err(doubt.unwrap_or(StoreError::Busy));
                    }
                }
                Err(error) if error.is_of_host() => pooled.distrust(),
                Err(error) if !error.is_conflict() => return Err(error.into()),
                Err(_) => {}
                Ok(changed) => return Ok(changed),
            }
            if deadline <= Instant::now() {
                return Err(doubt.unwrap_or(StoreError::Busy));
            }
        }
    }

    /// Runs `work`, and then the statements that it returns together with COMMIT. An answer that was lost before COMMIT was
    /// sent means that nothing was done: the server's process has to read COMMIT first. If the answer to COMMIT was lost,
    /// `work` runs again with the value that it returned, and finds out.
    pub fn group<T: Clone>(
        &self,
        deadline: Instant,
        waits_if_lost: bool,
        work: impl Fn(&dyn SqlSession, Option<&T>) -> Result<(T, Vec<Statement>), StoreError>,
    ) -> Result<T, StoreError> {
        let while_lost = if waits_if_lost { WhileLost::Wait } else { WhileLost::Fail };
        let mut doubt: Option<(T, StoreError)> = None;
        loop {
            let pooled = match self.pool.get(deadline, while_lost) {
                Ok(pooled) => pooled,
                Err(error) => return Err(doubt.map_or(error, |(_, unknown)| unknown)),
            };
            let time = STATEMENT_TIMEOUT.min(deadline.saturating_duration_since(Instant::now()));
            let session = PgSession::on(pooled, TRANSACTION, time);
            let error = match work(&session, doubt.as_ref().map(|(value, _)| value)) {
                Ok((value, last)) => match session.commit(&last) {
                    Ok(()) => return Ok(value),
                    Err(error) => {
                        if matches!(error, StoreError::Unknown(_)) {
                            doubt = Some((value, error.clone()));
                        }
                        error
                    }
                },
                Err(error) => error,
            };
            let can_help = session.is_lost() || matches!(error, StoreError::Busy);
            if !can_help || deadline <= Instant::now() {
                if let StoreError::Unknown(cause) = &error {
                    self.pool.lose(cause.clone());
                }
                return Err(doubt.map_or(error, |(_, unknown)| unknown));
            }
        }
    }

    /// Runs `work` in a transaction of its own, again if another one got in its way.
    pub fn transaction<T>(
        &self,
        work: impl Fn(&dyn SqlSession) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let deadline = Instant::now() + WRITE_TIMEOUT;
        loop {
            let session = PgSession::new(&self.pool, TRANSACTION, STATEMENT_TIMEOUT)?;
            match work(&session).and_then(|value| session.commit(&[]).map(|()| value)) {
                Err(StoreError::Busy) if Instant::now() < deadline => {}
                result => return result,
            }
        }
    }

    /// Why the database can't be used; `None` if it can.
    pub fn lost(&self) -> Option<StoreError> {
        self.pool.lost()
    }
}

/// Whether a repeated write found its work done, or the reason for it gone.
fn did_nothing(outcome: &Result<usize, SqlError>) -> bool {
    match outcome {
        Ok(changed) => *changed == 0,
        Err(error) => error.state() == "23505",
    }
}

/// Runs statements on a connection, in one transaction that begins with the first.
struct PgSession {
    /// `None` after an outcome that is not known.
    pooled: RefCell<Option<Pooled>>,
    begin: Cell<Option<&'static str>>,
    time: Duration,
}

impl PgSession {
    fn new(pool: &Arc<PgPool>, begin: &'static str, time: Duration) -> Result<Self, StoreError> {
        Ok(Self::on(pool.get(Instant::now() + CONNECTION_TIMEOUT, WhileLost::Fail)?, begin, time))
    }

    fn on(pooled: Pooled, begin: &'static str, time: Duration) -> Self {
        Self { pooled: RefCell::new(Some(pooled)), begin: Cell::new(Some(begin)), time }
    }

    /// On a connection that is in a transaction already, for work that may take minutes.
    fn begun(pooled: Pooled) -> Self {
        Self { pooled: RefCell::new(Some(pooled)), begin: Cell::new(None), time: REPORT_TIMEOUT }
    }

    /// Commits, after the last statements in the same round trip. If nothing was sent there is nothing to commit.
    fn commit(&self, last: &[Statement]) -> Result<(), StoreError> {
        if self.begin.get().is_none() || !last.is_empty() {
            self.send(&bound(last), Some("COMMIT"), &mut |_, _| ())?;
        }
        Ok(())
    }

    /// Whether the connection can't be used any more.
    fn is_lost(&self) -> bool {
        self.pooled.borrow().is_none()
    }

    fn send(
        &self,
        statements: &[BoundStatement],
        end: Option<&str>,
        each: &mut dyn FnMut(usize, Row),
    ) -> Result<Vec<usize>, StoreError> {
        let mut borrowed =
            self.pooled.try_borrow_mut().map_err(|_| StoreError::Other("a query within a query".into()))?;
        let pooled = borrowed.as_mut().ok_or(StoreError::Unknown("the connection was lost".into()))?;
        let deadline = Instant::now() + self.time;
        let outcome = pooled.connection().run_between(self.begin.take(), statements, end, deadline, each);
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
            let _ =
                pooled.connection().run_text("ROLLBACK", Instant::now() + self.time.min(STATEMENT_TIMEOUT));
        }
    }
}

impl SqlSession for PgSession {
    fn run(
        &self,
        statements: &[BoundStatement],
        each: &mut dyn FnMut(usize, Row) -> Result<(), StoreError>,
    ) -> Result<Vec<usize>, StoreError> {
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

impl From<SqlError> for StoreError {
    fn from(error: SqlError) -> Self {
        match (&error, error.state()) {
            (SqlError::NotSent(cause), _) => Self::Other(cause.clone()),
            (SqlError::Unknown(cause), _) => Self::Unknown(cause.clone()),
            (_, "53100") => Self::Full,
            _ if error.is_conflict() => Self::Busy,
            _ => Self::Other(error.to_string()),
        }
    }
}
