//! `console password`: sets the operator's password.

use std::io::{self, IsTerminal, Write};

use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};

use super::shared::{about, open_to_change};
use crate::audit::Actor;
use crate::config::Config;
use crate::console::password;
use crate::database::{Access, Problem, Result};

/// Set the console's password
#[derive(clap::Subcommand)]
pub(super) enum ConsoleCommand {
    /// Set the console's password, and end all of its sessions
    ///
    /// The password is asked for twice on the terminal, without an echo. If standard input is not a
    /// terminal, its first line is the password. It has at least 12 characters.
    Password,
}

pub(super) fn set_password(config: &Config, by: &Actor) -> Result<()> {
    let store = open_to_change(config, Access::Create, by)?;
    let text = read_secret("New password for the console: ")?;
    password::check(&text).map_err(Problem::other)?;
    if io::stdin().is_terminal() && read_secret("Repeat it: ")? != text {
        return Err(Problem::other(
            "the two passwords differ. Nothing was changed",
        ));
    }
    password::set(&store, password::hash(&text), by)?;
    let database = config.database_name();
    eprintln!("The password is set in {database}. All console sessions have ended: sign in again.");
    Ok(())
}

/// Asks on the terminal; reads the first line of standard input if that is none.
pub(super) fn read_secret(question: &str) -> Result<String> {
    if io::stdin().is_terminal() {
        ask(question).map_err(about("the terminal"))
    } else {
        read_line().map_err(about("standard input"))
    }
}

/// Asks on the terminal, without echo.
fn ask(question: &str) -> io::Result<String> {
    let input = io::stdin();
    let visible = tcgetattr(&input)?;
    let mut hidden = visible.clone();
    hidden.local_modes.remove(LocalModes::ECHO);
    hidden.local_modes.insert(LocalModes::ECHONL);
    eprint!("{question}");
    let _ = io::stderr().flush();
    tcsetattr(&input, OptionalActions::Flush, &hidden)?;
    let line = read_line();
    tcsetattr(&input, OptionalActions::Flush, &visible)?;
    line
}

/// The first line of standard input, without its line end.
fn read_line() -> io::Result<String> {
    let mut line = String::new();
    io::stdin().read_line(&mut line)?;
    Ok(line.trim_end_matches(['\r', '\n']).to_owned())
}
