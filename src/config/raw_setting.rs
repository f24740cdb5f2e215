//! A setting as it is in the file or in a variable, and the message if it is wrong.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::settings::SECTIONS;
use crate::text::{may_hold_a_secret, shortened};

/// A message about a wrong setting: its place, its value, and the values that are accepted.
#[derive(Debug, PartialEq, Eq)]
pub struct Problem {
    /// The line of the file; variables follow the file.
    pub(super) line: usize,
    pub(super) text: String,
}

/// Settings whose value is never repeated.
const SECRET: [&str; 2] = ["database", "runtime.api_key"];

/// The most characters of a wrong value that a message repeats.
const MAX_REPEATED: usize = 60;

/// An unchecked value, and its place.
pub struct RawSetting {
    /// The name of the setting, or of its variable.
    name: String,
    is_secret: bool,
    value: SettingValue,
    /// The file and the line in it; `None` for a variable.
    place: Option<(PathBuf, usize)>,
    /// The text in the file or the variable.
    found: String,
}

enum SettingValue {
    Text(String),
    Number(u64),
    Texts(Vec<String>),
    /// A type that no setting accepts.
    Other,
}

impl RawSetting {
    pub(super) fn in_variable(name: &str, variable: String, text: String) -> Self {
        let (is_secret, found) = (SECRET.contains(&name), format!("{text:?}"));
        Self { name: variable, is_secret, value: SettingValue::Text(text), place: None, found }
    }

    /// Names the values that the setting accepts. Repeats the one that was found, unless it may hold a secret.
    pub fn refuse(&self, accepted: &str) -> Problem {
        let (name, found) = (&self.name, shortened(&self.found, MAX_REPEATED));
        let setting = match self.place {
            _ if self.is_secret || may_hold_a_secret(&self.found) => name.clone(),
            Some(_) => format!("{name} = {found}"),
            None => format!("{name}={found}"),
        };
        self.problem(&format!("{setting}: expected {accepted}."))
    }

    pub(super) fn problem(&self, text: &str) -> Problem {
        match &self.place {
            Some((path, line)) => problem_in(path, *line, text),
            None => Problem { line: usize::MAX, text: text.to_owned() },
        }
    }

    /// Returns `None` for a variable.
    pub fn file(&self) -> Option<&Path> {
        self.place.as_ref().map(|(path, _)| path.as_path())
    }

    pub fn number(&self) -> Option<u64> {
        match &self.value {
            SettingValue::Number(number) => Some(*number),
            SettingValue::Text(text) if self.file().is_none() => text.parse().ok(),
            _ => None,
        }
    }

    pub fn text(&self) -> Result<&str, Problem> {
        match &self.value {
            SettingValue::Text(text) => Ok(text),
            _ => Err(self.refuse("a text in quotation marks")),
        }
    }

    pub fn word<T: Copy>(&self, words: &[(&str, T)]) -> Result<T, Problem> {
        let known: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
        let expected = format!("one of {}", known.join(", "));
        self.parse(&expected, |text| words.iter().find(|(word, _)| *word == text).map(|(_, value)| *value))
    }

    pub fn parse<T>(&self, accepted: &str, read: impl FnOnce(&str) -> Option<T>) -> Result<T, Problem> {
        read(self.text()?).ok_or_else(|| self.refuse(accepted))
    }

    pub fn parse_each<T>(&self, accepted: &str, read: impl Fn(&str) -> Option<T>) -> Result<Vec<T>, Problem> {
        let values: Option<Vec<T>> = self.texts(',')?.iter().map(|text| read(text)).collect();
        values.ok_or_else(|| self.refuse(accepted))
    }

    /// Returns several texts: an array or a single text in the file, separated by `separator` in the environment.
    pub fn texts(&self, separator: char) -> Result<Vec<String>, Problem> {
        let texts: Vec<&str> = match &self.value {
            SettingValue::Text(text) if self.file().is_none() => text.split(separator).collect(),
            SettingValue::Text(text) => vec![text],
            SettingValue::Texts(texts) => texts.iter().map(String::as_str).collect(),
            SettingValue::Number(_) | SettingValue::Other => {
                return Err(self.refuse("a text in quotation marks, or an array of them"));
            }
        };
        let trimmed = texts.into_iter().map(str::trim).filter(|text| !text.is_empty());
        Ok(trimmed.map(str::to_owned).collect())
    }
}

