//! The readiness check's transaction: it does what a request does to the database, and leaves nothing behind. It also
//! updates the gateway's heartbeat, by which retention notices that the clock has jumped ahead.

use std::time::{Duration, Instant};

use super::engine::{Row, values};
use super::{DAY, Result, Store, StoreError};
use crate::id::RequestId;
use crate::mutex::lock;

/// If the clock jumps ahead by more than a day, retention removes nothing until the gateway has run for this long.
const DISTRUST: Duration = Duration::from_secs(86_400);

const READ_KEY: &str = "SELECT id, name, permissions FROM keys ORDER BY digest LIMIT 1";

/// Inserts an open row, of an existing key if there is one: the operator may have added a foreign key.
const INSERT: &str = "INSERT INTO usage (request_id, key_id, key_name, created, gateway, epoch)
    SELECT $1, coalesce(any_key.id, ''), coalesce(any_key.name, ''), $2, gateways.name, gateways.epoch
    FROM gateways LEFT JOIN (SELECT id, name FROM keys ORDER BY digest LIMIT 1) AS any_key ON true
    WHERE gateways.name = $3 AND gateways.epoch = $4";

const FINISH: &str = "UPDATE usage SET status = 200 WHERE request_id = $1";

const DELETE: &str = "DELETE FROM usage WHERE request_id = $1";

/// Sums of no span.
const INSERT_SUMS: &str = "INSERT INTO usage_rollup VALUES (0, 0, $1, '', 0, '', '', 0, 0, 0, 0, 0, $2, $2)";
const DELETE_SUMS: &str = "DELETE FROM usage_rollup WHERE span = 0 AND start = 0 AND key_id = $1";

const UPDATE_HEARTBEAT: &str = "UPDATE gateways SET last_seen = $1 WHERE name = $2 AND epoch = $3";

impl Store {
    /// Tests whether a request would succeed. One committed transaction, durable as a completion's is, inserts a row, changes it and
    /// deletes it again, and the same with sums: a rolled-back one would not reach the WAL, and would not notice a full disk.
    /// In a gateway it also updates the heartbeat.
    pub fn try_request(&self) -> Result<()> {
        // A request looks up its key in the same way. The connection that writes has these pages in its cache, so it would not notice that
        // the file is damaged or the WAL truncated.
        self.engine.read(|session| session.first(READ_KEY, &[], |_| Ok(())))?;
        let id = RequestId::now();
        let request_id = id.to_string();
        let look = format!("SELECT epoch, last_seen, {} FROM gateways WHERE name = $1", self.engine.clock());
        let (version, known) = self.engine.known_versions();
        self.engine.transaction(true, |session| {
            match session.value(version, &[])? {
                found if known.contains(&found) => {}
                found => return Err(StoreError::VersionChanged(found)),
            }
            let read = |mut row: Row| Ok((row.next()?, row.next()?, row.next()?));
            let found: Option<(i64, i64, i64)> = session.first(&look, &values![&self.gateway], read)?;
            let (epoch, last_seen, clock) = found.ok_or_else(no_gateway)?;
            // A command that is not a gateway has no epoch of its own.
            let is_gateway = self.epoch > 0;
            if is_gateway && epoch != self.epoch {
                return Err(StoreError::Fenced);
            }
            let row = values![&request_id, id.created(), &self.gateway, epoch];
            if session.execute(INSERT, &row)? == 0 {
                return Err(StoreError::Fenced);
            }
            for statement in [FINISH, DELETE] {
                if session.execute(statement, &values![&request_id])? == 0 {
                    return Err(StoreError::NoRow);
                }
            }
            session.execute(INSERT_SUMS, &values![&request_id, Vec::new()])?;
            session.execute(DELETE_SUMS, &values![&request_id])?;
            if is_gateway && self.trusts(last_seen, clock, Instant::now()) {
                session.execute(UPDATE_HEARTBEAT, &values![clock, &self.gateway, epoch])?;
            }
            Ok(())
        })
    }

