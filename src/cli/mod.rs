//! The commands, a file for each family: their options and what they do. `clap` makes the help, the manual pages
//! and the completions from the same definitions.

mod check;
mod keys;
mod recovery;
mod serve;
mod shared;
mod usage;

use std::env;
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgAction, CommandFactory, Parser, Subcommand};
use rustix::process::{Resource, Rlimit, setrlimit};

use crate::config::{Config, SecretsNeeded};
use crate::error::{ProblemKind, Result};
use crate::logging;
use crate::text::may_hold_a_secret;

/// A chat completions API in front of an inference runtime
///
/// It checks every request, calls the runtime, writes the usage to the ledger, and sends the
/// completion. adriaticum.toml(5) describes its settings.
///
/// If it is installed as a service, run the commands as root or as the service's user (sudo -u
/// adriaticum adriaticum keys list). Root's commands read the configuration and then become the
/// owner of the database's folder. They can be used while the service runs.
#[derive(Parser)]
#[command(name = "adriaticum", version = crate::VERSION, max_term_width = 100, after_long_help = NOTES)]
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
    Usage(Box<usage::UsageOptions>),
    #[command(subcommand)]
    Search(check::SearchCommand),
    #[command(subcommand)]
    Console(keys::ConsoleCommand),
    Audit(usage::AuditOptions),
    Backup(recovery::BackupOptions),
    Restore(recovery::RestoreOptions),
    Move(recovery::MoveOptions),
    Check(check::CheckOptions),
}

/// The definition of the command line, for the manual pages and the completions.
pub fn definition() -> clap::Command {
    CommandLine::command()
}

/// Exit codes: 0 success, 1 failure, 2 wrong usage of the command line or of a setting.
pub fn main() -> ExitCode {
    forbid_core_files();
    let _flush = logging::FlushAtEnd;
    let line = match CommandLine::try_parse().and_then(refuse_second_config) {
        Ok(line) => line,
        Err(error) => return print_parse_error(error),
    };
    let is_service = matches!(line.command, Command::Serve);
    let Err(problem) = run(line) else {
        return ExitCode::SUCCESS;
    };
    // Those of the configuration are whole sentences, a line each.
    let mut message = format!("adriaticum: {}.", problem.text.trim_end_matches('.'));
    if let Some(advice) = shared::advice_if_denied(&message).filter(|_| !is_service) {
        message += &format!("\n{advice}");
    }
    if problem.kind == ProblemKind::Usage {
        message += "\n\nFor more information, try '--help'.";
    }
    logging::print_error(&message);
    match problem.kind {
        // A supervisor need not try again: with `Moved`, the setting names an old database.
        ProblemKind::Usage | ProblemKind::Setting | ProblemKind::Moved => ExitCode::from(2),
        _ => ExitCode::FAILURE,
    }
}

/// A core file would keep prompts and keys, and outside systemd nothing else prevents it.
fn forbid_core_files() {
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    // A limit can always be lowered.
    let _ = setrlimit(Resource::Core, none);
}

fn run(
    CommandLine {
        config, command, ..
    }: CommandLine,
) -> Result<()> {
    let by = shared::actor();
    let load = |needed| Config::load(config.as_deref(), needed);
    // With the secrets, which only root may be able to read.
    let load_as_owner = |needed| -> Result<Config> {
        let config = load(needed)?;
        shared::become_owner(&config.database)?;
        Ok(config)
    };
    let load_to_open = || load_as_owner(SecretsNeeded::OfDatabase);
    match command {
        // The service takes signals from its start on.
        Command::Serve => serve::run(config.as_deref(), &by),
        // A wrong configuration is a finding.
        Command::Check(options) => check::run(&options, load(SecretsNeeded::All)),
        Command::Keys(command) => command.run(&load_to_open()?, &by),
        Command::Usage(options) => options.run(&load_to_open()?),
        Command::Search(command) => command.run(&load_as_owner(SecretsNeeded::Nothing)?),
        Command::Console(keys::ConsoleCommand::Password) => {
            keys::set_password(&load_to_open()?, &by)
        }
        Command::Audit(options) => usage::audit(&options, &load_to_open()?),
        Command::Backup(options) => options.run(&load(SecretsNeeded::OfDatabase)?),
        Command::Restore(options) => options.run(&load(SecretsNeeded::OfDatabase)?, &by),
        Command::Move(options) => options.run(load),
    }
}

/// `clap` takes one `--config` before the command and another one after it, and forgets the first.
fn refuse_second_config(line: CommandLine) -> Result<CommandLine, clap::Error> {
    let words = env::args_os().take_while(|word| word != "--");
    let is_config = |word: &OsString| word.to_string_lossy().split('=').next() == Some("--config");
    if words.filter(is_config).count() > 1 {
        let message = "the argument '--config <FILE>' cannot be used multiple times";
        return Err(definition().error(ErrorKind::ArgumentConflict, message));
    }
    Ok(line)
}

/// Prints help, the version, or what is wrong with the command line. A word that may be a secret is
/// not repeated: `keys revoke` and `keys rotate` take one, and the URI for `move` may have a password.
fn print_parse_error(mut error: clap::Error) -> ExitCode {
    use ContextKind::{InvalidArg, InvalidSubcommand, InvalidValue};
    for kind in [InvalidArg, InvalidSubcommand, InvalidValue] {
        let word = error.get(kind);
        if word.is_some_and(|word| may_hold_a_secret(&word.to_string())) {
            error.insert(kind, ContextValue::String("…".into()));
        }
    }
    match error.print() {
        // A reader that stops early, such as `head`, is not an error.
        Err(failed) if failed.kind() != io::ErrorKind::BrokenPipe => ExitCode::FAILURE,
        _ => ExitCode::from(error.exit_code() as u8),
    }
}

#[cfg(test)]
mod tests {

    #[test]
    fn the_definition_is_consistent() {
        super::definition().debug_assert();
    }
}
