//! The commands, a file each: its options and what it does. `clap` makes the help, the manual pages and the completions from the
//! same definitions.

mod audit;
mod backup;
mod check;
mod console;
mod keys;
mod moving;
mod process_limits;
mod restore;
mod search;
mod serve;
mod sockets;
mod text_table;
mod usage;
mod verify;

use std::env;
use std::ffi::OsString;
use std::fmt::{self, Display};
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgAction, CommandFactory, Parser, Subcommand};

use crate::checks;
use crate::config::{Config, ConfigError};
use crate::database::{Access, DatabaseError};
use crate::logging;
use crate::progress::Progress;
use crate::store::Store;
use crate::text::{may_hold_a_secret, shell_word};
use crate::when::{self, When};

/// A chat completions API in front of an inference runtime
///
/// It checks every request, calls the runtime, writes the usage to the ledger, and sends the completion. adriaticum.toml(5)
/// describes its settings.
///
/// If it is installed as a service, run the commands as root or as the service's user (sudo -u adriaticum adriaticum keys
/// list). They can be used while the service runs.
#[derive(Parser)]
#[command(name = "adriaticum", version = env!("ADRIATICUM_VERSION"), max_term_width = 100, after_long_help = NOTES)]
#[command(disable_help_flag = true)]
struct CommandLine {
    /// Read the configuration from this file
    ///
    /// The default is the file that ADRIATICUM_CONFIG names, or /etc/adriaticum/adriaticum.toml.
    #[arg(long, global = true, value_name = "FILE", display_order = 100)]
    config: Option<PathBuf>,

    /// Print help
    #[arg(short, long, global = true, action = ArgAction::HelpLong, display_order = 101)]
    help: Option<bool>,

    #[command(subcommand)]
    command: Command,
}

/// What `clap` can't know; the manual page has it too.
const NOTES: &str = "\
Exit status: 0 success, 1 failure, 2 wrong usage of the command line or of a setting.

Environment: ADRIATICUM_CONFIG names the configuration file. Every setting has a variable as well, which overrides the file.

Files: /etc/adriaticum/adriaticum.toml is the configuration, /etc/adriaticum/runtime-key and
/etc/adriaticum/database-password the secrets that the systemd service and the commands read, and
/var/lib/adriaticum/adriaticum.db the keys and the ledger of the service.";

#[derive(Subcommand)]
enum Command {
    /// Run the service until SIGTERM or SIGINT
    ///
    /// Then it accepts no new connections and completes the requests in progress; a second signal ends it at once. SIGHUP reloads
    /// the log level and the certificate.
    Serve,
    #[command(subcommand)]
    Keys(keys::KeysCommand),
    Usage(usage::UsageOptions),
    #[command(subcommand)]
    Search(search::SearchCommand),
    #[command(subcommand)]
    Console(console::ConsoleCommand),
    Audit(audit::AuditOptions),
    Backup(backup::BackupOptions),
    Restore(restore::RestoreOptions),
    Move(moving::MoveOptions),
    Check(check::CheckOptions),
}

/// The definition of the command line, for the manual pages and the completions.
pub fn definition() -> clap::Command {
    CommandLine::command()
}

/// The message of a failed command, by its exit code.
enum CliError {
    /// The command line is wrong: exit code 2.
    Usage(String),
    /// A setting is wrong: exit code 2 as well, so that a supervisor does not try again.
    Config(String),
    /// Exit code 1.
    Failed(String),
}

/// The text of EACCES. Errors reach `main` as text, of the configuration, the database, the index and the checks.
const DENIED: &str = "Permission denied (os error 13)";

/// Exit codes: 0 success, 1 failure, 2 wrong usage of the command line or of a setting.
pub fn main() -> ExitCode {
    process_limits::forbid_core_files();
    let _flush = logging::FlushAtEnd;
    let line = match CommandLine::try_parse().and_then(refuse_second_config) {
        Ok(line) => line,
        Err(error) => return print_parse_error(error),
    };
    let is_service = matches!(line.command, Command::Serve);
    let (code, message) = match run(line) {
        Ok(()) => return ExitCode::SUCCESS,
        Err(CliError::Failed(message)) => (1, message),
        Err(CliError::Config(message)) => (2, message),
        Err(CliError::Usage(message)) => (2, format!("{message}\n\n{TRY_HELP}")),
    };
    let is_root = rustix::process::geteuid().is_root();
    let needs_root = message.contains(DENIED) && !is_service && !is_root;
    let as_root = if needs_root {
        format!("\nAs root: {}", with_sudo(""))
    } else {
        String::new()
    };
    logging::print_error(format_args!("adriaticum: {message}{as_root}"));
    ExitCode::from(code)
}

fn run(
    CommandLine {
        config, command, ..
    }: CommandLine,
) -> Result<(), CliError> {
    let load = || Config::load(config.as_deref());
    match command {
        // It takes signals from its start on.
        Command::Serve => serve::run(config),
        // A wrong configuration is a finding.
        Command::Check(options) => check::run(&options, load()),
        Command::Keys(command) => command.run(&load()?),
        Command::Usage(options) => options.run(&load()?),
        Command::Search(command) => command.run(&load()?),
        Command::Console(console::ConsoleCommand::Password) => console::set_password(&load()?),
        Command::Audit(options) => audit::run(&options, &load()?),
        Command::Backup(options) => backup::run(&options, &load()?),
        Command::Restore(options) => restore::run(&options, &load()?),
        Command::Move(options) => moving::run(&options, &load()?),
    }
}

