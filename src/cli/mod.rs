//! The commands, a file each: its options and what it does. `clap` makes the help, the manual pages
//! and the completions from the same definitions.

mod audit;
mod backup;
mod check;
mod console;
mod error;
mod keys;
mod moving;
mod open_store;
mod output;
mod parsers;
mod process_limits;
mod restore;
mod search;
mod serve;
mod sockets;
mod sudo;
mod text_table;
mod usage;

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgAction, CommandFactory, Parser, Subcommand};

use self::error::CliError;
use self::output::print;
use self::sudo::with_sudo;
use crate::config::Config;
use crate::logging;
use crate::text::may_hold_a_secret;

/// A chat completions API in front of an inference runtime
///
/// It checks every request, calls the runtime, writes the usage to the ledger, and sends the
/// completion. adriaticum.toml(5) describes its settings.
///
/// If it is installed as a service, run the commands as root or as the service's user (sudo -u
/// adriaticum adriaticum keys list). They can be used while the service runs.
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

/// Facts that `clap` can't know; the manual page has them too.
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
    /// Then it accepts no new connections and completes the requests in progress; a second signal
    /// ends it at once. SIGHUP reloads the log level and the certificate.
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

/// Exit codes: 0 success, 1 failure, 2 wrong usage of the command line or of a setting.
pub fn main() -> ExitCode {
    process_limits::forbid_core_files();
    let _flush = logging::FlushAtEnd;
    let line = match CommandLine::try_parse().and_then(refuse_second_config) {
        Ok(line) => line,
        Err(error) => return print_parse_error(error),
    };
    let is_service = matches!(line.command, Command::Serve);
    let Err(error) = run(line) else {
        return ExitCode::SUCCESS;
    };
    let is_root = rustix::process::geteuid().is_root();
    let as_root = if error.is_denied && !is_service && !is_root {
        format!("\nAs root: {}", with_sudo(""))
    } else {
        String::new()
    };
    logging::print_error(&format!("adriaticum: {error}{as_root}"));
    ExitCode::from(error.code)
}

fn run(
    CommandLine {
        config, command, ..
    }: CommandLine,
) -> Result<(), CliError> {
    let load = || Config::load(config.as_deref());
    match command {
        // The service takes signals from its start on.
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

/// Prints help, the version, or what is wrong with the command line. Words that may hold a secret
/// are left out: the URI of a database may be in the wrong place.
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
    logging::print_error(text.trim_end());
    ExitCode::from(2)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_definition_is_consistent() {
        super::definition().debug_assert();
    }
}
