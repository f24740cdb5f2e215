//! The PostgreSQL engine: connections to the primary of a cluster.
//!
//! The server makes every commit durable. What is left to do here is to find the primary. Each call
//! tries every host once, and says to its caller what failed; nothing is known about the database
//! beyond that.

mod connection;
mod stream;
#[cfg(all(test, feature = "test-postgres"))]
pub mod tests;

use std::cell::{Cell, RefCell};
use std::mem;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustls::ClientConfig;

use self::connection::{PgConnection, STATEMENT_TIMEOUT};
use super::location::{DatabaseUri, SslMode};
use super::schema::{Access, CREATE_TIMEOUT, Schema};
use super::{CONNECT_PAUSE, EachRow, Row, Session, Statement};
use crate::error::{Problem, ProblemKind, Result};
use crate::locks::{Pool, Pooled, lock};

/// The most connections that read: look-ups of keys, the console, reports. One that writes is beside
/// them.
const MAX_READERS: usize = 7;

/// The time that a start has to connect.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// The time that a read waits for a connection, and for connecting. The hosts share it.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(3);

/// Changes nothing. Its commit proves that the server is the primary, and that all earlier commits
/// on it are durable.
pub(super) const TRY_WRITE: &str = "UPDATE schema_version SET version = version";

/// The time by the server's clock, in Unix seconds.
pub(super) const CLOCK: &str = "CAST(floor(extract(epoch FROM clock_timestamp())) AS BIGINT)";

const READ: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";

/// Every statement sees what was committed before it, so what a lock protects is current once the
/// lock is held.
const WRITE: &str = "BEGIN ISOLATION LEVEL READ COMMITTED";

/// A database with a list of connections that read.
pub struct Postgres {
    uri: DatabaseUri,
    /// `None` if no host needs it.
    tls: Option<Arc<ClientConfig>>,
    /// The places of the connections that read. An empty one is connected when it is needed.
    readers: Pool<Option<PgConnection>>,
    state: Mutex<ServerState>,
}

#[derive(Default)]
struct ServerState {
    /// The host to begin with.
    first: usize,
    /// Connections of an earlier generation are dropped.
    generation: u64,
    /// The log has a line saying that the server has no room for all connections.
    noted_full: bool,
}

impl Postgres {
    /// Connects; creates the tables if there are none and `access` allows that. Also returns the
    /// connection that writes, which is made when it is needed, and whether the tables were created.
    pub fn open(
        uri: &DatabaseUri,
        schema: &Schema,
        access: Access,
    ) -> Result<(Arc<Self>, PgWriter, bool)> {
        let postgres = Arc::new(Self::new(uri)?);
        let is_new = postgres.change_schema(|session| schema.bring_up_to_date(session, access))?;
        let writer = PgWriter {
            postgres: Arc::clone(&postgres),
            connection: None,
        };
        Ok((postgres, writer, is_new))
    }

    /// Creates the tables in an empty database and fills them, as [`Schema::create_with`] does.
    pub fn create_with<T>(
        uri: &DatabaseUri,
        schema: &Schema,
        fill: impl FnOnce(&Session) -> Result<T>,
    ) -> Result<T> {
        Self::new(uri)?.change_schema(|session| schema.create_with(session, fill))
    }

    fn new(uri: &DatabaseUri) -> Result<Self> {
        let has_tls = uri
            .hosts
            .iter()
            .any(|host| uri.sslmode_for(host) == SslMode::VerifyFull);
        let tls = has_tls.then(|| stream::tls_config(uri.sslrootcert.as_deref()));
        Ok(Self {
            uri: uri.clone(),
            tls: tls.transpose().map_err(Problem::other)?,
            readers: Pool::new([const { None }; MAX_READERS]),
            state: Mutex::default(),
        })
    }

    /// Runs `work`, which begins its transaction itself.
    fn change_schema<T>(&self, work: impl FnOnce(&Session) -> Result<T>) -> Result<T> {
        let mut reader = self.reader(Instant::now() + START_TIMEOUT)?;
        let deadline = Instant::now() + CREATE_TIMEOUT;
        let session = PgSession::new(self, &mut reader, None, CREATE_TIMEOUT, deadline);
        work(&Session::Postgres(&session))
    }

    /// Reads one state of the database, or with one statement, until the deadline.
    pub fn read<T>(
        &self,
        is_snapshot: bool,
        deadline: Instant,
        work: impl FnOnce(&Session) -> Result<T>,
    ) -> Result<T> {
        let mut reader = self.reader(deadline.min(Instant::now() + CONNECTION_TIMEOUT))?;
        let (begin, time) = match is_snapshot {
            true => (Some(READ), time_left(deadline)),
            false => (None, STATEMENT_TIMEOUT),
        };
        let session = PgSession::new(self, &mut reader, begin, time, deadline);
        let done = work(&Session::Postgres(&session));
        let done = done.and_then(|value| session.end().map(|()| value));
        done.map_err(|problem| match problem.kind {
            // It was canceled: nothing else is in the way of a read.
            ProblemKind::Busy => Problem::late(),
            _ => problem,
        })
    }

