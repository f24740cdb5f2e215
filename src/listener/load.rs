//! The listener's load: the counts behind its limits, for metrics, the console and the log.

use std::mem;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::limits::Limits;
use super::queue::{FairQueue, LaneLoad, Room};
use super::workers::CONSOLE_ROOM;
use crate::rate_limiter::RateLimiter;

/// The listener and its workers write here; others take a [`Snapshot`].
pub struct Load {
    limits: Limits,
    /// The requests of the API.
    pub(super) queue: FairQueue,
    /// The requests whose key has to be looked up first.
    pub(super) strangers: FairQueue,
    pub(super) console: FairQueue,
    connections: AtomicUsize,
    /// The memory that the connections and their requests hold, the console's too.
    buffered: AtomicUsize,
    pub(super) accepted: AtomicU64,
    /// In the order of [`LoadEvent::ALL`].
    events: [AtomicU64; LoadEvent::ALL.len()],
}

/// Why a request got no worker, or a connection no room. Each is a count, and a line in the log once a minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadEvent {
    /// A request was shed: every worker and every place in the queue was taken.
    QueueFull,
    /// A console request was shed: too many were waiting.
    ConsoleFull,
    /// A request was shed: too much was buffered.
    BuffersFull,
    /// A new connection was closed: no other could be evicted.
    Rejected,
    /// A connection was evicted with an unfinished request, response or handshake, or after its last response.
    UnfinishedEvicted,
    /// An idle connection was evicted.
    IdleEvicted,
    /// A client went away while its request waited.
    AbandonedWaiting,
    /// A client went away while its request ran.
    AbandonedRunning,
}

impl LoadEvent {
    /// In the order of the variants.
    pub const ALL: [Self; 8] = [
        Self::QueueFull,
        Self::ConsoleFull,
        Self::BuffersFull,
        Self::Rejected,
        Self::UnfinishedEvicted,
        Self::IdleEvicted,
        Self::AbandonedWaiting,
        Self::AbandonedRunning,
    ];

    /// The log line for this many of them, and its level: a warning if it may affect a client that does nothing wrong.
    pub(super) fn line(self, count: u64) -> (log::Level, String) {
        use log::Level::{Info, Warn};
        let (level, event, reason) = match self {
            Self::QueueFull => (
                Warn,
                "requests shed",
                "queue_full: every worker and every place in the queue was taken",
            ),
            Self::ConsoleFull => (Warn, "console requests shed", "too many were waiting"),
            Self::BuffersFull => (
                Warn,
                "requests shed",
                "buffers_full: buffer_limit was reached",
            ),
            Self::Rejected => (
                Warn,
                "connections rejected",
                "connections_full: no other connection could be evicted",
            ),
            Self::UnfinishedEvicted => (
                Warn,
                "unfinished requests closed",
                "evicted to make room for others",
            ),
            Self::IdleEvicted => (
                Info,
                "idle connections closed",
                "evicted to make room for others",
            ),
            Self::AbandonedWaiting => (
                Info,
                "requests dropped",
                "their client went away while they waited",
            ),
            Self::AbandonedRunning => (
                Info,
                "requests cancelled",
                "their client went away while they ran",
            ),
        };
        (
            level,
            format!("{event}: {count} since the last report ({reason})"),
        )
    }
}

/// The levels of one moment, and counts since the start.
#[derive(Clone, Copy, Debug)]
pub struct Snapshot {
    /// Workers that have a request.
    pub workers: Gauge,
    /// Complete requests that wait for a worker.
    pub queue: Gauge,
    /// Open connections, idle ones too.
    pub connections: Gauge,
    /// The bytes held for clients: heads, bodies, answers not yet sent.
    pub buffered_bytes: Gauge,
    /// Connections that were taken.
    pub accepted: u64,
    /// In the order of [`LoadEvent::ALL`].
    pub events: [u64; LoadEvent::ALL.len()],
}

impl Snapshot {
    pub fn count_of(&self, event: LoadEvent) -> u64 {
        self.events[event as usize]
    }
}

/// A count and its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gauge {
    pub now: usize,
    pub limit: usize,
}

impl Load {
    pub(super) fn new(limits: &Limits) -> Self {
        let Limits { workers, queue, .. } = *limits;
        let of_keys = Room {
            threads: workers,
            places: queue,
            strangers: 0,
            has_limits: true,
        };
        // As many as there is room for if all of them have valid keys.
        let all = workers + queue;
        let of_strangers = Room {
            threads: 1,
            places: all,
            strangers: all,
            has_limits: false,
        };
        Self {
            limits: limits.clone(),
            queue: FairQueue::new(of_keys),
            strangers: FairQueue::new(of_strangers),
            console: FairQueue::new(CONSOLE_ROOM),
            connections: AtomicUsize::new(0),
            buffered: AtomicUsize::new(0),
            accepted: AtomicU64::new(0),
            events: Default::default(),
        }
    }

