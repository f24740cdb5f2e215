//! The PostgreSQL engine: a pool of connections to the primary of a cluster.
//!
//! The server makes every commit durable. What is left to do here is to find the primary, and to
//! settle writes whose answer was lost.

mod auth;
mod encoding;
mod pool;
mod protocol;
mod schema;
pub mod session;
pub mod session_lock;
mod startup;
mod stream;
#[cfg(all(test, feature = "test-postgres"))]
mod tests;
mod tls;
pub mod uri;

use std::sync::Arc;
use std::time::{Duration, Instant};

use self::pool::PgPool;
pub(super) use self::pool::TRY_WRITE;
use self::schema::UPGRADE_TIMEOUT;
use self::session::{PgSession, REPORT_TIMEOUT, STATEMENT_TIMEOUT};
use self::uri::DatabaseUri;
use super::access::Access;
use super::error::Result;
use super::schema::Schema;
use super::session::Session;
use super::statement::TransactionMode;

/// The time that a read or a transaction waits for a connection.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(2);

/// The timeout of a write, with all its attempts: it waits for a planned switchover.
pub(super) const WRITE_TIMEOUT: Duration = Duration::from_secs(20);

/// The time by the server's clock, in Unix seconds.
pub(super) const CLOCK: &str = "CAST(floor(extract(epoch FROM clock_timestamp())) AS BIGINT)";

const READ: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";

/// Every statement sees what was committed before it, so what a lock protects is current once the
/// lock is held.
const WRITE: &str = "BEGIN ISOLATION LEVEL READ COMMITTED";

pub struct Postgres {
    pub(super) pool: Arc<PgPool>,
    pub(super) is_new: bool,
}

impl Postgres {
    /// Connects; creates or upgrades the tables if `access` allows that.
    pub fn open(
        uri: &DatabaseUri,
        schema: &Schema,
        max_connections: usize,
        access: Access,
    ) -> Result<Self> {
        let pool = PgPool::new(uri, max_connections)?;
        let session = PgSession::new(pool.start()?, None, UPGRADE_TIMEOUT);
        let is_new = schema::bring_up_to_date(&session, schema, access)?;
        Ok(Self { pool, is_new })
    }

    /// Creates the tables in an empty database and runs `fill`, in one transaction: if that fails,
    /// or this process ends, the database is still empty. Programs that open it meanwhile wait.
    pub fn create_with<T>(
        uri: &DatabaseUri,
        schema: &Schema,
        fill: impl FnOnce(&Session) -> Result<T>,
    ) -> Result<T> {
        let session = PgSession::new(PgPool::new(uri, 1)?.start()?, None, UPGRADE_TIMEOUT);
        let statements = Session::Postgres(&session);
        schema::begin_and_create(&statements, schema)?;
        let value = fill(&statements)?;
        session.run_and_commit(&[])?;
        Ok(value)
    }

    pub(super) fn begin(&self, mode: TransactionMode) -> Result<PgSession> {
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
        Ok(PgSession::new(pooled, begin, time))
    }
}
