//! The SQLite engine: a database in WAL mode, one connection that writes, and a few that read. Reading never waits for
//! writing.

mod checkpoint;
mod conversions;
mod database_files;
mod lock;
mod replacement;
mod transaction;
mod upgrades;

use std::collections::VecDeque;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags, params_from_iter};
use rustix::fs::Access as FileAccess;

use self::checkpoint::WalState;
use self::database_files::Files;
pub use self::lock::{FileLock, LockError};
pub use self::replacement::{PresentDatabase, Replacement};
use self::transaction::{WRITE_TIMEOUT, Writer};
use super::{
    APPEND_TIMEOUT, Access, BoundStatement, EachRow, Engine, Row, SqlSession, SqlValue, Transaction,
    TransactionMode,
};
use crate::files::with_suffix;
use crate::progress::Progress;
use crate::read_only_file::{ReadOnlyFile, check_usable};
use crate::semaphore::Semaphore;
use crate::store::{Result, StoreError};

/// The time that a new connection waits for other processes.
const START_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection's page cache in KiB: enough for the pages that a request reads and writes.
const PAGE_CACHE: i64 = 128;

/// The number of connections that read; they stay open. The console's two threads may have two of them for long, and looking
/// up a key takes a tenth of a millisecond. More would not be faster, but a moment of many reads would keep their memory and
/// their descriptors. They are used in turn: otherwise the last one would rarely have a turn, and memory would still grow
/// after hours, with each statement that it prepares for the first time.
const READERS: usize = 4;

/// The number of prepared statements that a connection keeps: more than there are on a request's path.
const STATEMENTS: usize = 64;

/// The unit in which the progress of a copy is displayed.
const MEBIBYTE: u64 = 1_048_576;

/// Up to this many bytes a database is checked completely at every start, which takes a few milliseconds.
const CHECK_COMPLETELY: u64 = 2_097_152;

pub struct Sqlite {
    path: PathBuf,
    is_new: bool,
    files: Files,
    /// Set if SQLite reads it without locks.
    read_only: Option<ReadOnlyFile>,
    /// Idle connections. They are dropped before the one that writes, because the last connection to close moves the WAL
    /// into the database, and a read-only one can't.
    readers: Mutex<VecDeque<Connection>>,
    reading: Semaphore,
    writer: Writer,
    write_timeout: Duration,
    append_timeout: Duration,
    wal: WalState,
}

impl Sqlite {
    pub fn open(path: &Path, access: Access, progress: &Progress) -> Result<Self> {
        if is_missing(path)? && !access.may_create() {
            return Err(StoreError::Missing);
        }
        let path = &match access {
            Access::Read => readable(path)?,
            _ => crate::files::create(path).and_then(|_| crate::files::resolve(path))?,
        };
        let opened = database_files::identity(path)?;
        let (mut connection, read_only) = match access {
            Access::Read => connect_to_read(path)?,
            _ => (connect_to_write(path).map_err(|error| name_cause(path, error))?, None),
        };
        let is_new = upgrades::bring_up_to_date(&mut connection, access, progress)?;
        if path.metadata().is_ok_and(|file| file.len() <= CHECK_COMPLETELY) {
            check_every_page(&connection)?;
        }
        // COMMIT syncs the WAL.
        connection.pragma_update(None, "synchronous", "FULL")?;
        let wal = WalState::watch(&mut connection)?;
        Ok(Self {
            path: path.to_owned(),
            is_new,
            files: Files::open(path, opened, access)?,
            read_only,
            readers: Mutex::default(),
            reading: Semaphore::new(READERS),
            writer: Writer::new(connection),
            write_timeout: WRITE_TIMEOUT,
            append_timeout: APPEND_TIMEOUT,
            wal,
        })
    }

    /// Checks that a lock is on the file that was opened.
    pub fn check_lock(&self, lock: &FileLock) -> Result<()> {
        self.files.check_lock(lock)
    }

