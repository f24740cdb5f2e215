//! The ledger's rows for people: the newest first, in pages, or the oldest first, for an export.

use super::append::Ledger;
use super::row::{COLUMNS, LedgerRow, read_row};
use crate::database::{Result, SqlValue};
use crate::id::RequestId;
use crate::when::Range;

#[derive(Clone, Debug)]
pub struct RowFilter {
    pub range: Range,
    pub key_id: Option<String>,
    pub gateway: Option<String>,
    pub matching: Matching,
    pub cause: Option<String>,
    /// The shortest and the longest duration in milliseconds; a row without a duration is not
    /// wanted then.
    pub least_ms: Option<u32>,
    pub most_ms: Option<u32>,
}

impl RowFilter {
    /// The rows to search for a gateway or a duration, which no index has: those that one index
    /// finds. `None` if neither is wanted.
    fn indexed(&self) -> Option<Self> {
        let is_searched = self.gateway.is_some()
            || self.cause.is_some()
            || self.least_ms.is_some()
            || self.most_ms.is_some();
        let (key_id, matching) = match self.selects_errors() {
            false => (self.key_id.clone(), Matching::Anything),
            true => (None, Matching::Failure),
        };
        is_searched.then(|| Self {
            key_id,
            gateway: None,
            matching,
            cause: None,
            least_ms: None,
            most_ms: None,
            ..self.clone()
        })
    }

    /// Returns whether only rows with an error are wanted: they have an index. A cause without one
    /// belongs to no row.
    fn selects_errors(&self) -> bool {
        self.cause.is_some() || matches!(self.matching, Matching::Failure | Matching::Code(_))
    }