    /// Returns whether the heartbeat may follow the clock. While the clock is distrusted it may not: a restart would then find the
    /// wrong time in the database and trust it. A clock that was set back is followed, else the next jump would not be noticed.
    fn trusts(&self, last_seen: i64, clock: i64, now: Instant) -> bool {
        let mut distrusted = lock(&self.distrusted);
        if !is_jump(last_seen, clock) {
            *distrusted = None;
            return true;
        }
        now.duration_since(*distrusted.get_or_insert(now)) >= DISTRUST
    }

    /// The last heartbeat before the clock jumped ahead; `None` if the clock is trusted. On PostgreSQL the database's clock
    /// counts, which all gateways share.
    pub fn clock_jump(&self) -> Result<Option<i64>> {
        if self.engine.sqlite().is_none() {
            return Ok(None);
        }
        let look = format!("SELECT last_seen, {} FROM gateways WHERE name = $1", self.engine.clock());
        let read = |mut row: Row| Ok((row.next()?, row.next()?));
        let found = self.engine.read(|session| session.first(&look, &values![&self.gateway], read))?;
        Ok(found.filter(|&(last_seen, clock)| is_jump(last_seen, clock)).map(|(last_seen, _)| last_seen))
    }

    /// The time by the database's clock.
    pub fn clock(&self) -> Result<i64> {
        let clock = format!("SELECT {}", self.engine.clock());
        self.engine.read(|session| session.value(&clock, &[]))
    }
}

fn no_gateway() -> StoreError {
    StoreError::Other(
        "the row of this gateway is missing in the table gateways: restore a backup, or restart the service, which inserts \
         a new one"
            .into(),
    )
}

