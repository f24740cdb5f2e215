//! The lock that keeps a second `serve` off the name of a gateway: an advisory lock of a session that does nothing else. The
//! server releases it when the session ends.
//!
//! The session also updates the gateway's heartbeat, and looks for gateways that have stopped. Only what it sees on one
//! unbroken connection counts: a failover frees all locks at once.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::encoding::SqlError;
use super::pool::PgPool;
use super::protocol::PgConnection;
use super::schema::LOCK;
use super::uri::DatabaseUri;
use super::{CLOCK, START_TIMEOUT, STATEMENT_TIMEOUT};
use crate::store::engine::sqlite::LockError;
use crate::store::engine::{BoundStatement, Row, values};
use crate::store::{Result, StoreError};

/// The first number of a gateway's lock; the second is made from its name.
const GATEWAY_LOCK: i32 = LOCK + 1;

/// After a kill the server needs a moment to end the session.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(50);

/// The server notices within 11 s that the gateway's host has vanished. By default it would hold the lock for two hours.
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
    /// Other gateways that have open rows, as this connection has seen them.
    others: HashMap<String, Sighting>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sighting {
    pub epoch: i64,
    pub last_seen: i64,
    /// Its lock has been free and its row unchanged since this time.
    pub since: Instant,
}

impl SessionLock {
    pub fn take(uri: &DatabaseUri, name: &str) -> Result<Self, LockError> {
        let pool = PgPool::new(uri, 1).map_err(LockError::Database)?;
        let connected = pool.connect_at_start().map_err(LockError::Database)?;
        let (host, name, others) = (0, name.to_owned(), HashMap::new());
        let mut lock = Self { pool, host, name, connection: None, is_held: false, others };
        lock.use_connection(connected).map_err(LockError::Database)?;
        let deadline = Instant::now() + START_TIMEOUT;
        let give_up = Instant::now() + LOCK_TIMEOUT;
        while !lock.try_lock(deadline).map_err(|error| LockError::Database(error.into()))? {
            if Instant::now() >= give_up {
                return Err(LockError::NameTaken { address: lock.holder(deadline), name: lock.name });
            }
            thread::sleep(PAUSE);
        }
        Ok(lock)
    }

    /// Updates the heartbeat, after taking the lock again if the connection was lost. The server may hold the lock for a
    /// dead session for a while; the gateway continues to serve meanwhile. Returns false if the table has another epoch.
    pub fn renew(&mut self, epoch: i64) -> Result<bool> {
        if self.connection.is_none() {
            // What was seen on the connection before no longer counts.
            (self.is_held, self.others) = (false, HashMap::new());
            let deadline = Instant::now() + self.pool.time_to_connect();
            self.use_connection(self.pool.connect(self.host, deadline).map_err(StoreError::Unavailable)?)?;
        }
        let renewed = self.beat(epoch);
        if let Err(error) = &renewed
            && (matches!(error, SqlError::Unknown(_)) || error.is_of_host())
        {
            // The server may be a primary that was replaced.
            (self.connection, self.host) = (None, self.pool.after(self.host));
        }
        Ok(renewed?)
    }

    fn beat(&mut self, epoch: i64) -> Result<bool, SqlError> {
        let deadline = Instant::now() + STATEMENT_TIMEOUT;
        if !self.is_held {
            self.try_lock(deadline)?;
        }
        let beat = format!("UPDATE gateways SET last_seen = {CLOCK} WHERE name = $1 AND epoch = $2");
        let parameters = values![&self.name, epoch];
        if self.run((&beat, &parameters), deadline, &mut |_| ())? == 0 {
            return Ok(false);
        }
        self.look_at_others(deadline)?;
        Ok(true)
    }

    /// The gateways whose lock has been free, and which have had no heartbeat, for this long.
    pub fn silent_for(&self, time: Duration) -> impl Iterator<Item = (&String, &Sighting)> {
        self.others.iter().filter(move |(_, sighting)| sighting.since.elapsed() >= time)
    }

    /// Looks at every other gateway that has open rows. A lock is looked up, not tried: that would keep its
    /// gateway from taking it.
    fn look_at_others(&mut self, deadline: Instant) -> Result<(), SqlError> {
        let look = "SELECT name, epoch, last_seen FROM gateways WHERE name <> $1 AND epoch > 0
            AND EXISTS (SELECT 1 FROM usage WHERE seq IS NULL AND gateway = name)";
        let held = format!(
            "SELECT CAST(objid AS BIGINT) FROM pg_locks WHERE locktype = 'advisory' AND granted
             AND classid = {GATEWAY_LOCK}
             AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        );
        let (mut found, mut locks) = (Vec::new(), Vec::new());
        let parameters = values![&self.name];
        self.run((look, &parameters), deadline, &mut |mut row| {
            if let (Ok(name), Ok(epoch), Ok(last_seen)) = (row.next::<String>(), row.next(), row.next()) {
                found.push((name, Sighting { epoch, last_seen, since: Instant::now() }));
            }
        })?;
        self.run((&held, &[]), deadline, &mut |mut row| locks.extend(row.next::<i64>()))?;
        found.retain(|(name, _)| !locks.contains(&i64::from(lock_number(name) as u32)));
        for (name, now) in &mut found {
            if let Some(before) = self.others.remove(name)
                && (before.epoch, before.last_seen) == (now.epoch, now.last_seen)
            {
                *now = before;
            }
        }
        self.others = found.into_iter().collect();
        Ok(())
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

    /// The address of the process that holds the lock, if it has written it.
    fn holder(&mut self, deadline: Instant) -> Option<String> {
        let mut found = None;
        let parameters = values![&self.name];
        let address = "SELECT address FROM gateways WHERE name = $1 AND address <> ''";
        let _ = self.run((address, &parameters), deadline, &mut |mut row| found = row.next().ok());
        found
    }

    fn run(
        &mut self,
        statement: BoundStatement,
        deadline: Instant,
        each: &mut dyn FnMut(Row),
    ) -> Result<usize, SqlError> {
        let connection =
            self.connection.as_mut().ok_or_else(|| SqlError::NotSent("there is no connection".into()))?;
        connection.run(None, &[statement], deadline, each)
    }
}

/// The second number of a gateway's lock.
fn lock_number(name: &str) -> i32 {
    let digest = Sha256::digest(name);
    i32::from_be_bytes([digest[0], digest[1], digest[2], digest[3]])
}
