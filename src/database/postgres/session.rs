//! A transaction, or one statement, on a connection of the list or on the one that writes.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use super::Postgres;
use super::connection::{PgConnection, STATEMENT_TIMEOUT};
use crate::database::session::EachRow;
use crate::database::{Problem, ProblemKind, Result, Row, Statement};

/// Runs statements in one transaction that begins with the first; or one statement without.
pub struct PgSession<'a> {
    postgres: &'a Postgres,
    /// `None` if it can't be used any more.
    connection: RefCell<Option<PgConnection>>,
    /// Where the connection belongs.
    place: &'a mut Option<PgConnection>,
    begin: Cell<Option<String>>,
    /// The server's limit for each statement.
    time: Duration,
    /// No statement begins after it.
    deadline: Instant,
}

impl<'a> PgSession<'a> {
    /// A transaction that begins with `begin`; without, each statement is one by itself, with the
    /// time that its connection has set.
    pub(super) fn new(
        postgres: &'a Postgres,
        place: &'a mut Option<PgConnection>,
        begin: Option<&str>,
        time: Duration,
        deadline: Instant,
    ) -> Self {
        let begin = begin.map(|begin| match time {
            STATEMENT_TIMEOUT => begin.to_owned(),
            time => format!(
                "{begin}; SET LOCAL statement_timeout = {}",
                time.as_millis()
            ),
        });
        Self {
            postgres,
            connection: RefCell::new(place.take()),
            place,
            begin: Cell::new(begin),
            time,
            deadline,
        }
    }

    fn send(
        &self,
        statements: &[Statement],
        end: Option<&str>,
        each: &mut dyn FnMut(usize, Row),
    ) -> Result<Vec<usize>> {
        let mut open = self
            .connection
            .try_borrow_mut()
            .map_err(|_| Problem::other("a query within a query"))?;
        let connection = open
            .as_mut()
            .ok_or_else(|| Problem::unknown("the connection was lost"))?;
        let begin = self.begin.take();
        let result = connection.run(begin.as_deref(), statements, end, self.time, each);
        if let Err(ProblemKind::Unknown | ProblemKind::Unavailable) =
            result.as_ref().map_err(|problem| problem.kind)
        {
            self.postgres.forget_connections(connection);
            *open = None;
        }
        result
    }

    /// Runs the last statements and commits.
    pub fn commit(&self, statements: &[Statement]) -> Result<()> {
        self.send(statements, Some("COMMIT"), &mut |_, _| ())
            .map(drop)
    }

    /// Ends a read, which may have sent nothing, or one statement without a transaction.
    pub fn end(&self) -> Result<()> {
        match &*self.connection.borrow() {
            Some(connection) if connection.is_idle => return Ok(()),
            _ => {}
        }
        self.commit(&[])
    }

    pub fn run_script(&self, script: &str) -> Result<()> {
        self.send(&[], Some(script), &mut |_, _| ()).map(drop)
    }

    pub fn run(&self, statements: &[Statement], each: EachRow) -> Result<Vec<usize>> {
        if statements.is_empty() {
            // The server would not answer.
            return Ok(Vec::new());
        }
        if Instant::now() >= self.deadline {
            return Err(Problem::late());
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

impl Drop for PgSession<'_> {
    /// Ends the transaction after an error, and gives the connection back unless that fails.
    fn drop(&mut self) {
        let mut connection = self.connection.get_mut().take();
        if let Some(open) = connection.as_mut().filter(|open| !open.is_idle) {
            let _ = open.run_text("ROLLBACK", STATEMENT_TIMEOUT);
        }
        *self.place = connection.filter(|connection| connection.is_idle);
    }
}
