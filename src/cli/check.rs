//! `check`: tries every part that a completion needs, and says what to do about those that fail.

use std::borrow::Cow;
use std::time::Instant;

use super::{Args, CliError, open_store, print};
use crate::config::Config;
use crate::runtime::{Chat, Message, Role, Runtimes};

const HELP: &str = "\
Tries every part that a completion needs: configuration, database, runtime. Says which fails and what to do.
It leaves no row in the ledger.

Usage: adriaticum check
";

/// What came of trying one part.
struct Finding {
    part: &'static str,
    good: bool,
    told: String,
}

pub fn run(mut args: Args) -> Result<(), CliError> {
    if args.words(HELP, [], &mut [])?.is_none() {
        return Ok(());
    }
    let findings = match args.config() {
        Ok(config) => {
            let mut findings = vec![configuration(&config), database(&config)];
            findings.extend(runtimes(&config));
            findings
        }
        Err(error) => vec![Finding { part: "configuration", good: false, told: format!("{error:?}") }],
    };
    let mut text = String::new();
    for Finding { part, good, told } in &findings {
        text += &format!("{:<4}  {part:<13}  {told}\n", if *good { "ok" } else { "FAIL" });
    }
    print(&text)?;
    match findings.iter().filter(|finding| !finding.good).count() {
        0 => Ok(()),
        1 => Err(CliError::Failed("one part fails.".into())),
        count => Err(CliError::Failed(format!("{count} parts fail."))),
    }
}

fn configuration(config: &Config) -> Finding {
    let mut told = match &config.file {
        Some(file) => format!("read from {}", file.display()),
        None => "there is no file: defaults and the environment".into(),
    };
    if !config.unknown_variables.is_empty() {
        told += &format!("; unknown variables: {}", config.unknown_variables.join(", "));
    }
    Finding { part: "configuration", good: true, told }
}

fn database(config: &Config) -> Finding {
    let path = &config.database;
    let (good, told) = if !path.exists() {
        // It is left to the service to make it: made here, it might belong to the wrong user.
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        match folder.is_none_or(|folder| folder.is_dir()) {
            true => (true, format!("{}: not there yet, the first start makes it", path.display())),
            false => {
                (false, format!("{}: its folder does not exist. Make it, or change database", path.display()))
            }
        }
    } else {
        match open_store(config).and_then(|store| Ok(store.check()?)) {
            Ok(()) => (true, format!("{}: sound, and takes a write", path.display())),
            Err(error) => (false, format!("{error:?}")),
        }
    };
    Finding { part: "database", good, told }
}

fn runtimes(config: &Config) -> Vec<Finding> {
    let findings: Vec<Finding> =
        Runtimes::each(&config.runtime).map(|(url, runtime)| try_one(url, &runtime)).collect();
    if findings.is_empty() {
        let told = "none is configured. Set runtime.url (ADRIATICUM_RUNTIME_URL) to the base address of one, \
                    such as http://127.0.0.1:8081/v1";
        return vec![Finding { part: "runtime", good: false, told: told.into() }];
    }
    findings
}

/// Asks for one token.
fn try_one(url: &str, runtime: &Runtimes) -> Finding {
    let chat = Chat {
        messages: vec![Message { role: Role::User, content: Cow::Borrowed("Say yes.") }],
        temperature: 0.0,
        max_tokens: 1,
    };
    let asked = Instant::now();
    let (good, told) = match runtime.complete(&chat) {
        Ok(generated) => {
            let usage = match generated.tokens.total_tokens {
                Some(_) => "reports usage",
                None => "reports no usage, so the ledger's figures will be null",
            };
            (true, format!("{url}: answers in {} ms, {usage}", asked.elapsed().as_millis()))
        }
        Err((_, error)) => (
            false,
            format!(
                "{url}: {error}. Is it running, and is this its base address? The setting is runtime.url"
            ),
        ),
    };
    Finding { part: "runtime", good, told }
}
