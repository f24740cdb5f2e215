//! The connections while threads use them: each has one for one transaction. Those that write take
//! turns with one connection.

use std::cell::Cell;
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::Connection;

use super::read_only_file::ReadOnlyFile;
use super::session::SqliteSession;
use super::{Sqlite, checkpoint};
use crate::database::error::{DatabaseError, Result};
use crate::database::statement::{Statement, TransactionMode};
use crate::mutex::lock;
use crate::semaphore::Permit;

/// The time that a read waits for a connection, and for the recovery of the database after a crash.
const READ_TIMEOUT: Duration = Duration::from_secs(2);

/// The time that a checkpoint waits for its turn: the row of this thread is durable, and its client
/// waits.
const TURN_TIMEOUT: Duration = Duration::from_millis(100);

/// There are locks for which SQLite does not wait by itself.
const RETRY_PAUSE: Duration = Duration::from_millis(1);

impl Sqlite {
    /// Returns whether a write has had the connection for longer than one may take: the disk or the
    /// file system hangs.
    pub fn is_stuck(&self) -> bool {
        let longest = self.append_timeout + self.write_timeout;
        lock(&self.writer.writing).is_some_and(|began| began.elapsed() > longest)
    }

    pub fn begin(&self, mode: TransactionMode) -> Result<SqliteTransaction<'_>> {
        match mode {
            TransactionMode::Statement => self.reader(false),
            TransactionMode::Read | TransactionMode::Report => self.reader(true),
            TransactionMode::Write => self.begin_write(Instant::now() + self.write_timeout),
            TransactionMode::WriteUntil(deadline) | TransactionMode::Append(deadline) => {
                self.begin_write(deadline)
            }
        }
    }

    /// A connection that reads. Without a transaction, each statement sees the state of its own
    /// moment.
    pub(super) fn reader(&self, in_transaction: bool) -> Result<SqliteTransaction<'_>> {
        let turn = self
            .reading
            .acquire(Instant::now() + READ_TIMEOUT)
            .ok_or(DatabaseError::NoConnection)?;
        let idle = lock(&self.readers).pop_front();
        let connection = match idle {
            Some(connection) => connection,
            None => {
                let connection = self.new_reader()?;
                connection.busy_timeout(READ_TIMEOUT)?;
                connection
            }
        };
        if in_transaction {
            connection.prepare_cached("BEGIN")?.execute([])?;
        }
        Ok(SqliteTransaction::new(self, turn, Some(connection), false))
    }

    /// Begins a transaction. Waits for its turn and for other processes until the deadline.
    pub(super) fn begin_write(&self, deadline: Instant) -> Result<SqliteTransaction<'_>> {
        let write = self.take_writer(deadline)?;
        loop {
            match write.begin(deadline) {
                Err(DatabaseError::Busy) if Instant::now() < deadline => thread::sleep(RETRY_PAUSE),
                begun => return begun.map(|()| write),
            }
        }
    }

    /// Runs a checkpoint if the WAL has become large.
    pub fn checkpoint_if_due(&self) {
        self.wal.checkpoint_if_due(|| {
            let turn = self.take_writer(Instant::now() + TURN_TIMEOUT)?;
            let checkpoint = "PRAGMA wal_checkpoint(PASSIVE)";
            self.files
                .remember_failed_sync(checkpoint::run(turn.connection(), checkpoint))
        });
    }

    /// The connection that writes, before its transaction begins.
    pub(super) fn take_writer(&self, deadline: Instant) -> Result<SqliteTransaction<'_>> {
        let turn = self
            .writer
            .turn
            .acquire(deadline)
            .ok_or(DatabaseError::Busy)?;
        *lock(&self.writer.writing) = Some(Instant::now());
        Ok(SqliteTransaction::new(
            self,
            turn,
            lock(&self.writer.connection).take(),
            true,
        ))
    }
}

/// A transaction, or one statement that reads, and the connection that it runs on. Dropping it
/// rolls back what is not committed and gives the connection back, even after an error or a panic.
/// A read that did not commit closes its connection instead, and the next reader opens another one.
pub struct SqliteTransaction<'a> {
    sqlite: &'a Sqlite,
    /// `None` only while it is dropped.
    connection: Option<Connection>,
    is_write: bool,
    is_committed: Cell<bool>,
    /// Released after the connection was given back.
    _turn: Permit<'a>,
}

impl<'a> SqliteTransaction<'a> {
    fn new(
        sqlite: &'a Sqlite,
        turn: Permit<'a>,
        connection: Option<Connection>,
        is_write: bool,
    ) -> Self {
        Self {
            sqlite,
            connection,
            is_write,
            is_committed: Cell::new(false),
            _turn: turn,
        }
    }

