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
use crate::database::statement::Statement;
use crate::database::values;

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
    /// `None` if it was lost.
    connection: Option<PgConnection>,
    is_held: bool,
}

impl SessionLock {
    /// Takes the lock of a name. `holder` is a query for the address of the process that has it.
    pub fn take(uri: &DatabaseUri, name: &str, holder: &str) -> Result<Self, LockError> {
        let pool = PgPool::new(uri, 1)?;
        let (mut connection, host) = pool.connect_at_start()?;
        let deadline = Instant::now() + START_TIMEOUT;
        let give_up = Instant::now() + LOCK_TIMEOUT;
        while !try_lock(&mut connection, name, deadline).map_err(DatabaseError::from)? {
            if Instant::now() >= give_up {
                let (mut address, holder) =
                    (None, Statement::new(holder.to_owned(), values![name]));
                let _ = connection
                    .run_one(holder, deadline, &mut |mut row| address = row.column().ok());
                let name = name.to_owned();
                return Err(LockError::NameTaken { name, address });
            }
            thread::sleep(PAUSE);
        }
        Ok(Self {
            pool,
            host,
            name: name.to_owned(),
            connection: Some(connection),
            is_held: true,
        })
    }

    /// Updates the heartbeat, after taking the lock again if the connection was lost. The server
    /// may hold the lock for a dead session for a while; the gateway continues to serve meanwhile.
    /// Returns false if the heartbeat changed no row.
    pub fn renew(&mut self, heartbeat: Statement) -> Result<bool> {
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => {
                let deadline = Instant::now() + self.pool.time_to_connect();
                let (connection, host) = self
                    .pool
                    .connect(self.host, deadline)
                    .map_err(|error| DatabaseError::Unavailable(error.cause))?;
                (self.host, self.is_held) = (host, false);
                connection
            }
        };
        let deadline = Instant::now() + STATEMENT_TIMEOUT;
        let renew = || {
            if !self.is_held {
                self.is_held = try_lock(&mut connection, &self.name, deadline)?;
            }
            Ok(connection.run_one(heartbeat, deadline, &mut |_| ())? > 0)
        };
        let renewed: Result<bool, SqlError> = renew();
        if renewed.as_ref().is_err_and(SqlError::ends_connection) {
            // The server may be a primary that was replaced.
            self.host = self.pool.after(self.host);
        } else {
            self.connection = Some(connection);
        }
        Ok(renewed?)
    }
}

fn try_lock(
    connection: &mut PgConnection,
    name: &str,
    deadline: Instant,
) -> Result<bool, SqlError> {
    let number = lock_number(name);
    let lock = format!("SELECT 1 WHERE pg_try_advisory_lock({GATEWAY_LOCK}, {number})");
    let found = connection.run(
        Some(KEEPALIVE),
        &[Statement::new(lock, [])],
        None,
        deadline,
        &mut |_, _| (),
    )?;
    Ok(found == [1])
}

/// The second number of a gateway's lock.
fn lock_number(name: &str) -> i32 {
    let digest = Sha256::digest(name);
    i32::from_be_bytes([digest[0], digest[1], digest[2], digest[3]])
}
