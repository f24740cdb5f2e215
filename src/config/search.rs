//! The settings of Search.

use std::path::{Path, PathBuf};
use std::time::Duration;

use regex_lite::Regex;

use super::raw_setting::{RawSetting, WrongSetting};
use super::runtime::base_address;
use super::settings::Settings;
use crate::database::DatabaseLocation;

#[derive(Clone, Debug)]
pub struct SearchConfig {
    pub backend: Option<SearchBackend>,
    /// The file of the embedded index, even if Search does not use it.
    pub index: PathBuf,
    pub grounding: GroundingMode,
    /// If one of these matches the user's words, the answer needs Search.
    pub patterns: Vec<Regex>,
    /// For the Search call of a request.
    pub timeout: Duration,
    pub results: usize,
}

impl SearchConfig {
    /// Returns the settings that ground completions in the embedded index; `None` if they are set.
    pub fn how_to_use_index(&self) -> Option<&'static str> {
        (self.backend != Some(SearchBackend::Index) || self.grounding == GroundingMode::Off)
            .then_some("To use it, set search.url to \"index:\" and search.grounding to \"always\", \"match\" or \"auto\".")
    }
}

/// The instance or the index that Search asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SearchBackend {
    /// The base address of an instance, without a slash at its end.
    SearXng(String),
    Index,
}

/// The answers that have to be grounded in Search results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroundingMode {
    Off,
    Always,
    /// If a pattern matches the user's words.
    Match,
    /// If a pattern matches, or if the model says that facts are needed.
    Auto,
}

pub(super) fn read(settings: &mut Settings, database: &DatabaseLocation) -> SearchConfig {
    let backend = settings.value("search.url", backend);
    let patterns = settings.value("search.match", patterns);
    let has_backend = backend.is_some() || settings.wrong.contains(&"search.url");
    let has_patterns = !patterns.is_empty() || settings.wrong.contains(&"search.match");
    let grounding = settings.value("search.grounding", |written| {
        grounding(written, has_backend, has_patterns)
    });
    SearchConfig {
        backend,
        // Each gateway has an index of its own.
        index: beside(database.file().unwrap_or(Path::new("adriaticum.db"))),
        grounding,
        patterns,
        timeout: Duration::from_secs(settings.value("search.timeout", RawSetting::number)),
        results: settings.value("search.results", RawSetting::number) as usize,
    }
}

fn backend(written: &RawSetting) -> Result<Option<SearchBackend>, WrongSetting> {
    written.parse(|text| match text {
        "" => Some(None),
        "index:" => Some(Some(SearchBackend::Index)),
        url => base_address(url).map(|url| Some(SearchBackend::SearXng(url))),
    })
}

/// Refuses a mode without the settings that it needs: a service that could not ask Search would
/// refuse every request.
fn grounding(
    written: &RawSetting,
    has_backend: bool,
    has_patterns: bool,
) -> Result<GroundingMode, WrongSetting> {
    let mode = written.parse(|word| match word {
        "off" => Some(GroundingMode::Off),
        "always" => Some(GroundingMode::Always),
        "match" => Some(GroundingMode::Match),
        "auto" => Some(GroundingMode::Auto),
        _ => None,
    })?;
    if mode != GroundingMode::Off && !has_backend {
        return Err(written.refuse_for(
            "off, because search.url is not set: set it to the address of a SearXNG instance, or to index:",
        ));
    }
    if mode == GroundingMode::Match && !has_patterns {
        return Err(written.refuse_for("regular expressions in search.match for this mode"));
    }
    Ok(mode)
}

fn patterns(written: &RawSetting) -> Result<Vec<Regex>, WrongSetting> {
    let pattern = |(number, text): (usize, &str)| {
        Regex::new(text)
            .map_err(|error| written.refuse_because(format!("number {number}: {error}")))
    };
    (1..).zip(written.texts()?).map(pattern).collect()
}

/// Returns the path of the index: beside the database, with `-search` after its name.
fn beside(database: &Path) -> PathBuf {
    let mut name = database.file_stem().unwrap_or_default().to_owned();
    name.push("-search");
    if let Some(ending) = database.extension() {
        name.push(".");
        name.push(ending);
    }
    database.with_file_name(name)
}
