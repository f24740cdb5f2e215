//! The log: lines on standard error, of this program and not of its libraries, which would tell what they send.

use std::env;
use std::fmt;
use std::io::{self, Write};
use std::panic;
use std::sync::LazyLock;

use log::{Level, LevelFilter, Log, Metadata, Record};
use rustix::fs::fstat;
use time::OffsetDateTime;
use time::format_description::BorrowedFormatItem;
use time::macros::format_description;

const TIME: &[BorrowedFormatItem<'_>] =
    format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:3]Z");

/// Whether standard error goes to systemd's journal, which has a time for every line and takes its priority
/// from a prefix (sd-daemon(3)).
static JOURNAL: LazyLock<bool> = LazyLock::new(is_journal);

pub fn start(level: LevelFilter) {
    if log::set_logger(&StandardError).is_ok() {
        panic::set_hook(Box::new(|info| {
            // Where, but not what: the message of a panic may hold what a client wrote.
            let place = info.location().map_or("an unknown place".into(), ToString::to_string);
            log::error!("a thread panicked at {place}");
        }));
    }
    set_level(level);
}

/// Tells no more than this from now on.
pub fn set_level(level: LevelFilter) {
    log::set_max_level(level);
}

/// Says why a command failed, with or without a log.
pub fn complain(message: fmt::Arguments) {
    write(Level::Error, message, |line, text| writeln!(line, "{text}"));
}

struct StandardError;

impl Log for StandardError {
    fn enabled(&self, metadata: &Metadata) -> bool {
        metadata.target().starts_with(env!("CARGO_PKG_NAME"))
    }

    fn log(&self, record: &Record) {
        if self.enabled(record.metadata()) {
            write(record.level(), *record.args(), |line, text| {
                let now = OffsetDateTime::now_utc().format(TIME).unwrap_or_default();
                writeln!(line, "{now} [{}] {text}", record.level())
            });
        }
    }

    fn flush(&self) {}
}

/// Writes a message: to the journal with the priority before each of its lines, else as `plain` has it. It is
/// one write, so that the messages of two processes don't mix.
fn write(
    level: Level,
    message: fmt::Arguments,
    plain: impl FnOnce(&mut Vec<u8>, fmt::Arguments) -> io::Result<()>,
) {
    let mut bytes = Vec::with_capacity(256);
    let written = if *JOURNAL {
        let priority = priority(level);
        let text = message.to_string();
        text.lines().try_for_each(|line| writeln!(bytes, "<{priority}>{line}"))
    } else {
        plain(&mut bytes, message)
    };
    // There is nobody to tell that nobody can be told.
    let _ = written.and_then(|()| io::stderr().lock().write_all(&bytes));
}

/// syslog(3). A notice is what stands between: nothing here is one.
fn priority(level: Level) -> u8 {
    match level {
        Level::Error => 3,
        Level::Warn => 4,
        Level::Info => 6,
        Level::Debug | Level::Trace => 7,
    }
}

/// `JOURNAL_STREAM` names the device and the inode of the journal's stream (systemd.exec(5)). A program that a
/// service starts inherits the variable, but perhaps not the stream.
fn is_journal() -> bool {
    let Ok(named) = env::var("JOURNAL_STREAM") else {
        return false;
    };
    fstat(io::stderr()).is_ok_and(|found| named == format!("{}:{}", found.st_dev, found.st_ino))
}
