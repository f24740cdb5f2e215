//! Runs the command, and turns its result into an exit code.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    adriaticum::cli::main()
}
