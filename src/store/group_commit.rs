//! Group commit: writes to the ledger that wait at the same time share one transaction and one sync.
//!
//! A thread whose write waits and that finds no leader becomes the leader: it writes everything that waits in one
//! transaction, syncs it if it has to be durable, and wakes the others. While it does so, the next group gathers.
//!
//! Syncs run one at a time. A leader that has committed waits for its turn to sync, and then lets the next one lead: while a
//! group syncs, the next one is written, and the one after that gathers.
//!
//! Outcomes have a queue of their own. They are synced, and they wait for a database that is lost; rows that begin do
//! neither, and need not wait for those that do.

use std::collections::VecDeque;
use std::mem;
use std::slice;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use super::engine::SyncTurn;
use super::ledger::LedgerWrite;
use super::ledger_row::BegunRow;
use super::{Result, Store, StoreError};
use crate::mutex::lock;

/// The pause before a group that found the database locked is tried again.
const RETRY_PAUSE: Duration = Duration::from_millis(1);

/// The writes that wait, and whether a thread writes a group.
#[derive(Default)]
pub(super) struct WriteQueue(Mutex<WaitingWrites>);

#[derive(Default)]
struct WaitingWrites {
    has_leader: bool,
    jobs: VecDeque<Arc<WaitingWrite>>,
}

struct WaitingWrite {
    write: LedgerWrite,
    deadline: Instant,
    written: OnceLock<WriteResult>,
    /// Woken when it is written or has failed, and when it is next and there is no leader.
    thread: Thread,
}

/// The open row; `None` if its key was refused, and for an outcome.
type WriteResult = Result<Option<BegunRow>>;

impl WriteQueue {
    fn lock(&self) -> MutexGuard<'_, WaitingWrites> {
        lock(&self.0)
    }

    fn push(&self, write: LedgerWrite, timeout: Duration) -> Arc<WaitingWrite> {
        let deadline = Instant::now() + timeout;
        let job =
            Arc::new(WaitingWrite { write, deadline, written: OnceLock::new(), thread: thread::current() });
        self.lock().jobs.push_back(Arc::clone(&job));
        job
    }

    /// Waits to be woken. Past its deadline a job that no leader has taken leaves the queue.
    fn wait(&self, job: &Arc<WaitingWrite>) -> Result<()> {
        let left = job.deadline.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            thread::park_timeout(left);
        } else if self.withdraw(job) {
            return Err(StoreError::Busy);
        } else {
            // A leader has it, and reports to it on every path.
            thread::park();
        }
        Ok(())
    }

    fn withdraw(&self, job: &Arc<WaitingWrite>) -> bool {
        let mut waiting = self.lock();
        let Some(place) = waiting.jobs.iter().position(|other| Arc::ptr_eq(other, job)) else {
            return false;
        };
        waiting.jobs.remove(place);
        // It may have been the one that was woken when the leader was done.
        wake_next(waiting);
        true
    }
}

/// Wakes the first in the queue, after unlocking it: that thread would only wait for the lock.
fn wake_next(waiting: MutexGuard<'_, WaitingWrites>) {
    let next = waiting.jobs.front().cloned();
    drop(waiting);
    if let Some(next) = next {
        next.thread.unpark();
    }
}

impl Store {
    /// Writes in a transaction that other threads share. Returns when it is committed and, if it is an outcome, synced.
    pub(super) fn write_shared(&self, write: LedgerWrite) -> WriteResult {
        let is_durable = write.is_durable();
        let queue = if is_durable { &self.outcomes } else { &self.beginnings };
        let job = queue.push(write, self.engine.write_timeout(is_durable));
        loop {
            if let Some(written) = job.written.get() {
                return written.clone();
            }
            match self.lead(queue, is_durable) {
                Some(leader) => leader.write_group(),
                None => queue.wait(&job)?,
            }
        }
    }

    /// Takes all that waits. Returns `None` if there is a leader already, or nothing to lead.
    fn lead<'a>(&'a self, queue: &'a WriteQueue, is_durable: bool) -> Option<Leader<'a>> {
        let mut waiting = queue.lock();
        if waiting.jobs.is_empty() || mem::replace(&mut waiting.has_leader, true) {
            return None;
        }
        let group = waiting.jobs.drain(..).collect();
        Some(Leader { store: self, queue, is_durable, group, is_leading: true })
    }
}

