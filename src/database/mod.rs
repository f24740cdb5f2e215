//! Runs SQL on SQLite and PostgreSQL: connections, transactions, files. It knows no table: these
//! are handed to it as a [`Schema`].
//!
//! Statements are written once, with `$1`, `$2` … as parameters that first appear in this order, in
//! SQL that both accept. Their values are rusqlite's, for both engines. What runs in a transaction,
//! and what follows if the answer to a commit was lost, is the same for both.

mod location;
pub mod postgres;
mod schema;
pub mod sqlite;

use std::borrow::Cow;
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};
use std::vec;

pub use rusqlite::types::{FromSql, Value};
use rusqlite::types::{ToSql, ToSqlOutput, ValueRef};

pub use location::{DatabaseLocation, DatabaseUri};
use postgres::{PgSession, PgWriter, Postgres};
pub use schema::{Access, Schema};
pub use sqlite::WalFigures;
use sqlite::writer::SqliteWriter;
use sqlite::{Sqlite, SqliteSession};

use crate::error::{Problem, ProblemKind, Result};
use crate::locks::lock;

/// The time for looking up a row, with all attempts.
const LOOK_UP_TIMEOUT: Duration = Duration::from_secs(5);

/// The time for a read that a person or a request waits for.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

/// The time for a read of all rows.
pub const REPORT_TIMEOUT: Duration = Duration::from_secs(600);

/// The time for a change, with all attempts and the wait for its turn.
pub const CHANGE_TIMEOUT: Duration = Duration::from_secs(5);

/// The pause before the next attempt while another process writes. A server that writes all the time
/// leaves only moments between its transactions.
const BUSY_PAUSE: Duration = Duration::from_millis(1);

/// The pause before the next attempt to reach a lost database.
const CONNECT_PAUSE: Duration = Duration::from_millis(200);

/// An open database: connections that read, and one that writes.
pub struct Database {
    engine: Engine,
    /// `None` once the writer thread has taken it.
    writer: Mutex<Option<WriteConnection>>,
    /// Where changes go once there is a writer thread.
    submit: OnceLock<SubmitJob>,
    /// This open has created the tables.
    pub is_new: bool,
}

enum Engine {
    Sqlite(Sqlite),
    Postgres(Arc<Postgres>),
}

/// A change, which is run with the write connection, or gets the reason why it can't be.
pub type Job = Box<dyn FnOnce(Result<&mut WriteConnection>) + Send>;

/// Hands a job to the writer thread.
pub type SubmitJob = Box<dyn Fn(Job) + Send + Sync>;

/// The connection that writes. It has one owner at a time.
pub enum WriteConnection {
    Sqlite(Box<SqliteWriter>),
    Postgres(PgWriter),
}

/// The result of the work of a transaction, before its commit.
pub enum Work<T> {
    /// A value, and the last statements, which are sent together with COMMIT.
    Done(T, Vec<Statement>),
    /// The transaction before this one, whose answer was lost, was committed. The statements prove
    /// that with a commit of their own: the server may be a primary that was replaced.
    WasDone(Vec<Statement>),
}

impl Database {
    pub fn open(location: &DatabaseLocation, schema: &Schema, access: Access) -> Result<Self> {
        let (engine, writer, is_new) = match location {
            DatabaseLocation::Sqlite(path) => {
                let (sqlite, writer, is_new) = Sqlite::open(path, schema, access)?;
                let writer = writer.map(|writer| WriteConnection::Sqlite(Box::new(writer)));
                (Engine::Sqlite(sqlite), writer, is_new)
            }
            DatabaseLocation::Postgres(uri) => {
                let (postgres, writer, is_new) = Postgres::open(uri, schema, access)?;
                let writer = Some(WriteConnection::Postgres(writer));
                (Engine::Postgres(postgres), writer, is_new)
            }
        };
        Ok(Self {
            engine,
            writer: Mutex::new(writer),
            submit: OnceLock::new(),
            is_new,
        })
    }

    /// The features that only a file has; `None` for PostgreSQL.
    pub fn sqlite(&self) -> Option<&Sqlite> {
        match &self.engine {
            Engine::Sqlite(sqlite) => Some(sqlite),
            Engine::Postgres(_) => None,
        }
    }

    /// Runs `work` on one state of the database.
    pub fn read<T>(&self, work: impl FnOnce(&Session) -> Result<T>) -> Result<T> {
        self.read_within(READ_TIMEOUT, true, work)
    }

