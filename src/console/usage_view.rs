//! The range of time, the filters and the order of the usage and requests pages, as their addresses have them.

use super::bar_interval::{BarInterval, DAY, HOUR};
use super::form::{Form, link};
use super::html_table::SortOrder;
use super::key_list;
use super::usage_by_key::{COLUMNS, DEFAULT_ORDER};
use crate::store::{Filter, Key, Matching, Range, RowFilter, SecretUse, Span, Store, StoreError};
use crate::when::{self, When};

/// The ranges that are offered beside two dates.
pub const CHOICES: [(&str, &str); 7] = [
    ("1h", "Hour"),
    ("24h", "24 hours"),
    ("7d", "7 days"),
    ("30d", "30 days"),
    ("90d", "90 days"),
    ("month", "This month"),
    ("last-month", "Last month"),
];

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

/// The longest ranges that have bars of minutes and of hours. Minutes are counted from rows, so only the last
/// two hours have them.
const MINUTES_FOR: i64 = 2 * HOUR;
const HOURS_FOR: i64 = 8 * DAY;

/// The most rows that are counted for bars of minutes: more would take too long.
const MOST_COUNTED: i64 = 200_000;

/// The longest text in place of a key: a name and what tells it from others of that name.
const LONGEST_KEY_TEXT: usize = 100;

/// The longest range between two dates: 60 years.
const LONGEST: i64 = 60 * 366 * DAY;

#[derive(Clone, Debug)]
pub struct UsageView {
    /// One of `CHOICES`, or "times".
    pub choice: &'static str,
    /// The range of the rows.
    pub range: Range,
    /// The range of the figures: whole spans.
    pub covered: Range,
    pub span: Span,
    pub step: BarInterval,
    pub starts: Vec<i64>,
    pub key: Option<String>,
    /// The text in place of a key's id, until a key is found by it. If none is, the figures are those of no key.
    pub key_text: String,
    /// A gateway that shares the database.
    pub gateway: Option<String>,
    /// The word in the address: empty, ok, failed or a code.
    pub outcome: String,
    /// Filters listed requests only, as the durations do: the sums have neither causes nor durations.
    pub cause: String,
    pub least_ms: Option<u32>,
    pub most_ms: Option<u32>,
    /// The order of the table by key.
    pub order: SortOrder,
}

impl UsageView {
    /// Reads a query. Ignores what it does not understand: a mistyped address still leads to a page.
    pub fn read(query: &Form, now: i64) -> Self {
        let next = |width: i64| (now.div_euclid(width) + 1) * width;
        let back = |until: i64, time: i64| Range { since: until - time, until };
        let month_start = |time: i64| when::month(time).map_or(0, |month| month.since);
        let this_month = month_start(now);
        // The form also sends the times of a named range, and how it showed them: they count if they were changed.
        let is_changed = format!("{} {}", query.get("from"), query.get("to")).trim() != query.get("shown");
        let named =
            CHOICES.iter().map(|(word, _)| *word).find(|word| *word == query.get("range") && !is_changed);
        let times = times(query, now);
        let choice = named.unwrap_or(if times.is_some() { "times" } else { "24h" });
        let range = match (choice, times, When::parse(choice)) {
            ("times", Some(range), _) => range,
            // Today and the days before it.
            (_, _, Some(When::Days(days))) => back(next(DAY), days * DAY),
            ("1h", ..) => back(next(60), HOUR),
            ("month", ..) => Range { since: this_month, until: next(DAY) },
            ("last-month", ..) => Range { since: month_start(this_month - 1), until: this_month },
            _ => back(next(HOUR), DAY),
        };
        let span = match range.until - range.since {
            ..=MINUTES_FOR if has_minutes(range.since, now) => Span::Minute,
            ..=HOURS_FOR => Span::Hour,
            _ => Span::Day,
        };
        let (covered, step, starts) = bars(range, span);
        let outcome = query.get("outcome");
        let gateway = Some(query.get("gateway")).filter(|name| (1..=64).contains(&name.len()));
        let is_known = matches!(outcome, "ok" | "failed") || CODES.contains(&outcome);
        Self {
            choice,
            range,
            covered,
            span,
            step,
            starts,
            key: None,
            key_text: query.get("key").trim().chars().take(LONGEST_KEY_TEXT).collect(),
            gateway: gateway.map(String::from),
            outcome: if is_known { outcome.into() } else { String::new() },
            cause: Some(query.get("cause").trim()).filter(|word| is_cause(word)).unwrap_or("").to_owned(),
            least_ms: query.get("least").parse().ok(),
            most_ms: query.get("most").parse().ok(),
            order: SortOrder::parse(query.get("sort"), &COLUMNS).unwrap_or(DEFAULT_ORDER),
        }
    }

