//! Group commit: writes that wait at the same time share one transaction and one fsync.
//!
//! A thread whose write waits and that finds the connection free becomes the leader: it writes everything that waits in
//! one transaction, syncs if a member needs it, and wakes the others. While it does so, the next group gathers.

use std::collections::VecDeque;
use std::mem;
use std::slice;
use std::sync::{Arc, OnceLock};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use rusqlite::Connection;

use super::super::super::StoreError;
use super::super::{Session, Write};
use super::{Sqlite, Statements, lock};

/// How long a write waits for its turn and for other processes, in total.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// There are locks for which SQLite does not wait by itself.
const RETRY_PAUSE: Duration = Duration::from_millis(1);

pub(super) struct State {
    /// `None` while a thread writes with it.
    pub connection: Option<Connection>,
    taken: Instant,
    waiting: VecDeque<Arc<Job>>,
}

impl State {
    pub fn new(connection: Connection) -> Self {
        Self { connection: Some(connection), taken: Instant::now(), waiting: VecDeque::new() }
    }

    fn wake_next(&self) {
        if let Some(next) = self.waiting.front() {
            next.thread.unpark();
        }
    }
}

struct Job {
    /// `None` if its thread needs the connection for itself.
    write: Option<Write>,
    deadline: Instant,
    outcome: OnceLock<Outcome>,
    /// Woken when the outcome is known, and when it is next and the connection is free.
    thread: Thread,
}

/// How many rows were changed.
type Outcome = Result<usize, StoreError>;

impl Job {
    fn is_durable(&self) -> bool {
        self.write.as_ref().is_some_and(|write| write.durable)
    }
}

impl Sqlite {
    /// Whether a write has had the connection for longer than one may take: the disk or the file system hangs.
    pub fn is_stuck(&self) -> bool {
        let state = lock(&self.state);
        state.connection.is_none() && state.taken.elapsed() > 2 * self.patience
    }

    /// Writes in a transaction that other threads may share. Returns how many rows the last statement changed, when they
    /// are committed and, if it is durable, synced.
    pub fn write(&self, write: Write) -> Result<usize, StoreError> {
        let job = self.queue(Some(write));
        loop {
            if let Some(outcome) = job.outcome.get() {
                return outcome.clone();
            }
            match self.lead() {
                Some(lease) => lease.write_group(),
                None => self.wait(&job)?,
            }
        }
    }

    /// Runs `work` in a transaction of its own, in its turn; if `durable`, it is on the disk when this returns.
    pub fn transaction<T>(
        &self,
        durable: bool,
        work: impl FnOnce(&dyn Session) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let job = self.queue(None);
        let lease = loop {
            match self.lease(&job) {
                Some(lease) => break lease,
                None => self.wait(&job)?,
            }
        };
        loop {
            match lease.begin(job.deadline) {
                Err(StoreError::Busy) if Instant::now() < job.deadline => thread::sleep(RETRY_PAUSE),
                begun => break begun?,
            }
        }
        let value = work(&Statements(lease.connection()))?;
        lease.commit()?;
        // Other threads may write during the fsync.
        drop(lease);
        if durable {
            self.files.sync()?;
        }
        Ok(value)
    }

    fn queue(&self, write: Option<Write>) -> Arc<Job> {
        let deadline = Instant::now() + self.patience;
        let job = Arc::new(Job { write, deadline, outcome: OnceLock::new(), thread: thread::current() });
        lock(&self.state).waiting.push_back(Arc::clone(&job));
        job
    }

    /// Takes the connection and all writes at the head of the queue. Returns `None` if the connection is taken, or if
    /// the next in the queue needs it for itself.
    fn lead(&self) -> Option<Lease<'_>> {
        let mut state = lock(&self.state);
        let count = state.waiting.iter().take_while(|job| job.write.is_some()).count();
        if count == 0 { None } else { self.take(&mut state, count) }
    }

    /// Takes the connection for one thread, if it is its turn.
    fn lease(&self, job: &Arc<Job>) -> Option<Lease<'_>> {
        let mut state = lock(&self.state);
        let is_next = state.waiting.front().is_some_and(|next| Arc::ptr_eq(next, job));
        if is_next { self.take(&mut state, 1) } else { None }
    }

    /// Takes the connection, if it is free, for the first of the queue.
    fn take(&self, state: &mut State, count: usize) -> Option<Lease<'_>> {
        let connection = state.connection.take()?;
        state.taken = Instant::now();
        let group = state.waiting.drain(..count).collect();
        Some(Lease { engine: self, connection: Some(connection), group })
    }

    /// Waits to be woken. Past its deadline a job that no leader has taken leaves the queue.
    fn wait(&self, job: &Arc<Job>) -> Result<(), StoreError> {
        let left = job.deadline.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            thread::park_timeout(left);
        } else if self.withdraw(job) {
            return Err(StoreError::Busy);
        } else {
            // A leader has it, and reports its outcome on every path.
            thread::park();
        }
        Ok(())
    }

    fn withdraw(&self, job: &Arc<Job>) -> bool {
        let mut state = lock(&self.state);
        let Some(place) = state.waiting.iter().position(|other| Arc::ptr_eq(other, job)) else {
            return false;
        };
        state.waiting.remove(place);
        // It may have been the one that was woken when the connection became free.
        state.wake_next();
        true
    }
}

