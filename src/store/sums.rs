//! Usage reports: whole days or hours from the rollup, the rest of a range from its rows.

use std::sync::LazyLock;

use serde::Serialize;
use serde_json::{Map, Value};

use super::chain::KEPT_SINCE;
use super::engine::{self, Row, values};
use super::{Span, Store, StoreError, date};
use crate::id::RequestId;

/// A range of time: from the first second to before the second.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    pub since: i64,
    pub until: i64,
}

impl Range {
    pub const ALL: Self = Self { since: i64::MIN, until: i64::MAX };
}

/// Whose requests are counted; `None` for all.
#[derive(Clone, Copy, Debug)]
pub struct Filter<'a> {
    pub key_id: Option<&'a str>,
    pub gateway: Option<&'a str>,
}

impl Filter<'_> {
    pub const ALL: Self = Self { key_id: None, gateway: None };
}

/// What sums are grouped by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grouping {
    Hour,
    Day,
    Month,
    Key,
    Status,
    Gateway,
}

impl Grouping {
    pub const ALL: [(&str, Self); 6] = [
        ("hour", Self::Hour),
        ("day", Self::Day),
        ("month", Self::Month),
        ("key", Self::Key),
        ("status", Self::Status),
        ("gateway", Self::Gateway),
    ];

    /// The members that name a group.
    pub fn labels(self) -> &'static [&'static str] {
        match self {
            Self::Hour => &["hour"],
            Self::Day => &["day"],
            Self::Month => &["month"],
            Self::Key => &["key_id", "name"],
            Self::Status => &["status", "error_code"],
            Self::Gateway => &["gateway"],
        }
    }

    /// The spans of the rollup that serve it.
    fn span(self) -> Span {
        match self {
            Self::Hour => Span::Hour,
            _ => Span::Day,
        }
    }

    /// What the pieces are grouped by. Dates are numbers here, because databases write them in different ways.
    fn expressions(self) -> &'static str {
        match self {
            Self::Hour => "time / 3600, 0",
            Self::Day | Self::Month => "time / 86400, 0",
            Self::Key => "key_id, key_name",
            Self::Status => "status, error_code",
            Self::Gateway => "gateway, 0",
        }
    }

    fn order(self) -> &'static str {
        match self {
            Self::Key => "3 DESC, 1, 2",
            _ => "1 NULLS FIRST, 2 NULLS FIRST",
        }
    }

    /// The name of a group, as it is shown.
    fn shown(self, group: engine::Value) -> Value {
        match (self, group) {
            (Self::Hour, engine::Value::Int(hour)) => {
                let hour_of_day = hour.rem_euclid(24);
                format!("{}T{hour_of_day:02}:00Z", date(hour.div_euclid(24))).into()
            }
            (Self::Day, engine::Value::Int(day)) => date(day).into(),
            (Self::Month, engine::Value::Int(day)) => {
                date(day).rsplit_once('-').map_or("", |(month, _)| month).into()
            }
            (_, engine::Value::Int(number)) => number.into(),
            (_, engine::Value::Text(text)) => text.into(),
            _ => Value::Null,
        }
    }
}

/// Figures over some requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sums {
    pub requests: i64,
    /// Requests that did not end in 200, without those that are still running.
    pub errors: i64,
    pub prompt_tokens: i64,
    pub completion_tokens: i64,
    pub total_tokens: i64,
    /// Completions whose total the runtime did not measure: the sums are short by theirs.
    pub unmeasured: i64,
}

/// One group: what names it, and its figures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UsageRow {
    #[serde(flatten)]
    pub labels: Map<String, Value>,
    #[serde(flatten)]
    pub sums: Sums,
}

impl Sums {
    /// In the order of their columns.
    fn all(&mut self) -> [&mut i64; 6] {
        let Self { requests, errors, prompt_tokens, completion_tokens, total_tokens, unmeasured } = self;
        [requests, errors, prompt_tokens, completion_tokens, total_tokens, unmeasured]
    }

    pub fn add(&mut self, other: &Self) {
        for (sum, more) in self.all().into_iter().zip(other.clone().all()) {
            *sum = sum.saturating_add(*more);
        }
    }

