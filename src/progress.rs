//! Shows how many rows long work has done: on a terminal in one line that is rewritten, elsewhere
//! in a line every few seconds.

use std::cell::RefCell;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use crate::text::count;

/// The time between two states of the line on a terminal.
const REWRITE: Duration = Duration::from_millis(250);

/// The time between two lines elsewhere.
const NEXT_LINE: Duration = Duration::from_secs(5);

/// Clears the line of a terminal at its end: the next output begins on a free one.
pub struct Progress(Option<RefCell<Display>>);

impl Progress {
    /// Shows nothing.
    pub fn hidden() -> Self {
        Self(None)
    }

    /// Shows it on standard error. If that is closed, the work still continues.
    pub fn on_stderr() -> Self {
        Self::new(io::stderr().is_terminal(), |text| {
            let _ = io::stderr().write_all(text.as_bytes());
        })
    }

    fn new(is_terminal: bool, write: impl FnMut(&str) + 'static) -> Self {
        Self(Some(RefCell::new(Display {
            write: Box::new(write),
            is_terminal,
            work: String::new(),
            last: Instant::now(),
        })))
    }

    /// Shows some work, such as "verifying the rows", and how many rows of it are done; 0 if they
    /// are not known.
    pub fn show(&self, work: &str, rows: u64) {
        if let Some(display) = &self.0 {
            display.borrow_mut().show(Instant::now(), work, rows);
        }
    }
}

struct Display {
    write: Box<dyn FnMut(&str)>,
    is_terminal: bool,
    work: String,
    /// The time of the last line, or the beginning of the work.
    last: Instant,
}

impl Display {
    fn show(&mut self, now: Instant, work: &str, rows: u64) {
        let is_new = self.work != work;
        let is_due = match self.is_terminal {
            true => is_new || now.duration_since(self.last) >= REWRITE,
            false => !is_new && rows > 0 && now.duration_since(self.last) >= NEXT_LINE,
        };
        if is_new {
            self.work = work.to_owned();
        }
        if is_new || is_due {
            self.last = now;
        }
        if is_due {
            let line = match rows {
                0 => work.to_owned(),
                rows => format!("{work}: {}", count(rows as i64, "row")),
            };
            (self.write)(&match self.is_terminal {
                true => format!("\r{line}\x1b[K"),
                false => format!("{line}\n"),
            });
        }
    }
}

impl Drop for Display {
    fn drop(&mut self) {
        if self.is_terminal && !self.work.is_empty() {
            (self.write)("\r\x1b[K");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;

    /// Returns what is written if 1,000 rows are verified, one every 8 ms, and then the copy is
    /// checked.
    fn written(is_terminal: bool) -> Vec<String> {
        let texts = Rc::new(RefCell::new(Vec::new()));
        let in_display = Rc::clone(&texts);
        let progress = Progress::new(is_terminal, move |text| {
            in_display.borrow_mut().push(text.to_owned())
        });
        let display = progress.0.as_ref().expect("a display");
        let began = Instant::now();
        for row in 0..=1000 {
            let now = began + Duration::from_millis(8) * row;
            display
                .borrow_mut()
                .show(now, "verifying the rows", row.into());
        }
        progress.show("checking the copy", 0);
        drop(progress);
        texts.take()
    }

    #[test]
    fn elsewhere_there_is_a_line_every_few_seconds() {
        assert_eq!(written(false), ["verifying the rows: 625 rows\n"]);
    }

    #[test]
    fn on_a_terminal_one_line_is_rewritten_and_cleared_at_the_end() {
        let written = written(true);
        assert_eq!(written[0], "\rverifying the rows\x1b[K");
        assert_eq!(written[1], "\rverifying the rows: 32 rows\x1b[K");
        assert_eq!(
            written[written.len() - 3..],
            [
                "\rverifying the rows: 992 rows\x1b[K",
                "\rchecking the copy\x1b[K",
                "\r\x1b[K"
            ]
        );
    }
}
