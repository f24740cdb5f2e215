//! The connection that writes to a file: transactions, checkpoints, and what ends them for good.
//!
//! SQLite's automatic checkpoints ignore a failed fsync, after which acknowledged rows can be lost,
//! so they are off. Instead, the writer thread runs one when the WAL has become large: nothing else
//! is written meanwhile, so all of the WAL is moved and the next write begins it again. Only a long
//! read can hold a part of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use rusqlite::{Connection, ErrorCode, Transaction, TransactionBehavior};

use super::database_files::{FRAME, Files};
use super::session;
use crate::database::Session;
use crate::error::{Problem, ProblemKind, Result};
use crate::when;

/// The number of pages that make a checkpoint worth its fsync.
const CHECKPOINT_PAGES: u64 = 1_000;

/// The number of pages after which a checkpoint is tried again that a read held up. Most reads take
/// a millisecond, and the smallest disk has no space for twice the pages of a checkpoint. While a
/// long read goes on, an attempt finds nothing to move, and has no fsync.
const RETRY_PAGES: u64 = 100;

/// The bytes that the WAL's file keeps once it begins again: twice the pages of a checkpoint.
const FILE_LIMIT: i64 = 8 * 1024 * 1024;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WalFigures {
    /// The bytes of the WAL that are in use.
    pub bytes: u64,
    /// The time of the last checkpoint; `None`: none since the start.
    pub last_checkpoint: Option<i64>,
}

#[derive(Default)]
pub struct WalCounters {
    /// The pages of the WAL after the last commit of this process.
    pages: AtomicU64,
    /// The time of the last checkpoint; 0: none since the start.
    last_checkpoint: AtomicI64,
}

impl WalCounters {
    pub fn figures(&self) -> WalFigures {
        WalFigures {
            bytes: self.pages.load(Ordering::Relaxed) * FRAME,
            last_checkpoint: Some(self.last_checkpoint.load(Ordering::Relaxed))
                .filter(|&time| time != 0),
        }
    }
}

pub struct SqliteWriter {
    pub(super) connection: Connection,
    files: Files,
    wal: Arc<WalCounters>,
    /// The number of pages at which the next checkpoint runs.
    checkpoint_at: u64,
    /// The reason why nothing is written any more. After a failed fsync the content of the disk is
    /// unknown, and a later fsync would not report it.
    failed: Option<Problem>,
}

impl SqliteWriter {
    /// Counts the pages of the WAL from now on, after each commit of this connection.
    pub fn new(mut connection: Connection, mut files: Files) -> Result<Self> {
        // COMMIT syncs the WAL.
        connection.pragma_update(None, "synchronous", "FULL")?;
        connection.pragma_update(None, "journal_size_limit", FILE_LIMIT)?;
        let (pages, moved) = match wal_pages(&connection) {
            // SQLite does not say it for a WAL that can't be written, and only a writer needs it.
            Err(error) if error.sqlite_error_code() == Some(ErrorCode::ReadOnly) => (0, 0),
            pages => pages?,
        };
        files.note_commit(pages);
        files.note_checkpoint(moved);
        let wal = Arc::new(WalCounters::default());
        wal.pages.store(pages, Ordering::Relaxed);
        let counted = Arc::clone(&wal);
        connection.wal_hook(Some(move |_: &mut rusqlite::hooks::Wal, pages| {
            counted
                .pages
                .store(u64::try_from(pages).unwrap_or(0), Ordering::Relaxed);
            Ok(())
        }))?;
        // This process polls: see `WriteConnection::commit`.
        connection.busy_timeout(std::time::Duration::ZERO)?;
        Ok(Self {
            connection,
            files,
            wal,
            checkpoint_at: CHECKPOINT_PAGES,
            failed: None,
        })
    }

    pub fn wal(&self) -> Arc<WalCounters> {
        Arc::clone(&self.wal)
    }

    /// Runs `work` in a transaction, which it commits; else that is rolled back, even after a panic.
    pub fn transaction<T>(&mut self, work: impl FnOnce(&Session) -> Result<T>) -> Result<T> {
        self.check_files()?;
        let begin = TransactionBehavior::Immediate;
        let transaction = Transaction::new_unchecked(&self.connection, begin)?;
        let done = work(&session(&transaction));
        drop(transaction);
        self.files
            .note_commit(self.wal.pages.load(Ordering::Relaxed));
        self.remember(done)
    }

