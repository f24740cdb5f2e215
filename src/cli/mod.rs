//! The commands, a file each: its arguments and what it does.

mod audit;
mod backup;
mod check;
mod console;
mod keys;
mod moving;
mod search;
mod serve;
mod table;
mod usage;
mod verify;

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::{self, ExitCode};
use std::{env, fmt};

use lexopt::{Arg, Parser, ValueExt};

use crate::checks;
use crate::config::{Config, ConfigError, TlsFiles};
use crate::listener::Certificate;
use crate::logging;
use crate::store::{IfMissing, Store, StoreError};

const HELP: &str = "\
A chat completions API in front of an inference runtime.

Usage: adriaticum [--config FILE] COMMAND

Commands:
  serve                 Run the service until SIGTERM or SIGINT
  keys create NAME      Make an API key and print its secret, once
  keys list             List the keys
  keys rename ID NAME   Give a key another name
  keys revoke ID        Refuse a key from now on, for good
  keys set ID           Change a key's permissions, its end, or how many requests it may have at once
  usage                 Sum up requests and tokens
  usage show ID         Show one request
  usage verify          Look for rows that were changed, deleted or inserted
  search add PATH...    Add files and folders to the index of documents that Search can use
  search list           List the documents
  search remove ID      Remove a document
  search query WORDS    Tell what the index finds
  console password      Set the password of the console
  audit                 Tell who changed what: keys, password, settings, sign-ins
  backup FILE           Make a consistent copy of the database while it is used
  move                  Move everything from a SQLite database to a PostgreSQL database
  check                 Try every part that a completion needs

Options:
  --config FILE         Read the configuration from this file
  --help                Tell more; after a command, about it
  --version             Print the version
";

/// Why a command did not do what it was asked to.
enum CliError {
    /// The command line is wrong: exit code 2.
    Usage(String),
    /// A setting is wrong: exit code 2 as well. Trying again does not help, which a supervisor should know.
    Config(String),
    /// It went wrong: exit code 1.
    Failed(String),
}

/// Exit codes: 0 done, 1 failed, 2 wrong use, of the command line or of a setting.
pub fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(CliError::Failed(message)) => {
            logging::complain(format_args!("adriaticum: {message}"));
            ExitCode::from(1)
        }
        Err(CliError::Usage(message)) => {
            logging::complain(format_args!("adriaticum: {message}\nTry adriaticum --help."));
            ExitCode::from(2)
        }
        Err(CliError::Config(message)) => {
            logging::complain(format_args!("adriaticum: {message}"));
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<(), CliError> {
    let mut args = Args::from_env()?;
    match args.command(HELP, "a command")?.as_str() {
        "serve" => serve::run(args),
        "keys" => keys::run(args),
        "usage" => usage::run(args),
        "search" => search::run(args),
        "backup" => backup::run(args),
        "audit" => audit::run(args),
        "check" => check::run(args),
        "console" => console::run(args),
        "move" => moving::run(args),
        command => Err(no_command("", command)),
    }
}

fn no_command(group: &str, word: &str) -> CliError {
    CliError::Usage(format!("there is no command {group}{word:?}."))
}

/// The command line, without the global options.
struct Args {
    parser: Parser,
    config: Option<PathBuf>,
}

/// An option of a command: its name, and what becomes of its value; without one, it is a flag.
enum Opt<'a> {
    Flag(&'static str, &'a mut bool),
    Value(&'static str, &'a mut dyn FnMut(&str) -> Result<(), String>),
}

impl Args {
    /// Takes `--config` out, wherever it stands before a `--`.
    fn from_env() -> Result<Self, CliError> {
        let mut config = None;
        let mut rest: Vec<OsString> = Vec::new();
        let mut words = env::args_os().skip(1);
        while let Some(word) = words.next() {
            if word == "--" {
                rest.push(word);
                rest.extend(words.by_ref());
            } else if word == "--config" {
                let path =
                    words.next().ok_or(CliError::Usage("--config takes the path of a file.".into()))?;
                config = Some(path.into());
            } else if let Some(path) = word.to_str().and_then(|word| word.strip_prefix("--config=")) {
                config = Some(path.into());
            } else {
                rest.push(word);
            }
        }
        Ok(Self { parser: Parser::from_args(rest), config })
    }

