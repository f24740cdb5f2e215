//! The connections that read: threads take one each, for one transaction.

use std::cell::Cell;
use std::time::{Duration, Instant};

use rusqlite::{Connection, OpenFlags};

use super::{Sqlite, SqliteSession, connect, lock};
use crate::semaphore::Permit;
use crate::store::StoreError;
use crate::store::engine::{BoundStatement, Row, SqlSession, Statement, Transaction};

/// The time that a read waits for a connection, and for the recovery of the database after a crash.
const READ_TIMEOUT: Duration = Duration::from_secs(2);

impl Sqlite {
    pub(super) fn begin_read(&self) -> Result<SqliteRead<'_>, StoreError> {
        let permit = self.reading.acquire(Instant::now() + READ_TIMEOUT).ok_or(StoreError::NoConnection)?;
        let idle = lock(&self.readers).pop_front();
        let connection = match idle {
            Some(connection) => connection,
            None => {
                let connection = connect(&self.path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
                connection.busy_timeout(READ_TIMEOUT)?;
                connection
            }
        };
        connection.prepare_cached("BEGIN")?.execute([])?;
        let (connection, is_committed) = (Some(connection), Cell::new(false));
        Ok(SqliteRead { engine: self, connection, is_committed, _permit: permit })
    }
}

/// A read. After an error its connection is closed, and the next reader opens another one.
pub(super) struct SqliteRead<'a> {
    engine: &'a Sqlite,
    /// `None` only while it is dropped.
    connection: Option<Connection>,
    is_committed: Cell<bool>,
    _permit: Permit<'a>,
}

impl SqliteRead<'_> {
    fn connection(&self) -> &Connection {
        self.connection.as_ref().expect("a read should have its connection until it is dropped")
    }
}

impl Transaction for SqliteRead<'_> {
    fn commit(&self, _: &[Statement]) -> Result<Vec<usize>, StoreError> {
        self.connection().prepare_cached("COMMIT")?.execute([])?;
        self.is_committed.set(true);
        Ok(Vec::new())
    }
}

impl SqlSession for SqliteRead<'_> {
    fn run(
        &self,
        statements: &[BoundStatement],
        each: &mut dyn FnMut(usize, Row) -> Result<(), StoreError>,
    ) -> Result<Vec<usize>, StoreError> {
        SqliteSession(self.connection()).run(statements, each)
    }
}

impl Drop for SqliteRead<'_> {
    fn drop(&mut self) {
        let connection = self.connection.take().filter(|_| self.is_committed.get());
        lock(&self.engine.readers).extend(connection);
    }
}
