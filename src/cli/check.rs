//! `check`: the results of the checks, and an exit code for scripts.

use super::{Args, CliError, Opt, print, print_json};
use crate::checks::{self, Finding, Verdict};
use crate::text::count;

const HELP: &str = "\
Tests every part that a completion needs: configuration, hosts, clock, database, Search, runtime. Names what fails
and how to fix it, and warns about secrets in files that every user can read. It leaves no row in the ledger.

Usage: adriaticum check [--json]

Options:
  --json   Print JSON
";

pub fn run(mut args: Args) -> Result<(), CliError> {
    let mut json = false;
    let [] = args.words(HELP, [], &mut [Opt::Flag("json", &mut json)])?;
    let findings = match args.config() {
        Ok(config) => checks::all(&config),
        Err(error) if json => {
            print_json(&[Finding::fail("configuration", format!("{error:?}"))])?;
            return Err(error);
        }
        Err(error) => return Err(error),
    };
    if json {
        print_json(&findings)?;
    } else {
        print(&findings.iter().map(line).collect::<String>())?;
    }
    match findings.iter().filter(|finding| finding.status == Verdict::Fail).count() {
        0 => Ok(()),
        failed => Err(CliError::Failed(format!("{} failed.", count(failed as i64, "part")))),
    }
}

fn line(Finding { part, status, message }: &Finding) -> String {
    let word = match status {
        Verdict::Ok => "ok",
        Verdict::Warn => "warn",
        Verdict::Fail => "FAIL",
    };
    format!("{word:<4}  {part:<13}  {message}\n")
}
