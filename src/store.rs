//! Everything that one database has: the ledger, the keys and the audit.

use std::sync::Arc;

use crate::audit::Audit;
use crate::database::{Access, Database, DatabaseError, DatabaseLocation, Result};
use crate::keys::Keys;
use crate::ledger::{Ledger, SCHEMA, ServeLock};
use crate::progress::Progress;

pub struct Store {
    pub database: Arc<Database>,
    pub ledger: Ledger,
    pub keys: Keys,
    pub audit: Audit,
}

#[cfg(all(test, feature = "test-postgres"))]
#[path = "../tests/postgres.rs"]
pub mod test_server;

impl Store {
    /// Opens the database; creates or upgrades it if `access` allows that.
    pub fn open(location: &DatabaseLocation, access: Access) -> Result<Self> {
        Self::open_with(location, access, &Progress::hidden())
    }

    /// The same, with the progress of an upgrade.
    pub fn open_with(
        location: &DatabaseLocation,
        access: Access,
        progress: &Progress,
    ) -> Result<Self> {
        let store = Self::new(Database::open(location, &SCHEMA, access, progress)?);
        store.look_for_damage()?;
        if !matches!(access, Access::Read | Access::Upgrade) {
            store.refuse_if_moved(location)?;
        }
        Ok(store)
    }

    fn new(database: Database) -> Self {
        let database = Arc::new(database);
        Self {
            ledger: Ledger::new(Arc::clone(&database)),
            keys: Keys::new(Arc::clone(&database)),
            audit: Audit::new(Arc::clone(&database)),
            database,
        }
    }

    /// Checks every page of a file (a server checks its own), and that a request would succeed.
    pub fn check(&self) -> Result<()> {
        if let Some(sqlite) = self.database.sqlite() {
            sqlite.check()?;
        }
        self.ledger.try_request()
    }

    /// Fails if the database was replaced after the lock was taken: another process could lock it
    /// too.
    pub fn check_lock(&self, lock: &ServeLock) -> Result<()> {
        match (self.database.sqlite(), lock) {
            (Some(sqlite), ServeLock::File(lock)) => sqlite.files.check_lock(lock),
            _ => Ok(()),
        }
    }

    /// Fails if everything was moved to another database: a change here would be lost.
    pub fn refuse_if_moved(&self, location: &DatabaseLocation) -> Result<()> {
        let DatabaseLocation::Sqlite(path) = location else {
            return Ok(());
        };
        match self
            .database
            .look_up("SELECT target FROM moved", &[], |mut row| row.column())?
        {
            Some(target) => {
                let source = path.canonicalize().unwrap_or_else(|_| path.clone());
                Err(DatabaseError::Moved { source, target })
            }
            None => Ok(()),
        }
    }

