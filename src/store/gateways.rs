//! The gateways that share a database. Each has a name and an epoch, which every start raises. A row is written only if its
//! gateway still has the epoch of the process that writes it, so a process that was replaced can't write any more.

use super::engine::values;
use super::ledger::INTERRUPT;
use super::{Store, StoreError};

/// A gateway as others see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gateway {
    /// Empty for the one of a SQLite database.
    pub name: String,
    pub epoch: i64,
    pub version: String,
    pub address: String,
    /// Seconds since it was last seen, by the database's clock.
    pub seen_ago: i64,
    /// Requests that are running, or were when it ended.
    pub open_requests: i64,
}

const RAISE_EPOCH: &str = "INSERT INTO gateways VALUES ($1, 1, $2, $3, {CLOCK}, 0, $4, 0)
    ON CONFLICT (name) DO UPDATE SET epoch = gateways.epoch + 1, version = excluded.version,
    address = excluded.address, last_seen = excluded.last_seen RETURNING epoch";

impl Store {
    /// Begins to serve under a name: no earlier process can write its rows from now on. Those that it has left open are
    /// marked as interrupted; returns how many they were.
    pub fn join(&mut self, name: &str, address: &str) -> Result<usize, StoreError> {
        let raise = RAISE_EPOCH.replace("{CLOCK}", self.engine.clock());
        let parameters = values![name, env!("CARGO_PKG_VERSION"), address, [0; 32]];
        self.epoch = self.engine.transaction(true, |session| session.value(&raise, &parameters))?;
        self.gateway = name.to_owned();
        let interrupted = self.close_earlier_epochs()?;
        self.backlog.add(self.unsealed()?.rows);
        Ok(interrupted)
    }

    /// Marks the rows as interrupted that earlier processes of this gateway have left open. One of them may still have
    /// inserted a row while the epoch was raised.
    pub fn close_earlier_epochs(&self) -> Result<usize, StoreError> {
        let parameters = values![&self.gateway, self.epoch - 1];
        self.engine.transaction(true, |session| session.execute(INTERRUPT, &parameters))
    }

    /// Those that have served, by name.
    pub fn gateways(&self) -> Result<Vec<Gateway>, StoreError> {
        let statement = format!(
            "SELECT name, gateways.epoch, version, address, CASE WHEN name = $1 THEN 0 ELSE {} - last_seen END,
             count(request_id) FROM gateways LEFT JOIN usage
                 ON seq IS NULL AND gateway = name AND status IS NULL AND error_code IS NULL
             WHERE gateways.epoch > 0 GROUP BY 1, 2, 3, 4, last_seen ORDER BY name",
            self.engine.clock()
        );
        self.engine.read(|session| {
            session.rows(&statement, &values![&self.gateway], |mut row| {
                Ok(Gateway {
                    name: row.next()?,
                    epoch: row.next()?,
                    version: row.next()?,
                    address: row.next()?,
                    seen_ago: row.next()?,
                    open_requests: row.next()?,
                })
            })
        })
    }

    /// How many seconds this host's clock is ahead of the database's.
    pub fn clock_difference(&self) -> Result<i64, StoreError> {
        let clock = format!("SELECT {}", self.engine.clock());
        let began = crate::when::now();
        let found: i64 = self.engine.read(|session| session.value(&clock, &[]))?;
        // The database looked at its clock at some time between these two.
        Ok(if found < began { began - found } else { (crate::when::now() - found).min(0) })
    }
}

#[cfg(test)]
mod tests {
    use super::super::ledger::tests::{id, outcome, row, write};
    use super::super::tests::Temporary;
    use super::super::{Filter, Grouping, Range, UsageRow};
    use super::*;

    #[test]
    fn a_process_that_was_replaced_can_not_write() {
        let mut temporary = Temporary::new();
        let mut next = temporary.open_again();
        let old = &mut temporary.store;
        assert_eq!(old.join("a", "").expect("a start"), 0);
        old.begin(&row("1", "key_1", 7)).expect("a new row");
        write(old, "2", "key_1", 7, 200, None);
        assert_eq!(next.join("a", "").expect("a start"), 1, "one was open");
        assert!(matches!(old.begin(&row("3", "key_1", 7)), Err(StoreError::Fenced)));
        assert!(matches!(old.begin(&row("3", "key_0", 7)), Err(StoreError::Fenced)), "whatever the key");
        assert!(matches!(next.begin(&row("3", "key_0", 7)), Err(StoreError::KeyRefused)));
        assert!(matches!(old.record(&row("3", "key_1", 7), &outcome(400, None)), Err(StoreError::Fenced)));
        assert!(old.finish(&id("1", 7), &outcome(200, None)).is_err(), "it is closed");
        assert!(matches!(old.seal(10, 8), Err(StoreError::Fenced)));
        // One that was inserted while the epoch was raised.
        next.tamper("UPDATE usage SET error_code = NULL WHERE error_code = 'interrupted'");
        assert!(old.finish(&id("1", 7), &outcome(200, None)).is_err(), "its epoch is over");
        assert_eq!(next.close_earlier_epochs().expect("a look"), 1);
        next.seal_all(8);
        assert_eq!(next.verify().expect("a walk").rows, 2);
    }

    #[test]
    fn each_gateway_has_its_rows_its_chain_and_its_sums() {
        let mut temporary = Temporary::new();
        let mut other = temporary.open_again();
        let one = &mut temporary.store;
        write(one, "0", "key_1", 1, 200, Some(1));
        one.seal_all(9);
        one.join("a", "http://a:1").expect("a start");
        other.join("b", "http://b:1").expect("a start");
        for number in 1..=5 {
            write(one, &number.to_string(), "key_1", number, 200, Some(1));
            write(&other, &number.to_string(), "key_2", number + 1, 502, None);
        }
        one.begin(&row("open", "key_1", 9)).expect("a running request");
        one.seal_all(9);
        let found = one.verify().expect("a walk");
        assert_eq!((found.rows, found.unsealed, found.fault), (6, 5, None), "others seal theirs");
        other.seal_all(9);
        let found = one.verify().expect("a walk");
        assert_eq!((found.rows, found.unsealed, found.fault), (11, 0, None));
        let heads: Vec<_> = found.heads.iter().map(|head| (head.gateway.as_str(), head.seq)).collect();
        assert_eq!(heads, [("", 1), ("a", 5), ("b", 5)]);
        let mut groups = Vec::new();
        let take = |row: UsageRow| groups.push((row.labels["gateway"].to_string(), row.sums.requests));
        one.grouped(Range::ALL, Filter::ALL, Grouping::Gateway, take).expect("the figures");
        assert_eq!(groups, [("\"\"".into(), 1), ("\"a\"".into(), 6), ("\"b\"".into(), 5)]);
        let filter = Filter { gateway: Some("b"), ..Filter::ALL };
        assert_eq!(one.sums(Range::ALL, filter).expect("the figures").errors, 5);
        let gateways = other.gateways().expect("the gateways");
        let seen: Vec<_> = gateways.iter().map(|it| (it.name.as_str(), it.epoch, it.open_requests)).collect();
        assert_eq!(seen, [("a", 1, 1), ("b", 1, 0)]);
        assert_eq!(gateways[0].address, "http://a:1");
        assert!((0..60).contains(&gateways[0].seen_ago));
    }

    #[test]
    fn clocks_of_one_host_are_the_same() {
        assert!(Temporary::new().store.clock_difference().expect("a look").abs() < 2);
    }
}
