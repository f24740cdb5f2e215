//! The lock that keeps a second `serve` off the name of a gateway: an advisory lock of a session
//! that does nothing else. The server releases it when the session ends.
//!
//! The session also writes the heartbeat.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::encoding::SqlError;
use super::pool::{PgPool, START_TIMEOUT};
use super::protocol::PgConnection;
use super::schema::LOCK;
use super::session::STATEMENT_TIMEOUT;
use super::uri::DatabaseUri;
use crate::database::error::{DatabaseError, LockError, Result};
use crate::database::statement::BoundStatement;
use crate::database::value::{Row, SqlValue};

/// The first number of a gateway's lock; the second is made from its name.
const GATEWAY_LOCK: i32 = LOCK + 1;

/// After a kill the server needs a moment to end the session.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(50);

/// The server notices within 11 s that the gateway's host has vanished. By default it would hold
/// the lock for two hours.
const KEEPALIVE: &str =
    "SET tcp_keepalives_idle = 5; SET tcp_keepalives_interval = 2; SET tcp_keepalives_count = 3";

/// Held until the value is dropped. If the connection is lost, `renew` takes it again.
pub struct SessionLock {
    pool: Arc<PgPool>,
    /// The host to begin with.
    host: usize,
    name: String,
    connection: Option<PgConnection>,
    is_held: bool,
}

impl SessionLock {
    /// Takes the lock of a name. `holder` is a query for the address of the process that has it.
    pub fn take(uri: &DatabaseUri, name: &str, holder: &str) -> Result<Self, LockError> {
        let pool = PgPool::new(uri, 1)?;
        let connected = pool.connect_at_start()?;
        let mut lock = Self {
            pool,
            host: 0,
            name: name.to_owned(),
            connection: None,
            is_held: false,
        };
        lock.use_connection(connected)?;
        let deadline = Instant::now() + START_TIMEOUT;
        let give_up = Instant::now() + LOCK_TIMEOUT;
        while !lock.try_lock(deadline).map_err(DatabaseError::from)? {
            if Instant::now() >= give_up {
                return Err(LockError::NameTaken {
                    address: lock.holder(holder, deadline),
                    name: lock.name,
                });
            }
            thread::sleep(PAUSE);
        }
        Ok(lock)
    }

    /// Updates the heartbeat, after taking the lock again if the connection was lost. The server
    /// may hold the lock for a dead session for a while; the gateway continues to serve meanwhile.
    /// Returns false if the heartbeat changed no row.
    pub fn renew(&mut self, heartbeat: BoundStatement) -> Result<bool> {
        if self.connection.is_none() {
            self.is_held = false;
            let deadline = Instant::now() + self.pool.time_to_connect();
            self.use_connection(
                self.pool
                    .connect(self.host, deadline)
                    .map_err(|error| DatabaseError::Unavailable(error.cause))?,
            )?;
        }
        let renewed = self.beat(heartbeat);
        if let Err(error) = &renewed
            && error.ends_connection()
        {
            // The server may be a primary that was replaced.
            (self.connection, self.host) = (None, self.pool.after(self.host));
        }
        Ok(renewed?)
    }

    fn beat(&mut self, heartbeat: BoundStatement) -> Result<bool, SqlError> {
        let deadline = Instant::now() + STATEMENT_TIMEOUT;
        if !self.is_held {
            self.try_lock(deadline)?;
        }
        Ok(self.run(heartbeat, deadline, &mut |_| ())? > 0)
    }

    fn use_connection(&mut self, (mut connection, host): (PgConnection, usize)) -> Result<()> {
        connection.run_text(KEEPALIVE, Instant::now() + STATEMENT_TIMEOUT)?;
        (self.connection, self.host) = (Some(connection), host);
        Ok(())
    }

    fn try_lock(&mut self, deadline: Instant) -> Result<bool, SqlError> {
        let number = lock_number(&self.name);
        let lock = format!("SELECT 1 WHERE pg_try_advisory_lock({GATEWAY_LOCK}, {number})");
        self.is_held = self.run((&lock, &[]), deadline, &mut |_| ())? > 0;
        Ok(self.is_held)
    }

    fn holder(&mut self, query: &str, deadline: Instant) -> Option<String> {
        let mut found = None;
        let parameters = [SqlValue::from(&self.name)];
        let _ = self.run((query, &parameters), deadline, &mut |mut row| {
            found = row.column().ok()
        });
        found
    }

    fn run(
        &mut self,
        statement: BoundStatement,
        deadline: Instant,
        each: &mut dyn FnMut(Row),
    ) -> Result<usize, SqlError> {
        let connection = self
            .connection
            .as_mut()
            .ok_or_else(|| SqlError::NotSent("there is no connection".into()))?;
        connection.run_one(statement, deadline, each)
    }
}

/// The second number of a gateway's lock.
fn lock_number(name: &str) -> i32 {
    let digest = Sha256::digest(name);
    i32::from_be_bytes([digest[0], digest[1], digest[2], digest[3]])
}
