//! The log: lines on standard error, of this crate only, because `ureq` and `rustls` log what they
//! send. `simplelog` makes the lines.
//!
//! One thread writes them, so that no other thread waits for standard error, which may be a pipe
//! that is not read.

mod line_buffer;
mod refusal_lines;

use std::env;
use std::io::{self, Write};
use std::mem;
use std::net::IpAddr;
use std::panic;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use log::{Level, LevelFilter};
use rustix::fs::fstat;
use simplelog::{
    CombinedLogger, ConfigBuilder, FormatItem, SharedLogger, WriteLogger, format_description,
};

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
const TIME: &[FormatItem] =
    format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:3]Z");

/// What waits for the thread that writes.
static LINES: LineBuffer = LineBuffer::new();

/// That thread runs.
static IS_STARTED: AtomicBool = AtomicBool::new(false);

static REFUSAL_LINES: Mutex<RefusalLines> = Mutex::new(RefusalLines::new());

pub fn start(level: LevelFilter) -> io::Result<()> {
    thread::Builder::new()
        .name("log".into())
        .spawn(write_lines)?;
    let logger = |is_request| logger(is_journal(), is_request);
    if CombinedLogger::init(vec![logger(false), logger(true)]).is_ok() {
        panic::set_hook(Box::new(|info| {
            // Without the message, which may hold text of a client.
            let place = info
                .location()
                .map_or("an unknown place".into(), ToString::to_string);
            log::error!("a thread panicked at {place}");
        }));
    }
    IS_STARTED.store(true, Ordering::Release);
    log::set_max_level(level);
    Ok(())
}

/// The logger of lines about single requests, or of all others. The journal has the time of a line,
/// and takes its level from its priority.
fn logger(is_journal: bool, is_request: bool) -> Box<dyn SharedLogger> {
    let mut config = ConfigBuilder::new();
    config
        .set_time_format_custom(TIME)
        .set_thread_level(LevelFilter::Off)
        .set_target_level(LevelFilter::Off)
        .set_location_level(LevelFilter::Off);
    if is_journal {
        config.set_time_level(LevelFilter::Off);
    }
    match is_request {
        true => config.add_filter_allow_str(REQUEST),
        false => config
            .add_filter_allow_str(env!("CARGO_PKG_NAME"))
            .add_filter_ignore_str(REQUEST),
    };
    let writer = LineWriter {
        is_journal,
        is_request,
        line: Vec::new(),
    };
    // `log::set_max_level` has the level, which a reload changes.
    WriteLogger::new(LevelFilter::max(), config.build(), writer)
}

/// Takes the parts of a line from its logger, and puts the whole line into the buffer.
struct LineWriter {
    is_journal: bool,
    is_request: bool,
    line: Vec<u8>,
}

impl Write for LineWriter {
    fn write(&mut self, part: &[u8]) -> io::Result<usize> {
        self.line.extend_from_slice(part);
        if part.ends_with(b"\n") {
            let line = mem::take(&mut self.line);
            let line = if self.is_journal {
                with_priority(&line)
            } else {
                line
            };
            LINES.push(&line, self.is_request);
        }
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Replaces the level at the beginning of a line.
fn with_priority(line: &[u8]) -> Vec<u8> {
    let text = |level: Level| line.strip_prefix(format!("[{level}] ").as_bytes());
    let found = Level::iter().find_map(|level| Some((priority(level), text(level)?)));
    found.map_or(line.to_vec(), |(mark, text)| {
        [mark.as_bytes(), text].concat()
    })
}

/// Writes the lines of all threads, until the process ends.
fn write_lines() {
    let mut next_summary = Instant::now() + SUMMARY_INTERVAL;
    loop {
        let (lines, dropped) = LINES.take(next_summary);
        lines.split_inclusive(|&byte| byte == b'\n').for_each(write);
        if dropped > 0 {
            log::warn!("{dropped} log lines dropped: standard error was not read in time");
        }
        if Instant::now() >= next_summary {
            next_summary = Instant::now() + SUMMARY_INTERVAL;
            log_refusal_summary();
        }
    }
}

/// Writes why a command failed, whether or not the log was started.
pub fn print_error(message: &str) {
    let mark = match is_journal() {
        true => priority(Level::Error),
        false => "",
    };
    let line = |line| format!("{mark}{line}\n");
    let lines: String = message.lines().map(line).collect();
    match IS_STARTED.load(Ordering::Acquire) {
        true => LINES.push(lines.as_bytes(), false),
        false => write(lines.as_bytes()),
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
        LINES.flush(FLUSH_TIME);
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
    use log::{Log, Record};

    use super::*;

    /// What a record becomes in the buffer of the test.
    fn line(is_journal: bool, target: &str, level: Level) -> String {
        let record = |loggers: [Box<dyn SharedLogger>; 2]| {
            for logger in loggers {
                let record = Record::builder()
                    .target(target)
                    .level(level)
                    .args(format_args!("a ] b"))
                    .build();
                logger.as_log().log(&record);
            }
        };
        let (earlier, _) = LINES.take(Instant::now());
        assert!(earlier.is_empty(), "no other test logs");
        record([false, true].map(|is_request| logger(is_journal, is_request)));
        String::from_utf8(LINES.take(Instant::now()).0).expect("text")
    }

    #[test]
    fn every_line_of_this_crate_has_a_priority_or_a_time() {
        for target in ["adriaticum::api", REQUEST] {
            for (level, priority) in [
                (Level::Error, 3),
                (Level::Warn, 4),
                (Level::Info, 6),
                (Level::Debug, 7),
                (Level::Trace, 7),
            ] {
                assert_eq!(line(true, target, level), format!("<{priority}>a ] b\n"));
            }
            let plain = line(false, target, Level::Info);
            assert_eq!(plain.len(), "2026-11-16T13:00:00.000Z [INFO] a ] b\n".len());
            assert!(
                plain.starts_with("20") && plain.ends_with("Z [INFO] a ] b\n"),
                "{plain}"
            );
        }
        for target in ["ureq::run", "rustls::client::hs"] {
            assert_eq!(line(true, target, Level::Error), "");
        }
    }
}
