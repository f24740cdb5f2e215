//! The SQLite engine: a database in WAL mode, one connection that writes, and a few that read.
//! Reading never waits for writing.

pub mod backup;
mod checkpoint;
mod connection;
mod database_files;
pub mod lock;
pub mod read_only_file;
pub mod replacement;
pub mod session;
pub mod transaction;
mod upgrades;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rusqlite::{Connection, OpenFlags};

pub use self::checkpoint::WalFigures;
use self::checkpoint::WalState;
use self::connection::{
    check_every_page, connect, connect_to_read, connect_to_write, is_missing, name_cause, readable,
    set_up,
};
use self::database_files::Files;
use self::read_only_file::ReadOnlyFile;
use super::access::Access;
use super::error::{DatabaseError, Result};
use super::schema::Schema;
use crate::progress::Progress;
use crate::semaphore::Semaphore;

/// The number of connections that read; they stay open. The console's two threads may have two of
/// them for long, and looking up a key takes a tenth of a millisecond. More would not be faster,
/// but a moment of many reads would keep their memory and their descriptors. They are used in turn:
/// otherwise the last one would rarely have a turn, and memory would still grow after hours, with
/// each statement that it prepares for the first time.
const READERS: usize = 4;

/// Up to this many bytes a database is checked completely at every start, which takes a few
/// milliseconds.
const CHECK_COMPLETELY: u64 = 2_097_152;

/// The time that a write waits for its turn and for other processes, in total.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// The time until a row has to be durable, with all attempts: an inference was spent on it.
const APPEND_TIMEOUT: Duration = Duration::from_secs(20);

pub struct Sqlite {
    path: PathBuf,
    pub(super) is_new: bool,
    pub files: Files,
    /// Set if SQLite reads it without locks.
    read_only: Option<ReadOnlyFile>,
    /// Idle connections. They are dropped before the one that writes, because the last connection
    /// to close moves the WAL into the database, and a read-only one can't.
    readers: Mutex<VecDeque<Connection>>,
    reading: Semaphore,
    writer: Writer,
    pub(super) write_timeout: Duration,
    pub(super) append_timeout: Duration,
    pub(super) wal: WalState,
}

/// The connection that writes, which threads use in turn.
struct Writer {
    turn: Semaphore,
    /// `None` while a thread writes with it.
    connection: Mutex<Option<Connection>>,
    /// The time when a thread took the connection.
    writing: Mutex<Option<Instant>>,
}

impl Writer {
    fn new(connection: Connection) -> Self {
        Self {
            turn: Semaphore::new(1),
            connection: Mutex::new(Some(connection)),
            writing: Mutex::default(),
        }
    }
}

impl Sqlite {
    pub fn open(path: &Path, schema: &Schema, access: Access, progress: &Progress) -> Result<Self> {
        if is_missing(path)? && !access.may_create() {
            return Err(DatabaseError::Missing);
        }
        let path = &match access {
            Access::Read => readable(path)?,
            _ => crate::files::create(path).and_then(|_| crate::files::resolve(path))?,
        };
        let opened = database_files::identity(path)?;
        let (mut connection, read_only) = match access {
            Access::Read => connect_to_read(path)?,
            _ => (
                connect_to_write(path).map_err(|error| name_cause(path, error))?,
                None,
            ),
        };
        let is_new = upgrades::bring_up_to_date(&mut connection, schema, access, progress)?;
        if path
            .metadata()
            .is_ok_and(|file| file.len() <= CHECK_COMPLETELY)
        {
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

    /// Checks that the files are still those that were opened.
    pub fn check_files(&self) -> Result<()> {
        self.files
            .check(|| checkpoint::in_use(self.reader(false)?.connection()))
    }

    /// Reads every page of the database.
    pub fn check(&self) -> Result<()> {
        check_every_page(&self.new_reader()?)
    }

    fn new_reader(&self) -> Result<Connection> {
        match &self.read_only {
            Some(read_only) => set_up(read_only.connect()?),
            None => connect(&self.path, OpenFlags::SQLITE_OPEN_READ_ONLY),
        }
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
    use crate::mutex::lock;
    use crate::store::tests::Temporary;

    impl Sqlite {
        pub fn set_write_timeout(&mut self, timeout: Duration) {
            (self.write_timeout, self.append_timeout) = (timeout, timeout);
        }

        /// Tests write thousands of rows, and none of them cuts the power.
        pub fn stop_syncing(&self) {
            let turn = self
                .begin_write(Instant::now() + self.write_timeout)
                .expect("its turn");
            turn.set_unsynced();
        }
    }

    #[test]
    fn every_error_that_has_its_own_advice() {
        let map =
            |code| DatabaseError::from(rusqlite::Error::SqliteFailure(ffi::Error::new(code), None));
        assert!(matches!(map(ffi::SQLITE_BUSY), DatabaseError::Busy));
        assert!(matches!(map(ffi::SQLITE_FULL), DatabaseError::Full));
        assert!(matches!(map(ffi::SQLITE_READONLY), DatabaseError::ReadOnly));
        assert!(matches!(
            map(ffi::SQLITE_CANTOPEN),
            DatabaseError::CannotOpen
        ));
        assert!(matches!(map(ffi::SQLITE_NOTADB), DatabaseError::Damaged(_)));
        assert!(matches!(
            map(ffi::SQLITE_IOERR_FSYNC),
            DatabaseError::NotSynced(_)
        ));
        assert!(matches!(
            map(ffi::SQLITE_IOERR_DIR_FSYNC),
            DatabaseError::NotSynced(_)
        ));
        assert!(matches!(
            map(ffi::SQLITE_IOERR_READ),
            DatabaseError::Other(_)
        ));
        assert!(matches!(map(ffi::SQLITE_ERROR), DatabaseError::Other(_)));
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
        assert_eq!(
            lock(&engine.sqlite().expect("a file").readers).len(),
            READERS
        );
        for _ in 0..READERS {
            let create = engine.read(|session| session.execute("CREATE TEMP TABLE mine (n)", &[]));
            create.expect("a connection without this table");
        }
    }

    #[test]
    fn a_wait_for_one_of_our_own_readers_is_not_reported_as_another_process() {
        let temporary = Temporary::sqlite();
        let engine = open(&temporary.folder.join("reads.db")).expect("a new database");
        let now = Instant::now();
        let _all: Vec<_> = (0..READERS)
            .map(|_| {
                engine
                    .sqlite()
                    .expect("a file")
                    .reading
                    .acquire(now)
                    .expect("a free one")
            })
            .collect();
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
        temporary.store.check().expect("it is sound");
        let connection = connect(&path, OpenFlags::SQLITE_OPEN_READ_WRITE).expect("a connection");
        connection
            .execute_batch("PRAGMA wal_checkpoint(TRUNCATE)")
            .expect("a checkpoint");
        let mut bytes = fs::read(&path).expect("the file");
        bytes.iter_mut().skip(4096).for_each(|byte| *byte = 0xff);
        fs::write(&path, bytes).expect("the same file");
        assert!(matches!(
            temporary.store.check(),
            Err(DatabaseError::Damaged(_))
        ));
    }
}
