//! The range of time, the filters and the order of the usage and requests pages, as their addresses
//! have them.

use crate::console::{
    html::{
        form::{Form, link},
        table::{SortColumn, SortOrder},
    },
    keys::list::is_match,
    page::{Operator, PageError},
};
use crate::database::Problem;
use crate::keys::Key;
use crate::ledger::{Filter, Matching, RowFilter};
use crate::store::Store;
use crate::when::{DAY, Range, When, Zone, interval_end};

/// The ranges that are offered beside two times.
pub const CHOICES: [(&str, &str); 8] = [
    ("1h", "Hour"),
    ("24h", "24 hours"),
    ("7d", "7 days"),
    ("30d", "30 days"),
    ("90d", "90 days"),
    ("month", "This month"),
    ("last-month", "Last month"),
    ("all", "All"),
];

/// The columns of the table by key.
pub const COLUMNS: [SortColumn; 7] = [
    (SortOrder::ascending("key"), "Key"),
    (SortOrder::descending("requests"), "Requests"),
    (SortOrder::descending("success"), "Succeeded"),
    (SortOrder::descending("in"), "Tokens in"),
    (SortOrder::descending("out"), "Tokens out"),
    (SortOrder::descending("tokens"), "Total tokens"),
    (SortOrder::descending("share"), "Share of tokens"),
];

pub const DEFAULT_ORDER: SortOrder = SortOrder::descending("tokens");

/// The codes that a row of the ledger can have.
pub const CODES: [&str; 7] = [
    "invalid_request",
    "insufficient_permission",
    "inference_error",
    "search_unavailable",
    "service_unavailable",
    "interrupted",
    "abandoned",
];

/// The longest text in place of a key: a name and what distinguishes it from others of that name.
const LONGEST_KEY_TEXT: usize = 100;

const LONGEST_CAUSE: usize = 40;

/// The longest range: 60 years.
const LONGEST: i64 = 60 * 366 * DAY;

#[derive(Clone, Debug)]
pub struct UsageView {
    /// One of `CHOICES`, or "times".
    pub choice: &'static str,
    pub range: Range,
    /// The time zone of the database, in which the range is read and shown.
    pub zone: Zone,
    /// The range has whole days in place of those that it cut: retention has removed their rows.
    pub is_extended: bool,
    /// The id of the key, if one is chosen.
    pub key: Option<String>,
    /// The name of several keys, and their ids: the figures are those of all of them.
    pub key_name: Option<String>,
    pub(super) named_keys: Vec<String>,
    /// The text in place of a key's id, until a key is found by it. If none is, the figures are
    /// those of no key.
    pub key_text: String,
    /// A gateway that shares the database.
    pub gateway: Option<String>,
    /// The word in the address: empty, ok, failed or a code.
    pub outcome: String,
    /// Filters listed requests only, as the durations do: the sums have neither causes nor
    /// durations.
    pub cause: String,
    pub least_ms: Option<u32>,
    pub most_ms: Option<u32>,
    /// The order of the table by key.
    pub order: SortOrder,
}

impl UsageView {
    /// The view that an address asks for, of one of these keys or all.
    pub fn from_request(operator: &Operator, keys: &[Key]) -> Result<Self, PageError> {
        let Operator {
            console, request, ..
        } = *operator;
        let zone = &console.store.zone;
        let mut view = Self::read(&request.query, request.now, zone).map_err(PageError::Range)?;
        view.range = console.store.ledger.bounded(view.range, request.now)?;
        if view.choice == "all" {
            view.range.until = zone.day(view.range.until - 1).until;
        }
        let Range { since, until } = view.range;
        if since < 0 || until.saturating_sub(since) > LONGEST {
            return Err(PageError::Range(
                "the range is longer than 60 years, or begins before 1970.".into(),
            ));
        }
        Ok(view.with_key(&console.store, keys)?)
    }

