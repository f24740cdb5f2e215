//! Everything that one database has: the ledger, the keys and the audit.

use std::sync::Arc;

use crate::audit::Audit;
use crate::database::sqlite::FileLock;
use crate::database::sqlite::Sqlite;
use crate::database::{Access, Database, DatabaseLocation, WalFigures};
use crate::error::{Problem, ProblemKind, Result};
use crate::keys::Keys;
use crate::ledger::{Ledger, SCHEMA, check_newest};
use crate::secret::SecretDigest;
use crate::text::shell_word;
use crate::time_zone;
use crate::when::{self, Zone};

/// The rows of each chain that a start walks back.
const NEWEST_ROWS: i64 = 10_000;

pub struct Store {
    /// The place whose days, months and times people read.
    pub zone: Zone,
    pub database: Arc<Database>,
    pub ledger: Arc<Ledger>,
    pub keys: Keys,
    pub audit: Audit,
}

#[cfg(all(test, feature = "test-postgres"))]
#[path = "../tests/postgres.rs"]
pub mod test_server;

impl Store {
    /// Opens the database; creates or upgrades it if `access` allows that.
    pub fn open(location: &DatabaseLocation, access: Access) -> Result<Self> {
        let database = Database::open(location, &SCHEMA, access)?;
        let zone = database.read(time_zone::read)?;
        let store = Self::new(Arc::new(database), zone);
        store.look_for_damage()?;
        if access != Access::Read {
            store.refuse_if_moved(location)?;
        }
        Ok(store)
    }

    fn new(database: Arc<Database>, zone: Zone) -> Self {
        Self {
            ledger: Arc::new(Ledger::new(Arc::clone(&database), zone.clone())),
            keys: Keys::new(Arc::clone(&database), zone.clone()),
            audit: Audit::new(Arc::clone(&database)),
            database,
            zone,
        }
    }

    /// The same store, once its zone was settled.
    pub fn in_zone(self, zone: Zone) -> Self {
        Self::new(self.database, zone)
    }

    /// Checks that a request would succeed and, with `all_pages`, every page of a file (a server
    /// checks its own).
    pub fn check(&self, all_pages: bool) -> Result<()> {
        if let Some(sqlite) = self.database.sqlite().filter(|_| all_pages) {
            sqlite.check_every_page()?;
        }
        // As a request does, so that what it needs is there.
        let digest = "SELECT digest FROM key_secrets ORDER BY digest LIMIT 1";
        let digest = self
            .database
            .look_up(digest, &[], |mut row| row.column().map(SecretDigest))?;
        if let Some(digest) = digest {
            self.keys.find(&digest, when::now())?;
        }
        self.ledger.try_request()
    }

    /// What `serve` checks beyond other commands: that the database was not replaced after the lock
    /// was taken, for another process could lock it too; and that the newest rows are whole, which
    /// those of an old WAL beside a newer file are not.
    pub fn check_start(&self, lock: Option<&FileLock>) -> Result<()> {
        if let (Some(sqlite), Some(lock)) = (self.database.sqlite(), lock) {
            sqlite.check_lock(lock)?;
        }
        self.database
            .report(|session| check_newest(session, NEWEST_ROWS))
    }

    /// Begins to serve under a name: no earlier process can write its rows from now on.
    pub fn join(&mut self, name: &str, address: &str) -> Result<()> {
        let ledger = Arc::get_mut(&mut self.ledger);
        ledger
            .expect("only the store has it before it serves")
            .join(name, address)
    }

    /// Figures about the WAL; zeros on PostgreSQL.
    pub fn wal_figures(&self) -> WalFigures {
        let sqlite = self.database.sqlite();
        sqlite.map(Sqlite::wal_figures).unwrap_or_default()
    }

    /// Fails if everything was moved to another database: a change here would be lost.
    pub fn refuse_if_moved(&self, location: &DatabaseLocation) -> Result<()> {
        let DatabaseLocation::Sqlite(path) = location else {
            return Ok(());
        };
        match self
            .database
            .look_up("SELECT target FROM moved", &[], |mut row| {
                row.column::<String>()
            })? {
            Some(target) => {
                let source = path.canonicalize().unwrap_or_else(|_| path.clone());
                Err(Problem::new(
                    ProblemKind::Moved,
                    format!(
                        "everything in it was moved to {target}: use that one. Only if you have given up the new one, take the \
                         mark back with: sqlite3 {} 'DELETE FROM moved'",
                        shell_word(&source.to_string_lossy())
                    ),
                ))
            }
            None => Ok(()),
        }
    }

