//! The command line: its words, its options, and the errors about them.

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process;

use lexopt::{Arg, Parser, ValueExt};

use super::{CliError, print};
use crate::config::Config;
use crate::text::{may_hold_a_secret, nearest};
use crate::when;

/// The command line, without `--config`.
pub(super) struct Args {
    parser: Parser,
    config: Option<PathBuf>,
    help: String,
    /// The options that the command accepts, and whether each takes a value.
    accepted: Vec<(&'static str, bool)>,
    /// The options that were given. A flag has an empty value.
    given: Vec<(&'static str, String)>,
}

impl Args {
    /// Takes `--config` out, wherever it is before a `--`. `help keys` becomes `keys --help`.
    pub fn from_env(help: String) -> Result<Self, CliError> {
        let mut config = None;
        let mut rest: Vec<OsString> = Vec::new();
        let mut words = env::args_os().skip(1);
        while let Some(word) = words.next() {
            if word == "--" {
                rest.push(word);
                rest.extend(words.by_ref());
            } else if word == "--config" {
                let path =
                    words.next().ok_or(CliError::Usage("--config takes the path of a file.".into()))?;
                config = Some(path.into());
            } else if let Some(path) = word.to_str().and_then(|word| word.strip_prefix("--config=")) {
                config = Some(path.into());
            } else {
                rest.push(word);
            }
        }
        if rest.first().is_some_and(|word| word == "help") {
            rest.remove(0);
            rest.push("--help".into());
        }
        let parser = Parser::from_args(rest);
        Ok(Self { parser, config, help, accepted: Vec::new(), given: Vec::new() })
    }

    /// From now on, accepts the options of this command. Fails if an option before its name is not one of them.
    pub fn expect(&mut self, command: &str, help: &'static str) -> Result<(), CliError> {
        self.accepted = options(command, help);
        self.help = help.to_owned();
        match self.given.iter().find(|(given, _)| !self.accepted.iter().any(|(option, _)| option == given)) {
            Some((given, _)) => Err(CliError::Usage(format!("there is no option --{given} here."))),
            None => Ok(()),
        }
    }

    /// Takes options up to the next word that is not an option, and returns that word; `None` at the end. If help or the
    /// version is asked for, prints it and ends the process.
    pub fn next_word(&mut self) -> Result<Option<String>, CliError> {
        while let Some(arg) = self.parser.next()? {
            let name = match arg {
                Arg::Value(word) => return Ok(Some(word.string()?)),
                Arg::Long("help") | Arg::Short('h') => {
                    print(&self.help)?;
                    process::exit(0);
                }
                Arg::Long("version") | Arg::Short('V') => {
                    print(concat!("adriaticum ", env!("ADRIATICUM_VERSION"), "\n"))?;
                    process::exit(0);
                }
                Arg::Long(name) => name.to_owned(),
                Arg::Short(letter) => return Err(CliError::Usage(format!("there is no option -{letter}."))),
            };
            let Some(&(option, takes_value)) = self.accepted.iter().find(|(option, _)| *option == name)
            else {
                let known = self.accepted.iter().map(|(option, _)| *option);
                let meant = nearest(&name, known.chain(["config", "help", "version"]));
                let meant = meant.map(|meant| format!(" Did you mean --{meant}?")).unwrap_or_default();
                return Err(CliError::Usage(format!("there is no option --{name} here.{meant}")));
            };
            let value = if takes_value { self.parser.value()?.string()? } else { String::new() };
            self.given.push((option, value));
        }
        Ok(None)
    }

    /// Takes the options, and exactly as many words as there are names for them.
    pub fn words<const N: usize>(&mut self, names: [&str; N]) -> Result<[String; N], CliError> {
        let words = self.all_words()?;
        match words.get(N) {
            Some(word) => Err(CliError::Usage(format!("{} is one argument too many.", quoted(word)))),
            None => words.try_into().map_err(|words: Vec<String>| missing(names[words.len()])),
        }
    }

    /// Takes the options and all words.
    pub fn all_words(&mut self) -> Result<Vec<String>, CliError> {
        let mut words = Vec::new();
        while let Some(word) = self.next_word()? {
            words.push(word);
        }
        Ok(words)
    }

    pub fn flag(&self, option: &str) -> bool {
        self.given.iter().any(|(given, _)| *given == option)
    }

    pub fn text(&self, option: &str) -> Option<&str> {
        self.given.iter().rfind(|(given, _)| *given == option).map(|(_, value)| value.as_str())
    }

    /// The value of an option; of several, the last. The error says which values are accepted.
    pub fn value<T>(
        &self,
        option: &str,
        accepted: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Option<T>, CliError> {
        Ok(self.values(option, accepted, parse)?.pop())
    }

    /// All values of an option that may be repeated.
    pub fn values<T>(
        &self,
        option: &str,
        accepted: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Vec<T>, CliError> {
        let given = self.given.iter().filter(|(given, _)| *given == option);
        given.map(|(_, value)| parse(value).ok_or_else(|| wrong_value(option, value, accepted))).collect()
    }

    pub fn config(&self) -> Result<Config, CliError> {
        Ok(Config::load(self.config.as_deref())?)
    }
}

/// Reads the options of a command, and whether each takes a value, from its usage line: the help is the table of options.
pub(super) fn options(command: &str, help: &'static str) -> Vec<(&'static str, bool)> {
    let is_command = |usage: &&str| {
        let rest = usage.strip_prefix(command);
        rest.is_some_and(|rest| !rest.trim_start().starts_with(|c: char| c.is_ascii_lowercase()))
    };
    let usage = help.split("adriaticum ").find(is_command).unwrap_or_default();
    let read = |option: &'static str| {
        let end = option.find(|c: char| !c.is_ascii_lowercase()).unwrap_or(option.len());
        (&option[..end], option[end..].starts_with(' '))
    };
    usage.split("\n\n").next().unwrap_or_default().split("--").skip(1).map(read).collect()
}

fn wrong_value(option: &str, value: &str, accepted: &str) -> CliError {
    let expected = match when::is_impossible_date(value) {
        true => "there is no such date".into(),
        false => format!("expected {accepted}"),
    };
    CliError::Usage(format!("--{option} {}: {expected}.", quoted(value)))
}

pub(super) fn missing(name: &str) -> CliError {
    CliError::Usage(format!("{name} is missing."))
}

/// Quotes a word of the command line, unless it may hold a secret: the URI of a database may be in the wrong place.
pub(super) fn quoted(word: &str) -> String {
    if may_hold_a_secret(word) { "\"…\"".into() } else { format!("{word:?}") }
}

impl From<lexopt::Error> for CliError {
    fn from(error: lexopt::Error) -> Self {
        match error.to_string() {
            text if may_hold_a_secret(&text) => {
                Self::Usage("an argument is not expected or not UTF-8.".into())
            }
            text => Self::Usage(format!("{text}.")),
        }
    }
}
