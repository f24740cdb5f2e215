//! The SQLite engine: a database in WAL mode, one connection that writes, and a few that read.
//! Reading never waits for writing.

pub mod backup;
mod connection;
mod database_files;
pub mod writer;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rusqlite::{Connection, ErrorCode, OpenFlags, ffi, params_from_iter};

pub use self::connection::{FLAGS, OpenFile, ReadOnlyFile};
use self::connection::{check_every_page, connect, is_missing, set_up};
pub use self::database_files::FileLock;
use self::database_files::{FileIdentity, Files};
pub use self::writer::WalFigures;
use self::writer::{SqliteWriter, WalCounters};
use super::{Access, EachRow, Row, Schema, Session, Statement, Value};
use crate::error::{Problem, ProblemKind, Result};
use crate::locks::{Pool, lock};

/// The number of connections that read. All are opened at the start: later the system may refuse
/// it. The console's two threads may have two of them for long, and looking up a key takes a tenth
/// of a millisecond. They are used in turn: otherwise the last one would rarely have a turn, and
/// memory would still grow after hours, with each statement that it prepares for the first time.
const READERS: usize = 4;

/// Up to this many bytes a database is checked completely at every start, which takes a few
/// milliseconds.
const CHECK_COMPLETELY: u64 = 2_097_152;

/// The time that a read waits for a connection, and for the recovery of the database after a crash.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(2);

/// The steps of SQLite's virtual machine between two looks at a read's deadline.
const STEPS: i32 = 5_000;

pub struct Sqlite {
    path: PathBuf,
    opened: FileIdentity,
    /// Set if SQLite reads it without locks.
    read_only: Option<ReadOnlyFile>,
    readers: Pool<ReadConnection>,
    wal: Arc<WalCounters>,
}

struct ReadConnection {
    connection: Connection,
    deadline: Arc<Mutex<Instant>>,
}

impl Sqlite {
    /// Also returns the connection that writes, unless the file can only be read, and whether this
    /// open has created the tables.
    pub fn open(
        path: &Path,
        schema: &Schema,
        access: Access,
    ) -> Result<(Self, Option<SqliteWriter>, bool)> {
        if is_missing(path)? && !access.may_create() {
            return Err(Problem::missing());
        }
        let OpenFile {
            path,
            identity: opened,
            connection,
            read_only,
        } = match access {
            Access::Read => OpenFile::to_read(path)?,
            _ => OpenFile::to_write(path)?,
        };
        let is_new = schema.bring_up_to_date(&session(&connection), access)?;
        if path
            .metadata()
            .is_ok_and(|file| file.len() <= CHECK_COMPLETELY)
        {
            check_every_page(&connection)?;
        }
        let files = match (access, &read_only) {
            (_, Some(_)) => None,
            // A command that only reads may find no WAL, as after a restore.
            (Access::Read, None) => Files::open(&path, opened, access).ok(),
            _ => Some(Files::open(&path, opened, access)?),
        };
        let writer = files.map(|files| SqliteWriter::new(connection, files));
        let writer = writer.transpose()?;
        let readers: Result<Vec<ReadConnection>> = (0..READERS)
            .map(|_| ReadConnection::new(open_reader(&path, read_only.as_ref())?))
            .collect();
        let sqlite = Self {
            path,
            opened,
            read_only,
            readers: Pool::new(readers?),
            wal: writer.as_ref().map(SqliteWriter::wal).unwrap_or_default(),
        };
        Ok((sqlite, writer, is_new))
    }

    /// Fails if the database was replaced after the lock was taken: another process could lock it
    /// too.
    pub fn check_lock(&self, lock: &FileLock) -> Result<()> {
        if lock.identity()? == self.opened {
            Ok(())
        } else {
            Err(Problem::files_changed())
        }
    }

    /// Reads every page of the database.
    pub fn check_every_page(&self) -> Result<()> {
        check_every_page(&open_reader(&self.path, self.read_only.as_ref())?)
    }

