//! Shows how far long work has come: on a terminal one line that is rewritten, elsewhere a line
//! every few seconds. Work that ends before shows nothing.

use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::mutex::lock;
use crate::text::grouped;

/// The time between two states of the line on a terminal.
const REWRITE: Duration = Duration::from_millis(250);

/// The time between two lines elsewhere.
const NEXT_LINE: Duration = Duration::from_secs(5);

/// Clones share one display: a callback of SQLite needs its own.
#[derive(Clone)]
pub struct Progress(Option<Arc<Mutex<Display>>>);

impl Progress {
    /// Shows nothing.
    pub fn hidden() -> Self {
        Self(None)
    }

    /// Shows it on standard error. If that is closed, the work still continues.
    pub fn on_stderr() -> Self {
        let is_terminal = io::stderr().is_terminal();
        Self::new(
            is_terminal,
            if is_terminal { REWRITE } else { NEXT_LINE },
            |text| {
                let _ = io::stderr().write_all(text.as_bytes());
            },
        )
    }

    /// Writes the lines to the log.
    pub fn in_log() -> Self {
        Self::new(false, NEXT_LINE, |text| log::info!("{}", text.trim_end()))
    }

    fn new(
        is_terminal: bool,
        interval: Duration,
        write: impl FnMut(&str) + Send + 'static,
    ) -> Self {
        let now = Instant::now();
        Self(Some(Arc::new(Mutex::new(Display {
            write: Box::new(write),
            is_terminal,
            interval,
            work: String::new(),
            began: now,
            last: now,
            line: String::new(),
        }))))
    }

    /// Shows how much of some work is done, as "verifying", 3, 10, "rows". The first call of a work
    /// starts its clock. A total of 0 means that it is not known.
    pub fn update(&self, work: &str, done: u64, total: u64, unit: &str) {
        if let Some(display) = &self.0 {
            lock(display).update(Instant::now(), work, done, total, unit);
        }
    }

    /// Runs something that prints lines, without mixing them with the one that is rewritten.
    pub fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        let Some(display) = &self.0 else {
            return print();
        };
        let mut display = lock(display);
        let line = display.clear();
        let value = print();
        display.rewrite(line);
        value
    }
}

struct Display {
    write: Box<dyn FnMut(&str) + Send>,
    is_terminal: bool,
    interval: Duration,
    work: String,
    began: Instant,
    /// The time of the last line, or the beginning of the work.
    last: Instant,
    /// The line that a terminal shows now.
    line: String,
}

impl Display {
    fn update(&mut self, now: Instant, work: &str, done: u64, total: u64, unit: &str) {
        if self.work != work {
            self.clear();
            (self.work, self.began, self.last) = (work.to_owned(), now, now);
        }
        if total > 0 && done >= total {
            self.clear();
        } else if now.duration_since(self.last) >= self.interval {
            self.last = now;
            let line = format!(
                "{work}: {}",
                state(now.duration_since(self.began), done, total, unit)
            );
            if self.is_terminal {
                self.rewrite(line);
            } else {
                (self.write)(&format!("{line}\n"));
            }
        }
    }

    fn rewrite(&mut self, line: String) {
        if !line.is_empty() {
            (self.write)(&format!("\r{line}\x1b[K"));
            self.line = line;
        }
    }

    /// Removes the line from a terminal, and returns it.
    fn clear(&mut self) -> String {
        if !self.line.is_empty() {
            (self.write)("\r\x1b[K");
        }
        std::mem::take(&mut self.line)
    }
}

/// Clears the line, even after an error: the next output begins on a free one.
impl Drop for Display {
    fn drop(&mut self) {
        self.clear();
    }
}

fn state(elapsed: Duration, done: u64, total: u64, unit: &str) -> String {
    if total == 0 {
        return format!("{} so far", time(elapsed.as_secs()));
    }
    let all = format!(
        "{} of {} {unit}",
        grouped(done as i64),
        grouped(total as i64)
    );
    let share = done as f64 / total as f64;
    let left = match done {
        0 => String::new(),
        _ => format!(
            ", {} left",
            time((elapsed.as_secs_f64() * (1.0 / share - 1.0)).ceil() as u64)
        ),
    };
    format!("{all}, {:.0}%{left}", (share * 100.0).floor())
}

