//! Sums over the ledger: whole days from the sums that are kept of them, the rest of a range from its rows.

use rusqlite::{Connection, Row, named_params};
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

    /// The expressions of these, over what `pieces` selects.
    fn expressions(self) -> &'static str {
        match self {
            Self::Hour => "strftime('%Y-%m-%dT%H:00Z', time, 'unixepoch') AS hour",
            Self::Day => "date(time, 'unixepoch') AS day",
            Self::Month => "strftime('%Y-%m', time, 'unixepoch') AS month",
            Self::Key => "key_id, key_name AS name",
            Self::Status => "status, error_code",
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

impl Store {
    pub fn sums(&self, range: Range) -> Result<Sums, StoreError> {
        self.read(|connection| {
            let mut all = Sums::default();
            select(connection, range, None, |row| {
                all = read_sums(row)?;
                Ok(())
            })?;
            Ok(all)
        })
    }

    /// Hands out one group after the other, so that as many as there are need no more memory than one.
    pub fn grouped(
        &self,
        range: Range,
        by: Grouping,
        mut take: impl FnMut(UsageRow),
    ) -> Result<(), StoreError> {
        self.read(|connection| {
            select(connection, range, Some(by), |row| {
                let mut labels = Map::new();
                for name in by.labels() {
                    let value = match row.get_ref(*name)? {
                        rusqlite::types::ValueRef::Integer(number) => number.into(),
                        rusqlite::types::ValueRef::Text(text) => String::from_utf8_lossy(text).into(),
                        _ => Value::Null,
                    };
                    labels.insert((*name).into(), value);
                }
                take(UsageRow { labels, sums: read_sums(row)? });
                Ok(())
            })
        })
    }
}

fn select(
    connection: &Connection,
    range: Range,
    by: Option<Grouping>,
    mut take: impl FnMut(&Row) -> rusqlite::Result<()>,
) -> rusqlite::Result<()> {
    let kept_since: i64 = connection.query_row("SELECT kept_since FROM chain", [], |row| row.get(0))?;
    let (first, last) = whole_days(range, kept_since, by == Some(Grouping::Hour));
    let (group, order) = match by {
        None => ("NULL AS all_of_it".to_owned(), "GROUP BY 1 ORDER BY 1"),
        Some(Grouping::Key) => {
            (Grouping::Key.expressions().into(), "GROUP BY 1, 2 ORDER BY requests DESC, 1, 2")
        }
        Some(by) if by.labels().len() == 2 => (by.expressions().into(), "GROUP BY 1, 2 ORDER BY 1, 2"),
        Some(by) => (by.expressions().into(), "GROUP BY 1 ORDER BY 1"),
    };
    let mut statement = connection.prepare_cached(&format!(
        "SELECT {group}, sum(requests) AS requests, sum(errors) AS errors, sum(prompt_tokens) AS prompt_tokens,
         sum(completion_tokens) AS completion_tokens, sum(total_tokens) AS total_tokens,
         sum(unmeasured) AS unmeasured FROM ({PIECES}) {order}"
    ))?;
    let mut rows = statement.query(named_params! {
        ":since": RequestId::from(range.since), ":until": RequestId::from(range.until),
        ":first": first, ":last": last, ":first_id": RequestId::from(first.saturating_mul(DAY)),
        ":last_id": RequestId::from(last.saturating_mul(DAY)),
    })?;
    while let Some(row) = rows.next()? {
        take(row)?;
    }
    Ok(())
}

/// The sums that are kept of whole days, and the rows before and after these days. A row that is still open
/// is in no day's sums.
const PIECES: &str = "
    SELECT day * 86400 AS time, key_id, key_name, nullif(status, 0) AS status, nullif(error_code, '') AS error_code,
        requests, requests * (status <> 200) AS errors, prompt_tokens, completion_tokens, total_tokens, unmeasured
    FROM usage_daily WHERE day >= :first AND day < :last
    UNION ALL
    SELECT created, key_id, key_name, status, error_code, 1, coalesce(status, 0) <> 200, prompt_tokens,
        completion_tokens, total_tokens, status = 200 AND total_tokens IS NULL
    FROM usage WHERE request_id >= :since AND request_id < min(:until, :first_id) AND seq IS NOT NULL
    UNION ALL
    SELECT created, key_id, key_name, status, error_code, 1, coalesce(status, 0) <> 200, prompt_tokens,
        completion_tokens, total_tokens, status = 200 AND total_tokens IS NULL
    FROM usage WHERE request_id >= max(:since, :last_id, :first_id) AND request_id < :until AND seq IS NOT NULL
    UNION ALL
    SELECT created, key_id, key_name, NULL, NULL, 1, 0, 0, 0, 0, 0
    FROM usage WHERE seq IS NULL AND request_id >= :since AND request_id < :until";

/// The days that lie in a range whole, from the first to before the last. Where rows may have been removed,
/// a day that lies in it in part counts whole: its rows are not all there to tell the part.
fn whole_days(Range { since, until }: Range, kept_since: i64, rows_only: bool) -> (i64, i64) {
    if rows_only {
        return (i64::MIN / DAY, i64::MIN / DAY);
    }
    let first = if since <= kept_since { since.div_euclid(DAY) } else { ceiling(since) };
    let last = if until <= kept_since { ceiling(until) } else { until.div_euclid(DAY) };
    (first, last.max(first))
}

fn ceiling(time: i64) -> i64 {
    time.div_euclid(DAY) + i64::from(time.rem_euclid(DAY) > 0)
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
            DAY,
            DAY + 1,
            DAY + 2,
            DAY + 4000,
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
        let mut renamed = row("f", "key_2", 41 * DAY);
        renamed.key_name = "renamed".into();
        temporary.store.add_row(renamed, outcome(400, None)).expect("a row");
        let mut names = Vec::new();
        let take = |row: UsageRow| names.push(row.labels["name"].to_string());
        temporary.store.grouped(Range::ALL, Grouping::Key, take).expect("the figures");
        assert_eq!(names, ["\"name of key_1\"", "\"name of key_2\"", "\"renamed\""]);
    }
}
