//! The lock that keeps a second `serve` off a database: an advisory lock of a session that does nothing else. The server
//! releases it when the session ends.

use std::time::{Duration, Instant};
use std::{process, thread};

use super::super::super::StoreError;
use super::super::Row;
use super::super::sqlite::LockError;
use super::START_TIME;
use super::connection::Connection;
use super::pool::Pool;
use super::schema::LOCK;
use super::uri::DatabaseUri;

/// After a kill the server needs a moment to end the session.
const PATIENCE: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(50);

/// Held until the value is dropped, or the connection is lost.
pub struct SessionLock(
    #[expect(dead_code, reason = "the server holds the lock as long as it is open")] Connection,
);

impl SessionLock {
    pub fn take(uri: &DatabaseUri) -> Result<Self, LockError> {
        let deadline = Instant::now() + START_TIME;
        let opened =
            Pool::new(uri, 1).and_then(|pool| pool.connect(0, deadline).map_err(StoreError::Unavailable));
        let (mut connection, _) = opened.map_err(LockError::Database)?;
        let lock = format!("SELECT 1 WHERE pg_try_advisory_lock({LOCK}, 0)");
        let give_up = Instant::now() + PATIENCE;
        loop {
            let taken = connection.run(None, &[(&lock, &[])], deadline, &mut |_| ());
            match taken.map_err(|error| LockError::Database(error.into()))? {
                0 if Instant::now() < give_up => thread::sleep(PAUSE),
                0 => return Err(LockError::Held(holder(&mut connection, deadline))),
                _ => break,
            }
        }
        // For `holder`.
        let name = format!("SET application_name = 'adriaticum serve {}'", process::id());
        connection.run_text(&name, deadline).map_err(|error| LockError::Database(error.into()))?;
        Ok(Self(connection))
    }
}

/// The pid of the process that has the lock, on the host that it runs on.
fn holder(connection: &mut Connection, deadline: Instant) -> Option<u32> {
    let name = format!(
        "SELECT application_name FROM pg_stat_activity JOIN pg_locks USING (pid) WHERE locktype = 'advisory'
         AND datname = current_database() AND classid = {LOCK} AND objid = 0 AND granted"
    );
    let mut found = None;
    let mut read = |mut row: Row| found = row.next::<String>().ok();
    connection.run(None, &[(&name, &[])], deadline, &mut read).ok()?;
    found?.rsplit(' ').next()?.parse().ok()
}
