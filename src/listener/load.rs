//! The listener's load, for metrics, the console and the log.

use std::time::{Duration, Instant};

use crate::rate_limiter::RateLimiter;

/// A request got no worker, or a connection was closed. Each event is counted, and logged once a
/// minute.
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
    /// A client went away while its request waited.
    AbandonedWaiting,
    /// A client went away while its request ran.
    AbandonedRunning,
}

/// In the order of [`LoadEvent::ALL`].
pub(super) type EventCounts = [u64; LoadEvent::ALL.len()];

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

    /// The log line for this many of them, and its level: a warning if it may affect a client that
    /// does nothing wrong.
    fn line(self, count: u64) -> (log::Level, String) {
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
    /// In the order of [`LoadEvent::ALL`].
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

/// The lines of one event: a client could fill the disk with them.
const LINES: RateLimiter = RateLimiter::new(1, LINE_INTERVAL);
const LINE_INTERVAL: Duration = Duration::from_secs(60);

/// The count of each event that was logged, and its lines.
pub(super) struct EventLog([(u64, RateLimiter); LoadEvent::ALL.len()]);

impl EventLog {
    pub fn new() -> Self {
        Self([(0, LINES); LoadEvent::ALL.len()])
    }

    /// Returns when the next line is due; `None` if there is nothing to log.
    pub fn due(&self, counts: EventCounts, now: Instant) -> Option<Instant> {
        self.0
            .iter()
            .zip(counts)
            .filter(|((logged, _), count)| count > logged)
            .map(|((_, lines), _)| now + lines.wait(0, now))
            .min()
    }

    /// Writes the lines that are due.
    pub fn write(&mut self, counts: EventCounts, now: Instant) {
        for (event, count) in self.take(counts, now) {
            let (level, line) = event.line(count);
            log::log!(level, "{line}");
        }
    }

    /// Writes the counts that no line has contained yet.
    pub fn finish(&mut self, counts: EventCounts, now: Instant) {
        self.0.iter_mut().for_each(|(_, lines)| *lines = LINES);
        self.write(counts, now);
    }

    /// The events whose line is due, with their number since the last line.
    fn take(&mut self, counts: EventCounts, now: Instant) -> Vec<(LoadEvent, u64)> {
        let mut due = Vec::new();
        for (event, (logged, lines)) in LoadEvent::ALL.into_iter().zip(&mut self.0) {
            let count = counts[event as usize] - *logged;
            if count > 0 && lines.allow(now) {
                *logged += count;
                due.push((event, count));
            }
        }
        due
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
        let (mut log, start) = (EventLog::new(), Instant::now());
        let event = LoadEvent::QueueFull;
        let counts = |count| {
            let mut counts = EventCounts::default();
            counts[event as usize] = count;
            counts
        };
        assert_eq!(log.due(counts(0), start), None);
        assert_eq!(log.take(counts(0), start), []);
        assert_eq!(log.take(counts(1), start), [(event, 1)]);
        for second in 1..60 {
            let now = start + Duration::from_secs(second);
            assert_eq!(
                log.due(counts(1 + second), now),
                Some(start + LINE_INTERVAL)
            );
            assert_eq!(log.take(counts(1 + second), now), []);
        }
        let later = start + LINE_INTERVAL;
        assert_eq!(log.take(counts(60), later), [(event, 59)]);
        assert_eq!(
            log.take(counts(60), later + LINE_INTERVAL),
            [],
            "there were none"
        );
    }

    #[test]
    fn each_event_has_its_own_line_and_the_rest_is_written_at_the_end() {
        let (mut counts, start) = (EventCounts::default(), Instant::now());
        let mut log = EventLog::new();
        counts[LoadEvent::QueueFull as usize] += 1;
        log.write(counts, start);
        assert_eq!(log.due(counts, start), None);
        counts[LoadEvent::QueueFull as usize] += 1;
        assert_eq!(log.due(counts, start), Some(start + LINE_INTERVAL));
        counts[LoadEvent::Rejected as usize] += 1;
        assert_eq!(
            log.due(counts, start),
            Some(start),
            "another event does not wait"
        );
        log.finish(counts, start);
        assert_eq!(log.due(counts, start), None);
    }
}
