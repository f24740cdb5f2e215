//! Retention: old rows are removed in steps; their sums stay in the rollup.

use super::append::Ledger;
use super::chain::ChainLink;
use crate::database::{Result, Session, values};
use crate::id::RequestId;
use crate::when::DAY;

/// What retention has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetentionState {
    /// No row is old enough.
    Idle,
    /// Rows that were created before this time are to be removed.
    Due { before: i64 },
    /// There are such rows, but none between this time and the start of today. A clock that has
    /// jumped ahead looks like this, and so does a service that was off for long: nothing is
    /// removed until there is a row of yesterday.
    Held { before: i64 },
}

impl Ledger {
    /// Returns what retention has to do at a time, if rows are kept for so many days.
    pub fn retention(&self, days: u32, now: i64) -> Result<RetentionState> {
        let today = now.div_euclid(DAY) * DAY;
        let before = today - i64::from(days) * DAY;
        let find = "SELECT 1 FROM usage WHERE request_id >= $1 AND request_id < $2 LIMIT 1";
        let has_rows = |from: i64, to: i64| -> Result<bool> {
            let ids = values![RequestId::from(from), RequestId::from(to)];
            Ok(self.database.look_up(find, &ids, |_| Ok(()))?.is_some())
        };
        Ok(match has_rows(i64::MIN, before)? {
            false => RetentionState::Idle,
            true if has_rows(before, today)? => RetentionState::Due { before },
            true => RetentionState::Held { before },
        })
    }

    /// Removes rows created before a time, the oldest of a chain first and at most `most`, and
    /// returns how many. The chain then begins after them, so the rest still verifies. Takes the
    /// chains in turn: 0 says that none has such rows.
    pub fn remove_before(&self, time: i64, now: i64, most: i64) -> Result<usize> {
        let names = |session: &Session| {
            session.rows("SELECT name FROM gateways ORDER BY name", &[], |mut row| {
                row.column::<String>()
            })
        };
        for name in self.database.read(names)? {
            // Locked first: its gateway moves the chain's end in the same row all the time.
            let lock = self.lock_gateway();
            let removed = self.database.transaction(|session| {
                session.execute(&lock, &values![&name])?;
                let removed = remove(session, &name, time, now, most)?;
                if removed > 0 && self.database.sqlite().is_some() {
                    // Gives free pages back to the file system.
                    session.query("PRAGMA incremental_vacuum(1000)", &[], &mut |_| Ok(()))?;
                }
                Ok(removed)
            })?;
            if removed > 0 {
                return Ok(removed);
            }
        }
        Ok(0)
    }
}

