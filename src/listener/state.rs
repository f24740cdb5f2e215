//! The state that the event loop, its threads and the readers of its load share.

use std::mem;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use mio::Waker;

use super::admission::{Admission, Destination};
use super::connection::Outgoing;
use super::credential_cache::CredentialCache;
use super::limits::Limits;
use super::load::{EventCounts, Gauge, LoadEvent, Snapshot};
use super::queue::{Capacity, FairQueue, HeavyLane, Job, LaneLoad, LaneName};
use crate::client::Cancellation;
use crate::mutex::lock;

/// The console has two threads of its own, so that no page delays a completion. More would only use
/// more memory.
pub(super) const CONSOLE_CAPACITY: Capacity = Capacity {
    threads: 2,
    waiting: 16,
    unknown: 4,
    has_limits: false,
};

pub struct ListenerState {
    pub(super) limits: Limits,
    /// The requests of the API whose key is known.
    pub(super) api: FairQueue,
    /// The requests of the API whose key has to be looked up first.
    pub(super) unknown_keys: FairQueue,
    pub(super) console: FairQueue,
    pub(super) credentials: CredentialCache,
    /// When a worker last started a request.
    work_started: Mutex<Instant>,
    /// When the look-up of an unknown key began, if one runs.
    look_up_started: Mutex<Option<Instant>>,
    /// The responses that the threads have finished, each with the number of its connection.
    completed: Mutex<Vec<(usize, Outgoing)>>,
    waker: Waker,
    is_stopping: AtomicBool,
    connections: AtomicUsize,
    /// The memory that the connections and their requests hold, the console's too.
    buffered: AtomicUsize,
    pub(super) accepted: AtomicU64,
    /// In the order of [`LoadEvent::ALL`].
    events: [AtomicU64; LoadEvent::ALL.len()],
}

/// For the event loop and the threads.
impl ListenerState {
    pub(super) fn new(limits: Limits, waker: Waker) -> Self {
        let Limits { workers, queue, .. } = limits;
        let known = Capacity {
            threads: workers,
            waiting: queue,
            unknown: 0,
            has_limits: true,
        };
        // As many as there is capacity for if all of them have valid keys.
        let all = workers + queue;
        let unknown = Capacity {
            threads: 1,
            waiting: all,
            unknown: all,
            has_limits: false,
        };
        Self {
            limits,
            api: FairQueue::new(known),
            unknown_keys: FairQueue::new(unknown),
            console: FairQueue::new(CONSOLE_CAPACITY),
            credentials: CredentialCache::default(),
            work_started: Mutex::new(Instant::now()),
            look_up_started: Mutex::default(),
            completed: Mutex::default(),
            waker,
            is_stopping: AtomicBool::new(false),
            connections: AtomicUsize::new(0),
            buffered: AtomicUsize::new(0),
            accepted: AtomicU64::new(0),
            events: Default::default(),
        }
    }

    /// The queue and the lane of a complete request.
    pub(super) fn select_queue(&self, admission: &Admission) -> (&FairQueue, LaneName) {
        let credential = admission.destination.credential();
        let known = credential.and_then(|digest| self.credentials.use_lane(&digest));
        let queue = match admission.destination {
            Destination::Api(_) if known.is_some() => &self.api,
            Destination::Api(_) => &self.unknown_keys,
            Destination::Console(_) => &self.console,
        };
        (queue, known.or_else(|| admission.lane.clone()))
    }

