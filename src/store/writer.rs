//! Group commit: what several threads want written at the same time shares one transaction and one sync.
//!
//! There is no thread for it. Whoever finds the connection idle writes for all who wait, itself included; the
//! others wait for it and find their work done. While one group is synced to the disk, the next one gathers.

use std::mem;
use std::panic::{self, AssertUnwindSafe};
use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use rusqlite::Connection;

use super::StoreError;
use super::files::Files;

/// How long a write waits for its turn and for other processes, all in all.
const PATIENCE: Duration = Duration::from_secs(5);

pub(super) struct Writer {
    state: Mutex<State>,
    /// How many groups have been written or given up.
    groups: AtomicU64,
}

struct State {
    /// Not there while somebody writes with it.
    idle: Option<Lent>,
    waiting: Vec<Arc<Job>>,
}

/// The connection, and how it commits at present.
struct Lent {
    connection: Connection,
    files: Files,
    synced: Option<bool>,
}

/// Something to be written, with a place for what became of it.
struct Job {
    /// Who waits for it.
    thread: Thread,
    work: Work,
    /// Whether it has to be on the disk before its thread goes on.
    synced: bool,
    outcome: Mutex<Option<Result<(), StoreError>>>,
}

/// It can be done again: where a group fails, each of its members is tried by itself.
type Work = Box<dyn Fn(&Connection) -> rusqlite::Result<()> + Send + Sync>;

impl Writer {
    pub fn new(connection: Connection, files: Files) -> Self {
        let lent = Lent { connection, files, synced: None };
        let state = Mutex::new(State { idle: Some(lent), waiting: Vec::new() });
        Self { state, groups: AtomicU64::new(0) }
    }

    /// Whether a write comes to an end, good or bad; where it does not get its turn, whether those before it
    /// do. One that is stuck in the file system does not, and then nothing can be written.
    pub fn answers(&self) -> bool {
        let before = self.groups.load(Ordering::Acquire);
        let is_late = matches!(self.write(false, |_| Ok(())), Err(StoreError::Busy));
        !is_late || self.groups.load(Ordering::Acquire) != before
    }

    /// Does `work` in a transaction that it may share with others. When this returns, the transaction is
    /// committed, and if `synced`, on the disk.
    pub fn write<T: Send + 'static>(
        &self,
        synced: bool,
        work: impl Fn(&Connection) -> rusqlite::Result<T> + Send + Sync + 'static,
    ) -> Result<T, StoreError> {
        let value = Arc::new(Mutex::new(None));
        let place = Arc::clone(&value);
        let job = Arc::new(Job {
            thread: thread::current(),
            work: Box::new(move |connection| {
                *lock(&place) = Some(work(connection)?);
                Ok(())
            }),
            synced,
            outcome: Mutex::default(),
        });
        self.see_through(&job)?;
        Ok(lock(&value).take().expect("work that was done should have left its value"))
    }

    /// Waits until the job is done, by this thread or another.
    fn see_through(&self, job: &Arc<Job>) -> Result<(), StoreError> {
        let deadline = Instant::now() + PATIENCE;
        let mut state = lock(&self.state);
        state.waiting.push(Arc::clone(job));
        loop {
            if let Some(lent) = state.idle.take() {
                let group = mem::take(&mut state.waiting);
                drop(state);
                self.lead(lent, &group, deadline);
            } else {
                let left = deadline.saturating_duration_since(Instant::now());
                let is_waiting = state.waiting.iter().any(|other| Arc::ptr_eq(other, job));
                if left.is_zero() && is_waiting {
                    state.waiting.retain(|other| !Arc::ptr_eq(other, job));
                    return Err(StoreError::Busy);
                }
                drop(state);
                // One that is being written can't be called back: whoever writes it has a deadline too.
                thread::park_timeout(if is_waiting { left } else { PATIENCE });
            }
            if let Some(outcome) = lock(&job.outcome).take() {
                return outcome;
            }
            state = lock(&self.state);
        }
    }

    /// Writes a group with the connection, and gives the connection back.
    fn lead(&self, mut lent: Lent, group: &[Arc<Job>], deadline: Instant) {
        match write_group(&mut lent, group, deadline) {
            Err(_) if group.len() > 1 => {
                // Who is to blame is not known: each by itself shows it, and spares the others.
                for job in group {
                    let written = write_group(&mut lent, slice::from_ref(job), deadline);
                    *lock(&job.outcome) = Some(written);
                }
            }
            written => {
                for job in group {
                    *lock(&job.outcome) = Some(written.clone());
                }
            }
        }
        self.groups.fetch_add(1, Ordering::AcqRel);
        let next = {
            let mut state = lock(&self.state);
            state.idle = Some(lent);
            state.waiting.first().map(|job| job.thread.clone())
        };
        // The next group's leader first: it writes while this group's members go on.
        if let Some(leader) = next {
            leader.unpark();
        }
        for job in group {
            job.thread.unpark();
        }
    }
}

