//! What the commands share: printing, the values of options, and opening the database.

use std::fmt::{self, Display};
use std::io::{self, Write};
use std::path::Path;

use clap::builder::{PossibleValuesParser, TypedValueParser};

use crate::audit::Actor;
use crate::checks;
use crate::config::Config;
use crate::database::{Access, Problem, Result};
use crate::store::Store;
use crate::time_zone::{self, Rules, ZONEINFO};
use crate::when::{self, When};

/// Prints a line to standard error. If it is closed, the work still continues.
pub fn note(text: fmt::Arguments) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Prints to standard output. A reader that stops early, such as `head`, is not an error.
pub fn print(text: &str) -> Result<()> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(about("standard output")(error))
        }
        _ => Ok(()),
    }
}

pub fn print_json(value: &impl serde::Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).expect("the value should have a JSON form");
    print(&(text + "\n"))
}

/// Puts the name of a part in front of its error.
pub fn about<E: Into<Problem>>(part: impl Display) -> impl Fn(E) -> Problem {
    move |error| error.into().of(&part)
}

/// Makes the parser of an option that takes one of a few words.
pub fn one_of<T: Copy + Send + Sync + 'static, const N: usize>(
    values: [(&'static str, T); N],
) -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(values.map(|(word, _)| word)).map(move |found| {
        let value = values.iter().find(|(word, _)| *word == found);
        value.expect("it is one of the possible values").1
    })
}

/// Makes the parser of an option's value, with a message that says what is accepted.
pub fn expecting<T>(
    accepted: &'static str,
    parse: impl Fn(&str) -> Option<T> + Clone,
) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text| parse(text).ok_or_else(|| format!("expected {accepted}"))
}

pub fn parse_when(text: &str) -> Result<When, String> {
    When::parse(text).ok_or_else(|| wrong_when(text, ""))
}

pub fn wrong_when(text: &str, or: &str) -> String {
    match when::is_impossible_date(text) {
        true => "there is no such date".into(),
        false => format!("expected {}{or}", When::TAKES),
    }
}

/// Opens the database for a command that only reads: the file or its folder may be read-only.
pub fn open_store(config: &Config) -> Result<Store> {
    Store::open(&config.database, Access::Read).map_err(|error| checks::store_failed(config, error))
}

/// Opens the database for `serve`, or for a command that changes something.
pub fn open_to_change(config: &Config, access: Access, by: &Actor) -> Result<Store> {
    if access.may_create() {
        check_time_zone(config)?;
    }
    let store = Store::open(&config.database, access)
        .map_err(|error| checks::store_failed(config, error))?;
    if store.database.is_new {
        let name = config.database_name();
        match access {
            Access::Serve => log::warn!(
                "{name} is a new, empty database: no key works yet. If it should not be, correct database \
                 (ADRIATICUM_DATABASE); else create a key: adriaticum keys create NAME"
            ),
            _ => note(format_args!("Created the database {name}.")),
        }
    }
    if access != Access::Serve && !store.database.is_new {
        return Ok(store);
    }
    let (setting, host) = (config.time_zone.as_deref(), Path::new(ZONEINFO));
    time_zone::settle(&store.database, setting, host, by)
        .map(|zone| store.in_zone(zone))
        .map_err(|problem| checks::database_failed(config, problem))
}

/// Refuses a time zone that is not installed, before a file is made that should be of it.
pub fn check_time_zone(config: &Config) -> Result<()> {
    let is_missing = config.database.file().is_some_and(|file| !file.exists());
    match config.time_zone.as_deref().filter(|_| is_missing) {
        Some(name) => Rules::installed(Path::new(ZONEINFO), name).map(drop),
        None => Ok(()),
    }
}