    fn read(mut row: Row) -> Result<Self, StoreError> {
        let mut sums = Self::default();
        for sum in sums.all() {
            // A sum of nothing is null.
            *sum = row.next::<Option<i64>>()?.unwrap_or_default();
        }
        Ok(sums)
    }
}

impl Store {
    pub fn sums(&self, range: Range, filter: Filter) -> Result<Sums, StoreError> {
        let mut all = Sums::default();
        self.grouped(range, filter, Grouping::Status, |row| all.add(&row.sums))?;
        Ok(all)
    }

    /// Calls `take` with one group after the other, so that the memory does not grow with their number. Returns the time
    /// before which requests of the range are missing, if there are such: hours are not kept as long as days.
    pub fn grouped(
        &self,
        range: Range,
        filter: Filter,
        by: Grouping,
        mut take: impl FnMut(UsageRow),
    ) -> Result<Option<i64>, StoreError> {
        let Range { since, until } = range;
        if until <= since {
            return Ok(None);
        }
        let statement = format!(
            "SELECT {}, {SUMS} FROM ({}) AS pieces WHERE (CAST($8 AS TEXT) IS NULL OR key_id = $8)
             AND (CAST($9 AS TEXT) IS NULL OR gateway = $9) GROUP BY 1, 2 HAVING sum(requests) <> 0 ORDER BY {}",
            by.expressions(),
            *PIECES,
            by.order()
        );
        // Days become months here.
        let mut last: Option<UsageRow> = None;
        let removed_before = self.engine.read(|session| {
            let span = by.span();
            let kept_since: i64 = session.value(KEPT_SINCE, &[])?;
            let first = |span: Span| -> Result<Option<i64>, StoreError> {
                session.value("SELECT min(start) FROM usage_rollup WHERE span = $1", &values![span.seconds()])
            };
            let first_span = first(span)?.unwrap_or(i64::MAX);
            let whole = whole_spans(range, span, first_span, kept_since);
            let parameters = values![
                whole.since,
                whole.until,
                RequestId::from(since),
                RequestId::from(whole.since.min(until)),
                RequestId::from(whole.until.max(whole.since)),
                RequestId::from(until),
                span.seconds(),
                filter.key_id,
                filter.gateway,
            ];
            session.query(&statement, &parameters, &mut |mut row| {
                let groups = [row.next()?, row.next()?];
                let names = by.labels().iter().zip(groups);
                let labels = names.map(|(name, group)| ((*name).into(), by.shown(group))).collect();
                let found = UsageRow { labels, sums: Sums::read(row)? };
                match &mut last {
                    Some(last) if last.labels == found.labels => last.sums.add(&found.sums),
                    last => last.replace(found).into_iter().for_each(&mut take),
                }
                Ok(())
            })?;
            let removed_before = first_span.min(kept_since);
            // Days are kept for good, so the first of them says whether there was anything to remove.
            let first_day = first(Span::Day)?.unwrap_or(i64::MAX);
            let is_incomplete = first_day < removed_before && since < removed_before && first_day < until;
            Ok(is_incomplete.then_some(removed_before))
        })?;
        last.into_iter().for_each(take);
        Ok(removed_before)
    }
}

const SUMS: &str = "CAST(sum(requests) AS BIGINT), CAST(sum(errors) AS BIGINT), CAST(sum(prompt_tokens) AS BIGINT),
    CAST(sum(completion_tokens) AS BIGINT), CAST(sum(total_tokens) AS BIGINT), CAST(sum(unmeasured) AS BIGINT)";

/// Whole spans from the rollup, the sealed rows before and after them, and all rows that are not sealed. An open row is a
/// request and no error yet. The three parts are not one condition with OR: SQLite would keep the id of every row it has
/// read, to return none twice.
pub(super) static PIECES: LazyLock<String> = LazyLock::new(|| {
    let rows = "UNION ALL SELECT created, key_id, key_name, status, error_code, gateway, 1,
        CASE WHEN status = 200 OR (status IS NULL AND error_code IS NULL) THEN 0 ELSE 1 END,
        prompt_tokens, completion_tokens, total_tokens,
        CASE WHEN status = 200 AND total_tokens IS NULL THEN 1 ELSE 0 END
    FROM usage WHERE";
    format!(
        "SELECT start AS time, key_id, key_name, nullif(status, 0) AS status, nullif(error_code, '') AS error_code,
            gateway, requests, CASE WHEN status = 200 THEN 0 ELSE requests END AS errors,
            prompt_tokens, completion_tokens, total_tokens, unmeasured
        FROM usage_rollup WHERE span = $7 AND start >= $1 AND start < $2
        {rows} seq IS NOT NULL AND request_id >= $3 AND request_id < $4
        {rows} seq IS NOT NULL AND request_id >= $5 AND request_id < $6
        {rows} seq IS NULL AND request_id >= $3 AND request_id < $6"
    )
});

