//! The gateways that share a database. Each has a name and an epoch, which every start raises. A
//! row is written only if its gateway still has the epoch of the process that writes it, so a
//! process that was replaced can't write any more.

use time::OffsetDateTime;

use super::append::Ledger;
use crate::database::postgres::session_lock::SessionLock;
use crate::database::{DatabaseError, Result, Statement, values};

/// The seconds that a gateway's clock may be off the database's: ids and expiry use it.
pub const CLOCK_SLACK: f64 = 2.0;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gateway {
    /// Empty for the one of a SQLite database.
    pub name: String,
    pub epoch: i64,
    pub version: String,
    pub address: String,
    /// Seconds since it was last seen, by the database's clock.
    pub seen_ago: i64,
}

impl Ledger {
    /// Begins to serve under a name: no earlier process can write its rows from now on.
    pub fn join(&mut self, name: &str, address: &str) -> Result<()> {
        let raise = format!(
            "INSERT INTO gateways (name, epoch, version, address, last_seen, anchor_seq, anchor_hash,
                 head_seq, head_hash)
             VALUES ($1, 1, $2, $3, {}, 0, $4, 0, $4) ON CONFLICT (name) DO UPDATE
             SET epoch = gateways.epoch + 1, version = excluded.version, address = excluded.address,
                 last_seen = excluded.last_seen
             RETURNING epoch",
            self.database.clock()
        );
        let parameters = values![name, env!("ADRIATICUM_VERSION"), address, [0; 32]];
        // Waits for the rows that an earlier process is inserting.
        let lock = self.lock_gateway();
        self.epoch = self.database.transaction(|session| {
            session.execute(&lock, &values![name])?;
            session.value(&raise, &parameters)
        })?;
        self.gateway = name.to_owned();
        Ok(())
    }

    /// A query that keeps a gateway from inserting rows until the transaction ends.
    pub(super) fn lock_gateway(&self) -> String {
        let lock = self.database.row_lock("FOR UPDATE");
        format!("SELECT 1 FROM gateways WHERE name = $1 {lock}")
    }

    /// Runs about every second: updates the heartbeat. Fails with `Fenced` if another process has
    /// its name.
    pub fn keep_presence(&self, lock: &mut SessionLock) -> Result<()> {
        let beat = format!(
            "UPDATE gateways SET last_seen = {} WHERE name = $1 AND epoch = $2",
            self.database.clock()
        );
        let parameters = values![&self.gateway, self.epoch];
        let is_present =
            lock.renew(Statement::new(beat, parameters))
                .map_err(|error| match error {
                    // The engine has logged this already.
                    error if self.database.lost().is_some() => {
                        DatabaseError::Unavailable(error.to_string())
                    }
                    DatabaseError::Unavailable(cause) => DatabaseError::Unknown(cause),
                    error => error,
                })?;
        if is_present {
            Ok(())
        } else {
            Err(DatabaseError::Fenced)
        }
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
        let seconds = || OffsetDateTime::now_utc().unix_timestamp_nanos() as f64 / 1e9;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::append::tests::{row, write};
    use crate::ledger::{Filter, Grouping};
    use crate::store::tests::Temporary;
    use crate::when::Range;

    #[test]
    fn a_process_that_was_replaced_can_not_write() {
        let mut temporary = Temporary::new();
        let mut next = temporary.open_again();
        let old = &mut temporary.store;
        old.ledger.join("a", "").expect("a start");
        write(old, "1", "key_1", 7, 200, None);
        next.ledger.join("a", "").expect("a start");
        assert!(matches!(
            old.ledger.append(row("2", "key_1", 7)),
            Err(DatabaseError::Fenced)
        ));
        assert!(
            old.ledger.outage().is_some_and(|error| error.is_replaced()),
            "the process has to stop"
        );
        next.ledger
            .append(row("3", "key_1", 7))
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
        one.ledger.join("a", "http://a:1").expect("a start");
        write(one, "1", "key_1", 1, 200, Some(1));
        other.ledger.join("b", "http://b:1").expect("a start");
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
            .grouped(Range::ALL, Filter::ALL, &[Grouping::Gateway])
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
            gateway: Some("b"),
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
        assert!((0..60).contains(&gateways[0].seen_ago));
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
        use super::*;
        use crate::database::{Access, DatabaseLocation};
        use crate::ledger::serve_lock::HOLDER;
        use crate::store::Store;
        use crate::store::test_server::PostgresServer;

        /// A gateway on a database, with the lock of its name.
        fn gateway(database: &DatabaseLocation, name: &str) -> (Store, SessionLock) {
            let DatabaseLocation::Postgres(uri) = database else {
                panic!("only PostgreSQL has several")
            };
            let lock =
                SessionLock::take(uri, name, HOLDER).unwrap_or_else(|error| panic!("{error}"));
            let mut store = Store::open(database, Access::Existing).expect("the database");
            store
                .ledger
                .join(name, "http://gateway.test")
                .expect("a start");
            (store, lock)
        }

        #[test]
        fn a_name_is_served_by_one_process() {
            let temporary = Temporary::postgres();
            let DatabaseLocation::Postgres(uri) = &temporary.database else {
                panic!("it is PostgreSQL")
            };
            let (_, lock) = gateway(&temporary.database, "a");
            let error_text = SessionLock::take(uri, "a", HOLDER)
                .err()
                .expect("the name is taken")
                .to_string();
            assert!(
                error_text.contains("the name a") && error_text.contains("at http://gateway.test"),
                "{error_text}"
            );
            gateway(&temporary.database, "b");
            drop(lock);
            SessionLock::take(uri, "a", HOLDER)
                .unwrap_or_else(|error| panic!("it was released: {error}"));
        }

        #[test]
        fn a_lost_connection_loses_neither_the_name_nor_the_epoch() {
            let temporary = Temporary::postgres();
            let (b, mut lock) = gateway(&temporary.database, "b");
            let database = temporary
                .store
                .value::<String>("SELECT CAST(current_database() AS TEXT)");
            PostgresServer::shared().psql(&format!(
                "SELECT pg_terminate_backend(pid, 10000) FROM pg_locks JOIN pg_stat_activity USING (pid)
                 WHERE locktype = 'advisory' AND datname = '{database}'"
            ));
            while b.ledger.keep_presence(&mut lock).is_err() {}
            let held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'
                AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
            assert_eq!(b.value::<i64>(held), 1, "b has its lock again");
            b.tamper("UPDATE gateways SET epoch = 2 WHERE name = 'b'");
            assert!(matches!(
                b.ledger.keep_presence(&mut lock),
                Err(DatabaseError::Fenced)
            ));
        }
    }
}