/// `clap` takes one `--config` before the command and another one after it, and forgets the first.
fn refuse_second_config(line: CommandLine) -> Result<CommandLine, clap::Error> {
    let is_config =
        |word: &OsString| word == "--config" || word.to_string_lossy().starts_with("--config=");
    if env::args_os()
        .take_while(|word| word != "--")
        .filter(is_config)
        .count()
        > 1
    {
        let message = "the argument '--config <FILE>' cannot be used multiple times";
        return Err(definition().error(ErrorKind::ArgumentConflict, message));
    }
    Ok(line)
}

/// Prints help, the version, or what is wrong with the command line. Words that may hold a secret are left out: the URI of a database
/// may be in the wrong place.
fn print_parse_error(mut error: clap::Error) -> ExitCode {
    if !error.use_stderr() {
        return match print(&error.render().to_string()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        };
    }
    let is_secret = |value: &ContextValue| may_hold_a_secret(&value.to_string());
    let secrets: Vec<ContextKind> = error
        .context()
        .filter(|(_, value)| is_secret(value))
        .map(|(kind, _)| kind)
        .collect();
    for kind in secrets {
        error.insert(kind, ContextValue::String("…".into()));
    }
    let text = error.render().to_string();
    // Without a command, it is the help.
    let text = text
        .strip_prefix("error: ")
        .map_or(text.clone(), |message| format!("adriaticum: {message}"));
    logging::print_error(format_args!("{}", text.trim_end()));
    ExitCode::from(2)
}

/// As `clap` ends its messages.
const TRY_HELP: &str = "For more information, try '--help'.";

/// Makes the parser of an option's value, with a message that says what is accepted.
fn expecting<T>(
    accepted: &'static str,
    parse: impl Fn(&str) -> Option<T> + Clone,
) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text| parse(text).ok_or_else(|| format!("expected {accepted}"))
}

fn parse_when(text: &str) -> Result<When, String> {
    When::parse(text).ok_or_else(|| wrong_when(text, ""))
}

fn wrong_when(text: &str, or: &str) -> String {
    match when::is_impossible_date(text) {
        true => "there is no such date".into(),
        false => format!("expected {}{or}", When::TAKES),
    }
}

/// Returns this command line with sudo and its options.
fn with_sudo(options: &str) -> String {
    let word = |word: OsString| match word.to_string_lossy() {
        text if may_hold_a_secret(&text) => "'…'".into(),
        text => shell_word(&text),
    };
    let line: Vec<String> = env::args_os().map(word).collect();
    // sudo removes variables that are not named.
    let variables: Vec<String> = env::vars_os()
        .filter_map(|(name, _)| name.into_string().ok())
        .filter(|name| name.starts_with("ADRIATICUM_"))
        .collect();
    let keep = if variables.is_empty() {
        String::new()
    } else {
        format!("--preserve-env={} ", variables.join(","))
    };
    format!("sudo {options}{keep}{}", line.join(" "))
}

/// For a command that only reads: the file or its folder may be read-only.
fn open_store(config: &Config) -> Result<Store, CliError> {
    open_with(config, Access::Read)
}

fn open_with(config: &Config, access: Access) -> Result<Store, CliError> {
    let store =
        Store::open_with(&config.database, access, &Progress::in_log()).map_err(|error| {
            let message = checks::store_failed(config, &error);
            // The setting names an old database, and a supervisor need not try again.
            let is_setting = matches!(error, DatabaseError::Moved { .. });
            if is_setting {
                CliError::Config(message)
            } else {
                CliError::Failed(message)
            }
        })?;
    if store.database.is_new() {
        let name = config.database_name();
        match access {
            Access::Serve => log::warn!(
                "{name} is a new, empty database: no key works yet. If it should not be, correct database \
                 (ADRIATICUM_DATABASE); else create a key: adriaticum keys create NAME"
            ),
            _ => note(format_args!("Created the database {name}.")),
        }
    }
    Ok(store)
}

fn failed<E: Display>(part: impl Display) -> impl Fn(E) -> CliError {
    move |error| CliError::Failed(format!("{part}: {error}."))
}

/// Prints a line to standard error. If it is closed, the work still continues.
fn note(text: fmt::Arguments) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Prints to standard output. A reader that stops early, such as `head`, is not an error.
fn print(text: &str) -> Result<(), CliError> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(failed("standard output")(error))
        }
        _ => Ok(()),
    }
}

fn print_json(value: &impl serde::Serialize) -> Result<(), CliError> {
    let text = serde_json::to_string_pretty(value).expect("the value should have a JSON form");
    print(&(text + "\n"))
}

impl From<ConfigError> for CliError {
    fn from(error: ConfigError) -> Self {
        Self::Config(error.to_string())
    }
}

impl From<DatabaseError> for CliError {
    fn from(error: DatabaseError) -> Self {
        match error {
            DatabaseError::RowsRemoved(_) => Self::Failed(format!("{error}.")),
            error => failed("the database")(error),
        }
    }
}

impl Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Usage(message) | Self::Config(message) | Self::Failed(message)) = self;
        f.write_str(message)
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_definition_is_consistent() {
        super::definition().debug_assert();
    }
}
