//! Sums over the ledger: whole days from the sums that are kept of them, the rest of a range from its rows.

use rusqlite::types::ValueRef;
use rusqlite::{Row, named_params};
use serde::Serialize;
use serde_json::{Map, Value};

use super::{DAY, Store, StoreError};
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

/// What sums are grouped by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grouping {
    Hour,
    Day,
    Month,
    Key,
    Status,
}

impl Grouping {
    pub const ALL: [(&str, Self); 5] = [
        ("hour", Self::Hour),
        ("day", Self::Day),
        ("month", Self::Month),
        ("key", Self::Key),
        ("status", Self::Status),
    ];

    /// The members that name a group.
    pub fn labels(self) -> &'static [&'static str] {
        match self {
            Self::Hour => &["hour"],
            Self::Day => &["day"],
            Self::Month => &["month"],
            Self::Key => &["key_id", "name"],
            Self::Status => &["status", "error_code"],
        }
    }

    /// What the pieces are grouped by, and how that is shown: numbers are compared sooner than texts.
    fn expressions(self) -> (&'static str, &'static str) {
        match self {
            Self::Hour => {
                ("time / 3600 AS g, 0 AS h", "strftime('%Y-%m-%dT%H:00Z', g * 3600, 'unixepoch') AS hour")
            }
            Self::Day => ("time / 86400 AS g, 0 AS h", "date(g * 86400, 'unixepoch') AS day"),
            Self::Month => {
                ("time / 86400 AS g, 0 AS h", "strftime('%Y-%m', g * 86400, 'unixepoch') AS month")
            }
            Self::Key => ("key_id AS g, key_name AS h", "g AS key_id, h AS name"),
            Self::Status => ("status AS g, error_code AS h", "g AS status, h AS error_code"),
        }
    }

    fn order(self) -> &'static str {
        match self {
            Self::Key => "requests DESC, 1, 2",
            _ => "1",
        }
    }
}

/// Figures over some requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sums {
    pub requests: i64,
    /// Those that did not end in 200; one that is under way is none yet.
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
    /// Adds another's figures.
    pub fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.errors += other.errors;
        self.prompt_tokens += other.prompt_tokens;
        self.completion_tokens += other.completion_tokens;
        self.total_tokens += other.total_tokens;
        self.unmeasured += other.unmeasured;
    }
}

impl Store {
    pub fn sums(&self, range: Range) -> Result<Sums, StoreError> {
        let mut all = Sums::default();
        self.grouped(range, Grouping::Status, |row| all.add(&row.sums))?;
        Ok(all)
    }

    /// Hands out one group after the other, so that as many as there are need no more memory than one.
    pub fn grouped(
        &self,
        range: Range,
        by: Grouping,
        mut take: impl FnMut(UsageRow),
    ) -> Result<(), StoreError> {
        self.read(|connection| {
            let kept_since: i64 =
                connection.query_row("SELECT kept_since FROM chain", [], |row| row.get(0))?;
            let Plan { first, last, edges } = match by {
                Grouping::Hour => Plan::of_rows(range),
                _ => Plan::of_days(range, kept_since),
            };
            let (group, shown) = by.expressions();
            let names = by.labels();
            let labels: Vec<String> = (1..=names.len()).map(|number| number.to_string()).collect();
            let mut statement = connection.prepare_cached(&format!(
                "SELECT {shown}, {SUMS} FROM (SELECT {group}, {SUMS} FROM ({PIECES}) GROUP BY 1, 2)
                 GROUP BY {} HAVING sum(requests) <> 0 ORDER BY {}",
                labels.join(", "),
                by.order()
            ))?;
            let mut rows = statement.query(named_params! {
                ":first": first, ":last": last,
                ":from_1": RequestId::from(edges[0].from), ":to_1": RequestId::from(edges[0].to),
                ":sign_1": edges[0].sign,
                ":from_2": RequestId::from(edges[1].from), ":to_2": RequestId::from(edges[1].to),
                ":sign_2": edges[1].sign,
                ":since": RequestId::from(range.since), ":until": RequestId::from(range.until),
            })?;
            while let Some(row) = rows.next()? {
                take(UsageRow { labels: read_labels(row, names)?, sums: read_sums(row)? });
            }
            Ok(())
        })
    }
}