/// The spans of a range that are read from the rollup, which begins with `first`; if there are none, they end before they
/// begin. A span that is only partly in the range counts completely if retention may have removed rows of it.
fn whole_spans(Range { since, until }: Range, span: Span, first: i64, kept_since: i64) -> Range {
    let start = |time: i64| span.start(time);
    let end = |time: i64| if time == start(time) { time } else { start(time).saturating_add(span.seconds()) };
    let begin = if start(since) < kept_since { start(since) } else { end(since) };
    Range {
        since: begin.max(first),
        until: if start(until) < kept_since { end(until) } else { start(until) },
    }
}

#[cfg(test)]
mod tests {
    use super::super::ledger::tests::{outcome, row, write};
    use super::super::tests::Temporary;
    use super::super::{DAY, NewRow};
    use super::*;

    fn groups(store: &Store, range: Range, by: Grouping) -> Vec<(String, i64)> {
        let mut found = Vec::new();
        let label = |row: &UsageRow| row.labels[by.labels()[0]].to_string().trim_matches('"').to_owned();
        store
            .grouped(range, Filter::ALL, by, |row| found.push((label(&row), row.sums.requests)))
            .expect("the figures");
        found
    }

    /// Some rows, of which a number is sealed.
    fn filled(sealed: i64) -> Temporary {
        let temporary = Temporary::new();
        let store = &temporary.store;
        write(store, "a", "key_1", 10, 200, Some(5));
        write(store, "b", "key_1", DAY + 1, 200, None);
        write(store, "c", "key_2", DAY + 4000, 502, None);
        store.record(&row("d", "key_1", 40 * DAY + 3), &outcome(400, None)).expect("a refused one");
        store.begin(&row("e", "key_1", 40 * DAY + 4)).expect("a running request");
        temporary.store.seal(sealed, 40 * DAY).expect("a batch");
        temporary
    }

    #[test]
    fn sums_of_everything() {
        let temporary = filled(2);
        let all = temporary.store.sums(Range::ALL, Filter::ALL).expect("the figures");
        assert_eq!((all.requests, all.errors, all.total_tokens, all.unmeasured), (5, 2, 5, 1));
        assert_eq!((all.prompt_tokens, all.completion_tokens), (0, 4));
        let none = temporary
            .store
            .sums(Range { since: 100 * DAY, until: i64::MAX }, Filter::ALL)
            .expect("the figures");
        assert_eq!(none, Sums::default());
    }

    #[test]
    fn the_sums_of_one_key() {
        for sealed in [0, 2, 4] {
            let temporary = filled(sealed);
            let sums = |key| {
                temporary
                    .store
                    .sums(Range::ALL, Filter { key_id: Some(key), ..Filter::ALL })
                    .expect("the figures")
            };
            assert_eq!((sums("key_1").requests, sums("key_2").errors, sums("key").requests), (4, 1, 0));
        }
    }

