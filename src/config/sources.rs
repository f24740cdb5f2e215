//! The settings as texts: those of the file, then those of the environment, which override them.
//!
//! A value of the file becomes the texts that a variable would have, with its line. Each setting is
//! read once. A wrong one is reported and read as its default instead, so that all problems are found
//! at once; `finish` then refuses the configuration.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use toml::Spanned;
use toml::de::{DeTable, DeValue, Error as TomlError, ValueDeserializer};

use super::table::{self, Accepted, DefaultValue, PREFIX, SETTINGS, Setting, texts_of};
use crate::error::{Problem, ProblemKind, Result};
use crate::secret::Secret;
use crate::text::{may_hold_a_secret, nearest, shortened};

/// The most characters of a wrong value that a message repeats.
const MAX_REPEATED: usize = 60;

/// The values of variables by their names.
pub type Environment = BTreeMap<OsString, OsString>;

/// The texts of a setting, not yet checked, and their place.
pub struct RawSetting {
    setting: &'static Setting,
    /// Any number for a list, else one.
    pub texts: Vec<String>,
    /// What is expected instead of a value that is no text.
    misfit: Option<String>,
    place: SettingPlace,
    /// The value as the file or the variable has it.
    found: String,
}

enum SettingPlace {
    Line(PathBuf, usize),
    Variable,
    /// It is not set: the text is the default, or the path of a file in its usual place.
    Default,
}

/// A message about a wrong setting: its place, its value, and the values that are accepted.
#[derive(Debug)]
pub struct WrongSetting {
    /// The line of the file; variables follow the file.
    line: usize,
    text: String,
}

impl WrongSetting {
    fn in_file(path: &Path, line: usize, text: &str) -> Self {
        let text = format!("{}:{line}: {text}", path.display());
        Self { line, text }
    }
}

impl RawSetting {
    fn in_variable(setting: &'static Setting, value: &OsStr) -> Self {
        let text = value.to_string_lossy();
        Self {
            setting,
            texts: setting.split(&text),
            misfit: value.to_str().is_none().then(|| "UTF-8".into()),
            place: SettingPlace::Variable,
            found: format!("{text:?}"),
        }
    }

    pub fn by_default(setting: &'static Setting, text: &str) -> Self {
        Self {
            place: SettingPlace::Default,
            ..Self::in_variable(setting, text.as_ref())
        }
    }

    fn in_file(
        setting: &'static Setting,
        value: &DeValue,
        place: SettingPlace,
        found: &str,
    ) -> Self {
        let texts = match (value, &setting.accepted) {
            (DeValue::Integer(number), Accepted::Number(..)) => {
                let digits = number.as_str();
                let decimal = u64::from_str_radix(digits, number.radix());
                Some(vec![decimal.map_or(digits.into(), |it| it.to_string())])
            }
            (DeValue::Array(items), Accepted::List(_) | Accepted::Lines(_)) => {
                let texts = items.iter().map(|item| item.get_ref().as_str());
                let texts: Option<Vec<&str>> = texts.collect();
                texts.map(|texts| texts_of(texts.into_iter()))
            }
            (DeValue::Table(_), Accepted::Members(_)) => {
                let value = ValueDeserializer::from(Spanned::new(0..0, value.clone()));
                let json = serde_json::Value::deserialize(value).ok();
                json.map(|json| vec![json.to_string()])
            }
            (_, Accepted::Members(_)) => None,
            _ => value.as_str().map(|text| setting.split(text)),
        };
        let accepted = setting.accepted();
        let misfit = match setting.accepted {
            Accepted::Number(..) | Accepted::Members(_) => accepted,
            Accepted::List(_) | Accepted::Lines(_) => {
                format!("a text in quotation marks, or an array of them: {accepted}")
            }
            _ => format!("a text in quotation marks: {accepted}"),
        };
        Self {
            setting,
            misfit: texts.is_none().then_some(misfit),
            texts: texts.unwrap_or_else(|| vec![found.into()]),
            place,
            found: found.into(),
        }
    }

