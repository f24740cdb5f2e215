//! The gateways that share a database. Each has a name and an epoch, which every start raises. A
//! row is written only if its gateway still has the epoch of the process that writes it, so a
//! process that was replaced can't write any more.

use std::thread;
use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::append::{Ledger, fenced};
use crate::database::{Row, Session, values};
use crate::error::{Problem, ProblemKind, Result};

/// The seconds that a gateway's clock may be off the database's: ids and expiry use it.
pub const CLOCK_SLACK: f64 = 2.0;

/// A process that serves updates its heartbeat every second. One that has not stopped cleanly is
/// watched for this time before another one takes its name.
pub(super) const WATCH_TIME: Duration = Duration::from_secs(5);

const WATCH_INTERVAL: Duration = Duration::from_millis(250);

/// The last process that had a name.
#[derive(Clone, PartialEq)]
struct Holder {
    epoch: i64,
    /// `None` after a clean stop.
    last_seen: Option<i64>,
    address: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gateway {
    /// Empty for the one of a SQLite database.
    pub name: String,
    pub epoch: i64,
    pub version: String,
    pub address: String,
    /// Seconds since it was last seen, by the database's clock; `None` after a clean stop.
    pub seen_ago: Option<i64>,
}

impl Ledger {
    /// Begins to serve under a name: no earlier process can write its rows from now on. In a
    /// database that is shared, fails if another process serves under it.
    pub fn join(&mut self, name: &str, address: &str) -> Result<()> {
        let found = self.wait_for_name(name)?;
        let (epoch, last_seen) = found.map_or((None, None), |it| (Some(it.epoch), it.last_seen));
        // Nothing changed since it was watched. Waits for rows that an earlier process is inserting.
        let take = format!(
            "INSERT INTO gateways (name, epoch, version, address, last_seen, anchor_seq, anchor_hash,
                 head_seq, head_hash)
             VALUES ($1, 1, $2, $3, {}, 0, $4, 0, $4) ON CONFLICT (name) DO UPDATE
             SET epoch = gateways.epoch + 1, version = excluded.version, address = excluded.address,
                 last_seen = excluded.last_seen
             WHERE gateways.epoch = $5 AND gateways.last_seen IS NOT DISTINCT FROM $6
             RETURNING epoch",
            self.database.clock()
        );
        let version = crate::VERSION;
        let parameters = values![name, version, address, [0_u8; 32], epoch, last_seen];
        let taken = self.database.transaction(None, move |session| {
            session.first(&take, &parameters, |mut row| row.column())
        })?;
        match taken {
            Some(epoch) => self.epoch = epoch,
            None => return Err(name_taken(name, "an unknown address")),
        }
        self.gateway = name.to_owned();
        Ok(())
    }

    /// Returns the last process that had a name, after watching its heartbeat: an older one may be
    /// of a process that was killed, or the clocks differ. The lock of a file needs none.
    fn wait_for_name(&self, name: &str) -> Result<Option<Holder>> {
        let read = |mut row: Row| {
            Ok(Holder {
                epoch: row.column()?,
                last_seen: row.column()?,
                address: row.column()?,
            })
        };
        let holder = "SELECT epoch, last_seen, address FROM gateways WHERE name = $1";
        let look = || self.database.look_up(holder, &values![name], read);
        let (first, began) = (look()?, Instant::now());
        let mut last = first.clone();
        while self.database.sqlite().is_none()
            && let Some(holder) = last.as_ref().filter(|it| it.last_seen.is_some())
        {
            if last != first {
                return Err(name_taken(name, &holder.address));
            }
            if began.elapsed() >= WATCH_TIME {
                break;
            }
            thread::sleep(WATCH_INTERVAL);
            last = look()?;
        }
        Ok(last)
    }

    /// Updates the heartbeat. Fails if another process has the name.
    pub(super) fn beat(&self, session: &Session) -> Result<()> {
        let beat = format!(
            "UPDATE gateways SET last_seen = {} WHERE name = $1 AND epoch = $2",
            self.database.clock()
        );
        match session.execute(&beat, &values![&self.gateway, self.epoch])? {
            0 => Err(fenced()),
            _ => Ok(()),
        }
    }

