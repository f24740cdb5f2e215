//! Usage reports: whole days of a range from the sums, and the rest of it from its rows.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use serde::Serialize;
use serde_json::{Map, Value};

use super::append::Ledger;
use super::days::{Filter, Source, Span, SpanSums, Sums};
use super::listing::RowFilter;
use crate::database::{Row, Session, values};
use crate::error::{Problem, ProblemKind, Result};
use crate::id::RequestId;
use crate::text::words;
use crate::when::{Date, HOUR, Range, Zone};

/// One group: what names it, and its figures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UsageRow {
    #[serde(flatten)]
    pub labels: Map<String, Value>,
    #[serde(flatten)]
    pub sums: Sums,
    /// The figures of all outcomes, if `sums` has those of one.
    #[serde(skip)]
    pub all: Sums,
}

impl UsageRow {
    /// The text that names it; empty if there is none.
    pub fn label(&self, name: &str) -> &str {
        self.labels
            .get(name)
            .and_then(Value::as_str)
            .unwrap_or_default()
    }
}

words! {
    pub enum Grouping {
        Hour = "hour",
        Day = "day",
        Month = "month",
        Key = "key",
        Status = "status",
        Gateway = "gateway",
    }
}

impl Grouping {
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

    /// Returns false for more than two groupings, for the same one twice, and for two of time: a
    /// day has its month.
    pub fn fit_together(list: &[Self]) -> bool {
        let is_time = |by: Self| matches!(by, Self::Hour | Self::Day | Self::Month);
        match *list {
            [] | [_] => true,
            [one, other] => one != other && !(is_time(one) && is_time(other)),
            _ => false,
        }
    }

    fn group(self, row: &SpanSums, zone: &Zone) -> Group {
        match self {
            // With its offset, because a day may have an hour twice.
            Self::Hour => (Some(row.start), zone.format_offset(row.start, "%FT%H:%M")),
            Self::Day => (None, Some(row.day.clone())),
            Self::Month => (None, row.day.get(..7).map(String::from)),
            Self::Key => (None, Some(row.key_id.clone())),
            Self::Status => (row.status, row.error_code.clone()),
            Self::Gateway => (None, Some(row.gateway.clone())),
        }
    }

    /// The members that name a group, with their values. A key also has its present name: it may
    /// have changed within the range.
    fn named(
        self,
        (number, text): Group,
        key_names: &HashMap<String, String>,
    ) -> impl Iterator<Item = (String, Value)> {
        let values: [Value; 2] = match self {
            Self::Status => [number.into(), text.into()],
            _ => {
                let name = text.as_ref().and_then(|id| key_names.get(id).cloned());
                [text.into(), name.into()]
            }
        };
        self.labels().iter().map(ToString::to_string).zip(values)
    }
}

/// The status of a group or the start of its hour, and the text that names it. Groups are in their
/// order.
type Group = (Option<i64>, Option<String>);

/// Adds up figures by one or more groupings, or in one group.
pub struct Groups<'a> {
    by: &'a [Grouping],
    zone: &'a Zone,
    /// The figures of one outcome, and those of all.
    sums: BTreeMap<Vec<Group>, [Sums; 2]>,
}

impl<'a> Groups<'a> {
    pub fn new(by: &'a [Grouping], zone: &'a Zone) -> Self {
        let sums = BTreeMap::new();
        Self { by, zone, sums }
    }

    /// Adds the figures of some requests, which may have the wanted outcome.
    pub fn add(&mut self, row: &SpanSums, is_wanted: bool) {
        let group = self.by.iter().map(|by| by.group(row, self.zone)).collect();
        let [wanted, all] = self.sums.entry(group).or_default();
        all.add(&row.sums);
        if is_wanted {
            wanted.add(&row.sums);
        }
    }

    pub fn count(&self) -> usize {
        self.sums.len()
    }

