//! The connection pool: at most one connection for each thread that needs one, all to the host that
//! last worked.
//!
//! After an outcome that is not known, all of them are dropped and the next host is tried: the
//! server may be a primary that was replaced, which accepts statements whose commit never ends. If
//! no host can be used the database is lost: callers fail at once, or wait if they have something
//! to lose, and one thread tries until a commit succeeds.

use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use rustls::ClientConfig;

use super::protocol::PgConnection;
use super::startup::ConnectError;
use super::tls;
use super::uri::{DatabaseUri, SslMode};
use crate::database::error::{DatabaseError, Result};
use crate::database::statement::{Statement, TransactionMode};
use crate::mutex::lock;

/// The time that a start has to find a host that answers.
pub const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Changes nothing. Its commit proves that the server is the primary, and that all earlier commits
/// on it are durable.
pub(in crate::database) const TRY_WRITE: &str = "UPDATE schema_version SET version = version";

/// The pause between two attempts to find the database while it is lost.
const PROBE_PAUSE: Duration = Duration::from_millis(200);

const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

pub struct PgPool {
    uri: DatabaseUri,
    tls: Option<Arc<ClientConfig>>,
    max_connections: usize,
    state: Mutex<PoolState>,
    /// Signalled when a connection is free, and when the database is lost or back.
    changed: Condvar,
}

#[derive(Default)]
struct PoolState {
    idle: Vec<PoolMember>,
    /// The number of connections, idle and in use.
    open: usize,
    /// Connections of an earlier generation are dropped.
    generation: u64,
    /// The host to begin with.
    first: usize,
    /// The reason why the database can't be used; `None` if it can.
    lost: Option<String>,
    /// The log has a line saying that the server has no room for all connections.
    noted_full: bool,
}

struct PoolMember {
    connection: PgConnection,
    host: usize,
    generation: u64,
}

/// A connection while one thread has it. Dropping it gives it back, unless it is in a transaction
/// or broken.
pub struct Pooled {
    pool: Arc<PgPool>,
    /// `None` only while it is dropped.
    member: Option<PoolMember>,
}

impl PgPool {
    pub fn new(uri: &DatabaseUri, max_connections: usize) -> Result<Arc<Self>> {
        // Hosts of the same machine may be plain; the others have one mode.
        let mode = uri
            .hosts
            .iter()
            .map(|host| uri.sslmode_for(host))
            .find(|mode| *mode != SslMode::Disable);
        let tls = mode
            .map(|mode| tls::config(mode, uri.sslrootcert.as_deref()))
            .transpose();
        Ok(Arc::new(Self {
            uri: uri.clone(),
            tls: tls.map_err(DatabaseError::Unavailable)?,
            max_connections,
            state: Mutex::default(),
            changed: Condvar::new(),
        }))
    }

