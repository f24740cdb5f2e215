//! The log: lines on standard error, of this crate only, because `ureq` and `rustls` log what they
//! send. `simplelog` makes the lines.
//!
//! One thread writes them, so that no other thread waits for standard error, which may be a pipe
//! that is not read.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::env;
use std::io::{self, Write};
use std::mem;
use std::net::IpAddr;
use std::panic;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use log::{Level, LevelFilter};
use rustix::fs::fstat;
use simplelog::{
    CombinedLogger, ConfigBuilder, FormatItem, SharedLogger, WriteLogger, format_description,
};

use crate::error::FailureCause;
use crate::http::ClientNetwork;
use crate::locks::lock;
use crate::rate_limiter::RateLimiter;

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

/// The most bytes in the queue.
const LIMIT: usize = 256 * 1024;

/// The most bytes in the queue when a line about a single request is added. The other half is for
/// errors and changes of state, so that requests never displace them.
const REQUEST_LIMIT: usize = LIMIT / 2;

/// The queue of lines for the thread that writes them.
struct LineBuffer {
    pending: Mutex<Pending>,
    changed: Condvar,
}

struct Pending {
    lines: Vec<u8>,
    /// Records that found no room since the last batch.
    dropped: u64,
    /// The last batch is not written yet.
    is_writing: bool,
}

impl LineBuffer {
    pub const fn new() -> Self {
        Self {
            pending: Mutex::new(Pending {
                lines: Vec::new(),
                dropped: 0,
                is_writing: false,
            }),
            changed: Condvar::new(),
        }
    }

    /// Adds the lines of one record, or counts them as dropped if there is no room. It never waits
    /// for the writer.
    pub fn push(&self, lines: &[u8], is_request: bool) {
        let limit = if is_request { REQUEST_LIMIT } else { LIMIT };
        let mut pending = lock(&self.pending);
        if pending.lines.len() + lines.len() > limit {
            pending.dropped += 1;
            return;
        }
        let was_empty = pending.lines.is_empty();
        pending.lines.extend_from_slice(lines);
        drop(pending);
        if was_empty {
            self.changed.notify_all();
        }
    }

    /// Waits for lines, and takes all of them and the number of records that were dropped after
    /// them. The batch is empty if no lines come in time. The caller has written the last batch.
    pub fn take(&self, until: Instant) -> (Vec<u8>, u64) {
        let mut pending = lock(&self.pending);
        pending.is_writing = false;
        self.changed.notify_all();
        let time = until.saturating_duration_since(Instant::now());
        let waited = self
            .changed
            .wait_timeout_while(pending, time, |pending| pending.lines.is_empty());
        let (mut pending, _) = waited.unwrap_or_else(PoisonError::into_inner);
        pending.is_writing = !pending.lines.is_empty();
        (
            mem::take(&mut pending.lines),
            mem::take(&mut pending.dropped),
        )
    }

    /// Waits until all lines are written, but not longer than `time`.
    pub fn flush(&self, time: Duration) {
        let is_busy = |pending: &mut Pending| pending.is_writing || !pending.lines.is_empty();
        drop(
            self.changed
                .wait_timeout_while(lock(&self.pending), time, is_busy),
        );
    }
}

/// The lines that are allowed at once.
const BURST: u32 = 20;

/// The most clients that are counted at once.
const CLIENTS: usize = 256;

/// A rate limit on log lines about requests without a valid key: otherwise any client could fill
/// the disk. Requests beyond it are counted for a summary.
struct RefusalLines {
    lines: RateLimiter,
    /// When the first refusal was counted.
    since: Option<Instant>,
    /// The refusals without a line.
    causes: BTreeMap<FailureCause, u64>,
    clients: BTreeMap<Option<ClientNetwork>, u64>,
}

impl RefusalLines {
    pub const fn new() -> Self {
        Self {
            lines: RateLimiter::new(BURST, Duration::from_secs(1)),
            since: None,
            causes: BTreeMap::new(),
            clients: BTreeMap::new(),
        }
    }

    /// Returns true if a refusal gets a line of its own. Otherwise counts it.
    pub fn allow(
        &mut self,
        cause: FailureCause,
        client: Option<ClientNetwork>,
        now: Instant,
    ) -> bool {
        if self.lines.allow(now) {
            return true;
        }
        self.since.get_or_insert(now);
        *self.causes.entry(cause).or_default() += 1;
        if self.clients.len() < CLIENTS || self.clients.contains_key(&client) {
            *self.clients.entry(client).or_default() += 1;
        } else {
            // A client with more than a 256th of all refusals is never lost (Misra and Gries,
            // 1982).
            self.clients.retain(|_, count| {
                *count -= 1;
                *count > 0
            });
        }
        false
    }

