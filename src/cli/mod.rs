//! The commands, a file each: its arguments and what it does.

mod audit;
mod backup;
mod check;
mod console;
mod keys;
mod moving;
mod restore;
mod search;
mod serve;
mod text_table;
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
use crate::store::{Access, Store, StoreError};
use crate::text::{may_hold_a_secret, nearest};
use crate::when;

const HELP: &str = "\
A chat completions API in front of an inference runtime.

Usage: adriaticum [--config FILE] COMMAND

Commands:
  serve                 Run the service until SIGTERM or SIGINT
  keys create NAME      Create an API key and print its secret, once
  keys list             List the keys
  keys rename ID NAME   Rename a key
  keys revoke ID        Revoke a key permanently
  keys set ID           Change a key's permissions, expiry, concurrency or budget
  usage                 Show the requests and tokens of the ledger
  usage show ID         Show one request
  usage verify          Find rows and sums that were changed, deleted or inserted
  search add PATH...    Add files and folders to the document index
  search list           List the documents
  search remove ID      Remove a document, by its ID or its path
  search query WORDS    Show what the index finds
  console password      Set the console's password
  audit                 Show who changed what: keys, password, settings, sign-ins
  backup FILE           Make a consistent copy of the database while it is used
  restore FILE          Put a backup in the place of the database, and list what that undoes
  move                  Copy everything from a SQLite database to PostgreSQL, and verify it
  check                 Test every part that a completion needs

Options:
  --config FILE         Read the configuration from this file
  --help                Print help; after a command, help on that command. Also -h, and adriaticum help COMMAND
  --version             Print the version; also -V
";

/// A command: reads the rest of the command line, and does what it says.
type Run = fn(Args) -> Result<(), CliError>;

const COMMANDS: [(&str, Run); 10] = [
    ("serve", serve::run),
    ("keys", keys::run),
    ("usage", usage::run),
    ("search", search::run),
    ("audit", audit::run),
    ("backup", backup::run),
    ("restore", restore::run),
    ("check", check::run),
    ("console", console::run),
    ("move", moving::run),
];

/// Why a command failed.
enum CliError {
    /// The command line is wrong: exit code 2.
    Usage(String),
    /// A setting is wrong: exit code 2 as well. Trying again does not help, which a supervisor should know.
    Config(String),
    /// Exit code 1.
    Failed(String),
}

/// What messages have if the system denied something (EACCES).
const DENIED: &str = "Permission denied (os error 13)";

/// Exit codes: 0 success, 1 failure, 2 wrong usage of the command line or of a setting.
pub fn main() -> ExitCode {
    let _flush = logging::FlushAtEnd;
    let mut command = "";
    let (code, message) = match run(&mut command) {
        Ok(()) => return ExitCode::SUCCESS,
        Err(CliError::Failed(message)) => (1, message),
        Err(CliError::Config(message)) => (2, message),
        Err(CliError::Usage(message)) => {
            let space = if command.is_empty() { "" } else { " " };
            (2, format!("{message}\nTry adriaticum {command}{space}--help."))
        }
    };
    let as_root =
        as_root(command, &message).map(|command| format!("\nAs root: {command}")).unwrap_or_default();
    logging::complain(format_args!("adriaticum: {message}{as_root}"));
    ExitCode::from(code)
}

/// The command line with sudo, if this user was denied something. Not for `serve`: its user should not be root.
fn as_root(command: &str, message: &str) -> Option<String> {
    if !message.contains(DENIED) || command == "serve" || rustix::process::geteuid().is_root() {
        return None;
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    let word = |word: OsString| match word.to_string_lossy() {
        text if may_hold_a_secret(&text) => "'…'".into(),
        text if !text.is_empty() && text.chars().all(plain) => text.into_owned(),
        text => format!("'{}'", text.replace('\'', r"'\''")),
    };
    let line: Vec<String> = env::args_os().map(word).collect();
    // Others are not passed on by sudo.
    let variables: Vec<String> = env::vars_os()
        .filter_map(|(name, _)| name.into_string().ok())
        .filter(|name| name.starts_with("ADRIATICUM_"))
        .collect();
    let keep =
        if variables.is_empty() { String::new() } else { format!("--preserve-env={} ", variables.join(",")) };
    Some(format!("sudo {keep}{}", line.join(" ")))
}

/// Sets `command` as soon as it is known, for the advice after a wrong usage.
fn run(command: &mut &str) -> Result<(), CliError> {
    let mut args = Args::from_env()?;
    let word = args.command(HELP, "a command")?;
    let (name, run) =
        COMMANDS.into_iter().find(|(name, _)| *name == word).ok_or_else(|| no_command("", &word))?;
    *command = name;
    run(args)
}

/// `group` is the first word of a command of two, with a space, or empty.
fn no_command(group: &str, word: &str) -> CliError {
    let known =
        HELP.lines().filter_map(|line| line.strip_prefix("  ")?.strip_prefix(group)?.split(' ').next());
    let meant = nearest(word, known).map(|meant| format!(" Did you mean adriaticum {group}{meant}?"));
    let command = quoted(&format!("{group}{word}"));
    CliError::Usage(format!("there is no command {command}.{}", meant.unwrap_or_default()))
}

/// A word of the command line, for a message. The URI of a database may be where no word is expected.
fn quoted(word: &str) -> String {
    if may_hold_a_secret(word) { "\"…\"".into() } else { format!("{word:?}") }
}

/// The command line, without `--config`.
struct Args {
    parser: Parser,
    config: Option<PathBuf>,
}

/// An option of a command: a flag, or one with a value. The error says which values are accepted.
enum Opt<'a> {
    Flag(&'static str, &'a mut bool),
    Value(&'static str, &'a mut dyn FnMut(&str) -> Result<(), String>),
}

