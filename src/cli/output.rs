//! Prints the results of commands.

use std::fmt;
use std::io::{self, Write};

use super::error::{CliError, failed};

/// Prints a line to standard error. If it is closed, the work still continues.
pub fn note(text: fmt::Arguments) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Prints to standard output. A reader that stops early, such as `head`, is not an error.
pub fn print(text: &str) -> Result<(), CliError> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(failed("standard output")(error))
        }
        _ => Ok(()),
    }
}

pub fn print_json(value: &impl serde::Serialize) -> Result<(), CliError> {
    let text = serde_json::to_string_pretty(value).expect("the value should have a JSON form");
    print(&(text + "\n"))
}
