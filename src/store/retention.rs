//! Retention: old rows are removed in small steps; their sums stay in the rollup.

use super::engine::{SqlSession, values};
use super::{Result, Store};

impl Store {
    /// Removes finished rows created before a time, the oldest of a chain first and at most `most`, and returns how many. The
    /// chain then begins after them, so the rest still verifies. Takes the chains in turn: 0 says that none has such rows.
    pub fn remove_before(&self, time: i64, most: i64) -> Result<usize> {
        let names = |session: &dyn SqlSession| {
            session.rows("SELECT name FROM gateways", &[], |mut row| row.next::<String>())
        };
        for name in self.engine.read(names)? {
            // Locked first: its gateway moves the chain's end in the same row all the time.
            let lock = self.engine.locking("SELECT 1 FROM gateways WHERE name = $1 FOR UPDATE");
            let removed = self.engine.transaction(false, |session| {
                session.execute(lock, &values![&name])?;
                remove(session, &name, time, most)
            })?;
            if removed > 0 {
                if self.engine.sqlite().is_some() {
                    // Gives free pages back to the file system.
                    let vacuum = "PRAGMA incremental_vacuum(64)";
                    self.engine.transaction(false, |session| session.query(vacuum, &[], &mut |_| Ok(())))?;
                }
                return Ok(removed);
            }
        }
        Ok(0)
    }
}