impl Opt<'_> {
    fn name(&self) -> &'static str {
        match self {
            Self::Flag(name, _) | Self::Value(name, _) => name,
        }
    }
}

fn wrong_value(option: &str, value: &str, accepted: &str) -> CliError {
    let expected = match when::is_impossible_date(value) {
        true => "there is no such date".into(),
        false => format!("expected {accepted}"),
    };
    CliError::Usage(format!("--{option} {}: {expected}.", quoted(value)))
}

impl Args {
    /// Takes `--config` out, wherever it is before a `--`. `help keys` becomes `keys --help`.
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
        if rest.first().is_some_and(|word| word == "help") {
            rest.remove(0);
            rest.push("--help".into());
        }
        Ok(Self { parser: Parser::from_args(rest), config })
    }

    /// Takes options up to the next word that is not an option, and returns that word; `None` at the end. If help or the
    /// version is asked for, prints it and ends the process.
    fn next_word(&mut self, help: &str, options: &mut [Opt]) -> Result<Option<String>, CliError> {
        while let Some(arg) = self.parser.next()? {
            let name = match arg {
                Arg::Value(word) => return Ok(Some(word.string()?)),
                Arg::Long("help") | Arg::Short('h') => {
                    print(help)?;
                    process::exit(0);
                }
                Arg::Long("version") | Arg::Short('V') => {
                    print(concat!("adriaticum ", env!("ADRIATICUM_VERSION"), "\n"))?;
                    process::exit(0);
                }
                Arg::Long(name) => name.to_owned(),
                Arg::Short(letter) => return Err(CliError::Usage(format!("there is no option -{letter}."))),
            };
            match options.iter_mut().find(|option| option.name() == name) {
                Some(Opt::Flag(_, given)) => **given = true,
                Some(Opt::Value(_, take)) => {
                    let value = self.parser.value()?.string()?;
                    take(&value).map_err(|accepted| wrong_value(&name, &value, &accepted))?;
                }
                None => {
                    let known = options.iter().map(Opt::name).chain(["config", "help", "version"]);
                    let meant = nearest(&name, known).map(|meant| format!(" Did you mean --{meant}?"));
                    let meant = meant.unwrap_or_default();
                    return Err(CliError::Usage(format!("there is no option --{name} here.{meant}")));
                }
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
                return Err(CliError::Usage(format!("{} is one argument too many.", quoted(&word))));
            }
            words.push(word);
        }
        words.try_into().map_err(|words: Vec<String>| missing(names[words.len()]))
    }

    /// Takes the options and all words; `if_none` is the error if there are none.
    fn all_words(&mut self, help: &str, if_none: &str, options: &mut [Opt]) -> Result<Vec<String>, CliError> {
        let mut words = Vec::new();
        while let Some(word) = self.next_word(help, options)? {
            words.push(word);
        }
        if words.is_empty() { Err(CliError::Usage(if_none.into())) } else { Ok(words) }
    }

    fn config(&self) -> Result<Config, CliError> {
        Ok(Config::load(self.config.as_deref())?)
    }
}

fn missing(name: &str) -> CliError {
    CliError::Usage(format!("{name} is missing."))
}

/// Opens a database that has to exist.
fn open_store(config: &Config) -> Result<Store, CliError> {
    open_with(config, Access::Existing)
}

fn open_with(config: &Config, access: Access) -> Result<Store, CliError> {
    Store::open(&config.database, access)
        .map_err(|error| CliError::Failed(checks::store_failed(config, &error)))
}

fn read_certificate(files: &TlsFiles) -> Result<Certificate, CliError> {
    checks::read_certificate(files).map_err(CliError::Config)
}

/// Prints to standard output. A reader that stops early, such as `head`, is not an error.
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
    let text = serde_json::to_string_pretty(value).expect("the value should have a JSON form");
    print(&(text + "\n"))
}

impl From<lexopt::Error> for CliError {
    fn from(error: lexopt::Error) -> Self {
        match error.to_string() {
            text if may_hold_a_secret(&text) => {
                Self::Usage("an argument is not expected or not UTF-8.".into())
            }
            text => Self::Usage(format!("{text}.")),
        }
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
