//! A setting as it is in the file or in a variable, and the message if it is wrong.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::reference::{self, Accepted, SETTINGS, Setting};
use crate::text::{may_hold_a_secret, nearest, shortened};

/// A message about a wrong setting: its place, its value, and the values that are accepted.
#[derive(Debug, PartialEq, Eq)]
pub struct WrongSetting {
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
    setting: &'static Setting,
    value: SettingValue,
    place: SettingSource,
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

enum SettingSource {
    Line(PathBuf, usize),
    Variable,
    /// It is not set: the value is the default, or the path of a file in its usual place.
    Default,
}

impl RawSetting {
    pub(super) fn in_variable(setting: &'static Setting, text: String) -> Self {
        let found = format!("{text:?}");
        Self {
            setting,
            value: SettingValue::Text(text),
            place: SettingSource::Variable,
            found,
        }
    }

    pub(super) fn by_default(setting: &'static Setting, text: &str) -> Self {
        Self {
            place: SettingSource::Default,
            ..Self::in_variable(setting, text.into())
        }
    }

    pub fn is_default(&self) -> bool {
        matches!(self.place, SettingSource::Default)
    }

    /// Names the values that the setting accepts. Repeats the one that was found, unless it may
    /// hold a secret.
    pub fn refuse(&self) -> WrongSetting {
        self.refuse_for(&self.setting.accepted())
    }

    /// Adds the reason, such as the error of a file.
    pub fn refuse_because(&self, reason: impl fmt::Display) -> WrongSetting {
        self.refuse_for(&format!("{} ({reason})", self.setting.accepted()))
    }

    /// Names the values that are accepted together with other settings.
    pub fn refuse_for(&self, accepted: &str) -> WrongSetting {
        let (name, equals) = match self.place {
            SettingSource::Variable => (self.setting.variable(), "="),
            _ => (self.setting.name.into(), " = "),
        };
        let setting = if SECRET.contains(&self.setting.name) || may_hold_a_secret(&self.found) {
            name
        } else {
            format!("{name}{equals}{}", shortened(&self.found, MAX_REPEATED))
        };
        let text = format!("{setting}: expected {accepted}.");
        match &self.place {
            SettingSource::Line(path, line) => problem_in(path, *line, &text),
            _ => WrongSetting {
                line: usize::MAX,
                text,
            },
        }
    }

    /// Returns `None` for a variable.
    pub fn file(&self) -> Option<&Path> {
        match &self.place {
            SettingSource::Line(path, _) => Some(path),
            _ => None,
        }
    }

    pub fn number(&self) -> Result<u64, WrongSetting> {
        let number = match &self.value {
            SettingValue::Number(number) => Some(*number),
            SettingValue::Text(text) if self.file().is_none() => text.parse().ok(),
            SettingValue::Text(_) => return Err(self.refuse_because("without quotation marks")),
            _ => None,
        };
        let is_accepted = |number: &u64| matches!(&self.setting.accepted, Accepted::Number(range, _) if range.contains(number));
        number.filter(is_accepted).ok_or_else(|| self.refuse())
    }

    pub fn text(&self) -> Result<&str, WrongSetting> {
        match &self.value {
            SettingValue::Text(text) => Ok(text),
            _ => Err(self.refuse_for(&format!(
                "a text in quotation marks: {}",
                self.setting.accepted()
            ))),
        }
    }

    pub fn text_or_default(&self) -> Result<&str, WrongSetting> {
        self.text().map(|text| {
            if text.is_empty() {
                self.setting.default_text()
            } else {
                text
            }
        })
    }

    pub fn parse<T>(&self, read: impl FnOnce(&str) -> Option<T>) -> Result<T, WrongSetting> {
        let text = self.text()?;
        let is_known =
            !matches!(self.setting.accepted, Accepted::OneOf(words) if !words.contains(&text));
        is_known
            .then(|| read(text))
            .flatten()
            .ok_or_else(|| self.refuse())
    }

    pub fn parse_each<T>(&self, read: impl Fn(&str) -> Option<T>) -> Result<Vec<T>, WrongSetting> {
        let values: Option<Vec<T>> = self.texts()?.into_iter().map(read).collect();
        values.ok_or_else(|| self.refuse())
    }

