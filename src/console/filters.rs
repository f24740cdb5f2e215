//! What the usage and the requests pages are asked for: their filters, and an export of what these
//! select.

use std::sync::Arc;
use std::time::{Duration, Instant};

use maud::{Markup, html};

use super::page::{Operator, PageError, PageResult, with_headers};
use crate::error::{FailureCause, Problem};
use crate::http::Response;
use crate::keys::Key;
use crate::ledger::{CODES, Gateway};
use crate::report::choices;
use crate::report::query::{CHOICES, Query, find_keys};
use crate::text::{count, shell_word};

/// The most keys that the field suggests, and that the page lists to choose from.
const KEYS_SUGGESTED: usize = 50;

/// The most lines of an export, which is a response of some 4 MB.
pub const MAX_LINES: usize = 10_000;

/// A search for rare rows among many holds a thread of the console for this long.
pub const LONGEST_SEARCH: Duration = Duration::from_secs(5);

/// A spreadsheet reads a CSV file as UTF-8 if it begins with this.
const BYTE_ORDER_MARK: &str = "\u{feff}";

/// What a page is asked for: its query, and the keys that there are.
pub struct Asked {
    pub query: Query,
    pub keys: Vec<Key>,
    pub gateways: Vec<Gateway>,
    /// The keys that match the filter, if it is not clear which is meant.
    pub unclear: Option<Vec<Key>>,
}

/// The query of the page at `path`, or of a page below it.
pub fn query(operator: &Operator, path: &str) -> Result<Query, PageError> {
    let (request, zone) = (operator.request, &operator.console.store.zone);
    Query::parse(path, &request.query, request.now, zone).map_err(PageError::range)
}

pub fn read(operator: &Operator, path: &str) -> Result<Asked, PageError> {
    let console = operator.console;
    let (store, query) = (&console.store, query(operator, path)?);
    let mut range = store.ledger.bounded(query.range, operator.request.now)?;
    if query.get("range") == "all" {
        range.until = query.zone.day(range.until - 1).until;
    }
    let mut query = query.bounded(range).map_err(PageError::range)?;
    let (keys, mut unclear) = (store.keys.list()?, None);
    if !query.get("key").is_empty() {
        match find_keys(&keys, query.get("key")) {
            (Some(word), found) => {
                query = query.of_keys(&word, found.into_iter().map(|key| key.id).collect());
            }
            (None, found) => unclear = Some(found),
        }
    }
    Ok(Asked {
        query,
        keys,
        gateways: console.shared_gateways()?,
        unclear,
    })
}

impl Asked {
    /// Links to ranges, and a form for two times and the rest, for the page at `path`.
    pub fn filters(&self, path: &str) -> Markup {
        let query = &self.query;
        let [from, to] = query.times();
        let chosen = query.get("range");
        let ranges = CHOICES.into_iter();
        let ranges =
            ranges.map(|(word, name)| (query.link(path, &[("range", word)]), name, word == chosen));
        html! {
            (folded(&self.words(), &html! {
                (choices("Range", ranges))
                form method="get" action=(path) {
                    (query.form(path, &["key", "gateway", "outcome", "cause", "least", "most"]))
                    input type="hidden" name="displayed" value=(format!("{from} {to}"));
                    @for (name, text, value) in [("from", "From", &from), ("to", "to", &to)] {
                        label for=(name) { (text) } input id=(name) type="datetime-local" name=(name) value=(value)
                            step=[(value.len() > "2026-11-16T13:00".len()).then_some(1)] required;
                    }
                    (self.key_field())
                    @if self.gateways.len() > 1 {
                        label for="gateway" { "Gateway" }
                        select #gateway name="gateway" {
                            option value="" { "All gateways" }
                            @for Gateway { name, .. } in &self.gateways { option selected[query.get("gateway") == name] { (name) } }
                        }
                    }
                    label for="outcome" { "Outcome" }
                    select #outcome name="outcome" {
                        @let outcome = query.get("outcome");
                        @for (value, name) in [("", "All outcomes"), ("ok", "Succeeded"), ("failed", "Errors")] {
                            option value=(value) selected[outcome == value] { (name) }
                        }
                        @for code in CODES { option value=(code) selected[outcome == code] { (code) } }
                    }
                    @if path == "/requests" { (row_filters(query)) }
                    button type="submit" { "Apply" }
                }
            }))
            (self.matching_keys(path))
        }
    }

    /// The range, and the filters that are set.
    fn words(&self) -> Vec<String> {
        let query = &self.query;
        let key = self.key_text();
        let outcome = match query.get("outcome") {
            "ok" => "succeeded",
            "failed" => "errors",
            code => code,
        };
        let [least, most] = ["least", "most"].map(|name| match query.get(name) {
            "" => String::new(),
            ms => format!("at {name} {ms} ms"),
        });
        let set = |name: &str, value: &str| match value {
            "" => String::new(),
            value => format!("{name} {value}"),
        };
        let words = [
            query.range_in_words(),
            set("key", &key),
            set("gateway", query.get("gateway")),
            outcome.to_owned(),
            query.get("cause").to_owned(),
            least,
            most,
        ];
        words
            .into_iter()
            .filter(|words| !words.is_empty())
            .collect()
    }

    /// A key's name; if others have it too, with what distinguishes it from them.
    fn label(&self, key: &Key) -> String {
        match self
            .keys
            .iter()
            .filter(|other| other.name == key.name)
            .count()
        {
            1 => key.name.clone(),
            _ => format!("{} {}", key.name, key.hint),
        }
    }

    /// What the field for the key has.
    fn key_text(&self) -> String {
        let word = self.query.get("key");
        let chosen = self.keys.iter().find(|key| key.id == word);
        chosen.map_or(word.to_owned(), |key| self.label(key))
    }

    fn key_field(&self) -> Markup {
        html! {
            label for="key" { "Key" }
            input #key type="search" name="key" list="keys" placeholder="All keys" maxlength="100" autocomplete="off" value=(self.key_text());
            datalist #keys {
                @for key in self.keys.iter().take(KEYS_SUGGESTED) { option value=(self.label(key)) { @if key.revoked.is_some() { "revoked" } } }
            }
        }
    }

    /// Links to the keys that match the text in the key's field, if it does not mean one of them.
    fn matching_keys(&self, path: &str) -> Markup {
        let Some(matching) = &self.unclear else {
            return html! {};
        };
        html! {
            p.notice {
                @if matching.is_empty() { "No key is named " span.text { (self.query.get("key")) } "." }
                @else {
                    (count(matching.len() as i64, "key")) " match. Choose one: "
                    @for (number, key) in matching.iter().take(KEYS_SUGGESTED).enumerate() {
                        @if number > 0 { ", " }
                        a.text href=(self.query.link(path, &[("key", &key.id)])) { (key.name) " " (key.hint) }
                    }
                }
            }
        }
    }
}