    pub(super) fn count(&self, event: LoadEvent) {
        self.events[event as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_of(&self, event: LoadEvent) -> u64 {
        self.events[event as usize].load(Ordering::Relaxed)
    }

    /// Publishes the figures of the loop.
    pub(super) fn publish(&self, connections: usize, buffered: usize) {
        self.connections.store(connections, Ordering::Relaxed);
        self.buffered.store(buffered, Ordering::Relaxed);
    }

    pub(super) fn all_workers_busy(&self) -> bool {
        self.queue.load().0 >= self.limits.workers
    }

    /// The API's requests by key.
    pub fn lanes(&self) -> Vec<LaneLoad> {
        self.queue.lanes()
    }

    /// The numbers are read one after another, so they may differ by a request that comes or goes meanwhile.
    pub fn snapshot(&self) -> Snapshot {
        let Limits {
            workers,
            queue,
            max_connections,
            buffered_bytes,
            ..
        } = self.limits;
        let (running, waiting) = self.queue.load();
        let waiting = waiting + self.strangers.load().1;
        Snapshot {
            workers: Gauge {
                now: running,
                limit: workers,
            },
            queue: Gauge {
                now: waiting,
                limit: queue,
            },
            connections: Gauge {
                now: self.connections.load(Ordering::Relaxed),
                limit: max_connections,
            },
            buffered_bytes: Gauge {
                now: self.buffered.load(Ordering::Relaxed),
                limit: buffered_bytes,
            },
            accepted: self.accepted.load(Ordering::Relaxed),
            events: LoadEvent::ALL.map(|event| self.count_of(event)),
        }
    }
}

/// The lines of one event: a client could fill the disk with them.
const LINES: RateLimiter = RateLimiter::new(1, LINE_INTERVAL);
const LINE_INTERVAL: Duration = Duration::from_secs(60);

/// The log lines about events.
pub(super) struct EventLog([LoggedCount; LoadEvent::ALL.len()]);

#[derive(Clone, Copy)]
struct LoggedCount {
    count: u64,
    lines: RateLimiter,
}

impl EventLog {
    pub fn new() -> Self {
        Self([LoggedCount::NEW; LoadEvent::ALL.len()])
    }

    /// Returns when the next line is due; `None` if there is nothing to log.
    pub fn due(&self, load: &Load, now: Instant) -> Option<Instant> {
        LoadEvent::ALL
            .into_iter()
            .filter_map(|event| self.0[event as usize].due(load.count_of(event), now))
            .min()
    }

    /// Writes the lines that are due.
    pub fn write(&mut self, load: &Load, now: Instant) {
        for event in LoadEvent::ALL {
            if let Some(more) = self.0[event as usize].take(load.count_of(event), now) {
                let (level, line) = event.line(more);
                log::log!(level, "{line}");
            }
        }
    }

    /// Writes the counts that no line has contained yet.
    pub fn finish(&mut self, load: &Load, now: Instant) {
        self.0.iter_mut().for_each(|logged| logged.lines = LINES);
        self.write(load, now);
    }
}

impl LoggedCount {
    const NEW: Self = Self {
        count: 0,
        lines: LINES,
    };

    fn due(&self, count: u64, now: Instant) -> Option<Instant> {
        (count > self.count).then(|| now + self.lines.wait(0, now))
    }

    /// Returns the number since the last line, if a line is due.
    fn take(&mut self, count: u64, now: Instant) -> Option<u64> {
        let is_due = count > self.count && self.lines.allow(now);
        is_due.then(|| count - mem::replace(&mut self.count, count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_whole_and_in_the_order_of_the_variants() {
        assert!(
            LoadEvent::ALL
                .iter()
                .enumerate()
                .all(|(place, &event)| event as usize == place)
        );
        assert_eq!(
            LoadEvent::AbandonedRunning as usize + 1,
            LoadEvent::ALL.len(),
            "the last variant"
        );
    }

    #[test]
    fn one_line_a_minute_with_the_count() {
        let mut logged = LoggedCount::NEW;
        let start = Instant::now();
        assert_eq!((logged.due(0, start), logged.take(0, start)), (None, None));
        assert_eq!(logged.take(1, start), Some(1));
        for second in 1..60 {
            let now = start + Duration::from_secs(second);
            assert_eq!(
                (logged.due(1 + second, now), logged.take(1 + second, now)),
                (Some(start + LINE_INTERVAL), None)
            );
        }
        assert_eq!(logged.take(60, start + LINE_INTERVAL), Some(59));
        assert_eq!(
            logged.take(60, start + 2 * LINE_INTERVAL),
            None,
            "there were none"
        );
    }

    #[test]
    fn each_event_has_its_own_line_and_the_rest_is_written_at_the_end() {
        let (load, start) = (Load::new(&Limits::default()), Instant::now());
        let mut log = EventLog::new();
        load.count(LoadEvent::QueueFull);
        log.write(&load, start);
        assert_eq!(log.due(&load, start), None);
        load.count(LoadEvent::QueueFull);
        assert_eq!(log.due(&load, start), Some(start + LINE_INTERVAL));
        load.count(LoadEvent::Rejected);
        assert_eq!(
            log.due(&load, start),
            Some(start),
            "another event does not wait"
        );
        log.finish(&load, start);
        assert_eq!(log.due(&load, start), None);
    }
}