    /// Clears the heartbeat, so that the next start need not watch it.
    pub(super) fn leave(&self, session: &Session) -> Result<()> {
        let leave = "UPDATE gateways SET last_seen = NULL WHERE name = $1 AND epoch = $2";
        session
            .execute(leave, &values![&self.gateway, self.epoch])
            .map(drop)
    }

    /// Returns the gateways that have served, by name.
    pub fn gateways(&self) -> Result<Vec<Gateway>> {
        let statement = format!(
            "SELECT name, epoch, version, address, CASE WHEN name = $1 THEN 0 ELSE {} - last_seen END
             FROM gateways WHERE epoch > 0 ORDER BY name",
            self.database.clock()
        );
        self.database.read(|session| {
            session.rows(&statement, &values![&self.gateway], |mut row| {
                Ok(Gateway {
                    name: row.column()?,
                    epoch: row.column()?,
                    version: row.column()?,
                    address: row.column()?,
                    seen_ago: row.column()?,
                })
            })
        })
    }

    /// The seconds that this host's clock is ahead of the database's; 0 if the database is a file.
    pub fn clock_difference(&self) -> Result<f64> {
        if self.database.sqlite().is_some() {
            return Ok(0.0);
        }
        let seconds = || Timestamp::now().as_nanosecond() as f64 / 1e9;
        let time = "SELECT CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION)";
        let began = seconds();
        let found: f64 = self.database.read(|session| session.value(time, &[]))?;
        // The database looked at its clock at some time between these two.
        Ok(if found < began {
            began - found
        } else {
            (seconds() - found).min(0.0)
        })
    }
}