    /// Checks that the files are still those that were opened.
    pub fn check_files(&self) -> Result<()> {
        self.files.check(|| checkpoint::in_use(self.reader(false)?.connection()))
    }

    /// Reads every page of the database.
    pub fn check(&self) -> Result<()> {
        check_every_page(&self.new_reader()?)
    }

    fn new_reader(&self) -> Result<Connection> {
        match &self.read_only {
            Some(read_only) => connect_without_locks(read_only),
            None => connect(&self.path, OpenFlags::SQLITE_OPEN_READ_ONLY),
        }
    }

    /// Passes a result of a read on, unless another process wrote to the file, which SQLite would not notice.
    fn check_unchanged<T>(&self, result: Result<T>) -> Result<T> {
        self.read_only.as_ref().map_or(Ok(()), ReadOnlyFile::check)?;
        result
    }
}

impl Engine for Sqlite {
    fn begin(&self, mode: TransactionMode) -> Result<Box<dyn Transaction + '_>> {
        Ok(match mode {
            TransactionMode::Statement => Box::new(self.reader(false)?),
            TransactionMode::Read | TransactionMode::Report => Box::new(self.reader(true)?),
            TransactionMode::Write => Box::new(self.begin_write(Instant::now() + self.write_timeout)?),
            TransactionMode::WriteUntil(deadline) | TransactionMode::Append(deadline) => {
                Box::new(self.begin_write(deadline)?)
            }
        })
    }

    fn is_new(&self) -> bool {
        self.is_new
    }

    fn write_timeout(&self) -> Duration {
        self.write_timeout
    }

    fn append_timeout(&self) -> Duration {
        self.append_timeout
    }

    fn sqlite(&self) -> Option<&Sqlite> {
        Some(self)
    }

    #[cfg(test)]
    fn sqlite_mut(&mut self) -> Option<&mut Sqlite> {
        Some(self)
    }
}

/// The reason why there is no copy, by the file that it is about.
#[derive(Debug)]
pub enum BackupError {
    Database(StoreError),
    Copy(StoreError),
}

/// Makes a consistent copy of this moment, while others write. Returns how many rows of the ledger it has.
pub fn backup(path: &Path, to: &Path, progress: &Progress) -> Result<i64, BackupError> {
    let connect_to_database = || {
        if is_missing(path)? {
            return Err(StoreError::Missing);
        }
        connect_to_read(&readable(path)?)
    };
    let (mut connection, read_only) = connect_to_database().map_err(BackupError::Database)?;
    // Not by SQLite, which would say "table already exists" for a file that is there.
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o640)
        .open(to)
        .map_err(|error| BackupError::Copy(error.into()))?;
    let mut copy = || {
        // The connection's NOFOLLOW holds for the copy too.
        let to = crate::files::resolve(to)?;
        let size = "SELECT (page_count - freelist_count) * page_size
            FROM pragma_page_count, pragma_freelist_count, pragma_page_size";
        let size = connection.query_row(size, [], |row| row.get::<_, i64>(0))?.max(0) as u64;
        let (copied, progress) = (to.clone(), progress.clone());
        progress.at("copying", 0, size / MEBIBYTE, "MiB");
        while_running(&mut connection, move |_| {
            let done = copied.metadata().map_or(0, |file| file.len());
            progress.at("copying", done / MEBIBYTE, size / MEBIBYTE, "MiB");
        })?;
        connection.execute("VACUUM INTO ?", [to.to_string_lossy()])?;
        let copy = connect(&to, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
        Ok(copy.query_row("SELECT count(*) FROM usage", [], |row| row.get(0))?)
    };
    let copied = copy().map_err(|error: StoreError| match error {
        StoreError::Damaged(_) => BackupError::Database(error),
        error => BackupError::Copy(error),
    });
    let unchanged =
        read_only.map_or(Ok(()), |file| file.check()).map_err(|error| BackupError::Database(error.into()));
    unchanged.and(copied).inspect_err(|_| {
        let _ = fs::remove_file(to);
    })
}

