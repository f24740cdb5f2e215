//! The keys, the ledger, the console's sessions and the audit, in one database.
//!
//! Two calls are on a request's path: `find_key`, which looks up the key, and `append` after the inference. A row, its
//! place in the chain and its part of the sums are one transaction (ledger.rs), which it shares with the rows that wait at
//! the same time (group_commit.rs).
//!
//! The statements are here, each written once; `engine` runs them and is the only part that knows the database library.

mod audit;
mod availability;
mod budget;
mod chain;
mod division;
mod engine;
mod error;
mod gateways;
mod group_commit;
mod grouping;
mod keys;
mod ledger;
mod ledger_row;
mod listing;
mod moving;
mod restore;
mod retention;
mod rollup;
mod sessions;
mod stored_key;
mod sums;
mod sums_check;
mod sync;
#[cfg(all(test, feature = "test-postgres"))]
#[path = "../../tests/postgres.rs"]
mod test_server;
mod test_write;
mod upgrades;

use std::sync::Mutex;

use audit::FailedSignIns;
pub use audit::{Actor, AuditRow, AuditSubject};
use availability::Availability;
pub use budget::{Budget, BudgetPeriod, KeyBudget};
pub use chain::{ChainHead, Fault, HeadStatus, Verification};
use engine::Engine;
pub use engine::postgres::{DatabaseUri, SessionLock};
use engine::sqlite::Sqlite;
pub use engine::sqlite::{BackupError, LockError};
pub use engine::{Access, Database, ServeLock};
pub use error::{Result, StoreError};
pub use gateways::{CLOCK_SLACK, Gateway};
use group_commit::GroupCommit;
pub use grouping::Grouping;
pub use keys::SecretUse;
pub use ledger_row::{LedgerRow, Tokens};
pub use listing::{Listing, Matching, RowFilter, SEARCHED_ROWS};
pub use moving::MoveResult;
pub use restore::{Comparison, KeyDifferences, LedgerExtent, Restoration, RestoreError, restore};
pub use retention::RetentionState;
pub use rollup::Span;
pub use sessions::{PasswordHash, TokenKind};
pub use stored_key::{
    CONCURRENT_TAKES, Key, KeyChange, KeyChanged, KeyName, KeyState, NewKey, Permission,
    parse_concurrent, time_left,
};
pub use sums::{Filter, RollupRow, Sums, UsageRow};
pub use sums_check::UnprovenSums;

use crate::progress::Progress;
use crate::when::DAY;
pub use crate::when::Range;

pub struct Store {
    engine: Box<dyn Engine>,
    /// The name and the epoch under which this process writes rows. Both have a row in the table `gateways`.
    gateway: String,
    epoch: i64,
    /// The query for the key of a request.
    look_up: String,
    /// Rows that wait for the leader of their group.
    appends: GroupCommit<LedgerRow, Result<()>>,
    availability: Availability,
    failed_sign_ins: Mutex<FailedSignIns>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WalFigures {
    /// The bytes of the WAL that are in use.
    pub bytes: u64,
    /// The time of the last checkpoint; `None`: none since the start.
    pub last_checkpoint: Option<i64>,
}

impl Store {
    /// Opens the database; creates or upgrades it if `access` allows that.
    pub fn open(database: &Database, access: Access) -> Result<Self> {
        Self::open_with(database, access, &Progress::none())
    }

    /// The same, with the progress of an upgrade.
    pub fn open_with(database: &Database, access: Access, progress: &Progress) -> Result<Self> {
        let engine = engine::open(database, access, progress)?;
        let store = Self {
            look_up: keys::select(&*engine, "NULL", keys::BY_DIGEST),
            engine,
            gateway: String::new(),
            epoch: 0,
            appends: GroupCommit::default(),
            availability: Availability::default(),
            failed_sign_ins: Mutex::default(),
        };
        store.look_for_damage()?;
        if !matches!(access, Access::Read | Access::Upgrade) {
            store.refuse_if_moved(database)?;
        }
        Ok(store)
    }

    /// Returns whether this open created the database.
    pub fn is_new(&self) -> bool {
        self.engine.is_new()
    }

    /// Checks every page of the database, and that a request would succeed.
    pub fn check(&self) -> Result<()> {
        self.engine.sqlite().map_or(Ok(()), Sqlite::check)?;
        self.try_request()
    }

    /// Fails if the database was replaced after the lock was taken: another process could lock it too.
    pub fn check_lock(&self, lock: &ServeLock) -> Result<()> {
        match (self.engine.sqlite(), lock) {
            (Some(sqlite), ServeLock::File(lock)) => sqlite.check_lock(lock),
            _ => Ok(()),
        }
    }

    /// Returns whether a write hangs, for which only a restart helps. A full disk or a locked database does not count: that
    /// write fails in time.
    pub fn is_stuck(&self) -> bool {
        self.engine.sqlite().is_some_and(Sqlite::is_stuck)
    }

    /// Returns figures about the WAL; zeros on PostgreSQL.
    pub fn wal_figures(&self) -> WalFigures {
        self.engine
            .sqlite()
            .map(Sqlite::wal_figures)
            .unwrap_or_default()
    }