/// Writes a group in one transaction: all of it, or nothing.
fn write_group(lent: &mut Lent, group: &[Arc<Job>], deadline: Instant) -> Result<(), StoreError> {
    lent.files.check()?;
    let synced = group.iter().any(|job| job.synced);
    let connection = &lent.connection;
    connection.busy_timeout(deadline.saturating_duration_since(Instant::now()))?;
    if lent.synced != Some(synced) {
        // In WAL mode FULL syncs the log with every commit, NORMAL only before a checkpoint.
        connection.pragma_update(None, "synchronous", if synced { "FULL" } else { "NORMAL" })?;
        lent.synced = Some(synced);
    }
    connection.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
    let written = group.iter().try_for_each(|job| attempt(connection, &job.work)).and_then(|()| {
        connection.prepare_cached("COMMIT")?.execute([])?;
        Ok(())
    });
    if written.is_err() && !connection.is_autocommit() {
        // It can only fail where the transaction is gone already.
        let _ = connection.execute_batch("ROLLBACK");
    }
    written
}

/// A panic in one thread's work is not the leader's end.
fn attempt(connection: &Connection, work: &Work) -> Result<(), StoreError> {
    match panic::catch_unwind(AssertUnwindSafe(|| work(connection))) {
        Ok(result) => Ok(result?),
        Err(_) => Err(StoreError::Panicked),
    }
}

/// A panic elsewhere leaves nothing half done behind these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::super::tests::Temporary;
    use super::*;

    #[test]
    fn a_write_that_is_stuck_is_told_from_a_database_that_is_locked() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        assert!(store.answers());
        let other = Connection::open(temporary.folder.join("test.db")).expect("the database");
        other.execute_batch("BEGIN IMMEDIATE").expect("a lock");
        assert!(matches!(store.write(|_| Ok(())), Err(StoreError::Busy)));
        assert!(store.answers(), "it answers that it is locked");
        drop(other);
        let barrier = Arc::new(Barrier::new(2));
        thread::scope(|scope| {
            let gate = Arc::clone(&barrier);
            scope.spawn(move || store.write(move |_| Ok((gate.wait().is_leader(), gate.wait().is_leader()))));
            barrier.wait();
            assert!(!store.answers(), "nothing can be written");
            barrier.wait();
        });
        assert!(store.answers());
    }

    /// Several writes that wait while one is held up, and so become one group.
    #[test]
    fn a_failing_member_does_not_take_its_group_with_it() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        store
            .write(|connection| connection.execute_batch("CREATE TABLE t (x INTEGER CHECK (x <> 13))"))
            .expect("a table");
        let barrier = Arc::new(Barrier::new(2));
        let outcomes: Vec<(i64, bool)> = thread::scope(|scope| {
            let gate = Arc::clone(&barrier);
            let slow = scope.spawn(move || {
                let work = move |_: &Connection| Ok((gate.wait().is_leader(), gate.wait().is_leader()));
                store.write(work).is_ok()
            });
            // Once here when it has the connection, and once more when it is to give it back.
            barrier.wait();
            let others: Vec<_> = (10..16)
                .map(|number| {
                    let work = move |c: &Connection| c.execute("INSERT INTO t VALUES (?)", [number]);
                    scope.spawn(move || (number, store.write_synced(work).is_ok()))
                })
                .collect();
            while lock(&store.writer.state).waiting.len() < 6 {
                thread::yield_now();
            }
            barrier.wait();
            assert!(slow.join().expect("no panic"));
            others.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        for (number, good) in outcomes {
            assert_eq!(good, number != 13, "{number}");
        }
        let sum = store.read(|c| c.query_row("SELECT sum(x) FROM t", [], |row| row.get::<_, i64>(0)));
        assert_eq!(sum.expect("the sum"), 10 + 11 + 12 + 14 + 15, "each of the others once");
    }
}