fn remove(session: &Session, gateway: &str, time: i64, now: i64, most: i64) -> Result<usize> {
    // Up to the last old row before the first that is to be kept. A row whose time is in the future
    // does not count as one: it was written while the clock was wrong, and would hold back the rows
    // behind it for years.
    let last = session.first(
        "WITH oldest AS (SELECT seq, hash, created FROM usage WHERE gateway = $1 ORDER BY seq LIMIT $2)
         SELECT seq, hash FROM oldest WHERE created < $3
         AND seq < coalesce((SELECT min(seq) FROM oldest WHERE created BETWEEN $3 AND $4), seq + 1)
         ORDER BY seq DESC LIMIT 1",
        &values![gateway, most, time, now],
        ChainLink::read,
    )?;
    let Some(ChainLink { seq, hash }) = last else {
        return Ok(0);
    };
    let removed = session.execute(
        "DELETE FROM usage WHERE gateway = $1 AND seq <= $2",
        &values![gateway, seq],
    )?;
    session.execute(
        "UPDATE gateways SET anchor_seq = $1, anchor_hash = $2 WHERE name = $3",
        &values![seq, hash, gateway],
    )?;
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use crate::ledger::append::tests::write;
    use crate::ledger::{Filter, Grouping, RetentionState};
    use crate::store::Store;
    use crate::store::tests::Temporary;
    use crate::when::{DAY, Range};

    #[test]
    fn old_rows_go_and_what_they_add_up_to_stays() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        for number in 0..100_i64 {
            write(
                store,
                &format!("id{number}"),
                "key_1",
                number * DAY / 10,
                200,
                Some(1),
            );
        }
        let before = store
            .ledger
            .sums(Range::ALL, Filter::ALL)
            .expect("the figures");
        let remove = |before| {
            store
                .ledger
                .remove_before(before, 30 * DAY, 30)
                .expect("a step")
        };
        assert_eq!(
            [remove(5 * DAY), remove(5 * DAY), remove(5 * DAY)],
            [30, 20, 0]
        );
        let found = store.ledger.verify().expect("a walk");
        assert_eq!(
            (found.rows, found.fault),
            (50, None),
            "the rest still verifies"
        );
        assert_eq!(
            store
                .ledger
                .sums(Range::ALL, Filter::ALL)
                .expect("the figures"),
            before
        );
        let days = store
            .ledger
            .grouped(Range::ALL, Filter::ALL, &[Grouping::Day])
            .expect("the figures");
        assert_eq!(days.len(), 10);
        let part = |since, until| {
            store
                .ledger
                .sums(Range { since, until }, Filter::ALL)
                .expect("the figures")
                .requests
        };
        assert_eq!(
            part(2 * DAY + 3600, 4 * DAY - 3600),
            19,
            "days without their rows have their hours"
        );
        assert_eq!(
            part(5 * DAY + 9, 6 * DAY + DAY / 2),
            14,
            "days with their rows do not"
        );
        write(store, "later", "key_1", 20 * DAY, 200, None);
        assert_eq!(store.ledger.verify().expect("a walk").fault, None);
        assert_eq!(
            store
                .ledger
                .remove_before(i64::MAX, i64::MAX, 1000)
                .expect("a step"),
            51
        );
        assert_eq!(store.ledger.verify().expect("a walk").rows, 0);
        write(store, "last", "key_1", 21 * DAY, 200, None);
        assert_eq!(store.ledger.verify().expect("a walk").fault, None);
    }

    #[test]
    fn the_chains_of_two_gateways_still_verify_after_each_step() {
        let mut temporary = Temporary::new();
        let mut other = temporary.open_again();
        for (store, name) in [(&mut temporary.store, "a"), (&mut other, "b")] {
            store.ledger.join(name, "").expect("a start");
            (1..=6).for_each(|number| write(store, name, "key_1", number, 200, Some(1)));
        }
        for (removed, left) in [(3, 9), (3, 6), (0, 6)] {
            assert_eq!(
                other.ledger.remove_before(4, 6, 10).expect("a step"),
                removed,
                "one chain at a time"
            );
            let found = temporary.store.ledger.verify().expect("a walk");
            assert_eq!((found.rows, found.fault), (left, None));
        }
    }

    /// The gateways move the ends of their chains all the time, in the rows that retention changes.
    #[test]
    fn rows_are_removed_while_two_gateways_write() {
        const ROWS: i64 = 150;
        let mut temporary = Temporary::new();
        let mut other = temporary.open_again();
        temporary.store.ledger.join("a", "").expect("a start");
        if other.database.sqlite().is_none() {
            other.ledger.join("b", "").expect("a start");
        }
        let (one, other) = (&temporary.store, &other);
        let write_rows = |store: &Store, name: &str| {
            for number in 0..ROWS {
                write(
                    store,
                    &format!("{name}{number}"),
                    "key_1",
                    number,
                    200,
                    Some(1),
                );
            }
        };
        let removed = thread::scope(|scope| {
            let writers = [(one, "w"), (one, "x"), (other, "y"), (other, "z")];
            // A SQLite database has one gateway.
            let writers = writers
                .into_iter()
                .filter(|(store, _)| store.ledger.epoch > 0);
            let all: Vec<_> = writers
                .map(|(store, name)| scope.spawn(move || write_rows(store, name)))
                .collect();
            let mut removed = 0;
            while all.iter().any(|writer| !writer.is_finished()) {
                removed += one
                    .ledger
                    .remove_before(ROWS - 10, ROWS, 7)
                    .expect("a step");
            }
            removed as i64
        });
        assert!(removed > 0, "some were removed meanwhile");
        let left = one.value::<i64>("SELECT count(seq) FROM usage");
        let found = one.ledger.verify().expect("a walk");
        assert_eq!((found.rows as i64, found.fault), (left, None));
        assert_eq!(
            one.ledger
                .sums(Range::ALL, Filter::ALL)
                .expect("the figures")
                .requests,
            left + removed
        );
    }

    #[test]
    fn a_row_out_of_order_holds_back_those_after_it_unless_it_is_of_the_future() {
        let temporary = Temporary::new();
        for (id, created) in [
            ("a", 1),
            ("b", 60),
            ("c", 2),
            ("d", 1000),
            ("e", 3),
            ("f", 70),
            ("g", 4),
            ("h", 2000),
        ] {
            write(&temporary.store, id, "key_1", created, 200, Some(1));
        }
        let remove = |before| {
            temporary
                .store
                .ledger
                .remove_before(before, 100, 10)
                .expect("a step")
        };
        assert_eq!(remove(50), 1, "b is to be kept");
        assert_eq!(remove(65), 4, "b to e");
        assert_eq!(remove(90), 2, "f and g; h holds back nothing, and stays");
        let found = temporary.store.ledger.verify().expect("a walk");
        assert_eq!((found.rows, found.fault), (1, None));
        assert_eq!(
            temporary
                .store
                .ledger
                .sums(Range::ALL, Filter::ALL)
                .expect("the figures")
                .total_tokens,
            8
        );
    }

    /// A clock that is ahead leaves the days before today empty, and so does a service that was
    /// off.
    #[test]
    fn nothing_is_removed_while_the_days_before_today_are_empty() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let state = |day: i64| store.ledger.retention(3, day * DAY + 5).expect("a look");
        assert_eq!(state(9), RetentionState::Idle, "an empty ledger");
        write(store, "a", "key_1", 10 * DAY, 200, None);
        write(store, "b", "key_1", 11 * DAY + 9, 200, None);
        assert_eq!(
            (state(11), state(13)),
            (RetentionState::Idle, RetentionState::Idle),
            "nothing is old"
        );
        assert_eq!(state(14), RetentionState::Due { before: 11 * DAY });
        for day in [15, 16, 400, 4000] {
            assert_eq!(
                state(day),
                RetentionState::Held {
                    before: (day - 3) * DAY
                }
            );
        }
        write(store, "c", "key_1", 400 * DAY, 200, None);
        assert_eq!(
            state(400),
            RetentionState::Held { before: 397 * DAY },
            "a row of today may be of a wrong clock"
        );
        assert_eq!(
            state(401),
            RetentionState::Due { before: 398 * DAY },
            "it continues on the next day"
        );
    }

    #[test]
    fn the_space_is_given_back() {
        let temporary = Temporary::sqlite();
        let store = &temporary.store;
        for number in 0..3000_i64 {
            write(
                store,
                &format!("{number:020}"),
                "key_1",
                number,
                200,
                Some(1),
            );
        }
        let pages = || store.value::<i64>("PRAGMA page_count");
        let before = pages();
        while store.ledger.remove_before(2900, 3000, 200).expect("a step") > 0 {}
        assert!(pages() < before / 3, "{before} pages became {}", pages());
    }
}