    /// The same for a read that may take minutes.
    pub fn report<T>(&self, work: impl FnOnce(&Session) -> Result<T>) -> Result<T> {
        self.read_within(REPORT_TIMEOUT, true, work)
    }

    /// The first row of one statement. It runs again while the database can't be reached: a primary
    /// may be replaced meanwhile.
    pub fn look_up<T>(
        &self,
        statement: &str,
        parameters: &[Value],
        read: impl Fn(Row) -> Result<T>,
    ) -> Result<Option<T>> {
        let deadline = Instant::now() + LOOK_UP_TIMEOUT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.read_within(left, false, |session| {
                session.first(statement, parameters, &read)
            }) {
                Err(error)
                    if [ProblemKind::Unknown, ProblemKind::Unavailable].contains(&error.kind)
                        && Instant::now() + CONNECT_PAUSE < deadline =>
                {
                    thread::sleep(CONNECT_PAUSE);
                }
                found => return found,
            }
        }
    }

    fn read_within<T>(
        &self,
        time: Duration,
        is_snapshot: bool,
        work: impl FnOnce(&Session) -> Result<T>,
    ) -> Result<T> {
        let deadline = Instant::now() + time;
        match &self.engine {
            Engine::Sqlite(sqlite) => sqlite.read(is_snapshot, deadline, work),
            Engine::Postgres(postgres) => postgres.read(is_snapshot, deadline, work),
        }
    }

    /// Runs `work` in one transaction: in `serve` as a job of the writer thread, in a command on
    /// its own connection. It is durable when this returns. If the answer to COMMIT was lost, a row
    /// of `settled_by` means that the transaction was done; without one, `work` runs again, so a
    /// repetition has to have the same result.
    pub fn transaction<T: Send + 'static>(
        &self,
        settled_by: Option<Statement>,
        work: impl Fn(&Session) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let deadline = Instant::now() + CHANGE_TIMEOUT;
        let Some(submit) = self.submit.get() else {
            return self.with_writer(|connection| {
                connection.transaction(deadline, settled_by.as_ref(), &work)
            });
        };
        let (sender, result) = mpsc::sync_channel(1);
        submit(Box::new(move |connection| {
            let result = connection.and_then(|connection| {
                connection.transaction(deadline, settled_by.as_ref(), &work)
            });
            let _ = sender.send(result);
        }));
        // A job that panicked has dropped its sender.
        result
            .recv()
            .unwrap_or_else(|_| Err(Problem::new(ProblemKind::Panicked, "a write panicked")))
    }

    /// Runs `work` with the connection of a process that has no writer thread.
    pub fn with_writer<T>(
        &self,
        work: impl FnOnce(&mut WriteConnection) -> Result<T>,
    ) -> Result<T> {
        match &mut *lock(&self.writer) {
            Some(connection) => work(connection),
            None => Err(Problem::read_only()),
        }
    }

    /// Gives the write connection to a writer thread, which takes the jobs from now on.
    pub fn take_writer(&self, submit: SubmitJob) -> Option<WriteConnection> {
        let connection = lock(&self.writer).take()?;
        let _ = self.submit.set(submit);
        Some(connection)
    }

    /// Closes the connections that read: the last connection to a file, which moves its WAL into the
    /// database, has to be the one that writes.
    pub fn close_readers(&self) {
        if let Engine::Sqlite(sqlite) = &self.engine {
            sqlite.close_readers();
        }
    }

    /// The time by the database's clock, in Unix seconds, as an expression.
    pub fn clock(&self) -> &'static str {
        match &self.engine {
            Engine::Sqlite(_) => "unixepoch()",
            Engine::Postgres(_) => postgres::CLOCK,
        }
    }

    /// The clause of a query that locks its rows until the transaction ends. SQLite does not know
    /// it: its transactions lock everything.
    pub fn row_lock(&self, clause: &'static str) -> &'static str {
        match &self.engine {
            Engine::Sqlite(_) => "",
            Engine::Postgres(_) => clause,
        }
    }
}

impl WriteConnection {
    /// Runs `work` and commits, again until the deadline if another process is in the way or the
    /// connection was lost. An answer that was lost before COMMIT was sent means that nothing was
    /// done. If the answer to COMMIT was lost, `work` runs again with the value that it returned,
    /// and finds out. `between` runs between two attempts.
    pub fn commit<T>(
        &mut self,
        deadline: Instant,
        mut between: impl FnMut(&mut Self),
        work: impl Fn(&Session, Option<&T>) -> Result<Work<T>>,
    ) -> Result<T> {
        let mut doubt: Option<(T, Problem)> = None;
        loop {
            let error = match self.attempt(deadline, &mut doubt, &work) {
                Ok(value) => return Ok(value),
                Err(error) => error,
            };
            let pause = match error.kind {
                ProblemKind::Busy => BUSY_PAUSE,
                ProblemKind::Unknown | ProblemKind::Unavailable => CONNECT_PAUSE,
                _ => return Err(doubt.map_or(error, |(_, unknown)| unknown)),
            };
            if Instant::now() + pause >= deadline {
                return Err(doubt.map_or(error, |(_, unknown)| unknown));
            }
            between(self);
            thread::sleep(pause);
        }
    }