    /// Returns a line about the counted refusals and resets the counts; `None` if there are none.
    pub fn sum_up(&mut self, now: Instant) -> Option<String> {
        let since = self.since.take()?;
        let mut causes: Vec<_> = std::mem::take(&mut self.causes).into_iter().collect();
        causes.sort_by_key(|&(_, count)| Reverse(count));
        let total: u64 = causes.iter().map(|(_, count)| count).sum();
        let causes: Vec<_> = causes
            .iter()
            .map(|(cause, count)| format!("{cause} {count}"))
            .collect();
        let most = std::mem::take(&mut self.clients)
            .into_iter()
            .max_by_key(|&(_, count)| count);
        let most = match most {
            Some((Some(client), _)) => format!(", most from {client}"),
            Some((None, _)) => ", most from a Unix socket".to_owned(),
            None => String::new(),
        };
        let seconds = now.saturating_duration_since(since).as_secs().max(1);
        Some(format!(
            "further requests refused without a valid key in the last {seconds} s: {total} ({}){most}",
            causes.join(", ")
        ))
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::sync::Arc;
    use std::thread;

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

    #[test]
    fn requests_do_not_displace_errors() {
        let (buffer, now) = (LineBuffer::new(), Instant::now());
        let (request, error) = ([b'r'; 100], [b'e'; 100]);
        let half = LIMIT / 2 / 100;
        (0..3 * half).for_each(|_| buffer.push(&request, true));
        (0..half).for_each(|_| buffer.push(&error, false));
        let (lines, dropped) = buffer.take(now);
        assert_eq!(
            lines,
            [request.repeat(half), error.repeat(half)].concat(),
            "every error found room"
        );
        assert_eq!(dropped, 2 * half as u64);
        assert_eq!(buffer.take(now), (Vec::new(), 0), "the count is given once");
        buffer.push(&request, true);
        assert_eq!(
            buffer.take(now),
            (request.to_vec(), 0),
            "there is room again"
        );
        (0..3 * half).for_each(|_| buffer.push(&error, false));
        assert!(buffer.take(now).0.len() <= LIMIT, "errors have a limit too");
    }

    #[test]
    fn a_flush_waits_for_the_writer_but_not_forever() {
        let buffer = Arc::new(LineBuffer::new());
        buffer.flush(Duration::MAX);
        buffer.push(b"line\n", false);
        let began = Instant::now();
        buffer.flush(Duration::from_millis(20));
        assert!(
            began.elapsed() >= Duration::from_millis(20),
            "nothing writes"
        );
        let writer = {
            let buffer = Arc::clone(&buffer);
            thread::spawn(move || {
                let batch = buffer.take(began);
                assert!(lock(&buffer.pending).is_writing);
                buffer.take(began);
                batch
            })
        };
        buffer.flush(Duration::MAX);
        assert!(!lock(&buffer.pending).is_writing);
        assert_eq!(writer.join().expect("the writer should end").0, b"line\n");
    }

    fn address(last: u8) -> Option<ClientNetwork> {
        Some(IpAddr::from([192, 0, 2, last]).into())
    }

    #[test]
    fn a_burst_and_then_one_line_per_second() {
        let (mut budget, start) = (RefusalLines::new(), Instant::now());
        let mut lines = |second: u64| {
            let now = start + Duration::from_secs(second);
            (0..100)
                .filter(|_| budget.allow(FailureCause::NoKey, None, now))
                .count()
        };
        assert_eq!((lines(0), lines(0), lines(1), lines(4)), (20, 0, 1, 3));
        assert_eq!(
            (lines(3600), lines(3600)),
            (20, 0),
            "never more than the burst"
        );
    }

    #[test]
    fn the_rest_is_summed_up() {
        let (mut budget, start) = (RefusalLines::new(), Instant::now());
        assert!((0..20).all(|_| budget.allow(FailureCause::Host, address(9), start)));
        assert_eq!(budget.sum_up(start), None, "each had its line");
        for number in 0..30 {
            let cause = if number % 3 == 0 {
                FailureCause::NoKey
            } else {
                FailureCause::UnknownKey
            };
            assert!(!budget.allow(cause, address(1 + number % 2 * number), start));
        }
        assert_eq!(
            budget.sum_up(start + Duration::from_secs(60)).as_deref(),
            Some(
                "further requests refused without a valid key in the last 60 s: 30 (unknown_key 20, no_key 10), \
                 most from 192.0.2.1"
            )
        );
        assert_eq!(budget.sum_up(start + Duration::from_secs(120)), None);
    }

    #[test]
    fn many_addresses_do_not_hide_the_largest_or_fill_the_memory() {
        let (mut budget, start) = (RefusalLines::new(), Instant::now());
        assert!((0..BURST).all(|_| budget.allow(FailureCause::Host, None, start)));
        for number in 0..100_000_u32 {
            let client = if number % 100 == 0 {
                address(7)
            } else {
                Some(IpAddr::from(number.to_be_bytes()).into())
            };
            budget.allow(FailureCause::UnknownKey, client, start);
            assert!(budget.clients.len() <= CLIENTS);
        }
        let summary = budget.sum_up(start).expect("a line");
        assert!(
            summary.contains(": 100000 (unknown_key 100000), most from 192.0.2.7"),
            "{summary}"
        );
    }
}
