//! Group commit: what several threads want written at the same time shares one transaction and one sync.
//!
//! There is no thread for it. Whoever finds the connection idle writes for all who wait, itself included; the
//! others wait for it and find their work done. While one group is synced to the disk, the next one gathers.

use std::mem;
use std::panic::{self, AssertUnwindSafe};
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
    work: Mutex<Option<Work>>,
    /// Whether it has to be on the disk before its thread goes on.
    synced: bool,
    outcome: Mutex<Option<Result<(), StoreError>>>,
}

type Work = Box<dyn FnOnce(&Connection) -> rusqlite::Result<()> + Send>;

impl Writer {
    pub fn new(connection: Connection, files: Files) -> Self {
        let lent = Lent { connection, files, synced: None };
        Self { state: Mutex::new(State { idle: Some(lent), waiting: Vec::new() }) }
    }

    /// Does `work` in a transaction that it may share with others. When this returns, the transaction is
    /// committed, and if `synced`, on the disk.
    pub fn write<T: Send + 'static>(
        &self,
        synced: bool,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let value = Arc::new(Mutex::new(None));
        let place = Arc::clone(&value);
        let job = Arc::new(Job {
            thread: thread::current(),
            work: Mutex::new(Some(Box::new(move |connection| {
                *lock(&place) = Some(work(connection)?);
                Ok(())
            }))),
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
        let left = deadline.saturating_duration_since(Instant::now());
        let written = write_group(&mut lent, group, left);
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
            {
                let mut outcome = lock(&job.outcome);
                match &written {
                    // Work that failed by itself has its own outcome already.
                    Ok(()) => drop(outcome.get_or_insert(Ok(()))),
                    Err(error) => *outcome = Some(Err(error.clone())),
                }
            }
            job.thread.unpark();
        }
    }
}

/// Writes a group in one transaction. An error is everybody's: nothing of the group is there.
fn write_group(lent: &mut Lent, group: &[Arc<Job>], patience: Duration) -> Result<(), StoreError> {
    lent.files.check()?;
    let synced = group.iter().any(|job| job.synced);
    let connection = &lent.connection;
    connection.busy_timeout(patience)?;
    if lent.synced != Some(synced) {
        // In WAL mode FULL syncs the log with every commit, NORMAL only before a checkpoint.
        connection.pragma_update(None, "synchronous", if synced { "FULL" } else { "NORMAL" })?;
        lent.synced = Some(synced);
    }
    connection.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
    let done = match group {
        // Alone in its transaction, it needs no savepoint: what it did goes with the transaction.
        [job] => attempt(connection, take_work(job)),
        _ => group.iter().try_for_each(|job| do_one(connection, job)),
    };
    let done = done.and_then(|()| Ok(connection.prepare_cached("COMMIT")?.execute([])?));
    if done.is_err() && !connection.is_autocommit() {
        // It can only fail where the transaction is gone already.
        let _ = connection.execute_batch("ROLLBACK");
    }
    done.map(|_| ())
}

/// Does one job's work. If it fails, only what it did is undone, and the group goes on without it, unless
/// the failure took the whole transaction with it, as that of a full disk does.
fn do_one(connection: &Connection, job: &Job) -> Result<(), StoreError> {
    let work = take_work(job);
    connection.prepare_cached("SAVEPOINT job")?.execute([])?;
    match attempt(connection, work) {
        Ok(()) => {
            connection.prepare_cached("RELEASE job")?.execute([])?;
            Ok(())
        }
        Err(failure) if connection.is_autocommit() => Err(failure),
        Err(failure) => {
            connection.execute_batch("ROLLBACK TO job; RELEASE job")?;
            *lock(&job.outcome) = Some(Err(failure));
            Ok(())
        }
    }
}

fn take_work(job: &Job) -> Work {
    lock(&job.work).take().expect("a job should be done once")
}

/// A panic in one thread's work is not the leader's end.
fn attempt(connection: &Connection, work: Work) -> Result<(), StoreError> {
    match panic::catch_unwind(AssertUnwindSafe(|| work(connection))) {
        Ok(result) => Ok(result?),
        Err(_) => Err(StoreError::Panicked),
    }
}

/// A panic elsewhere leaves nothing half done behind these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