    /// The groups with the wanted outcome, in the order of the groupings; keys with the most
    /// requests come first.
    pub fn rows(mut self, key_names: &HashMap<String, String>) -> Vec<UsageRow> {
        self.sums.retain(|_, [wanted, _]| wanted.requests > 0);
        // The requests of a key within the groups before it.
        let mut requests = HashMap::<Vec<Group>, i64>::new();
        if let Some(place) = self.by.iter().position(|by| *by == Grouping::Key) {
            for (group, [wanted, _]) in &self.sums {
                *requests.entry(group[..=place].to_vec()).or_default() += wanted.requests;
            }
        }
        let mut groups: Vec<_> = self.sums.into_iter().collect();
        groups.sort_by_cached_key(|(group, _)| {
            let order = |place: usize| {
                (
                    Reverse(requests.get(&group[..=place]).copied()),
                    group[place].clone(),
                )
            };
            (0..group.len()).map(order).collect::<Vec<_>>()
        });
        let named = |(group, [sums, all]): (Vec<Group>, [Sums; 2])| {
            let pairs = self.by.iter().zip(group);
            let labels = pairs.flat_map(|(by, group)| by.named(group, key_names));
            UsageRow {
                labels: labels.collect(),
                sums,
                all,
            }
        };
        groups.into_iter().map(named).collect()
    }
}

impl Ledger {
    /// The sums of a range by one or more groupings, or in one row.
    pub fn grouped(&self, filter: &RowFilter, by: &[Grouping]) -> Result<Vec<UsageRow>> {
        self.database
            .report(|session| self.read_grouped(session, filter, by))
    }

