//! Usage reports: whole days and hours of a range from the rollup, and the rest of it from its rows.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::mem;

use serde::Serialize;
use serde_json::{Map, Value};

use super::division::Division;
use super::engine::{Row, SqlValue, values};
use super::grouping::{Group, Grouping};
use super::{Matching, Result, Span, Store};
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

/// Selects the requests that are counted; `None` for all.
#[derive(Clone, Copy, Debug)]
pub struct Filter<'a> {
    pub key_id: Option<&'a str>,
    pub gateway: Option<&'a str>,
}

impl Filter<'_> {
    pub const ALL: Self = Self { key_id: None, gateway: None };
}

/// Figures over some requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sums {
    pub requests: i64,
    /// Requests that did not end in 200.
    pub errors: i64,
    pub prompt_tokens: i64,
    pub completion_tokens: i64,
    pub total_tokens: i64,
    /// Completions whose total the runtime did not measure: the sums are short by theirs.
    pub unmeasured: i64,
}

impl Sums {
    fn all(&mut self) -> [&mut i64; 6] {
        let Self { requests, errors, prompt_tokens, completion_tokens, total_tokens, unmeasured } = self;
        [requests, errors, prompt_tokens, completion_tokens, total_tokens, unmeasured]
    }

    pub fn add(&mut self, other: &Self) {
        for (sum, more) in self.all().into_iter().zip(other.clone().all()) {
            *sum = sum.saturating_add(*more);
        }
    }

    pub fn succeeded(&self) -> i64 {
        self.requests - self.errors
    }
}

/// One group: what names it, and its figures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UsageRow {
    #[serde(flatten)]
    pub labels: Map<String, Value>,
    #[serde(flatten)]
    pub sums: Sums,
}

/// Sums of one key and one outcome in one span, or in a part of it, of one gateway.
pub struct RollupRow {
    /// The beginning of the span.
    pub start: i64,
    pub key_id: String,
    pub status: Option<i64>,
    pub error_code: Option<String>,
    pub gateway: String,
    pub sums: Sums,
}

impl RollupRow {
    fn read(mut row: Row, span: Span) -> Result<Self> {
        // The rollup may have been read by shorter spans.
        let (start, key_id) = (span.start(row.next()?), row.next()?);
        let status = Some(row.next()?).filter(|&status| status != 0);
        let error_code = Some(row.next()?).filter(|code: &String| !code.is_empty());
        let (gateway, requests) = (row.next()?, row.next()?);
        let sums = Sums {
            requests,
            errors: if status == Some(200) { 0 } else { requests },
            prompt_tokens: row.next()?,
            completion_tokens: row.next()?,
            total_tokens: row.next()?,
            unmeasured: row.next()?,
        };
        Ok(Self { start, key_id, status, error_code, gateway, sums })
    }
}

impl Store {
    /// Calls `take` with one group after the other. Groups of time are taken as soon as they are complete, so that the memory
    /// does not grow with their number. Returns what [`figures`](Self::figures) returns.
    pub fn grouped(
        &self,
        range: Range,
        filter: Filter,
        by: Grouping,
        mut take: impl FnMut(UsageRow),
    ) -> Result<Option<i64>> {
        let (span, is_time) = match by {
            Grouping::Hour => (Span::Hour, true),
            Grouping::Day | Grouping::Month => (Span::Day, true),
            Grouping::Key | Grouping::Status | Grouping::Gateway => (Span::Day, false),
        };
        let mut names = HashMap::new();
        if by == Grouping::Key {
            names.extend(self.list_keys()?.into_iter().map(|key| (key.id, key.name)));
        }
        let mut take_all = |groups: BTreeMap<Group, Sums>| {
            let mut groups: Vec<_> = groups.into_iter().collect();
            if by == Grouping::Key {
                groups.sort_by_key(|(_, sums)| Reverse(sums.requests));
            }
            for (group, sums) in groups {
                take(UsageRow { labels: by.named(group, &names), sums });
            }
        };
        let mut groups = BTreeMap::<Group, Sums>::new();
        let undivided_hour = self.figures(span, range, filter, &Matching::Anything, |mut row| {
            let sums = mem::take(&mut row.sums);
            let group = by.group(row);
            if is_time && !groups.contains_key(&group) {
                take_all(mem::take(&mut groups));
            }
            groups.entry(group).or_default().add(&sums);
        })?;
        take_all(groups);
        Ok(undivided_hour)
    }

