//! The test write: it does what a request does to the database, and leaves nothing behind.

use std::time::Instant;

use super::append::Ledger;
use super::rollup::Span;
use super::row::LedgerRow;
use super::schema::SCHEMA;
use crate::database::{DatabaseError, Result, Session, Statement, values};
use crate::id::RequestId;

const DELETE_ROW: &str = "DELETE FROM usage WHERE request_id = $1";
const DELETE_SUMS: &str =
    "DELETE FROM usage_rollup WHERE span = $1 AND start = $2 AND key_id = $3 AND key_name = $4";

const NO_GATEWAY: &str = "the row of this gateway is missing in the table gateways: restore a backup, or restart the \
    service, which inserts a new one";

impl Ledger {
    /// Tests whether a request would succeed: looks up a key, appends a row and removes it again.
    /// All of it is committed, because a transaction that is rolled back does not reach the WAL,
    /// and does not notice a full disk.
    pub fn try_request(&self) -> Result<()> {
        // The connection that writes has its pages in its cache, so it would not notice that the
        // file is damaged or the WAL truncated. The row has an existing key, if there is one: the
        // operator may have added a foreign key.
        let key = "SELECT id FROM keys ORDER BY digest LIMIT 1";
        let key_id = self
            .database
            .look_up(key, &[], |mut row| row.column::<String>())?
            .unwrap_or_default();
        let id = RequestId::now();
        let row = LedgerRow {
            request_id: id.to_string(),
            key_id,
            // Its sums are not those of any key.
            key_name: id.to_string(),
            created: id.created(),
            status: Some(200),
            gateway: self.gateway.clone(),
            ..LedgerRow::default()
        };
        let undo_sums = |span: Span| {
            let place = values![
                span.seconds(),
                span.start(row.created),
                &row.key_id,
                &row.key_name
            ];
            Statement::new(DELETE_SUMS, place)
        };
        self.database.transaction(|session| {
            let epoch = self.identify(session)?;
            let (head, _) = self.lock_chain(session, epoch, &[])?;
            let (_, mut statements) = self.append_after(head, [&row]);
            statements.push(Statement::new(DELETE_ROW, values![&row.request_id]));
            statements.extend([Span::Hour, Span::Day].map(undo_sums));
            statements.push(self.move_head(head));
            let changed = session.run(&statements, &mut |_, _| Ok(()))?;
            if changed.contains(&0) {
                Err(DatabaseError::NoRow)
            } else {
                Ok(())
            }
        })
    }

    /// Makes a test write. Until it or another write succeeds, a failure makes the ledger
    /// unavailable.
    pub fn test_write(&self) {
        self.availability.test(|| self.try_request());
    }

    /// Returns whether the ledger is unavailable, and the pause before the next test is over.
    pub fn is_test_due(&self) -> bool {
        self.availability.is_test_due(Instant::now())
    }

    /// Reads whether this process may still write to the database, without writing anything. If it
    /// may not, the ledger is unavailable.
    pub fn check_identity(&self) {
        let check = || {
            self.database
                .sqlite()
                .map_or(Ok(()), |sqlite| sqlite.check_files())?;
            self.database.read(|session| self.identify(session))
        };
        match check() {
            Err(error) if error.is_replaced() || matches!(error, DatabaseError::Replaced) => {
                self.availability.note_failure(&error);
            }
            // Whether a request meets another error too, the request shows.
            Ok(_) | Err(_) => {}
        }
    }

    /// Returns the epoch of this gateway. Fails if another process has changed it, or the schema.
    pub(super) fn identify(&self, session: &Session) -> Result<i64> {
        self.database.check_version(session, &SCHEMA)?;
        let epoch = "SELECT epoch FROM gateways WHERE name = $1";
        let epoch: Option<i64> =
            session.first(epoch, &values![&self.gateway], |mut row| row.column())?;
        // A command that is not a gateway has no epoch of its own.
        match epoch.ok_or_else(|| DatabaseError::Other(NO_GATEWAY.into()))? {
            epoch if self.epoch == 0 || epoch == self.epoch => Ok(epoch),
            _ => Err(DatabaseError::Fenced),
        }
    }

