//! The log: lines on standard error, of this program and not of its libraries, which would tell what they send.

use std::env;
use std::io::{self, LineWriter};
use std::panic;

use log::LevelFilter;
use simplelog::{ConfigBuilder, LevelPadding, WriteLogger};

pub fn start(level: LevelFilter) {
    let mut config = ConfigBuilder::new();
    config
        .add_filter_allow_str("adriaticum")
        .set_target_level(LevelFilter::Off)
        .set_thread_level(LevelFilter::Off)
        .set_location_level(LevelFilter::Off)
        .set_level_padding(LevelPadding::Off)
        .set_time_format_rfc3339();
    if env::var_os("JOURNAL_STREAM").is_some() {
        // The journal has the time of every line already.
        config.set_time_level(LevelFilter::Off);
    }
    // A line is one write: the lines of two processes don't mix.
    let sink = LineWriter::new(io::stderr());
    if WriteLogger::init(level, config.build(), sink).is_ok() {
        panic::set_hook(Box::new(|info| {
            // Where, but not what: the message of a panic may hold what a client wrote.
            let place = info.location().map_or("an unknown place".into(), ToString::to_string);
            log::error!("a thread panicked at {place}");
        }));
    }
}