    pub fn wal_figures(&self) -> WalFigures {
        self.wal.figures()
    }

    /// Reads one state of the database until the deadline. Without a snapshot, each statement sees
    /// the state of its own moment.
    pub fn read<T>(
        &self,
        is_snapshot: bool,
        deadline: Instant,
        work: impl FnOnce(&Session) -> Result<T>,
    ) -> Result<T> {
        let patience = deadline.min(Instant::now() + CONNECTION_TIMEOUT);
        let reader = self.readers.take(patience, |_| true);
        let reader = reader.ok_or_else(Problem::no_connection)?;
        *lock(&reader.deadline) = deadline;
        let connection = &reader.connection;
        let begin = || connection.unchecked_transaction();
        let _snapshot = is_snapshot.then(begin).transpose()?;
        let value = work(&session(connection))?;
        // What was read may be wrong if another process has changed a file that is read without locks.
        let read_only = self.read_only.as_ref();
        read_only.map_or(Ok(()), ReadOnlyFile::check_unchanged)?;
        Ok(value)
    }

    pub fn close_readers(&self) {
        self.readers.with_free(|readers| readers.clear());
    }
}

impl ReadConnection {
    fn new(mut connection: Connection) -> Result<Self> {
        connection.busy_timeout(CONNECTION_TIMEOUT)?;
        let deadline = Arc::new(Mutex::new(Instant::now()));
        let end = Arc::clone(&deadline);
        connection.progress_handler(STEPS, Some(move || *lock(&end) < Instant::now()))?;
        Ok(Self {
            connection,
            deadline,
        })
    }
}

fn open_reader(path: &Path, read_only: Option<&ReadOnlyFile>) -> Result<Connection> {
    Ok(match read_only {
        Some(read_only) => set_up(read_only.connect()?)?,
        None => connect(path, OpenFlags::SQLITE_OPEN_READ_ONLY)?,
    })
}

/// Runs statements on a connection.
#[derive(Clone, Copy)]
pub struct SqliteSession<'a>(&'a Connection);

pub fn session(connection: &Connection) -> Session<'_> {
    Session::Sqlite(SqliteSession(connection))
}

impl SqliteSession<'_> {
    pub fn run_script(&self, script: &str) -> Result<()> {
        Ok(self.0.execute_batch(script)?)
    }

    pub fn run(&self, statements: &[Statement], each: EachRow) -> Result<Vec<usize>> {
        let mut changed = Vec::with_capacity(statements.len());
        for Statement { text, parameters } in statements {
            let mut prepared = self.0.prepare_cached(text)?;
            // For SQLite `$1` is a name, and names are numbered in the order in which they first
            // appear.
            debug_assert!(
                (1..=parameters.len())
                    .all(|n| prepared.parameter_name(n) == Some(&format!("${n}"))),
                "the parameters first appear in another order than their numbers: {text}"
            );
            let columns = prepared.column_count();
            let mut rows = prepared.query(params_from_iter(parameters))?;
            while let Some(row) = rows.next()? {
                let values: rusqlite::Result<Vec<Value>> =
                    (0..columns).map(|column| row.get(column)).collect();
                each(changed.len(), Row::new(values?))?;
            }
            changed.push(self.0.changes() as usize);
        }
        Ok(changed)
    }

    /// Runs the last statements and commits. The disk sync of a ledger row, as of every write,
    /// happens in COMMIT: with `synchronous = FULL`, SQLite returns from it after the fsync of the
    /// WAL.
    pub fn commit(&self, last: &[Statement]) -> Result<()> {
        self.run(last, &mut |_, _| Ok(()))?;
        self.run_script("COMMIT")
    }
}