fn problem_in(path: &Path, line: usize, text: &str) -> Problem {
    Problem { line, text: format!("{}:{line}: {text}", path.display()) }
}

/// Reads the settings of a file by their names, those of a table as `table.name`.
pub(super) fn read_file(path: &Path) -> Result<BTreeMap<String, RawSetting>, Vec<Problem>> {
    let text = fs::read_to_string(path).map_err(|error| {
        vec![Problem { line: 0, text: format!("{}: it can't be read: {error}.", path.display()) }]
    })?;
    let line_at = |place: usize| text.bytes().take(place).filter(|&byte| byte == b'\n').count() + 1;
    let (table, errors) = DeTable::parse_recoverable(&text);
    if !errors.is_empty() {
        // Without the line itself, as the error's own text has it: the line may hold a secret.
        let problem = |error: &toml::de::Error| {
            let span = error.span().unwrap_or_default();
            let line = line_at(span.start);
            let message = match error.message() {
                "duplicate key" => duplicate(&text, &span, line),
                message => format!("it is not valid TOML: {message}."),
            };
            problem_in(path, line, &message)
        };
        return Err(errors.iter().map(problem).collect());
    }
    let mut settings = BTreeMap::new();
    let mut add = |name: String, key: &Spanned<_>, value: &Spanned<DeValue>| {
        let written = RawSetting {
            name: name.clone(),
            is_secret: SECRET.contains(&name.as_str()),
            value: value_of(value.get_ref()),
            place: Some((path.to_owned(), line_at(key.span().start))),
            found: text[value.span()].to_owned(),
        };
        settings.insert(name, written);
    };
    for (key, value) in table.get_ref() {
        let name = key.get_ref();
        match value.get_ref() {
            DeValue::Table(members) if SECTIONS.contains(&name.as_ref()) => {
                for (member, value) in members {
                    add(format!("{name}.{}", member.get_ref()), member, value);
                }
            }
            _ => add(name.to_string(), key, value),
        }
    }
    Ok(settings)
}

/// Names the table or the setting in a line that is there twice, and the line where it is first.
fn duplicate(text: &str, span: &Range<usize>, line: usize) -> String {
    let mut table = String::new();
    // The name in each line, with a dot at its end: `runtime.` is also in the line of `runtime.url.`.
    let mut names = text.lines().map(|line| {
        let plain = line.replace([' ', '\t', '"', '\''], "");
        match plain.strip_prefix('[') {
            Some(name) => {
                table = name.trim_start_matches('[').split(']').next().unwrap_or_default().to_owned() + ".";
                table.clone()
            }
            None => format!("{table}{}.", plain.split('=').next().unwrap_or_default()),
        }
    });
    let before: Vec<String> = names.by_ref().take(line - 1).collect();
    let name = names.next().unwrap_or_default();
    let Some(first) = before.iter().position(|other| other.starts_with(&name)) else {
        // In an inline table, for example.
        return format!(
            "it is not valid TOML: duplicate key {}.",
            shortened(&text[span.clone()], MAX_REPEATED)
        );
    };
    let is_table = text.lines().nth(line - 1).is_some_and(|line| line.trim_start().starts_with('['));
    let name = shortened(name.trim_end_matches('.'), MAX_REPEATED);
    let (name, advice) = match is_table {
        true => (format!("[{name}]"), "Put the settings of both under one heading."),
        false => (name, "Remove one of them."),
    };
    format!("{name} is a duplicate: it is already in line {}. {advice}", first + 1)
}

fn value_of(value: &DeValue) -> SettingValue {
    let text = |value: &Spanned<DeValue>| value.get_ref().as_str().map(str::to_owned);
    let found = match value {
        DeValue::String(text) => Some(SettingValue::Text(text.to_string())),
        DeValue::Integer(number) => {
            u64::from_str_radix(number.as_str(), number.radix()).ok().map(SettingValue::Number)
        }
        DeValue::Array(array) => array.iter().map(text).collect::<Option<_>>().map(SettingValue::Texts),
        _ => None,
    };
    found.unwrap_or(SettingValue::Other)
}
