//! The ledger's rows for people: the newest first, in pages, or the oldest first, for an export.

use super::engine::{Session, values};
use super::ledger::{COLUMNS, read_row};
use super::{LedgerRow, Range, Store, StoreError};
use crate::id::RequestId;

/// How many rows are read for a page at most. If they do not fill it, the next page continues from there.
const SCANNED: i64 = 2_000;

/// Which rows are wanted.
#[derive(Clone, Debug)]
pub struct Which {
    pub range: Range,
    pub key_id: Option<String>,
    pub matching: Matching,
}

/// What came of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Matching {
    Anything,
    Success,
    Failure,
    Code(String),
}

impl Matching {
    pub fn takes(&self, status: Option<i64>, error_code: Option<&str>) -> bool {
        match self {
            Self::Anything => true,
            Self::Success => status == Some(200),
            Self::Failure => error_code.is_some(),
            Self::Code(code) => error_code == Some(code),
        }
    }
}

/// Some rows, and from where on there are more.
#[derive(Debug)]
pub struct Listing {
    pub rows: Vec<LedgerRow>,
    /// The last id that was looked at, where there may be more after it.
    pub next: Option<String>,
}

impl Store {
    /// The newest rows before an id, or of all.
    pub fn newest(&self, which: &Which, before: Option<&str>, most: usize) -> Result<Listing, StoreError> {
        let from = RequestId::from(which.range.since);
        let to = RequestId::from(which.range.until);
        let to = before.filter(|&before| before < to.as_str()).unwrap_or(&to);
        self.engine.read(|session| match which.matching {
            Matching::Anything => {
                let rows = some_rows(session, which, &from, to, "DESC", most as i64 + 1)?;
                Ok(page(rows, most))
            }
            Matching::Success => {
                let scanned = some_rows(session, which, &from, to, "DESC", SCANNED)?;
                Ok(filtered(scanned, which, most, SCANNED as usize))
            }
            Matching::Failure | Matching::Code(_) => {
                Ok(page(failures(session, which, &from, to, most as i64 + 1)?, most))
            }
        })
    }

    /// The next rows after an id, oldest first. Few or none of those that are looked at may match.
    pub fn oldest(&self, which: &Which, after: Option<&str>, most: usize) -> Result<Listing, StoreError> {
        let from = RequestId::from(which.range.since);
        // No id is its own beginning with more after it: this leaves out `after` alone.
        let from = after.map_or(from, |after| format!("{after} "));
        let to = RequestId::from(which.range.until);
        let scanned =
            self.engine.read(|session| some_rows(session, which, &from, &to, "ASC", most as i64))?;
        Ok(filtered(scanned, which, most, most))
    }
}

/// Rows of one key or of all between two ids, whatever their outcome.
fn some_rows(
    session: &dyn Session,
    which: &Which,
    from: &str,
    to: &str,
    order: &str,
    most: i64,
) -> Result<Vec<LedgerRow>, StoreError> {
    let mut parameters = values![from, to, most].to_vec();
    let mut of_key = "";
    if let Some(key_id) = &which.key_id {
        parameters.extend(values![key_id]);
        of_key = "AND key_id = $4";
    }
    let statement = format!(
        "SELECT {COLUMNS} FROM usage WHERE request_id >= $1 AND request_id < $2 {of_key}
         ORDER BY request_id {order} LIMIT $3"
    );
    session.rows(&statement, &parameters, |mut row| read_row(&mut row))
}

/// The index has all that it reads.
pub(super) const FAILURES: &str = "SELECT request_id FROM usage
    WHERE error_code IS NOT NULL AND request_id >= $1 AND request_id < $2
    AND (CAST($3 AS TEXT) IS NULL OR key_id = $3) AND (CAST($4 AS TEXT) IS NULL OR error_code = $4)
    ORDER BY request_id DESC LIMIT $5";