fn time(seconds: u64) -> String {
    match seconds {
        ..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
impl Progress {
    /// Records every state as a line.
    pub fn recorded() -> (Self, Arc<Mutex<Vec<String>>>) {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let written = Arc::clone(&lines);
        let write = move |line: &str| lock(&written).push(line.trim_end().to_owned());
        (Self::new(false, Duration::ZERO, write), lines)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what is written if 1,000 rows are verified, one every 30 ms, and then the sums.
    fn written(is_terminal: bool, interval: Duration) -> Vec<String> {
        let texts = Arc::new(Mutex::new(Vec::new()));
        let write = {
            let texts = Arc::clone(&texts);
            move |text: &str| lock(&texts).push(text.to_owned())
        };
        let progress = Progress::new(is_terminal, interval, write);
        let display = progress.0.clone().expect("a display");
        let began = Instant::now();
        for row in 0..=1000 {
            let now = began + Duration::from_millis(30) * row;
            lock(&display).update(now, "verifying", row.into(), 1000, "rows");
        }
        lock(&display).update(began, "checking", 0, 0, "");
        drop(display);
        progress.suspend(|| lock(&texts).push("aside".into()));
        drop(progress);
        std::mem::take(&mut lock(&texts))
    }

    #[test]
    fn elsewhere_there_is_a_line_every_few_seconds() {
        let lines = written(false, Duration::from_secs(7));
        assert_eq!(
            lines,
            [
                "verifying: 234 of 1,000 rows, 23%, 23 s left\n",
                "verifying: 468 of 1,000 rows, 46%, 16 s left\n",
                "verifying: 702 of 1,000 rows, 70%, 9 s left\n",
                "verifying: 936 of 1,000 rows, 93%, 2 s left\n",
                "aside",
            ]
        );
        assert_eq!(
            written(false, Duration::from_secs(31)),
            ["aside"],
            "the work ends before"
        );
    }

    #[test]
    fn on_a_terminal_one_line_is_rewritten_and_cleared_at_the_end() {
        let written = written(true, Duration::from_secs(14));
        assert_eq!(
            written,
            [
                "\rverifying: 467 of 1,000 rows, 46%, 16 s left\x1b[K",
                "\rverifying: 934 of 1,000 rows, 93%, 2 s left\x1b[K",
                "\r\x1b[K",
                "aside",
            ]
        );
    }

    #[test]
    fn other_lines_go_around_the_one_that_is_rewritten_and_an_early_end_clears_it() {
        let texts = Arc::new(Mutex::new(String::new()));
        let (printed, written) = (Arc::clone(&texts), Arc::clone(&texts));
        let progress = Progress::new(true, Duration::ZERO, move |text| {
            lock(&written).push_str(text)
        });
        progress.update("adding", 0, 3, "files");
        progress.suspend(|| lock(&printed).push_str("added: a\n"));
        drop(progress);
        let line = "\radding: 0 of 3 files, 0%\x1b[K";
        assert_eq!(
            *lock(&texts),
            format!("{line}\r\x1b[Kadded: a\n{line}\r\x1b[K")
        );
    }

    #[test]
    fn times_and_an_unknown_total() {
        for (seconds, done, total, expected) in [
            (59, 0, 0, "59 s so far"),
            (90, 0, 0, "1 min 30 s so far"),
            (60, 1, 2, "1 of 2 rows, 50%, 1 min 0 s left"),
            (10, 1, 1000, "1 of 1,000 rows, 0%, 2 h 46 min left"),
            (10, 0, 1000, "0 of 1,000 rows, 0%"),
        ] {
            assert_eq!(
                state(Duration::from_secs(seconds), done, total, "rows"),
                expected
            );
        }
    }
}