fn name_taken(name: &str, address: &str) -> Problem {
    Problem::new(
        ProblemKind::Fenced,
        format!(
            "another adriaticum serve has the name {name} in it, at {address}. Each gateway needs its own name, which is \
             the host's name unless it is set: set gateway (ADRIATICUM_GATEWAY) to another one, such as {name}-2, or stop \
             that process"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::append::tests::{row, write};
    use crate::ledger::{Filter, Grouping, RowFilter};
    use crate::store::tests::Temporary;
    use crate::when::Range;

    #[test]
    fn a_process_that_was_replaced_can_not_write() {
        let mut temporary = Temporary::new();
        let mut next = temporary.open_again();
        let old = &mut temporary.store;
        old.join("a", "").expect("a start");
        write(old, "1", "key_1", 7, 200, None);
        next.join("a", "").expect("a start");
        let refused = old.ledger.append(row("2", "key_1", 7), None);
        assert_eq!(refused.expect_err("fenced").kind, ProblemKind::Fenced);
        next.ledger
            .append(row("3", "key_1", 7), None)
            .expect("it has the epoch");
        let found = next.ledger.verify().expect("a walk");
        assert_eq!((found.rows, found.fault), (2, None));
    }

    #[test]
    fn each_gateway_has_its_rows_its_chain_and_its_sums() {
        let mut temporary = Temporary::new();
        let mut other = temporary.open_again();
        let one = &mut temporary.store;
        write(one, "0", "key_1", 1, 200, Some(1));
        one.join("a", "http://a:1").expect("a start");
        write(one, "1", "key_1", 1, 200, Some(1));
        other.join("b", "http://b:1").expect("a start");
        for number in 1..=5 {
            write(&other, &number.to_string(), "key_2", number + 1, 502, None);
        }
        (2..=5).for_each(|number| write(one, &number.to_string(), "key_1", number, 200, Some(1)));
        let found = one.ledger.verify().expect("a walk");
        assert_eq!((found.rows, found.fault), (11, None));
        let heads: Vec<_> = found
            .heads
            .iter()
            .map(|head| (head.gateway.as_str(), head.seq))
            .collect();
        assert_eq!(heads, [("", 1), ("a", 5), ("b", 5)]);
        let rows = one
            .ledger
            .grouped(
                &RowFilter::of(Range::ALL, Filter::ALL),
                &[Grouping::Gateway],
            )
            .expect("the figures");
        let groups: Vec<_> = rows
            .iter()
            .map(|row| (row.labels["gateway"].to_string(), row.sums.requests))
            .collect();
        assert_eq!(
            groups,
            [("\"\"".into(), 1), ("\"a\"".into(), 5), ("\"b\"".into(), 5)]
        );
        let filter = Filter {
            gateway: Some("b".into()),
            ..Filter::ALL
        };
        assert_eq!(
            one.ledger
                .sums(Range::ALL, filter)
                .expect("the figures")
                .errors,
            5
        );
        let gateways = other.ledger.gateways().expect("the gateways");
        let seen: Vec<_> = gateways
            .iter()
            .map(|it| (it.name.as_str(), it.epoch))
            .collect();
        assert_eq!(seen, [("a", 1), ("b", 1)]);
        assert_eq!(gateways[0].address, "http://a:1");
        assert!(
            gateways[0]
                .seen_ago
                .is_some_and(|ago| (0..60).contains(&ago))
        );
    }

    #[test]
    fn clocks_of_one_host_are_the_same() {
        assert!(
            Temporary::new()
                .store
                .ledger
                .clock_difference()
                .expect("a look")
                .abs()
                < CLOCK_SLACK
        );
    }

    #[cfg(feature = "test-postgres")]
    mod on_postgres {
        use std::thread;

        use super::*;
        use crate::database::{Access, DatabaseLocation};
        use crate::store::Store;

        fn start(database: &DatabaseLocation, name: &str) -> (Store, Result<()>) {
            let mut store = Store::open(database, Access::Existing).expect("the database");
            let joined = store.join(name, "http://gateway.test");
            (store, joined)
        }

        fn beat(store: &Store) {
            let beat = |session: &Session| store.ledger.beat(session);
            store.database.change(beat).expect("a heartbeat");
        }

        #[test]
        fn a_name_is_served_by_one_process() {
            let temporary = Temporary::postgres();
            let began = Instant::now();
            let (a, joined) = start(&temporary.database, "a");
            joined.expect("a new name");
            assert!(began.elapsed() < WATCH_TIME, "a new name is not watched");
            thread::scope(|scope| {
                let second = scope.spawn(|| start(&temporary.database, "a").1);
                while !second.is_finished() {
                    thread::sleep(Duration::from_secs(1));
                    beat(&a);
                }
                let problem = second.join().expect("no panic").expect_err("a serves");
                assert_eq!(problem.kind, ProblemKind::Fenced);
                assert!(
                    problem
                        .text
                        .contains("the name a in it, at http://gateway.test")
                        && problem.text.contains("such as a-2"),
                    "{problem}"
                );
            });
            start(&temporary.database, "b").1.expect("another name");
            // After a clean stop, even while another start watches it.
            thread::scope(|scope| {
                let next = scope.spawn(|| start(&temporary.database, "a").1);
                thread::sleep(Duration::from_secs(1));
                let leave = |session: &Session| a.ledger.leave(session);
                a.database.change(leave).expect("a clean stop");
                next.join().expect("no panic").expect("it is free");
            });
            let fenced = a.database.change(|session| a.ledger.beat(session));
            assert_eq!(
                fenced.expect_err("another start has the name").kind,
                ProblemKind::Fenced
            );
            assert_eq!(
                temporary
                    .store
                    .value::<i64>("SELECT epoch FROM gateways WHERE name = 'a'"),
                2
            );
        }

        /// However old the heartbeat is, and whatever the clocks say.
        #[test]
        fn a_name_whose_process_was_killed_is_taken_after_a_while() {
            let temporary = Temporary::postgres();
            start(&temporary.database, "a").1.expect("a new name");
            // A start a moment later meets the other one's name in its last look.
            for (last_seen, apart) in [("0", 0), ("9999999999", 100)] {
                temporary.store.tamper(&format!(
                    "UPDATE gateways SET last_seen = {last_seen} WHERE name = 'a'"
                ));
                let began = Instant::now();
                let starts = thread::scope(|scope| {
                    let start = |pause: u64| {
                        thread::sleep(Duration::from_millis(pause));
                        start(&temporary.database, "a").1.is_ok()
                    };
                    let both = [0, apart].map(|pause| scope.spawn(move || start(pause)));
                    both.map(|one| one.join().expect("no panic"))
                });
                assert_ne!(starts[0], starts[1], "one of them has it");
                assert!(began.elapsed() >= WATCH_TIME);
                assert!(began.elapsed() < 2 * WATCH_TIME);
            }
        }
    }
}
