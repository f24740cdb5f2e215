//! Group commit: what several threads want written at the same time shares one transaction and one sync.
//!
//! A row of the ledger is written by a worker: one that brings a row and finds the connection idle writes all the rows
//! that wait, its own among them, and then syncs them. One that finds it taken leaves its row and goes to its next
//! request; whoever writes the row calls back. So no worker waits for another, a single one wakes nobody, and while one
//! syncs, another can write what the next sync will serve. Whatever else is written, a key or a password, is done by a
//! thread of the writer's own, on behalf of one who waits.

use std::mem;
use std::panic::{self, AssertUnwindSafe};
use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use rusqlite::Connection;

use super::StoreError;
use super::files::Files;
use super::ledger::{Book, Entry};
use super::log::Log;

/// How long a write waits for its turn and for other processes, all in all.
const PATIENCE: Duration = Duration::from_secs(5);
const BEFORE_ANOTHER_TRY: Duration = Duration::from_millis(1);

pub(super) struct Writer {
    shared: Arc<Shared>,
    /// Writes for those who wait.
    clerk: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    log: Log,
    /// How many groups have been written or given up.
    groups: AtomicU64,
    /// How many jobs there were: each has its number.
    jobs: AtomicU64,
}

struct State {
    /// Not there while somebody writes with it.
    idle: Option<Box<Lent>>,
    waiting: Vec<Job>,
    /// Committed, and to be synced.
    written: Vec<Job>,
    syncing: bool,
    /// The last group had more than one member, so others are likely to be on their way.
    crowded: bool,
    closing: bool,
}

/// The connection, and what is known of the database that it writes.
struct Lent {
    connection: Connection,
    files: Files,
    book: Book,
}

/// Something to be written, and what is called when it is or could not be.
struct Job {
    number: u64,
    work: Work,
    /// Whether it has to be on the disk before it is told.
    synced: bool,
    deadline: Instant,
    owner: ThreadId,
    then: Box<Then>,
}

/// It can be done again: where a group fails, each of its members is tried by itself.
enum Work {
    Entry(Entry),
    Other(Box<Closure>),
}

type Closure = dyn Fn(&Connection) -> rusqlite::Result<()> + Send + Sync;
type Then = dyn FnOnce(Result<(), StoreError>, CalledBy) + Send;

/// Who calls back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CalledBy {
    /// The thread that brought the row, which has nothing else to do.
    Owner,
    /// One that others wait for: it must not be held up.
    Another,
}

