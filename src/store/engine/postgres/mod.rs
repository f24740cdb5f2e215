//! The PostgreSQL engine: a pool of connections to the primary of a cluster.
//!
//! The server groups commits and makes every one durable. What is left to do here is to find the primary, and to settle
//! writes whose answer was lost.

mod auth;
mod connection;
mod link;
mod pool;
mod schema;
mod session_lock;
mod startup;
#[cfg(all(test, feature = "test-postgres"))]
mod tests;
mod tls;
mod uri;
mod wire;

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::connection::Bound;
use self::pool::{Pool, Pooled, WhileLost};
pub use self::schema::TRY_RETENTION_LOCK;
pub use self::session_lock::{SessionLock, Sighting};
pub use self::uri::DatabaseUri;
use self::wire::SqlError;
use super::super::StoreError;
use super::{IfMissing, Row, Session, Value, Write};

/// What a start may take to find a host.
const START_TIME: Duration = Duration::from_secs(10);

/// What one statement may take.
const STATEMENT_TIME: Duration = Duration::from_secs(3);

/// What one statement of a report may take.
const REPORT_TIME: Duration = Duration::from_secs(600);

/// How long a read or a transaction waits for a connection.
const CONNECTION_TIME: Duration = Duration::from_secs(2);

/// How long a write may take, with all its attempts. A read takes no longer: 2 s and 3 s.
const PATIENCE: Duration = Duration::from_secs(5);

/// The same for a write that has to be durable: an inference was spent on it, so it waits for a planned switchover.
const DURABLE_PATIENCE: Duration = Duration::from_secs(20);

/// Changes nothing. Its commit proves that the server is the primary, and that all earlier commits on it are durable.
const TRY_WRITE: &str = "UPDATE schema_version SET version = version";

/// The time by the server's clock, in Unix seconds.
pub const CLOCK: &str = "CAST(floor(extract(epoch FROM clock_timestamp())) AS BIGINT)";

const READ: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";
const TRANSACTION: &str = "BEGIN ISOLATION LEVEL SERIALIZABLE";

pub struct Postgres {
    pool: Arc<Pool>,
}

impl Postgres {
    /// Connects, and upgrades the tables to the present version, or creates them.
    pub fn open(
        uri: &DatabaseUri,
        most_connections: usize,
        if_missing: IfMissing,
    ) -> Result<Self, StoreError> {
        let pool = Pool::new(uri, most_connections)?;
        let (mut connection, _) =
            pool.connect(0, Instant::now() + START_TIME).map_err(StoreError::Unavailable)?;
        schema::bring_up_to_date(&mut connection, if_missing)?;
        Ok(Self { pool })
    }

    /// Creates the tables in an empty database and runs `fill`, in one transaction: if that fails, or this process ends, the
    /// database is still empty. Programs that open it meanwhile wait.
    pub fn create_with<T>(
        uri: &DatabaseUri,
        fill: impl FnOnce(&dyn Session) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut pooled = Pool::new(uri, 1)?.get(Instant::now() + START_TIME, WhileLost::Fail)?;
        schema::begin_and_create(pooled.connection())?;
        let session =
            Statements { pooled: RefCell::new(Some(pooled)), begin: Cell::new(None), time: REPORT_TIME };
        let value = fill(&session)?;
        session.commit()?;
        Ok(value)
    }

    /// Runs `work` on one state of the database.
    pub fn read<T>(&self, work: impl FnOnce(&dyn Session) -> Result<T, StoreError>) -> Result<T, StoreError> {
        let session = Statements::new(&self.pool, READ, STATEMENT_TIME)?;
        let value = work(&session)?;
        session.commit()?;
        Ok(value)
    }

    /// The same for work that may take minutes.
    pub fn report<T>(
        &self,
        work: impl FnOnce(&dyn Session) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let session = Statements::new(&self.pool, READ, REPORT_TIME)?;
        let value = work(&session)?;
        session.commit()?;
        Ok(value)
    }