    /// Returns several texts: an array or a single text in the file, separated in a variable.
    pub fn texts(&self) -> Result<Vec<&str>, WrongSetting> {
        let separator = if let Accepted::Lines(_) = self.setting.accepted {
            '\n'
        } else {
            ','
        };
        let texts: Vec<&str> = match &self.value {
            SettingValue::Text(text) if self.file().is_none() => text.split(separator).collect(),
            SettingValue::Text(text) => vec![text],
            SettingValue::Texts(texts) => texts.iter().map(String::as_str).collect(),
            SettingValue::Number(_) | SettingValue::Other => {
                let accepted = self.setting.accepted();
                return Err(self.refuse_for(&format!(
                    "a text in quotation marks, or an array of them: {accepted}"
                )));
            }
        };
        Ok(texts
            .into_iter()
            .map(str::trim)
            .filter(|text| !text.is_empty())
            .collect())
    }
}

fn problem_in(path: &Path, line: usize, text: &str) -> WrongSetting {
    WrongSetting {
        line,
        text: format!("{}:{line}: {text}", path.display()),
    }
}

/// The settings of a file by their names.
pub(super) type FileSettings = BTreeMap<&'static str, RawSetting>;

/// Reads the settings of a file, and the problems with names that are unknown. Fails if the file is
/// not TOML.
pub(super) fn read_file(
    path: &Path,
) -> Result<(FileSettings, Vec<WrongSetting>), Vec<WrongSetting>> {
    let text = fs::read_to_string(path).map_err(|error| {
        vec![WrongSetting {
            line: 0,
            text: format!("{}: it can't be read: {error}.", path.display()),
        }]
    })?;
    let line_at = |place: usize| {
        text.bytes()
            .take(place)
            .filter(|&byte| byte == b'\n')
            .count()
            + 1
    };
    let (table, errors) = DeTable::parse_recoverable(&text);
    if !errors.is_empty() {
        // Without the line itself, as the error's own text has it: the line may hold a secret.
        let problem = |error: &toml::de::Error| {
            let span = error.span().unwrap_or_default();
            let line = line_at(span.start);
            let message = match error.message() {
                "duplicate key" => {
                    format!("duplicate key: {}", shortened(&text[span], MAX_REPEATED))
                }
                message => message.into(),
            };
            problem_in(path, line, &format!("it is not valid TOML: {message}."))
        };
        return Err(errors.iter().map(problem).collect());
    }
    let (mut settings, mut problems) = (FileSettings::new(), Vec::new());
    let mut add = |name: &str, key: &Spanned<_>, value: &Spanned<DeValue>| {
        let line = line_at(key.span().start);
        if let Some(setting) = reference::find(name) {
            let written = RawSetting {
                setting,
                value: read_value(value.get_ref()),
                place: SettingSource::Line(path.to_owned(), line),
                found: text[value.span()].to_owned(),
            };
            settings.insert(setting.name, written);
        } else if reference::is_table(name) {
            let message = format!("{name}: expected a table: [{name}].");
            problems.push(problem_in(path, line, &message));
        } else {
            let repeated = shortened(name, MAX_REPEATED);
            let message = format!("{repeated}: there is no such setting. {}", advice(name));
            problems.push(problem_in(path, line, &message));
        }
    };
    for (key, value) in table.get_ref() {
        match value.get_ref() {
            DeValue::Table(members) if reference::is_table(key.get_ref()) => {
                for (member, value) in members {
                    let name = format!("{}.{}", key.get_ref(), member.get_ref());
                    add(&name, member, value);
                }
            }
            _ => add(key.get_ref(), key, value),
        }
    }
    Ok((settings, problems))
}

fn read_value(value: &DeValue) -> SettingValue {
    let text = |value: &Spanned<DeValue>| value.get_ref().as_str().map(str::to_owned);
    let found = match value {
        DeValue::String(text) => Some(SettingValue::Text(text.to_string())),
        DeValue::Integer(number) => u64::from_str_radix(number.as_str(), number.radix())
            .ok()
            .map(SettingValue::Number),
        DeValue::Array(array) => array
            .iter()
            .map(text)
            .collect::<Option<_>>()
            .map(SettingValue::Texts),
        _ => None,
    };
    found.unwrap_or(SettingValue::Other)
}

/// Suggests the setting that an unknown name probably means: a similar name in the same table, or
/// the same in another.
fn advice(name: &str) -> String {
    let (table, last) = name.split_at(name.rfind('.').map_or(0, |dot| dot + 1));
    let in_table = SETTINGS
        .iter()
        .filter_map(|known| known.name.strip_prefix(table));
    let in_table = in_table.chain(reference::tables().filter(|_| table.is_empty()));
    let elsewhere = || {
        SETTINGS
            .iter()
            .find(|known| known.name.rsplit('.').next() == Some(last))
    };
    let meant = nearest(last, in_table).map(|meant| format!("{table}{meant}"));
    match meant.or_else(|| elsewhere().map(|known| known.name.into())) {
        Some(meant) => format!("Did you mean {meant}?"),
        None => "man adriaticum.toml lists all settings.".into(),
    }
}