    fn attempt<T>(
        &mut self,
        deadline: Instant,
        doubt: &mut Option<(T, Problem)>,
        work: impl Fn(&Session, Option<&T>) -> Result<Work<T>>,
    ) -> Result<T> {
        let mut run =
            |session: &Session| match work(session, doubt.as_ref().map(|(value, _)| value))? {
                Work::Done(value, last) => match session.commit(&last) {
                    Ok(()) => Ok(value),
                    Err(error) => {
                        if error.kind == ProblemKind::Unknown {
                            *doubt = Some((value, error.clone()));
                        }
                        Err(error)
                    }
                },
                Work::WasDone(last) => {
                    session.commit(&last)?;
                    let (value, _) = doubt.take().expect("only then was it asked for");
                    Ok(value)
                }
            };
        match self {
            Self::Sqlite(writer) => writer.transaction(run),
            Self::Postgres(writer) => {
                let done = run(&Session::Postgres(&writer.begin(deadline)?));
                writer.leave_host_if_busy(&done);
                done
            }
        }
    }

    /// Runs `work` in one transaction, as `Database::transaction` describes.
    pub fn transaction<T>(
        &mut self,
        deadline: Instant,
        settled_by: Option<&Statement>,
        work: impl Fn(&Session) -> Result<T>,
    ) -> Result<T> {
        self.commit(
            deadline,
            |_| (),
            |session, before| {
                if let (Some(_), Some(done)) = (before, settled_by) {
                    let found = session.rows(&done.text, &done.parameters, |_| Ok(()))?;
                    if !found.is_empty() {
                        return Ok(Work::WasDone(vec![Statement::new(postgres::TRY_WRITE, [])]));
                    }
                }
                work(session).map(|value| Work::Done(value, Vec::new()))
            },
        )
    }

    /// The connection to a file; `None` for PostgreSQL.
    pub fn sqlite(&mut self) -> Option<&mut SqliteWriter> {
        match self {
            Self::Sqlite(writer) => Some(writer),
            Self::Postgres(_) => None,
        }
    }
}

/// The words of a script in which the engines differ, for SQLite and for PostgreSQL. Text is
/// ordered by its bytes in both.
const DIALECT: [(&str, &str, &str); 7] = [
    ("{INT}", "INTEGER", "BIGINT"),
    ("{TEXT}", "TEXT", "TEXT COLLATE \"C\""),
    ("{REAL}", "REAL", "DOUBLE PRECISION"),
    ("{BLOB}", "BLOB", "BYTEA"),
    ("{STRICT}", "STRICT", ""),
    ("{CLUSTERED}", "STRICT, WITHOUT ROWID", ""),
    (
        "{ZERO_HASH}",
        "zeroblob(32)",
        "decode(repeat('00', 32), 'hex')",
    ),
];

/// Runs statements, in a transaction or on one state of the database.
pub enum Session<'a> {
    Sqlite(SqliteSession<'a>),
    Postgres(&'a PgSession<'a>),
}

#[derive(Clone)]
pub struct Statement {
    text: Cow<'static, str>,
    parameters: Vec<Value>,
}

impl Statement {
    pub fn new(text: impl Into<Cow<'static, str>>, parameters: impl Into<Vec<Value>>) -> Self {
        Self {
            text: text.into(),
            parameters: parameters.into(),
        }
    }
}

/// Parameters of different types.
macro_rules! values {
    ($($value:expr),* $(,)?) => { [$($crate::database::to_value(&$value)),*] };
}
pub(crate) use values;

pub fn to_value(value: &impl ToSql) -> Value {
    match value.to_sql() {
        Ok(ToSqlOutput::Borrowed(value)) => value.try_into().unwrap_or(Value::Null),
        Ok(ToSqlOutput::Owned(value)) => value,
        _ => unreachable!("the types of parameters are numbers, texts and bytes"),
    }
}

/// The columns of a row, read from the first to the last.
pub struct Row(vec::IntoIter<Value>);