    pub(super) fn connection(&self) -> &Connection {
        self.connection
            .as_ref()
            .expect("a transaction should have its connection until it is dropped")
    }

    /// Checks that writing makes sense, and waits for other processes until the deadline.
    fn begin(&self, deadline: Instant) -> Result<()> {
        self.sqlite
            .files
            .check(|| checkpoint::in_use(self.connection()))?;
        self.connection()
            .busy_timeout(deadline.saturating_duration_since(Instant::now()))?;
        self.connection()
            .prepare_cached("BEGIN IMMEDIATE")?
            .execute([])?;
        Ok(())
    }

    pub fn session(&self) -> SqliteSession<'_> {
        SqliteSession {
            connection: self.connection(),
            files: Some(&self.sqlite.files),
            read_only: self.sqlite.read_only.as_ref(),
        }
    }

    /// Runs the last statements and commits. The disk sync of a ledger row, as of every write,
    /// happens in COMMIT: with `synchronous = FULL`, SQLite returns from it after the fsync of the
    /// WAL.
    pub fn run_and_commit(&self, statements: &[Statement]) -> Result<Vec<usize>> {
        let changed = self.session().run(statements, &mut |_, _| Ok(()))?;
        if !self.connection().is_autocommit() {
            let commit = || Ok(self.connection().prepare_cached("COMMIT")?.execute([])?);
            self.sqlite.files.remember_failed_sync(commit())?;
        }
        self.is_committed.set(true);
        self.sqlite
            .read_only
            .as_ref()
            .map_or(Ok(()), ReadOnlyFile::check)?;
        Ok(changed)
    }
}