fn is_missing(path: &Path) -> Result<bool> {
    // Before the database's own: a process that creates one fills its WAL last.
    let wal = with_suffix(&fs::canonicalize(path).unwrap_or_else(|_| path.to_owned()), "-wal");
    let bytes = wal.metadata().map_or(0, |file| file.len());
    // An empty file is what a start that was interrupted has left.
    let is_missing = match path.metadata() {
        Ok(file) => file.len() == 0,
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    };
    // SQLite would delete the WAL.
    if is_missing && bytes > 0 { Err(StoreError::LostContent { wal, bytes }) } else { Ok(is_missing) }
}

fn connect(path: &Path, mode: OpenFlags) -> Result<Connection> {
    // One thread at a time uses a connection, so SQLite's own locks around it are not needed.
    // The path has no links. NOFOLLOW is for one that is put there meanwhile.
    let flags = mode | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_NOFOLLOW;
    set_up(Connection::open_with_flags(path, flags)?)
}

/// The flag to write is for the end: the last connection to close moves the WAL into the database and deletes it, which a
/// read-only one can't. If the file can't be written, SQLite opens it to read.
fn connect_to_read(path: &Path) -> Result<(Connection, Option<ReadOnlyFile>)> {
    match connect(path, OpenFlags::SQLITE_OPEN_READ_WRITE) {
        Err(StoreError::CannotOpen | StoreError::ReadOnly) => {
            let read_only = ReadOnlyFile::new(path)?;
            Ok((connect_without_locks(&read_only)?, Some(read_only)))
        }
        connection => Ok((connection?, None)),
    }
}

fn connect_without_locks(read_only: &ReadOnlyFile) -> Result<Connection> {
    set_up(read_only.connect(OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_NOFOLLOW)?)
}

fn set_up(connection: Connection) -> Result<Connection> {
    connection.busy_timeout(START_TIMEOUT)?;
    connection.pragma_update(None, "cache_size", -PAGE_CACHE)?;
    // SQLite would ignore a failed fsync of a checkpoint that it runs by itself: see checkpoint.rs.
    connection.pragma_update(None, "wal_autocheckpoint", 0)?;
    connection.set_prepared_statement_cache_capacity(STATEMENTS);
    // Otherwise a parameter with the value 1, as the first epoch of a gateway is, has its statement planned again whenever it
    // is bound.
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)?;
    Ok(connection)
}

/// Returns the path of a file that can be read, without links. SQLite would not say why it can't.
fn readable(path: &Path) -> Result<PathBuf> {
    rustix::fs::access(path, FileAccess::READ_OK).map_err(io::Error::from)?;
    if path.is_dir() {
        return Err(io::Error::from(io::ErrorKind::IsADirectory).into());
    }
    Ok(crate::files::resolve(path)?)
}

/// Adds the file or the folder that is the reason why SQLite can't open or write a database: it does not say which.
fn name_cause(path: &Path, error: StoreError) -> StoreError {
    if !matches!(error, StoreError::CannotOpen | StoreError::ReadOnly) {
        return error;
    }
    let read_write = FileAccess::READ_OK | FileAccess::WRITE_OK;
    let beside =
        ["-wal", "-shm"].map(|suffix| with_suffix(path, suffix)).into_iter().filter(|file| file.exists());
    let beside = beside.map(|file| check_usable(&file, read_write));
    let folder = check_usable(crate::files::folder(path), read_write | FileAccess::EXEC_OK);
    beside.chain([folder]).find_map(io::Result::err).map_or(error, StoreError::from)
}