    /// Reads what every request needs, so that a start refuses a damaged database. A small one is
    /// checked completely when it is opened, a large one would take too long.
    fn look_for_damage(&self) -> Result<()> {
        self.database.read(|session| {
            for statement in [
                "SELECT count(*) FROM keys WHERE length(digest) <> 32 OR length(name || permissions) = 0",
                "SELECT count(*) FROM (SELECT * FROM usage ORDER BY request_id DESC LIMIT 100) AS newest",
                "SELECT count(*) FROM (SELECT hash FROM usage ORDER BY gateway DESC, seq DESC LIMIT 100) AS newest",
                "SELECT count(*) FROM (SELECT * FROM usage_rollup WHERE span = 86400 ORDER BY start DESC LIMIT 100) AS newest",
                "SELECT count(anchor_hash) FROM gateways",
            ] {
                session.value::<i64>(statement, &[])?;
            }
            Ok(())
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::{Path, PathBuf};
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    #[cfg(feature = "test-postgres")]
    use super::test_server::PostgresServer;
    use super::*;
    use crate::database::{FromValue, Row, Session, SqlValue, Statement, values};
    use crate::ledger::listing::ids;
    use crate::ledger::report;
    use crate::ledger::{Filter, Matching, RowFilter, Span, Sums, Verification};
    use crate::when::Range;

    /// A store of its own, which is removed with it. It has the keys `key_1` and `key_2`.
    pub struct Temporary {
        pub store: Store,
        pub folder: PathBuf,
        pub database: DatabaseLocation,
    }

    impl Temporary {
        /// On SQLite, or on PostgreSQL with the feature `test-postgres`.
        pub fn new() -> Self {
            #[cfg(feature = "test-postgres")]
            return Self::postgres();
            #[cfg(not(feature = "test-postgres"))]
            Self::sqlite()
        }

        /// A store for tests of PostgreSQL only.
        #[cfg(feature = "test-postgres")]
        pub fn postgres() -> Self {
            let uri = PostgresServer::shared().database();
            Self::with(|_| DatabaseLocation::parse(&uri).expect("a good URI"))
        }

        /// A store for tests of SQLite only.
        pub fn sqlite() -> Self {
            Self::with(|folder| DatabaseLocation::Sqlite(folder.join("test.db")))
        }

        fn with(database: impl FnOnce(&Path) -> DatabaseLocation) -> Self {
            let folder = std::env::temp_dir()
                .join(format!("adriaticum-{}", crate::secret::secret_hex::<8>()));
            std::fs::create_dir(&folder).expect("a folder");
            let database = database(&folder);
            let store = open_with_timeout(&database, Access::Create, Duration::from_secs(1));
            for key in ["key_1", "key_2"] {
                let insert = Statement::new(
                    "INSERT INTO keys (id, digest, name, permissions, created)
                     VALUES ($1, $2, 'name of ' || $1, 'completions', 0)",
                    values![key, crate::secret::SecretDigest::of(key).0],
                );
                store.database.write(&[insert]).expect("a key");
            }
            Self {
                store,
                folder,
                database,
            }
        }

        /// Opens the database again, with another timeout for writes.
        pub fn reopen(&mut self, timeout: Duration) {
            self.store = open_with_timeout(&self.database, Access::Existing, timeout);
        }

        /// Opens the database again, as another process would.
        pub fn open_again(&self) -> Store {
            Store::open(&self.database, Access::Existing).expect("the same database")
        }
    }

    fn open_with_timeout(location: &DatabaseLocation, access: Access, timeout: Duration) -> Store {
        let mut database = Database::open(location, &SCHEMA, access, &Progress::hidden())
            .expect("the database should open");
        if let Database::Sqlite(sqlite) = &mut database {
            sqlite.set_write_timeout(timeout);
            sqlite.stop_syncing();
        }
        Store::new(database)
    }

    /// Runs `meanwhile` while another thread is in a transaction that writes, after its first
    /// statements.
    pub fn while_writing(
        database: &Database,
        begin: impl Fn(&Session) -> Result<()> + Send,
        meanwhile: impl FnOnce(),
    ) {
        thread::scope(|scope| {
            // Dropped, `end` ends the transaction, even after a panic.
            let ((has_begun, begun), (end, ended)) = (mpsc::channel(), mpsc::channel::<()>());
            let writer = scope.spawn(move || {
                database.transaction(|session| {
                    begin(session)?;
                    has_begun.send(()).expect("the test waits");
                    let _ = ended.recv();
                    Ok(())
                })
            });
            begun.recv().expect("a transaction");
            meanwhile();
            drop(end);
            writer.join().expect("no panic").expect("it only waits");
        });
    }

    impl Drop for Temporary {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }

    impl Ledger {
        /// Verifies without a display.
        pub fn verify(&self) -> Result<Verification> {
            self.verify_with(&Progress::hidden())
        }

        pub fn sums(&self, range: Range, filter: Filter) -> Result<Sums> {
            let mut all = Sums::default();
            self.figures(Span::Day, range, filter, |row| all.add(&row.sums))?;
            Ok(all)
        }
    }

    impl Store {
        /// Does something to the tables that the program itself would not do.
        pub fn tamper(&self, statements: &str) {
            let run = |session: &Session| {
                statements
                    .split(';')
                    .try_for_each(|statement| session.execute(statement, &[]).map(drop))
            };
            self.database
                .transaction(run)
                .expect("the statements should be good");
        }

        pub fn value<T: FromValue>(&self, statement: &str) -> T {
            self.database
                .read(|session| session.value(statement, &[]))
                .expect("a value")
        }
    }

    #[test]
    fn a_trial_reaches_the_disk() {
        let temporary = Temporary::sqlite();
        let size = || {
            temporary
                .folder
                .join("test.db-wal")
                .metadata()
                .expect("the WAL")
                .len()
        };
        let before = size();
        temporary
            .store
            .ledger
            .try_request()
            .expect("it should be taken");
        assert!(size() > before, "nothing was written");
        temporary.store.check().expect("it should be sound");
        temporary.open_again();
    }

    #[test]
    fn what_is_no_database_is_refused_and_left_alone() {
        let temporary = Temporary::sqlite();
        let path = temporary.folder.join("other");
        std::fs::write(
            &path,
            "something else, and long enough to have a header of its own".repeat(9),
        )
        .expect("the folder should take a file");
        let error = Store::open(&DatabaseLocation::Sqlite(path.clone()), Access::Existing)
            .err()
            .expect("it is no database");
        let error = error.to_string();
        assert!(error.contains("damaged or not a database"), "{error}");
        assert!(
            std::fs::read_to_string(&path).is_ok_and(|text| text.starts_with("something else"))
        );
        let missing = DatabaseLocation::Sqlite(temporary.folder.join("missing.db"));
        for _ in 0..2 {
            assert!(matches!(
                Store::open(&missing, Access::Existing),
                Err(DatabaseError::Missing)
            ));
        }
        assert!(
            missing.file().is_some_and(|path| !path.exists()),
            "none is made"
        );
        let nowhere = DatabaseLocation::Sqlite("/dev/null/x.db".into());
        let error = Store::open(&nowhere, Access::Create)
            .err()
            .expect("there is no such folder");
        assert!(matches!(error, DatabaseError::Io(_)), "{error}");
    }

    /// Each of these statements runs for every request or every page, and the ledger may have ten
    /// million rows.
    #[test]
    fn the_hot_statements_use_their_index() {
        let temporary = Temporary::sqlite();
        let plan = |statement: &str| {
            let explain = format!("EXPLAIN QUERY PLAN {statement}");
            let read = |row: Row| Row::new(row.values().split_off(3)).column::<String>();
            let highest = (1..9)
                .filter(|number| statement.contains(&format!("${number}")))
                .max();
            let parameters = vec![SqlValue::Null; highest.unwrap_or(0)];
            temporary
                .store
                .database
                .read(|session| session.rows(&explain, &parameters, read))
                .expect("a plan")
                .join("; ")
        };
        let find_key = &temporary.store.keys.look_up;
        let of_one_key = RowFilter {
            range: Range::ALL,
            key_id: Some("key_1".into()),
            gateway: None,
            matching: Matching::Anything,
            cause: None,
            least_ms: None,
            most_ms: None,
        };
        let failures_of_one_key = RowFilter {
            matching: Matching::Failure,
            ..of_one_key.clone()
        };
        for (statement, index) in [
            (
                find_key,
                "keys USING INDEX sqlite_autoindex_keys_2 (digest=?)",
            ),
            (
                find_key,
                "CORRELATED SCALAR SUBQUERY 1; SEARCH usage_rollup USING INDEX rollup_days (key_id=? AND start>? AND start<?)",
            ),
            (
                &ids(&failures_of_one_key, "DESC", [""; 2], 1).0,
                "usage_failed",
            ),
            (&ids(&of_one_key, "DESC", [""; 2], 1).0, "usage_by_key"),
            (
                &report::select(Some(Span::Day), Span::Day),
                "PRIMARY KEY (span=? AND start>? AND start<?)",
            ),
        ] {
            let plan = plan(statement);
            let is_good = plan.contains(index)
                && !plan.contains("TEMP B-TREE")
                && !plan.contains("MULTI-INDEX");
            assert!(is_good, "{statement}: {plan}");
        }
    }
}