/// The right to write a group. Dropping it lets the next one lead, and reports a failure to every member that has no
/// result: after a panic too.
struct Leader<'a> {
    store: &'a Store,
    queue: &'a WriteQueue,
    is_durable: bool,
    group: Vec<Arc<WaitingWrite>>,
    /// Until the next one may lead.
    is_leading: bool,
}

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        self.hand_over();
        report(self.group.iter().map(|job| (job, Err(StoreError::Panicked))));
    }
}

impl<'a> Leader<'a> {
    /// Writes the group and reports to its members.
    fn write_group(mut self) {
        let mut results: Vec<WriteResult> = match self.write_together(&self.group) {
            Ok(written) => written.into_iter().map(Ok).collect(),
            // Another process has the database.
            Err(StoreError::Busy) => return self.retry_later(),
            Err(error) if error.is_of_group() => vec![Err(error); self.group.len()],
            // Tries each write alone, to find the failing one. A write that was alone has a second attempt.
            Err(_) => {
                let alone = |job| self.write_together(slice::from_ref(job)).map(|mut one| one.remove(0));
                self.group.iter().map(alone).collect()
            }
        };
        if self.is_durable
            && results.iter().any(Result::is_ok)
            && let Some(turn) = self.sync_turn()
            && let Err(error) = turn.sync()
        {
            results
                .iter_mut()
                .filter(|result| result.is_ok())
                .for_each(|result| *result = Err(error.clone()));
        }
        report(self.group.iter().zip(results));
    }

    /// Waits until no other group syncs, and lets the next one lead. Until then the next one gathers: there would be nothing
    /// to gain from writing it. Returns `None` if a commit needs no sync.
    fn sync_turn(&mut self) -> Option<SyncTurn<'a>> {
        let turn = self.store.engine.sync_turn()?;
        self.hand_over();
        Some(turn)
    }

    /// Lets the next one lead.
    fn hand_over(&mut self) {
        if mem::take(&mut self.is_leading) {
            let mut waiting = self.queue.lock();
            waiting.has_leader = false;
            wake_next(waiting);
        }
    }

    fn write_together(&self, group: &[Arc<WaitingWrite>]) -> Result<Vec<Option<BegunRow>>> {
        let deadline = group.iter().map(|job| job.deadline).min().unwrap_or_else(Instant::now);
        let writes: Vec<&LedgerWrite> = group.iter().map(|job| &job.write).collect();
        self.store.write_together(&writes, deadline, self.is_durable)
    }

    /// Puts the writes that still have time back at the head of the queue.
    fn retry_later(&mut self) {
        thread::sleep(RETRY_PAUSE);
        let now = Instant::now();
        let (late, in_time) = mem::take(&mut self.group).into_iter().partition(|job| job.deadline <= now);
        self.group = late;
        let mut waiting = self.queue.lock();
        Vec::into_iter(in_time).rev().for_each(|job| waiting.jobs.push_front(job));
        drop(waiting);
        report(self.group.iter().map(|job| (job, Err(StoreError::Busy))));
    }
}