    /// Calls `take` with the sums of a range, by span and in the order of time. If the range begins and ends with a span, all
    /// are read from the rollup. Returns the start of an hour that the range cuts and that counts completely, because
    /// retention has removed its rows.
    pub fn figures(
        &self,
        span: Span,
        range: Range,
        filter: Filter,
        matching: &Matching,
        mut take: impl FnMut(RollupRow),
    ) -> Result<Option<i64>> {
        if range.until <= range.since {
            return Ok(None);
        }
        let mut parameters = values![0_i64, 0_i64, filter.key_id, filter.gateway].to_vec();
        if let Matching::Code(code) = matching {
            parameters.push(code.into());
        }
        self.engine.read(|session| {
            let mut division = Division { session, parts: Vec::new(), undivided_hour: None };
            division.divide(range, span)?;
            for (source, from, to) in division.parts {
                let [spans, rows] = statements(source.unwrap_or(span), matching);
                let bound = |time: i64| match source {
                    Some(_) => SqlValue::from(time),
                    None => RequestId::from(time).into(),
                };
                (parameters[0], parameters[1]) = (bound(from), bound(to));
                let statement = if source.is_some() { spans } else { rows };
                session
                    .query(&statement, &parameters, &mut |row| RollupRow::read(row, span).map(&mut take))?;
            }
            Ok(division.undivided_hour)
        })
    }
}