impl Writer {
    pub fn new(connection: Connection, files: Files) -> Result<Self, StoreError> {
        // In WAL mode, NORMAL leaves the syncing of commits to us; before a checkpoint SQLite syncs by itself.
        connection.pragma_update(None, "synchronous", "NORMAL")?;
        let log = Log::open(files.log())?;
        let lent = Box::new(Lent { connection, files, book: Book::default() });
        let state = State {
            idle: Some(lent),
            waiting: Vec::new(),
            written: Vec::new(),
            syncing: false,
            crowded: false,
            closing: false,
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            log,
            groups: AtomicU64::new(0),
            jobs: AtomicU64::new(0),
        });
        let clerk = thread::Builder::new().name("writer".into()).spawn({
            let shared = Arc::clone(&shared);
            move || shared.serve()
        });
        let clerk = clerk.map_err(|error| StoreError::Io(Arc::new(error)))?;
        Ok(Self { shared, clerk: Some(clerk) })
    }

    /// Whether a write comes to an end, good or bad; where it does not get its turn, whether those before it
    /// do. One that is stuck in the file system or on its way to the disk does not, and then nothing can be
    /// written.
    pub fn answers(&self) -> bool {
        let groups = || self.shared.groups.load(Ordering::Acquire);
        let before = groups();
        let is_late = matches!(self.write(true, |_| Ok(())), Err(StoreError::Busy));
        !is_late || groups() != before
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
        let work = move |connection: &Connection| {
            *lock(&place) = Some(work(connection)?);
            Ok(())
        };
        self.wait_for(synced, Work::Other(Box::new(work)))?;
        Ok(lock(&value).take().expect("work that was done should have left its value"))
    }

    /// Writes an entry of the ledger, and waits until it is done.
    pub fn enter_and_wait(&self, entry: Entry) -> Result<(), StoreError> {
        self.wait_for(entry.is_synced(), Work::Entry(entry))
    }

    fn wait_for(&self, synced: bool, work: Work) -> Result<(), StoreError> {
        let (sender, receiver) = mpsc::channel();
        let then = move |outcome, _| {
            // Nobody listens where the wait was given up.
            let _ = sender.send(outcome);
        };
        let job = self.shared.job(synced, work, Box::new(then));
        let number = job.number;
        lock(&self.shared.state).waiting.push(job);
        self.wake_clerk();
        match receiver.recv_timeout(PATIENCE) {
            Ok(outcome) => outcome,
            Err(RecvTimeoutError::Disconnected) => Err(StoreError::Panicked),
            Err(RecvTimeoutError::Timeout) => {
                let mut state = lock(&self.shared.state);
                let before = state.waiting.len();
                state.waiting.retain(|job| job.number != number);
                let was_waiting = state.waiting.len() < before;
                drop(state);
                // One that is being written can't be called back: whoever writes it has a deadline too.
                if was_waiting {
                    Err(StoreError::Busy)
                } else {
                    receiver.recv().unwrap_or(Err(StoreError::Panicked))
                }
            }
        }
    }

    fn wake_clerk(&self) {
        if let Some(clerk) = &self.clerk {
            clerk.thread().unpark();
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        lock(&self.shared.state).closing = true;
        self.wake_clerk();
        // The clerk itself may be the last to hold the store, in a call back: it can't wait for its own end.
        if let Some(clerk) = self.clerk.take().filter(|clerk| clerk.thread().id() != thread::current().id()) {
            // The connection is closed when this returns, and its log is in the database.
            let _ = clerk.join();
        }
    }
}

/// What there is to do for whoever has the time.
enum Round {
    Write(Box<Lent>),
    Sync,
}

impl Shared {
    fn job(&self, synced: bool, work: Work, then: Box<Then>) -> Job {
        Job {
            number: self.jobs.fetch_add(1, Ordering::Relaxed),
            work,
            synced,
            deadline: Instant::now() + PATIENCE,
            owner: thread::current().id(),
            then,
        }
    }

    /// The clerk's life.
    fn serve(&self) {
        while !lock(&self.state).closing {
            self.work();
            thread::park();
        }
    }

    /// Writes and syncs for all who wait, for as long as there is something to do that nobody else does.
    fn work(&self) {
        let this = thread::current().id();
        // What this thread itself goes on with, when nobody needs it here any more.
        let mut own: Option<(Job, Result<(), StoreError>)> = None;
        while let Some(round) = self.next_round() {
            if let Some((job, outcome)) = own.take() {
                job.end(outcome, CalledBy::Another);
            }
            let ended = match round {
                Round::Write(lent) => self.write(lent),
                Round::Sync => self.sync(),
            };
            for (job, outcome) in ended {
                if job.owner == this && own.is_none() {
                    own = Some((job, outcome));
                } else {
                    job.end(outcome, CalledBy::Another);
                }
            }
        }
        if let Some((job, outcome)) = own {
            job.end(outcome, CalledBy::Owner);
        }
    }

    /// Rows that wait come before a sync, which may take long: they may have been left to this thread. No sync is put off
    /// for good by it, because whoever brings a row and finds another one writing sees to the sync.
    fn next_round(&self) -> Option<Round> {
        let mut state = lock(&self.state);
        if !state.waiting.is_empty()
            && let Some(lent) = state.idle.take()
        {
            return Some(Round::Write(lent));
        }
        if state.syncing || state.written.is_empty() {
            return None;
        }
        state.syncing = true;
        Some(Round::Sync)
    }

