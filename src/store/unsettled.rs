//! Outcomes that could not be written in time. Housekeeping writes them later.

use std::time::{Duration, Instant};

use super::{LedgerOutcome, Result, Store, StoreError};
use crate::mutex::lock;

/// The time until an insert whose answer was lost is visible: a primary can wait that long for its standby.
const LATE_INSERT: Duration = Duration::from_secs(60);

/// A request, its outcome, and when that was noted.
pub(super) type UnsettledOutcome = (String, LedgerOutcome, Instant);

/// The maximum number of outcomes that wait for the database. The rows of the others stay open until the next start.
const MOST_UNSETTLED: usize = 1000;

impl Store {
    /// Keeps the outcome of a request that could not be written, for `settle`.
    pub fn settle_later(&self, request_id: String, outcome: LedgerOutcome) {
        let mut unsettled = lock(&self.unsettled);
        if unsettled.len() < MOST_UNSETTLED {
            unsettled.push((request_id, outcome, Instant::now()));
        }
    }

    /// Writes the outcomes that could not be written earlier, if their rows are still open.
    pub fn settle(&self) -> Result<()> {
        let noted = lock(&self.unsettled).clone();
        for (id, outcome, since) in noted {
            match self.find_row(&id)? {
                None if since.elapsed() < LATE_INSERT => continue,
                Some(row) if row.status == Some(200) => log::warn!(
                    "id={id} details=\"the ledger says 200, but the client got 503: the database's answer was lost\""
                ),
                Some(row) if row.seq.is_none() => match self.finish(&row.as_new(), &outcome) {
                    Err(StoreError::NoRow) => {}
                    result => result?,
                },
                _ => {}
            }
            lock(&self.unsettled).retain(|(other, ..)| *other != id);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::ledger::tests::{id, outcome, row, write};
    use crate::store::tests::Temporary;

    #[test]
    fn an_outcome_that_was_not_written_is_written_later_if_the_row_is_open() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let find = |end| store.find_row(&id(end, 1)).expect("a look-up").expect("the row");
        store.begin_row(&row("a", "key_1", 1)).expect("a new row");
        write(store, "b", "key_1", 1, 200, Some(5));
        for end in ["a", "b", "c"] {
            store.settle_later(id(end, 1), outcome(503, Some(7)));
        }
        store.settle().expect("the database is back");
        assert_eq!(
            lock(&store.unsettled).len(),
            1,
            "an insert whose answer was lost may still be on its way"
        );
        store.begin_row(&row("c", "key_1", 1)).expect("the late insert");
        store.settle().expect("the next round");
        assert_eq!(find("c").status, Some(503));
        assert_eq!((find("a").status, find("a").tokens.total_tokens), (Some(503), Some(7)));
        assert_eq!(find("b").status, Some(200), "the update was done, and only its answer lost");
        assert!(lock(&store.unsettled).is_empty());
        (0..MOST_UNSETTLED + 9).for_each(|_| store.settle_later(String::new(), outcome(503, None)));
        assert_eq!(lock(&store.unsettled).len(), MOST_UNSETTLED);
    }
}
