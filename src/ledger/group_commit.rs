//! Group commit: items that wait at the same time are written together.
//!
//! A thread whose item waits and that finds no leader becomes the leader: it writes everything that
//! waits, and wakes the others. While it does so, the next group gathers.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::sync_shim::{Mutex, MutexGuard, thread};

pub struct GroupCommit<T, R>(Mutex<ItemQueue<T, R>>);

struct ItemQueue<T, R> {
    /// A thread writes a group, whose oldest item has waited since this time.
    leading: Option<Instant>,
    jobs: VecDeque<Arc<WaitingItem<T, R>>>,
}

struct WaitingItem<T, R> {
    item: T,
    since: Instant,
    deadline: Instant,
    result: OnceLock<Result<R, NotWritten>>,
    /// Woken when there is a result, and when it is next and there is no leader.
    thread: thread::Thread,
}

/// The reason why there is no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotWritten {
    /// No leader has taken it in time.
    Late,
    /// The leader panicked.
    Panicked,
}

impl<T, R> Default for GroupCommit<T, R> {
    fn default() -> Self {
        Self(Mutex::new(ItemQueue {
            leading: None,
            jobs: VecDeque::new(),
        }))
    }
}

impl<T, R: Clone> GroupCommit<T, R> {
    /// Writes an item together with those of other threads. `write` gets the items and the time
    /// that the oldest of them has; it returns a result for each.
    pub fn submit(
        &self,
        item: T,
        timeout: Duration,
        write: impl Fn(&[&T], Instant) -> Vec<R>,
    ) -> Result<R, NotWritten> {
        let since = Instant::now();
        let (result, thread) = (OnceLock::new(), thread::current());
        let job = Arc::new(WaitingItem {
            item,
            since,
            deadline: since + timeout,
            result,
            thread,
        });
        self.lock().jobs.push_back(Arc::clone(&job));
        loop {
            if let Some(result) = job.result.get() {
                return result.clone();
            }
            match self.lead(&job) {
                Some(leader) => leader.write_group(&write),
                None => self.wait(&job)?,
            }
        }
    }

    /// The time since which the oldest item has waited for its result.
    pub fn waiting_since(&self) -> Option<Instant> {
        let waiting = self.lock();
        waiting
            .leading
            .into_iter()
            .chain(waiting.jobs.front().map(|job| job.since))
            .min()
    }

    /// Takes everything that waits. Returns `None` if there is a leader already, or if the job has
    /// its result: a thread must not fail because of a group that its own item is not part of.
    fn lead(&self, job: &WaitingItem<T, R>) -> Option<Leader<'_, T, R>> {
        let mut waiting = self.lock();
        if waiting.leading.is_some() || job.result.get().is_some() {
            return None;
        }
        waiting.leading = Some(waiting.jobs.front()?.since);
        Some(Leader {
            queue: self,
            group: waiting.jobs.drain(..).collect(),
        })
    }

    /// Waits to be woken. Past its deadline a job that no leader has taken leaves the queue.
    fn wait(&self, job: &Arc<WaitingItem<T, R>>) -> Result<(), NotWritten> {
        let left = job.deadline.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            thread::park_timeout(left);
        } else if self.withdraw(job) {
            return Err(NotWritten::Late);
        } else {
            // A leader has it, and reports to it on every path.
            thread::park();
        }
        Ok(())
    }

    fn withdraw(&self, job: &Arc<WaitingItem<T, R>>) -> bool {
        let mut waiting = self.lock();
        let Some(place) = waiting
            .jobs
            .iter()
            .position(|other| Arc::ptr_eq(other, job))
        else {
            return false;
        };
        waiting.jobs.remove(place);
        // It may have been the one that was woken when the leader was done.
        wake_next(waiting);
        true
    }

    fn lock(&self) -> MutexGuard<'_, ItemQueue<T, R>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Wakes the first in the queue, after unlocking it: that thread would only wait for the lock.
fn wake_next<T, R>(waiting: MutexGuard<'_, ItemQueue<T, R>>) {
    let next = waiting.jobs.front().cloned();
    drop(waiting);
    if let Some(next) = next {
        next.thread.unpark();
    }
}

/// The right to write a group. Dropping it, even after a panic, reports to every member that has no
/// result, and lets the next one lead.
struct Leader<'a, T, R: Clone> {
    queue: &'a GroupCommit<T, R>,
    group: Vec<Arc<WaitingItem<T, R>>>,
}

impl<T, R: Clone> Leader<'_, T, R> {
    fn write_group(self, write: impl Fn(&[&T], Instant) -> Vec<R>) {
        let items: Vec<&T> = self.group.iter().map(|job| &job.item).collect();
        // The first one has waited longest.
        let results = write(&items, self.group[0].deadline);
        self.group
            .iter()
            .zip(results)
            .for_each(|(job, result)| job.report(Ok(result)));
    }
}

impl<T, R: Clone> Drop for Leader<'_, T, R> {
    fn drop(&mut self) {
        self.group
            .iter()
            .for_each(|job| job.report(Err(NotWritten::Panicked)));
        let mut waiting = self.queue.lock();
        waiting.leading = None;
        wake_next(waiting);
    }
}

impl<T, R> WaitingItem<T, R> {
    /// Wakes the thread if it had no result. The leader's own is awake.
    fn report(&self, result: Result<R, NotWritten>) {
        if self.result.set(result).is_ok() && self.thread.id() != thread::current().id() {
            self.thread.unpark();
        }
    }
}

#[cfg(test)]
impl<T, R: Clone> GroupCommit<T, R> {
    /// Returns whether there is a leader, and how many wait for the next one.
    pub fn waiting(&self) -> (bool, usize) {
        let waiting = self.lock();
        (waiting.leading.is_some(), waiting.jobs.len())
    }
}