    /// The time by the database's clock.
    pub fn clock(&self) -> Result<i64> {
        let clock = format!("SELECT {}", self.database.clock());
        self.database.read(|session| session.value(&clock, &[]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::database::Session;
    use crate::ledger::append::tests::write;
    use crate::store::tests::Temporary;
    #[cfg(feature = "test-postgres")]
    use crate::when::DAY;

    #[test]
    fn a_trial_leaves_nothing() {
        let mut temporary = Temporary::new();
        let store = &mut temporary.store;
        store.ledger.try_request().expect("a command may try it");
        store.ledger.join("a", "").expect("a start");
        write(store, "1", "key_1", 1, 200, Some(1));
        (0..3).for_each(|_| store.ledger.try_request().expect("it should be accepted"));
        write(store, "2", "key_1", 2, 200, Some(1));
        assert_eq!(store.value::<i64>("SELECT count(*) FROM usage"), 2);
        assert_eq!(
            store.value::<i64>("SELECT max(seq) FROM usage"),
            2,
            "no gap"
        );
        assert_eq!(
            store.value::<i64>("SELECT count(*) FROM usage_rollup"),
            2,
            "of the rows"
        );
        assert_eq!(store.ledger.verify().expect("a walk").fault, None);
        store.tamper("DELETE FROM keys");
        store
            .ledger
            .try_request()
            .expect("a database without keys is ready too");
    }

    #[test]
    fn a_gateway_that_was_replaced_and_one_without_its_row_are_not_ready() {
        let mut temporary = Temporary::new();
        let mut next = temporary.open_again();
        temporary.store.ledger.join("a", "").expect("a start");
        next.ledger.join("a", "").expect("another start");
        assert!(matches!(
            temporary.store.ledger.try_request(),
            Err(DatabaseError::Fenced)
        ));
        next.ledger.try_request().expect("it has the epoch");
        next.tamper("DELETE FROM gateways WHERE name = 'a'");
        let error = next.ledger.try_request().expect_err("there is no row");
        assert!(
            error
                .to_string()
                .contains("is missing in the table gateways"),
            "{error}"
        );
        assert!(!error.is_replaced(), "no process has replaced it");
    }

    #[test]
    fn whatever_fails_a_request_fails_the_trial() {
        let temporary = Temporary::sqlite();
        let store = &temporary.store;
        for what in [
            "INSERT ON usage",
            "INSERT ON usage_rollup",
            "UPDATE ON gateways",
        ] {
            let trigger = format!(
                "CREATE TRIGGER fail BEFORE {what} BEGIN SELECT RAISE(ABORT, 'on purpose')"
            );
            // `tamper` ends a statement at its semicolon.
            let create = |session: &Session| session.execute(&format!("{trigger}; END"), &[]);
            store.database.transaction(create).expect("a trigger");
            let error = store.ledger.try_request().expect_err(what).to_string();
            assert!(error.contains("on purpose"), "{error}");
            store.tamper("DROP TRIGGER fail");
            store.ledger.try_request().expect("it would succeed again");
        }
    }

    #[test]
    fn a_changed_schema_is_noticed() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let change = |version: &str, oldest_known: &str| match store.database.sqlite() {
            Some(_) => store.tamper(&format!("PRAGMA user_version = {oldest_known}")),
            None => store.tamper(&format!(
                "UPDATE schema_version SET version = {version}, oldest_known = {oldest_known}"
            )),
        };
        change("11", "10");
        store
            .ledger
            .try_request()
            .expect("a later version that only adds");
        change("11", "11");
        let error = store.ledger.try_request().expect_err("it is not known");
        assert!(
            error.is_replaced() && error.to_string().contains("now has version 11"),
            "{error}"
        );
        store.ledger.check_identity();
        assert!(
            store
                .ledger
                .outage()
                .is_some_and(|error| error.is_replaced()),
            "a read finds it too"
        );
        change("10", "10");
        store.ledger.try_request().expect("it is as before");
    }

    #[test]
    #[cfg(feature = "test-postgres")]
    fn on_postgres_the_clock_of_the_database_counts() {
        let temporary = Temporary::postgres();
        let name: String = temporary
            .store
            .value("SELECT CAST(current_database() AS TEXT)");
        // A function of ours is found before the system's.
        temporary.store.tamper(&format!(
            "ALTER DATABASE {name} SET search_path = public, pg_catalog"
        ));
        temporary.store.tamper(
            "CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql
             AS 'SELECT pg_catalog.clock_timestamp() - interval ''100 days'''",
        );
        let clock = temporary.open_again().ledger.clock().expect("a time");
        assert!(
            (crate::when::now() - 100 * DAY - clock).abs() < DAY,
            "{clock}"
        );
    }
}
