//! The settings as they are written: in a TOML file and in the environment, which overrides it.
//!
//! A setting `runtime.url` of the file is `ADRIATICUM_RUNTIME_URL` in the environment. Each is taken once;
//! what is left over at the end is a name that nobody knows.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use toml::Value;

/// A setting that can't be used: its name, where it was read and what it takes.
#[derive(Debug, PartialEq, Eq)]
pub struct ConfigError(String);

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

const PREFIX: &str = "ADRIATICUM_";

pub struct Settings {
    file: Option<(PathBuf, toml::Table)>,
    environment: BTreeMap<String, String>,
    digests: Digests,
}

/// A digest of every value by its setting's name: enough to tell whether a setting was changed, and no secret.
pub type Digests = BTreeMap<&'static str, [u8; 32]>;

/// A value as it is written, with the place where it stands.
pub struct Written {
    value: Value,
    place: String,
}

impl Settings {
    /// Takes what is set: the variables of an environment, and a file where there is one.
    pub fn read(
        file: Option<&Path>,
        environment: impl Iterator<Item = (String, String)>,
    ) -> Result<Self, ConfigError> {
        let file = file.map(|path| Ok((path.to_owned(), read_file(path)?))).transpose()?;
        let environment = environment.filter(|(name, _)| name.starts_with(PREFIX)).collect();
        Ok(Self { file, environment, digests: Digests::default() })
    }

    /// Takes a setting, from the environment first.
    pub fn take(&mut self, name: &str) -> Option<Written> {
        let in_file = self.take_from_file(name);
        self.take_variable(name).or(in_file)
    }

    /// Takes a variable that has no counterpart in the file.
    pub fn take_variable(&mut self, name: &str) -> Option<Written> {
        let variable = variable(name);
        let text = self.environment.remove(&variable)?;
        Some(Written { value: Value::String(text), place: format!("{variable} in the environment") })
    }

    /// Takes a setting and makes a value of it; the default if it is not set.
    pub fn value<T: fmt::Debug>(
        &mut self,
        name: &'static str,
        default: T,
        read: impl FnOnce(&Written) -> Result<T, ConfigError>,
    ) -> Result<T, ConfigError> {
        let value = self.take(name).map_or(Ok(default), |written| read(&written))?;
        self.note(name, &value);
        Ok(value)
    }

    /// Notes the value of a setting in the digests.
    pub fn note(&mut self, name: &'static str, value: &impl fmt::Debug) {
        self.digests.insert(name, Sha256::digest(format!("{value:?}")).into());
    }

    fn take_from_file(&mut self, name: &str) -> Option<Written> {
        let (path, table) = self.file.as_mut()?;
        let place = format!("{name} in {}", path.display());
        let value = match name.split_once('.') {
            Some((section, member)) => table.get_mut(section)?.as_table_mut()?.remove(member)?,
            None => table.remove(name)?,
        };
        Some(Written { value, place })
    }

    pub fn number(
        &mut self,
        name: &'static str,
        range: RangeInclusive<u64>,
        default: u64,
    ) -> Result<u64, ConfigError> {
        self.value(name, default, |written| {
            written.number().filter(|number| range.contains(number)).ok_or_else(|| {
                written.refuse(&format!("a whole number from {} to {}", range.start(), range.end()))
            })
        })
    }

    /// A text; the default in place of an empty one.
    pub fn name(&mut self, name: &'static str, default: &str) -> Result<String, ConfigError> {
        self.value(name, default.to_owned(), |written| {
            let text = written.text()?;
            Ok(if text.is_empty() { default } else { text }.to_owned())
        })
    }

    /// One of a few words.
    pub fn word<T: Copy + fmt::Debug>(
        &mut self,
        name: &'static str,
        words: &[(&str, T)],
        default: T,
    ) -> Result<T, ConfigError> {
        self.value(name, default, |written| written.word(words))
    }

    /// Refuses a name of the file that was not taken. Returns the names of the environment that were not, to be warned
    /// of, and the digests.
    pub fn finish(self) -> Result<(Vec<String>, Digests), ConfigError> {
        if let Some((path, table)) = self.file {
            for (name, value) in table {
                let name = match value {
                    Value::Table(section) if SECTIONS.contains(&name.as_str()) => match section.keys().next()
                    {
                        Some(member) => format!("{name}.{member}"),
                        None => continue,
                    },
                    _ => name,
                };
                return Err(ConfigError(format!(
                    "{name} in {}: there is no such setting. man adriaticum.toml lists all settings.",
                    path.display()
                )));
            }
        }
        Ok((self.environment.into_keys().collect(), self.digests))
    }
}

/// The tables of the file.
const SECTIONS: [&str; 4] = ["runtime", "search", "tls", "usage"];

impl Written {
    /// That the value is not what the setting takes. The value is not repeated: it may be a secret.
    pub fn refuse(&self, takes: &str) -> ConfigError {
        ConfigError(format!("{}: it takes {takes}.", self.place))
    }

    pub fn number(&self) -> Option<u64> {
        match &self.value {
            Value::Integer(number) => u64::try_from(*number).ok(),
            Value::String(text) if self.is_variable() => text.parse().ok(),
            _ => None,
        }
    }

    pub fn text(&self) -> Result<&str, ConfigError> {
        self.value.as_str().ok_or_else(|| self.refuse("a text in quotation marks"))
    }

    /// One of a few words.
    pub fn word<T: Copy>(&self, words: &[(&str, T)]) -> Result<T, ConfigError> {
        let text = self.text()?;
        words.iter().find(|(word, _)| *word == text).map(|(_, value)| *value).ok_or_else(|| {
            let known: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
            self.refuse(&format!("one of {}", known.join(", ")))
        })
    }

    /// What `read` makes of the text.
    pub fn parse<T>(&self, takes: &str, read: impl FnOnce(&str) -> Option<T>) -> Result<T, ConfigError> {
        read(self.text()?).ok_or_else(|| self.refuse(takes))
    }

    /// What `read` makes of each of several texts.
    pub fn parse_each<T>(
        &self,
        takes: &str,
        read: impl Fn(&str) -> Option<T>,
    ) -> Result<Vec<T>, ConfigError> {
        let values: Option<Vec<T>> = self.texts(',')?.iter().map(|text| read(text)).collect();
        values.ok_or_else(|| self.refuse(takes))
    }

    /// Several texts: an array or a single text in the file, parted by `separator` in the environment.
    pub fn texts(&self, separator: char) -> Result<Vec<String>, ConfigError> {
        let trimmed = |text: &str| text.trim().to_owned();
        let texts: Option<Vec<String>> = match &self.value {
            Value::String(text) if self.is_variable() => Some(text.split(separator).map(trimmed).collect()),
            Value::String(text) => Some(vec![trimmed(text)]),
            Value::Array(array) => array.iter().map(|value| value.as_str().map(trimmed)).collect(),
            _ => None,
        };
        let mut texts = texts.ok_or_else(|| self.refuse("a text in quotation marks, or an array of them"))?;
        texts.retain(|text| !text.is_empty());
        Ok(texts)
    }

    fn is_variable(&self) -> bool {
        self.place.starts_with(PREFIX)
    }
}

fn variable(name: &str) -> String {
    PREFIX.to_owned() + &name.replace('.', "_").to_uppercase()
}

fn read_file(path: &Path) -> Result<toml::Table, ConfigError> {
    let text = fs::read_to_string(path)
        .map_err(|error| ConfigError(format!("{}: it can't be read: {error}.", path.display())))?;
    text.parse().map_err(|error| ConfigError(format!("{}: it is not valid TOML: {error}", path.display())))
}