    /// Reads a query; a bound of the range may be open. Fails if the range can't be read or has not
    /// begun, and ignores anything else that it does not understand: a mistyped address still leads
    /// to a page.
    fn read(query: &Form, now: i64, zone: &Zone) -> Result<Self, String> {
        // The form also sends the times of a named range, and how it showed them: they count if
        // they were changed.
        let is_changed =
            format!("{} {}", query.get("from"), query.get("to")).trim() != query.get("displayed");
        let named = CHOICES
            .iter()
            .map(|(word, _)| *word)
            .find(|word| *word == query.get("range") && !is_changed);
        let [from, to] = [time(query, "from")?, time(query, "to")?];
        let choice = named.unwrap_or(if from.or(to).is_some() {
            "times"
        } else {
            "24h"
        });
        // A time that exists twice is the earlier one as a beginning and the later one as an end.
        let [from, to] = [
            from.map(|time| time.earlier(zone)),
            to.map(|time| time.later(zone)),
        ];
        let (today, this_month) = (zone.day(now), zone.month(now));
        let range = match (choice, When::parse(choice)) {
            ("times", _) => Range::between(from, to, now, zone)?.checked(now, zone)?,
            (_, Some(days @ When::Days(_))) => Range {
                since: days.begin(now, zone)?,
                until: today.until,
            },
            // To the minute, of which the present one is the last.
            (_, Some(hours)) => Range {
                since: hours.begin(interval_end(now, 60), zone)?,
                until: interval_end(now, 60),
            },
            ("month", _) => Range {
                until: today.until,
                ..this_month
            },
            ("last-month", _) => zone.month(this_month.since - 1),
            _ => Range::ALL,
        };
        let gateway = Some(query.get("gateway")).filter(|name| (1..=64).contains(&name.len()));
        let is_known = |word: &&str| matches!(*word, "ok" | "failed") || CODES.contains(word);
        let outcome = Some(query.get("outcome")).filter(is_known);
        Ok(Self {
            choice,
            range,
            zone: zone.clone(),
            is_extended: false,
            key: None,
            key_name: None,
            named_keys: Vec::new(),
            key_text: query.text("key", LONGEST_KEY_TEXT),
            gateway: gateway.map(String::from),
            outcome: outcome.unwrap_or_default().into(),
            cause: query.text("cause", LONGEST_CAUSE),
            least_ms: query.get("least").parse().ok(),
            most_ms: query.get("most").parse().ok(),
            order: SortOrder::parse(query.get("sort"), &COLUMNS).unwrap_or(DEFAULT_ORDER),
        })
    }

    /// This view with a range that cuts no day whose rows retention has removed.
    pub fn with_whole_days(self, store: &Store) -> Result<Self, Problem> {
        let range = store.ledger.with_whole_days(self.range)?;
        Ok(if range == self.range {
            self
        } else {
            Self {
                is_extended: true,
                ..self.between(range)
            }
        })
    }

    pub fn between(&self, range: Range) -> Self {
        Self {
            choice: "times",
            range,
            ..self.clone()
        }
    }

    pub fn matching(&self) -> Matching {
        match self.outcome.as_str() {
            "" => Matching::Anything,
            "ok" => Matching::Success,
            "failed" => Matching::Failure,
            code => Matching::Code(code.into()),
        }
    }

    /// The key's id, the name of several keys, or the text that means none; empty for all keys.
    pub fn key_word(&self) -> &str {
        let chosen = self.key.as_deref().or(self.key_name.as_deref());
        chosen.unwrap_or(&self.key_text)
    }

    /// The ids of the keys whose requests are shown; `None` for all keys.
    fn keys(&self) -> Option<Vec<String>> {
        let ids = self.key.iter().chain(&self.named_keys).cloned().collect();
        (!self.key_word().is_empty()).then_some(ids)
    }

    pub fn filter(&self) -> Filter {
        Filter {
            keys: self.keys(),
            gateway: self.gateway.clone(),
        }
    }

    pub fn row_filter(&self) -> RowFilter {
        RowFilter {
            range: self.range,
            requests: self.filter(),
            matching: self.matching(),
            cause: Some(self.cause.clone()).filter(|cause| !cause.is_empty()),
            least_ms: self.least_ms,
            most_ms: self.most_ms,
        }
    }

    /// The start and the end of the range, as a field of a form has them.
    pub fn times(&self) -> [String; 2] {
        let time = |time| {
            let form = if time % 60 == 0 { "%FT%H:%M" } else { "%FT%T" };
            self.zone.format(time, form).unwrap_or_default()
        };
        [self.range.since, self.range.until].map(time)
    }

