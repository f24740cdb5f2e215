//! Usage reports: whole days and hours of a range from the rollup, and the rest of it from its
//! rows.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use serde::Serialize;
use serde_json::{Map, Value};

use super::append::Ledger;
use super::division::divide;
use super::grouping::{Group, Grouping};
use super::rollup::{Span, columns, sums_of_rows};
use super::sums::{Filter, RollupRow, Sums};
use crate::database::{DatabaseError, Result, Row, Session, SqlValue, values};
use crate::id::RequestId;
use crate::when::Range;

/// One group: what names it, and its figures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UsageRow {
    #[serde(flatten)]
    pub labels: Map<String, Value>,
    #[serde(flatten)]
    pub sums: Sums,
}

impl Ledger {
    /// The sums of a range by one or more groupings, or in one row. Groups are in the order of the
    /// groupings; keys with the most requests come first.
    pub fn grouped(&self, range: Range, filter: Filter, by: &[Grouping]) -> Result<Vec<UsageRow>> {
        let mut names = HashMap::new();
        if by.contains(&Grouping::Key) {
            let read = |mut row: Row| Ok((row.column()?, row.column()?));
            let keys = |session: &Session| session.rows("SELECT id, name FROM keys", &[], read);
            names = self.database.read(keys)?.into_iter().collect();
        }
        let mut groups = BTreeMap::<Vec<Group>, Sums>::new();
        let span = if by.contains(&Grouping::Hour) {
            Span::Hour
        } else {
            Span::Day
        };
        self.figures(span, range, filter, |row| {
            let group = by.iter().map(|by| by.group(&row)).collect();
            groups.entry(group).or_default().add(&row.sums);
        })?;
        // The requests of a key within the groups before it.
        let mut requests = HashMap::<Vec<Group>, i64>::new();
        if let Some(place) = by.iter().position(|by| *by == Grouping::Key) {
            for (group, sums) in &groups {
                *requests.entry(group[..=place].to_vec()).or_default() += sums.requests;
            }
        }
        let mut groups: Vec<_> = groups.into_iter().collect();
        groups.sort_by_cached_key(|(group, _)| {
            let order = |place: usize| {
                (
                    Reverse(requests.get(&group[..=place]).copied()),
                    group[place].clone(),
                )
            };
            (0..group.len()).map(order).collect::<Vec<_>>()
        });
        let named = |(group, sums): (Vec<Group>, Sums)| {
            let labels = by
                .iter()
                .zip(group)
                .flat_map(|(by, group)| by.named(group, &names))
                .collect();
            UsageRow { labels, sums }
        };
        Ok(groups.into_iter().map(named).collect())
    }

    /// Replaces open bounds, so that the same range can be asked for again: the start of the first
    /// day that has sums, and the second after now, or after the newest row if its clock was ahead.
    pub fn bounded(&self, range: Range, now: i64) -> Result<Range> {
        let Range {
            mut since,
            mut until,
        } = range;
        self.database.read(|session| {
            if until == i64::MAX {
                let newest: Option<String> =
                    session.value("SELECT max(request_id) FROM usage", &[])?;
                until = newest
                    .as_deref()
                    .and_then(RequestId::time_of)
                    .unwrap_or(now)
                    .max(now)
                    + 1;
            }
            if since == i64::MIN {
                let first = "SELECT min(start) FROM usage_rollup WHERE span = 86400";
                let first: Option<i64> = session.value(first, &[])?;
                since = first
                    .unwrap_or(Span::Day.start(now))
                    .min(Span::Day.start(until - 1));
            }
            Ok(Range { since, until })
        })
    }

    /// Fails if retention has removed the rows of an hour that a range cuts.
    pub fn check_rows_of(&self, range: Range) -> Result<()> {
        self.database
            .read(|session| divide(session, range, Span::Day).map(drop))
    }

