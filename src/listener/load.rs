//! The listener's load, for metrics, the console and the log.

use std::array;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use log::Level;
use mio::Waker;

use super::Limits;
use super::dispatcher::{Area, Dispatcher};
use crate::rate_limiter::RateLimiter;

/// A request got no worker, or a connection was closed. Each event is counted, and the counts are
/// logged once a minute.
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
    /// A connection was evicted with an unfinished request, response or handshake, or after its
    /// last response.
    UnfinishedEvicted,
    /// An idle connection was evicted.
    IdleEvicted,
    /// A client went away while its request waited, or while its key was looked up.
    AbandonedWaiting,
    /// A client went away while its request ran.
    AbandonedRunning,
}

/// The number of each event, in the order of the variants.
pub(super) type EventCounts = [u64; EVENTS.len()];

/// The events in the order of the variants, each with its name in the log and the level of its line:
/// a warning if it may affect a client that does nothing wrong.
const EVENTS: [(LoadEvent, &str, Level); 8] = [
    (LoadEvent::QueueFull, "queue_full", Level::Warn),
    (LoadEvent::ConsoleFull, "console_full", Level::Warn),
    (LoadEvent::BuffersFull, "buffers_full", Level::Warn),
    (LoadEvent::Rejected, "connections_rejected", Level::Warn),
    (
        LoadEvent::UnfinishedEvicted,
        "unfinished_evicted",
        Level::Warn,
    ),
    (LoadEvent::IdleEvicted, "idle_evicted", Level::Info),
    (
        LoadEvent::AbandonedWaiting,
        "abandoned_waiting",
        Level::Info,
    ),
    (
        LoadEvent::AbandonedRunning,
        "abandoned_running",
        Level::Info,
    ),
];

/// The load of one moment, and counts since the start.
#[derive(Clone, Copy, Debug)]
pub struct Snapshot {
    /// Workers that have a request.
    pub workers: Gauge,
    /// Complete requests that wait for a worker.
    pub queue: Gauge,
    /// Open connections, idle ones too.
    pub connections: Gauge,
    /// The bytes held for clients: heads, bodies, responses not yet sent.
    pub buffered_bytes: Gauge,
    /// Connections that were taken.
    pub accepted: u64,
    pub events: EventCounts,
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

impl Gauge {
    pub fn is_full(self) -> bool {
        self.now > 0 && self.now >= self.limit
    }
}

/// The state that the event loop, its threads and the readers of its load share: the dispatcher, and
/// counters.
pub struct ListenerState {
    pub dispatcher: Dispatcher,
    pub(super) limits: Limits,
    is_stopping: AtomicBool,
    connections: AtomicUsize,
    /// The memory that the connections and their requests hold, the console's too.
    buffered: AtomicUsize,
    accepted: AtomicU64,
    /// In the order of the variants.
    events: [AtomicU64; EVENTS.len()],
}

impl ListenerState {
    pub(super) fn new(limits: Limits, waker: Waker) -> Self {
        Self {
            dispatcher: Dispatcher::new(&limits, waker),
            limits,
            is_stopping: AtomicBool::new(false),
            connections: AtomicUsize::new(0),
            buffered: AtomicUsize::new(0),
            accepted: AtomicU64::new(0),
            events: Default::default(),
        }
    }

    /// From now on every response closes its connection. Returns true if that was so before.
    pub(super) fn stop(&self) -> bool {
        self.is_stopping.swap(true, Ordering::AcqRel)
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
    }

    pub(super) fn count(&self, event: LoadEvent) {
        self.events[event as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_accepted(&self) {
        self.accepted.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn event_counts(&self) -> EventCounts {
        array::from_fn(|event| self.events[event].load(Ordering::Relaxed))
    }

    /// Publishes the loop's figures, once per round.
    pub(super) fn publish(&self, connections: usize, buffered: usize) {
        self.connections.store(connections, Ordering::Relaxed);
        self.buffered.store(buffered, Ordering::Relaxed);
    }

    /// The numbers are read one after another, so they may differ by a request that comes or goes
    /// meanwhile.
    pub fn snapshot(&self) -> Snapshot {
        let gauge = |now, limit| Gauge { now, limit };
        let (running, waiting) = self.dispatcher.load(Area::Api);
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
}

/// One line a minute: a client could fill the disk with them.
const LINES: RateLimiter = RateLimiter::new(1, Duration::from_secs(60));

/// The counts that were logged, and when the next line is due.
pub(super) struct EventLog {
    logged: EventCounts,
    lines: RateLimiter,
}

impl EventLog {
    pub fn new() -> Self {
        Self {
            logged: EventCounts::default(),
            lines: LINES,
        }
    }

    /// Returns when the next line is due; `None` if there is nothing to log.
    pub fn due(&self, counts: EventCounts, now: Instant) -> Option<Instant> {
        (counts != self.logged).then(|| now + self.lines.wait(0, now))
    }

    /// Writes the line if it is due, or the last one at the end.
    pub fn write(&mut self, counts: EventCounts, now: Instant, is_last: bool) {
        if counts != self.logged && (is_last || self.lines.allow(now)) {
            let (level, line) = self.line(counts);
            log::log!(level, "{line}");
            self.logged = counts;
        }
    }

    /// The counters that changed since the last line, and its level.
    fn line(&self, counts: EventCounts) -> (Level, String) {
        let (mut line, mut line_level) =
            (String::from("listener, since the last line:"), Level::Info);
        for (event, name, level) in EVENTS {
            let count = counts[event as usize] - self.logged[event as usize];
            if count > 0 {
                line += &format!(" {name}={count}");
                line_level = line_level.min(level);
            }
        }
        (line_level, line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_whole_and_in_the_order_of_the_variants() {
        for (place, (event, ..)) in EVENTS.into_iter().enumerate() {
            assert_eq!(event as usize, place);
        }
        let last = LoadEvent::AbandonedRunning as usize;
        assert_eq!(last + 1, EVENTS.len());
    }

    #[test]
    fn one_line_a_minute_with_the_counters_that_changed() {
        let (mut log, start) = (EventLog::new(), Instant::now());
        let mut counts = EventCounts::default();
        assert_eq!(log.due(counts, start), None);
        counts[LoadEvent::IdleEvicted as usize] = 2;
        assert_eq!(log.due(counts, start), Some(start));
        assert_eq!(
            log.line(counts),
            (
                Level::Info,
                "listener, since the last line: idle_evicted=2".into()
            )
        );
        log.write(counts, start, false);
        assert_eq!(log.due(counts, start), None);
        counts[LoadEvent::QueueFull as usize] = 3;
        counts[LoadEvent::IdleEvicted as usize] = 3;
        let later = start + Duration::from_secs(60);
        assert_eq!(log.due(counts, start), Some(later));
        log.write(counts, start, false);
        assert_eq!(
            log.line(counts),
            (
                Level::Warn,
                "listener, since the last line: queue_full=3 idle_evicted=1".into()
            ),
            "it waits for its time"
        );
        log.write(counts, later, false);
        assert_eq!(log.due(counts, later), None);
        counts[LoadEvent::Rejected as usize] = 1;
        log.write(counts, later, true);
        assert_eq!(
            log.due(counts, later),
            None,
            "the last line waits for nothing"
        );
    }
}
