//! How busy the listener is: the counts behind its limits, for metrics and the console.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::limits::Limits;

/// The listener and its workers write here; others take a [`Snapshot`].
pub struct Load {
    limits: Limits,
    /// Requests of the API, running and waiting together.
    pub(super) requests: Arc<AtomicUsize>,
    /// The memory that all running and waiting requests hold, the console's too.
    pub(super) weight: AtomicUsize,
    connections: AtomicUsize,
    /// The memory that the connections hold.
    buffered: AtomicUsize,
    pub(super) accepted: AtomicU64,
    pub(super) turned_away: AtomicU64,
    pub(super) made_way: AtomicU64,
    pub(super) queue_full: AtomicU64,
    pub(super) console_full: AtomicU64,
    pub(super) buffers_full: AtomicU64,
}

/// The levels of one moment, and counts since the start.
#[derive(Clone, Copy, Debug)]
pub struct Snapshot {
    /// Workers that have a request.
    pub workers: Level,
    /// Complete requests that wait for a worker.
    pub queue: Level,
    /// Open connections, idle ones too.
    pub connections: Level,
    /// What is held for clients: heads, bodies, answers not yet sent.
    pub buffered_bytes: Level,
    /// Connections that were taken.
    pub accepted: u64,
    /// Connections that found no room and were closed at once.
    pub turned_away: u64,
    /// Idle connections that were closed to make room for another.
    pub made_way: u64,
    /// Requests shed because every worker and every place in the queue was taken.
    pub queue_full: u64,
    /// Console requests shed because too many were waiting.
    pub console_full: u64,
    /// Requests shed because too much was buffered.
    pub buffers_full: u64,
}

/// A count and its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level {
    pub now: usize,
    pub most: usize,
}

impl Load {
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            limits: limits.clone(),
            requests: Arc::default(),
            weight: AtomicUsize::new(0),
            connections: AtomicUsize::new(0),
            buffered: AtomicUsize::new(0),
            accepted: AtomicU64::new(0),
            turned_away: AtomicU64::new(0),
            made_way: AtomicU64::new(0),
            queue_full: AtomicU64::new(0),
            console_full: AtomicU64::new(0),
            buffers_full: AtomicU64::new(0),
        }
    }

    /// Publishes what only the loop knows.
    pub(super) fn publish(&self, connections: usize, buffered: usize) {
        self.connections.store(connections, Ordering::Relaxed);
        self.buffered.store(buffered, Ordering::Relaxed);
    }

    pub(super) fn all_workers_busy(&self) -> bool {
        self.requests.load(Ordering::Acquire) >= self.limits.workers
    }

    /// The numbers are read one after another, so they may differ by a request that comes or goes meanwhile.
    pub fn snapshot(&self) -> Snapshot {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let Limits { workers, queue, max_connections, buffered_bytes, .. } = self.limits;
        let requests = self.requests.load(Ordering::Relaxed);
        let buffered = self.buffered.load(Ordering::Relaxed) + self.weight.load(Ordering::Relaxed);
        Snapshot {
            // A worker takes the next request as soon as it is free: nothing waits while one is.
            workers: Level { now: requests.min(workers), most: workers },
            queue: Level { now: requests.saturating_sub(workers), most: queue },
            connections: Level { now: self.connections.load(Ordering::Relaxed), most: max_connections },
            buffered_bytes: Level { now: buffered, most: buffered_bytes },
            accepted: of(&self.accepted),
            turned_away: of(&self.turned_away),
            made_way: of(&self.made_way),
            queue_full: of(&self.queue_full),
            console_full: of(&self.console_full),
            buffers_full: of(&self.buffers_full),
        }
    }
}