    /// The next word that is no option, after the options before it were taken. Returns `None` at the end. If help
    /// or the version is asked for, prints it and ends the process.
    fn next_word(&mut self, help: &str, options: &mut [Opt]) -> Result<Option<String>, CliError> {
        while let Some(arg) = self.parser.next()? {
            let name = match arg {
                Arg::Value(word) => return Ok(Some(word.string()?)),
                Arg::Long("help") | Arg::Short('h') => {
                    print(help)?;
                    process::exit(0);
                }
                Arg::Long("version") => {
                    print(concat!("adriaticum ", env!("CARGO_PKG_VERSION"), "\n"))?;
                    process::exit(0);
                }
                Arg::Long(name) => name.to_owned(),
                Arg::Short(letter) => return Err(CliError::Usage(format!("there is no option -{letter}."))),
            };
            let option = options.iter_mut().find(|option| match option {
                Opt::Flag(known, _) | Opt::Value(known, _) => *known == name,
            });
            match option {
                Some(Opt::Flag(_, given)) => **given = true,
                Some(Opt::Value(_, take)) => {
                    let value = self.parser.value()?.string()?;
                    take(&value).map_err(|takes| CliError::Usage(format!("--{name} takes {takes}.")))?;
                }
                None => return Err(CliError::Usage(format!("there is no option --{name} here."))),
            }
        }
        Ok(None)
    }

    /// The word that says what to do.
    fn command(&mut self, help: &str, name: &str) -> Result<String, CliError> {
        self.next_word(help, &mut [])?.ok_or_else(|| missing(name))
    }

    /// Takes the options, and exactly as many words as there are names for them.
    fn words<const N: usize>(
        &mut self,
        help: &str,
        names: [&str; N],
        options: &mut [Opt],
    ) -> Result<[String; N], CliError> {
        let mut words = Vec::new();
        while let Some(word) = self.next_word(help, options)? {
            if words.len() == N {
                return Err(CliError::Usage(format!("{word:?} is one word too many.")));
            }
            words.push(word);
        }
        words.try_into().map_err(|words: Vec<String>| missing(names[words.len()]))
    }

    /// Takes all words; `told` says that there is none.
    fn all_words(&mut self, help: &str, told: &str) -> Result<Vec<String>, CliError> {
        let mut words = Vec::new();
        while let Some(word) = self.next_word(help, &mut [])? {
            words.push(word);
        }
        if words.is_empty() { Err(CliError::Usage(told.into())) } else { Ok(words) }
    }

    fn config(&self) -> Result<Config, CliError> {
        Ok(Config::load(self.config.as_deref())?)
    }
}

fn missing(name: &str) -> CliError {
    CliError::Usage(format!("{name} is missing."))
}

/// Opens the database that there has to be.
fn open_store(config: &Config) -> Result<Store, CliError> {
    open_or(config, IfMissing::Fail)
}

fn open_or(config: &Config, if_missing: IfMissing) -> Result<Store, CliError> {
    Store::open(&config.database, config.workers, if_missing)
        .map_err(|error| CliError::Failed(checks::database_failed(config, &error)))
}

fn read_certificate(files: &TlsFiles) -> Result<Certificate, CliError> {
    checks::read_certificate(files).map_err(CliError::Config)
}

/// Prints to standard output. A reader that stops early, as `head` does, is no error.
fn print(text: &str) -> Result<(), CliError> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(CliError::Failed(format!("standard output: {error}.")))
        }
        _ => Ok(()),
    }
}

/// Prints a value as JSON, for programs and for people.
fn print_json(value: &impl serde::Serialize) -> Result<(), CliError> {
    let text = serde_json::to_string_pretty(value).expect("what is printed should have its JSON");
    print(&(text + "\n"))
}

impl From<lexopt::Error> for CliError {
    fn from(error: lexopt::Error) -> Self {
        Self::Usage(format!("{error}."))
    }
}

impl From<ConfigError> for CliError {
    fn from(error: ConfigError) -> Self {
        Self::Config(error.to_string())
    }
}

impl From<StoreError> for CliError {
    fn from(error: StoreError) -> Self {
        Self::Failed(format!("the database: {error}."))
    }
}

impl fmt::Debug for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(message) | Self::Config(message) | Self::Failed(message) => f.write_str(message),
        }
    }
}