    /// Waits for a connection of the list, and opens it if that is needed.
    fn reader(&self, deadline: Instant) -> Result<Pooled<'_, Option<PgConnection>>> {
        loop {
            let place = self.readers.take(deadline, Option::is_some);
            let mut place = place.ok_or_else(Problem::no_connection)?;
            let problem = match self.keep_connected(&mut place, deadline) {
                Ok(()) => return Ok(place),
                Err(problem) => problem,
            };
            let is_full = problem.kind == ProblemKind::Busy;
            if !is_full || Instant::now() + CONNECT_PAUSE >= deadline {
                return Err(if is_full {
                    problem
                } else {
                    Problem::unavailable(problem)
                });
            }
            self.note_full(&problem);
            // Callers take turns with those that there are.
            drop(place);
            thread::sleep(CONNECT_PAUSE);
        }
    }

    fn note_full(&self, problem: &Problem) {
        if !mem::replace(&mut lock(&self.state).noted_full, true) {
            log::warn!(
                "the database has no room for all of {} connections, so requests may wait: raise its max_connections \
                 ({problem})",
                MAX_READERS + 1
            );
        }
    }

    /// Connects unless the connection of this place can still be used.
    fn keep_connected(&self, place: &mut Option<PgConnection>, deadline: Instant) -> Result<()> {
        let generation = lock(&self.state).generation;
        place.take_if(|kept| kept.generation != generation || !kept.is_usable());
        if place.is_none() {
            *place = Some(self.connect(deadline)?);
        }
        Ok(())
    }

    /// Connects to the first host that can be used. The error says of each why it can't; its kind is
    /// `Busy` if one has no room for another connection.
    fn connect(&self, deadline: Instant) -> Result<PgConnection> {
        let state = lock(&self.state);
        let (first, generation) = (state.first, state.generation);
        drop(state);
        let (mut kind, mut causes) = (ProblemKind::Unavailable, Vec::new());
        let count = self.uri.hosts.len();
        for tried in 0..count {
            let host = (first + tried) % count;
            // One that does not answer leaves time for the others.
            let until = Instant::now() + time_left(deadline) / (count - tried) as u32;
            match PgConnection::open(&self.uri, host, self.tls.as_ref(), until) {
                Ok(mut connection) => {
                    connection.generation = generation;
                    let mut state = lock(&self.state);
                    if state.generation == generation {
                        state.first = host;
                    }
                    return Ok(connection);
                }
                Err(problem) => {
                    causes.push(format!("{}: {problem}", self.uri.hosts[host]));
                    if problem.kind == ProblemKind::Busy {
                        kind = ProblemKind::Busy;
                    }
                }
            }
        }
        Err(Problem::new(kind, causes.join("; ")))
    }

    /// After an outcome that is not known: drops every connection of the generation of the one that
    /// failed, and begins with the next host. The server may be a primary that was replaced, which
    /// accepts statements whose commit never ends.
    fn forget_connections(&self, failed: &PgConnection) {
        let mut state = lock(&self.state);
        // Another thread may have done so already.
        if failed.generation != state.generation {
            return;
        }
        state.generation += 1;
        state.first = (failed.host + 1) % self.uri.hosts.len();
        drop(state);
        self.readers
            .with_free(|readers| readers.iter_mut().for_each(|reader| *reader = None));
    }
}

/// The connection that writes. It belongs to one thread, and to no list.
pub struct PgWriter {
    postgres: Arc<Postgres>,
    connection: Option<PgConnection>,
}

impl PgWriter {
    /// Begins a transaction that writes, after connecting if that is needed: one attempt on every
    /// host. The error says why that failed.
    pub fn begin(&mut self, deadline: Instant) -> Result<PgSession<'_>> {
        let connected = deadline.min(Instant::now() + CONNECTION_TIMEOUT);
        self.postgres
            .keep_connected(&mut self.connection, connected)
            .map_err(Problem::unavailable)?;
        // One that waits for a lock has to try again.
        let time = STATEMENT_TIMEOUT.min(time_left(deadline));
        let (postgres, place) = (&*self.postgres, &mut self.connection);
        let session = PgSession::new(postgres, place, Some(WRITE), time, deadline);
        Ok(session)
    }

    /// After a wait for a lock that took too long, begins with the next host. The server may be a
    /// primary that was replaced, on which our own last commit never ends and keeps its locks.
    pub fn leave_host_if_busy<T>(&mut self, done: &Result<T>) {
        if matches!(done, Err(problem) if problem.kind == ProblemKind::Busy)
            && let Some(connection) = self.connection.take()
        {
            self.postgres.forget_connections(&connection);
        }
    }
}

/// At least a millisecond: 0 is no limit for the server.
fn time_left(deadline: Instant) -> Duration {
    let left = deadline.saturating_duration_since(Instant::now());
    left.max(Duration::from_millis(1))
}

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
    fn new(
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
