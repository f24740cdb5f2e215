//! The unchecked settings, in a TOML file and in the environment, which overrides it.
//!
//! The setting `runtime.url` of the file is `ADRIATICUM_RUNTIME_URL` in the environment. Each is taken once; a name that is
//! left at the end is unknown. A wrong setting is reported and its default used instead, so that all problems are found at
//! once; `finish` then refuses the configuration.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::raw_setting::{Problem, RawSetting, read_file};
use crate::files;
use crate::text::nearest;

/// All problems of a configuration that can't be used.
#[derive(Debug, PartialEq, Eq)]
pub struct ConfigError(Vec<Problem>);

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let [problem] = self.0.as_slice() {
            return f.write_str(&problem.text);
        }
        write!(f, "the configuration has {} problems:", self.0.len())?;
        self.0.iter().try_for_each(|problem| write!(f, "\n  {}", problem.text))
    }
}

const PREFIX: &str = "ADRIATICUM_";

pub(super) const SECTIONS: [&str; 4] = ["runtime", "search", "tls", "usage"];

/// The values of variables by their names.
pub type Environment = BTreeMap<String, String>;

#[derive(Default)]
pub struct Settings {
    file: BTreeMap<String, RawSetting>,
    /// The variables, without their prefix.
    environment: Environment,
    /// The names of all settings, as they are taken.
    known: Vec<&'static str>,
    pub problems: Vec<Problem>,
    /// The settings that were refused. A problem that follows from one of them is not reported.
    pub wrong: Vec<&'static str>,
    digests: Digests,
    /// The default folder of files with secrets.
    secrets: Option<PathBuf>,
    pub secret_files: Vec<PathBuf>,
    /// Settings whose default files exist and can't be read, and the reason.
    pub unread_files: Vec<(&'static str, String)>,
}

/// A digest of every value by its setting's name: enough to find the changed settings, without their secrets.
pub type Digests = BTreeMap<&'static str, [u8; 32]>;

impl Settings {
    pub fn read(file: Option<&Path>, mut environment: Environment) -> Result<Self, ConfigError> {
        // The folder where systemd puts the unit's secrets (LoadCredential=). Commands find them beside the configuration.
        let credentials = environment.remove("CREDENTIALS_DIRECTORY").map(PathBuf::from);
        // It names the file.
        environment.remove("ADRIATICUM_CONFIG");
        Ok(Self {
            secrets: credentials.or_else(|| Some(file?.parent()?.to_owned())),
            file: file.map(read_file).transpose().map_err(ConfigError)?.unwrap_or_default(),
            environment: environment
                .into_iter()
                .filter_map(|(name, value)| Some((name.strip_prefix(PREFIX)?.to_owned(), value)))
                .collect(),
            ..Self::default()
        })
    }

    /// Takes a setting, from the environment first.
    pub fn take(&mut self, name: &'static str) -> Option<RawSetting> {
        self.known.push(name);
        let in_file = self.file.remove(name);
        let variable = variable_of(name);
        let set = self.environment.remove(&variable);
        set.map(|text| RawSetting::in_variable(name, format!("{PREFIX}{variable}"), text)).or(in_file)
    }

    /// Takes the setting of a file with a secret. If it is not set and `or_default`, takes the file with this name among the
    /// service's secrets. A file that this user may not read counts as missing: many commands do not need it.
    pub fn take_file(&mut self, setting: &'static str, name: &str, or_default: bool) -> Option<RawSetting> {
        let set = self.take(setting).filter(|written| !written.text().is_ok_and(str::is_empty));
        self.note(setting, &set.as_ref().map(|written| written.text().ok()));
        if set.is_some() || !or_default {
            return set;
        }
        let path = self.secrets.as_ref()?.join(name);
        match files::read(&path) {
            Ok(_) => Some(RawSetting::in_variable(setting, setting.into(), path.to_str()?.to_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                self.unread_files.push((setting, format!("{} can't be read: {error}", path.display())));
                None
            }
        }
    }

    /// Takes a setting and reads its value. Returns the default if it is not set or wrong.
    pub fn value<T: fmt::Debug>(
        &mut self,
        name: &'static str,
        default: T,
        read: impl FnOnce(&RawSetting) -> Result<T, Problem>,
    ) -> T {
        let value = match self.take(name).map(|written| read(&written)) {
            Some(Ok(value)) => value,
            Some(Err(problem)) => {
                self.problems.push(problem);
                self.wrong.push(name);
                default
            }
            None => default,
        };
        self.note(name, &value);
        value
    }

    /// Returns the value. If it is wrong, reports the problem and returns `None`.
    pub fn accept<T>(&mut self, read: Result<T, Problem>) -> Option<T> {
        read.map_err(|problem| self.problems.push(problem)).ok()
    }

    /// Notes the value of a setting in the digests.
    pub fn note(&mut self, name: &'static str, value: &impl fmt::Debug) {
        self.digests.insert(name, Sha256::digest(format!("{value:?}")).into());
    }

    pub fn number(&mut self, name: &'static str, range: RangeInclusive<u64>, default: u64) -> u64 {
        self.value(name, default, |written| {
            written.number().filter(|number| range.contains(number)).ok_or_else(|| {
                written.refuse(&format!("a whole number from {} to {}", range.start(), range.end()))
            })
        })
    }

    pub fn word<T: Copy + fmt::Debug>(&mut self, name: &'static str, words: &[(&str, T)], default: T) -> T {
        self.value(name, default, |written| written.word(words))
    }

    /// Refuses the configuration if there is a problem, such as an unknown name in the file. Returns the unknown variables,
    /// each with the name that was probably meant, and the digests.
    pub fn finish(mut self) -> Result<(Vec<String>, Digests), ConfigError> {
        for (name, written) in &self.file {
            let problem = if SECTIONS.contains(&name.as_str()) {
                written.problem(&format!("{name}: expected a table: [{name}]."))
            } else {
                written.problem(&format!("{name}: there is no such setting. {}", self.advice(name)))
            };
            self.problems.push(problem);
        }
        if !self.problems.is_empty() {
            self.problems.sort_by_key(|problem| problem.line);
            return Err(ConfigError(self.problems));
        }
        let known: Vec<String> = self.known.into_iter().chain(["config"]).map(variable_of).collect();
        let variables = self.environment.into_keys().map(|name| {
            let meant = nearest(&name, known.iter().map(String::as_str));
            let meant = meant.map(|meant| format!(" (did you mean {PREFIX}{meant}?)"));
            format!("{PREFIX}{name}{}", meant.unwrap_or_default())
        });
        Ok((variables.collect(), self.digests))
    }

    /// Suggests the setting that an unknown name probably means: a similar name in the same table, or the same in another.
    fn advice(&self, name: &str) -> String {
        let (table, last) = name.split_at(name.rfind('.').map_or(0, |dot| dot + 1));
        let in_table = self.known.iter().filter_map(|known| known.strip_prefix(table));
        let in_table = in_table.chain(SECTIONS.into_iter().filter(|_| table.is_empty()));
        let elsewhere = || self.known.iter().find(|known| known.rsplit('.').next() == Some(last));
        let meant = nearest(last, in_table).map(|meant| format!("{table}{meant}"));
        match meant.or_else(|| elsewhere().map(ToString::to_string)) {
            Some(meant) => format!("Did you mean {meant}?"),
            None => "man adriaticum.toml lists all settings.".into(),
        }
    }
}

/// The name of a setting's variable, without the prefix.
fn variable_of(setting: &str) -> String {
    setting.replace('.', "_").to_uppercase()
}
