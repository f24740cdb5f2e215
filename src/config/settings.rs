//! The unchecked settings, in a TOML file and in the environment, which overrides it.
//!
//! The setting `runtime.url` of the file is `ADRIATICUM_RUNTIME_URL` in the environment. Each is
//! taken once. A wrong setting is reported and its default used instead, so that all problems are
//! found at once; `finish` then refuses the configuration.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};

use super::raw_setting::{FileSettings, RawSetting, WrongSetting, read_file};
use super::reference::{self, PREFIX, SETTINGS, Setting};
use crate::database::{Problem, ProblemKind, Result};
use crate::files;
use crate::text::nearest;

/// Words all that is wrong with a configuration.
fn refuse(mut wrong: Vec<WrongSetting>) -> Problem {
    wrong.sort_by_key(|setting| setting.line);
    let mut lines: Vec<String> = wrong.into_iter().map(|setting| setting.text).collect();
    if lines.len() > 1 {
        let count = lines.len();
        lines.insert(0, format!("the configuration has {count} problems:"));
    }
    Problem::new(ProblemKind::Setting, lines.join("\n  "))
}

/// The values of variables by their names.
pub type Environment = BTreeMap<OsString, OsString>;

#[derive(Default)]
pub struct Settings {
    file: FileSettings,
    environment: Environment,
    pub problems: Vec<WrongSetting>,
    /// The settings that were refused. A problem that follows from one of them is not reported.
    pub wrong: Vec<&'static str>,
    /// The default folder of files with secrets.
    secrets: Option<PathBuf>,
    pub secret_files: Vec<PathBuf>,
    /// Settings whose default files exist and can't be read, and the reason.
    pub unread_files: Vec<(&'static str, String)>,
}

impl Settings {
    pub fn read(path: Option<&Path>, mut environment: Environment) -> Result<Self> {
        // The folder where systemd puts the unit's secrets (LoadCredential=). Commands find them
        // beside the configuration.
        let credentials = environment
            .remove(OsStr::new("CREDENTIALS_DIRECTORY"))
            .map(PathBuf::from);
        // This variable names the file.
        environment.remove(OsStr::new("ADRIATICUM_CONFIG"));
        let (file, problems) = path
            .map(read_file)
            .transpose()
            .map_err(refuse)?
            .unwrap_or_default();
        let secrets = credentials.or_else(|| Some(path?.parent()?.to_owned()));
        Ok(Self {
            file,
            environment,
            problems,
            secrets,
            ..Self::default()
        })
    }

    /// Takes a setting, from the environment first.
    pub fn take(&mut self, name: &'static str) -> Option<RawSetting> {
        let setting = setting(name);
        let in_file = self.file.remove(name);
        let Some(set) = self.environment.remove(OsStr::new(&setting.variable())) else {
            return in_file;
        };
        let is_text = set.to_str().is_some();
        let set = RawSetting::in_variable(setting, set.to_string_lossy().into_owned());
        if !is_text {
            self.problems.push(set.refuse_for("UTF-8"));
            self.wrong.push(name);
        }
        is_text.then_some(set)
    }

    /// Takes a setting whose empty text means that it is not set.
    pub fn take_filled(&mut self, name: &'static str) -> Option<RawSetting> {
        self.take(name)
            .filter(|written| !written.text().is_ok_and(str::is_empty))
    }

    /// Takes the setting of a file with a secret. If it is not set and `or_default`, takes the file
    /// with this name among the service's secrets. A file that this user may not read counts as
    /// missing: many commands do not need it.
    pub fn take_file(
        &mut self,
        name: &'static str,
        file: &str,
        or_default: bool,
    ) -> Option<RawSetting> {
        let set = self.take_filled(name);
        if set.is_some() || !or_default {
            return set;
        }
        let path = self.secrets.as_ref()?.join(file);
        match files::read(&path) {
            Ok(_) => Some(RawSetting::by_default(setting(name), path.to_str()?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                self.unread_files
                    .push((name, format!("{} can't be read: {error}", path.display())));
                None
            }
        }
    }

    /// Takes a setting and reads its value. Returns `None` if it is not set or wrong.
    pub fn optional<T>(
        &mut self,
        name: &'static str,
        read: impl FnOnce(&RawSetting) -> Result<T, WrongSetting>,
    ) -> Option<T> {
        let written = self.take(name)?;
        let value = self.accept(read(&written));
        if value.is_none() {
            self.wrong.push(name);
        }
        value
    }

    /// Takes a setting and reads its value. Reads the default if it is not set or wrong.
    pub fn value<T>(
        &mut self,
        name: &'static str,
        read: impl Fn(&RawSetting) -> Result<T, WrongSetting>,
    ) -> T {
        self.optional(name, &read).unwrap_or_else(|| {
            let default = RawSetting::by_default(setting(name), setting(name).default_text());
            read(&default).unwrap_or_else(|problem| panic!("wrong default: {}", problem.text))
        })
    }

    /// Returns the value. If it is wrong, reports the problem and returns `None`.
    pub fn accept<T>(&mut self, read: Result<T, WrongSetting>) -> Option<T> {
        read.map_err(|problem| self.problems.push(problem)).ok()
    }

    /// Refuses the configuration if there is a problem. Returns the unknown variables, each with
    /// the name that was probably meant.
    pub fn finish(self) -> Result<Vec<String>> {
        debug_assert!(
            self.file.is_empty(),
            "settings that are not read: {:?}",
            self.file.keys()
        );
        if !self.problems.is_empty() {
            return Err(refuse(self.problems));
        }
        let known: Vec<String> = SETTINGS
            .iter()
            .map(Setting::variable)
            .chain([format!("{PREFIX}CONFIG")])
            .collect();
        let unknown = self
            .environment
            .keys()
            .filter_map(|name| name.to_str()?.strip_prefix(PREFIX));
        let named = unknown.map(|name| {
            let meant = nearest(
                name,
                known.iter().filter_map(|known| known.strip_prefix(PREFIX)),
            );
            let meant = meant.map(|meant| format!(" (did you mean {PREFIX}{meant}?)"));
            format!("{PREFIX}{name}{}", meant.unwrap_or_default())
        });
        Ok(named.collect())
    }
}

fn setting(name: &str) -> &'static Setting {
    reference::find(name).unwrap_or_else(|| panic!("{name} should be in the table of settings"))
}