    /// Extends a range to full hours if it cuts hours whose rows retention has removed.
    pub fn widened_to_kept_hours(&self, range: Range) -> Result<Range> {
        match self.check_rows_of(range) {
            Err(DatabaseError::RowsRemoved(hour)) => {
                let hour = hour..hour + Span::Hour.seconds();
                let mut wider = range;
                if hour.contains(&range.since) {
                    wider.since = hour.start;
                }
                if hour.contains(&range.until) {
                    wider.until = hour.end;
                }
                self.widened_to_kept_hours(wider)
            }
            checked => checked.map(|()| range),
        }
    }

    /// Calls `take` with the sums of a range, by span and in the order of time. If the range begins
    /// and ends with a span, all are read from the rollup. Fails if retention has removed the rows
    /// of an hour that the range cuts.
    pub fn figures(
        &self,
        span: Span,
        range: Range,
        filter: Filter,
        mut take: impl FnMut(RollupRow),
    ) -> Result<()> {
        self.database.read(|session| {
            for (source, part) in divide(session, range, span)? {
                let bound = |time: i64| match source {
                    Some(_) => SqlValue::from(time),
                    None => RequestId::from(time).into(),
                };
                let parameters = values![
                    bound(part.since),
                    bound(part.until),
                    filter.key_id,
                    filter.gateway
                ];
                session.query(&select(source, span), &parameters, &mut |row| {
                    RollupRow::read(row, span).map(&mut take)
                })?;
            }
            Ok(())
        })
    }
}