fn remove(session: &dyn SqlSession, gateway: &str, time: i64, most: i64) -> Result<usize> {
    // The beginning of the chain, up to the first row that is not old enough.
    let last = session.first(
        "WITH oldest AS (SELECT seq, hash, created FROM usage WHERE gateway = $1 AND seq IS NOT NULL ORDER BY seq LIMIT $2)
         SELECT seq, hash FROM oldest
         WHERE seq < coalesce((SELECT min(seq) FROM oldest WHERE created >= $3), seq + 1)
         ORDER BY seq DESC LIMIT 1",
        &values![gateway, most, time],
        |mut row| Ok((row.next::<i64>()?, row.next::<Vec<u8>>()?)),
    )?;
    let Some((seq, hash)) = last else {
        return Ok(0);
    };
    let these = values![gateway, seq];
    let newest: i64 =
        session.value("SELECT max(created) FROM usage WHERE gateway = $1 AND seq <= $2", &these)?;
    let removed = session.execute("DELETE FROM usage WHERE gateway = $1 AND seq <= $2", &these)?;
    session.execute(
        "UPDATE gateways SET anchor_seq = $1, anchor_hash = $2,
         kept_since = CASE WHEN kept_since < $3 THEN $3 ELSE kept_since END WHERE name = $4",
        &values![seq, hash, newest + 1, gateway],
    )?;
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use crate::store::ledger::tests::{id, row, write};
    use crate::store::tests::Temporary;
    use crate::store::{DAY, Filter, Grouping, Range, Store};

    #[test]
    fn old_rows_go_and_what_they_add_up_to_stays() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        store.begin_row(&row("open", "key_1", 5)).expect("a running request");
        for number in 0..100_i64 {
            write(store, &format!("id{number}"), "key_1", number * DAY / 10, 200, Some(1));
        }
        let before = store.sums(Range::ALL, Filter::ALL).expect("the figures");
        assert_eq!(store.remove_before(5 * DAY, 30).expect("a step"), 30);
        assert_eq!(store.remove_before(5 * DAY, 30).expect("a step"), 20);
        assert_eq!(store.remove_before(5 * DAY, 30).expect("a step"), 0);
        let found = store.verify().expect("a walk");
        assert_eq!((found.rows, found.fault), (50, None), "the rest still verifies");
        assert_eq!(store.sums(Range::ALL, Filter::ALL).expect("the figures"), before);
        let mut days = 0;
        store.grouped(Range::ALL, Filter::ALL, Grouping::Day, |_| days += 1).expect("the figures");
        assert_eq!(days, 10);
        let part =
            |since, until| store.sums(Range { since, until }, Filter::ALL).expect("the figures").requests;
        assert_eq!(part(2 * DAY + 9, 4 * DAY - 9), 20, "an hour without its rows counts completely");
        assert_eq!(part(2 * DAY + 3600, 4 * DAY - 3600), 19, "days without their rows have their hours");
        assert_eq!(part(4 * DAY + 9, 6 * DAY + DAY / 2), 25, "days with their rows do not");
        assert!(store.find_row(&id("open", 5)).expect("a look-up").is_some(), "a running request stays");
        write(store, "later", "key_1", 20 * DAY, 200, None);
        assert_eq!(store.verify().expect("a walk").fault, None);
        assert_eq!(store.remove_before(i64::MAX, 1000).expect("a step"), 51);
        assert_eq!(store.verify().expect("a walk").rows, 0);
        write(store, "last", "key_1", 21 * DAY, 200, None);
        assert_eq!(store.verify().expect("a walk").fault, None);
    }

    #[test]
    fn the_chains_of_two_gateways_still_verify_after_each_step() {
        let mut temporary = Temporary::new();
        let mut other = temporary.open_again();
        for (store, name) in [(&mut temporary.store, "a"), (&mut other, "b")] {
            store.join(name, "").expect("a start");
            (1..=6).for_each(|number| write(store, name, "key_1", number, 200, Some(1)));
        }
        for (removed, left) in [(3, 9), (3, 6), (0, 6)] {
            assert_eq!(other.remove_before(4, 10).expect("a step"), removed, "one chain at a time");
            let found = temporary.store.verify().expect("a walk");
            assert_eq!((found.rows, found.fault), (left, None));
        }
    }

    /// The gateways move the ends of their chains all the time, in the rows that retention changes.
    #[test]
    fn rows_are_removed_while_two_gateways_write() {
        const ROWS: i64 = 150;
        let mut temporary = Temporary::new();
        let mut other = temporary.open_again();
        temporary.store.join("a", "").expect("a start");
        if other.engine.sqlite().is_none() {
            other.join("b", "").expect("a start");
        }
        let (one, other) = (&temporary.store, &other);
        let write_rows = |store: &Store, name: &str| {
            for number in 0..ROWS {
                write(store, &format!("{name}{number}"), "key_1", number, 200, Some(1));
            }
        };
        let removed = thread::scope(|scope| {
            let writers = [(one, "w"), (one, "x"), (other, "y"), (other, "z")];
            // A SQLite database has one gateway.
            let writers = writers.into_iter().filter(|(store, _)| store.epoch > 0);
            let all: Vec<_> =
                writers.map(|(store, name)| scope.spawn(move || write_rows(store, name))).collect();
            let mut removed = 0;
            while all.iter().any(|writer| !writer.is_finished()) {
                removed += one.remove_before(ROWS - 10, 7).expect("a step");
            }
            removed as i64
        });
        assert!(removed > 0, "some were removed meanwhile");
        let left = one.value::<i64>("SELECT count(seq) FROM usage");
        let found = one.verify().expect("a walk");
        assert_eq!((found.rows as i64, found.fault), (left, None));
        assert_eq!(one.sums(Range::ALL, Filter::ALL).expect("the figures").requests, left + removed);
    }

    #[test]
    fn a_row_out_of_order_holds_back_those_after_it() {
        let temporary = Temporary::new();
        for (id, created) in [("a", 1), ("b", 100), ("c", 2)] {
            write(&temporary.store, id, "key_1", created, 200, None);
        }
        assert_eq!(temporary.store.remove_before(50, 10).expect("a step"), 1);
        assert_eq!(temporary.store.verify().expect("a walk").fault, None);
    }

    #[test]
    fn the_space_is_given_back() {
        let temporary = Temporary::sqlite();
        let store = &temporary.store;
        for number in 0..3000_i64 {
            write(store, &format!("{number:020}"), "key_1", number, 200, Some(1));
        }
        let pages = || store.value::<i64>("PRAGMA page_count");
        let before = pages();
        while store.remove_before(2900, 200).expect("a step") > 0 {}
        assert!(pages() < before / 3, "{before} pages became {}", pages());
    }
}