    /// Reads what every request needs, so that a start refuses a damaged database. A small one is
    /// checked completely when it is opened, a large one would take too long.
    fn look_for_damage(&self) -> Result<()> {
        self.database.read(|session| {
            for statement in [
                "SELECT count(*) FROM keys WHERE length(name || permissions) = 0",
                "SELECT count(*) FROM key_secrets WHERE length(digest) <> 32",
                "SELECT count(*) FROM (SELECT * FROM usage ORDER BY request_id DESC LIMIT 100) AS newest",
                "SELECT count(*) FROM (SELECT hash FROM usage ORDER BY gateway DESC, seq DESC LIMIT 100) AS newest",
                "SELECT count(*) FROM (SELECT * FROM usage_days ORDER BY day DESC LIMIT 100) AS newest",
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
    use std::time::Instant;

    #[cfg(feature = "test-postgres")]
    use super::test_server::PostgresServer;
    use super::*;
    use crate::database::{CHANGE_TIMEOUT, FromSql, Row, Session, Value, WriteConnection, values};
    use crate::ledger::{Filter, Span, Sums, Verification};
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
            let store = open_unsynced(&database, Access::Create);
            for key in ["key_1", "key_2"] {
                let insert = |session: &Session| {
                    let insert = "INSERT INTO keys (id, name, permissions, created)
                        VALUES ($1, 'name of ' || $1, 'completions', 0)";
                    session.execute(insert, &values![key])?;
                    let insert = "INSERT INTO key_secrets (digest, key_id, hint, created)
                        VALUES ($1, $2, 'hint of ' || $2, 0)";
                    session.execute(insert, &values![SecretDigest::of(key).0, key])
                };
                store.database.change(insert).expect("a key");
            }
            Self {
                store,
                folder,
                database,
            }
        }

        /// Has the days of another place from now on.
        pub fn set_zone(&mut self, zone: Zone) {
            self.store = Store::new(Arc::clone(&self.store.database), zone);
        }

        /// Opens the database again, as another process would.
        pub fn open_again(&self) -> Store {
            Store::open(&self.database, Access::Existing).expect("the same database")
        }
    }

    /// Tests write thousands of rows, and none of them cuts the power.
    fn open_unsynced(location: &DatabaseLocation, access: Access) -> Store {
        let store = Store::open(location, access).expect("the database should open");
        let unsynced = |connection: &mut WriteConnection| {
            if let Some(writer) = connection.sqlite() {
                writer.stop_syncing();
            }
            Ok(())
        };
        store.database.with_writer(unsynced).expect("a setting");
        store
    }

    impl Database {
        /// `transaction` for work that borrows.
        pub fn change<T>(&self, work: impl Fn(&Session) -> Result<T>) -> Result<T> {
            let deadline = Instant::now() + CHANGE_TIMEOUT;
            self.with_writer(|connection| connection.transaction(deadline, None, work))
        }
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
                database.change(|session| {
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
            self.verify_with(&crate::progress::Progress::hidden())
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
                .change(run)
                .expect("the statements should be good");
        }

        /// The plan of SQLite for a statement.
        pub fn plan(&self, statement: &str) -> String {
            let explain = format!("EXPLAIN QUERY PLAN {statement}");
            let read = |row: Row| Row::new(row.values().split_off(3)).column::<String>();
            let highest = (1..9).filter(|number| statement.contains(&format!("${number}")));
            let parameters = vec![Value::Null; highest.max().unwrap_or(0)];
            let plan = |session: &Session| session.rows(&explain, &parameters, read);
            self.database.read(plan).expect("a plan").join("; ")
        }

        pub fn value<T: FromSql>(&self, statement: &str) -> T {
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
        temporary.store.check(true).expect("it should be sound");
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
                Err(problem) if problem.kind == ProblemKind::Missing
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
        assert_eq!(error.kind, ProblemKind::Other, "{error}");
    }

    /// It runs for every request, and the ledger may have ten million rows.
    #[test]
    fn the_look_up_of_a_key_uses_indexes() {
        let temporary = Temporary::sqlite();
        let plan = temporary.store.plan(&temporary.store.keys.look_up);
        for index in [
            "key_secrets USING PRIMARY KEY (digest=?)",
            "CORRELATED SCALAR SUBQUERY 1; SEARCH usage_days USING PRIMARY KEY (key_id=? AND day>? AND day<?)",
        ] {
            assert!(plan.contains(index), "{plan}");
        }
    }
}