    /// Gives those a turn who are about to join the group: a commit and a sync cost far more than a turn.
    fn let_others_come(&self) {
        if lock(&self.state).crowded {
            thread::yield_now();
        }
    }

    /// Syncs what is written by now. Those whose commits came before it are served by it.
    fn sync(&self) -> Vec<(Job, Result<(), StoreError>)> {
        self.let_others_come();
        let group = mem::take(&mut lock(&self.state).written);
        let outcome = self.log.sync();
        lock(&self.state).syncing = false;
        group.into_iter().map(|job| (job, outcome.clone())).collect()
    }

    /// Writes a group with the connection, and gives the connection back. What has to be synced is then to be.
    fn write(&self, mut lent: Box<Lent>) -> Vec<(Job, Result<(), StoreError>)> {
        self.let_others_come();
        let group = {
            let mut state = lock(&self.state);
            state.crowded = state.waiting.len() > 1;
            mem::take(&mut state.waiting)
        };
        let outcome = lent.write(&self.log, &group);
        let (mut ended, mut written, mut late) = (Vec::new(), Vec::new(), Vec::new());
        let is_alone = group.len() == 1;
        for job in group {
            let outcome = match &outcome {
                // Whoever still has time gets another turn.
                Err(StoreError::Busy) if Instant::now() < job.deadline => {
                    late.push(job);
                    continue;
                }
                // Who is to blame is not known: each by itself shows it, and spares the others.
                Err(error) if !is_alone && !matches!(error, StoreError::Busy) => {
                    lent.write(&self.log, slice::from_ref(&job))
                }
                outcome => outcome.clone(),
            };
            if outcome.is_ok() && job.synced {
                written.push(job);
            } else {
                ended.push((job, outcome));
            }
        }
        if !late.is_empty() {
            // SQLite has waited already, but there are locks for which it does not.
            thread::sleep(BEFORE_ANOTHER_TRY);
        }
        self.groups.fetch_add(1, Ordering::AcqRel);
        let mut state = lock(&self.state);
        state.idle = Some(lent);
        state.written.append(&mut written);
        state.waiting.splice(0..0, late);
        ended
    }
}

impl Lent {
    /// Writes a group in one transaction: all of it, or nothing.
    fn write(&mut self, log: &Log, group: &[Job]) -> Result<(), StoreError> {
        log.check()?;
        self.files.check()?;
        let Self { connection, book, .. } = self;
        let deadline = group.iter().map(|job| job.deadline).min().expect("a group should have a member");
        connection.busy_timeout(deadline.saturating_duration_since(Instant::now()))?;
        connection.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        let written = group
            .iter()
            .try_for_each(|job| job.work.run(connection, book))
            .and_then(|()| attempt(|| Ok(book.finish(connection)?)))
            .and_then(|()| Ok(connection.prepare_cached("COMMIT")?.execute([]).map(drop)?));
        if written.is_err() {
            // What it remembers may be of rows that were never committed.
            *book = Book::default();
            if !connection.is_autocommit() {
                // It can only fail where the transaction is gone already.
                let _ = connection.execute_batch("ROLLBACK");
            }
        }
        written
    }
}

impl Job {
    /// Tells what became of it. A panic there is nobody else's end.
    fn end(self, outcome: Result<(), StoreError>, by: CalledBy) {
        let _ = panic::catch_unwind(AssertUnwindSafe(|| (self.then)(outcome, by)));
    }
}

impl Work {
    fn run(&self, connection: &Connection, book: &mut Book) -> Result<(), StoreError> {
        match self {
            Self::Entry(entry) => attempt(|| book.enter(connection, entry)),
            Self::Other(work) => attempt(|| Ok(work(connection)?)),
        }
    }
}

/// A panic in one thread's work is not the end of whoever does it.
fn attempt(work: impl FnOnce() -> Result<(), StoreError>) -> Result<(), StoreError> {
    match panic::catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result,
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
            while lock(&store.writer.shared.state).waiting.len() < 6 {
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
