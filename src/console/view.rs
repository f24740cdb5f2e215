//! What the usage page shows, as its address says it: a range of time and filters.

use super::form::Form;
use crate::store::{Filter, Matching, Range, Span, Which};
use crate::text::percent_encoded;
use crate::when::{self, When};

/// The ranges that are offered beside two dates.
pub const CHOICES: [(&str, &str); 5] =
    [("1h", "Hour"), ("24h", "24 hours"), ("7d", "7 days"), ("30d", "30 days"), ("90d", "90 days")];

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

/// The most bars of a chart: a phone has room for them, and a page for their titles.
const BARS: i64 = 31;

/// How wide a bar may be, in seconds: what people count in.
const WIDTHS: [i64; 14] = [
    60,
    120,
    300,
    3600,
    2 * 3600,
    3 * 3600,
    6 * 3600,
    12 * 3600,
    DAY,
    7 * DAY,
    14 * DAY,
    30 * DAY,
    90 * DAY,
    365 * DAY,
];

const DAY: i64 = 86_400;
const HOUR: i64 = 3600;

/// How far back two dates are shown by hour.
const HOURS_SHOWN: i64 = 10 * DAY;

/// The longest range between two dates.
const LONGEST: i64 = BARS * 365 * DAY;

#[derive(Clone, Debug)]
pub struct View {
    /// One of `CHOICES`, or "dates".
    pub choice: &'static str,
    pub range: Range,
    pub span: Span,
    /// Seconds of a bar.
    pub width: i64,
    pub key: Option<String>,
    /// As the address has it: empty, ok, failed or a code.
    pub outcome: String,
}

impl View {
    /// What is not understood is passed over: an address that somebody mistyped still shows something.
    pub fn read(query: &Form, now: i64) -> Self {
        let next = |width: i64| (now.div_euclid(width) + 1) * width;
        let back = |until: i64, time: i64| Range { since: until - time, until };
        let named = CHOICES.iter().map(|(word, _)| *word).find(|word| *word == query.get("range"));
        let (choice, range, span) = match (named, dates(query)) {
            (Some("1h"), _) => ("1h", back(next(60), HOUR), Span::Minute),
            (Some("7d"), _) => ("7d", back(next(DAY), 7 * DAY), Span::Hour),
            (Some("30d"), _) => ("30d", back(next(DAY), 30 * DAY), Span::Day),
            (Some("90d"), _) => ("90d", back(next(DAY), 90 * DAY), Span::Day),
            (None, Some(range)) => {
                let is_short = range.until - range.since <= 8 * DAY && range.since >= now - HOURS_SHOWN;
                ("dates", range, if is_short { Span::Hour } else { Span::Day })
            }
            _ => ("24h", back(next(HOUR), 24 * HOUR), Span::Hour),
        };
        let length = range.until - range.since;
        let width = WIDTHS.into_iter().find(|width| *width >= span.seconds() && length <= BARS * width);
        let outcome = query.get("outcome");
        let is_known = matches!(outcome, "ok" | "failed") || CODES.contains(&outcome);
        Self {
            choice,
            range,
            span,
            width: width.unwrap_or(365 * DAY),
            key: Some(query.get("key")).filter(|key| is_key_id(key)).map(String::from),
            outcome: if is_known { outcome.into() } else { String::new() },
        }
    }

    pub fn bars(&self) -> usize {
        let length = self.range.until - self.range.since;
        usize::try_from((length + self.width - 1) / self.width).unwrap_or(0).max(1)
    }

    /// When a bar begins.
    pub fn start(&self, bar: usize) -> i64 {
        self.range.since + bar as i64 * self.width
    }

    pub fn matching(&self) -> Matching {
        match self.outcome.as_str() {
            "" => Matching::Anything,
            "ok" => Matching::Success,
            "failed" => Matching::Failure,
            code => Matching::Code(code.into()),
        }
    }

