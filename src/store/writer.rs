//! Group commit: what several threads want written at the same time shares one transaction and one sync.
//!
//! There is no thread for it. Whoever finds the connection idle writes for all who wait, itself included; the
//! others wait for it and find their work done. The connection is given on before the group is synced, so that
//! the next one is written meanwhile, and rows that need no sync wait for none.

use std::mem;
use std::panic::{self, AssertUnwindSafe};
use std::slice;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use rusqlite::Connection;

use super::StoreError;
use super::files::Files;
use super::ledger::{Book, Entry};
use super::log::Log;

/// How long a write waits for its turn and for other processes, all in all.
const PATIENCE: Duration = Duration::from_secs(5);

pub(super) struct Writer {
    state: Mutex<State>,
    log: Log,
}

struct State {
    /// Not there while somebody writes with it.
    idle: Option<Box<Lent>>,
    waiting: Vec<Arc<Job>>,
}

/// The connection, and what is known of the database that it writes.
struct Lent {
    connection: Connection,
    files: Files,
    book: Book,
    /// How many transactions were committed.
    commits: u64,
}

/// Something to be written, with a place for what became of it.
struct Job {
    /// Who waits for it.
    thread: Thread,
    work: Work,
    /// Whether it has to be on the disk before its thread goes on.
    synced: bool,
    outcome: OnceLock<Result<(), StoreError>>,
}

/// It can be done again: where a group fails, each of its members is tried by itself.
enum Work {
    Entry(Entry),
    Other(Box<Closure>),
}

type Closure = dyn Fn(&Connection) -> rusqlite::Result<()> + Send + Sync;

impl Writer {
    pub fn new(connection: Connection, files: Files) -> Result<Self, StoreError> {
        // In WAL mode, NORMAL leaves the syncing of commits to us; before a checkpoint SQLite syncs by itself.
        connection.pragma_update(None, "synchronous", "NORMAL")?;
        let log = Log::open(files.log())?;
        let lent = Lent { connection, files, book: Book::default(), commits: 0 };
        Ok(Self { state: Mutex::new(State { idle: Some(Box::new(lent)), waiting: Vec::new() }), log })
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
        self.see_through(synced, Work::Other(Box::new(work)))?;
        Ok(lock(&value).take().expect("work that was done should have left its value"))
    }

    /// Writes an entry of the ledger, as `write` does.
    pub fn enter(&self, synced: bool, entry: Entry) -> Result<(), StoreError> {
        self.see_through(synced, Work::Entry(entry))
    }

    /// Waits until the work is done, by this thread or another.
    fn see_through(&self, synced: bool, work: Work) -> Result<(), StoreError> {
        let job = Arc::new(Job { thread: thread::current(), work, synced, outcome: OnceLock::new() });
        let deadline = Instant::now() + PATIENCE;
        let mut state = lock(&self.state);
        state.waiting.push(Arc::clone(&job));
        loop {
            if let Some(lent) = state.idle.take() {
                drop(state);
                if synced {
                    // Whoever is about to come joins this group: a sync costs far more than a turn.
                    thread::yield_now();
                }
                let group = mem::take(&mut lock(&self.state).waiting);
                self.lead(lent, &group, deadline);
            } else {
                let left = deadline.saturating_duration_since(Instant::now());
                let is_waiting = state.waiting.iter().any(|other| Arc::ptr_eq(other, &job));
                if left.is_zero() && is_waiting {
                    state.waiting.retain(|other| !Arc::ptr_eq(other, &job));
                    return Err(StoreError::Busy);
                }
                drop(state);
                // One that is being written can't be called back: whoever writes it has a deadline too.
                thread::park_timeout(if is_waiting { left } else { PATIENCE });
            }
            if let Some(outcome) = job.outcome.get() {
                return outcome.clone();
            }
            state = lock(&self.state);
        }
    }

    /// Writes a group with the connection, gives the connection back, and syncs what has to be.
    fn lead(&self, mut lent: Box<Lent>, group: &[Arc<Job>], deadline: Instant) {
        let written = self.write_group(&mut lent, group, deadline);
        if written.is_err() && group.len() > 1 {
            // Who is to blame is not known: each by itself shows it, and spares the others.
            for job in group {
                if let Err(error) = self.write_group(&mut lent, slice::from_ref(job), deadline) {
                    job.end(Err(error));
                }
            }
        } else if let Err(error) = written {
            group.iter().for_each(|job| job.end(Err(error.clone())));
        }
        let commits = lent.commits;
        let next = {
            let mut state = lock(&self.state);
            state.idle = Some(lent);
            state.waiting.first().map(|job| job.thread.clone())
        };
        // The next group's leader first: it writes while this group's members go on.
        if let Some(leader) = next {
            leader.unpark();
        }
        group.iter().filter(|job| !job.synced).for_each(|job| job.end(Ok(())));
        if group.iter().any(|job| job.synced && job.outcome.get().is_none()) {
            let synced = self.log.sync(commits);
            group.iter().filter(|job| job.synced).for_each(|job| job.end(synced.clone()));
        }
    }

    /// Writes a group in one transaction: all of it, or nothing.
    fn write_group(&self, lent: &mut Lent, group: &[Arc<Job>], deadline: Instant) -> Result<(), StoreError> {
        self.log.check()?;
        lent.files.check()?;
        let Lent { connection, book, .. } = lent;
        connection.busy_timeout(deadline.saturating_duration_since(Instant::now()))?;
        connection.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        let written = group
            .iter()
            .try_for_each(|job| attempt(|| job.work.run(connection, book)))
            .and_then(|()| attempt(|| book.finish(connection)))
            .and_then(|()| Ok(connection.prepare_cached("COMMIT")?.execute([]).map(drop)?));
        match written {
            Ok(()) => lent.commits += 1,
            Err(_) => {
                // What it remembers may be of rows that were never committed.
                *book = Book::default();
                if !connection.is_autocommit() {
                    // It can only fail where the transaction is gone already.
                    let _ = connection.execute_batch("ROLLBACK");
                }
            }
        }
        written
    }
}

impl Job {
    /// Tells whoever waits what became of it. The first word counts.
    fn end(&self, outcome: Result<(), StoreError>) {
        if self.outcome.set(outcome).is_ok() {
            self.thread.unpark();
        }
    }
}

impl Work {
    fn run(&self, connection: &Connection, book: &mut Book) -> rusqlite::Result<()> {
        match self {
            Self::Entry(entry) => book.enter(connection, entry),
            Self::Other(work) => work(connection),
        }
    }
}

/// A panic in one thread's work is not the leader's end.
fn attempt(work: impl FnOnce() -> rusqlite::Result<()>) -> Result<(), StoreError> {
    match panic::catch_unwind(AssertUnwindSafe(work)) {
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