/// The filters that only rows have: sums have neither causes nor durations.
fn row_filters(query: &Query) -> Markup {
    html! {
        label for="cause" { "Cause" } input #cause name="cause" list="causes" value=(query.get("cause")) placeholder="Any cause" autocomplete="off";
        datalist #causes { @for word in FailureCause::WORDS { option value=(word) {} } }
        @for (name, text) in [("least", "Took at least"), ("most", "at most")] {
            label for=(name) { (text) } input id=(name) name=(name) type="number" min="0" max=(u32::MAX) value=(query.get(name)) placeholder="ms";
        }
    }
}

/// Filters that a narrow screen folds away, behind a button that says what is set. A wide one
/// always displays them.
pub fn folded(set: &[String], filters: &Markup) -> Markup {
    html! {
        details.fold {
            summary { "Filters" @if !set.is_empty() { ": " (set.join(", ")) } }
            div.filters { (filters) }
        }
    }
}

/// Answers with the text that `write` makes before its deadline. Refuses another export meanwhile,
/// because each is in memory, and names the command for what `write` can't make.
pub fn export(
    operator: &Operator,
    asked: &Asked,
    name: &str,
    command: &str,
    write: impl FnOnce(Instant) -> Result<Option<String>, Problem>,
) -> PageResult {
    if asked.unclear.is_some() {
        let text = "None, or more than one, matches the filter. Give the key’s id.";
        return Err(PageError::new(404, "Which key?", text));
    }
    let exports = &operator.console.exports;
    let permit = Arc::clone(exports);
    // The console's own, and this one.
    if Arc::strong_count(exports) > 2 {
        let text = "One export at a time. Try again in a moment.";
        return Err(PageError::new(429, "Too many requests", text));
    }
    let Some(text) = write(Instant::now() + LONGEST_SEARCH)? else {
        let is_local = operator.request.http.client.is_local();
        let arguments = format!("{command}{}", options(&asked.query, name == "usage"));
        let command = operator.console.config.command(&arguments, is_local);
        let text = "The console exports at most 10,000 lines, and searches for them for 5 seconds at most. Choose a shorter \
             range, or run this command on the machine that the service runs on, as the user that it runs as.";
        return Err(PageError::new(400, "The export is too long", text).with_command(command));
    };
    let [from, to] = asked
        .query
        .range
        .bounds(&asked.query.zone)
        .map(|time| time.replace([':', 'Z'], ""));
    let body = [BYTE_ORDER_MARK, &text].concat().into_bytes();
    let response = Response::new(200, "text/csv; charset=utf-8", body);
    let mut response = with_headers(response).with(
        "content-disposition",
        format!("attachment; filename=\"adriaticum-{name}-{from}-to-{to}.csv\""),
    );
    response.permit = Some(permit);
    Ok(response)
}

/// The options of the commands for a query. They have none for durations, and sums have no outcome.
fn options(query: &Query, is_list: bool) -> String {
    let [since, until] = query.range.bounds(&query.zone);
    let mut options = format!(" --since {since} --until {until}");
    let outcome = if is_list { "outcome" } else { "" };
    for (option, field) in [
        ("key", "key"),
        ("gateway", "gateway"),
        ("status", outcome),
        ("cause", "cause"),
    ] {
        let value = query.get(field);
        if !value.is_empty() {
            options += &format!(" --{option} {}", shell_word(value));
        }
    }
    options
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::query::tests::query;
    use crate::when::Zone;

    #[test]
    fn a_command_has_the_filters_that_it_knows() {
        let check = |text, expected| {
            let query = query("/requests", text, &Zone::utc());
            assert_eq!(
                options(&query.between(query.range), true),
                expected,
                "{text}"
            );
        };
        check(
            "range=7d&outcome=failed&cause=timeout&least=7",
            " --since 2026-01-09 --until 2026-01-15 --status failed --cause timeout",
        );
        check(
            "from=2026-01-14T13:00&to=2026-01-15T00:30&gateway=it's",
            " --since 2026-01-14T13:00Z --until 2026-01-15T00:30Z --gateway 'it'\\''s'",
        );
    }
}