impl Drop for SqliteTransaction<'_> {
    fn drop(&mut self) {
        if !self.is_write {
            let sound = self.connection.take().filter(|_| self.is_committed.get());
            lock(&self.sqlite.readers).extend(sound);
            return;
        }
        // After some errors SQLite has rolled back already.
        if !self.connection().is_autocommit() {
            let _ = self.connection().execute_batch("ROLLBACK");
        }
        *lock(&self.sqlite.writer.connection) = self.connection.take();
        *lock(&self.sqlite.writer.writing) = None;
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rusqlite::ffi;

    use super::*;
    use crate::database::Database;
    use crate::database::sqlite::WRITE_TIMEOUT;
    use crate::database::tests::open;
    use crate::database::{Session, values};
    use crate::store::tests::{Temporary, while_writing};

    impl SqliteTransaction<'_> {
        pub fn set_unsynced(&self) {
            self.connection()
                .execute_batch("ROLLBACK; PRAGMA synchronous = OFF")
                .expect("a setting");
        }
    }

    fn engine(timeout: Duration) -> (Temporary, Database) {
        let temporary = Temporary::sqlite();
        let mut engine = open(&temporary.folder.join("writer.db")).expect("a database");
        if let Database::Sqlite(sqlite) = &mut engine {
            sqlite.set_write_timeout(timeout);
        }
        engine
            .transaction(|session| {
                session.execute("CREATE TABLE t (x INTEGER CHECK (x <> 13))", &[])
            })
            .expect("a table");
        (temporary, engine)
    }

    fn insert(engine: &Database, number: i64) -> Result<usize> {
        engine.transaction(|session| session.execute("INSERT INTO t VALUES ($1)", &values![number]))
    }

    fn numbers(engine: &Database) -> Vec<i64> {
        let read = |session: &Session| {
            session.rows("SELECT x FROM t ORDER BY x", &[], |mut row| row.column())
        };
        engine.read(read).expect("the numbers")
    }

    /// Runs `meanwhile` while another thread has the connection.
    fn while_taken(engine: &Database, meanwhile: impl FnOnce()) {
        while_writing(engine, |_| Ok(()), meanwhile);
    }

    #[test]
    fn a_write_that_times_out_leaves_the_connection_usable() {
        let (_temporary, engine) = engine(Duration::from_millis(30));
        while_taken(&engine, || {
            assert!(matches!(insert(&engine, 4), Err(DatabaseError::Busy)))
        });
        insert(&engine, 5).expect("the connection was given back");
        assert_eq!(numbers(&engine), [5], "what timed out was not written");
    }

    #[test]
    fn a_write_that_waits_has_its_turn() {
        let (_temporary, engine) = engine(Duration::from_secs(600));
        thread::scope(|scope| {
            let mut waiting = None;
            while_taken(&engine, || {
                waiting = Some(scope.spawn(|| insert(&engine, 1)))
            });
            waiting
                .expect("a thread")
                .join()
                .expect("no panic")
                .expect("its turn");
        });
    }

    #[test]
    fn a_write_ends_within_its_timeout_if_another_process_has_the_database() {
        let (temporary, engine) = engine(Duration::from_millis(300));
        let other = Connection::open(temporary.folder.join("writer.db")).expect("the database");
        other.execute_batch("BEGIN IMMEDIATE").expect("a lock");
        let began = Instant::now();
        thread::scope(|scope| {
            for number in 0..4 {
                let engine = &engine;
                scope.spawn(move || {
                    assert!(matches!(insert(engine, number), Err(DatabaseError::Busy)))
                });
            }
        });
        assert!(
            began.elapsed() < Duration::from_secs(9),
            "{:?}",
            began.elapsed()
        );
        assert!(!engine.is_stuck(), "it answers that it is locked");
        drop(other);
        insert(&engine, 7).expect("the lock is gone");
        assert_eq!(numbers(&engine), [7]);
    }

    #[test]
    fn a_panic_or_an_error_gives_the_connection_back_and_rolls_back() {
        let (_temporary, engine) = engine(WRITE_TIMEOUT);
        let write = |session: &Session| -> Result<()> {
            session.execute("INSERT INTO t VALUES (1)", &[])?;
            panic!("on purpose");
        };
        let panicked =
            thread::scope(|scope| scope.spawn(|| engine.transaction(write)).join().is_err());
        assert!(panicked);
        let failing = |session: &Session| {
            session.execute("INSERT INTO t VALUES (1)", &[])?;
            session.execute("INSERT INTO t VALUES (13)", &[])
        };
        assert!(engine.transaction(failing).is_err());
        insert(&engine, 2).expect("the connection was given back");
        assert_eq!(numbers(&engine), [2]);
    }

    #[test]
    fn a_write_that_hangs_is_reported() {
        let (_temporary, patient) = engine(Duration::from_secs(600));
        while_taken(&patient, || assert!(!patient.is_stuck(), "it has time"));
        let (_temporary, engine) = engine(Duration::from_millis(20));
        assert!(!engine.is_stuck());
        let until_stuck = || {
            while !engine.is_stuck() {
                thread::yield_now()
            }
        };
        while_taken(&engine, until_stuck);
        assert!(!engine.is_stuck());
    }

    #[test]
    fn a_commit_is_synced() {
        let (_temporary, engine) = engine(WRITE_TIMEOUT);
        let turn = engine
            .sqlite()
            .expect("a file")
            .take_writer(Instant::now())
            .expect("its turn");
        let synchronous: i64 = turn
            .connection()
            .pragma_query_value(None, "synchronous", |row| row.get(0))
            .expect("the setting");
        assert_eq!(synchronous, 2, "FULL");
    }

    #[test]
    fn a_wal_that_another_process_empties_is_good_only_if_nothing_of_it_is_in_use() {
        let (temporary, engine) = engine(WRITE_TIMEOUT);
        insert(&engine, 1).expect("a write");
        let other = Connection::open(temporary.folder.join("writer.db")).expect("the database");
        let truncate = "PRAGMA wal_checkpoint(TRUNCATE)";
        let is_blocked: bool = other
            .query_row(truncate, [], |row| row.get(0))
            .expect("a checkpoint");
        assert!(!is_blocked);
        insert(&engine, 2).expect("all of the WAL is in the database");
        insert(&engine, 3).expect("a write");
        let wal = File::options()
            .write(true)
            .open(temporary.folder.join("writer.db-wal"));
        wal.and_then(|wal| wal.set_len(0)).expect("the WAL");
        for number in [4, 5] {
            assert!(matches!(
                insert(&engine, number),
                Err(DatabaseError::Replaced)
            ));
        }
    }

    #[test]
    fn after_a_failed_fsync_of_sqlite_nothing_is_written() {
        let (_temporary, engine) = engine(WRITE_TIMEOUT);
        let fail = |code: i32| {
            let failure = |code| rusqlite::Error::SqliteFailure(ffi::Error::new(code), None);
            let fails = |session: &Session| {
                session.query("SELECT 1", &[], &mut |_| {
                    Err(DatabaseError::from(failure(code)))
                })
            };
            engine.transaction(fails).expect_err("it fails");
        };
        fail(ffi::SQLITE_IOERR_READ);
        insert(&engine, 1).expect("another error ends nothing");
        fail(ffi::SQLITE_IOERR_FSYNC);
        assert!(matches!(
            insert(&engine, 2),
            Err(DatabaseError::NotSynced(_))
        ));
        assert_eq!(numbers(&engine), [1]);
    }
}
