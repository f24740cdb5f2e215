//! Parses the command, runs it, and turns its result into an exit code.

use std::process::ExitCode;

fn main() -> ExitCode {
    adriaticum::cli::main()
}
