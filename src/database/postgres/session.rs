//! A transaction on a pooled connection.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use super::encoding::SqlError;
use super::pool::Pooled;
use crate::database::error::{DatabaseError, Result};
use crate::database::statement::{EachRow, Statement};
use crate::database::value::Row;

pub(super) const STATEMENT_TIMEOUT: Duration = Duration::from_secs(3);

pub(super) const REPORT_TIMEOUT: Duration = Duration::from_secs(600);

/// Runs statements on a connection, in one transaction that begins with the first; or one statement
/// without.
pub struct PgSession {
    /// `None` if the connection can't be used any more.
    pooled: RefCell<Option<Pooled>>,
    begin: Cell<Option<&'static str>>,
    time: Duration,
}

impl PgSession {
    pub(super) fn new(pooled: Pooled, begin: Option<&'static str>, time: Duration) -> Self {
        Self {
            pooled: RefCell::new(Some(pooled)),
            begin: Cell::new(begin),
            time,
        }
    }

    fn send(
        &self,
        statements: &[Statement],
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
        let outcome = pooled
            .connection()
            .run(self.begin.take(), statements, end, deadline, each);
        if outcome.as_ref().is_err_and(SqlError::ends_connection)
            && let Some(pooled) = borrowed.take()
        {
            pooled.invalidate();
        }
        Ok(outcome?)
    }

    pub fn run_and_commit(&self, statements: &[Statement]) -> Result<Vec<usize>> {
        let is_idle = || {
            self.pooled
                .borrow_mut()
                .as_mut()
                .is_some_and(|pooled| pooled.connection().is_idle)
        };
        if statements.is_empty() && (self.begin.get().is_some() || is_idle()) {
            // Nothing was sent, or one statement without a transaction.
            return Ok(Vec::new());
        }
        self.send(statements, Some("COMMIT"), &mut |_, _| ())
    }

    pub fn is_lost(&self) -> bool {
        self.pooled.borrow().is_none()
    }

    pub fn run_script(&self, script: &str) -> Result<()> {
        self.send(&[], Some(script), &mut |_, _| ()).map(drop)
    }

    pub fn run(&self, statements: &[Statement], each: EachRow) -> Result<Vec<usize>> {
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

impl From<SqlError> for DatabaseError {
    fn from(error: SqlError) -> Self {
        match (&error, error.state()) {
            (SqlError::NotSent(cause), _) => Self::Other(cause.clone()),
            (SqlError::Unknown(cause), _) => Self::Unknown(cause.clone()),
            (_, "53100") => Self::Full,
            // Another transaction was in the way, so that a retry helps: a serialization failure, a
            // deadlock, or a lock that was not free in time.
            (_, "40001" | "40P01" | "55P03") => Self::Busy,
            _ => Self::Other(error.to_string()),
        }
    }
}