    /// Reads what every request needs, so that a start refuses a damaged database. A small one is checked completely when
    /// it is opened, a large one would take too long.
    fn look_for_damage(&self) -> Result<()> {
        self.engine.read(|session| {
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

/// A day since 1970 as people write it.
fn date(day: i64) -> String {
    time::OffsetDateTime::from_unix_timestamp(day.saturating_mul(DAY))
        .map_or_else(|_| day.to_string(), |time| time.date().to_string())
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::{Path, PathBuf};
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::engine::{FromValue, SqlValue, Statement, values};
    #[cfg(feature = "test-postgres")]
    use super::test_server::PostgresServer;
    use super::*;

    /// A store of its own, which is removed with it. It has the keys `key_1` and `key_2`.
    pub struct Temporary {
        pub store: Store,
        pub folder: PathBuf,
        pub database: Database,
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
            Self::with(|_| Database::parse(&uri).expect("a good URI"))
        }

        /// A store for tests of SQLite only.
        pub fn sqlite() -> Self {
            Self::with(|folder| Database::Sqlite(folder.join("test.db")))
        }

        fn with(database: impl FnOnce(&Path) -> Database) -> Self {
            let folder = std::env::temp_dir()
                .join(format!("adriaticum-{}", crate::secret::secret_hex::<8>()));
            std::fs::create_dir(&folder).expect("a folder");
            let database = database(&folder);
            let mut store =
                Store::open(&database, Access::Create).expect("a new database should open");
            if let Some(sqlite) = store.engine.sqlite_mut() {
                sqlite.set_write_timeout(Duration::from_secs(1));
                sqlite.stop_syncing();
            }
            for key in ["key_1", "key_2"] {
                let insert = Statement::new(
                    "INSERT INTO keys (id, digest, name, permissions, created)
                     VALUES ($1, $2, 'name of ' || $1, 'completions', 0)",
                    values![key, crate::secret::SecretDigest::of(key).0],
                );
                store.engine.write(&[insert]).expect("a key");
            }
            Self {
                store,
                folder,
                database,
            }
        }

        /// Opens the database again, as another process would.
        pub fn open_again(&self) -> Store {
            Store::open(&self.database, Access::Existing).expect("the same database")
        }
    }

    /// Runs `meanwhile` while another thread is in a transaction that writes, after its first statements.
    pub fn while_writing(
        engine: &dyn Engine,
        begin: impl Fn(&dyn engine::SqlSession) -> Result<()> + Send,
        meanwhile: impl FnOnce(),
    ) {
        thread::scope(|scope| {
            // Dropped, `end` ends the transaction, even after a panic.
            let ((has_begun, begun), (end, ended)) = (mpsc::channel(), mpsc::channel::<()>());
            let writer = scope.spawn(move || {
                engine.transaction(|session| {
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

    impl Store {
        /// Does something to the tables that the program itself would not do.
        pub fn tamper(&self, statements: &str) {
            let run = |session: &dyn engine::SqlSession| {
                statements
                    .split(';')
                    .try_for_each(|statement| session.execute(statement, &[]).map(drop))
            };
            self.engine
                .transaction(run)
                .expect("the statements should be good");
        }

        /// Verifies without a display.
        pub fn verify(&self) -> Result<Verification> {
            self.verify_with(&Progress::none())
        }

        pub fn sums(&self, range: Range, filter: Filter) -> Result<Sums> {
            let mut all = Sums::default();
            self.figures(Span::Day, range, filter, |row| all.add(&row.sums))?;
            Ok(all)
        }

        pub fn value<T: FromValue>(&self, statement: &str) -> T {
            self.engine
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
        temporary.store.try_request().expect("it should be taken");
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
        let error = Store::open(&Database::Sqlite(path.clone()), Access::Existing)
            .err()
            .expect("it is no database");
        let error = error.to_string();
        assert!(error.contains("damaged or not a database"), "{error}");
        assert!(
            std::fs::read_to_string(&path).is_ok_and(|text| text.starts_with("something else"))
        );
        let missing = Database::Sqlite(temporary.folder.join("missing.db"));
        for _ in 0..2 {
            assert!(matches!(
                Store::open(&missing, Access::Existing),
                Err(StoreError::Missing)
            ));
        }
        assert!(
            missing.file().is_some_and(|path| !path.exists()),
            "none is made"
        );
        let nowhere = Database::Sqlite("/dev/null/x.db".into());
        let error = Store::open(&nowhere, Access::Create)
            .err()
            .expect("there is no such folder");
        assert!(matches!(error, StoreError::Io(_)), "{error}");
    }

    /// Each of these statements runs for every request or every page, and the ledger may have ten million rows.
    #[test]
    fn the_hot_statements_use_their_index() {
        let temporary = Temporary::sqlite();
        let plan = |statement: &str| {
            let explain = format!("EXPLAIN QUERY PLAN {statement}");
            let read =
                |row: engine::Row| engine::Row::new(row.values().split_off(3)).next::<String>();
            let highest = (1..9)
                .filter(|number| statement.contains(&format!("${number}")))
                .max();
            let parameters = vec![SqlValue::Null; highest.unwrap_or(0)];
            temporary
                .store
                .engine
                .read(|session| session.rows(&explain, &parameters, read))
                .expect("a plan")
                .join("; ")
        };
        let find_key = &temporary.store.look_up;
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
                &listing::ids(&failures_of_one_key, "DESC", [""; 2], 1).0,
                "usage_failed",
            ),
            (
                &listing::ids(&of_one_key, "DESC", [""; 2], 1).0,
                "usage_by_key",
            ),
            (
                &sums::statements(Span::Day)[0],
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
