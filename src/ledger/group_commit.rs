//! Group commit: items that wait at the same time are written together.
//!
//! A thread whose item waits and that finds no leader becomes the leader: it writes everything that
//! waits, and wakes the others. While it does so, the next group gathers.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::thread_primitives::{Mutex, MutexGuard, thread};

pub struct GroupCommit<T, R>(Mutex<ItemQueue<T, R>>);

struct ItemQueue<T, R> {
    /// When the oldest item of the group began to wait that a leader writes now; `None` if there is
    /// no leader.
    leader_since: Option<Instant>,
    items: VecDeque<Arc<WaitingItem<T, R>>>,
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
            leader_since: None,
            items: VecDeque::new(),
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
        let own = Arc::new(WaitingItem {
            item,
            since,
            deadline: since + timeout,
            result,
            thread,
        });
        self.lock().items.push_back(Arc::clone(&own));
        loop {
            if let Some(result) = own.result.get() {
                return result.clone();
            }
            match self.lead(&own) {
                Some(leader) => {
                    let items: Vec<&T> = leader.group.iter().map(|member| &member.item).collect();
                    // The first one has waited longest.
                    let results = write(&items, leader.group[0].deadline);
                    for (member, result) in leader.group.iter().zip(results) {
                        member.report(Ok(result));
                    }
                }
                None => self.wait(&own)?,
            }
        }
    }

    /// The time since which the oldest item has waited for its result.
    pub fn waiting_since(&self) -> Option<Instant> {
        let queue = self.lock();
        let first = queue.items.front().map(|item| item.since);
        queue.leader_since.into_iter().chain(first).min()
    }

    /// Takes everything that waits. Returns `None` if there is a leader already, or if the thread's
    /// own item has its result: a thread must not fail because of a group that its item is not part
    /// of.
    fn lead(&self, own: &WaitingItem<T, R>) -> Option<Leader<'_, T, R>> {
        let mut queue = self.lock();
        if queue.leader_since.is_some() || own.result.get().is_some() {
            return None;
        }
        queue.leader_since = Some(queue.items.front()?.since);
        Some(Leader {
            queue: self,
            group: queue.items.drain(..).collect(),
        })
    }

    /// Waits to be woken. Past its deadline, an item that no leader has taken leaves the queue.
    fn wait(&self, own: &Arc<WaitingItem<T, R>>) -> Result<(), NotWritten> {
        let left = own.deadline.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            thread::park_timeout(left);
        } else if self.withdraw(own) {
            return Err(NotWritten::Late);
        } else {
            // A leader has it, and reports to it on every path.
            thread::park();
        }
        Ok(())
    }

    fn withdraw(&self, own: &Arc<WaitingItem<T, R>>) -> bool {
        let mut queue = self.lock();
        let place = queue.items.iter().position(|item| Arc::ptr_eq(item, own));
        let is_withdrawn = place.and_then(|place| queue.items.remove(place)).is_some();
        if is_withdrawn {
            // It may have been the one that was woken when the leader was done.
            wake_next(queue);
        }
        is_withdrawn
    }

    fn lock(&self) -> MutexGuard<'_, ItemQueue<T, R>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Wakes the first in the queue, after unlocking it: that thread would only wait for the lock.
fn wake_next<T, R>(queue: MutexGuard<'_, ItemQueue<T, R>>) {
    let next = queue.items.front().cloned();
    drop(queue);
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

impl<T, R: Clone> Drop for Leader<'_, T, R> {
    fn drop(&mut self) {
        self.group
            .iter()
            .for_each(|member| member.report(Err(NotWritten::Panicked)));
        let mut queue = self.queue.lock();
        queue.leader_since = None;
        wake_next(queue);
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
        let queue = self.lock();
        (queue.leader_since.is_some(), queue.items.len())
    }
}