    /// The bar that a time belongs to.
    pub fn bar(&self, time: i64) -> Option<usize> {
        let before = self.starts.partition_point(|start| *start <= time);
        before.checked_sub(1).filter(|_| time < self.covered.until)
    }

    pub fn end(&self, bar: usize) -> i64 {
        self.starts.get(bar + 1).copied().unwrap_or(self.covered.until)
    }

    /// The page with the interval of a bar: its figures by shorter bars, or its requests if there are none.
    pub fn bar_address(&self, bar: usize, now: i64) -> String {
        let range = Range { since: self.starts[bar], until: self.end(bar) };
        let inside = Self { choice: "times", range, ..self.clone() };
        let is_divided = match self.span {
            Span::Minute => false,
            Span::Hour => range.until - range.since > HOUR || has_minutes(range.since, now),
            Span::Day => true,
        };
        inside.address(if is_divided { "/usage" } else { "/requests" })
    }

    /// This view with bars of hours, if there are too many rows to be counted by the minute.
    pub fn countable(self, store: &Store) -> Result<Self, StoreError> {
        if self.span != Span::Minute {
            return Ok(self);
        }
        let (covered, step, starts) = bars(self.range, Span::Hour);
        let mut requests = 0;
        store.figures(Span::Hour, covered, Filter::ALL, &Matching::Anything, |row| {
            requests += row.sums.requests
        })?;
        Ok(if requests > MOST_COUNTED {
            Self { span: Span::Hour, covered, step, starts, ..self }
        } else {
            self
        })
    }

    pub fn matching(&self) -> Matching {
        match self.outcome.as_str() {
            "" => Matching::Anything,
            "ok" => Matching::Success,
            "failed" => Matching::Failure,
            code => Matching::Code(code.into()),
        }
    }

    /// The key's id, or the text in its place, which is the id of no key.
    fn key_id(&self) -> Option<&str> {
        self.key.as_deref().or(Some(self.key_text.as_str()).filter(|text| !text.is_empty()))
    }