    pub fn filter(&self) -> Filter<'_> {
        Filter { key_id: self.key.as_deref(), ..Filter::ALL }
    }

    pub fn which(&self) -> Which {
        Which { range: self.range, key_id: self.key.clone(), gateway: None, matching: self.matching() }
    }

    /// The two dates that it is between, the last one included.
    pub fn dates(&self) -> (String, String) {
        let date = |time| when::shown(Some(time))[..10].to_owned();
        (date(self.range.since), date(self.range.until - 1))
    }

    /// The part of an address that leads here.
    pub fn query(&self) -> String {
        let mut query = match self.choice {
            "dates" => {
                let (from, to) = self.dates();
                format!("from={from}&to={to}")
            }
            choice => format!("range={choice}"),
        };
        if let Some(key) = &self.key {
            query += &format!("&key={}", percent_encoded(key));
        }
        if !self.outcome.is_empty() {
            query += &format!("&outcome={}", percent_encoded(&self.outcome));
        }
        query
    }

    pub fn with_outcome(&self, outcome: &str) -> Self {
        Self { outcome: outcome.into(), ..self.clone() }
    }
}

/// Two dates, or one that stands for both.
fn dates(query: &Form) -> Option<Range> {
    let date = |name| match When::parse(query.get(name)) {
        Some(When::Date(date)) => Some(date),
        _ => None,
    };
    let (from, to) = (date("from"), date("to"));
    let (from, to) = (from.or(to)?, to.or(from)?);
    let range = Range { since: from.min(to), until: from.max(to) + DAY };
    (range.until - range.since <= LONGEST && range.since >= 0).then_some(range)
}

fn is_key_id(text: &str) -> bool {
    text.strip_prefix("key_")
        .is_some_and(|rest| rest.len() <= 64 && rest.bytes().all(|b| b.is_ascii_alphanumeric()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_768_478_523;

    #[test]
    fn an_address_leads_back_to_itself() {
        for query in [
            "range=1h",
            "range=24h&key=key_0123456789abcdef",
            "range=90d&outcome=failed",
            "from=2026-01-01&to=2026-01-14&outcome=inference_error",
        ] {
            assert_eq!(View::read(&Form::parse(query), NOW).query(), query);
        }
        for (query, understood) in [
            ("", "range=24h"),
            ("range=nonsense&key=%22%3E&outcome=%3Cscript%3E", "range=24h"),
            ("from=2026-01-14&to=2026-01-01", "from=2026-01-01&to=2026-01-14"),
            ("from=2026-01-14", "from=2026-01-14&to=2026-01-14"),
            ("from=0001-01-01&to=9999-12-31", "range=24h"),
            ("from=1960-01-01&to=1961-01-01", "range=24h"),
        ] {
            assert_eq!(View::read(&Form::parse(query), NOW).query(), understood, "{query}");
        }
    }

    #[test]
    fn bars_are_few_and_cover_the_range() {
        for (query, bars, width) in [
            ("range=1h", 30, 120),
            ("range=24h", 24, HOUR),
            ("range=7d", 28, 6 * HOUR),
            ("range=30d", 30, DAY),
            ("range=90d", 13, 7 * DAY),
            ("from=2026-01-15&to=2026-01-15", 24, HOUR),
            ("from=2025-01-01&to=2025-01-01", 1, DAY),
            ("from=2025-01-01&to=2025-12-31", 27, 14 * DAY),
            ("from=1996-01-01&to=2026-01-01", 31, 365 * DAY),
        ] {
            let view = View::read(&Form::parse(query), NOW);
            assert_eq!((view.bars(), view.width), (bars, width), "{query}");
            assert_eq!(view.width % view.span.seconds(), 0, "{query}");
            assert_eq!(view.range.since % view.span.seconds(), 0, "{query}");
            assert!(view.start(view.bars()) >= view.range.until, "{query}");
            if query.starts_with("range") {
                assert!(view.range.until > NOW && view.range.since >= view.span.kept_since(NOW), "{query}");
            }
        }
    }
}
