//! Retention: old rows are removed in steps; their sums stay.

use super::ChainLink;
use super::append::Ledger;
use crate::database::{Session, values};
use crate::error::Result;
use crate::id::RequestId;
use crate::when::{When, Zone};

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
        let today = self.zone.day(now).since;
        // One day is today.
        let begin = When::Days(i64::from(days) + 1).begin(now, &self.zone);
        let before = begin.unwrap_or(i64::MIN);
        let find = "SELECT 1 FROM usage WHERE request_id >= $1 AND request_id < $2 LIMIT 1";
        self.database.read(|session| {
            let has_rows = |from: i64, to: i64| -> Result<bool> {
                let ids = values![RequestId::from(from), RequestId::from(to)];
                Ok(session.first(find, &ids, |_| Ok(()))?.is_some())
            };
            Ok(match has_rows(i64::MIN, before)? {
                false => RetentionState::Idle,
                true if has_rows(before, today)? => RetentionState::Due { before },
                true => RetentionState::Held { before },
            })
        })
    }

    /// Removes rows created before a time, the oldest of a chain first and at most `most`, and
    /// returns how many. The chain then begins after them, so the rest still verifies. Takes the
    /// chains in turn: 0 says that none has such rows, or that their gateways are writing.
    pub(super) fn remove_batch(
        &self,
        session: &Session,
        before: i64,
        now: i64,
        most: i64,
    ) -> Result<usize> {
        let names = "SELECT name FROM gateways ORDER BY name";
        let lock = self.database.row_lock("FOR UPDATE SKIP LOCKED");
        let find = format!("SELECT name FROM gateways WHERE name = $1 {lock}");
        for name in session.rows(names, &[], |mut row| row.column::<String>())? {
            if session.first(&find, &values![&name], |_| Ok(()))?.is_none() {
                continue;
            }
            let removed = remove(session, &name, before, now, most)?;
            if removed > 0 {
                if self.database.sqlite().is_some() {
                    // Gives free pages back to the file system.
                    session.query("PRAGMA incremental_vacuum(1000)", &[], &mut |_| Ok(()))?;
                }
                return Ok(removed);
            }
        }
        Ok(0)
    }
}

/// Explains why retention removes nothing.
pub fn retention_held(before: i64, zone: &Zone) -> String {
    format!(
        "retention removes nothing: the ledger has rows from before {}, but none between then and today. Either the service was \
         off for that long, or the clock is wrong; if it is wrong, set it. Retention continues on the day after the next request",
        zone.format_local(before)
    )
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

    use super::*;
    use crate::ledger::append::tests::write;
    use crate::ledger::{Filter, Grouping, RetentionState, RowFilter};
    use crate::store::Store;
    use crate::store::tests::Temporary;
    use crate::when::tests::zone;
    use crate::when::{DAY, Range};

    impl Ledger {
        /// Removes a batch as the writer does.
        pub fn remove_before(&self, time: i64, now: i64, most: i64) -> Result<usize> {
            let remove = |session: &Session| self.remove_batch(session, time, now, most);
            self.database.change(remove)
        }
    }

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
            .grouped(&RowFilter::of(Range::ALL, Filter::ALL), &[Grouping::Day])
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
            store.join(name, "").expect("a start");
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
        temporary.store.join("a", "").expect("a start");
        if other.database.sqlite().is_none() {
            other.join("b", "").expect("a start");
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

    /// California's day begins at eight in the morning by UTC: its rows of the last evening are of
    /// the day before.
    #[test]
    fn days_are_those_of_the_place() {
        let mut temporary = Temporary::new();
        temporary.set_zone(zone("America/Los_Angeles"));
        let store = &temporary.store;
        let hour = |day: i64, hour: i64| day * DAY + hour * 3600;
        write(store, "a", "key_1", hour(10, 7), 200, None);
        write(store, "b", "key_1", hour(10, 8), 200, None);
        let state = |now| store.ledger.retention(3, now).expect("a look");
        assert_eq!(state(hour(13, 7)), RetentionState::Idle);
        let before = hour(10, 8);
        assert_eq!(state(hour(13, 8)), RetentionState::Due { before });
        assert_eq!(
            state(hour(14, 8)),
            RetentionState::Held {
                before: hour(11, 8)
            }
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
