//! Retention: old rows go, in small steps between which others write; the sums of their days stay.

use rusqlite::{Connection, OptionalExtension};

use super::{Store, StoreError};

/// How many pages a step gives back to the file system, at most: more than it empties.
const PAGES: usize = 64;

impl Store {
    /// Removes rows created before a time, the oldest first and `most` at once; says how many went. The chain
    /// then begins after them, so the rest still verifies. What is not in the console's sums yet stays.
    pub fn remove_before(&self, time: i64, most: i64) -> Result<usize, StoreError> {
        self.write(move |connection| {
            let Some((last, hash)) = last_to_go(connection, time, most)? else {
                return Ok(0);
            };
            let newest: Option<i64> =
                connection
                    .query_row("SELECT max(created) FROM usage WHERE seq <= ?", [last], |row| row.get(0))?;
            connection.execute(
                "DELETE FROM usage_failures WHERE request_id IN (SELECT request_id FROM usage WHERE seq <= ?)",
                [last],
            )?;
            let removed = connection.execute("DELETE FROM usage WHERE seq <= ?", [last])?;
            connection.execute(
                "UPDATE chain SET anchor_seq = ?1, anchor_hash = ?2, kept_since = max(kept_since, ?3 + 1)",
                rusqlite::params![last, hash, newest],
            )?;
            give_back(connection)?;
            Ok(removed)
        })
    }
}

/// The last row of the chain's beginning that is old enough throughout.
fn last_to_go(connection: &Connection, time: i64, most: i64) -> rusqlite::Result<Option<(i64, [u8; 32])>> {
    connection
        .query_row(
            "WITH oldest AS (SELECT seq, hash, created FROM usage WHERE seq IS NOT NULL ORDER BY seq LIMIT ?2)
             SELECT seq, hash FROM oldest
             WHERE seq <= (SELECT seq FROM usage_folded) AND seq < coalesce((SELECT min(seq) FROM oldest WHERE created >= ?1), seq + 1)
             ORDER BY seq DESC LIMIT 1",
            rusqlite::params![time, most],
            |row| Ok((row.get(0)?, row.get(1)?)),
        )
        .optional()
}

fn give_back(connection: &Connection) -> rusqlite::Result<()> {
    let mut statement = connection.prepare_cached(&format!("PRAGMA incremental_vacuum({PAGES})"))?;
    let mut rows = statement.query([])?;
    while rows.next()?.is_some() {}
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::ledger::tests::{id, row, write};
    use super::super::tests::Temporary;
    use super::super::{DAY, Grouping, Range, Store};

    fn fold(store: &Store) {
        while store.fold(1000, 0).expect("a step") > 0 {}
    }

    #[test]
    fn old_rows_go_and_what_they_add_up_to_stays() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        store.open_row(row("open", "key_1", 5)).expect("one under way");
        for number in 0..100_i64 {
            write(store, &format!("id{number}"), "key_1", number * DAY / 10, 200, Some(1));
        }
        let before = store.sums(Range::ALL).expect("the figures");
        assert_eq!(store.remove_before(5 * DAY, 30).expect("a step"), 0, "none is folded yet");
        fold(store);
        assert_eq!(store.remove_before(5 * DAY, 30).expect("a step"), 30);
        assert_eq!(store.remove_before(5 * DAY, 30).expect("a step"), 20);
        assert_eq!(store.remove_before(5 * DAY, 30).expect("a step"), 0);
        let verdict = store.verify().expect("a walk");
        assert_eq!((verdict.rows, verdict.fault), (50, None), "the rest still verifies");
        assert_eq!(store.sums(Range::ALL).expect("the figures"), before);
        let mut days = 0;
        store.grouped(Range::ALL, Grouping::Day, |_| days += 1).expect("the figures");
        assert_eq!(days, 10);
        assert!(store.find_row(&id("open", 5)).expect("a look-up").is_some(), "what is under way stays");
        write(store, "later", "key_1", 20 * DAY, 200, None);
        assert_eq!(store.verify().expect("a walk").fault, None);
        fold(store);
        assert_eq!(store.remove_before(i64::MAX, 1000).expect("a step"), 51);
        assert_eq!(store.verify().expect("a walk").rows, 0);
        write(store, "last", "key_1", 21 * DAY, 200, None);
        assert_eq!(store.verify().expect("a walk").fault, None);
    }

    #[test]
    fn a_row_out_of_order_holds_back_those_after_it() {
        let temporary = Temporary::new();
        for (id, created) in [("a", 1), ("b", 100), ("c", 2)] {
            write(&temporary.store, id, "key_1", created, 200, None);
        }
        fold(&temporary.store);
        assert_eq!(temporary.store.remove_before(50, 10).expect("a step"), 1);
        assert_eq!(temporary.store.verify().expect("a walk").fault, None);
    }

    #[test]
    fn the_space_is_given_back() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        for number in 0..3000_i64 {
            write(store, &format!("{number:020}"), "key_1", number, 200, Some(1));
        }
        fold(store);
        let pages = || {
            store.read(|c| c.query_row("PRAGMA page_count", [], |row| row.get::<_, i64>(0))).expect("a count")
        };
        let before = pages();
        while store.remove_before(2900, 200).expect("a step") > 0 {}
        assert!(pages() < before / 3, "{before} pages became {}", pages());
    }
}