fn connect_to_write(path: &Path) -> Result<Connection> {
    let connection = connect(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    if path.metadata().is_ok_and(|file| file.len() == 0) {
        // Retention can then give space back to the file system.
        connection.pragma_update(None, "auto_vacuum", "INCREMENTAL")?;
    }
    switch_journal(&connection, "WAL")?;
    Ok(connection)
}

/// Switches to another kind of journal. SQLite's own timeout does not cover this: it fails at once if another process is
/// writing, which happens when both create the database.
fn switch_journal(connection: &Connection, journal: &str) -> Result<()> {
    let end = Instant::now() + START_TIMEOUT;
    loop {
        match connection.pragma_update(None, "journal_mode", journal).map_err(StoreError::from) {
            Err(StoreError::Busy) if Instant::now() < end => thread::sleep(Duration::from_millis(5)),
            result => return result,
        }
    }
}

/// Calls `each` every few milliseconds while a statement of the connection runs, with the number of steps of all of them so
/// far.
fn while_running(connection: &mut Connection, mut each: impl FnMut(u64) + Send + 'static) -> Result<()> {
    const STEPS: u32 = 5_000;
    let mut steps = 0;
    let each = move || {
        steps += u64::from(STEPS);
        each(steps);
        false
    };
    Ok(connection.progress_handler(STEPS as i32, Some(each))?)
}

/// Shows the time while a statement of the connection runs.
fn show_time(connection: &mut Connection, work: &'static str, progress: &Progress) -> Result<()> {
    let progress = progress.clone();
    progress.at(work, 0, 0, "");
    while_running(connection, move |_| progress.at(work, 0, 0, ""))
}

fn check_every_page(connection: &Connection) -> Result<()> {
    let verdict: String = connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
    if verdict == "ok" { Ok(()) } else { Err(StoreError::Damaged(verdict)) }
}

impl SqlSession for Connection {
    fn run(&self, statements: &[BoundStatement], each: EachRow) -> Result<Vec<usize>> {
        let run = |(number, (text, parameters)): (usize, &BoundStatement)| {
            let mut prepared = self.prepare_cached(text)?;
            // For SQLite `$1` is a name, and names are numbered in the order in which they first appear.
            debug_assert!(
                (1..=parameters.len()).all(|n| prepared.parameter_name(n) == Some(&format!("${n}"))),
                "the parameters first appear in another order than their numbers: {text}"
            );
            let columns = prepared.column_count();
            let mut rows = prepared.query(params_from_iter(*parameters))?;
            while let Some(row) = rows.next()? {
                let values: rusqlite::Result<Vec<SqlValue>> =
                    (0..columns).map(|column| row.get_ref(column).map(SqlValue::from)).collect();
                each(number, Row::new(values?))?;
            }
            Ok(self.changes() as usize)
        };
        statements.iter().enumerate().map(run).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use rusqlite::ffi;

    use super::*;
    use crate::mutex::lock;
    use crate::store::tests::Temporary;

    impl Sqlite {
        pub fn set_write_timeout(&mut self, timeout: Duration) {
            (self.write_timeout, self.append_timeout) = (timeout, timeout);
        }

        pub fn as_dyn(&self) -> &dyn Engine {
            self
        }

        /// Tests write thousands of rows, and none of them cuts the power.
        pub fn stop_syncing(&self) {
            let turn = self.begin_write(Instant::now() + self.write_timeout).expect("its turn");
            turn.set_unsynced();
        }
    }

    #[test]
    fn every_error_that_has_its_own_advice() {
        let map = |code| StoreError::from(rusqlite::Error::SqliteFailure(ffi::Error::new(code), None));
        assert!(matches!(map(ffi::SQLITE_BUSY), StoreError::Busy));
        assert!(matches!(map(ffi::SQLITE_FULL), StoreError::Full));
        assert!(matches!(map(ffi::SQLITE_READONLY), StoreError::ReadOnly));
        assert!(matches!(map(ffi::SQLITE_CANTOPEN), StoreError::CannotOpen));
        assert!(matches!(map(ffi::SQLITE_NOTADB), StoreError::Damaged(_)));
        assert!(matches!(map(ffi::SQLITE_IOERR_FSYNC), StoreError::NotSynced(_)));
        assert!(matches!(map(ffi::SQLITE_IOERR_DIR_FSYNC), StoreError::NotSynced(_)));
        assert!(matches!(map(ffi::SQLITE_IOERR_READ), StoreError::Other(_)));
        assert!(matches!(map(ffi::SQLITE_ERROR), StoreError::Other(_)));
    }

    #[test]
    fn the_journal_is_switched_after_another_process_has_written() {
        let temporary = Temporary::sqlite();
        let path = temporary.folder.join("new.db");
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE;
        let [other, ours] = [(); 2].map(|()| connect(&path, flags).expect("a connection"));
        other.execute_batch("BEGIN IMMEDIATE; CREATE TABLE t (x)").expect("a write");
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
        let engine = Sqlite::open(&temporary.folder.join("reads.db"), Access::Create, &Progress::none())
            .expect("a new database");
        let (reading, all) = (AtomicUsize::new(0), Barrier::new(READERS + 1));
        thread::scope(|scope| {
            for _ in 0..READERS {
                scope.spawn(|| {
                    let read = engine.as_dyn().read(|_| {
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
                        engine.as_dyn().read(|_| {
                            reading.fetch_add(1, Ordering::Relaxed);
                            Ok(())
                        })
                    })
                })
                .collect();
            thread::sleep(Duration::from_millis(50));
            assert_eq!(reading.load(Ordering::Relaxed), 0, "all connections are in use");
            all.wait();
            others.into_iter().for_each(|other| other.join().expect("no panic").expect("a read"));
        });
        assert_eq!(reading.load(Ordering::Relaxed), 10);
        assert_eq!(lock(&engine.readers).len(), READERS);
        for _ in 0..READERS {
            let create = engine.as_dyn().read(|session| session.execute("CREATE TEMP TABLE mine (n)", &[]));
            create.expect("a connection without this table");
        }
    }

    #[test]
    fn a_wait_for_one_of_our_own_readers_is_not_reported_as_another_process() {
        let temporary = Temporary::sqlite();
        let engine = Sqlite::open(&temporary.folder.join("reads.db"), Access::Create, &Progress::none())
            .expect("a new database");
        let now = Instant::now();
        let _all: Vec<_> = (0..READERS).map(|_| engine.reading.acquire(now).expect("a free one")).collect();
        let error = engine.as_dyn().read(|_| Ok(())).expect_err("all are in use").to_string();
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
        let join = "SELECT 1 FROM keys, gateways WHERE keys.id = ?1 AND gateways.name = ?2 AND epoch = ?3";
        for _ in 0..3 {
            let mut statement = connection.prepare_cached(join).expect("a good statement");
            assert!(!statement.exists(("key_1", "none", 1)).expect("a look-up"));
            assert_eq!(statement.get_status(rusqlite::StatementStatus::RePrepare), 0);
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
            let opening = scope.spawn(|| Sqlite::open(&path, Access::Create, &Progress::none()).map(drop));
            // Enough for a start that does not wait to fail.
            thread::sleep(Duration::from_millis(300));
            other.execute_batch("COMMIT").expect("the lock is released");
            opening.join().expect("no panic").expect("it should have waited");
        });
    }

    #[test]
    fn a_check_reads_every_page() {
        let temporary = Temporary::sqlite();
        let path = temporary.folder.join("test.db");
        temporary.store.check().expect("it is sound");
        let connection = connect(&path, OpenFlags::SQLITE_OPEN_READ_WRITE).expect("a connection");
        connection.execute_batch("PRAGMA wal_checkpoint(TRUNCATE)").expect("a checkpoint");
        let mut bytes = fs::read(&path).expect("the file");
        bytes.iter_mut().skip(4096).for_each(|byte| *byte = 0xff);
        fs::write(&path, bytes).expect("the same file");
        assert!(matches!(temporary.store.check(), Err(StoreError::Damaged(_))));
    }
}