    pub fn searched_rows(&self) -> i64 {
        if self.key_id.is_none() && !self.selects_errors() {
            SEARCHED_ROWS
        } else {
            SEARCHED_SCATTERED_ROWS
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Matching {
    Anything,
    Success,
    Failure,
    Code(String),
}

impl Matching {
    pub fn includes(&self, status: Option<i64>, error_code: Option<&str>) -> bool {
        match self {
            Self::Anything => true,
            Self::Success => status == Some(200),
            Self::Failure => error_code.is_some(),
            Self::Code(code) => error_code == Some(code),
        }
    }
}

/// The most completions whose durations are read.
const MOST_DURATIONS: usize = 500;

/// The number of rows that are searched at once for a gateway or a duration, if they lie side by
/// side in the order of time.
pub const SEARCHED_ROWS: i64 = 2_000;

/// The number for rows of one key or with an error, each of which is on another page of the file.
/// With ten million rows, 2,000 of them took 200 ms from the disk.
const SEARCHED_SCATTERED_ROWS: i64 = 500;

/// Some rows, and from where on there are more.
#[derive(Debug)]
pub struct Listing {
    pub rows: Vec<LedgerRow>,
    /// The last id of these, or of those that were searched, if there are more after it.
    pub next: Option<String>,
    /// The last id that was searched for a gateway or a duration, if these rows are all that was
    /// found and the search can go on.
    pub searched_to: Option<String>,
}

impl Ledger {
    /// The newest rows before an id, or of all.
    pub fn newest(&self, filter: &RowFilter, before: Option<&str>, most: usize) -> Result<Listing> {
        let from = RequestId::from(filter.range.since);
        let to = RequestId::from(filter.range.until);
        let to = before.filter(|&before| before < to.as_str()).unwrap_or(&to);
        self.list(filter, &from, to, "DESC", most)
    }

    /// The next rows after an id, oldest first.
    pub fn oldest(&self, filter: &RowFilter, after: Option<&str>, most: usize) -> Result<Listing> {
        let from = RequestId::from(filter.range.since);
        // No id is its own beginning with more after it: this leaves out `after` alone.
        let from = after.map_or(from, |after| format!("{after} "));
        self.list(
            filter,
            &from,
            &RequestId::from(filter.range.until),
            "ASC",
            most,
        )
    }

    /// The milliseconds that the newest completions took, in ascending order, whatever outcome is
    /// wanted. If many requests have failed, only the newest of all are searched.
    pub fn newest_durations(&self, filter: &RowFilter) -> Result<Vec<f64>> {
        // With a bound for the duration, the search is limited.
        let completions = RowFilter {
            matching: Matching::Success,
            cause: None,
            least_ms: Some(0),
            most_ms: None,
            ..filter.clone()
        };
        let listing = self.newest(&completions, None, MOST_DURATIONS)?;
        let mut durations: Vec<f64> = listing
            .rows
            .iter()
            .filter_map(|row| row.duration_ms)
            .collect();
        durations.sort_by(f64::total_cmp);
        Ok(durations)
    }

    /// Rows between two ids.
    fn list(
        &self,
        filter: &RowFilter,
        from: &str,
        to: &str,
        order: &str,
        most: usize,
    ) -> Result<Listing> {
        // One more than asked for shows whether there are more.
        let limit = most as i64 + 1;
        self.database.read(|session| {
            let (mut from, mut to) = (from.to_owned(), to.to_owned());
            let mut searched_to = None;
            if let Some(indexed) = filter.indexed() {
                // The last row to be searched.
                let (ids, mut parameters) = ids(&indexed, order, [&from, &to], 1);
                parameters.push(SqlValue::from(filter.searched_rows() - 1));
                let statement = format!("{ids} OFFSET ${}", parameters.len());
                searched_to = session.first(&statement, &parameters, |mut row| row.column::<String>())?;
                match &searched_to {
                    Some(last) if order == "DESC" => from = last.clone(),
                    Some(last) => to = format!("{last} "),
                    None => {}
                }
            }
            let (ids, parameters) = ids(filter, order, [&from, &to], limit);
            let statement = format!(
                "SELECT {COLUMNS} FROM usage WHERE request_id IN ({ids}) ORDER BY request_id {order}"
            );
            let mut rows = session.rows(&statement, &parameters, read_row)?;
            let is_more = rows.len() > most;
            rows.truncate(most);
            let last = rows.last().filter(|_| is_more).map(|row: &LedgerRow| row.request_id.clone());
            let searched_to = searched_to.filter(|_| !is_more);
            Ok(Listing { rows, next: last.or(searched_to.clone()), searched_to })
        })
    }
}

/// A statement for the ids of some rows, at most so many, between two ids; and its parameters.
pub fn ids(
    filter: &RowFilter,
    order: &str,
    between: [&str; 2],
    most: i64,
) -> (String, Vec<SqlValue>) {
    let mut parameters = between.map(SqlValue::from).to_vec();
    let mut key_id = "key_id =";
    let mut conditions = String::new();
    if filter.selects_errors() {
        // The index of failures has their keys too. No index serves this expression, so that one is
        // used.
        key_id = "key_id || '' =";
        conditions += "AND error_code IS NOT NULL";
    }
    if filter.matching == Matching::Success {
        conditions += " AND status = 200";
    }
    let code = match &filter.matching {
        Matching::Code(code) => Some(code),
        _ => None,
    };
    for (comparison, value) in [
        ("cause =", filter.cause.as_ref().into()),
        ("error_code =", code.into()),
        (key_id, filter.key_id.as_ref().into()),
        ("gateway =", filter.gateway.as_ref().into()),
        ("duration_ms >=", filter.least_ms.map(f64::from).into()),
        ("duration_ms <=", filter.most_ms.map(f64::from).into()),
    ] {
        if value != SqlValue::Null {
            parameters.push(value);
            conditions += &format!(" AND {comparison} ${}", parameters.len());
        }
    }
    parameters.push(most.into());
    let statement = format!(
        "SELECT request_id FROM usage WHERE request_id >= $1 AND request_id < $2 {conditions}
         ORDER BY request_id {order} LIMIT ${}",
        parameters.len()
    );
    (statement, parameters)
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
            key_id: key_id.map(String::from),
            gateway: None,
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
        store.ledger.append(refused).expect("a refused one");
        let count = |matching, key| all(store, &filter(matching, key), 10).0.len();
        assert_eq!(count(Matching::Anything, None), 101);
        assert_eq!(count(Matching::Anything, Some("key_2")), 50);
        assert_eq!(count(Matching::Success, None), 100 - 14);
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
            store.ledger.append(slow).expect("a row");
        }
        store
            .ledger
            .append(LedgerRow {
                duration_ms: None,
                ..row("none", "key_1", 151)
            })
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

    #[test]
    fn a_search_ends_and_goes_on_from_there() {
        let temporary = Temporary::sqlite();
        let store = &temporary.store;
        // Two searches long. The slow rows are the oldest and the newest.
        let rows = 2 * SEARCHED_ROWS;
        store.tamper(&format!(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})
             INSERT INTO usage (request_id, key_id, key_name, created, status, duration_ms)
             SELECT printf('chatcmpl_%012x%020x', 150000, i), 'key_1', 'x', 150, 200,
             CASE WHEN i IN (1, {rows}) THEN 9000 ELSE 1 END FROM n"
        ));
        let slow = RowFilter {
            least_ms: Some(5000),
            ..filter(Matching::Success, None)
        };
        let first = store.ledger.newest(&slow, None, 10).expect("a page");
        assert_eq!((first.rows.len(), first.searched_to.is_some()), (1, true));
        assert_eq!(
            first.next, first.searched_to,
            "the next page goes on from the end of the search"
        );
        let second = store
            .ledger
            .newest(&slow, first.next.as_deref(), 10)
            .expect("a page");
        assert_eq!(second.rows.len(), 1);
        let full = store.ledger.newest(&slow, None, 0).expect("a page");
        assert!(
            full.searched_to.is_none() && full.rows.is_empty(),
            "a full page does not end the search"
        );
        let of_a_key = RowFilter {
            key_id: Some("key_1".into()),
            ..slow.clone()
        };
        let last = format!(
            "chatcmpl_{:012x}{:020x}",
            150_000,
            rows - SEARCHED_SCATTERED_ROWS + 1
        );
        let first = store.ledger.newest(&of_a_key, None, 10).expect("a page");
        assert_eq!(
            first.searched_to,
            Some(last),
            "fewer of one key, whose rows are far apart"
        );
        let (mut found, mut after) = (0, None);
        loop {
            let piece = store
                .ledger
                .oldest(&slow, after.as_deref(), 10)
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
                .append(with_outcome(row, status, None))
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
        assert_eq!(durations(&filter(Matching::Success, Some("key_1"))), all);
        assert!(durations(&filter(Matching::Success, Some("key_2"))).is_empty());
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
                .oldest(&filter(Matching::Success, None), after.as_deref(), 7)
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