    /// Writes in a transaction. Returns how many rows the last statement changed.
    pub fn write(&self, write: &Write) -> Result<usize, StoreError> {
        let (patience, while_lost) =
            if write.durable { (DURABLE_PATIENCE, WhileLost::Wait) } else { (PATIENCE, WhileLost::Fail) };
        let deadline = Instant::now() + patience;
        let statements: Vec<Bound> = write
            .statements
            .iter()
            .map(|statement| (statement.text, statement.parameters.as_slice()))
            .collect();
        let done = write.statements.last().and_then(|last| last.done.as_deref());
        // Whether an earlier attempt may have been done.
        let mut doubt = None;
        loop {
            let mut pooled = match self.pool.get(deadline, while_lost) {
                Ok(pooled) => pooled,
                Err(error) => return Err(doubt.unwrap_or(error)),
            };
            let until = deadline.min(Instant::now() + STATEMENT_TIME);
            let mut outcome = pooled.connection().run(None, &statements, until, &mut |_| ());
            if let (Some(done), Some(_)) = (done, &doubt)
                && did_nothing(&outcome)
            {
                // The commit of the first proves that what the second finds is durable.
                let look: [Bound; 2] = [(TRY_WRITE, &[]), (done.text, &done.parameters)];
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

    /// Runs `work` in a transaction of its own, again if another one got in its way.
    pub fn transaction<T>(
        &self,
        work: impl Fn(&dyn Session) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let session = Statements::new(&self.pool, TRANSACTION, STATEMENT_TIME)?;
            match work(&session).and_then(|value| session.commit().map(|()| value)) {
                Err(StoreError::Busy) if Instant::now() < deadline => {}
                result => return result,
            }
        }
    }

    /// Why the database can't be used; `None` if it can.
    pub fn lost(&self) -> Option<StoreError> {
        self.pool.lost()
    }

    /// Runs `work` once, in a transaction of its own. It is not serializable, so no other one fails because of it.
    pub fn try_write(
        &self,
        work: impl FnOnce(&dyn Session) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let session = Statements::new(&self.pool, "BEGIN", STATEMENT_TIME)?;
        work(&session)?;
        session.commit()
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
struct Statements {
    /// `None` after an outcome that is not known.
    pooled: RefCell<Option<Pooled>>,
    begin: Cell<Option<&'static str>>,
    time: Duration,
}

impl Statements {
    fn new(pool: &Arc<Pool>, begin: &'static str, time: Duration) -> Result<Self, StoreError> {
        let pooled = pool.get(Instant::now() + CONNECTION_TIME, WhileLost::Fail)?;
        Ok(Self { pooled: RefCell::new(Some(pooled)), begin: Cell::new(Some(begin)), time })
    }

    fn commit(&self) -> Result<(), StoreError> {
        if self.begin.get().is_none() {
            self.run(Some("COMMIT"), &[], &mut |_| ())?;
        }
        Ok(())
    }

    fn run(
        &self,
        begin: Option<&str>,
        statements: &[Bound],
        each: &mut dyn FnMut(Row),
    ) -> Result<usize, StoreError> {
        let mut borrowed =
            self.pooled.try_borrow_mut().map_err(|_| StoreError::Other("a query within a query".into()))?;
        let pooled = borrowed.as_mut().ok_or(StoreError::Unknown("the connection was lost".into()))?;
        let outcome = pooled.connection().run(begin, statements, Instant::now() + self.time, each);
        if matches!(&outcome, Err(error) if matches!(error, SqlError::Unknown(_)) || error.is_of_host())
            && let Some(pooled) = borrowed.take()
        {
            pooled.distrust();
        }
        Ok(outcome?)
    }
}

impl Drop for Statements {
    /// Ends the transaction after an error, so that the connection can be used again.
    fn drop(&mut self) {
        if let Some(pooled) = self.pooled.get_mut()
            && self.begin.get().is_none()
            && !pooled.connection().is_idle
        {
            let _ = pooled.connection().run_text("ROLLBACK", Instant::now() + self.time.min(STATEMENT_TIME));
        }
    }
}

impl Session for Statements {
    fn execute(&self, statement: &str, parameters: &[Value]) -> Result<usize, StoreError> {
        self.run(self.begin.take(), &[(statement, parameters)], &mut |_| ())
    }

    fn query(
        &self,
        statement: &str,
        parameters: &[Value],
        each: &mut dyn FnMut(Row) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let mut failure = None;
        let mut take = |row| {
            if failure.is_none() {
                failure = each(row).err();
            }
        };
        self.run(self.begin.take(), &[(statement, parameters)], &mut take)?;
        failure.map_or(Ok(()), Err)
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