    /// The hours of the last 400 days are in the rollup, so retention does not remove them.
    #[test]
    fn hours_that_were_removed_are_named() {
        const HOUR: i64 = 3600;
        let temporary = Temporary::new();
        let store = &temporary.store;
        for hour in 0..48 {
            write(store, "x", "key_1", 500 * DAY + hour * HOUR, 200, Some(1));
            write(store, "y", "key_2", 500 * DAY + hour * HOUR + 1800, 200, Some(1));
        }
        let hours = |range| {
            let (mut hours, mut requests) = (0, 0);
            let take = |row: UsageRow| (hours, requests) = (hours + 1, requests + row.sums.requests);
            let removed = store.grouped(range, Filter::ALL, Grouping::Hour, take).expect("the figures");
            (hours, requests, removed)
        };
        let from = |since| Range { since, until: i64::MAX };
        store.seal_all(502 * DAY);
        assert_eq!(hours(Range::ALL), (48, 96, None));
        assert_eq!(hours(from(500 * DAY + 1800)), (48, 95, None), "half of the first hour, from its rows");
        store.remove_before(i64::MAX, 1000).expect("all rows");
        assert_eq!(hours(Range::ALL), (48, 96, None), "from the rollup");
        assert_eq!(
            hours(from(500 * DAY + 1800)),
            (48, 96, None),
            "an hour without its rows counts completely"
        );
        // The first of the two days is more than 400 days ago.
        write(store, "z", "key_1", 901 * DAY, 200, Some(1));
        store.seal_all(901 * DAY);
        assert_eq!(hours(Range::ALL), (25, 49, Some(501 * DAY)));
        assert_eq!(hours(from(500 * DAY + 5 * HOUR)).2, Some(501 * DAY));
        assert_eq!(hours(from(501 * DAY)).2, None);
        assert_eq!(hours(Range { since: 0, until: 500 * DAY }).2, None, "there was nothing to remove");
        let days = |range| store.grouped(range, Filter::ALL, Grouping::Day, |_| ()).expect("the figures");
        assert_eq!(days(Range::ALL), None, "days are kept for good");
    }

    #[test]
    fn any_range_is_the_sum_of_its_rows() {
        (0..=4).for_each(check_ranges);
    }

    fn check_ranges(sealed: i64) {
        let temporary = filled(sealed);
        let times = [10, DAY + 1, DAY + 4000, 40 * DAY + 3, 40 * DAY + 4];
        let edges = [
            i64::MIN,
            0,
            10,
            11,
            50_000,
            DAY,
            DAY + 1,
            DAY + 2,
            DAY + 4000,
            DAY + 50_000,
            2 * DAY,
            40 * DAY,
            40 * DAY + 4,
            i64::MAX,
        ];
        for since in edges {
            for until in edges {
                let range = Range { since, until };
                let expected = times.iter().filter(|&&time| time >= since && time < until).count() as i64;
                assert_eq!(
                    temporary.store.sums(range, Filter::ALL).expect("the figures").requests,
                    expected,
                    "{range:?}"
                );
                for by in Grouping::ALL.map(|(_, by)| by) {
                    let sum: i64 = groups(&temporary.store, range, by).iter().map(|(_, count)| count).sum();
                    assert_eq!(sum, expected, "{range:?} by {by:?}");
                }
            }
        }
    }

    #[test]
    fn every_grouping() {
        let temporary = filled(4);
        let by = |by| groups(&temporary.store, Range::ALL, by);
        let pairs = |list: &[(&str, i64)]| -> Vec<(String, i64)> {
            list.iter().map(|(a, b)| (a.to_string(), *b)).collect()
        };
        assert_eq!(by(Grouping::Day), pairs(&[("1970-01-01", 1), ("1970-01-02", 2), ("1970-02-10", 2)]));
        assert_eq!(by(Grouping::Month), pairs(&[("1970-01", 3), ("1970-02", 2)]));
        assert_eq!(by(Grouping::Key), pairs(&[("key_1", 4), ("key_2", 1)]));
        assert_eq!(by(Grouping::Status), pairs(&[("null", 1), ("200", 2), ("400", 1), ("502", 1)]));
        assert_eq!(by(Grouping::Hour)[1..3], pairs(&[("1970-01-02T00:00Z", 1), ("1970-01-02T01:00Z", 1)]));
    }

    #[test]
    fn a_renamed_key_keeps_its_past() {
        let temporary = filled(3);
        for end in ["f", "g"] {
            let renamed = NewRow { key_name: "renamed".into(), ..row(end, "key_2", 41 * DAY) };
            temporary.store.record(&renamed, &outcome(400, None)).expect("a row");
        }
        let mut names = Vec::new();
        let take = |row: UsageRow| names.push(row.labels["name"].to_string());
        temporary.store.grouped(Range::ALL, Filter::ALL, Grouping::Key, take).expect("the figures");
        let expected = ["\"name of key_1\"", "\"renamed\"", "\"name of key_2\""];
        assert_eq!(names, expected, "the name with most requests first");
    }
}