    /// Checks that the open files are still those at their paths, and that no other program has
    /// changed them, so that a write is not lost at the next start.
    pub fn check_files(&mut self) -> Result<()> {
        if let Some(failed) = &self.failed {
            return Err(failed.clone());
        }
        let connection = &self.connection;
        let checked = self.files.check_unchanged(|| Ok(wal_pages(connection)?));
        self.remember(checked)
    }

    /// Returns the result unchanged. If it is a failed fsync or a lost file, every later write fails
    /// with it.
    fn remember<T>(&mut self, result: Result<T>) -> Result<T> {
        if let Err(problem) = &result
            && problem.kind == ProblemKind::Unsafe
        {
            self.failed.get_or_insert_with(|| problem.clone());
        }
        result
    }

    /// Moves the WAL into the database if it has become large.
    pub fn checkpoint_if_due(&mut self) -> Result<()> {
        if self.failed.is_some() || self.wal.pages.load(Ordering::Relaxed) < self.checkpoint_at {
            return Ok(());
        }
        self.check_files()?;
        let run = checkpoint(&self.connection, "PRAGMA wal_checkpoint(PASSIVE)");
        let moved = self.remember(run.map_err(Problem::from));
        match &moved {
            Ok((pages, moved)) => {
                self.files.note_checkpoint(*moved);
                self.wal
                    .last_checkpoint
                    .store(when::now(), Ordering::Relaxed);
                self.checkpoint_at = if moved < pages {
                    pages + RETRY_PAGES
                } else {
                    CHECKPOINT_PAGES
                };
            }
            Err(_) => {
                self.checkpoint_at = self.wal.pages.load(Ordering::Relaxed) + CHECKPOINT_PAGES;
            }
        }
        moved.map(drop)
    }
}

/// The pages of the WAL that are in use, and those of them that are in the database.
fn wal_pages(connection: &Connection) -> rusqlite::Result<(u64, u64)> {
    checkpoint(connection, "PRAGMA wal_checkpoint(NOOP)")
}