fn read_labels(row: &Row, names: &[&str]) -> rusqlite::Result<Map<String, Value>> {
    let mut labels = Map::new();
    for name in names {
        let value = match row.get_ref(*name)? {
            ValueRef::Integer(number) => number.into(),
            ValueRef::Text(text) => String::from_utf8_lossy(text).into(),
            _ => Value::Null,
        };
        labels.insert((*name).into(), value);
    }
    Ok(labels)
}

const SUMS: &str = "sum(requests) AS requests, sum(errors) AS errors, sum(prompt_tokens) AS prompt_tokens,
    sum(completion_tokens) AS completion_tokens, sum(total_tokens) AS total_tokens, sum(unmeasured) AS unmeasured";

/// The sums that are kept of whole days, the rows at both ends of the range, added or taken away, and the rows
/// that are still open, which are in no day's sums.
const PIECES: &str = "
    SELECT day * 86400 AS time, key_id, key_name, nullif(status, 0) AS status, nullif(error_code, '') AS error_code,
        requests, requests * (status <> 200) AS errors, prompt_tokens, completion_tokens, total_tokens, unmeasured
    FROM usage_daily WHERE day >= :first AND day < :last
    UNION ALL
    SELECT created, key_id, key_name, status, error_code, :sign_1, :sign_1 * (coalesce(status, 0) <> 200),
        :sign_1 * prompt_tokens, :sign_1 * completion_tokens, :sign_1 * total_tokens,
        :sign_1 * (status = 200 AND total_tokens IS NULL)
    FROM usage WHERE request_id >= :from_1 AND request_id < :to_1 AND seq IS NOT NULL
    UNION ALL
    SELECT created, key_id, key_name, status, error_code, :sign_2, :sign_2 * (coalesce(status, 0) <> 200),
        :sign_2 * prompt_tokens, :sign_2 * completion_tokens, :sign_2 * total_tokens,
        :sign_2 * (status = 200 AND total_tokens IS NULL)
    FROM usage WHERE request_id >= :from_2 AND request_id < :to_2 AND seq IS NOT NULL
    UNION ALL
    SELECT created, key_id, key_name, NULL, NULL, 1, 0, 0, 0, 0, 0
    FROM usage WHERE seq IS NULL AND request_id >= (SELECT max(:since, closed_before) FROM chain)
        AND request_id < :until";

/// What a range is put together from.
struct Plan {
    /// Whole days, from the first to before the last.
    first: i64,
    last: i64,
    edges: [Edge; 2],
}

/// Rows of a part of a day: added to the whole days, or taken away from them where that is the shorter part.
#[derive(Clone, Copy)]
struct Edge {
    from: i64,
    to: i64,
    sign: i64,
}

impl Edge {
    const NONE: Self = Self { from: 0, to: 0, sign: 1 };
}

impl Plan {
    /// From rows alone.
    fn of_rows(Range { since, until }: Range) -> Self {
        Self { first: 0, last: 0, edges: [Edge { from: since, to: until, sign: 1 }, Edge::NONE] }
    }