    /// An empty text of most settings means that they are not set.
    fn is_empty(&self) -> bool {
        let is_one_text = matches!(
            self.setting.accepted,
            Accepted::Text(_) | Accepted::Members(_)
        );
        is_one_text && self.texts == [""]
    }

    pub fn is_default(&self) -> bool {
        matches!(self.place, SettingPlace::Default)
    }

    pub fn text(&self) -> &str {
        self.texts.first().map_or("", String::as_str)
    }

    /// Returns `None` for a variable.
    pub fn file(&self) -> Option<&Path> {
        match &self.place {
            SettingPlace::Line(path, _) => Some(path),
            _ => None,
        }
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
            SettingPlace::Variable => (self.setting.variable(), "="),
            _ => (self.setting.name.into(), " = "),
        };
        let setting = if self.setting.is_secret || may_hold_a_secret(&self.found) {
            name
        } else {
            format!("{name}{equals}{}", shortened(&self.found, MAX_REPEATED))
        };
        let text = format!("{setting}: expected {accepted}.");
        match &self.place {
            SettingPlace::Line(path, line) => WrongSetting::in_file(path, *line, &text),
            _ => WrongSetting {
                line: usize::MAX,
                text,
            },
        }
    }
}

pub struct Settings {
    /// Those that are set or have a default, until they are read.
    values: BTreeMap<&'static str, RawSetting>,
    problems: Vec<WrongSetting>,
    /// The text of each that is set or has a default, to find what a reload changes.
    pub texts: BTreeMap<&'static str, Secret>,
    /// Variables with the prefix of settings that are unknown, each with the one that was probably
    /// meant.
    pub unknown_variables: Vec<String>,
}

impl Settings {
    /// Reads the file and the variables. Fails if the file can't be read or is not TOML.
    pub fn read(path: Option<&Path>, mut environment: Environment) -> Result<Self> {
        // This variable names the file.
        environment.remove(OsStr::new("ADRIATICUM_CONFIG"));
        let (mut in_file, problems) = match path {
            Some(path) => read_file(path).map_err(refuse)?,
            None => Default::default(),
        };
        let mut values = BTreeMap::new();
        for setting in &SETTINGS {
            let variable = environment.remove(OsStr::new(&setting.variable()));
            let found = variable
                .map(|value| RawSetting::in_variable(setting, &value))
                .or(in_file.remove(setting.name))
                .filter(|raw| !raw.is_empty());
            let default = || match setting.default_text() {
                "" => None,
                text => Some(RawSetting::by_default(setting, text)),
            };
            values.extend(found.or_else(default).map(|raw| (setting.name, raw)));
        }
        let is_implied = |raw: &RawSetting| {
            raw.is_default() && matches!(raw.setting.default, DefaultValue::Implied(_))
        };
        let texts = values
            .values()
            .filter(|raw| !raw.texts.is_empty() && !is_implied(raw))
            .map(|raw| (raw.setting.name, Secret::new(raw.texts.join("\n"))));
        Ok(Self {
            texts: texts.collect(),
            values,
            problems,
            unknown_variables: unknown_variables(&environment),
        })
    }

    /// Takes a setting that is set or has a default.
    pub fn take(&mut self, name: &'static str) -> Option<RawSetting> {
        self.values.remove(name)
    }

    /// Returns false for a default and for an empty list.
    pub fn is_set(&self, name: &'static str) -> bool {
        let is_set = |raw: &RawSetting| !raw.is_default() && !raw.texts.is_empty();
        self.values.get(name).is_some_and(is_set)
    }

    /// Sets the text of a setting that is a file: its content may change in the same place.
    pub fn note_content(&mut self, name: &'static str, content: Option<&str>) {
        self.texts.remove(name);
        self.texts
            .extend(content.map(|text| (name, Secret::new(text))));
    }

