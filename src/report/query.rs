//! What a page of the console is about: its range, filters, order and place, as its address and its
//! forms have them.

use maud::{Markup, html};
use percent_encoding::percent_decode_str;

use crate::audit::AuditSubject;
use crate::keys::{Key, KeyState};
use crate::ledger::{Filter, Grouping, Matching, RowFilter};
use crate::text::percent_encoded;
use crate::when::{DAY, Date, Range, When, Zone, interval_end};

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

/// The tables of usage: by key, which an address need not name, by day, by outcome, and the figures
/// of the charts.
pub const GROUPS: [&str; 4] = ["key", "day", "outcome", "bar"];

/// The fields of the pages below an address, in the order in which an address has them.
const FIELDS: [(&str, &[&str]); 4] = [
    (
        "/usage",
        &["range", "key", "gateway", "outcome", "by", "sort", "page"],
    ),
    (
        "/requests",
        &[
            "range", "key", "gateway", "outcome", "cause", "least", "most", "before", "after",
        ],
    ),
    ("/keys", &["sort", "q", "state", "page"]),
    ("/audit", &["about", "before"]),
];

/// A place in a list.
const PLACE: [&str; 3] = ["page", "before", "after"];

/// The longest value: a key's name, and what distinguishes it from others of that name.
const LONGEST_VALUE: usize = 100;

/// Ten years.
const LONGEST_RANGE: i64 = 3660 * DAY;

#[derive(Clone, Debug)]
pub struct Query {
    values: Vec<(&'static str, String)>,
    pub range: Range,
    /// The time zone of the database, in which the range is read and displayed.
    pub zone: Zone,
    /// The ids of the keys that the field `key` means; `None` for all keys.
    pub keys: Option<Vec<String>>,
}

impl Query {
    /// For a command, which has no addresses.
    pub fn none(zone: &Zone) -> Self {
        Self {
            values: Vec::new(),
            range: Range::ALL,
            zone: zone.clone(),
            keys: None,
        }
    }

    /// Reads the query of a page; an end of its range may be open. Fails if the range can't be read
    /// or has not begun. Ignores anything else that it does not understand: a mistyped address still
    /// leads to a page.
    pub fn parse(path: &str, form: &Form, now: i64, zone: &Zone) -> Result<Self, String> {
        let mut query = Self::none(zone);
        let fields = fields(path);
        for name in fields {
            let value = form.text(name, LONGEST_VALUE);
            // PostgreSQL has no text with a NUL.
            if !value.is_empty() && !value.contains('\0') && is_valid(name, &value) {
                query.values.push((name, value));
            }
        }
        if fields.contains(&"range") {
            query.read_range(form, now)?;
        }
        Ok(query)
    }

    /// Reads the range: one of `CHOICES`, a day, or two times as `FROM..TO`. A form sends both times beside
    /// the present range, and how it displayed them: they count if they were changed. A browser's
    /// field can't express each second of a day that has an hour twice.
    fn read_range(&mut self, form: &Form, now: i64) -> Result<(), String> {
        let zone = &self.zone;
        let [from, to] = ["from", "to"].map(|name| form.get(name));
        let is_typed = format!("{from} {to}").trim() != form.get("displayed").trim();
        let word = form.get("range");
        let (from, to) = match word.split_once("..") {
            _ if is_typed => (from, to),
            Some(times) => times,
            // A day.
            None if matches!(When::parse(word), Some(When::Date(_))) => (word, word),
            None => ("", ""),
        };
        let typed = format!("{from}..{to}");
        let [from, to] = [time("from", from)?, time("to", to)?];
        let (today, this_month) = (zone.day(now), zone.month(now));
        let choice = CHOICES.into_iter().find(|(choice, _)| *choice == word);
        let choice = choice.map_or("24h", |(choice, _)| choice);
        self.range = match (choice, When::parse(choice)) {
            // A time that exists twice is the earlier one as a beginning and the later one as an end.
            _ if from.or(to).is_some() => {
                let from = from.map(|time| time.earlier(zone));
                let to = to.map(|time| time.later(zone));
                Range::between(from, to, now, zone)?.checked(now, zone)?
            }
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
        let range = match from.or(to) {
            Some(_) => typed,
            None => choice.to_owned(),
        };
        self.values.push(("range", range));
        Ok(())
    }

    /// Sets the range without open ends. Refuses one that is too long.
    pub fn bounded(self, range: Range) -> Result<Self, String> {
        if range.since < 0 || range.until.saturating_sub(range.since) > LONGEST_RANGE {
            return Err("the range is longer than ten years, or begins before 1970.".into());
        }
        Ok(match self.choice() {
            None => self.between(range),
            Some(_) => Self { range, ..self },
        })
    }

    /// The same about another range.
    pub fn between(&self, range: Range) -> Self {
        let query = Self {
            range,
            ..self.clone()
        };
        query.with("range", &self.range_field(range))
    }

    /// The name of the range, if it is one that is offered.
    fn choice(&self) -> Option<&'static str> {
        let word = self.get("range");
        let choice = CHOICES.into_iter().find(|(known, _)| *known == word);
        choice.map(|(_, name)| name)
    }