/// Wakes the threads of those that had no result. This one is awake.
fn report<'j>(results: impl IntoIterator<Item = (&'j Arc<WaitingWrite>, WriteResult)>) {
    let this = thread::current().id();
    for (job, result) in results {
        if job.written.set(result).is_ok() && job.thread.id() != this {
            job.thread.unpark();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Barrier, mpsc};

    use super::*;
    use crate::secret::SecretDigest;
    use crate::store::NewRow;
    use crate::store::ledger::RowRequest;
    use crate::store::ledger::tests::{id, outcome, row, write};
    use crate::store::tests::Temporary;

    fn temporary(timeout: Duration) -> Temporary {
        let mut temporary = Temporary::new();
        set_write_timeout(&mut temporary, timeout);
        temporary
    }

    fn set_write_timeout(temporary: &mut Temporary, timeout: Duration) {
        if let Some(sqlite) = temporary.store.engine.sqlite_mut() {
            sqlite.set_write_timeout(timeout);
        }
    }

    /// Runs `meanwhile` while nothing can be written.
    fn while_locked(store: &Store, meanwhile: impl FnOnce()) {
        let barrier = Barrier::new(2);
        thread::scope(|scope| {
            let holder = scope.spawn(|| {
                store.engine.transaction(false, |session| {
                    store.lock_gateway(session, &store.gateway, store.epoch)?;
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

    fn begin(NewRow { request_id, key_id, created, .. }: NewRow) -> LedgerWrite {
        LedgerWrite::Begin(RowRequest { request_id, created, digest: SecretDigest::of(&key_id) })
    }

    fn waiting(queue: &WriteQueue) -> usize {
        queue.lock().jobs.len()
    }

    fn until(condition: impl Fn() -> bool) {
        while !condition() {
            thread::yield_now();
        }
    }

    #[test]
    fn writes_that_wait_share_a_transaction_and_a_failing_one_fails_alone() {
        let temporary = temporary(Duration::from_secs(60));
        let store = &temporary.store;
        let rows = [1, 2, 3, 4, 5, 6].map(|number| row("x", "key_1", number));
        rows.iter().filter(|row| row.created != 4).for_each(|row| drop(store.begin_row(row).expect("a row")));
        let (led, results) = thread::scope(|scope| {
            let finish = |row: &'_ NewRow| store.finish(row, &outcome(200, Some(1)));
            let mut writers = Vec::new();
            while_locked(store, || {
                for row in &rows {
                    writers.push(scope.spawn(move || finish(row)));
                    // The first one leads, and waits for the lock. The others gather.
                    let others = row.created as usize - 1;
                    until(|| store.outcomes.lock().has_leader && waiting(&store.outcomes) == others);
                }
            });
            let mut results = writers.into_iter().map(|writer| writer.join().expect("no panic"));
            (results.next().expect("the leader"), results.collect::<Vec<_>>())
        });
        led.expect("its outcome");
        for (result, row) in results.iter().zip(&rows[1..]) {
            assert_eq!(result.is_ok(), row.created != 4, "{result:?}");
        }
        assert!(matches!(results[2], Err(StoreError::NoRow)), "{:?}", results[2]);
        let found = store.verify().expect("a walk");
        assert_eq!((found.rows, found.fault), (5, None), "it has taken no number");
    }

    #[test]
    fn a_write_whose_time_is_over_is_not_written() {
        let mut temporary = temporary(Duration::from_millis(30));
        let store = &temporary.store;
        if store.engine.sqlite().is_none() {
            return assert!(matches!(late(store), Err(StoreError::Busy)));
        }
        while_locked(store, || {
            thread::scope(|scope| {
                let begun =
                    [1, 2, 3].map(|number| scope.spawn(move || store.begin_row(&row("x", "key_1", number))));
                for result in begun {
                    assert!(matches!(result.join().expect("no panic"), Err(StoreError::Busy)));
                }
            });
            assert_eq!(waiting(&store.beginnings), 0);
        });
        assert!(matches!(late(store), Err(StoreError::Busy)));
        set_write_timeout(&mut temporary, Duration::from_secs(60));
        let store = &temporary.store;
        write(store, "y", "key_1", 4, 200, None);
        assert!(store.find_row(&id("x", 1)).expect("a look-up").is_none());
    }

    /// Waits for a leader after the deadline.
    fn late(store: &Store) -> Result<()> {
        let job = store.beginnings.push(begin(row("late", "key_1", 9)), Duration::ZERO);
        let waited = store.beginnings.wait(&job);
        assert_eq!(waiting(&store.beginnings), 0, "it has left the queue");
        waited
    }

    /// A thread that is not woken would continue when its time is over: here after ten minutes.
    #[test]
    fn the_next_is_woken_when_the_leader_is_done_and_when_the_one_before_it_gives_up() {
        const TEN_MINUTES: Duration = Duration::from_secs(600);
        let temporary = Temporary::new();
        let store = &temporary.store;
        let push = |number, timeout| store.beginnings.push(begin(row("x", "key_1", number)), timeout);
        // A write that waits, and does not try to lead.
        let is_woken_by = |number, action: &dyn Fn()| {
            let (sender, receiver) = mpsc::channel();
            thread::scope(|scope| {
                let next = scope.spawn(move || {
                    let job = push(number, TEN_MINUTES);
                    sender.send(()).expect("a receiver");
                    store.beginnings.wait(&job).expect("time is left");
                    sender.send(()).expect("a receiver");
                });
                receiver.recv().expect("it waits");
                action();
                let woken = receiver.recv_timeout(Duration::from_secs(60));
                // So that a failure is not reported after ten minutes.
                next.thread().unpark();
                woken.is_ok()
            })
        };
        let leader = Mutex::new({
            push(1, TEN_MINUTES);
            store.lead(&store.beginnings, false)
        });
        let end_leader = || leader.lock().expect("no panic").take().expect("a leader").write_group();
        assert!(is_woken_by(2, &end_leader));
        store.lead(&store.beginnings, false).expect("there is none").write_group();
        let late = push(3, Duration::ZERO);
        assert!(is_woken_by(4, &|| assert!(matches!(store.beginnings.wait(&late), Err(StoreError::Busy)))));
    }

    #[test]
    fn a_leader_that_panics_reports_to_its_group() {
        let temporary = temporary(Duration::from_secs(60));
        let store = &temporary.store;
        let job = store.outcomes.push(begin(row("x", "key_1", 1)), Duration::from_secs(60));
        drop(store.lead(&store.outcomes, true).expect("there is none"));
        assert!(matches!(job.written.get(), Some(Err(StoreError::Panicked))));
        write(store, "y", "key_1", 2, 200, None);
    }

    #[test]
    fn a_leader_that_has_handed_over_and_panics_leaves_the_next_one_alone() {
        let temporary = Temporary::sqlite();
        let store = &temporary.store;
        let push = |number| store.outcomes.push(begin(row("x", "key_1", number)), Duration::from_secs(60));
        let job = push(1);
        let mut leader = store.lead(&store.outcomes, true).expect("there is none");
        drop(leader.sync_turn().expect("SQLite is synced"));
        push(2);
        let next = store.lead(&store.outcomes, true).expect("the first has handed over");
        drop(leader);
        assert!(matches!(job.written.get(), Some(Err(StoreError::Panicked))));
        assert!(store.outcomes.lock().has_leader, "the next one leads");
        drop(next);
        assert!(!store.outcomes.lock().has_leader);
    }

    /// Here the test is the first group, whose sync takes as long as it likes.
    #[test]
    fn the_next_group_is_written_while_one_syncs_and_reported_after_a_sync_of_its_own() {
        let mut temporary = Temporary::sqlite();
        set_write_timeout(&mut temporary, Duration::from_secs(60));
        let store = &temporary.store;
        let rows = [1, 2, 3].map(|number| store.begin_row(&row("x", "key_1", number)).expect("a row"));
        let is_written = |number| {
            let found = store.find_row(&id("x", number)).expect("a look-up");
            found.is_some_and(|row| row.seq.is_some())
        };
        store.outcomes.push(begin(row("first", "key_1", 1)), Duration::from_secs(60));
        let mut first = store.lead(&store.outcomes, true).expect("there is none");
        let is_over = AtomicBool::new(false);
        let finish = &|row: &NewRow| {
            store.finish(row, &outcome(200, None)).expect("its outcome");
            assert!(is_over.load(Ordering::SeqCst), "its sync has not begun yet");
        };
        thread::scope(|scope| {
            let syncing = first.sync_turn().expect("SQLite is synced");
            let second = scope.spawn(|| finish(&rows[0]));
            until(|| is_written(1));
            let third = [&rows[1], &rows[2]].map(|row| scope.spawn(move || finish(row)));
            until(|| waiting(&store.outcomes) == 2);
            assert!(!is_written(2) && !is_written(3), "they gather");
            is_over.store(true, Ordering::SeqCst);
            drop(syncing);
            second.join().expect("no panic");
            third.into_iter().for_each(|writer| writer.join().expect("no panic"));
        });
        assert!(is_written(2) && is_written(3));
    }

    #[test]
    fn only_outcomes_are_synced_and_one_that_is_not_is_not_acknowledged() {
        let mut temporary = Temporary::sqlite();
        if let Some(sqlite) = temporary.store.engine.sqlite_mut() {
            sqlite.make_unsyncable();
        }
        let store = &temporary.store;
        let begun = store.begin_row(&row("x", "key_1", 1)).expect("no sync");
        store.record(&row("y", "key_1", 1), &outcome(400, None)).expect("no sync");
        assert!(matches!(store.finish(&begun, &outcome(200, None)), Err(StoreError::NotSynced(_))));
        assert!(
            matches!(store.begin_row(&row("z", "key_1", 1)), Err(StoreError::NotSynced(_))),
            "until a restart"
        );
    }
}