    /// The lanes that hold more than `own` bytes and have a request that can be shed.
    pub(super) fn heavier_lanes(&self, own: usize) -> impl Iterator<Item = HeavyLane<'_>> {
        self.queues()
            .into_iter()
            .flat_map(move |queue| queue.heavier_lanes(own))
    }

    /// Removes a request if it waits. Returns whether it did.
    pub(super) fn remove(&self, cancellation: &Cancellation) -> bool {
        let is_cancelled = |job: &Job| {
            job.pending()
                .is_some_and(|pending| pending.cancellation.is_same(cancellation))
        };
        self.queues()
            .iter()
            .any(|queue| queue.remove(is_cancelled).is_some())
    }

    /// Removes a request of the API before a worker takes it.
    pub(super) fn take_waiting(&self) -> Option<Job> {
        [&self.unknown_keys, &self.api]
            .iter()
            .find_map(|queue| queue.remove(|_| true))
    }

    /// Ends the threads, after the last request.
    pub(super) fn close(&self) {
        self.queues().iter().for_each(|queue| queue.close());
    }

    fn queues(&self) -> [&FairQueue; 3] {
        [&self.unknown_keys, &self.api, &self.console]
    }

    /// From now on every response closes its connection. Returns true if that was so before.
    pub(super) fn stop(&self) -> bool {
        self.is_stopping.swap(true, Ordering::AcqRel)
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
    }

    /// Passes a response to the loop.
    pub(super) fn complete(&self, connection: usize, response: Outgoing) {
        let mut completed = lock(&self.completed);
        completed.push((connection, response));
        // The loop takes all of them at once, and the first one wakes it.
        let is_first = completed.len() == 1;
        drop(completed);
        if is_first && let Err(error) = self.waker.wake() {
            log::error!("could not wake the listener: {error}");
        }
    }

    pub(super) fn take_completed(&self) -> Vec<(usize, Outgoing)> {
        mem::take(&mut *lock(&self.completed))
    }

    pub(super) fn count(&self, event: LoadEvent) {
        self.events[event as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn event_counts(&self) -> EventCounts {
        LoadEvent::ALL.map(|event| self.events[event as usize].load(Ordering::Relaxed))
    }

    pub(super) fn note_work(&self) {
        *lock(&self.work_started) = Instant::now();
    }

    pub(super) fn note_look_up(&self, is_running: bool) {
        *lock(&self.look_up_started) = is_running.then(Instant::now);
    }

    /// Publishes the loop's figures, once per round.
    pub(super) fn publish(&self, connections: usize, buffered: usize) {
        self.connections.store(connections, Ordering::Relaxed);
        self.buffered.store(buffered, Ordering::Relaxed);
    }
}

/// For the console, the metrics and the watchdog.
impl ListenerState {
    /// The API's requests by key.
    pub fn lanes(&self) -> Vec<LaneLoad> {
        self.api.lanes()
    }

    /// The numbers are read one after another, so they may differ by a request that comes or goes
    /// meanwhile.
    pub fn snapshot(&self) -> Snapshot {
        let gauge = |now, limit| Gauge { now, limit };
        let (running, waiting) = self.api.load();
        let waiting = waiting + self.unknown_keys.load().1;
        let connections = self.connections.load(Ordering::Relaxed);
        let buffered = self.buffered.load(Ordering::Relaxed);
        Snapshot {
            workers: gauge(running, self.limits.workers),
            queue: gauge(waiting, self.limits.queue),
            connections: gauge(connections, self.limits.max_connections),
            buffered_bytes: gauge(buffered, self.limits.buffered_bytes),
            accepted: self.accepted.load(Ordering::Relaxed),
            events: self.event_counts(),
        }
    }

    /// Returns true if all workers are busy and none has started a request within `deadline`: then
    /// each of them has been with its request for longer than a request may take. The same for the
    /// thread that looks up unknown keys.
    pub fn are_workers_stuck(&self, deadline: Duration) -> bool {
        let is_overdue = |started: Instant| started.elapsed() > deadline;
        let are_all_busy = self.api.load().0 >= self.limits.workers;
        (are_all_busy && is_overdue(*lock(&self.work_started)))
            || lock(&self.look_up_started).is_some_and(is_overdue)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use mio::{Poll, Token};

    use super::*;
    use crate::listener::queue::tests::{in_lane, job};

    #[test]
    fn stuck_is_not_busy() {
        let poll = Poll::new().expect("a poll");
        let waker = Waker::new(poll.registry(), Token(0)).expect("a waker");
        let limits = Limits {
            workers: 2,
            ..Limits::default()
        };
        let state = ListenerState::new(limits, waker);
        let (none, long) = (Duration::ZERO, Duration::from_secs(3600));
        thread::sleep(Duration::from_millis(2));
        let start = || {
            state.api.push(job(0, in_lane("key_1")));
            let Ok(job) = state.api.take(None) else {
                panic!("no request")
            };
            state.api.set_limit(&job.lane, None);
        };
        start();
        assert!(!state.are_workers_stuck(none), "one worker is free");
        start();
        assert!(state.are_workers_stuck(none) && !state.are_workers_stuck(long));
        state.note_work();
        assert!(
            !state.are_workers_stuck(Duration::from_millis(500)),
            "a worker has just started a request"
        );
        state.note_look_up(true);
        thread::sleep(Duration::from_millis(2));
        let soon = Duration::from_millis(1);
        state.note_work();
        assert!(state.are_workers_stuck(soon), "the look-up takes too long");
        state.note_look_up(false);
        assert!(!state.are_workers_stuck(Duration::from_millis(500)));
    }
}
