//! The ledger's rows for people: the newest first, in pages, or the oldest first, for an export.

use super::engine::{Value, values};
use super::ledger::{COLUMNS, read_row};
use super::{LedgerRow, Range, Store, StoreError};
use crate::id::RequestId;

/// Which rows are wanted.
#[derive(Clone, Debug)]
pub struct Which {
    pub range: Range,
    pub key_id: Option<String>,
    pub gateway: Option<String>,
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
    /// The last id of these, if there are more after it.
    pub next: Option<String>,
}

impl Store {
    /// The newest rows before an id, or of all.
    pub fn newest(&self, which: &Which, before: Option<&str>, most: usize) -> Result<Listing, StoreError> {
        let from = RequestId::from(which.range.since);
        let to = RequestId::from(which.range.until);
        let to = before.filter(|&before| before < to.as_str()).unwrap_or(&to);
        self.list(which, &from, to, "DESC", most)
    }

    /// The next rows after an id, oldest first.
    pub fn oldest(&self, which: &Which, after: Option<&str>, most: usize) -> Result<Listing, StoreError> {
        let from = RequestId::from(which.range.since);
        // No id is its own beginning with more after it: this leaves out `after` alone.
        let from = after.map_or(from, |after| format!("{after} "));
        self.list(which, &from, &RequestId::from(which.range.until), "ASC", most)
    }

    /// Rows between two ids.
    fn list(
        &self,
        which: &Which,
        from: &str,
        to: &str,
        order: &str,
        most: usize,
    ) -> Result<Listing, StoreError> {
        // One more than asked for shows whether there are more.
        let parameters = values![from, to, most as i64 + 1];
        let (ids, parameters) = ids(which, order, parameters.into());
        let statement =
            format!("SELECT {COLUMNS} FROM usage WHERE request_id IN ({ids}) ORDER BY request_id {order}");
        let mut rows = self.engine.read(|session| session.rows(&statement, &parameters, read_row))?;
        let is_more = rows.len() > most;
        rows.truncate(most);
        let next = rows.last().filter(|_| is_more).map(|row: &LedgerRow| row.request_id.clone());
        Ok(Listing { rows, next })
    }
}

/// A statement for the ids of some rows, and its parameters: the two ids between which they are, how many at most, and
/// what the statement needs besides.
pub(super) fn ids(which: &Which, order: &str, mut parameters: Vec<Value>) -> (String, Vec<Value>) {
    let mut key_id = "key_id";
    let mut conditions = match &which.matching {
        Matching::Anything => String::new(),
        Matching::Success => "AND status = 200".into(),
        Matching::Failure | Matching::Code(_) => {
            // The index of failures has their keys too. No index serves this expression, so that one is used.
            key_id = "key_id || ''";
            "AND error_code IS NOT NULL".into()
        }
    };
    if let Matching::Code(code) = &which.matching {
        parameters.push(code.into());
        conditions += &format!(" AND error_code = ${}", parameters.len());
    }
    if let Some(wanted) = &which.key_id {
        parameters.push(wanted.into());
        conditions += &format!(" AND {key_id} = ${}", parameters.len());
    }
    if let Some(wanted) = &which.gateway {
        parameters.push(wanted.into());
        conditions += &format!(" AND gateway = ${}", parameters.len());
    }
    let statement = format!(
        "SELECT request_id FROM usage WHERE request_id >= $1 AND request_id < $2 {conditions}
         ORDER BY request_id {order} LIMIT $3"
    );
    (statement, parameters)
}

#[cfg(test)]
mod tests {
    use super::super::ledger::tests::{id, outcome, row, write};
    use super::super::tests::Temporary;
    use super::*;

    fn which(matching: Matching, key_id: Option<&str>) -> Which {
        Which {
            range: Range { since: 100, until: 200 },
            key_id: key_id.map(String::from),
            gateway: None,
            matching,
        }
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