    /// A range, as an address has it.
    pub fn range_field(&self, range: Range) -> String {
        let [first, last] = range.bounds(&self.zone).map(|time| time.replace('Z', ""));
        if first == last {
            first
        } else {
            format!("{first}..{last}")
        }
    }

    /// The field of the part of the range that is on a day.
    pub fn day_field(&self, day: &str) -> String {
        let Ok(date) = day.parse::<Date>() else {
            return String::new();
        };
        let Range { since, until } = self.zone.day(self.zone.start(date));
        self.range_field(Range {
            since: since.max(self.range.since),
            until: until.min(self.range.until),
        })
    }

    fn with(mut self, name: &'static str, value: &str) -> Self {
        self.values.retain(|(known, _)| *known != name);
        self.values.push((name, value.to_owned()));
        self
    }

    /// The same about the keys that the field `key` means, as an address has them.
    pub fn of_keys(self, word: &str, keys: Vec<String>) -> Self {
        Self {
            keys: Some(keys),
            ..self.with("key", word)
        }
    }

    /// The value of a field; empty if it is not set.
    pub fn get(&self, name: &str) -> &str {
        let value = self.values.iter().find(|(known, _)| *known == name);
        value.map_or("", |(_, value)| value)
    }

    /// The address of another page, or of this one, with other values of some fields. It has those
    /// fields that the page takes, and what else is changed. Another list begins at its first page.
    pub fn link(&self, path: &str, change: &[(&'static str, &str)]) -> String {
        let fields = fields(path);
        let is_changed = |name: &str| change.iter().any(|(known, _)| *known == name);
        let is_other_list = fields
            .iter()
            .any(|name| !PLACE.contains(name) && is_changed(name));
        let is_moved = is_other_list || PLACE.iter().any(|name| is_changed(name));
        let kept = fields.iter().filter(|name| !is_changed(name));
        let kept = kept.filter(|name| !(is_moved && PLACE.contains(name)));
        let mut pairs: Vec<(&'static str, &str)> = kept
            .map(|name| (*name, self.get(name)))
            .chain(change.iter().copied())
            .collect();
        let place = |name: &str| fields.iter().position(|known| *known == name);
        pairs.sort_by_key(|(name, _)| place(name).unwrap_or(fields.len()));
        link(path, pairs)
    }

    /// The fields of a page that its form does not ask for.
    pub fn form(&self, path: &str, asked: &[&str]) -> Markup {
        html! {
            @for name in fields(path) {
                @let value = self.get(name);
                @if !value.is_empty() && !asked.contains(name) && !PLACE.contains(name) { input type="hidden" name=(name) value=(value); }
            }
        }
    }

    pub fn state(&self) -> KeyState {
        KeyState::parse(self.get("state")).unwrap_or(KeyState::Active)
    }

    pub fn about(&self) -> Option<AuditSubject> {
        AuditSubject::parse(self.get("about"))
    }

    pub fn grouping(&self) -> Grouping {
        match self.get("by") {
            "day" => Grouping::Day,
            "outcome" => Grouping::Status,
            _ => Grouping::Key,
        }
    }

    /// The rows of the range, the keys and the other filters.
    pub fn row_filter(&self) -> RowFilter {
        let text = |name| Some(self.get(name).to_owned()).filter(|text| !text.is_empty());
        RowFilter {
            range: self.range,
            requests: Filter {
                keys: self.keys.clone(),
                gateway: text("gateway"),
            },
            matching: Matching::parse(self.get("outcome")).unwrap_or(Matching::Anything),
            cause: text("cause"),
            least_ms: self.get("least").parse().ok(),
            most_ms: self.get("most").parse().ok(),
        }
    }

    /// The ends of the range, as a field of a form has them.
    pub fn times(&self) -> [String; 2] {
        let time = |time| {
            let form = if time % 60 == 0 { "%FT%H:%M" } else { "%FT%T" };
            self.zone.format(time, form).unwrap_or_default()
        };
        [self.range.since, self.range.until].map(time)
    }

    /// The range in words: the name of a choice, or its ends.
    pub fn range_in_words(&self) -> String {
        let times = || self.range_field(self.range).replace("..", " to ");
        self.choice().map_or_else(times, String::from)
    }
}

fn fields(path: &str) -> &'static [&'static str] {
    let is_below = |(page, _): &&(&str, &[&str])| {
        path.strip_prefix(page)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    FIELDS
        .iter()
        .find(is_below)
        .map_or(&[], |(_, fields)| fields)
}

fn is_valid(name: &str, value: &str) -> bool {
    match name {
        "range" => false,
        "outcome" => Matching::parse(value).is_some(),
        "by" => GROUPS[1..].contains(&value),
        "state" => matches!(
            KeyState::parse(value),
            Some(KeyState::Expired | KeyState::Revoked)
        ),
        "about" => AuditSubject::parse(value).is_some(),
        "least" | "most" => value.parse::<u32>().is_ok(),
        "page" => value.parse().is_ok_and(|page: usize| page > 1),
        _ => true,
    }
}

fn time(name: &str, text: &str) -> Result<Option<When>, String> {
    let time = When::parse(text).filter(|when| matches!(when, When::Date(_) | When::Time(..)));
    if time.is_none() && !text.is_empty() {
        return Err(format!(
            "{name} takes a date, 2026-11-16, or a time, 2026-11-16T13:00."
        ));
    }
    Ok(time)
}

/// The keys that a text means: one as a field suggests it, with its mark at the end; one or several
/// as the commands take them, by id or name; or those that have it as a part. Keys of one name
/// belong together: one may be the successor of another. Returns what an address has in place of the
/// text, and `None` if it is not clear which key is meant, with the keys that match.
pub fn find_keys(keys: &[Key], text: &str) -> (Option<String>, Vec<Key>) {
    let find = |is_meant: &dyn Fn(&Key) -> bool| -> Vec<Key> {
        keys.iter().filter(|key| is_meant(key)).cloned().collect()
    };
    let mark = text.rsplit(' ').next().unwrap_or_default();
    let mut found = find(&|key| key.hint == mark);
    for is_meant in [
        &(|key: &Key| key.id == text || key.name == text) as &dyn Fn(&Key) -> bool,
        &|key| is_match(key, text),
    ] {
        if found.is_empty() {
            found = find(is_meant);
        }
    }
    let word = match found.as_slice() {
        [key] => Some(key.id.clone()),
        [_, ..] if found.iter().all(|key| key.name == text) => Some(text.to_owned()),
        _ => None,
    };
    (word, found)
}

/// Searches for a text in the name, in the id and the key's ends unless it is so short that most
/// have it, and compares it with the permissions.
pub fn is_match(key: &Key, text: &str) -> bool {
    let wanted = text.to_lowercase();
    let is_part = |text: &str| wanted.len() >= 4 && text.contains(&wanted);
    key.name.to_lowercase().contains(&wanted)
        || is_part(&key.id)
        || is_part(&key.hint)
        || key
            .terms
            .permissions
            .iter()
            .any(|permission| permission.as_str() == wanted)
}

/// The fields of a query or of a form: `a=b&c=d`, in the WHATWG's encoding.
#[derive(Clone, Debug, Default)]
pub struct Form(pub Vec<(String, String)>);

impl Form {
    pub fn parse(text: &str) -> Self {
        let decode = |text: &str| {
            percent_decode_str(&text.replace('+', " "))
                .decode_utf8_lossy()
                .into_owned()
        };
        let pairs = text.split('&').filter(|pair| !pair.is_empty());
        let decode_pair = |pair: &str| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decode(name), decode(value))
        };
        Self(pairs.map(decode_pair).collect())
    }

    /// The first value of a name; empty if there is none.
    pub fn get(&self, name: &str) -> &str {
        self.all(name).next().unwrap_or("")
    }

    /// The first value without the spaces around it, cut to so many characters.
    pub fn text(&self, name: &str, most: usize) -> String {
        self.get(name).trim().chars().take(most).collect()
    }

    pub fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
    }