    /// Reads a setting. Returns `None` if it is neither set nor has a default, or if it is wrong.
    pub fn read_with<T>(
        &mut self,
        name: &'static str,
        parse: impl FnOnce(&RawSetting) -> Result<T, WrongSetting>,
    ) -> Option<T> {
        let raw = self.take(name)?;
        let value = match &raw.misfit {
            Some(expected) => Err(raw.refuse_for(expected)),
            None => parse(&raw),
        };
        self.accept(value)
    }

    /// Reads a setting of one text.
    pub fn optional<T>(
        &mut self,
        name: &'static str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Option<T> {
        self.read_with(name, |raw| {
            let text = raw.text();
            let is_known =
                !matches!(raw.setting.accepted, Accepted::OneOf(words) if !words.contains(&text));
            let value = is_known.then(|| parse(text)).flatten();
            value.ok_or_else(|| raw.refuse())
        })
    }

    /// Reads a setting that has a default.
    pub fn value<T>(&mut self, name: &'static str, parse: impl Fn(&str) -> Option<T>) -> T {
        self.optional(name, &parse).unwrap_or_else(|| {
            let default = table::known(name).default_text();
            parse(default).unwrap_or_else(|| panic!("{name} should have a good default"))
        })
    }

    /// Reads a setting of several texts: at least one if it has a default.
    pub fn list<T>(&mut self, name: &'static str, parse: impl Fn(&str) -> Option<T>) -> Vec<T> {
        let values = self.read_with(name, |raw| {
            let is_missing = raw.texts.is_empty() && !raw.setting.default_text().is_empty();
            let values = raw.texts.iter().map(|text| parse(text)).collect();
            let values: Option<Vec<T>> = if is_missing { None } else { values };
            values.ok_or_else(|| raw.refuse())
        });
        values.unwrap_or_default()
    }

    pub fn number(&mut self, name: &'static str) -> Option<u64> {
        self.read_with(name, |raw| {
            let is_accepted = |number: &u64| matches!(&raw.setting.accepted, Accepted::Number(range, _) if range.contains(number));
            let number = raw.text().parse().ok().filter(is_accepted);
            number.ok_or_else(|| raw.refuse())
        })
    }

    /// Reads a number that has a default. A wrong one is 0, and the configuration is refused.
    pub fn count(&mut self, name: &'static str) -> usize {
        self.number(name).unwrap_or_default() as usize
    }

    pub fn seconds(&mut self, name: &'static str) -> Duration {
        Duration::from_secs(self.number(name).unwrap_or_default())
    }

    /// Returns the value. If it is wrong, reports the problem and returns `None`.
    pub fn accept<T>(&mut self, value: Result<T, WrongSetting>) -> Option<T> {
        value.map_err(|problem| self.problems.push(problem)).ok()
    }

    /// Refuses the configuration if there is a problem.
    pub fn finish(self) -> Result<Self> {
        let unread = self.values.keys();
        debug_assert_eq!(unread.len(), 0, "settings that are not read: {unread:?}");
        if self.problems.is_empty() {
            Ok(self)
        } else {
            Err(refuse(self.problems))
        }
    }
}

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

/// Names the variables that are left over.
fn unknown_variables(environment: &Environment) -> Vec<String> {
    let known: Vec<String> = SETTINGS
        .iter()
        .map(Setting::variable)
        .chain([format!("{PREFIX}CONFIG")])
        .collect();
    let bare = |name| str::strip_prefix(name, PREFIX);
    let unknown = environment.keys().filter_map(|name| bare(name.to_str()?));
    let named = unknown.map(|name| {
        let meant = nearest(name, known.iter().filter_map(|known| bare(known)));
        let meant = meant.map(|meant| format!(" (did you mean {PREFIX}{meant}?)"));
        format!("{PREFIX}{name}{}", meant.unwrap_or_default())
    });
    named.collect()
}