    pub(super) fn read_grouped(
        &self,
        session: &Session,
        RowFilter {
            range,
            requests,
            matching,
            ..
        }: &RowFilter,
        by: &[Grouping],
    ) -> Result<Vec<UsageRow>> {
        let mut names = HashMap::new();
        if by.contains(&Grouping::Key) {
            let read = |mut row: Row| Ok((row.column()?, row.column()?));
            let rows = session.rows("SELECT id, name FROM keys", &[], read)?;
            names = rows.into_iter().collect();
        }
        let span = if by.contains(&Grouping::Hour) {
            Span::Hour
        } else {
            Span::Day
        };
        let mut groups = Groups::new(by, &self.zone);
        self.read_figures(session, span, *range, requests, |row| {
            let is_wanted = matching.includes(row.status, row.error_code.as_deref());
            groups.add(&row, is_wanted);
        })?;
        Ok(groups.rows(&names))
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
                let first: Option<String> =
                    session.value("SELECT min(day) FROM usage_days", &[])?;
                let first = first.map(|day| parse_day(&day)).transpose()?;
                since = first
                    .map_or(now, |first| self.zone.start(first))
                    .min(until - 1);
                since = self.zone.day(since).since;
            }
            Ok(Range { since, until })
        })
    }

    /// Extends a range to whole days if it cuts days whose rows retention has removed.
    pub fn with_whole_days(&self, range: Range) -> Result<Range> {
        let mut extended = range;
        self.database.read(|session| {
            for part in self.parts(range) {
                let Source::Rows(cut) = part else { continue };
                if first_day_without_rows(session, cut, &self.zone)?.is_some() {
                    let [first, last] = [cut.since, cut.until - 1].map(|time| self.zone.day(time));
                    extended.since = extended.since.min(first.since);
                    extended.until = extended.until.max(last.until);
                }
            }
            Ok(extended)
        })
    }

    /// Calls `take` with the sums of a range, by span and in the order of time. Fails if retention
    /// has removed rows that are needed: those of days that the range cuts or, by hour and minute,
    /// of all of its days.
    pub fn figures(
        &self,
        span: Span,
        range: Range,
        filter: Filter,
        take: impl FnMut(SpanSums),
    ) -> Result<()> {
        self.database
            .read(|session| self.read_figures(session, span, range, &filter, take))
    }

    fn read_figures(
        &self,
        session: &Session,
        span: Span,
        range: Range,
        filter: &Filter,
        mut take: impl FnMut(SpanSums),
    ) -> Result<()> {
        let parts = match span {
            Span::Day => self.parts(range),
            Span::Hour | Span::Minute => vec![Source::Rows(range)],
        };
        for part in &parts {
            if let Source::Rows(range) = part {
                self.check_rows(session, *range)?;
            }
        }
        // The day of the last figures, and its start.
        let mut day = (String::new(), 0);
        for part in parts {
            part.read(session, span, filter, |mut row| {
                if row.day != day.0 {
                    day = (row.day.clone(), self.zone.start(parse_day(&row.day)?));
                }
                row.start = match span {
                    Span::Minute => row.start,
                    Span::Hour => row.start - row.start.saturating_sub(day.1).rem_euclid(HOUR),
                    Span::Day => day.1,
                };
                take(row);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Fails if retention has removed rows of a range.
    pub(super) fn check_rows(&self, session: &Session, range: Range) -> Result<()> {
        match first_day_without_rows(session, range, &self.zone)? {
            None => Ok(()),
            Some(day) => Err(Problem::new(
                ProblemKind::RowsRemoved,
                format!(
                    "the rows of {day} were removed (usage.retention_days), and only the sums of the whole day are kept: \
                     begin and end with whole days, and do without hours"
                ),
            )),
        }
    }

    /// Divides a range into whole days and the parts of days before and after them.
    fn parts(&self, range: Range) -> Vec<Source> {
        let Range { since, until } = range;
        if since >= until {
            return Vec::new();
        }
        let day = |time| self.zone.day(time);
        // An open bound cuts no day.
        let is_whole = |time| [i64::MIN, i64::MAX, day(time).since].contains(&time);
        let begin = match is_whole(since) {
            true => since,
            false => day(since).until,
        };
        let end = match is_whole(until) {
            true => until,
            false => day(until).since,
        };
        if begin > end {
            return vec![Source::Rows(range)];
        }
        let mut parts = Vec::new();
        if since < begin {
            let until = begin;
            parts.push(Source::Rows(Range { since, until }));
        }
        if begin < end {
            let dates = [begin, end].map(|time| self.zone.date(time).to_string());
            parts.push(Source::Days(dates));
        }
        if end < until {
            let since = end;
            parts.push(Source::Rows(Range { since, until }));
        }
        parts
    }
}

fn parse_day(day: &str) -> Result<Date> {
    day.parse()
        .map_err(|_| Problem::damaged(format!("{day} is not a day")))
}

/// The first day of a range, cut or whole, that has fewer rows than its sums count.
fn first_day_without_rows(session: &Session, range: Range, zone: &Zone) -> Result<Option<String>> {
    let removed = "SELECT 1 FROM gateways WHERE anchor_seq > 0 LIMIT 1";
    if session.first(removed, &[], |_| Ok(()))?.is_none() {
        return Ok(None);
    }
    let [first, last] = [range.since, range.until.saturating_sub(1)];
    let days = values![
        zone.date(first).to_string(),
        zone.date(last).to_string(),
        RequestId::from(zone.day(first).since),
        RequestId::from(zone.day(last).until),
    ];
    session.first(
        "SELECT sums.day FROM
             (SELECT day, sum(requests) AS requests FROM usage_days WHERE day >= $1 AND day <= $2 GROUP BY day) AS sums
             LEFT JOIN (SELECT day, count(*) AS requests FROM usage WHERE request_id >= $3 AND request_id < $4 GROUP BY day)
                 AS kept ON kept.day = sums.day
         WHERE sums.requests > coalesce(kept.requests, 0) ORDER BY sums.day LIMIT 1",
        &days,
        |mut row| row.column(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::append::tests::{row, with_outcome, write};
    use crate::ledger::{LedgerRow, Matching};
    use crate::store::Store;
    use crate::store::tests::Temporary;
    use crate::when::DAY;
    use crate::when::tests::zone;

    fn groups(store: &Store, range: Range, by: Grouping) -> Vec<(String, i64)> {
        let label = |row: &UsageRow| {
            row.labels[by.labels()[0]]
                .to_string()
                .trim_matches('"')
                .to_owned()
        };
        let rows = store
            .ledger
            .grouped(&RowFilter::of(range, Filter::ALL), &[by])
            .expect("the figures");
        rows.iter()
            .map(|row| (label(row), row.sums.requests))
            .collect()
    }

    /// The day that has no rows any more.
    fn removed_day<T>(result: Result<T>) -> std::result::Result<T, String> {
        result.map_err(|problem| {
            assert_eq!(problem.kind, ProblemKind::RowsRemoved, "{problem}");
            problem.text[12..22].to_owned()
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
        store.ledger.append(abandoned, None).expect("a row");
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
                let filter = Filter::of_key(key_id);
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
        let (all, second): (&[&str], &[&str]) = (&["key_1", "key_2"], &["key_2"]);
        for (span, from, to, keys, matching, expected) in [
            (Span::Minute, -3600, 60, None, Matching::Anything, 73),
            (Span::Minute, -3599, 30, None, Matching::Status(200), 65),
            (Span::Hour, -7200, 3600, None, Matching::Anything, 100),
            (
                Span::Hour,
                -3600,
                3600,
                Some(second),
                Matching::Anything,
                36,
            ),
            (Span::Hour, -3549, -99, Some(second), Matching::Anything, 34),
            (Span::Hour, -3600, 3600, Some(all), Matching::Anything, 73),
            (Span::Day, -DAY, DAY, None, Matching::Status(200), 90),
            (Span::Day, -DAY, DAY, None, Matching::Failure, 10),
            (Span::Day, -3000, 1, None, Matching::Failure, 6),
            (Span::Day, -3000, 1, None, code("inference_error"), 6),
            (
                Span::Day,
                -DAY,
                DAY,
                Some(second),
                code("inference_error"),
                10,
            ),
            (Span::Day, -DAY, DAY, Some(all), Matching::Anything, 100),
            (Span::Day, -DAY, DAY, Some(&[]), Matching::Anything, 0),
            (Span::Day, -DAY, DAY, None, code("search_unavailable"), 0),
        ] {
            let (mut requests, mut starts) = (0, Vec::new());
            let take = |row: SpanSums| {
                if matching.includes(row.status, row.error_code.as_deref()) {
                    requests += row.sums.requests;
                }
                starts.push(row.start);
            };
            let range = Range {
                since: now + from,
                until: now + to,
            };
            let ids = keys.map(|keys: &[&str]| keys.iter().map(ToString::to_string).collect());
            let filter = Filter {
                keys: ids,
                ..Filter::ALL
            };
            let figures = store.ledger.figures(span, range, filter, take);
            figures.expect("the figures");
            let context = format!("{span:?} {range:?} {keys:?} {matching:?}");
            assert_eq!(requests, expected, "{context}");
            let seconds = match span {
                Span::Minute => 60,
                Span::Hour => HOUR,
                Span::Day => DAY,
            };
            assert!(starts.is_sorted(), "{context}");
            assert!(starts.iter().all(|start| start % seconds == 0), "{context}");
        }
    }

    /// A bound with a time of day was rounded to its day if retention had removed the rows, and
    /// nothing said so.
    #[test]
    fn a_range_is_exact_or_names_the_day_that_can_not_be_divided() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        for half_hour in 0..4 * 48 {
            let created = 500 * DAY + half_hour * HOUR / 2 + 1;
            write(store, "x", "key_1", created, 200, Some(1));
        }
        let at = |day: i64, hour: i64| day * DAY + hour * HOUR;
        let range = |since, until| Range { since, until };
        let counted = |since, until| {
            let sums = store.ledger.sums(range(since, until), Filter::ALL);
            removed_day(sums.map(|sums| sums.requests))
        };
        let hours = |since, until| {
            let by = [Grouping::Hour];
            let all = RowFilter::of(range(since, until), Filter::ALL);
            let hours = store.ledger.grouped(&all, &by);
            removed_day(hours.map(|rows| rows.len()))
        };
        let whole_days = |since, until| {
            let range = store.ledger.with_whole_days(range(since, until));
            let Range { since, until } = range.expect("a range");
            [since, until].map(|time| time as f64 / DAY as f64)
        };
        let (end, cut) = (at(503, 12), at(500, 13) + 900);
        for (since, until, expected) in [
            (at(500, 13), at(502, 7), 84),
            (cut, at(500, 15) - 900, 3),
            (at(501, 0), at(501, 1), 2),
            (at(499, 13) + 7, at(500, 1), 2),
            (i64::MIN, at(502, 7), 110),
        ] {
            assert_eq!(counted(since, until), Ok(expected));
        }
        assert_eq!(
            (hours(i64::MIN, i64::MAX), hours(cut, end)),
            (Ok(96), Ok(71))
        );
        assert_eq!(whole_days(at(500, 6), at(500, 18)), [500.25, 500.75]);
        while store
            .ledger
            .remove_before(end, at(505, 0), 1000)
            .expect("a step")
            > 0
        {}
        fn of<T>(day: &str) -> std::result::Result<T, String> {
            Err(day.to_owned())
        }
        let (first, last) = ("1971-05-16", "1971-05-19");
        assert_eq!(counted(cut, at(502, 0)), of(first));
        assert_eq!(counted(at(500, 0), at(500, 13)), of(first));
        assert_eq!(
            counted(at(500, 0), at(503, 13)),
            of(last),
            "a part of its rows is left"
        );
        assert_eq!(counted(at(503, 13), at(503, 15)), of(last));
        assert_eq!(counted(at(500, 0), at(504, 0)), Ok(192), "whole days");
        assert_eq!(counted(i64::MIN, i64::MAX), Ok(192));
        assert_eq!(
            counted(at(499, 13), at(503, 0)),
            Ok(144),
            "a day without requests"
        );
        assert_eq!(hours(i64::MIN, i64::MAX), of(first));
        assert_eq!(hours(at(503, 0), at(504, 0)), of(last));
        assert_eq!(hours(at(504, 0), at(505, 0)), Ok(0));
        assert_eq!(whole_days(at(500, 6), at(500, 18)), [500.0, 501.0]);
        assert_eq!(whole_days(at(500, 6), at(505, 18)), [500.0, 505.75]);
        assert_eq!(whole_days(at(499, 6), at(503, 18)), [499.25, 504.0]);
        write(store, "y", "key_1", at(504, 3), 200, Some(1));
        assert_eq!(hours(at(504, 0), at(505, 0)), Ok(1));
        assert_eq!(counted(at(504, 0), at(504, 4)), Ok(1));
    }

    /// Days of 23, 23.5, 24, 24.5 and 25 hours, and one without midnight.
    #[test]
    fn days_and_hours_of_a_place_are_those_of_its_rows() {
        for (name, first, last, hours) in [
            ("UTC", "2026-03-28", "2026-03-30", &[24, 24, 24][..]),
            ("Europe/Zagreb", "2026-03-28", "2026-03-30", &[24, 23, 24]),
            ("Europe/Zagreb", "2026-10-24", "2026-10-26", &[24, 25, 24]),
            (
                "America/Los_Angeles",
                "2026-03-07",
                "2026-03-09",
                &[24, 23, 24],
            ),
            (
                "America/Los_Angeles",
                "2026-10-31",
                "2026-11-02",
                &[24, 25, 24],
            ),
            ("Asia/Kolkata", "2026-02-28", "2026-03-01", &[24, 24]),
            (
                "Australia/Lord_Howe",
                "2026-04-04",
                "2026-04-06",
                &[24, 25, 24],
            ),
            (
                "Australia/Lord_Howe",
                "2026-10-03",
                "2026-10-05",
                &[24, 24, 24],
            ),
            ("America/Havana", "2026-03-07", "2026-03-09", &[24, 23, 24]),
            ("America/Havana", "2026-10-31", "2026-11-02", &[24, 25, 24]),
        ] {
            check_days(name, first, last, hours);
        }
    }

    #[track_caller]
    fn check_days(name: &str, first: &str, last: &str, hours: &[usize]) {
        let mut temporary = Temporary::new();
        let zone = zone(name);
        temporary.set_zone(zone.clone());
        let store = &temporary.store;
        let dates = [first, last].map(|date| date.parse::<Date>().expect("a date"));
        let [since, until] =
            [dates[0], dates[1].tomorrow().expect("a day")].map(|date| zone.start(date));
        // A row every five minutes, and two around each bound of a quarter of an hour.
        let mut rows = Vec::new();
        for time in (since - 7200..until + 7200).step_by(300) {
            rows.push(time + 7);
            if time % 900 == 0 {
                rows.extend([time - 1, time]);
            }
        }
        let key = |created: i64| ["key_1", "key_2"][usize::from(created % 2 == 0)];
        for (number, &created) in rows.iter().enumerate() {
            write(
                store,
                &number.to_string(),
                key(created),
                created,
                200,
                Some(1),
            );
        }
        let count = |since: i64, until: i64| {
            store.value::<i64>(&format!(
                "SELECT count(*) FROM usage WHERE created >= {since} AND created < {until}"
            ))
        };
        let edges: Vec<i64> = (since - 7200..=until + 7200)
            .step_by(11_700)
            .chain([i64::MIN, since, until, since + 1, until - 1, i64::MAX])
            .collect();
        for &since in &edges {
            for &until in &edges {
                let range = Range { since, until };
                let sums = store.ledger.sums(range, Filter::ALL).expect("the figures");
                assert_eq!(sums.requests, count(since, until), "{name} {range:?}");
            }
        }
        let whole = Range { since, until };
        let mut day = Range {
            since,
            until: since,
        };
        for (date, requests) in groups(store, whole, Grouping::Day) {
            day = zone.day(day.until);
            assert_eq!(date, zone.date(day.since).to_string());
            assert_eq!(requests, count(day.since, day.until), "{name} {date}");
        }
        assert_eq!(day.until, until, "{name}: every day has its group");
        let (mut starts, mut labels) = (Vec::new(), Vec::new());
        let mut by_hour = BTreeMap::<i64, i64>::new();
        let take = |row: SpanSums| *by_hour.entry(row.start).or_default() += row.sums.requests;
        let figures = store.ledger.figures(Span::Hour, whole, Filter::ALL, take);
        figures.expect("the figures");
        for (start, requests) in by_hour {
            let end = (start + HOUR).min(zone.day(start).until);
            assert_eq!(requests, count(start, end), "{name} {start}");
            starts.push(zone.date(start));
        }
        for (label, _) in groups(store, whole, Grouping::Hour) {
            labels.push(label);
        }
        let per_day = starts
            .chunk_by(|one, other| one == other)
            .map(<[Date]>::len);
        assert_eq!(per_day.collect::<Vec<_>>(), hours, "{name}");
        let number = labels.len();
        labels.dedup();
        assert_eq!(
            (labels.len(), number),
            (starts.len(), starts.len()),
            "{labels:?}"
        );
    }

    #[test]
    fn an_hour_that_a_day_has_twice_is_two_groups() {
        let mut temporary = Temporary::new();
        temporary.set_zone(zone("Europe/Zagreb"));
        let store = &temporary.store;
        // 2026-10-25 00:30 and 01:30, UTC.
        for created in [1_792_888_200, 1_792_891_800] {
            write(store, "x", "key_1", created, 200, Some(1));
        }
        assert_eq!(
            groups(store, Range::ALL, Grouping::Hour),
            [
                ("2026-10-25T02:00+02:00".into(), 1),
                ("2026-10-25T02:00+01:00".into(), 1)
            ]
        );
        assert_eq!(
            groups(store, Range::ALL, Grouping::Day),
            [("2026-10-25".into(), 2)]
        );
    }

    /// Reports and look-ups read few days among many.
    #[test]
    fn sums_and_rows_are_found_by_an_index() {
        let temporary = Temporary::sqlite();
        let days = || Source::Days(["a", "b"].map(String::from));
        for (part, filter, index) in [
            (
                days(),
                Filter::ALL,
                "INDEX usage_days_by_day (day>? AND day<?)",
            ),
            (
                days(),
                Filter::of_key("x"),
                "PRIMARY KEY (key_id=? AND day>? AND day<?)",
            ),
            (
                Source::Rows(Range::ALL),
                Filter::ALL,
                "PRIMARY KEY (request_id>? AND request_id<?)",
            ),
            (
                Source::Rows(Range::ALL),
                Filter::of_key("x"),
                "INDEX usage_by_key (key_id=? AND request_id>? AND request_id<?)",
            ),
        ] {
            let (statement, _) = part.select(Span::Day, &filter);
            let plan = temporary.store.plan(&statement);
            assert!(plan.contains(index), "{statement}: {plan}");
        }
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
                for by in Grouping::ALL {
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
                .grouped(&RowFilter::of(Range::ALL, Filter::ALL), &by)
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
                .append(with_outcome(renamed, 400, None), None)
                .expect("a row");
        }
        temporary
            .store
            .tamper("UPDATE keys SET name = 'third name' WHERE id = 'key_2'");
        let rows = temporary
            .store
            .ledger
            .grouped(&RowFilter::of(Range::ALL, Filter::ALL), &[Grouping::Key])
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
