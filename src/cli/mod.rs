//! The commands, a file each: its help and what it does.

mod args;
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
use std::process::ExitCode;

use self::args::{Args, missing, quoted};
use crate::checks;
use crate::config::{Config, ConfigError};
use crate::logging;
use crate::store::{Access, Store, StoreError};
use crate::text::{may_hold_a_secret, nearest};

/// The words of a command and its arguments, a summary, the help of its group, and the function that runs it.
type Command = (&'static str, &'static str, &'static str, fn(Args) -> Result<(), CliError>);

const COMMANDS: [Command; 19] = [
    ("serve", "Run the service until SIGTERM or SIGINT", serve::HELP, serve::run),
    ("keys create NAME", "Create an API key and print its secret, once", keys::HELP, keys::create),
    ("keys list", "List the keys", keys::HELP, keys::list),
    ("keys rename ID NAME", "Rename a key", keys::HELP, keys::rename),
    ("keys revoke ID", "Revoke a key permanently", keys::HELP, keys::revoke),
    ("keys set ID", "Change a key's permissions, expiry, concurrency or budget", keys::HELP, keys::set),
    ("usage", "Show the requests and tokens of the ledger", usage::HELP, usage::run),
    ("usage show ID", "Show one request", usage::HELP, usage::show),
    ("usage verify", "Find rows and sums that were changed, deleted or inserted", usage::HELP, verify::run),
    ("search add PATH...", "Add files and folders to the document index", search::HELP, search::add),
    ("search list", "List the documents", search::HELP, search::list),
    ("search remove ID", "Remove a document, by its ID or its path", search::HELP, search::remove),
    ("search query WORDS", "Show what the index finds", search::HELP, search::query),
    ("console password", "Set the console's password", console::HELP, console::set_password),
    ("audit", "Show who changed what: keys, password, settings, sign-ins", audit::HELP, audit::run),
    ("backup FILE", "Make a consistent copy of the database while it is used", backup::HELP, backup::run),
    (
        "restore FILE",
        "Replace the database with a backup, and list what that undoes",
        restore::HELP,
        restore::run,
    ),
    ("move", "Copy a SQLite database to PostgreSQL, and verify the copy", moving::HELP, moving::run),
    ("check", "Test every part that a completion needs", check::HELP, check::run),
];

fn help() -> String {
    let commands = COMMANDS.map(|(usage, summary, ..)| format!("  {usage:<20}  {summary}\n")).concat();
    format!(
        "\
A chat completions API in front of an inference runtime.

Usage: adriaticum [--config FILE] COMMAND

Commands:
{commands}
Options:
  --config FILE         Read the configuration from this file
  --help                Print help; after a command, help on that command. Also -h, and adriaticum help COMMAND
  --version             Print the version; also -V
"
    )
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
    let mut group = String::new();
    let (code, message) = match run(&mut group) {
        Ok(()) => return ExitCode::SUCCESS,
        Err(CliError::Failed(message)) => (1, message),
        Err(CliError::Config(message)) => (2, message),
        Err(CliError::Usage(message)) => (2, format!("{message}\nTry adriaticum {group}--help.")),
    };
    let as_root = if message.contains(DENIED) && group != "serve " { as_root() } else { None };
    let as_root = as_root.map(|command| format!("\nAs root: {command}")).unwrap_or_default();
    logging::print_error(format_args!("adriaticum: {message}{as_root}"));
    ExitCode::from(code)
}

/// Returns the command line with sudo, for a user who was denied something.
fn as_root() -> Option<String> {
    if rustix::process::geteuid().is_root() {
        return None;
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    let word = |word: OsString| match word.to_string_lossy() {
        text if may_hold_a_secret(&text) => "'…'".into(),
        text if !text.is_empty() && text.chars().all(plain) => text.into_owned(),
        text => format!("'{}'", text.replace('\'', r"'\''")),
    };
    let line: Vec<String> = env::args_os().map(word).collect();
    // sudo removes variables that are not named.
    let variables: Vec<String> = env::vars_os()
        .filter_map(|(name, _)| name.into_string().ok())
        .filter(|name| name.starts_with("ADRIATICUM_"))
        .collect();
    let keep =
        if variables.is_empty() { String::new() } else { format!("--preserve-env={} ", variables.join(",")) };
    Some(format!("sudo {keep}{}", line.join(" ")))
}

/// Sets `group` to the first word of the command, with a space, as soon as it is known: for the advice after a wrong usage.
fn run(group: &mut String) -> Result<(), CliError> {
    let mut args = Args::from_env(help())?;
    let first = args.next_word()?.ok_or_else(|| missing("a command"))?;
    let in_group = |command: &&Command| name(command).split(' ').next() == Some(&first);
    let members: Vec<&Command> = COMMANDS.iter().filter(in_group).collect();
    let (_, _, help, _) = members.first().ok_or_else(|| no_command("", &first))?;
    args.expect(&first, help)?;
    *group = first.clone() + " ";
    let find = |words: &str| members.iter().find(|command| name(command) == words);
    let mut command = find(&first);
    let is_whole = command.is_some() && members.len() == 1;
    if !is_whole && let Some(second) = args.next_word()? {
        let words = format!("{group}{second}");
        command = Some(find(&words).ok_or_else(|| no_command(group, &second))?);
        args.expect(&words, help)?;
    }
    let (.., run) = command.ok_or_else(|| {
        let seconds: Vec<&str> = members.iter().map(|command| &name(command)[group.len()..]).collect();
        let list = seconds.join(", ");
        missing(&list.rsplit_once(", ").map_or(list.clone(), |(others, last)| format!("{others} or {last}")))
    })?;
    run(args)
}

/// The words of a command, without its arguments.
fn name((usage, ..): &Command) -> &'static str {
    usage.trim_end_matches(|c: char| !c.is_ascii_lowercase())
}

fn no_command(group: &str, word: &str) -> CliError {
    let known = COMMANDS.iter().filter_map(|command| name(command).strip_prefix(group)?.split(' ').next());
    let meant = nearest(word, known).map(|meant| format!(" Did you mean adriaticum {group}{meant}?"));
    let command = quoted(&format!("{group}{word}"));
    CliError::Usage(format!("there is no command {command}.{}", meant.unwrap_or_default()))
}

fn open_store(config: &Config) -> Result<Store, CliError> {
    open_with(config, Access::Existing)
}

/// For a command that only reads: the file or its folder may be read-only.
fn open_to_read(config: &Config) -> Result<Store, CliError> {
    open_with(config, Access::Read)
}

fn open_with(config: &Config, access: Access) -> Result<Store, CliError> {
    let store = Store::open(&config.database, access)
        .map_err(|error| CliError::Failed(checks::store_failed(config, &error)))?;
    if store.is_new() {
        let name = config.database_name();
        match access {
            Access::Serve => log::warn!(
                "{name} is a new, empty database: no key works yet. If it should not be, correct database \
                 (ADRIATICUM_DATABASE); else create a key: adriaticum keys create NAME"
            ),
            _ => eprintln!("Created the database {name}."),
        }
    }
    Ok(store)
}

fn failed<E: Display>(part: impl Display) -> impl Fn(E) -> CliError {
    move |error| CliError::Failed(format!("{part}: {error}."))
}

/// Prints to standard output. A reader that stops early, such as `head`, is not an error.
fn print(text: &str) -> Result<(), CliError> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(failed("standard output")(error)),
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

impl From<StoreError> for CliError {
    fn from(error: StoreError) -> Self {
        failed("the database")(error)
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
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_usage_lines_of_a_help_have_the_options_that_it_explains() {
        for (usage, _, help, _) in COMMANDS {
            let explained: BTreeSet<(&str, bool)> = help
                .lines()
                .filter_map(|line| line.strip_prefix("  --")?.split_once(' '))
                .map(|(name, rest)| (name, rest.starts_with(|c: char| c.is_ascii_uppercase())))
                .collect();
            let of_group = COMMANDS.iter().filter(|(_, _, other, _)| *other == help);
            let accepted: BTreeSet<(&str, bool)> =
                of_group.flat_map(|command| args::options(name(command), help)).collect();
            assert_eq!(accepted, explained, "{usage}");
        }
        assert_eq!(args::options("keys list", keys::HELP), [("state", true), ("json", false)]);
        assert_eq!(args::options("keys revoke", keys::HELP), []);
        assert_eq!(args::options("keys", keys::HELP), []);
    }
}