    /// The same for an address or a file's name: whole days as dates, the last one included.
    pub fn dates(&self) -> [String; 2] {
        self.range
            .bounds(&self.zone)
            .map(|bound| bound.replace('Z', ""))
    }

    /// The names and values in an address or a form, the range first. Empty values are left out
    /// there.
    pub fn fields(&self) -> Vec<(&'static str, String)> {
        let [from, to] = self.dates();
        let mut fields = match self.choice {
            "times" => vec![("from", from), ("to", to)],
            choice => vec![("range", choice.into())],
        };
        let number = |value: Option<u32>| value.map_or(String::new(), |value| value.to_string());
        fields.extend([
            ("key", self.key_word().to_owned()),
            ("gateway", self.gateway.clone().unwrap_or_default()),
            ("outcome", self.outcome.clone()),
            ("cause", self.cause.clone()),
            ("least", number(self.least_ms)),
            ("most", number(self.most_ms)),
            ("sort", self.order.field(DEFAULT_ORDER)),
        ]);
        fields
    }

    pub fn address(&self, path: &str) -> String {
        link(path, self.fields())
    }

    /// This view without the filters that only rows have.
    pub fn without_row_filters(&self) -> Self {
        Self {
            cause: String::new(),
            least_ms: None,
            most_ms: None,
            ..self.clone()
        }
    }

    /// The address of this view with another value of a field.
    pub fn address_with(&self, path: &str, field: &str, value: &str) -> String {
        let mut fields = self.fields();
        for (name, old) in &mut fields {
            if *name == field {
                *old = value.into();
            }
        }
        link(path, fields)
    }

    /// This view with the key that its text means, if it means one: as the key's field has it, with
    /// its mark at the end, or as the commands take it, or by a part of its name.
    fn with_key(self, store: &Store, keys: &[Key]) -> Result<Self, Problem> {
        if self.key_text.is_empty() {
            return Ok(self);
        }
        let is_marked = |key: &&Key| self.key_text.rsplit(' ').next() == Some(key.hint.as_str());
        let is_part = |key: &&Key| is_match(key, &self.key_text);
        let mut found: Vec<Key> = keys.iter().filter(is_marked).cloned().collect();
        if found.is_empty() {
            found = store.keys.named(&self.key_text)?;
        }
        if found.is_empty() {
            found = keys.iter().filter(is_part).cloned().collect();
        }
        Ok(match found.as_slice() {
            [key] => Self {
                key: Some(key.id.clone()),
                key_text: String::new(),
                ..self
            },
            // A renewed key may have the name of its predecessor: their requests belong together.
            [first, ..] if found.iter().all(|key| key.name == self.key_text) => Self {
                key_name: Some(first.name.clone()),
                named_keys: found.iter().map(|key| key.id.clone()).collect(),
                key_text: String::new(),
                ..self
            },
            _ => self,
        })
    }
}