fn checkpoint(connection: &Connection, checkpoint: &str) -> rusqlite::Result<(u64, u64)> {
    let number = |number: i64| u64::try_from(number).unwrap_or(0);
    connection.query_row(checkpoint, [], |row| {
        Ok((number(row.get(1)?), number(row.get(2)?)))
    })
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::time::{Duration, Instant};

    use rusqlite::{OpenFlags, ffi};

    use super::super::connection::connect;
    use super::*;
    use crate::database::tests::open;
    use crate::database::{Access, CHANGE_TIMEOUT, Database, DatabaseLocation, Session, values};
    use crate::ledger::SCHEMA;
    use crate::store::tests::{Temporary, while_writing};

    impl SqliteWriter {
        pub fn stop_syncing(&self) {
            let off = self.connection.pragma_update(None, "synchronous", "OFF");
            off.expect("a setting");
        }
    }

    fn engine() -> (Temporary, Database) {
        let temporary = Temporary::sqlite();
        let engine = open(&temporary.folder.join("writer.db")).expect("a database");
        let create = "CREATE TABLE t (x CHECK (x <> 13))";
        engine
            .change(|session| session.execute(create, &[]))
            .expect("a table");
        (temporary, engine)
    }

    fn insert(engine: &Database, number: i64) -> Result<usize> {
        engine.change(|session| session.execute("INSERT INTO t VALUES ($1)", &values![number]))
    }

    fn numbers(engine: &Database) -> Vec<i64> {
        let read = |session: &Session| {
            session.rows("SELECT x FROM t ORDER BY x", &[], |mut row| row.column())
        };
        engine.read(read).expect("the numbers")
    }

    /// Does something with the connection that writes.
    fn with<T>(engine: &Database, work: impl FnOnce(&mut SqliteWriter) -> T) -> T {
        engine
            .with_writer(|connection| Ok(work(connection.sqlite().expect("a file"))))
            .expect("it can be written")
    }

    #[test]
    fn a_write_waits_for_another_process_until_its_deadline() {
        let (temporary, engine) = engine();
        let other = Connection::open(temporary.folder.join("writer.db")).expect("the database");
        other.execute_batch("BEGIN IMMEDIATE").expect("a lock");
        let write = |time: Duration| {
            engine.with_writer(|connection| {
                connection.transaction(Instant::now() + time, None, |session| {
                    session.execute("INSERT INTO t VALUES (7)", &[])
                })
            })
        };
        let late = write(Duration::from_millis(30)).expect_err("it is locked");
        assert_eq!(late.kind, ProblemKind::Busy);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| write(CHANGE_TIMEOUT));
            other.execute_batch("COMMIT").expect("the end of the lock");
            waiting.join().expect("no panic").expect("its turn");
        });
        assert_eq!(numbers(&engine), [7], "what was late was not written");
    }

    #[test]
    fn a_panic_or_an_error_rolls_back() {
        let (_temporary, engine) = engine();
        let write = |session: &Session| -> Result<()> {
            session.execute("INSERT INTO t VALUES (1)", &[])?;
            panic!("on purpose");
        };
        let panicked = std::thread::scope(|scope| scope.spawn(|| engine.change(write)).join());
        assert!(panicked.is_err());
        let failing = |session: &Session| {
            session.execute("INSERT INTO t VALUES (1)", &[])?;
            session.execute("INSERT INTO t VALUES (13)", &[])
        };
        assert!(engine.change(failing).is_err());
        insert(&engine, 2).expect("the connection can be used");
        assert_eq!(numbers(&engine), [2]);
    }

    #[test]
    fn reading_does_not_wait_for_writing() {
        let (_temporary, engine) = engine();
        let write = |session: &Session| session.execute("INSERT INTO t VALUES (1)", &[]).map(drop);
        while_writing(&engine, write, || assert!(numbers(&engine).is_empty()));
        assert_eq!(numbers(&engine), [1]);
    }

    #[test]
    fn a_commit_is_synced() {
        let (_temporary, engine) = engine();
        let synchronous: i64 = with(&engine, |writer| {
            let get = |row: &rusqlite::Row| row.get(0);
            writer
                .connection
                .pragma_query_value(None, "synchronous", get)
                .expect("the setting")
        });
        assert_eq!(synchronous, 2, "FULL");
    }

    #[track_caller]
    fn check_final(engine: &Database) {
        for number in [101, 102] {
            let refused = insert(engine, number).expect_err("nothing is written");
            assert_eq!(refused.kind, ProblemKind::Unsafe, "{refused}");
        }
    }

    #[test]
    fn a_wal_that_another_process_empties_is_good_only_if_nothing_of_it_is_in_use() {
        let (temporary, engine) = engine();
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
        check_final(&engine);
    }

    #[test]
    fn a_file_that_is_removed_ends_writing() {
        for suffix in ["", "-wal", "-shm"] {
            let (temporary, engine) = engine();
            insert(&engine, 1).expect("a write");
            let file = temporary.folder.join(format!("writer.db{suffix}"));
            fs::remove_file(file).expect("the file");
            check_final(&engine);
        }
    }

    #[test]
    fn another_content_under_the_same_name_ends_writing() {
        let (temporary, engine) = engine();
        let path = temporary.folder.join("writer.db");
        insert(&engine, 1).expect("a write");
        let copy = temporary.folder.join("copy.db");
        let reader = connect(&path, OpenFlags::SQLITE_OPEN_READ_ONLY).expect("a reader");
        reader
            .execute("VACUUM INTO ?1", [copy.to_string_lossy().as_ref()])
            .expect("a copy");
        insert(&engine, 2).expect("a backup changes nothing");
        let bytes = fs::read(&copy).expect("the copy");
        fs::write(&path, bytes).expect("the same file");
        check_final(&engine);
    }

    #[test]
    fn checkpoints_of_any_process_are_no_change_of_the_content() {
        let (temporary, engine) = engine();
        let other = Connection::open(temporary.folder.join("writer.db")).expect("the database");
        let checkpoint = |kind: &str| {
            let run = format!("PRAGMA wal_checkpoint({kind})");
            other.query_row(&run, [], |_| Ok(())).expect("a checkpoint");
        };
        for (number, kind) in (1..).zip(["PASSIVE", "FULL", "RESTART", "TRUNCATE", "PASSIVE"]) {
            insert(&engine, number * 10).expect("a write");
            checkpoint(kind);
            insert(&engine, number * 10 + 1).expect("it was only moved");
            with(&engine, |writer| {
                writer.checkpoint_at = 1;
                writer.checkpoint_if_due().expect("our own");
            });
            insert(&engine, number * 10 + 2).expect("a write");
        }
    }

    /// Beside full load, the WAL begins again between two attempts of a command.
    #[test]
    fn a_command_writes_after_checkpoints_of_the_service() {
        let (temporary, engine) = engine();
        let location = DatabaseLocation::Sqlite(temporary.folder.join("writer.db"));
        let command = Database::open(&location, &SCHEMA, Access::Existing);
        let command = command.expect("the same database");
        for round in 1..5 {
            insert(&command, round * 1000).expect("a write");
            with(&engine, |writer| {
                writer.checkpoint_at = 1;
                writer.checkpoint_if_due().expect("a checkpoint");
            });
            // More than there were.
            for number in 1..30 * round {
                insert(&engine, round * 1000 + number).expect("a write");
            }
        }
    }

    #[test]
    fn after_a_failed_fsync_of_sqlite_nothing_is_written() {
        let (_temporary, engine) = engine();
        let fail = |code: i32| {
            let failure = |code| rusqlite::Error::SqliteFailure(ffi::Error::new(code), None);
            with(&engine, |writer| {
                let _ = writer.remember::<()>(Err(Problem::from(failure(code))));
            });
        };
        fail(ffi::SQLITE_IOERR_READ);
        insert(&engine, 1).expect("another error ends nothing");
        fail(ffi::SQLITE_IOERR_FSYNC);
        check_final(&engine);
        assert_eq!(numbers(&engine), [1]);
    }

    fn write_pages(engine: &Database, pages: usize) {
        let fill = |session: &Session| {
            (0..pages).try_for_each(|_| {
                session
                    .execute("INSERT INTO t VALUES (zeroblob(4000))", &[])
                    .map(drop)
            })
        };
        engine.change(fill).expect("some pages");
        with(engine, |writer| writer.checkpoint_if_due()).expect("a checkpoint");
    }

    fn figures(engine: &Database) -> WalFigures {
        engine.sqlite().expect("a file").wal_figures()
    }

    #[test]
    fn a_checkpoint_runs_from_a_thousand_pages_on() {
        let (temporary, engine) = engine();
        write_pages(&engine, 500);
        assert_eq!(figures(&engine).last_checkpoint, None, "too little to move");
        let file = || {
            let wal = temporary.folder.join("writer.db-wal").metadata();
            wal.expect("the WAL").len()
        };
        assert_eq!(figures(&engine).bytes + 32, file(), "all but its header");
        write_pages(&engine, 600);
        let last = figures(&engine).last_checkpoint;
        assert!(last.is_some_and(|time| time > when::now() - 600));
        write_pages(&engine, 1);
        assert!(figures(&engine).bytes < 10 * FRAME, "the WAL begins again");
        for _ in 0..5 {
            write_pages(&engine, 2000);
        }
        write_pages(&engine, 1);
        let bytes = file();
        assert!(bytes <= FILE_LIMIT as u64 + 32, "its file is cut: {bytes}");
    }

    #[test]
    fn a_read_holds_the_wal_and_the_next_attempt_follows_soon() {
        let (temporary, engine) = engine();
        let path = temporary.folder.join("writer.db");
        let reader = connect(&path, OpenFlags::SQLITE_OPEN_READ_ONLY).expect("a reader");
        reader
            .execute_batch("BEGIN; SELECT count(*) FROM t")
            .expect("a long read");
        write_pages(&engine, 1100);
        let due = || with(&engine, |writer| writer.checkpoint_at);
        let next = due();
        assert!(
            (1200..1400).contains(&next),
            "not at the next write: {next}"
        );
        write_pages(&engine, 1);
        assert_eq!(due(), next);
        assert!(figures(&engine).bytes > 1100 * 4096, "it grows");
        reader.execute_batch("COMMIT").expect("its end");
        write_pages(&engine, 200);
        write_pages(&engine, 1);
        assert!(figures(&engine).bytes < 10 * FRAME, "the WAL begins again");
        assert_eq!(due(), CHECKPOINT_PAGES);
    }

    #[test]
    fn no_connection_runs_a_checkpoint_by_itself() {
        let (temporary, _engine) = engine();
        let path = temporary.folder.join("writer.db");
        for mode in [
            OpenFlags::SQLITE_OPEN_READ_ONLY,
            OpenFlags::SQLITE_OPEN_READ_WRITE,
        ] {
            let connection = connect(&path, mode).expect("a connection");
            let pages: i64 = connection
                .pragma_query_value(None, "wal_autocheckpoint", |row| row.get(0))
                .expect("the setting");
            assert_eq!(pages, 0);
        }
    }
}