/// The settings of a file by their names, and the problems with names that are unknown.
type FileSettings = (BTreeMap<&'static str, RawSetting>, Vec<WrongSetting>);

/// Fails if the file is not TOML.
fn read_file(path: &Path) -> Result<FileSettings, Vec<WrongSetting>> {
    let text = fs::read_to_string(path).map_err(|error| {
        vec![WrongSetting {
            line: 0,
            text: format!("{}: it can't be read: {error}.", path.display()),
        }]
    })?;
    let mut file = TomlFile {
        path,
        text: &text,
        settings: BTreeMap::new(),
        problems: Vec::new(),
    };
    let (table, errors) = DeTable::parse_recoverable(&text);
    if errors.is_empty() {
        file.flatten("", table.get_ref());
        Ok((file.settings, file.problems))
    } else {
        Err(errors.iter().map(|error| file.not_toml(error)).collect())
    }
}

struct TomlFile<'a> {
    path: &'a Path,
    text: &'a str,
    settings: BTreeMap<&'static str, RawSetting>,
    problems: Vec<WrongSetting>,
}

impl TomlFile<'_> {
    /// Adds the settings of a table. `prefix` is its name, with a dot at the end.
    fn flatten(&mut self, prefix: &str, table: &DeTable) {
        for (key, value) in table {
            let name = format!("{prefix}{}", key.get_ref());
            let line = self.line_at(key.span().start);
            let problem = match (table::find(&name), value.get_ref()) {
                (Some(setting), found) => {
                    let place = SettingPlace::Line(self.path.to_owned(), line);
                    let raw = RawSetting::in_file(setting, found, place, &self.text[value.span()]);
                    self.settings.insert(setting.name, raw);
                    continue;
                }
                (None, DeValue::Table(members)) if table::is_table(&name) => {
                    self.flatten(&format!("{name}."), members);
                    continue;
                }
                _ if table::is_table(&name) => format!("{name}: expected a table: [{name}]."),
                _ => {
                    let repeated = shortened(&name, MAX_REPEATED);
                    format!("{repeated}: there is no such setting. {}", advice(&name))
                }
            };
            let problem = WrongSetting::in_file(self.path, line, &problem);
            self.problems.push(problem);
        }
    }

    /// Words an error without the line itself, as the error's own text has it: the line may hold a
    /// secret.
    fn not_toml(&self, error: &TomlError) -> WrongSetting {
        let span = error.span().unwrap_or_default();
        let line = self.line_at(span.start);
        let message = match error.message() {
            "duplicate key" => {
                let key = shortened(&self.text[span], MAX_REPEATED);
                format!("duplicate key: {key}")
            }
            message => message.into(),
        };
        WrongSetting::in_file(
            self.path,
            line,
            &format!("it is not valid TOML: {message}."),
        )
    }

    fn line_at(&self, place: usize) -> usize {
        let before = &self.text.as_bytes()[..place];
        before.iter().filter(|byte| **byte == b'\n').count() + 1
    }
}

/// Suggests the setting that an unknown name probably means: a similar name in the same table, or
/// the same in another.
fn advice(name: &str) -> String {
    let (table, last) = name.split_at(name.rfind('.').map_or(0, |dot| dot + 1));
    let names = || SETTINGS.iter().map(|known| known.name);
    let in_table = names().filter_map(|known| known.strip_prefix(table));
    let in_table = in_table.chain(table::tables().filter(|_| table.is_empty()));
    let meant = nearest(last, in_table).map(|meant| format!("{table}{meant}"));
    let elsewhere = || names().find(|known| known.rsplit('.').next() == Some(last));
    match meant.or_else(|| elsewhere().map(String::from)) {
        Some(meant) => format!("Did you mean {meant}?"),
        None => "man adriaticum.toml lists all settings.".into(),
    }
}
