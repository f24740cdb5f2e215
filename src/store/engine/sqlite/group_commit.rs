//! Group commit: writes that wait at the same time share one transaction and one fsync.
//!
//! A thread whose write waits and that finds the connection free becomes the leader: it writes everything that waits in
//! one transaction, syncs if a member needs it, and wakes the others. While it does so, the next group gathers.

use std::collections::VecDeque;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rusqlite::Connection;

use super::super::super::StoreError;
use super::super::{Session, Write};
use super::files::Files;
use super::lease::{Lease, WriteConnection};
use super::wal::Wal;
use super::{Statements, checkpoint, lock};

/// How long a write waits for its turn and for other processes, in total.
const PATIENCE: Duration = Duration::from_secs(5);

pub(super) struct Writer {
    pub(super) state: Mutex<State>,
    /// Signalled when the connection is free and when outcomes are known.
    pub(super) changed: Condvar,
    pub(super) wal: Wal,
    patience: Duration,
    /// From this many pages on the leader restarts the WAL.
    pub(super) restart_at: AtomicU64,
    pub(super) restarts: AtomicU64,
}

pub(super) struct State {
    /// `None` while a thread writes with it.
    pub connection: Option<WriteConnection>,
    taken: Instant,
    pub waiting: VecDeque<Arc<Job>>,
}

pub(super) struct Job {
    /// `None` if its thread needs the connection for itself.
    pub write: Option<Write>,
    pub deadline: Instant,
    pub outcome: OnceLock<Result<usize, StoreError>>,
}

impl Job {
    pub fn is_durable(&self) -> bool {
        self.write.as_ref().is_some_and(|write| write.durable)
    }
}