    /// Waits for a connection until the deadline; also for a lost database, if the mode says so.
    /// The last connection is for the leader of a group of rows.
    pub fn get(self: &Arc<Self>, deadline: Instant, mode: TransactionMode) -> Result<Pooled> {
        let is_append = matches!(mode, TransactionMode::Append(_));
        let waits_if_lost = is_append || matches!(mode, TransactionMode::WriteUntil(_));
        let max_in_use = if is_append {
            self.max_connections
        } else {
            (self.max_connections - 1).max(1)
        };
        let mut state = lock(&self.state);
        loop {
            let has_capacity = state.open - state.idle.len() < max_in_use;
            if let Some(cause) = &state.lost {
                if !waits_if_lost || deadline <= Instant::now() {
                    return Err(DatabaseError::Unavailable(cause.clone()));
                }
            } else if let Some(member) = has_capacity.then(|| state.idle.pop()).flatten() {
                if member.connection.is_usable() {
                    return Ok(self.check_out(member));
                }
                state.open -= 1;
                continue;
            } else if has_capacity && state.open < self.max_connections && Instant::now() < deadline
            {
                state.open += 1;
                let (first, generation) = (state.first, state.generation);
                drop(state);
                let opened = self.connect(first, deadline);
                state = lock(&self.state);
                match opened {
                    Ok((connection, host)) => {
                        if state.generation == generation {
                            state.first = host;
                        }
                        return Ok(self.check_out(PoolMember {
                            connection,
                            host,
                            generation,
                        }));
                    }
                    Err(error) => {
                        state.open -= 1;
                        let shares = state.open > 0 && state.generation == generation;
                        if !(shares && error.is_full) {
                            self.mark_lost_locked(&mut state, error.cause);
                            continue;
                        }
                        state.note_full(self.max_connections, &error.cause);
                        if !state.idle.is_empty() && has_capacity {
                            continue;
                        }
                    }
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() && state.lost.is_none() {
                return Err(DatabaseError::NoConnection);
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Makes the first connection.
    pub fn start(self: &Arc<Self>) -> Result<Pooled> {
        let (connection, host) = self.connect_at_start()?;
        let mut state = lock(&self.state);
        (state.open, state.first) = (1, host);
        Ok(self.check_out(PoolMember {
            connection,
            host,
            generation: state.generation,
        }))
    }

    fn check_out(self: &Arc<Self>, member: PoolMember) -> Pooled {
        Pooled {
            pool: Arc::clone(self),
            member: Some(member),
        }
    }

    /// Connects to the first host that can be used, and tries again while one does not answer:
    /// `connect_timeout` is short for the sake of a failover, and a busy primary may need longer.
    pub fn connect_at_start(&self) -> Result<(PgConnection, usize)> {
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            match self.connect(0, deadline) {
                Err(error) if error.is_timeout && Instant::now() < deadline => {}
                result => return result.map_err(|error| DatabaseError::Unavailable(error.cause)),
            }
        }
    }

    /// Connects to the first host that can be used. The error says of each why it can't.
    pub fn connect(
        &self,
        first: usize,
        deadline: Instant,
    ) -> Result<(PgConnection, usize), ConnectError> {
        let (mut causes, mut all) = (Vec::new(), ConnectError::default());
        for host in (0..self.uri.hosts.len()).map(|offset| (first + offset) % self.uri.hosts.len())
        {
            let address = &self.uri.hosts[host];
            let until = deadline.min(Instant::now() + self.uri.connect_timeout);
            match PgConnection::open(&self.uri, address, self.tls.as_ref(), until) {
                Ok(connection) => return Ok((connection, host)),
                Err(error) => {
                    causes.push(format!("{address}: {}", error.cause));
                    all.is_full |= error.is_full;
                    all.is_timeout |= error.is_timeout;
                }
            }
        }
        all.cause = causes.join("; ");
        Err(all)
    }

    pub fn lost(&self) -> Option<DatabaseError> {
        lock(&self.state)
            .lost
            .clone()
            .map(DatabaseError::Unavailable)
    }

    /// Drops every connection and looks for a host on which a commit succeeds.
    pub fn mark_lost(self: &Arc<Self>, cause: String) {
        self.mark_lost_locked(&mut lock(&self.state), cause);
    }

    fn mark_lost_locked(self: &Arc<Self>, state: &mut PoolState, cause: String) {
        if state.lost.is_some() {
            return;
        }
        log::error!("the database can't be used: {cause}. Requests get 503 until it is back");
        state.forget_connections();
        state.lost = Some(cause);
        self.changed.notify_all();
        let pool = Arc::downgrade(self);
        let probe = thread::Builder::new()
            .name("database probe".into())
            .spawn(move || Self::probe(&pool));
        if probe.is_err() {
            // Without a thread the next caller tries by itself.
            state.lost = None;
        }
    }

    /// Tries until the database is back, or the pool is dropped.
    fn probe(pool: &Weak<Self>) {
        loop {
            thread::sleep(PROBE_PAUSE);
            let Some(pool) = pool.upgrade() else {
                return;
            };
            let first = lock(&pool.state).first;
            let tried = pool.connect(first, Instant::now() + pool.time_to_connect());
            let tried = tried
                .map_err(|error| error.cause)
                .and_then(|(mut connection, host)| {
                    let deadline = Instant::now() + PROBE_TIMEOUT;
                    match connection.run_one(Statement::new(TRY_WRITE, []), deadline, &mut |_| ()) {
                        Ok(_) => Ok(host),
                        Err(error) => {
                            lock(&pool.state).first = pool.after(host);
                            Err(format!("{}: {error}", pool.uri.hosts[host]))
                        }
                    }
                });
            let mut state = lock(&pool.state);
            match tried {
                Ok(host) => {
                    log::info!("the database is back: {}", pool.uri.hosts[host]);
                    (state.first, state.lost) = (host, None);
                    pool.changed.notify_all();
                    return;
                }
                Err(cause) => state.lost = Some(cause),
            }
        }
    }

    /// The time for one attempt on every host.
    pub fn time_to_connect(&self) -> Duration {
        self.uri.connect_timeout * self.uri.hosts.len() as u32
    }

    /// The host to try after one that failed.
    pub fn after(&self, host: usize) -> usize {
        (host + 1) % self.uri.hosts.len()
    }
}

impl PoolState {
    /// Threads take turns with the existing connections; dropping these would make it worse.
    fn note_full(&mut self, max: usize, cause: &str) {
        if !self.noted_full {
            self.noted_full = true;
            log::warn!(
                "the database has no room for more than {} of {max} connections, so requests may wait: raise its \
                 max_connections ({cause})",
                self.open
            );
        }
    }

    fn forget_connections(&mut self) {
        self.generation += 1;
        self.open -= self.idle.len();
        self.idle.clear();
    }
}

impl Pooled {
    pub fn connection(&mut self) -> &mut PgConnection {
        &mut self
            .member
            .as_mut()
            .expect("only a drop takes it")
            .connection
    }

    /// After an outcome that is not known: drops every connection of this generation, and begins
    /// with the next host.
    pub fn invalidate(mut self) {
        let Some(PoolMember {
            host, generation, ..
        }) = self.member.take()
        else {
            return;
        };
        let mut state = lock(&self.pool.state);
        state.open -= 1;
        // Another thread may have done so already.
        if state.generation == generation {
            state.first = self.pool.after(host);
            state.forget_connections();
        }
        drop(state);
        self.pool.changed.notify_all();
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        let Some(member) = self.member.take() else {
            return;
        };
        let mut state = lock(&self.pool.state);
        if member.connection.is_idle && member.generation == state.generation {
            state.idle.push(member);
        } else {
            state.open -= 1;
        }
        // All: the first to wake may be one that may not take the last connection.
        self.pool.changed.notify_all();
    }
}
