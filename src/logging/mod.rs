//! The log: lines on standard error, of this crate only, because `ureq` and `rustls` log what they
//! send.
//!
//! One thread writes them, so that no other thread waits for standard error, which may be a pipe
//! that is not read.

mod line_buffer;
mod refusal_lines;

use std::env;
use std::io::{self, Write};
use std::net::IpAddr;
use std::panic;
use std::sync::{Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use log::{Level, LevelFilter, Log, Metadata, Record};
use rustix::fs::fstat;

use self::line_buffer::LineBuffer;
use self::refusal_lines::RefusalLines;
use crate::error::FailureCause;
use crate::mutex::lock;

/// The target of lines about single requests. When lines have to be dropped, these are the first.
pub const REQUEST: &str = concat!(env!("CARGO_PKG_NAME"), "::request");

/// The pause between two summaries of the refusals without a line of their own.
const SUMMARY_INTERVAL: Duration = Duration::from_secs(60);

/// The longest time that the end of the process waits for the last lines to be written.
const FLUSH_TIME: Duration = Duration::from_secs(1);

/// UTC, whatever zone the database has.
const TIME: &str = "%FT%T.%3fZ";

/// `None` until the log is started.
static LOG: OnceLock<&StandardError> = OnceLock::new();

static REFUSAL_LINES: Mutex<RefusalLines> = Mutex::new(RefusalLines::new());

pub fn start(level: LevelFilter) -> io::Result<()> {
    let log: &StandardError = Box::leak(Box::new(StandardError::new(is_journal())));
    thread::Builder::new()
        .name("log".into())
        .spawn(move || log.write_lines())?;
    if LOG.set(log).is_ok() && log::set_logger(log).is_ok() {
        panic::set_hook(Box::new(|info| {
            // Without the message, which may hold text of a client.
            let place = info
                .location()
                .map_or("an unknown place".into(), ToString::to_string);
            log::error!("a thread panicked at {place}");
        }));
    }
    log::set_max_level(level);
    Ok(())
}

/// Writes why a command failed, whether or not the log was started.
pub fn print_error(message: &str) {
    let mark = if is_journal() {
        priority(Level::Error)
    } else {
        ""
    };
    let lines: String = message
        .lines()
        .map(|line| format!("{mark}{line}\n"))
        .collect();
    match LOG.get() {
        Some(log) => log.buffer.push(lines.as_bytes(), false),
        None => write(lines.as_bytes()),
    }
}

/// Returns true if the refusal of a request without a valid key gets a line of its own. All such
/// refusals share a small budget; those beyond it are counted by cause and by address.
pub fn allow_refusal_line(cause: FailureCause, client: Option<IpAddr>) -> bool {
    lock(&REFUSAL_LINES).allow(cause, client.map(Into::into), Instant::now())
}

/// Logs how many refusals had no line of their own since the last summary. The writing thread does
/// so once a minute.
pub fn log_refusal_summary() {
    let summary = lock(&REFUSAL_LINES).sum_up(Instant::now());
    if let Some(summary) = summary {
        log::warn!("{summary}");
    }
}

/// Dropping it waits until the log is written, also while a panic ends the process. If standard
/// error is stuck, it gives up after a second. A second signal ends the process without it: only
/// lines of that moment can be missing then.
pub struct FlushAtEnd;

impl Drop for FlushAtEnd {
    fn drop(&mut self) {
        log::logger().flush();
    }
}

struct StandardError {
    is_journal: bool,
    buffer: LineBuffer,
}

impl StandardError {
    fn new(is_journal: bool) -> Self {
        Self {
            is_journal,
            buffer: LineBuffer::default(),
        }
    }

    /// The lines of a text, as they are written: each has its time and level. The journal has the
    /// time and takes the level from the priority.
    fn lines(&self, level: Level, text: &str) -> String {
        let time = Timestamp::now().strftime(TIME);
        let line = |line: &str| match self.is_journal {
            true => format!("{}{line}\n", priority(level)),
            false => format!("{time} [{level}] {line}\n"),
        };
        text.lines().map(line).collect()
    }

    /// Writes the lines of all threads, until the process ends.
    fn write_lines(&self) {
        let mut next_summary = Instant::now() + SUMMARY_INTERVAL;
        loop {
            let (lines, dropped) = self.buffer.take(next_summary);
            lines.split_inclusive(|&byte| byte == b'\n').for_each(write);
            if dropped > 0 {
                let notice =
                    format!("{dropped} log lines dropped: standard error was not read in time");
                write(self.lines(Level::Warn, &notice).as_bytes());
            }
            if Instant::now() >= next_summary {
                next_summary = Instant::now() + SUMMARY_INTERVAL;
                log_refusal_summary();
            }
        }
    }
}

impl Log for StandardError {
    fn enabled(&self, metadata: &Metadata) -> bool {
        metadata.target().starts_with(env!("CARGO_PKG_NAME"))
    }

    fn log(&self, record: &Record) {
        if self.enabled(record.metadata()) {
            let text = record.args().to_string();
            self.buffer.push(
                self.lines(record.level(), &text).as_bytes(),
                record.target() == REQUEST,
            );
        }
    }

    fn flush(&self) {
        self.buffer.flush(FLUSH_TIME);
    }
}

/// Writes a line at once, so that the lines of two processes do not mix.
fn write(bytes: &[u8]) {
    // If standard error is closed, there is no place left to report it.
    let _ = io::stderr().lock().write_all(bytes);
}

/// The prefix of a line, by sd-daemon(3).
fn priority(level: Level) -> &'static str {
    match level {
        Level::Error => "<3>",
        Level::Warn => "<4>",
        Level::Info => "<6>",
        Level::Debug | Level::Trace => "<7>",
    }
}

/// Returns true if standard error is the stream whose device and inode `JOURNAL_STREAM` names
/// (systemd.exec(5)). A program that a service starts inherits the variable, but perhaps not the
/// stream.
fn is_journal() -> bool {
    let stream = fstat(io::stderr()).map(|found| format!("{}:{}", found.st_dev, found.st_ino));
    stream.is_ok_and(|stream| env::var("JOURNAL_STREAM").is_ok_and(|named| named == stream))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(is_journal: bool, level: Level, text: &str) -> String {
        StandardError::new(is_journal).lines(level, text)
    }

    #[test]
    fn every_line_has_a_priority_or_a_time() {
        for (level, priority) in [
            (Level::Error, 3),
            (Level::Warn, 4),
            (Level::Info, 6),
            (Level::Debug, 7),
            (Level::Trace, 7),
        ] {
            assert_eq!(
                lines(true, level, "a\nb"),
                format!("<{priority}>a\n<{priority}>b\n")
            );
        }
        let plain = lines(false, Level::Info, "a {}\nb");
        let (first, second) = plain.split_once('\n').expect("two lines");
        assert!(
            first.starts_with("20") && first.ends_with("Z [INFO] a {}"),
            "{plain}"
        );
        assert!(second.ends_with("Z [INFO] b\n"), "{plain}");
    }

    #[test]
    fn only_this_crate_is_logged() {
        let log = StandardError::new(false);
        let enabled = |target: &str| {
            log.enabled(
                &Metadata::builder()
                    .target(target)
                    .level(Level::Error)
                    .build(),
            )
        };
        assert!(enabled("adriaticum::api"));
        assert!(!enabled("ureq::run") && !enabled("rustls::client::hs"));
    }
}
