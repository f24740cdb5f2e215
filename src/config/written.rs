//! A setting as it is written in the file or in a variable, and the message if it is wrong.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::{fs, iter};

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

/// A value as it is written, and where.
pub struct Written {
    name: String,
    value: WrittenValue,
    place: SettingSource,
    /// The text in the file or the variable.
    found: String,
}

enum WrittenValue {
    Text(String),
    Number(u64),
    Texts(Vec<String>),
    /// A type that no setting accepts.
    Other,
}

enum SettingSource {
    File(PathBuf, usize),
    Variable(String),
}

impl Written {
    pub(super) fn in_variable(name: &str, variable: String, text: String) -> Self {
        let found = format!("{text:?}");
        Self {
            name: name.into(),
            value: WrittenValue::Text(text),
            place: SettingSource::Variable(variable),
            found,
        }
    }

    /// Names the values that the setting accepts. Repeats the one that was found, unless it may hold a secret.
    pub fn refuse(&self, accepted: &str) -> Problem {
        let is_secret = SECRET.contains(&self.name.as_str()) || may_hold_a_secret(&self.found);
        let found = shortened(&self.found, MAX_REPEATED);
        let setting = match &self.place {
            SettingSource::File(..) if is_secret => self.name.clone(),
            SettingSource::File(..) => format!("{} = {found}", self.name),
            SettingSource::Variable(name) if is_secret => name.clone(),
            SettingSource::Variable(name) => format!("{name}={found}"),
        };
        self.problem(&format!("{setting}: expected {accepted}."))
    }

    pub(super) fn problem(&self, text: &str) -> Problem {
        match &self.place {
            SettingSource::File(path, line) => problem_in(path, *line, text),
            SettingSource::Variable(_) => Problem { line: usize::MAX, text: text.to_owned() },
        }
    }

    /// Returns `None` for a variable.
    pub fn file(&self) -> Option<&Path> {
        match &self.place {
            SettingSource::File(path, _) => Some(path),
            SettingSource::Variable(_) => None,
        }
    }

    pub fn number(&self) -> Option<u64> {
        match &self.value {
            WrittenValue::Number(number) => Some(*number),
            WrittenValue::Text(text) if self.file().is_none() => text.parse().ok(),
            _ => None,
        }
    }

    pub fn text(&self) -> Result<&str, Problem> {
        match &self.value {
            WrittenValue::Text(text) => Ok(text),
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
            WrittenValue::Text(text) if self.file().is_none() => text.split(separator).collect(),
            WrittenValue::Text(text) => vec![text],
            WrittenValue::Texts(texts) => texts.iter().map(String::as_str).collect(),
            WrittenValue::Number(_) | WrittenValue::Other => {
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
pub(super) fn read_file(path: &Path) -> Result<BTreeMap<String, Written>, Vec<Problem>> {
    let text = fs::read_to_string(path).map_err(|error| {
        vec![Problem { line: 0, text: format!("{}: it can't be read: {error}.", path.display()) }]
    })?;
    let line_at = |place: usize| text.bytes().take(place).filter(|&byte| byte == b'\n').count() + 1;
    let (table, errors) = DeTable::parse_recoverable(&text);
    if !errors.is_empty() {
        // Without the line itself, as the error's own text has it: the line may hold a secret.
        let problem = |error: &toml::de::Error| {
            let span = error.span().unwrap_or_default();
            let message = match error.message() {
                "duplicate key" => duplicate(&text, &span, line_at),
                message => format!("it is not valid TOML: {message}."),
            };
            problem_in(path, line_at(span.start), &message)
        };
        return Err(errors.iter().map(problem).collect());
    }
    let mut settings = BTreeMap::new();
    let mut add = |name: String, key: &Spanned<_>, value: &Spanned<DeValue>| {
        let place = SettingSource::File(path.to_owned(), line_at(key.span().start));
        let found = text[value.span()].to_owned();
        settings.insert(name.clone(), Written { name, value: value_of(value.get_ref()), place, found });
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

/// Names a table or a setting that is there twice, and the line where it is first.
fn duplicate(text: &str, span: &Range<usize>, line_at: impl Fn(usize) -> usize) -> String {
    let start_of_line = |place: usize| text[..place].rfind('\n').map_or(0, |end| end + 1);
    let start = start_of_line(span.start);
    let key = text[start..span.end].trim_start();
    let header = |line: &str| {
        let name = line.trim_start().strip_prefix('[')?;
        Some(name.trim_start_matches('[').split(']').next().unwrap_or_default().trim().to_owned())
    };
    let (name, advice) = match header(key) {
        Some(name) => (format!("[{name}]"), "Put the settings of both under one heading."),
        None => {
            let table = text[..start].lines().rev().find_map(header).map(|table| table + ".");
            (format!("{}{key}", table.unwrap_or_default()), "Remove one of them.")
        }
    };
    let path = name.trim_matches(['[', ']']);
    // The parser may keep the last of several.
    let before = |place: usize| first_of(path, DeTable::parse_recoverable(&text[..place]).0.get_ref());
    match iter::successors(before(start), |place| before(start_of_line(*place))).last() {
        Some(place) => {
            let name = shortened(&name, MAX_REPEATED);
            format!("{name} is a duplicate: it is already in line {}. {advice}", line_at(place))
        }
        // In an inline table, for example.
        None => {
            format!("it is not valid TOML: duplicate key {}.", shortened(&text[span.clone()], MAX_REPEATED))
        }
    }
}

/// Finds the place of the key with this path.
fn first_of(path: &str, table: &DeTable) -> Option<usize> {
    let (name, rest) = path.split_once('.').map_or((path, None), |(name, rest)| (name, Some(rest)));
    let (key, value) =
        table.iter().find(|(key, _)| key.get_ref() == name.trim().trim_matches(['"', '\'']))?;
    match (rest, value.get_ref()) {
        (None, _) => Some(key.span().start),
        (Some(rest), DeValue::Table(members)) => first_of(rest, members),
        _ => None,
    }
}

fn value_of(value: &DeValue) -> WrittenValue {
    let text = |value: &Spanned<DeValue>| value.get_ref().as_str().map(str::to_owned);
    let found = match value {
        DeValue::String(text) => Some(WrittenValue::Text(text.to_string())),
        DeValue::Integer(number) => {
            u64::from_str_radix(number.as_str(), number.radix()).ok().map(WrittenValue::Number)
        }
        DeValue::Array(array) => array.iter().map(text).collect::<Option<_>>().map(WrittenValue::Texts),
        _ => None,
    };
    found.unwrap_or(WrittenValue::Other)
}