    pub fn filter(&self) -> Filter<'_> {
        Filter { key_id: self.key_id(), gateway: self.gateway.as_deref() }
    }

    pub fn row_filter(&self) -> RowFilter {
        RowFilter {
            range: self.range,
            key_id: self.key_id().map(String::from),
            gateway: self.gateway.clone(),
            matching: self.matching(),
            cause: Some(self.cause.clone()).filter(|cause| !cause.is_empty()),
            least_ms: self.least_ms,
            most_ms: self.most_ms,
        }
    }

    /// The start and the end of the range, as a field of a form has them.
    pub fn times(&self) -> [String; 2] {
        let time = |time| when::iso(time).unwrap_or_default().replace(":00Z", "").replace('Z', "");
        [self.range.since, self.range.until].map(time)
    }

    /// The same for an address or a file's name: whole days as dates, the last one included.
    pub fn dates(&self) -> [String; 2] {
        self.range.bounds().map(|bound| bound.replace('Z', ""))
    }

    /// The names and values in an address or a form, the range first. Empty values are left out there.
    pub fn fields(&self) -> Vec<(&'static str, String)> {
        let [from, to] = self.dates();
        let mut fields = match self.choice {
            "times" => vec![("from", from), ("to", to)],
            choice => vec![("range", choice.into())],
        };
        let number = |value: Option<u32>| value.map_or(String::new(), |value| value.to_string());
        fields.extend([
            ("key", self.key_id().unwrap_or_default().to_owned()),
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
        Self { cause: String::new(), least_ms: None, most_ms: None, ..self.clone() }
    }

    /// The requests of this view with an outcome.
    pub fn requests_address(&self, outcome: &str) -> String {
        Self { outcome: outcome.into(), ..self.clone() }.address("/requests")
    }

    /// This view with the key that its text means, if it means one: as the key's field has it, with its mark at the end, or
    /// as the commands take it, or by a part of its name.
    pub fn with_key(self, store: &Store, keys: &[Key]) -> Result<Self, StoreError> {
        if self.key_text.is_empty() {
            return Ok(self);
        }
        let is_marked = |key: &&Key| self.key_text.rsplit(' ').next() == Some(key.mark());
        let is_part = |key: &&Key| key_list::is_match(key, &self.key_text);
        let mut found: Vec<Key> = keys.iter().filter(is_marked).cloned().collect();
        if found.is_empty() {
            found = store.resolve_key(&self.key_text, SecretUse::Refused)?;
        }
        if found.is_empty() {
            found = keys.iter().filter(is_part).cloned().collect();
        }
        Ok(match found.as_slice() {
            [key] => Self { key: Some(key.id.clone()), key_text: String::new(), ..self },
            _ => self,
        })
    }
}

fn has_minutes(since: i64, now: i64) -> bool {
    since >= now - MINUTES_FOR
}

/// The whole spans that cover a range, the interval of their bars, and the starts of these.
fn bars(range: Range, span: Span) -> (Range, BarInterval, Vec<i64>) {
    let seconds = span.seconds();
    let start = |time: i64| time.div_euclid(seconds) * seconds;
    let covered = Range { since: start(range.since), until: start(range.until + seconds - 1) };
    let (step, starts) = BarInterval::fitting(covered, span);
    (covered, step, starts)
}

/// Reads two dates or times in any order, or one that stands for both: a day or a minute.
fn times(query: &Form, now: i64) -> Option<Range> {
    let time =
        |name| When::parse(query.get(name)).filter(|when| matches!(when, When::Date(_) | When::Time(_)));
    let (from, to) = (time("from"), time("to"));
    let (from, to) = (from.or(to)?, to.or(from)?);
    let (from, to) = if to.begin(now) < from.begin(now) { (to, from) } else { (from, to) };
    let Range { since, until } = Range::between(Some(from), Some(to), now);
    let until = if until > since { until } else { since + 60 };
    (until - since <= LONGEST && since >= 0).then_some(Range { since, until })
}

fn is_cause(text: &str) -> bool {
    text.len() <= 40
        && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::bar_interval::MONDAY;
    use crate::store::tests::Temporary;

    /// 2026-01-15 12:02:03, a Thursday.
    const NOW: i64 = 1_768_478_523;

    fn view(query: &str) -> UsageView {
        UsageView::read(&Form::parse(query), NOW)
    }

    #[test]
    fn an_address_leads_back_to_itself() {
        for query in [
            "range=1h",
            "range=last-month",
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
            ("range=nonsense&key=%22%3E&outcome=%3Cscript%3E", "range=24h&key=%22%3E"),
            ("least=-1&most=1e9", "range=24h"),
            (
                "range=7d&from=2026-01-09T00:00&to=2026-01-16T00:00&shown=2026-01-09T00:00+2026-01-16T00:00",
                "range=7d",
            ),
            (
                "range=7d&from=2026-01-10&to=2026-01-10&shown=2026-01-09+2026-01-15",
                "from=2026-01-10&to=2026-01-10",
            ),
            ("from=2026-01-14&to=2026-01-01", "from=2026-01-01&to=2026-01-14"),
            ("from=2026-01-14", "from=2026-01-14&to=2026-01-14"),
            ("from=2026-01-14T13:00", "from=2026-01-14T13:00&to=2026-01-14T13:01"),
            ("from=2026-01-14T00:00&to=2026-01-15T00:00", "from=2026-01-14&to=2026-01-14"),
            ("from=0001-01-01&to=9999-12-31", "range=24h"),
            ("from=1960-01-01&to=1961-01-01", "range=24h"),
        ] {
            assert_eq!(view(query).address("/usage"), format!("/usage?{understood}"), "{query}");
        }
    }

    #[test]
    fn the_minutes_of_too_many_rows_are_shown_by_the_hour() {
        let temporary = Temporary::new();
        let countable = || view("range=1h").countable(&temporary.store).expect("a look");
        assert_eq!((countable().span, countable().starts.len()), (Span::Minute, 60));
        temporary.store.tamper(&format!(
            "INSERT INTO usage_rollup VALUES (3600, {}, 'key_1', '', 200, '', '', {}, 0, 0, 0, 0)",
            NOW / HOUR * HOUR,
            MOST_COUNTED + 1
        ));
        assert_eq!((countable().span, countable().starts.len()), (Span::Hour, 2));
        let range = view("range=24h").countable(&temporary.store).expect("a look").range;
        assert_eq!(range.until - range.since, DAY, "no other range is changed");
    }

    #[test]
    fn ranges_are_whole_days_and_months() {
        for (query, from, to) in [
            ("range=7d", "2026-01-09", "2026-01-15"),
            ("range=30d", "2025-12-17", "2026-01-15"),
            ("range=month", "2026-01-01", "2026-01-15"),
            ("range=last-month", "2025-12-01", "2025-12-31"),
        ] {
            let view = view(query);
            assert_eq!(view.dates(), [from, to], "{query}");
            assert_eq!((view.range.since % DAY, view.range.until % DAY), (0, 0), "{query}");
        }
    }

    #[test]
    fn bars_are_few_and_cover_the_range() {
        for (query, bars, step) in [
            ("range=1h", 60, BarInterval::Seconds(60)),
            ("range=24h", 24, BarInterval::Seconds(HOUR)),
            ("range=7d", 28, BarInterval::Seconds(6 * HOUR)),
            ("range=30d", 30, BarInterval::DAY),
            ("range=90d", 14, BarInterval::Week),
            ("range=month", 15, BarInterval::DAY),
            ("range=last-month", 31, BarInterval::DAY),
            ("from=2026-01-15&to=2026-01-15", 24, BarInterval::Seconds(HOUR)),
            ("from=2025-01-01&to=2025-01-01", 24, BarInterval::Seconds(HOUR)),
            ("from=2024-01-01&to=2024-01-01", 24, BarInterval::Seconds(HOUR)),
            ("from=2026-01-13T13:30&to=2026-01-15T12:00", 47, BarInterval::Seconds(HOUR)),
            ("from=2026-01-15T11:10&to=2026-01-15T11:20", 10, BarInterval::Seconds(60)),
            ("from=2026-01-15T10:05&to=2026-01-15T12:00", 58, BarInterval::Seconds(120)),
            ("from=2025-01-01&to=2025-12-31", 12, BarInterval::Month),
            ("from=2020-01-16&to=2026-01-15", 73, BarInterval::Month),
            ("from=1996-01-01&to=2026-01-01", 31, BarInterval::Year),
        ] {
            let view = view(query);
            assert_eq!((view.starts.len(), view.step), (bars, step), "{query}");
            assert_eq!(view.covered.since % view.span.seconds(), 0, "{query}");
            assert_eq!(
                (view.starts[0], view.end(bars - 1)),
                (view.covered.since, view.covered.until),
                "{query}"
            );
            for (bar, start) in view.starts.iter().enumerate() {
                assert_eq!(start % view.span.seconds(), 0, "{query}: a sum belongs to one bar");
                assert_eq!(
                    (view.bar(*start), view.bar(view.end(bar) - 1)),
                    (Some(bar), Some(bar)),
                    "{query}"
                );
            }
            assert_eq!(
                (view.bar(view.covered.since - 1), view.bar(view.covered.until)),
                (None, None),
                "{query}"
            );
            if query.starts_with("range") && query != "range=last-month" {
                assert!(view.range.until > NOW, "{query}");
            }
        }
        let months = view("from=2025-12-16&to=2026-11-15").starts;
        let dates: Vec<String> =
            months.iter().map(|start| when::iso(*start).expect("a time")[..10].to_owned()).collect();
        assert_eq!(dates[..3], ["2025-12-16", "2026-01-01", "2026-02-01"]);
        let weeks = view("range=90d").starts;
        assert!(weeks[1..].iter().all(|start| (start - MONDAY) % (7 * DAY) == 0), "{weeks:?}");
    }
}