impl From<rusqlite::Error> for Problem {
    fn from(error: rusqlite::Error) -> Self {
        let extended = error.sqlite_error().map(|error| error.extended_code);
        if let Some(ffi::SQLITE_IOERR_FSYNC | ffi::SQLITE_IOERR_DIR_FSYNC) = extended {
            return Self::new(
                ProblemKind::Unsafe,
                format!(
                    "fsync failed ({error}), so nothing more is written: check the disk, then restart"
                ),
            );
        }
        let (kind, text) = match error.sqlite_error_code() {
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => (
                ProblemKind::Busy,
                "the database is locked by another process",
            ),
            Some(ErrorCode::OperationInterrupted) => return Self::late(),
            Some(ErrorCode::DiskFull) => (
                ProblemKind::Full,
                "the disk is full: free some space and try again",
            ),
            Some(ErrorCode::ReadOnly) => return Self::read_only(),
            Some(ErrorCode::CannotOpen) => (
                ProblemKind::Other,
                "the database can't be opened: check that its folder exists and who owns it",
            ),
            Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => {
                return Self::damaged(error.to_string());
            }
            _ => return Self::other(error.to_string()),
        };
        Self::new(kind, text)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use rusqlite::ffi;

    use super::connection::switch_journal;
    use super::*;
    use crate::database::tests::open;
    use crate::error::ProblemKind;
    use crate::store::tests::Temporary;

    #[test]
    fn every_error_that_code_branches_on() {
        #[track_caller]
        fn check(code: i32, expected: ProblemKind) {
            let error = rusqlite::Error::SqliteFailure(ffi::Error::new(code), None);
            assert_eq!(Problem::from(error).kind, expected);
        }
        check(ffi::SQLITE_BUSY, ProblemKind::Busy);
        check(ffi::SQLITE_INTERRUPT, ProblemKind::Busy);
        check(ffi::SQLITE_FULL, ProblemKind::Full);
        check(ffi::SQLITE_NOTADB, ProblemKind::Damaged);
        check(ffi::SQLITE_IOERR_FSYNC, ProblemKind::Unsafe);
        check(ffi::SQLITE_IOERR_DIR_FSYNC, ProblemKind::Unsafe);
        check(ffi::SQLITE_IOERR_READ, ProblemKind::Other);
        check(ffi::SQLITE_ERROR, ProblemKind::Other);
    }

    #[test]
    fn a_read_ends_at_its_deadline_and_its_connection_can_be_used_again() {
        let temporary = Temporary::sqlite();
        let engine = open(&temporary.folder.join("reads.db")).expect("a new database");
        let sqlite = engine.sqlite().expect("a file");
        let endless =
            "WITH RECURSIVE n AS (SELECT 1 UNION ALL SELECT 1 FROM n) SELECT count(*) FROM n";
        let count = |time: Duration, statement: &str| {
            sqlite.read(true, Instant::now() + time, |session| {
                session.value::<i64>(statement, &[])
            })
        };
        for _ in 0..2 * READERS {
            let late = count(Duration::from_millis(20), endless).expect_err("it never ends");
            assert!(late.text.contains("took too long"), "{late}");
        }
        let found = count(Duration::from_secs(60), "SELECT 7");
        assert_eq!(found.expect("a value"), 7);
    }

    #[test]
    fn the_journal_is_switched_after_another_process_has_written() {
        let temporary = Temporary::sqlite();
        let path = temporary.folder.join("new.db");
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE;
        let [other, ours] = [(); 2].map(|()| connect(&path, flags).expect("a connection"));
        other
            .execute_batch("BEGIN IMMEDIATE; CREATE TABLE t (x)")
            .expect("a write");
        thread::scope(|scope| {
            let switched = scope.spawn(move || switch_journal(&ours, "WAL"));
            let began = Instant::now();
            while !switched.is_finished() && began.elapsed() < Duration::from_millis(100) {
                thread::yield_now();
            }
            other.execute_batch("COMMIT").expect("a commit");
            switched.join().expect("no panic").expect("it waits");
        });
    }

    #[test]
    fn few_connections_read_at_once_stay_open_and_take_turns() {
        let temporary = Temporary::sqlite();
        let engine = open(&temporary.folder.join("reads.db")).expect("a new database");
        let (reading, all) = (AtomicUsize::new(0), Barrier::new(READERS + 1));
        thread::scope(|scope| {
            for _ in 0..READERS {
                scope.spawn(|| {
                    let read = engine.read(|_| {
                        all.wait();
                        all.wait();
                        Ok(())
                    });
                    read.expect("a read");
                });
            }
            all.wait();
            let others: Vec<_> = (0..10)
                .map(|_| {
                    scope.spawn(|| {
                        engine.read(|_| {
                            reading.fetch_add(1, Ordering::Relaxed);
                            Ok(())
                        })
                    })
                })
                .collect();
            thread::sleep(Duration::from_millis(50));
            assert_eq!(
                reading.load(Ordering::Relaxed),
                0,
                "all connections are in use"
            );
            all.wait();
            others
                .into_iter()
                .for_each(|other| other.join().expect("no panic").expect("a read"));
        });
        assert_eq!(reading.load(Ordering::Relaxed), 10);
        for _ in 0..READERS {
            let create = engine.read(|session| session.execute("CREATE TEMP TABLE mine (n)", &[]));
            create.expect("a connection without this table");
        }
    }

    #[test]
    fn a_wait_for_one_of_our_own_readers_is_not_reported_as_another_process() {
        let temporary = Temporary::sqlite();
        let engine = open(&temporary.folder.join("reads.db")).expect("a new database");
        let sqlite = engine.sqlite().expect("a file");
        let now = Instant::now();
        let take = |_| sqlite.readers.take(now, |_| true).expect("a free one");
        let _all: Vec<_> = (0..READERS).map(take).collect();
        let error = engine
            .read(|_| Ok(()))
            .expect_err("all are in use")
            .to_string();
        assert!(
            error.contains("this process's connections") && !error.contains("another process"),
            "{error}"
        );
    }

    #[test]
    fn no_parameter_has_its_statement_planned_again() {
        let temporary = Temporary::sqlite();
        let path = temporary.folder.join("test.db");
        let connection = connect(&path, OpenFlags::SQLITE_OPEN_READ_ONLY).expect("it");
        // As in `begin`.
        let join =
            "SELECT 1 FROM keys, gateways WHERE keys.id = ?1 AND gateways.name = ?2 AND epoch = ?3";
        for _ in 0..3 {
            let mut statement = connection.prepare_cached(join).expect("a good statement");
            assert!(!statement.exists(("key_1", "none", 1)).expect("a look-up"));
            assert_eq!(
                statement.get_status(rusqlite::StatementStatus::RePrepare),
                0
            );
        }
    }

    /// `keys create` met a locked database while `serve` created it.
    #[test]
    fn a_start_waits_while_another_process_creates_the_database() {
        let temporary = Temporary::sqlite();
        let path = temporary.folder.join("new.db");
        let other = Connection::open(&path).expect("a connection");
        other.execute_batch("BEGIN IMMEDIATE").expect("a lock");
        thread::scope(|scope| {
            let opening = scope.spawn(|| open(&path).map(drop));
            // Enough for a start that does not wait to fail.
            thread::sleep(Duration::from_millis(300));
            other.execute_batch("COMMIT").expect("the lock is released");
            opening
                .join()
                .expect("no panic")
                .expect("it should have waited");
        });
    }

    #[test]
    fn a_check_reads_every_page() {
        let temporary = Temporary::sqlite();
        let path = temporary.folder.join("test.db");
        temporary.store.check(true).expect("it is sound");
        let connection = connect(&path, OpenFlags::SQLITE_OPEN_READ_WRITE).expect("a connection");
        connection
            .execute_batch("PRAGMA wal_checkpoint(TRUNCATE)")
            .expect("a checkpoint");
        let mut bytes = fs::read(&path).expect("the file");
        bytes.iter_mut().skip(4096).for_each(|byte| *byte = 0xff);
        fs::write(&path, bytes).expect("the same file");
        let damage = temporary.store.check(true).expect_err("it is damaged");
        assert_eq!(damage.kind, ProblemKind::Damaged);
    }
}