/// The statements for whole spans and for rows, both with the columns of `RollupRow`.
pub(super) fn statements(span: Span, matching: &Matching) -> [String; 2] {
    let seconds = span.seconds();
    // Both tables have these columns; a comparison with null is not true.
    let outcome = match matching {
        Matching::Anything => "",
        Matching::Success => "AND status = 200",
        Matching::Failure => "AND error_code <> ''",
        Matching::Code(_) => "AND error_code = $5",
    };
    let wanted = format!(
        "(CAST($3 AS TEXT) IS NULL OR key_id = $3) AND (CAST($4 AS TEXT) IS NULL OR gateway = $4) {outcome}"
    );
    let spans = format!(
        "SELECT start, key_id, status, error_code, gateway, requests, prompt_tokens, completion_tokens, total_tokens,
         unmeasured FROM usage_rollup
         WHERE span = {seconds} AND start >= $1 AND start < $2 AND {wanted} ORDER BY start"
    );
    let rows = format!(
        "SELECT created / {seconds} * {seconds}, key_id, coalesce(status, 0), coalesce(error_code, ''), gateway,
         count(*), CAST(coalesce(sum(prompt_tokens), 0) AS BIGINT),
         CAST(coalesce(sum(completion_tokens), 0) AS BIGINT), CAST(coalesce(sum(total_tokens), 0) AS BIGINT),
         count(*) FILTER (WHERE status = 200 AND total_tokens IS NULL)
         FROM usage WHERE request_id >= $1 AND request_id < $2 AND {wanted}
         GROUP BY 1, 2, 3, 4, 5 ORDER BY 1"
    );
    [spans, rows]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::ledger::tests::{row, with_outcome, write};
    use crate::store::tests::Temporary;
    use crate::store::{DAY, LedgerRow};

    const HOUR: i64 = 3600;

    fn groups(store: &Store, range: Range, by: Grouping) -> Vec<(String, i64)> {
        let mut found = Vec::new();
        let label = |row: &UsageRow| row.labels[by.labels()[0]].to_string().trim_matches('"').to_owned();
        store
            .grouped(range, Filter::ALL, by, |row| found.push((label(&row), row.sums.requests)))
            .expect("the figures");
        found
    }

    fn filled() -> Temporary {
        let temporary = Temporary::new();
        let store = &temporary.store;
        write(store, "a", "key_1", 10, 200, Some(5));
        write(store, "b", "key_1", DAY + 1, 200, None);
        write(store, "c", "key_2", DAY + 4000, 502, None);
        write(store, "d", "key_1", 40 * DAY + 3, 400, None);
        let (status, error_code) = (None, Some("abandoned".into()));
        let abandoned = LedgerRow { status, error_code, ..row("f", "key_1", 40 * DAY + 5) };
        store.append(abandoned).expect("a row");
        temporary
    }

    #[test]
    fn sums_of_everything() {
        let temporary = filled();
        let all = temporary.store.sums(Range::ALL, Filter::ALL).expect("the figures");
        assert_eq!((all.requests, all.errors, all.total_tokens, all.unmeasured), (5, 3, 5, 1));
        assert_eq!((all.prompt_tokens, all.completion_tokens), (0, 5));
        let none = temporary
            .store
            .sums(Range { since: 100 * DAY, until: i64::MAX }, Filter::ALL)
            .expect("the figures");
        assert_eq!(none, Sums::default());
    }

    #[test]
    fn the_sums_of_one_key() {
        let temporary = filled();
        for since in [i64::MIN, 5] {
            let sums = |key_id| {
                let filter = Filter { key_id: Some(key_id), ..Filter::ALL };
                temporary.store.sums(Range { since, until: i64::MAX }, filter).expect("the figures")
            };
            assert_eq!((sums("key_1").requests, sums("key_2").errors, sums("key").requests), (4, 1, 0));
        }
    }

    #[test]
    fn figures_are_filtered_and_in_the_order_of_time() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let now = 20 * DAY;
        for number in 0..100_i64 {
            let (status, key) = (if number % 10 == 3 { 502 } else { 200 }, ["key_1", "key_2"]);
            write(store, "x", key[number as usize % 2], now - number * 50, status, Some(number));
        }
        let code = |code: &str| Matching::Code(code.into());
        for (span, from, to, key_id, matching, expected) in [
            (Span::Minute, -3600, 60, None, Matching::Anything, 73),
            (Span::Minute, -3599, 30, None, Matching::Success, 65),
            (Span::Hour, -7200, 3600, None, Matching::Anything, 100),
            (Span::Hour, -3600, 3600, Some("key_2"), Matching::Anything, 36),
            (Span::Hour, -3549, -99, Some("key_2"), Matching::Anything, 34),
            (Span::Day, -DAY, DAY, None, Matching::Success, 90),
            (Span::Day, -DAY, DAY, None, Matching::Failure, 10),
            (Span::Day, -3000, 1, None, Matching::Failure, 6),
            (Span::Day, -3000, 1, None, code("inference_error"), 6),
            (Span::Day, -DAY, DAY, Some("key_2"), code("inference_error"), 10),
            (Span::Day, -DAY, DAY, None, code("interrupted"), 0),
        ] {
            let (mut requests, mut starts) = (0, Vec::new());
            let take = |row: RollupRow| {
                requests += row.sums.requests;
                starts.push(row.start);
            };
            let (range, filter) =
                (Range { since: now + from, until: now + to }, Filter { key_id, ..Filter::ALL });
            store.figures(span, range, filter, &matching, take).expect("the figures");
            assert_eq!(requests, expected, "{span:?} {range:?} {key_id:?} {matching:?}");
            assert!(starts.is_sorted() && starts.iter().all(|start| span.start(*start) == *start));
        }
    }

    #[test]
    fn hours_are_kept_for_good() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        for hour in 0..48 {
            write(store, "x", "key_1", 500 * DAY + hour * HOUR, 200, Some(1));
            write(store, "y", "key_2", 500 * DAY + hour * HOUR + 1800, 200, Some(1));
        }
        let hours = |since| {
            let (mut hours, mut requests) = (0, 0);
            let take = |row: UsageRow| (hours, requests) = (hours + 1, requests + row.sums.requests);
            let range = Range { since, until: i64::MAX };
            let undivided = store.grouped(range, Filter::ALL, Grouping::Hour, take).expect("the figures");
            (hours, requests, undivided)
        };
        assert_eq!(hours(i64::MIN), (48, 96, None));
        assert_eq!(hours(500 * DAY + 1800), (48, 95, None), "half of the first hour, from its rows");
        while store.remove_before(i64::MAX, i64::MAX, 1000).expect("a step") > 0 {}
        assert_eq!(hours(i64::MIN), (48, 96, None), "from the rollup");
        assert_eq!(hours(500 * DAY + 1800), (48, 96, Some(500 * DAY)), "an hour that can't be divided");
    }

    /// A bound with a time of day was rounded to its day if retention had removed the rows, and nothing said so.
    #[test]
    fn a_range_is_exact_or_names_the_hour_that_can_not_be_divided() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        for half_hour in 0..4 * 48 {
            write(store, "x", "key_1", 500 * DAY + half_hour * HOUR / 2 + 1, 200, Some(1));
        }
        let at = |day: i64, hour: i64| day * DAY + hour * HOUR;
        let counted = |since, until| {
            let (range, mut requests) = (Range { since, until }, 0);
            let take = |row: RollupRow| requests += row.sums.requests;
            let found = store.figures(Span::Day, range, Filter::ALL, &Matching::Anything, take);
            (requests, found.expect("the figures"))
        };
        let ranges = [
            (at(500, 13), at(502, 7), 84),
            (at(500, 13), at(500, 15), 4),
            (at(500, 13), at(501, 0), 22),
            (at(501, 0), at(501, 1), 2),
            (at(499, 13) + 7, at(500, 1), 2),
            (i64::MIN, at(502, 7), 110),
        ];
        let all_exact =
            || ranges.iter().all(|(since, until, expected)| counted(*since, *until) == (*expected, None));
        assert!(all_exact(), "from the rows");
        assert_eq!(counted(at(500, 13) + 900, at(500, 15) - 900), (3, None), "parts of hours, from the rows");
        while store.remove_before(at(503, 12), at(505, 0), 1000).expect("a step") > 0 {}
        assert!(all_exact(), "from the hours");
        assert_eq!(counted(at(500, 13) + 900, at(500, 15)), (4, Some(at(500, 13))));
        assert_eq!(counted(at(500, 13), at(500, 15) - 900), (4, Some(at(500, 14))));
        assert_eq!(counted(at(503, 13) + 900, at(503, 15)), (3, None), "an hour that has its rows");
        assert_eq!(counted(at(500, 0), at(503, 0)), (144, None), "whole days");
    }

    #[test]
    fn any_range_is_the_sum_of_its_rows() {
        let temporary = filled();
        let times = [10, DAY + 1, DAY + 4000, 40 * DAY + 3, 40 * DAY + 5];
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
            40 * DAY + 5,
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
        let temporary = filled();
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
    fn a_renamed_key_has_one_line_with_its_present_name() {
        let temporary = filled();
        for end in ["f", "g"] {
            let renamed = LedgerRow { key_name: "second name".into(), ..row(end, "key_2", 41 * DAY) };
            temporary.store.append(with_outcome(renamed, 400, None)).expect("a row");
        }
        temporary.store.tamper("UPDATE keys SET name = 'third name' WHERE id = 'key_2'");
        let mut found = Vec::new();
        let take = |row: UsageRow| found.push((row.labels["name"].to_string(), row.sums.requests));
        temporary.store.grouped(Range::ALL, Filter::ALL, Grouping::Key, take).expect("the figures");
        assert_eq!(found, [("\"name of key_1\"".into(), 4), ("\"third name\"".into(), 3)]);
    }
}