fn time(query: &Form, name: &str) -> Result<Option<When>, String> {
    let text = query.get(name);
    let time = When::parse(text).filter(|when| matches!(when, When::Date(_) | When::Time(..)));
    if time.is_none() && !text.is_empty() {
        return Err(format!(
            "{name} takes a date, 2026-11-16, or a time, 2026-11-16T13:00."
        ));
    }
    Ok(time)
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::when::tests::zone;

    /// 2026-01-15 12:02:03, a Thursday.
    pub const NOW: i64 = 1_768_478_523;

    pub fn view(query: &str) -> UsageView {
        view_in(query, &Zone::utc())
    }

    pub fn view_in(query: &str, zone: &Zone) -> UsageView {
        UsageView::read(&Form::parse(query), NOW, zone).expect("a range")
    }

    #[test]
    fn an_address_leads_back_to_itself() {
        for query in [
            "range=1h",
            "range=last-month",
            "range=all",
            "range=24h&key=key_0123456789abcdef",
            "range=90d&outcome=failed&sort=requests",
            "range=month&key=key_1&gateway=host-1&outcome=ok&cause=status_500&least=1000&most=5000",
            "from=2026-01-01&to=2026-01-14&outcome=inference_error",
            "from=2026-01-14T13:00&to=2026-01-15T00:30",
        ] {
            assert_eq!(view(query).address("/usage"), format!("/usage?{query}"));
        }
        for (query, understood) in [
            ("", "range=24h"),
            ("from=&to=", "range=24h"),
            (
                "range=nonsense&key=%22%3E&outcome=%3Cscript%3E",
                "range=24h&key=%22%3E",
            ),
            ("least=-1&most=1e9", "range=24h"),
            (
                "range=7d&from=2026-01-09T00:00&to=2026-01-16T00:00&displayed=2026-01-09T00:00+2026-01-16T00:00",
                "range=7d",
            ),
            (
                "range=7d&from=2026-01-10&to=2026-01-10&displayed=2026-01-09+2026-01-15",
                "from=2026-01-10&to=2026-01-10",
            ),
            (
                "from=2026-01-14T00:00&to=2026-01-15T00:00",
                "from=2026-01-14&to=2026-01-14",
            ),
        ] {
            assert_eq!(
                view(query).address("/usage"),
                format!("/usage?{understood}"),
                "{query}"
            );
        }
    }

    #[test]
    fn a_range_that_can_not_be_displayed_is_refused() {
        for (query, message) in [
            ("from=9998-12-31", "in the future"),
            ("from=2026-01-14&to=2026-01-01", "ends before it begins"),
            (
                "from=2026-01-14T13:00&to=2026-01-14T13:00",
                "ends before it begins",
            ),
            ("from=yesterday", "from takes a date"),
            ("from=2026-01-14&to=2026-02-30", "to takes a date"),
        ] {
            let error = UsageView::read(&Form::parse(query), NOW, &Zone::utc()).expect_err(query);
            assert!(error.contains(message), "{query}: {error}");
        }
    }

    #[test]
    fn days_and_months_are_those_of_the_place() {
        let zagreb = zone("Europe/Zagreb");
        for (query, from, to) in [
            (
                "range=24h",
                "2026-01-14T13:03+01:00",
                "2026-01-15T13:03+01:00",
            ),
            ("range=7d", "2026-01-09", "2026-01-15"),
            ("range=last-month", "2025-12-01", "2025-12-31"),
            ("from=2025-10-26&to=2025-10-26", "2025-10-26", "2025-10-26"),
            // Both exist twice.
            (
                "from=2025-10-26T02:15&to=2025-10-26T02:30",
                "2025-10-26T02:15+02:00",
                "2025-10-26T02:30+01:00",
            ),
        ] {
            let view = view_in(query, &zagreb);
            assert_eq!(view.dates(), [from, to], "{query}");
            let again = view_in(
                view.address("/usage").trim_start_matches("/usage?"),
                &zagreb,
            );
            assert_eq!(again.range, view.range, "{query}");
        }
        let skipped = Form::parse("from=2025-03-30T02:30");
        let error = UsageView::read(&skipped, NOW, &zagreb).expect_err("no such time");
        assert!(error.contains("does not exist in Europe/Zagreb"), "{error}");
        let view = view_in("from=2025-10-25T00:00&to=2025-10-26T12:00:05", &zagreb);
        assert_eq!(view.times(), ["2025-10-25T00:00", "2025-10-26T12:00:05"]);
        assert_eq!(view.range.until - view.range.since, 37 * 3600 + 5);
    }

    #[test]
    fn days_and_months_are_whole_and_hours_end_with_this_minute() {
        for (query, from, to) in [
            ("range=1h", "2026-01-15T11:03", "2026-01-15T12:03"),
            ("range=24h", "2026-01-14T12:03", "2026-01-15T12:03"),
            ("range=7d", "2026-01-09", "2026-01-15"),
            ("range=30d", "2025-12-17", "2026-01-15"),
            ("range=month", "2026-01-01", "2026-01-15"),
            ("range=last-month", "2025-12-01", "2025-12-31"),
        ] {
            assert_eq!(view(query).dates(), [from, to], "{query}");
        }
        assert_eq!(view("range=all").range, Range::ALL);
        assert_eq!(
            view("from=2026-01-14").range.until,
            i64::MAX,
            "as the command's --since alone"
        );
    }
}