impl Row {
    pub fn new(values: Vec<Value>) -> Self {
        Self(values.into_iter())
    }

    pub fn values(self) -> Vec<Value> {
        self.0.collect()
    }

    pub fn column<T: FromSql>(&mut self) -> Result<T> {
        let value = self.0.next().unwrap_or(Value::Null);
        T::column_result(ValueRef::from(&value))
            .map_err(|_| Problem::damaged("a column holds a value of another type"))
    }
}

/// Takes the number of a statement and a row of it.
pub type EachRow<'a> = &'a mut dyn FnMut(usize, Row) -> Result<()>;

impl Session<'_> {
    /// Runs statements one after the other, on PostgreSQL in one round trip. Calls `each` with the
    /// number of the statement and every row of it, until that returns an error. Returns how many
    /// rows each statement changed.
    pub fn run(&self, statements: &[Statement], each: EachRow) -> Result<Vec<usize>> {
        match self {
            Self::Sqlite(session) => session.run(statements, each),
            Self::Postgres(session) => session.run(statements, each),
        }
    }

    /// Runs statements without parameters that are separated by semicolons. `{INT}` and the other
    /// words of `DIALECT` stand for the engine's own.
    pub fn run_script(&self, script: &str) -> Result<()> {
        let script = DIALECT
            .iter()
            .fold(script.to_owned(), |script, (word, sqlite, postgres)| {
                let own = match self {
                    Self::Sqlite(_) => sqlite,
                    Self::Postgres(_) => postgres,
                };
                script.replace(word, own)
            });
        match self {
            Self::Sqlite(session) => session.run_script(&script),
            Self::Postgres(session) => session.run_script(&script),
        }
    }

    /// Runs the last statements and commits, on PostgreSQL in one round trip. What is not committed is
    /// rolled back when the session ends.
    fn commit(&self, last: &[Statement]) -> Result<()> {
        match self {
            Self::Sqlite(session) => session.commit(last),
            Self::Postgres(session) => session.commit(last),
        }
    }

    /// Returns how many rows were changed.
    pub fn execute(&self, statement: &str, parameters: &[Value]) -> Result<usize> {
        self.query(statement, parameters, &mut |_| Ok(()))
    }

    /// Calls `each` with every row, until it returns an error. Returns how many rows were changed.
    pub fn query(
        &self,
        statement: &str,
        parameters: &[Value],
        each: &mut dyn FnMut(Row) -> Result<()>,
    ) -> Result<usize> {
        let statement = Statement::new(statement.to_owned(), parameters);
        let changed = self.run(&[statement], &mut |_, row| each(row))?;
        Ok(changed.first().copied().unwrap_or(0))
    }

    pub fn rows<T>(
        &self,
        statement: &str,
        parameters: &[Value],
        mut read: impl FnMut(Row) -> Result<T>,
    ) -> Result<Vec<T>> {
        let mut found = Vec::new();
        self.query(statement, parameters, &mut |row| {
            found.push(read(row)?);
            Ok(())
        })?;
        Ok(found)
    }

    /// The first row, or `None`.
    pub fn first<T>(
        &self,
        statement: &str,
        parameters: &[Value],
        read: impl FnMut(Row) -> Result<T>,
    ) -> Result<Option<T>> {
        Ok(self.rows(statement, parameters, read)?.into_iter().next())
    }

    /// The only value of a statement that always has one row.
    pub fn value<T: FromSql>(&self, statement: &str, parameters: &[Value]) -> Result<T> {
        self.first(statement, parameters, |mut row| row.column())?
            .ok_or_else(|| Problem::other("a row that has to be there is missing"))
    }
}

#[cfg(test)]
pub mod tests {
    use std::path::Path;

    use super::*;
    use crate::ledger::SCHEMA;

    /// A new file, as a service opens it.
    pub fn open(path: &Path) -> Result<Database> {
        let location = DatabaseLocation::Sqlite(path.to_owned());
        Database::open(&location, &SCHEMA, Access::Serve)
    }

    #[test]
    fn columns_are_read_in_order_and_a_wrong_type_is_an_error() {
        let mut row = Row::new(values![7, None::<i64>, "x", [1_u8]].into());
        assert_eq!(row.column::<i64>().expect("a number"), 7);
        assert_eq!(row.column::<Option<f64>>().expect("nothing"), None);
        assert!(row.column::<i64>().is_err(), "text is no number");
        assert!(row.column::<[u8; 32]>().is_err(), "a hash has 32 bytes");
    }
}