/// Returns whether the clock is more than a day ahead of the last heartbeat. A gateway that never served has none.
fn is_jump(last_seen: i64, clock: i64) -> bool {
    last_seen > 0 && clock - last_seen > DAY
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::engine::SqlSession;
    use crate::store::ledger::tests::{row, write};
    use crate::store::tests::Temporary;

    fn last_seen(store: &Store) -> i64 {
        store.value(&format!("SELECT last_seen FROM gateways WHERE name = '{}'", store.gateway))
    }

    fn set_last_seen(store: &Store, time: i64) {
        store.tamper(&format!("UPDATE gateways SET last_seen = {time} WHERE name = '{}'", store.gateway));
    }

    #[test]
    fn a_trial_leaves_nothing_but_the_heartbeat() {
        let mut temporary = Temporary::new();
        let store = &mut temporary.store;
        store.try_request().expect("a command may try it");
        assert_eq!(last_seen(store), 0, "but it is no gateway");
        store.join("a", "").expect("a start");
        write(store, "1", "key_1", 1, 200, Some(1));
        let before = store.clock().expect("a time") - 100;
        set_last_seen(store, before);
        (0..3).for_each(|_| store.try_request().expect("it should be accepted"));
        assert!(last_seen(store) >= before + 100);
        store.begin_row(&row("2", "key_1", 2)).expect("a running request");
        assert_eq!(store.value::<i64>("SELECT count(*) FROM usage"), 2);
        assert_eq!(store.value::<i64>("SELECT max(seq) FROM usage"), 1, "no gap");
        assert_eq!(store.value::<i64>("SELECT count(*) FROM usage_rollup"), 3, "of the first row");
        assert_eq!(store.verify().expect("a walk").fault, None);
        store.tamper("DELETE FROM keys");
        store.try_request().expect("a database without keys is ready too");
    }

    #[test]
    fn a_gateway_that_was_replaced_and_one_without_its_row_are_not_ready() {
        let mut temporary = Temporary::new();
        let mut next = temporary.open_again();
        temporary.store.join("a", "").expect("a start");
        next.join("a", "").expect("another start");
        assert!(matches!(temporary.store.try_request(), Err(StoreError::Fenced)));
        next.try_request().expect("it has the epoch");
        next.tamper("DELETE FROM gateways WHERE name = 'a'");
        let error = next.try_request().expect_err("there is no row");
        assert!(error.to_string().contains("is missing in the table gateways"), "{error}");
        assert!(!error.is_replaced(), "no process has replaced it");
    }

    #[test]
    fn whatever_fails_a_request_fails_the_trial() {
        let temporary = Temporary::sqlite();
        let store = &temporary.store;
        for what in ["INSERT ON usage", "UPDATE ON usage", "INSERT ON usage_rollup"] {
            let trigger =
                format!("CREATE TRIGGER fail BEFORE {what} BEGIN SELECT RAISE(ABORT, 'on purpose')");
            // `tamper` ends a statement at its semicolon.
            let create = |session: &dyn SqlSession| session.execute(&format!("{trigger}; END"), &[]);
            store.engine.transaction(false, create).expect("a trigger");
            let error = store.try_request().expect_err(what).to_string();
            assert!(error.contains("on purpose"), "{error}");
            store.tamper("DROP TRIGGER fail");
            store.try_request().expect("it would succeed again");
        }
    }

    #[test]
    fn a_changed_schema_is_noticed() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let change = |version: &str, oldest_known: &str| match store.engine.sqlite() {
            Some(_) => store.tamper(&format!("PRAGMA user_version = {oldest_known}")),
            None => store.tamper(&format!(
                "UPDATE schema_version SET version = {version}, oldest_known = {oldest_known}"
            )),
        };
        change("10", "9");
        store.try_request().expect("a later version that only adds");
        change("10", "10");
        let error = store.try_request().expect_err("it is not known");
        assert!(error.is_replaced() && error.to_string().contains("now has version 10"), "{error}");
        change("9", "9");
        store.try_request().expect("it is as before");
    }

    #[test]
    fn a_jump_of_the_clock_is_distrusted_until_the_process_has_run_for_a_day() {
        let mut temporary = Temporary::sqlite();
        let store = &mut temporary.store;
        let now = store.clock().expect("a time");
        assert_eq!(store.clock_jump().expect("a look"), None, "a new database");
        store.join("", "").expect("a start");
        assert!(last_seen(store) >= now);
        // The clock is ten years ahead.
        let then = now - 3650 * DAY;
        set_last_seen(store, then);
        for _ in 0..2 {
            store.join("", "").expect("a start");
            store.try_request().expect("it is ready all the same");
            assert_eq!(last_seen(store), then, "neither the start nor the heartbeat follows it");
            assert_eq!(store.clock_jump().expect("a look"), Some(then));
        }
        let start = store.distrusted.lock().expect("no panic").expect("it is distrusted");
        assert!(!store.trusts(then, now, start + DISTRUST - Duration::from_secs(1)));
        assert!(store.trusts(then, now, start + DISTRUST));
        // The clock is set right, and jumps again later.
        set_last_seen(store, now - DAY + 3600);
        store.try_request().expect("a heartbeat");
        assert!(last_seen(store) >= now);
        assert_eq!(store.clock_jump().expect("a look"), None);
        assert!(!store.trusts(then, now, start + 2 * DISTRUST), "the day begins again");
        // A clock that was set back is followed.
        set_last_seen(store, now + 3650 * DAY);
        assert_eq!(store.clock_jump().expect("a look"), None);
        store.try_request().expect("a heartbeat");
        assert!((now..now + DAY).contains(&last_seen(store)));
    }

    #[test]
    #[cfg(feature = "test-postgres")]
    fn on_postgres_the_clock_of_the_database_counts() {
        let temporary = Temporary::postgres();
        let name: String = temporary.store.value("SELECT CAST(current_database() AS TEXT)");
        // A function of ours is found before the system's.
        temporary.store.tamper(&format!("ALTER DATABASE {name} SET search_path = public, pg_catalog"));
        temporary.store.tamper(
            "CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql
             AS 'SELECT pg_catalog.clock_timestamp() - interval ''100 days'''",
        );
        let mut store = temporary.open_again();
        let clock = store.clock().expect("a time");
        assert!((crate::when::now() - 100 * DAY - clock).abs() < DAY, "{clock}");
        store.join("a", "").expect("a start");
        set_last_seen(&store, clock - 10 * DAY);
        assert_eq!(store.clock_jump().expect("a look"), None);
    }
}