/// The write connection, while one thread has it. Dropping it rolls back what is not committed, gives the connection back
/// and reports a failure to every member of the group that has no outcome: after an error and after a panic too.
struct Lease<'a> {
    engine: &'a Sqlite,
    /// `None` only while it is dropped.
    connection: Option<Connection>,
    group: Vec<Arc<Job>>,
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        self.roll_back();
        let mut state = lock(&self.engine.state);
        state.connection = self.connection.take();
        state.wake_next();
        drop(state);
        report(self.group.iter().map(|job| (job, Err(StoreError::Panicked))));
    }
}

impl Lease<'_> {
    fn connection(&self) -> &Connection {
        self.connection.as_ref().expect("a lease should have its connection until it is dropped")
    }

    /// Writes the group and reports the outcomes.
    fn write_group(mut self) {
        self.engine.restart_large_wal(self.connection());
        let outcomes: Vec<Outcome> = match self.write_together(&self.group) {
            Ok(changed) => changed.into_iter().map(Ok).collect(),
            Err(StoreError::Busy) => return self.retry_later(),
            Err(error) if self.group.len() == 1 => vec![Err(error)],
            // Retry each write alone to find the failing one.
            Err(_) => {
                let alone = |job| self.write_together(slice::from_ref(job)).map(|changed| changed[0]);
                self.group.iter().map(alone).collect()
            }
        };
        let (durable, others): (Vec<_>, Vec<_>) =
            self.group.iter().zip(outcomes).partition(|(job, outcome)| job.is_durable() && outcome.is_ok());
        // They need no fsync, so they do not wait for it.
        report(others);
        if !durable.is_empty() {
            let synced = self.engine.files.sync();
            report(durable.into_iter().map(|(job, outcome)| (job, synced.clone().and(outcome))));
        }
    }

    /// Another process has the database locked: those that still have time go back to the head of the queue.
    fn retry_later(&mut self) {
        thread::sleep(RETRY_PAUSE);
        let now = Instant::now();
        let (late, in_time) = mem::take(&mut self.group).into_iter().partition(|job| job.deadline <= now);
        self.group = late;
        Vec::into_iter(in_time).rev().for_each(|job| lock(&self.engine.state).waiting.push_front(job));
        report(self.group.iter().map(|job| (job, Err(StoreError::Busy))));
    }

    /// Writes a group in one transaction: all of it, or nothing. Returns how many rows each member changed.
    fn write_together(&self, group: &[Arc<Job>]) -> Result<Vec<usize>, StoreError> {
        let deadline = group.iter().map(|job| job.deadline).min().unwrap_or_else(Instant::now);
        self.begin(deadline)?;
        let written: Result<Vec<usize>, StoreError> = group.iter().map(|job| self.run(job)).collect();
        let committed = written.and_then(|changed| self.commit().map(|()| changed));
        self.roll_back();
        committed
    }

    fn run(&self, job: &Job) -> Outcome {
        let mut statements = job.write.iter().flat_map(|write| &write.statements);
        let session = Statements(self.connection());
        statements.try_fold(0, |_, statement| session.execute(statement.text, &statement.parameters))
    }

    /// Checks that writing makes sense, and waits for other processes until the deadline.
    fn begin(&self, deadline: Instant) -> Result<(), StoreError> {
        self.engine.files.check()?;
        self.connection().busy_timeout(deadline.saturating_duration_since(Instant::now()))?;
        self.connection().prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        Ok(())
    }

    fn commit(&self) -> Result<(), StoreError> {
        self.connection().prepare_cached("COMMIT")?.execute([])?;
        Ok(())
    }

    /// Undoes what is not committed. After some errors SQLite has done so already.
    fn roll_back(&self) {
        if !self.connection().is_autocommit() {
            let _ = self.connection().execute_batch("ROLLBACK");
        }
    }
}

