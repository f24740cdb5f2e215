//! The log line about shed requests: at most one a minute, because the loop writes it, and standard error may block.

use std::time::{Duration, Instant};

const INTERVAL: Duration = Duration::from_secs(60);

#[derive(Default)]
pub(super) struct ShedLog {
    /// Since the last line.
    count: u64,
    /// Of the last one.
    cause: String,
    last_line: Option<Instant>,
}

impl ShedLog {
    /// Counts a shed request; its line comes with the next [`Self::write`] that is due.
    pub fn add(&mut self, cause: Option<&str>) {
        self.count += 1;
        self.cause.clear();
        self.cause.push_str(cause.unwrap_or_default());
    }

    /// When the next line is due; `None` if there is nothing to say.
    pub fn due(&self, now: Instant) -> Option<Instant> {
        (self.count > 0).then(|| self.last_line.map_or(now, |last| last + INTERVAL))
    }

    /// Writes the line, if it is due.
    pub fn write(&mut self, now: Instant) {
        if let Some(line) = self.line(now) {
            log::warn!("{line}");
        }
    }

    /// Writes what no line has said yet.
    pub fn finish(&mut self, now: Instant) {
        self.last_line = None;
        self.write(now);
    }

    fn line(&mut self, now: Instant) -> Option<String> {
        if self.due(now)? > now {
            return None;
        }
        let line = format!("requests shed since the last such line: {} ({})", self.count, self.cause);
        self.count = 0;
        self.last_line = Some(now);
        Some(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_a_minute_with_the_count() {
        let mut log = ShedLog::default();
        let start = Instant::now();
        assert_eq!((log.due(start), log.line(start)), (None, None));
        log.add(Some("full"));
        assert_eq!(log.line(start).as_deref(), Some("requests shed since the last such line: 1 (full)"));
        for second in 1..60 {
            log.add(Some("full"));
            let now = start + Duration::from_secs(second);
            assert_eq!((log.due(now), log.line(now)), (Some(start + INTERVAL), None));
        }
        let line = log.line(start + INTERVAL);
        assert_eq!(line.as_deref(), Some("requests shed since the last such line: 59 (full)"));
        assert_eq!(log.line(start + 2 * INTERVAL), None, "there were none");
        log.add(Some("full"));
        log.finish(start + INTERVAL);
        assert_eq!(log.due(start + INTERVAL), None, "the rest is written at the end");
    }
}
