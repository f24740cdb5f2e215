//! The log lines about a lack of room: at most one a minute for each cause, because a stranger could fill the disk with them.

use std::time::{Duration, Instant};

use super::load::{Cause, Load};

const INTERVAL: Duration = Duration::from_secs(60);

#[derive(Default)]
pub(super) struct PressureLog([LoggedCount; Cause::ALL.len()]);

#[derive(Clone, Copy, Default)]
struct LoggedCount {
    count: u64,
    last_line: Option<Instant>,
}

impl PressureLog {
    /// Returns when the next line is due; `None` if there is nothing to log.
    pub fn due(&self, load: &Load, now: Instant) -> Option<Instant> {
        Cause::ALL.into_iter().filter_map(|cause| self.0[cause as usize].due(load.of(cause), now)).min()
    }

    /// Writes the lines that are due.
    pub fn write(&mut self, load: &Load, now: Instant) {
        for cause in Cause::ALL {
            if let Some(more) = self.0[cause as usize].take(load.of(cause), now) {
                let (level, line) = cause.line(more);
                log::log!(level, "{line}");
            }
        }
    }

    /// Writes the counts that no line has contained yet.
    pub fn finish(&mut self, load: &Load, now: Instant) {
        self.0.iter_mut().for_each(|logged| logged.last_line = None);
        self.write(load, now);
    }
}

impl LoggedCount {
    fn due(&self, count: u64, now: Instant) -> Option<Instant> {
        (count > self.count).then(|| self.last_line.map_or(now, |last| last + INTERVAL))
    }

    /// Returns the number since the last line, if a line is due.
    fn take(&mut self, count: u64, now: Instant) -> Option<u64> {
        self.due(count, now).filter(|&due| due <= now)?;
        let more = count - self.count;
        *self = Self { count, last_line: Some(now) };
        Some(more)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_a_minute_with_the_count() {
        let mut logged = LoggedCount::default();
        let start = Instant::now();
        assert_eq!((logged.due(0, start), logged.take(0, start)), (None, None));
        assert_eq!(logged.take(1, start), Some(1));
        for second in 1..60 {
            let now = start + Duration::from_secs(second);
            assert_eq!(
                (logged.due(1 + second, now), logged.take(1 + second, now)),
                (Some(start + INTERVAL), None)
            );
        }
        assert_eq!(logged.take(60, start + INTERVAL), Some(59));
        assert_eq!(logged.take(60, start + 2 * INTERVAL), None, "there were none");
    }

    #[test]
    fn each_cause_has_its_own_line_and_the_rest_is_written_at_the_end() {
        let (load, start) = (Load::new(&crate::listener::Limits::default()), Instant::now());
        let mut log = PressureLog::default();
        load.count(Cause::QueueFull);
        log.write(&load, start);
        assert_eq!(log.due(&load, start), None);
        load.count(Cause::QueueFull);
        assert_eq!(log.due(&load, start), Some(start + INTERVAL));
        load.count(Cause::Rejected);
        assert_eq!(log.due(&load, start), Some(start), "another cause does not wait");
        log.finish(&load, start);
        assert_eq!(log.due(&load, start), None);
    }
}