/// Wakes the threads of those that had no outcome.
fn report<'j>(outcomes: impl IntoIterator<Item = (&'j Arc<Job>, Outcome)>) {
    for (job, outcome) in outcomes {
        if job.outcome.set(outcome).is_ok() {
            job.thread.unpark();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::mpsc;
    use std::thread;

    use super::super::super::super::tests::Temporary;
    use super::super::super::{IfMissing, Statement, values};
    use super::super::Sqlite;
    use super::*;

    fn engine(patience: Duration) -> (Temporary, Sqlite) {
        let temporary = Temporary::sqlite();
        let mut engine =
            Sqlite::open(&temporary.folder.join("group.db"), IfMissing::Create).expect("a database");
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

    /// Queues a job of this thread that has so many seconds.
    fn queue(engine: &Sqlite, write: Option<Write>, seconds: u64) -> Arc<Job> {
        let deadline = Instant::now() + Duration::from_secs(seconds);
        let job = Arc::new(Job { write, deadline, outcome: OnceLock::new(), thread: thread::current() });
        lock(&engine.state).waiting.push_back(Arc::clone(&job));
        job
    }

    fn waiting(engine: &Sqlite) -> usize {
        lock(&engine.state).waiting.len()
    }

    fn until(condition: impl Fn() -> bool) {
        while !condition() {
            thread::yield_now();
        }
    }

    #[test]
    fn writes_that_wait_share_a_transaction_and_a_failing_one_fails_alone() {
        let (_temporary, engine) = engine(Duration::from_secs(60));
        let began = Instant::now();
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
        assert!(
            began.elapsed() < Duration::from_secs(30),
            "they were not woken when their outcome was known"
        );
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

    /// A thread that nobody wakes would go on when its time is over: here after ten minutes.
    #[test]
    fn the_next_is_woken_when_the_connection_is_free_and_when_the_one_before_it_gives_up() {
        let (_temporary, engine) = engine(Duration::from_secs(600));
        let (sender, receiver) = mpsc::channel();
        let write = || sender.send(engine.write(insert(1, true)).is_ok()).expect("a receiver");
        let ensure_woken = |writer: thread::ScopedJoinHandle<()>| {
            let outcome = receiver.recv_timeout(Duration::from_secs(60));
            // So that a failure is not reported after ten minutes.
            writer.thread().unpark();
            assert!(outcome.expect("it was not woken"));
        };
        thread::scope(|scope| {
            let mut writer = None;
            while_taken(&engine, || {
                writer = Some(scope.spawn(write));
                until(|| waiting(&engine) == 1);
            });
            ensure_woken(writer.expect("a thread"));
            let late = queue(&engine, None, 0);
            let writer = scope.spawn(write);
            until(|| waiting(&engine) == 2);
            assert!(receiver.recv_timeout(Duration::from_millis(100)).is_err(), "it waits for its turn");
            assert!(matches!(engine.wait(&late), Err(StoreError::Busy)));
            ensure_woken(writer);
        });
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
        assert!(matches!(engine.transaction(true, |_| Ok(())), Err(StoreError::Busy)));
        assert!(began.elapsed() < Duration::from_secs(9), "{:?}", began.elapsed());
        assert!(!engine.is_stuck(), "it answers that it is locked");
        // A member whose time is over does not wait for the others of its group.
        let [late, in_time] = [0, 600].map(|seconds| queue(&engine, Some(insert(8, true)), seconds));
        engine.lead().expect("the connection is free").write_group();
        assert!(matches!(late.outcome.get(), Some(Err(StoreError::Busy))));
        assert!(in_time.outcome.get().is_none() && waiting(&engine) == 1);
        let (sender, receiver) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| sender.send(engine.write(insert(7, true))));
            until(|| lock(&engine.state).connection.is_none());
            drop(other);
            receiver.recv().expect("an outcome").expect("the lock is gone in time");
        });
        assert_eq!(numbers(&engine), [7, 8]);
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
        let job = engine.queue(Some(insert(3, false)));
        drop(engine.lead());
        assert!(matches!(job.outcome.get(), Some(Err(StoreError::Panicked))));
        engine.write(insert(4, true)).expect("the connection was given back");
    }

    #[test]
    fn only_what_has_to_be_durable_is_synced() {
        let (_temporary, mut engine) = engine(PATIENCE);
        engine.files.make_unsyncable();
        engine.write(insert(1, false)).expect("no fsync");
        engine.transaction(false, |_| Ok(())).expect("no fsync");
        assert!(matches!(engine.transaction(true, |_| Ok(())), Err(StoreError::NotSynced(_))));
        engine.files.make_unsyncable();
        assert!(matches!(engine.write(insert(2, true)), Err(StoreError::NotSynced(_))));
        assert!(matches!(engine.write(insert(3, false)), Err(StoreError::NotSynced(_))), "until a restart");
        assert_eq!(numbers(&engine), [1, 2], "what was committed before the fsync failed");
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