/// Rows with an error, the newest first.
fn failures(
    session: &dyn Session,
    which: &Which,
    from: &str,
    to: &str,
    most: i64,
) -> Result<Vec<LedgerRow>, StoreError> {
    let code = match &which.matching {
        Matching::Code(code) => Some(code),
        _ => None,
    };
    let parameters = values![from, to, which.key_id.as_ref(), code, most];
    let ids: Vec<String> = session.rows(FAILURES, &parameters, |mut row| row.next())?;
    let statement = format!("SELECT {COLUMNS} FROM usage WHERE request_id = $1");
    let find = |id| session.first(&statement, &values![id], |mut row| read_row(&mut row)).transpose();
    ids.into_iter().filter_map(find).collect()
}

/// A page of rows that all match, of which there may be one more than it takes.
fn page(mut rows: Vec<LedgerRow>, most: usize) -> Listing {
    let is_more = rows.len() > most;
    rows.truncate(most);
    let next = rows.last().filter(|_| is_more).map(|row| row.request_id.clone());
    Listing { rows, next }
}

/// Those that match among the rows that were looked at, which were `looked` if there may be more.
fn filtered(scanned: Vec<LedgerRow>, which: &Which, most: usize, looked: usize) -> Listing {
    let mut next = scanned.last().filter(|_| scanned.len() == looked).map(|row| row.request_id.clone());
    let mut rows: Vec<LedgerRow> = scanned
        .into_iter()
        .filter(|row| which.matching.takes(row.status, row.error_code.as_deref()))
        .take(most + 1)
        .collect();
    if rows.len() > most {
        rows.truncate(most);
        next = rows.last().map(|row| row.request_id.clone());
    }
    Listing { rows, next }
}

#[cfg(test)]
mod tests {
    use super::super::ledger::tests::{id, outcome, row, write};
    use super::super::tests::Temporary;
    use super::*;

    fn which(matching: Matching, key_id: Option<&str>) -> Which {
        Which { range: Range { since: 100, until: 200 }, key_id: key_id.map(String::from), matching }
    }

    /// The ids of all pages, and how many pages there were.
    fn all(store: &Store, which: &Which, most: usize) -> (Vec<String>, usize) {
        let (mut ids, mut pages, mut before) = (Vec::new(), 0, None);
        loop {
            let listing = store.newest(which, before.as_deref(), most).expect("a page");
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
        let mut refused = outcome(400, None);
        refused.error_code = Some("invalid_request");
        store.record(&row("refused", "key_1", 150), &refused).expect("a refused one");
        store.begin(&row("open", "key_1", 151)).expect("a running request");
        for sealing in [false, true] {
            if sealing {
                store.seal_all(1000);
            }
            let count = |matching, key| all(store, &which(matching, key), 10).0.len();
            assert_eq!(count(Matching::Anything, None), 102);
            assert_eq!(count(Matching::Anything, Some("key_2")), 50);
            assert_eq!(count(Matching::Success, None), 100 - 14);
            assert_eq!(count(Matching::Failure, None), 15);
            assert_eq!(count(Matching::Code("invalid_request".into()), None), 1);
            assert_eq!(count(Matching::Code("invalid_request".into()), Some("key_2")), 0);
            assert_eq!(count(Matching::Code("' OR 1=1 --".into()), None), 0);
        }
        let (ids, pages) = all(store, &which(Matching::Failure, None), 5);
        assert_eq!(pages, 3);
        assert!(ids.is_sorted_by(|a, b| a > b), "the newest first, each once");
        assert_eq!(all(store, &which(Matching::Anything, None), 102).1, 1, "no empty last page");
    }

    #[test]
    fn what_is_taken_away_is_whole() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        for number in 90..210_i64 {
            write(store, "x", "key_1", number, if number % 2 == 0 { 200 } else { 502 }, None);
        }
        let (mut ids, mut after) = (Vec::new(), None);
        loop {
            let listing =
                store.oldest(&which(Matching::Success, None), after.as_deref(), 7).expect("a piece");
            ids.extend(listing.rows.into_iter().map(|row| row.request_id));
            after = listing.next;
            if after.is_none() {
                break;
            }
        }
        let expected: Vec<String> = (100..200).step_by(2).map(|number| id("x", number)).collect();
        assert_eq!(ids, expected);
    }
}
