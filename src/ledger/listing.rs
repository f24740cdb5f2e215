//! The ledger's rows for people: the newest first, in pages, or the oldest first, for an export.

use std::time::{Duration, Instant};

use super::append::Ledger;
use super::days::Filter;
use super::{COLUMNS, LedgerRow};
use crate::database::{REPORT_TIMEOUT, Session, Value, to_value};
use crate::error::Result;
use crate::id::RequestId;
use crate::when::Range;

#[derive(Clone, Debug)]
pub struct RowFilter {
    pub range: Range,
    pub requests: Filter,
    pub matching: Matching,
    pub cause: Option<String>,
    /// The shortest and the longest duration in milliseconds; a row without a duration is not
    /// wanted then.
    pub least_ms: Option<u32>,
    pub most_ms: Option<u32>,
}

impl RowFilter {
    /// All requests of a range, of some keys or a gateway.
    pub fn of(range: Range, requests: Filter) -> Self {
        Self {
            range,
            requests,
            matching: Matching::Anything,
            cause: None,
            least_ms: None,
            most_ms: None,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Matching {
    Anything,
    Failure,
    Status(i64),
    Code(String),
}

/// The codes that a row can have.
pub const CODES: [&str; 6] = [
    "invalid_request",
    "insufficient_permission",
    "inference_error",
    "search_unavailable",
    "service_unavailable",
    "abandoned",
];

impl Matching {
    /// Reads an outcome: ok, failed, or an error code.
    pub fn parse(word: &str) -> Option<Self> {
        match word {
            "ok" => Some(Self::Status(200)),
            "failed" => Some(Self::Failure),
            code if CODES.contains(&code) => Some(Self::Code(code.into())),
            _ => None,
        }
    }

    pub fn includes(&self, status: Option<i64>, error_code: Option<&str>) -> bool {
        match self {
            Self::Anything => true,
            Self::Failure => error_code.is_some(),
            Self::Status(wanted) => status == Some(*wanted),
            Self::Code(code) => error_code == Some(code),
        }
    }
}

/// The most completions whose durations are read.
const MOST_DURATIONS: usize = 500;

/// The number of ids that are searched at a time. With ten million rows, 2,000 of one key took 200
/// ms from the disk.
const WINDOW: usize = 2_000;

/// The time that a search for rare rows takes before it says how far it came.
const SEARCH_TIME: Duration = Duration::from_secs(2);

/// Some rows, and from where on there are more.
#[derive(Debug)]
pub struct Listing {
    pub rows: Vec<LedgerRow>,
    /// The last id of these, or of those that were searched, if there are more after it.
    pub next: Option<String>,
    /// The last id that was searched, if the time was over before the page was full.
    pub searched_to: Option<String>,
}

impl Ledger {
    /// The newest rows before an id, or of all.
    pub fn newest(&self, filter: &RowFilter, before: Option<&str>, most: usize) -> Result<Listing> {
        let [from, mut to] = ends(filter.range);
        if let Some(before) = before {
            to = to.min(before.to_owned());
        }
        self.list(filter, [from, to], "DESC", most, SEARCH_TIME)
    }

    /// The next rows after an id, oldest first.
    pub fn oldest(&self, filter: &RowFilter, after: Option<&str>, most: usize) -> Result<Listing> {
        let [from, to] = ends(filter.range);
        let from = after.map_or(from, following);
        self.list(filter, [from, to], "ASC", most, SEARCH_TIME)
    }

    /// The milliseconds that the newest completions took, in ascending order, whatever outcome is
    /// wanted. If many requests have failed, only the newest of all are searched.
    pub fn newest_durations(&self, filter: &RowFilter) -> Result<Vec<f64>> {
        let completions = RowFilter {
            matching: Matching::Status(200),
            cause: None,
            least_ms: Some(0),
            most_ms: None,
            ..filter.clone()
        };
        let between = ends(filter.range);
        let newest = self.list(
            &completions,
            between,
            "DESC",
            MOST_DURATIONS,
            Duration::ZERO,
        )?;
        let durations = newest.rows.iter().filter_map(|row| row.duration_ms);
        let mut durations: Vec<f64> = durations.collect();
        durations.sort_by(f64::total_cmp);
        Ok(durations)
    }

    /// The newest rows, and true if there are more, with the number of requests that the sums count
    /// in the same state: retention may have removed the others. That number fails if it is not
    /// known.
    pub fn newest_and_count(
        &self,
        filter: &RowFilter,
        most: usize,
    ) -> Result<(Vec<LedgerRow>, bool, Result<i64>)> {
        self.database.report(|session| {
            let newest = search(
                session,
                filter,
                ends(filter.range),
                "DESC",
                most,
                REPORT_TIMEOUT,
            )?;
            let is_more = newest.next.is_some();
            let counted = match (is_more, &filter.cause) {
                (true, _) => Ok(0),
                // The sums have no causes.
                (false, Some(_)) => self
                    .check_rows(session, filter.range)
                    .map(|()| newest.rows.len() as i64),
                (false, None) => self
                    .read_grouped(session, filter, &[])
                    .map(|rows| rows.iter().map(|row| row.sums.requests).sum()),
            };
            Ok((newest.rows, is_more, counted))
        })
    }

    fn list(
        &self,
        filter: &RowFilter,
        between: [String; 2],
        order: &str,
        most: usize,
        time: Duration,
    ) -> Result<Listing> {
        self.database
            .read(|session| search(session, filter, between, order, most, time))
    }
}

/// Rows between two ids: searches a window of ids after the other until there are enough, or the
/// time is over.
fn search(
    session: &Session,
    filter: &RowFilter,
    [mut from, mut to]: [String; 2],
    order: &str,
    most: usize,
    time: Duration,
) -> Result<Listing> {
    let began = Instant::now();
    let mut found = Listing {
        rows: Vec::new(),
        next: None,
        searched_to: None,
    };
    loop {
        let (ids, between) = ids(filter, order, [&from, &to]);
        let mut parameters = between.clone();
        let conditions = conditions(filter, &mut parameters);
        // One more than asked for shows whether there are more.
        let missing = most + 1 - found.rows.len();
        let statement = format!(
            "SELECT {COLUMNS} FROM usage WHERE request_id IN ({ids}) {conditions}
             ORDER BY request_id {order} LIMIT {missing}"
        );
        let rows = session.rows(&statement, &parameters, LedgerRow::read)?;
        found.rows.extend(rows);
        if found.rows.len() > most {
            found.rows.truncate(most);
            found.next = found.rows.last().map(|row| row.request_id.clone());
            return Ok(found);
        }
        let last = format!(
            "SELECT request_id FROM ({ids}) AS ids ORDER BY 1 {order} LIMIT 1 OFFSET {}",
            WINDOW - 1
        );
        let last: Option<String> = session.first(&last, &between, |mut row| row.column())?;
        if last.is_some() && began.elapsed() >= time {
            (found.next, found.searched_to) = (last.clone(), last);
            return Ok(found);
        }
        match (last, order) {
            (None, _) => return Ok(found),
            (Some(last), "DESC") => to = last,
            (Some(last), _) => from = following(&last),
        }
    }
}

/// The first id of a range, and that after its last.
fn ends(range: Range) -> [String; 2] {
    [range.since, range.until].map(RequestId::from)
}

/// No id is its own beginning with more after it: this leaves out the id alone.
fn following(id: &str) -> String {
    format!("{id} ")
}

/// A statement for the next ids between two that may be those of wanted rows, and its parameters:
/// failures and the rows of a key have an index, in which they are in order.
pub fn ids(filter: &RowFilter, order: &str, between: [&str; 2]) -> (String, Vec<Value>) {
    let mut parameters = between.map(|id| to_value(&id)).to_vec();
    let select = |condition: &str| {
        format!(
            "SELECT request_id FROM usage WHERE request_id >= $1 AND request_id < $2 {condition}
             ORDER BY request_id {order} LIMIT {WINDOW}"
        )
    };
    // A cause without an error belongs to no row.
    let is_failure = filter.cause.is_some()
        || match filter.matching {
            Matching::Failure | Matching::Code(_) => true,
            Matching::Status(status) => status != 200,
            Matching::Anything => false,
        };
    let statement = match &filter.requests.keys {
        _ if is_failure => select("AND error_code IS NOT NULL"),
        None => select(""),
        Some(keys) if keys.is_empty() => select("AND 1 = 0"),
        Some(keys) => {
            parameters.extend(keys.iter().map(to_value));
            let of_key = |number: usize| select(&format!("AND key_id = ${}", number + 3));
            if let [_] = keys[..] {
                return (of_key(0), parameters);
            }
            let parts = (0..keys.len()).map(|number| {
                format!("SELECT request_id FROM ({}) AS key{number}", of_key(number))
            });
            let parts: Vec<String> = parts.collect();
            format!(
                "{} ORDER BY request_id {order} LIMIT {WINDOW}",
                parts.join(" UNION ALL ")
            )
        }
    };
    (statement, parameters)
}

/// The conditions for a row, whose values are added to the parameters. A failure is one by its id.
fn conditions(filter: &RowFilter, parameters: &mut Vec<Value>) -> String {
    let (status, code) = match &filter.matching {
        Matching::Anything | Matching::Failure => (None, None),
        Matching::Status(status) => (Some(*status), None),
        Matching::Code(code) => (None, Some(code)),
    };
    let mut conditions = String::new();
    for (condition, value) in [
        ("status =", to_value(&status)),
        ("error_code =", to_value(&code)),
        ("cause =", to_value(&filter.cause)),
        ("duration_ms >=", to_value(&filter.least_ms.map(f64::from))),
        ("duration_ms <=", to_value(&filter.most_ms.map(f64::from))),
    ] {
        if value != Value::Null {
            parameters.push(value);
            conditions += &format!("AND {condition} ${} ", parameters.len());
        }
    }
    conditions + &filter.requests.conditions(parameters)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::append::tests::{id, row, with_outcome, write};
    use crate::store::Store;
    use crate::store::tests::Temporary;

    fn filter(matching: Matching, key_id: Option<&str>) -> RowFilter {
        RowFilter {
            range: Range {
                since: 100,
                until: 200,
            },
            requests: key_id.map_or(Filter::ALL, Filter::of_key),
            matching,
            cause: None,
            least_ms: None,
            most_ms: None,
        }
    }

    /// The ids of all pages, and how many pages there were.
    fn all(store: &Store, filter: &RowFilter, most: usize) -> (Vec<String>, usize) {
        let (mut ids, mut pages, mut before) = (Vec::new(), 0, None);
        loop {
            let listing = store
                .ledger
                .newest(filter, before.as_deref(), most)
                .expect("a page");
            assert!(listing.rows.len() <= most);
            ids.extend(listing.rows.into_iter().map(|row| row.request_id));
            pages += 1;
            before = listing.next;
            if before.is_none() {
                return (ids, pages);
            }
        }
    }

    #[test]
    fn every_row_is_on_one_page() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        for number in 0..250_i64 {
            let status = if number % 7 == 0 { 502 } else { 200 };
            write(
                store,
                &format!("{number:03}"),
                ["key_1", "key_2"][number as usize % 2],
                number,
                status,
                None,
            );
        }
        let refused = with_outcome(row("refused", "key_1", 150), 400, None);
        let refused = LedgerRow {
            error_code: Some("invalid_request".into()),
            ..refused
        };
        store.ledger.append(refused, None).expect("a refused one");
        let count = |matching, key| all(store, &filter(matching, key), 10).0.len();
        assert_eq!(count(Matching::Anything, None), 101);
        assert_eq!(count(Matching::Anything, Some("key_2")), 50);
        assert_eq!(count(Matching::Status(200), None), 100 - 14);
        assert_eq!(count(Matching::Failure, None), 15);
        assert_eq!(count(Matching::Code("invalid_request".into()), None), 1);
        assert_eq!(
            count(Matching::Code("invalid_request".into()), Some("key_2")),
            0
        );
        assert_eq!(count(Matching::Code("' OR 1=1 --".into()), None), 0);
        let (ids, pages) = all(store, &filter(Matching::Failure, None), 5);
        assert_eq!(pages, 3);
        assert!(
            ids.is_sorted_by(|a, b| a > b),
            "the newest first, each once"
        );
        assert_eq!(
            all(store, &filter(Matching::Anything, None), 101).1,
            1,
            "no empty last page"
        );
    }

    #[test]
    fn a_duration_is_searched_for() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        for number in 100..150_i64 {
            let slow = LedgerRow {
                duration_ms: Some(number as f64),
                ..row("x", "key_1", number)
            };
            store.ledger.append(slow, None).expect("a row");
        }
        store
            .ledger
            .append(
                LedgerRow {
                    duration_ms: None,
                    ..row("none", "key_1", 151)
                },
                None,
            )
            .expect("a row");
        let count = |least_ms, most_ms| {
            let filter = RowFilter {
                least_ms,
                most_ms,
                ..filter(Matching::Anything, Some("key_1"))
            };
            all(store, &filter, 10).0.len()
        };
        assert_eq!(count(None, None), 51);
        assert_eq!(count(Some(110), None), 40, "a row may have none");
        assert_eq!(count(None, Some(110)), 11);
        assert_eq!(count(Some(120), Some(129)), 10);
        assert_eq!(count(Some(200), None), 0);
    }

    /// Two windows of rows of one second, of which the oldest and the newest are slow.
    fn two_windows() -> Temporary {
        let temporary = Temporary::sqlite();
        let rows = 2 * WINDOW;
        temporary.store.tamper(&format!(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})
             INSERT INTO usage (request_id, key_id, key_name, created, status, duration_ms, day)
             SELECT printf('chatcmpl_%012x%020x', 150000, i), 'key_' || (1 + i % 2), 'x', 150, 200,
             CASE WHEN i IN (1, {rows}) THEN 9000 ELSE 1 END, '1970-01-01' FROM n"
        ));
        temporary
    }

    #[test]
    fn a_search_ends_and_goes_on_from_there() {
        let temporary = two_windows();
        let store = &temporary.store;
        let slow = RowFilter {
            least_ms: Some(5000),
            ..filter(Matching::Status(200), None)
        };
        let [from, to] = [100, 200].map(RequestId::from);
        let page = |to: &str, most| {
            let between = [from.clone(), to.to_owned()];
            let page = store
                .ledger
                .list(&slow, between, "DESC", most, Duration::ZERO);
            page.expect("a page")
        };
        let first = page(&to, 10);
        assert_eq!((first.rows.len(), first.searched_to.is_some()), (1, true));
        assert_eq!(
            first.next, first.searched_to,
            "the next page goes on from the end of the search"
        );
        let second = page(&first.next.expect("there is more"), 10);
        assert_eq!(second.rows.len(), 1);
        let full = page(&to, 0);
        assert!(
            full.searched_to.is_none() && full.rows.is_empty() && full.next.is_none(),
            "a full page does not end the search"
        );
        let all = store.ledger.newest(&slow, None, 10).expect("a page");
        assert_eq!(
            (all.rows.len(), all.next),
            (2, None),
            "all windows, while there is time"
        );
        let (mut found, mut after) = (0, None);
        loop {
            let piece = store
                .ledger
                .oldest(&slow, after.as_deref(), 1)
                .expect("a piece");
            found += piece.rows.len();
            after = piece.next;
            if after.is_none() {
                break;
            }
        }
        assert_eq!(found, 2, "an export has both");
    }

    #[test]
    fn the_rows_of_several_keys_are_in_the_order_of_time() {
        let temporary = two_windows();
        let count = |keys: &[&str], most| {
            let filter = RowFilter {
                requests: Filter {
                    keys: Some(keys.iter().map(ToString::to_string).collect()),
                    gateway: None,
                },
                ..filter(Matching::Anything, None)
            };
            let (ids, pages) = all(&temporary.store, &filter, most);
            assert!(ids.is_sorted_by(|a, b| a > b), "{keys:?}");
            (ids.len(), pages)
        };
        assert_eq!(count(&["key_1", "key_2"], 900), (2 * WINDOW, 5));
        assert_eq!(count(&["key_2", "key_3"], 900), (WINDOW, 3));
        assert_eq!(count(&["key_3"], 900), (0, 1));
        assert_eq!(count(&[], 900), (0, 1));
    }

    /// The ledger may have ten million rows.
    #[test]
    fn ids_are_found_in_the_order_of_an_index() {
        let temporary = Temporary::sqlite();
        for (matching, key, index) in [
            (Matching::Anything, None, "PRIMARY KEY"),
            (Matching::Status(200), None, "PRIMARY KEY"),
            (Matching::Anything, Some("key_1"), "usage_by_key"),
            (Matching::Failure, None, "usage_failed"),
            (Matching::Failure, Some("key_1"), "usage_failed"),
        ] {
            let (statement, _) = ids(&filter(matching, key), "DESC", [""; 2]);
            let plan = temporary.store.plan(&statement);
            let is_good = plan.contains(index)
                && !plan.contains("TEMP B-TREE")
                && !plan.contains("MULTI-INDEX");
            assert!(is_good, "{statement}: {plan}");
        }
    }

    #[test]
    fn durations_are_those_of_the_newest_completions() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        for number in 100..120_i64 {
            let status = if number % 10 == 0 { 502 } else { 200 };
            let row = LedgerRow {
                duration_ms: Some((300 - number) as f64),
                ..row("x", "key_1", number)
            };
            store
                .ledger
                .append(with_outcome(row, status, None), None)
                .expect("a row");
        }
        let durations = |filter: &RowFilter| {
            store
                .ledger
                .newest_durations(filter)
                .expect("the durations")
        };
        let all = durations(&filter(Matching::Anything, None));
        assert!(
            all.len() == 18 && all.is_sorted() && all[0] == 181.0,
            "{all:?}"
        );
        assert_eq!(
            durations(&filter(Matching::Status(200), Some("key_1"))),
            all
        );
        assert!(durations(&filter(Matching::Status(200), Some("key_2"))).is_empty());
        assert_eq!(
            durations(&filter(Matching::Failure, None)),
            all,
            "the outcome does not change their base"
        );
    }

    #[test]
    fn what_is_taken_away_is_whole() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        for number in 90..210_i64 {
            write(
                store,
                "x",
                "key_1",
                number,
                if number % 2 == 0 { 200 } else { 502 },
                None,
            );
        }
        let (mut ids, mut after) = (Vec::new(), None);
        loop {
            let listing = store
                .ledger
                .oldest(&filter(Matching::Status(200), None), after.as_deref(), 7)
                .expect("a piece");
            ids.extend(listing.rows.into_iter().map(|row| row.request_id));
            after = listing.next;
            if after.is_none() {
                break;
            }
        }
        let expected: Vec<String> = (100..200)
            .step_by(2)
            .map(|number| id("x", number))
            .collect();
        assert_eq!(ids, expected);
    }
}