impl Writer {
    pub fn new(connection: Connection, files: Files) -> Result<Self, StoreError> {
        // In WAL mode, NORMAL leaves the fsync of a commit to us; a checkpoint syncs by itself.
        connection.pragma_update(None, "synchronous", "NORMAL")?;
        let wal = Wal::open(files.wal())?;
        let state = State {
            connection: Some(WriteConnection { connection, files }),
            taken: Instant::now(),
            waiting: VecDeque::new(),
        };
        Ok(Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            wal,
            patience: PATIENCE,
            restart_at: AtomicU64::new(checkpoint::RESTART_PAGES),
            restarts: AtomicU64::new(0),
        })
    }

    #[cfg(test)]
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// A write ends within its patience, unless the disk or the file system hangs.
    pub fn is_stuck(&self) -> bool {
        let state = lock(&self.state);
        state.connection.is_none() && state.taken.elapsed() > 2 * self.patience
    }

    /// Returns when the write is committed and, if it is durable, synced.
    pub fn write(&self, write: Write) -> Result<usize, StoreError> {
        let job = self.job(Some(write));
        let mut state = lock(&self.state);
        state.waiting.push_back(Arc::clone(&job));
        loop {
            if let Some(outcome) = job.outcome.get() {
                return outcome.clone();
            }
            if let Some(lease) = self.lead(&mut state) {
                drop(state);
                lease.write_group();
                state = lock(&self.state);
            } else {
                state = self.wait(state, &job)?;
            }
        }
    }

    /// Runs `work` in a transaction of its own, in its turn.
    pub fn transaction<T>(
        &self,
        durable: bool,
        work: impl FnOnce(&dyn Session) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let deadline = Instant::now() + self.patience;
        let lease = self.lease()?;
        lease.begin_until(deadline)?;
        let value = work(&Statements(lease.connection()))?;
        lease.commit()?;
        if durable {
            self.wal.sync()?;
        }
        Ok(value)
    }

    /// Runs `work` with the connection, in its turn and outside of a transaction.
    pub fn with_connection<T>(
        &self,
        durable: bool,
        work: impl FnOnce(&Connection) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let deadline = Instant::now() + self.patience;
        let lease = self.lease()?;
        lease.prepare(deadline)?;
        let value = work(lease.connection())?;
        if durable {
            self.wal.sync()?;
        }
        Ok(value)
    }

    fn job(&self, write: Option<Write>) -> Arc<Job> {
        let deadline = Instant::now() + self.patience;
        Arc::new(Job { write, deadline, outcome: OnceLock::new() })
    }

    /// Takes the connection and all writes at the head of the queue. Returns `None` if the connection is taken, or if
    /// the next in the queue needs it for itself.
    fn lead(&self, state: &mut State) -> Option<Lease<'_>> {
        state.waiting.front()?.write.as_ref()?;
        let connection = state.connection.take()?;
        state.taken = Instant::now();
        let count = state.waiting.iter().take_while(|job| job.write.is_some()).count();
        let group = state.waiting.drain(..count).collect();
        Some(Lease::new(self, connection, group))
    }

    /// Takes the connection for one thread, when it is its turn.
    fn lease(&self) -> Result<Lease<'_>, StoreError> {
        let job = self.job(None);
        let mut state = lock(&self.state);
        state.waiting.push_back(Arc::clone(&job));
        loop {
            let is_next = state.waiting.front().is_some_and(|next| Arc::ptr_eq(next, &job));
            if is_next && let Some(connection) = state.connection.take() {
                state.taken = Instant::now();
                state.waiting.pop_front();
                return Ok(Lease::new(self, connection, Vec::new()));
            }
            state = self.wait(state, &job)?;
        }
    }

    /// Waits for a signal. Past its deadline a job that no leader has taken leaves the queue.
    fn wait<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        job: &Arc<Job>,
    ) -> Result<MutexGuard<'a, State>, StoreError> {
        let Some(place) = state.waiting.iter().position(|other| Arc::ptr_eq(other, job)) else {
            // A leader has it, and reports its outcome on every path.
            return Ok(self.changed.wait(state).unwrap_or_else(PoisonError::into_inner));
        };
        let left = job.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            state.waiting.remove(place);
            // Those behind it may go on.
            self.changed.notify_all();
            return Err(StoreError::Busy);
        }
        Ok(self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::mpsc;
    use std::thread;

    use super::super::super::super::tests::Temporary;
    use super::super::super::{Statement, values};
    use super::super::Sqlite;
    use super::*;

    fn engine(patience: Duration) -> (Temporary, Sqlite) {
        let temporary = Temporary::new();
        let mut engine = Sqlite::open(&temporary.folder.join("group.db")).expect("a database");
        engine.set_patience(patience);
        engine
            .transaction(false, |session| session.execute("CREATE TABLE t (x INTEGER CHECK (x <> 13))", &[]))
            .expect("a table");
        (temporary, engine)
    }

    fn insert(number: i64, durable: bool) -> Write {
        Write { statements: vec![Statement::new("INSERT INTO t VALUES ($1)", values![number])], durable }
    }

    fn numbers(engine: &Sqlite) -> Vec<i64> {
        let read =
            |session: &dyn Session| session.rows("SELECT x FROM t ORDER BY x", &[], |mut row| row.next());
        engine.read(read).expect("the numbers")
    }

    /// Runs `meanwhile` while another thread has the connection.
    fn while_taken(engine: &Sqlite, meanwhile: impl FnOnce()) {
        let barrier = Barrier::new(2);
        thread::scope(|scope| {
            let holder = scope.spawn(|| {
                engine.transaction(false, |_| {
                    barrier.wait();
                    barrier.wait();
                    Ok(())
                })
            });
            barrier.wait();
            meanwhile();
            barrier.wait();
            holder.join().expect("no panic").expect("it only waits");
        });
    }

    fn waiting(engine: &Sqlite) -> usize {
        lock(&engine.writer.state).waiting.len()
    }

    fn until(condition: impl Fn() -> bool) {
        while !condition() {
            thread::yield_now();
        }
    }

    #[test]
    fn writes_that_wait_share_a_transaction_and_a_failing_one_fails_alone() {
        let (_temporary, engine) = engine(PATIENCE);
        let outcomes = thread::scope(|scope| {
            let mut writers = Vec::new();
            while_taken(&engine, || {
                for number in 10..16 {
                    let engine = &engine;
                    writers.push(
                        scope.spawn(move || (number, engine.write(insert(number, number % 2 == 0)).is_ok())),
                    );
                }
                until(|| waiting(&engine) == 6);
            });
            writers.into_iter().map(|writer| writer.join().expect("no panic")).collect::<Vec<_>>()
        });
        for (number, is_good) in outcomes {
            assert_eq!(is_good, number != 13, "{number}");
        }
        assert_eq!(numbers(&engine), [10, 11, 12, 14, 15]);
    }

    /// In an earlier version a write that timed out while the connection was handed over left an empty group, whose
    /// leader panicked and lost the connection.
    #[test]
    fn writes_that_time_out_leave_the_connection_usable() {
        let (_temporary, engine) = engine(Duration::from_millis(30));
        while_taken(&engine, || {
            thread::scope(|scope| {
                let writers: Vec<_> = (0..4)
                    .map(|number| {
                        scope.spawn({
                            let engine = &engine;
                            move || engine.write(insert(number, true))
                        })
                    })
                    .collect();
                let exclusive = scope.spawn(|| engine.transaction(true, |_| Ok(())));
                for writer in writers {
                    assert!(matches!(writer.join().expect("no panic"), Err(StoreError::Busy)));
                }
                assert!(matches!(exclusive.join().expect("no panic"), Err(StoreError::Busy)));
            });
            assert_eq!(waiting(&engine), 0);
        });
        engine.write(insert(5, true)).expect("the connection was given back");
        assert_eq!(numbers(&engine), [5], "what timed out was not written");
    }

    #[test]
    fn a_write_ends_within_its_patience_if_another_process_has_the_database() {
        let (temporary, engine) = engine(Duration::from_millis(300));
        let other = Connection::open(temporary.folder.join("group.db")).expect("the database");
        other.execute_batch("BEGIN IMMEDIATE").expect("a lock");
        let began = Instant::now();
        thread::scope(|scope| {
            for number in 0..4 {
                let engine = &engine;
                scope.spawn(move || {
                    assert!(matches!(engine.write(insert(number, true)), Err(StoreError::Busy)))
                });
            }
        });
        assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
        assert!(!engine.is_stuck(), "it answers that it is locked");
        let (sender, receiver) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| sender.send(engine.write(insert(7, true))));
            until(|| lock(&engine.writer.state).connection.is_none());
            drop(other);
            receiver.recv().expect("an outcome").expect("the lock is gone in time");
        });
        assert_eq!(numbers(&engine), [7]);
    }

    #[test]
    fn a_panic_gives_the_connection_back_and_rolls_back() {
        let (_temporary, engine) = engine(PATIENCE);
        let write = |session: &dyn Session| -> Result<(), StoreError> {
            session.execute("INSERT INTO t VALUES (1)", &[])?;
            panic!("on purpose");
        };
        let panicked = thread::scope(|scope| scope.spawn(|| engine.transaction(true, write)).join().is_err());
        assert!(panicked);
        engine.write(insert(2, true)).expect("the connection was given back");
        assert_eq!(numbers(&engine), [2]);
        // A leader that panics reports to its group.
        let job = engine.writer.job(Some(insert(3, false)));
        let mut state = lock(&engine.writer.state);
        state.waiting.push_back(Arc::clone(&job));
        let lease = engine.writer.lead(&mut state);
        drop(state);
        drop(lease);
        assert!(matches!(job.outcome.get(), Some(Err(StoreError::Panicked))));
        engine.write(insert(4, true)).expect("the connection was given back");
    }

    #[test]
    fn a_write_that_hangs_is_reported() {
        let (_temporary, engine) = engine(Duration::from_millis(20));
        assert!(!engine.is_stuck());
        while_taken(&engine, || until(|| engine.is_stuck()));
        assert!(!engine.is_stuck());
    }

    #[test]
    fn an_error_in_a_transaction_rolls_it_back() {
        let (_temporary, engine) = engine(PATIENCE);
        let failing = |session: &dyn Session| {
            session.execute("INSERT INTO t VALUES (1)", &[])?;
            session.execute("INSERT INTO t VALUES (13)", &[])
        };
        assert!(engine.transaction(true, failing).is_err());
        let two = vec![
            Statement::new("INSERT INTO t VALUES ($1)", values![1_i64]),
            Statement::new("INSERT INTO t VALUES ($1)", values![13_i64]),
        ];
        assert!(engine.write(Write { statements: two, durable: true }).is_err());
        assert_eq!(numbers(&engine), [0_i64; 0]);
    }
}
