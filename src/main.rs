//! Parses the command, runs it, and turns what came of it into an exit code.

use std::process::ExitCode;

fn main() -> ExitCode {
    adriaticum::cli::main()
}