    /// From days, and from rows at both ends. Where rows may have been removed, a day that lies in the range in
    /// part counts whole: its rows are not all there to tell the part.
    fn of_days(range: Range, kept_since: i64) -> Self {
        let Range { since, until } = range;
        let start = |day: i64| day.saturating_mul(DAY);
        let (first_day, last_day) = (since.div_euclid(DAY), until.div_euclid(DAY));
        if until <= since || (first_day == last_day && start(first_day) >= kept_since) {
            return Self::of_rows(range);
        }
        let mut plan = Self { first: first_day, last: last_day, edges: [Edge::NONE; 2] };
        let into_first = since.rem_euclid(DAY);
        if into_first > 0 && start(first_day) >= kept_since {
            plan.edges[0] = if into_first > DAY / 2 {
                plan.first += 1;
                Edge { from: since, to: start(first_day + 1), sign: 1 }
            } else {
                Edge { from: start(first_day), to: since, sign: -1 }
            };
        }
        let into_last = until.rem_euclid(DAY);
        if into_last > 0 && start(last_day) < kept_since {
            plan.last += 1;
        } else if into_last > DAY / 2 {
            plan.last += 1;
            plan.edges[1] = Edge { from: until, to: start(last_day + 1), sign: -1 };
        } else if into_last > 0 {
            plan.edges[1] = Edge { from: start(last_day), to: until, sign: 1 };
        }
        plan
    }
}

/// A sum over nothing is null in SQL.
fn read_sums(row: &Row) -> rusqlite::Result<Sums> {
    let sum = |name: &str| row.get::<_, Option<i64>>(name).map(Option::unwrap_or_default);
    Ok(Sums {
        requests: sum("requests")?,
        errors: sum("errors")?,
        prompt_tokens: sum("prompt_tokens")?,
        completion_tokens: sum("completion_tokens")?,
        total_tokens: sum("total_tokens")?,
        unmeasured: sum("unmeasured")?,
    })
}

#[cfg(test)]
mod tests {
    use super::super::ledger::tests::{outcome, row, write};
    use super::super::tests::Temporary;
    use super::*;

    fn groups(store: &Store, range: Range, by: Grouping) -> Vec<(String, i64)> {
        let mut found = Vec::new();
        let label = |row: &UsageRow| row.labels[by.labels()[0]].to_string().trim_matches('"').to_owned();
        store.grouped(range, by, |row| found.push((label(&row), row.sums.requests))).expect("the figures");
        found
    }

    fn filled() -> Temporary {
        let temporary = Temporary::new();
        let store = &temporary.store;
        write(store, "a", "key_1", 10, 200, Some(5));
        write(store, "b", "key_1", DAY + 1, 200, None);
        write(store, "c", "key_2", DAY + 4000, 502, None);
        store.add_row(row("d", "key_1", 40 * DAY + 3), outcome(400, None)).expect("a refused one");
        store.open_row(row("e", "key_1", 40 * DAY + 4)).expect("one under way");
        temporary
    }

    #[test]
    fn sums_of_everything() {
        let temporary = filled();
        let all = temporary.store.sums(Range::ALL).expect("the figures");
        assert_eq!((all.requests, all.errors, all.total_tokens, all.unmeasured), (5, 2, 5, 1));
        assert_eq!((all.prompt_tokens, all.completion_tokens), (0, 4));
        let none = temporary.store.sums(Range { since: 100 * DAY, until: i64::MAX }).expect("the figures");
        assert_eq!(none, Sums::default());
    }

    #[test]
    fn any_range_is_the_sum_of_its_rows() {
        let temporary = filled();
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
                assert_eq!(temporary.store.sums(range).expect("the figures").requests, expected, "{range:?}");
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
    fn a_renamed_key_keeps_its_past() {
        let temporary = filled();
        let mut renamed = (*row("f", "key_2", 41 * DAY)).clone();
        renamed.key_name = "renamed".into();
        temporary.store.add_row(renamed.into(), outcome(400, None)).expect("a row");
        let mut names = Vec::new();
        let take = |row: UsageRow| names.push(row.labels["name"].to_string());
        temporary.store.grouped(Range::ALL, Grouping::Key, take).expect("the figures");
        assert_eq!(names, ["\"name of key_1\"", "\"name of key_2\"", "\"renamed\""]);
    }
}