    pub fn all(&self, name: &str) -> impl Iterator<Item = &str> {
        self.pairs()
            .filter(move |(known, _)| *known == name)
            .map(|(_, value)| value)
    }
}

/// A path with a query of the fields that are not empty.
pub fn link<'a>(
    path: &str,
    fields: impl IntoIterator<Item = (&'a str, impl AsRef<str>)>,
) -> String {
    let fields = fields
        .into_iter()
        .filter(|(_, value)| !value.as_ref().is_empty());
    let pairs = fields.map(|(name, value)| format!("{name}={}", percent_encoded(value.as_ref())));
    let query = pairs.collect::<Vec<_>>().join("&");
    if query.is_empty() {
        path.to_owned()
    } else {
        format!("{path}?{query}")
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::when::tests::zone;

    /// 2026-01-15 12:02:03, a Thursday.
    pub const NOW: i64 = 1_768_478_523;

    pub fn query(path: &str, text: &str, zone: &Zone) -> Query {
        let query = Query::parse(path, &Form::parse(text), NOW, zone).expect("a range");
        let range = query.range;
        match range == Range::ALL {
            true => query,
            false => query.bounded(range).expect("a range"),
        }
    }

    fn address(path: &str, text: &str) -> String {
        query(path, text, &Zone::utc()).link(path, &[])
    }

    #[test]
    fn an_address_leads_back_to_itself() {
        for address_of in [
            "/usage?range=1h",
            "/usage?range=last-month",
            "/usage?range=all",
            "/usage?range=24h&key=key_0123456789abcdef",
            "/usage?range=90d&outcome=failed&by=day&sort=requests&page=2",
            "/requests?range=month&key=key_1&gateway=host-1&outcome=ok&cause=status_500&least=1000&most=5000",
            "/usage?range=2026-01-14&by=outcome",
            "/usage?range=2026-01-01..2026-01-14&outcome=inference_error",
            "/usage?range=2026-01-14T13:00..2026-01-15T00:30",
            "/keys?sort=name",
            "/keys?sort=-tokens&q=a%20b&state=revoked&page=3",
            "/audit?about=sign-ins",
        ] {
            let (path, text) = address_of.split_once('?').expect("a query");
            assert_eq!(address(path, text), address_of);
        }
        let typed = "displayed=2026-01-09T00:00+2026-01-16T00:00";
        for (text, understood) in [
            ("", "range=24h"),
            ("from=&to=", "range=24h"),
            (
                "range=nonsense&key=%22%3E&outcome=%3Cscript%3E",
                "range=24h&key=%22%3E",
            ),
            ("least=-1&most=1e9&by=week&gateway=%00", "range=24h"),
            (
                &format!("range=7d&from=2026-01-09T00:00&to=2026-01-16T00:00&{typed}"),
                "range=7d",
            ),
            (
                &format!("range=7d&from=2026-01-10&to=2026-01-10&{typed}"),
                "range=2026-01-10",
            ),
            (
                "from=2026-01-14T00:00&to=2026-01-15T00:00",
                "range=2026-01-14",
            ),
        ] {
            assert_eq!(
                address("/requests", text),
                format!("/requests?{understood}"),
                "{text}"
            );
        }
        for nonsense in ["", "page=0&state=x&q=+", "state=active&page=-1"] {
            assert_eq!(address("/keys", nonsense), "/keys", "{nonsense}");
        }
    }

    #[test]
    fn a_link_has_the_fields_of_its_page_and_another_list_begins_at_its_start() {
        let utc = Zone::utc();
        let requests = query(
            "/requests",
            "range=7d&outcome=ok&cause=body&before=chatcmpl_0123456789abcdef0123456789abcdef",
            &utc,
        );
        let before = "before=chatcmpl_0123456789abcdef0123456789abcdef";
        for (path, change, expected) in [
            (
                "/requests",
                &[][..],
                format!("/requests?range=7d&outcome=ok&cause=body&{before}"),
            ),
            (
                "/requests/x",
                &[],
                format!("/requests/x?range=7d&outcome=ok&cause=body&{before}"),
            ),
            (
                "/requests",
                &[("outcome", "")],
                "/requests?range=7d&cause=body".into(),
            ),
            (
                "/requests",
                &[("after", "y")],
                "/requests?range=7d&outcome=ok&cause=body&after=y".into(),
            ),
            (
                "/usage",
                &[("by", "day")],
                "/usage?range=7d&outcome=ok&by=day".into(),
            ),
            ("/status", &[], "/status".into()),
        ] {
            assert_eq!(requests.link(path, change), expected, "{path} {change:?}");
        }
        let keys = query("/keys", "q=a&page=2", &utc);
        assert_eq!(
            keys.link("/keys", &[("changed", "k")]),
            "/keys?q=a&page=2&changed=k"
        );
        assert_eq!(
            keys.link("/keys", &[("sort", "name")]),
            "/keys?sort=name&q=a"
        );
    }

    #[test]
    fn a_range_that_can_not_be_displayed_is_refused() {
        for (text, message) in [
            ("from=9998-12-31", "in the future"),
            ("from=2026-01-14&to=2026-01-01", "ends before it begins"),
            (
                "from=2026-01-14T13:00&to=2026-01-14T13:00",
                "ends before it begins",
            ),
            ("from=yesterday", "from takes a date"),
            ("from=2026-01-14&to=2026-02-30", "to takes a date"),
            ("range=2026-01-14..x", "to takes a date"),
            ("from=2015-12-31&to=2026-01-14", "longer than ten years"),
            ("from=1969-12-31&to=1970-01-14", "before 1970"),
        ] {
            let query = Query::parse("/usage", &Form::parse(text), NOW, &Zone::utc());
            let query = query.and_then(|query| query.clone().bounded(query.range));
            let error = query.expect_err(text);
            assert!(error.contains(message), "{text}: {error}");
        }
    }

    #[test]
    fn days_and_months_are_those_of_the_place() {
        let zagreb = zone("Europe/Zagreb");
        for (text, expected) in [
            (
                "range=24h",
                "2026-01-14T13:03+01:00..2026-01-15T13:03+01:00",
            ),
            ("range=7d", "2026-01-09..2026-01-15"),
            ("range=last-month", "2025-12-01..2025-12-31"),
            ("from=2025-10-26&to=2025-10-26", "2025-10-26"),
            // Both exist twice.
            (
                "from=2025-10-26T02:15&to=2025-10-26T02:30",
                "2025-10-26T02:15+02:00..2025-10-26T02:30+01:00",
            ),
            // A form that was sent as it was keeps the second 02:30.
            (
                "from=2025-10-26T02:15&to=2025-10-26T02:30&displayed=2025-10-26T02:15+2025-10-26T02:30\
                 &range=2025-10-26T02:15%2B01:00..2025-10-26T02:30%2B01:00",
                "2025-10-26T02:15+01:00..2025-10-26T02:30+01:00",
            ),
        ] {
            let found = query("/usage", text, &zagreb);
            let exact = found.between(found.range);
            assert_eq!(exact.get("range"), expected, "{text}");
            let link = exact.link("/usage", &[]);
            let again = query("/usage", link.trim_start_matches("/usage?"), &zagreb);
            assert_eq!(again.range, found.range, "{text}");
        }
        let skipped = Query::parse(
            "/usage",
            &Form::parse("from=2025-03-30T02:30"),
            NOW,
            &zagreb,
        );
        let error = skipped.expect_err("no such time");
        assert!(error.contains("does not exist in Europe/Zagreb"), "{error}");
        let found = query(
            "/usage",
            "from=2025-10-25T00:00&to=2025-10-26T12:00:05",
            &zagreb,
        );
        assert_eq!(found.times(), ["2025-10-25T00:00", "2025-10-26T12:00:05"]);
        assert_eq!(found.range.until - found.range.since, 37 * 3600 + 5);
        assert_eq!(
            found.day_field("2025-10-26"),
            "2025-10-26T00:00+02:00..2025-10-26T12:00:05+01:00"
        );
    }

    #[test]
    fn days_and_months_are_whole_and_hours_end_with_this_minute() {
        for (text, expected) in [
            ("range=1h", "2026-01-15T11:03..2026-01-15T12:03"),
            ("range=24h", "2026-01-14T12:03..2026-01-15T12:03"),
            ("range=7d", "2026-01-09..2026-01-15"),
            ("range=30d", "2025-12-17..2026-01-15"),
            ("range=month", "2026-01-01..2026-01-15"),
            ("range=last-month", "2025-12-01..2025-12-31"),
        ] {
            let found = query("/usage", text, &Zone::utc());
            assert_eq!(found.range_field(found.range), expected, "{text}");
        }
        assert_eq!(query("/usage", "range=all", &Zone::utc()).range, Range::ALL);
        let open = Query::parse("/usage", &Form::parse("from=2026-01-14"), NOW, &Zone::utc());
        assert_eq!(
            open.expect("a range").range.until,
            i64::MAX,
            "as the command's --since alone"
        );
    }

    #[test]
    fn a_text_means_one_key_or_all_of_a_name() {
        let key = |id: &str, name: &str, hint: &str| Key {
            id: id.into(),
            name: name.into(),
            hint: hint.into(),
            ..Key::example()
        };
        let keys = [
            key("key_1", "twin", "adr_aaaa…0001"),
            key("key_2", "twin", "adr_bbbb…0002"),
            key("key_3", "twine", "adr_cccc…0003"),
        ];
        for (text, word, found) in [
            ("key_2", Some("key_2"), 1),
            ("twin adr_bbbb…0002", Some("key_2"), 1),
            ("twin", Some("twin"), 2),
            ("TWINE", Some("key_3"), 1),
            ("TWIN", None, 3),
            ("x", None, 0),
        ] {
            let (meant, matching) = find_keys(&keys, text);
            assert_eq!((meant.as_deref(), matching.len()), (word, found), "{text}");
        }
    }

    #[test]
    fn values_and_back() {
        let form = Form::parse("a=1&b=x+y%20z&a=2&c&=d&&e=%zz%4&f=%C3%A9%ff");
        assert_eq!(
            (form.get("a"), form.get("b"), form.get("c")),
            ("1", "x y z", "")
        );
        assert_eq!(form.all("a").collect::<Vec<_>>(), ["1", "2"]);
        assert_eq!(
            (form.get("e"), form.get("f"), form.get("nothing")),
            ("%zz%4", "é\u{fffd}", "")
        );
        for text in ["", "plain", "a b&c=d+e%", "é☂\"<>\r\n\0"] {
            let link = link("/", [("y", "1"), ("x", text)]);
            assert_eq!(Form::parse(link.trim_start_matches("/?")).get("x"), text);
        }
    }
}