/// A query for sums, from the spans of the rollup or, without a source, from the rows.
pub fn select(source: Option<Span>, span: Span) -> String {
    let wanted =
        "(CAST($3 AS TEXT) IS NULL OR key_id = $3) AND (CAST($4 AS TEXT) IS NULL OR gateway = $4)";
    match source {
        Some(source) => format!(
            "SELECT {} FROM usage_rollup
             WHERE span = {} AND start >= $1 AND start < $2 AND {wanted} ORDER BY start",
            columns(),
            source.seconds()
        ),
        None => {
            let condition = format!("request_id >= $1 AND request_id < $2 AND {wanted}");
            sums_of_rows(span.seconds(), &condition) + " ORDER BY 2"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::append::tests::{row, with_outcome, write};
    use crate::ledger::{LedgerRow, Matching};
    use crate::store::Store;
    use crate::store::tests::Temporary;
    use crate::when::DAY;

    const HOUR: i64 = 3600;

    fn groups(store: &Store, range: Range, by: Grouping) -> Vec<(String, i64)> {
        let label = |row: &UsageRow| {
            row.labels[by.labels()[0]]
                .to_string()
                .trim_matches('"')
                .to_owned()
        };
        let rows = store
            .ledger
            .grouped(range, Filter::ALL, &[by])
            .expect("the figures");
        rows.iter()
            .map(|row| (label(row), row.sums.requests))
            .collect()
    }

    /// The hour that a range may not cut.
    fn removed_hour<T>(result: Result<T>) -> std::result::Result<T, i64> {
        result.map_err(|error| match error {
            DatabaseError::RowsRemoved(hour) => hour,
            error => panic!("{error}"),
        })
    }

    fn filled() -> Temporary {
        let temporary = Temporary::new();
        let store = &temporary.store;
        write(store, "a", "key_1", 10, 200, Some(5));
        write(store, "b", "key_1", DAY + 1, 200, None);
        write(store, "c", "key_2", DAY + 4000, 502, None);
        write(store, "d", "key_1", 40 * DAY + 3, 400, None);
        let (status, error_code) = (None, Some("abandoned".into()));
        let abandoned = LedgerRow {
            status,
            error_code,
            ..row("f", "key_1", 40 * DAY + 5)
        };
        store.ledger.append(abandoned).expect("a row");
        temporary
    }

    #[test]
    fn sums_of_everything() {
        let temporary = filled();
        let all = temporary
            .store
            .ledger
            .sums(Range::ALL, Filter::ALL)
            .expect("the figures");
        assert_eq!(
            (all.requests, all.errors, all.total_tokens, all.unmeasured),
            (5, 3, 5, 1)
        );
        assert_eq!((all.prompt_tokens, all.completion_tokens), (0, 5));
        let none = temporary
            .store
            .ledger
            .sums(
                Range {
                    since: 100 * DAY,
                    until: i64::MAX,
                },
                Filter::ALL,
            )
            .expect("the figures");
        assert_eq!(none, Sums::default());
    }

    #[test]
    fn the_sums_of_one_key() {
        let temporary = filled();
        for since in [i64::MIN, 5] {
            let sums = |key_id| {
                let filter = Filter {
                    key_id: Some(key_id),
                    ..Filter::ALL
                };
                temporary
                    .store
                    .ledger
                    .sums(
                        Range {
                            since,
                            until: i64::MAX,
                        },
                        filter,
                    )
                    .expect("the figures")
            };
            assert_eq!(
                (
                    sums("key_1").requests,
                    sums("key_2").errors,
                    sums("key").requests
                ),
                (4, 1, 0)
            );
        }
    }

    #[test]
    fn figures_are_filtered_and_in_the_order_of_time() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let now = 20 * DAY;
        for number in 0..100_i64 {
            let (status, key) = (if number % 10 == 3 { 502 } else { 200 }, ["key_1", "key_2"]);
            write(
                store,
                "x",
                key[number as usize % 2],
                now - number * 50,
                status,
                Some(number),
            );
        }
        let code = |code: &str| Matching::Code(code.into());
        for (span, from, to, key_id, matching, expected) in [
            (Span::Minute, -3600, 60, None, Matching::Anything, 73),
            (Span::Minute, -3599, 30, None, Matching::Success, 65),
            (Span::Hour, -7200, 3600, None, Matching::Anything, 100),
            (
                Span::Hour,
                -3600,
                3600,
                Some("key_2"),
                Matching::Anything,
                36,
            ),
            (
                Span::Hour,
                -3549,
                -99,
                Some("key_2"),
                Matching::Anything,
                34,
            ),
            (Span::Day, -DAY, DAY, None, Matching::Success, 90),
            (Span::Day, -DAY, DAY, None, Matching::Failure, 10),
            (Span::Day, -3000, 1, None, Matching::Failure, 6),
            (Span::Day, -3000, 1, None, code("inference_error"), 6),
            (
                Span::Day,
                -DAY,
                DAY,
                Some("key_2"),
                code("inference_error"),
                10,
            ),
            (Span::Day, -DAY, DAY, None, code("interrupted"), 0),
        ] {
            let (mut requests, mut starts) = (0, Vec::new());
            let take = |row: RollupRow| {
                if matching.includes(row.status, row.error_code.as_deref()) {
                    requests += row.sums.requests;
                }
                starts.push(row.start);
            };
            let (range, filter) = (
                Range {
                    since: now + from,
                    until: now + to,
                },
                Filter {
                    key_id,
                    ..Filter::ALL
                },
            );
            store
                .ledger
                .figures(span, range, filter, take)
                .expect("the figures");
            assert_eq!(
                requests, expected,
                "{span:?} {range:?} {key_id:?} {matching:?}"
            );
            assert!(starts.is_sorted() && starts.iter().all(|start| span.start(*start) == *start));
        }
    }

    #[test]
    fn hours_are_kept_for_good() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        for hour in 0..48 {
            write(store, "x", "key_1", 500 * DAY + hour * HOUR, 200, Some(1));
            write(
                store,
                "y",
                "key_2",
                500 * DAY + hour * HOUR + 1800,
                200,
                Some(1),
            );
        }
        let hours = |since| {
            let rows = store.ledger.grouped(
                Range {
                    since,
                    until: i64::MAX,
                },
                Filter::ALL,
                &[Grouping::Hour],
            );
            removed_hour(rows.map(|rows| {
                (
                    rows.len(),
                    rows.iter().map(|row| row.sums.requests).sum::<i64>(),
                )
            }))
        };
        assert_eq!(hours(i64::MIN), Ok((48, 96)));
        assert_eq!(
            hours(500 * DAY + 1800),
            Ok((48, 95)),
            "half of the first hour, from its rows"
        );
        while store
            .ledger
            .remove_before(i64::MAX, i64::MAX, 1000)
            .expect("a step")
            > 0
        {}
        assert_eq!(hours(i64::MIN), Ok((48, 96)), "from the rollup");
        assert_eq!(
            hours(500 * DAY + 1800),
            Err(500 * DAY),
            "an hour that can't be divided"
        );
    }

    /// A bound with a time of day was rounded to its day if retention had removed the rows, and
    /// nothing said so.
    #[test]
    fn a_range_is_exact_or_names_the_hour_that_can_not_be_divided() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        for half_hour in 0..4 * 48 {
            write(
                store,
                "x",
                "key_1",
                500 * DAY + half_hour * HOUR / 2 + 1,
                200,
                Some(1),
            );
        }
        let at = |day: i64, hour: i64| day * DAY + hour * HOUR;
        let counted = |since, until| {
            let range = Range { since, until };
            let checked = removed_hour(store.ledger.check_rows_of(range)).err();
            let counted = removed_hour(
                store
                    .ledger
                    .sums(range, Filter::ALL)
                    .map(|sums| sums.requests),
            );
            assert_eq!(counted.err(), checked, "{range:?}");
            counted
        };
        let ranges = [
            (at(500, 13), at(502, 7), 84),
            (at(500, 13), at(500, 15), 4),
            (at(500, 13), at(501, 0), 22),
            (at(501, 0), at(501, 1), 2),
            (at(499, 13) + 7, at(500, 1), 2),
            (i64::MIN, at(502, 7), 110),
        ];
        let all_exact = || {
            ranges
                .iter()
                .all(|(since, until, expected)| counted(*since, *until) == Ok(*expected))
        };
        assert!(all_exact(), "from the rows");
        assert_eq!(
            counted(at(500, 13) + 900, at(500, 15) - 900),
            Ok(3),
            "parts of hours, from the rows"
        );
        while store
            .ledger
            .remove_before(at(503, 12), at(505, 0), 1000)
            .expect("a step")
            > 0
        {}
        assert!(all_exact(), "from the hours");
        assert_eq!(counted(at(500, 13) + 900, at(500, 15)), Err(at(500, 13)));
        assert_eq!(counted(at(500, 13), at(500, 15) - 900), Err(at(500, 14)));
        assert_eq!(
            counted(at(503, 13) + 900, at(503, 15)),
            Ok(3),
            "an hour that has its rows"
        );
        assert_eq!(counted(at(500, 0), at(503, 0)), Ok(144), "whole days");
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
                let expected = times
                    .iter()
                    .filter(|&&time| time >= since && time < until)
                    .count() as i64;
                assert_eq!(
                    temporary
                        .store
                        .ledger
                        .sums(range, Filter::ALL)
                        .expect("the figures")
                        .requests,
                    expected,
                    "{range:?}"
                );
                for by in Grouping::ALL.map(|(_, by)| by) {
                    let sum: i64 = groups(&temporary.store, range, by)
                        .iter()
                        .map(|(_, count)| count)
                        .sum();
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
        assert_eq!(
            by(Grouping::Day),
            pairs(&[("1970-01-01", 1), ("1970-01-02", 2), ("1970-02-10", 2)])
        );
        assert_eq!(
            by(Grouping::Month),
            pairs(&[("1970-01", 3), ("1970-02", 2)])
        );
        assert_eq!(by(Grouping::Key), pairs(&[("key_1", 4), ("key_2", 1)]));
        assert_eq!(
            by(Grouping::Status),
            pairs(&[("null", 1), ("200", 2), ("400", 1), ("502", 1)])
        );
        assert_eq!(
            by(Grouping::Hour)[1..3],
            pairs(&[("1970-01-02T00:00Z", 1), ("1970-01-02T01:00Z", 1)])
        );
    }

    #[test]
    fn two_groupings_are_in_the_order_in_which_they_are_named() {
        let temporary = filled();
        let by = |by: [Grouping; 2]| -> Vec<String> {
            let rows = temporary
                .store
                .ledger
                .grouped(Range::ALL, Filter::ALL, &by)
                .expect("the figures");
            let label = |row: &UsageRow, by: Grouping| {
                row.labels[by.labels()[0]].as_str().map(str::to_owned)
            };
            rows.iter()
                .map(|row| {
                    let [one, other] = by.map(|by| label(row, by).expect("a text"));
                    format!("{one} {other} {}", row.sums.requests)
                })
                .collect()
        };
        assert_eq!(
            by([Grouping::Key, Grouping::Month]),
            ["key_1 1970-01 2", "key_1 1970-02 2", "key_2 1970-01 1"]
        );
        assert_eq!(
            by([Grouping::Month, Grouping::Key]),
            ["1970-01 key_1 2", "1970-01 key_2 1", "1970-02 key_1 2"]
        );
        write(&temporary.store, "g", "key_2", 41 * DAY, 200, None);
        (0..2).for_each(|n| write(&temporary.store, "h", "key_2", 42 * DAY + n, 200, None));
        assert_eq!(
            by([Grouping::Month, Grouping::Key])[2..],
            ["1970-02 key_2 3", "1970-02 key_1 2"],
            "the keys with most requests first"
        );
    }

    /// The figures of an open range can be asked for again by its bounds.
    #[test]
    fn an_open_range_has_bounds() {
        let temporary = Temporary::new();
        let bounded = |since, until| {
            let range = temporary
                .store
                .ledger
                .bounded(Range { since, until }, 50 * DAY + 7)
                .expect("the bounds");
            (range.since, range.until)
        };
        assert_eq!(
            bounded(i64::MIN, i64::MAX),
            (50 * DAY, 50 * DAY + 8),
            "an empty ledger"
        );
        write(&temporary.store, "a", "key_1", 40 * DAY + 3, 200, Some(5));
        assert_eq!(bounded(i64::MIN, i64::MAX), (40 * DAY, 50 * DAY + 8));
        assert_eq!(
            bounded(i64::MIN, 30 * DAY + 5),
            (30 * DAY, 30 * DAY + 5),
            "before the first row"
        );
        assert_eq!(bounded(7, 9), (7, 9));
        write(&temporary.store, "b", "key_1", 50 * DAY + 100, 200, Some(5));
        assert_eq!(
            bounded(i64::MIN, i64::MAX),
            (40 * DAY, 50 * DAY + 101),
            "a clock that is ahead"
        );
    }

    #[test]
    fn a_renamed_key_has_one_line_with_its_present_name() {
        let temporary = filled();
        for end in ["f", "g"] {
            let renamed = LedgerRow {
                key_name: "second name".into(),
                ..row(end, "key_2", 41 * DAY)
            };
            temporary
                .store
                .ledger
                .append(with_outcome(renamed, 400, None))
                .expect("a row");
        }
        temporary
            .store
            .tamper("UPDATE keys SET name = 'third name' WHERE id = 'key_2'");
        let rows = temporary
            .store
            .ledger
            .grouped(Range::ALL, Filter::ALL, &[Grouping::Key])
            .expect("the figures");
        let found: Vec<_> = rows
            .iter()
            .map(|row| (row.labels["name"].to_string(), row.sums.requests))
            .collect();
        assert_eq!(
            found,
            [
                ("\"name of key_1\"".into(), 4),
                ("\"third name\"".into(), 3)
            ]
        );
    }
}
