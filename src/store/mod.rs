//! What is kept on disk: the keys and the ledger, in one SQLite database. Nothing else names `rusqlite` but the
//! embedded index of `search`, which is a file of its own.
//!
//! Writing goes through one connection, one at a time; reading never waits for it, because in WAL mode a
//! reader sees the last commit whatever a writer is doing.

mod chain;
mod files;
mod keys;
mod ledger;
mod listing;
mod log;
mod retention;
mod spans;
mod sums;
mod times;
mod tokens;
mod upgrades;
mod writer;

use std::fmt;
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, ErrorCode, OpenFlags};

pub use chain::{Fault, Verdict};
use files::Files;
pub use keys::{Digest, Key, KeyName, Permission};
pub use ledger::{Entry, LedgerRow, NewRow, Outcome, Searched, Tokens};
pub use listing::{Listing, Matching, Which};
pub use spans::{Figures, Span, SpanSums};
pub use sums::{Grouping, Range, Sums, UsageRow};
pub use times::Times;
pub use tokens::{PasswordHash, TokenKind};
use writer::Writer;

/// How long a start waits for other processes.
const START_PATIENCE: Duration = Duration::from_secs(5);

/// How long a read waits where the database has to be recovered or is being checkpointed away.
const READ_PATIENCE: Duration = Duration::from_secs(2);

/// What a connection keeps of the database in memory, in KiB: look-ups touch few pages, a write some more.
const READER_CACHE: i64 = 256;
const WRITER_CACHE: i64 = 1024;

/// Up to this many bytes a database is checked whole at every start, which takes a few milliseconds.
const READ_WHOLE: u64 = 2 * 1024 * 1024;

/// A day, in seconds.
const DAY: i64 = 86_400;

pub struct Store {
    path: PathBuf,
    /// Connections that nobody reads with at the moment. Each thread that reads takes one or opens one. They
    /// stand before the writer because the last connection to go folds the log into the database, and one
    /// that may not write can't.
    readers: Mutex<Vec<Connection>>,
    writer: Writer,
}

/// A database that can't be used, or that did not do what it was asked to.
#[derive(Clone, Debug)]
pub enum StoreError {
    /// Shared by all whose writes went wrong together.
    Sqlite(Arc<rusqlite::Error>),
    Io(Arc<io::Error>),
    /// The disk failed to take what was written.
    NotSynced(Arc<io::Error>),
    /// Other writers did not let it through in time.
    Busy,
    Panicked,
    /// The file that is written is no longer the one that the path names.
    Replaced,
    /// The key was revoked, has expired or has lost its permission since it was looked up.
    KeyRefused,
    /// It was made by a later version of the program.
    Newer {
        found: i64,
        known: i64,
    },
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sqlite(error) => match error.sqlite_error_code() {
                Some(ErrorCode::DiskFull) => f.write_str("the disk is full: make room and try again"),
                Some(ErrorCode::ReadOnly) => {
                    f.write_str("the database is read-only: check who owns the file and its folder")
                }
                Some(ErrorCode::CannotOpen) => {
                    f.write_str("the database can't be opened: check that its folder exists and who owns it")
                }
                Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => write!(
                    f,
                    "the file is damaged or no database ({error}): stop the service, move it away and restore a \
                     backup, or save what can be read of it: sqlite3 DAMAGED .recover | sqlite3 NEW"
                ),
                _ => write!(f, "{error}"),
            },
            Self::Io(error) => write!(f, "{error}"),
            Self::NotSynced(error) => write!(
                f,
                "the disk failed to take what was written ({error}), so nothing more is: check the disk, then restart"
            ),
            Self::Busy => f.write_str("the database is locked by another process"),
            Self::Panicked => f.write_str("a write panicked"),
            Self::Replaced => f.write_str(
                "the database's file, or its -wal, was removed or replaced under the running service: put it \
                 back or restore a backup, then restart",
            ),
            Self::KeyRefused => f.write_str("the key is not valid any more"),
            Self::Newer { found, known } => write!(
                f,
                "the database has version {found}, and this program knows versions up to {known}: \
                 install the version that made it, or a later one"
            ),
        }
    }
}

impl std::error::Error for StoreError {}

impl From<rusqlite::Error> for StoreError {
    fn from(error: rusqlite::Error) -> Self {
        match error.sqlite_error_code() {
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => Self::Busy,
            _ => Self::Sqlite(Arc::new(error)),
        }
    }
}

impl Store {
    /// Opens the database, makes it where there is none, and brings it to the present form.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        files::make(path).map_err(|error| StoreError::Io(Arc::new(error)))?;
        let mut connection = connect(path, OpenFlags::SQLITE_OPEN_READ_WRITE, WRITER_CACHE)?;
        connection.busy_timeout(START_PATIENCE)?;
        if path.metadata().is_ok_and(|file| file.len() == 0) {
            // What retention removes can then be given back to the file system.
            connection.pragma_update(None, "auto_vacuum", "INCREMENTAL")?;
        }
        connection.pragma_update(None, "journal_mode", "WAL")?;
        upgrades::bring_up_to_date(&mut connection)?;
        look_for_damage(path, &connection)?;
        let files = Files::of(path)?;
        let writer = Writer::new(connection, files)?;
        Ok(Self { path: path.to_owned(), readers: Mutex::default(), writer })
    }

    /// Whether the database is sound and takes a write.
    pub fn check(&self) -> Result<(), StoreError> {
        self.read(check_every_page)?;
        self.try_write()
    }

    /// Whether it answers in time when it is asked to write, with an error too. Nothing is written.
    pub fn answers(&self) -> bool {
        self.writer.answers()
    }

    /// Whether the database takes a write: a small one that changes nothing, but reaches the disk as a
    /// completion's does.
    pub fn try_write(&self) -> Result<(), StoreError> {
        self.write_synced(|connection| {
            let version: i64 = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
            // SQLite writes the page that holds it even where it is the same.
            connection.pragma_update(None, "user_version", version)
        })
    }

    /// Makes a consistent copy, of this moment, while others write.
    pub fn backup(&self, to: &Path) -> Result<(), StoreError> {
        // SQLite would refuse too, but in words about tables.
        OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o640)
            .open(to)
            .map_err(|error| StoreError::Io(Arc::new(error)))?;
        self.read(|connection| connection.execute("VACUUM INTO ?", [to.to_string_lossy()]))?;
        Ok(())
    }

    fn read<T>(&self, work: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> Result<T, StoreError> {
        let idle = self.readers.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let connection = match idle {
            Some(connection) => connection,
            None => {
                let connection = connect(&self.path, OpenFlags::SQLITE_OPEN_READ_ONLY, READER_CACHE)?;
                connection.busy_timeout(READ_PATIENCE)?;
                connection
            }
        };
        let result = work(&connection)?;
        // After an error it is not given back: the next reader opens the file anew.
        self.readers.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
        Ok(result)
    }

    /// Writes what need not outlive a power cut: the file system has it, the disk perhaps not yet.
    fn write<T: Send + 'static>(
        &self,
        work: impl Fn(&Connection) -> rusqlite::Result<T> + Send + Sync + 'static,
    ) -> Result<T, StoreError> {
        self.writer.write(false, work)
    }

    /// Writes what is on the disk when this returns.
    fn write_synced<T: Send + 'static>(
        &self,
        work: impl Fn(&Connection) -> rusqlite::Result<T> + Send + Sync + 'static,
    ) -> Result<T, StoreError> {
        self.writer.write(true, work)
    }
}

/// A day since 1970 as people write it.
fn date(day: i64) -> String {
    time::OffsetDateTime::from_unix_timestamp(day.saturating_mul(DAY))
        .map_or_else(|_| day.to_string(), |time| time.date().to_string())
}

/// Refuses a damaged database before it is used. A small one is read whole; of a large one, which would take
/// too long at every start, the parts that every request needs. `check` reads all of it.
fn look_for_damage(path: &Path, connection: &Connection) -> Result<(), StoreError> {
    let size = path.metadata().map_or(0, |file| file.len());
    if size <= READ_WHOLE {
        check_every_page(connection)?;
    }
    for query in [
        "SELECT count(*) FROM keys WHERE length(digest) <> 32 OR length(name || permissions) = 0",
        "SELECT count(*) FROM (SELECT * FROM usage ORDER BY request_id DESC LIMIT 100)",
        "SELECT count(*) FROM (SELECT hash FROM usage WHERE seq IS NOT NULL ORDER BY seq DESC LIMIT 100)",
        "SELECT count(*) FROM (SELECT * FROM usage_daily ORDER BY day DESC LIMIT 100)",
        "SELECT anchor_seq FROM chain",
    ] {
        connection.query_row(query, [], |row| row.get::<_, i64>(0))?;
    }
    Ok(())
}

fn check_every_page(connection: &Connection) -> rusqlite::Result<()> {
    let verdict: String = connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
    match verdict.as_str() {
        "ok" => Ok(()),
        _ => Err(rusqlite::Error::SqliteFailure(
            rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_CORRUPT),
            Some(verdict),
        )),
    }
}

fn connect(path: &Path, mode: OpenFlags, cache: i64) -> Result<Connection, StoreError> {
    // A connection stays with one thread at a time, so SQLite's own locks around it are not needed.
    let connection = Connection::open_with_flags(path, mode | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
    connection.pragma_update(None, "cache_size", -cache)?;
    Ok(connection)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A store in a folder of its own, which goes with it.
    pub struct Temporary {
        pub store: Store,
        pub folder: PathBuf,
    }

    impl Temporary {
        pub fn new() -> Self {
            let folder = std::env::temp_dir().join(format!("adriaticum-{}", crate::id::secret_hex::<8>()));
            std::fs::create_dir(&folder).expect("the folder for temporary files should take one");
            let store = Store::open(&folder.join("test.db")).expect("a new database should open");
            for key in ["key_1", "key_2"] {
                let insert = "INSERT INTO keys (id, digest, name, permissions, created)
                              VALUES (?1, CAST(?1 AS BLOB), 'name of ' || ?1, 'completions', 0)";
                store.write(move |c| c.execute(insert, [key])).expect("a key");
            }
            Self { store, folder }
        }
    }

    impl Drop for Temporary {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }

    #[test]
    fn a_new_database_is_sound() {
        let temporary = Temporary::new();
        temporary.store.check().expect("it should be sound");
        let mode = std::os::unix::fs::MetadataExt::mode(
            &temporary.folder.join("test.db").metadata().expect("it should be a file"),
        );
        assert_eq!(mode & 0o007, 0, "others may not read it");
    }

    #[test]
    fn a_trial_reaches_the_disk_and_changes_nothing() {
        let temporary = Temporary::new();
        let size = || temporary.folder.join("test.db-wal").metadata().expect("the log should be there").len();
        let before = size();
        temporary.store.try_write().expect("it should be taken");
        assert!(size() > before, "nothing was written");
        temporary.store.check().expect("it should be sound");
        Store::open(&temporary.folder.join("test.db")).expect("its version should be known");
    }

    #[test]
    fn what_is_no_database_is_refused_and_left_alone() {
        let temporary = Temporary::new();
        let path = temporary.folder.join("other");
        std::fs::write(&path, "something else, and long enough to have a header of its own".repeat(9))
            .expect("the folder should take a file");
        let error = Store::open(&path).err().expect("it is no database").to_string();
        assert!(error.contains("damaged or no database"), "{error}");
        assert!(std::fs::read_to_string(&path).is_ok_and(|text| text.starts_with("something else")));
        let error = Store::open(Path::new("/dev/null/x.db")).err().expect("there is no such folder");
        assert!(matches!(error, StoreError::Io(_)), "{error}");
    }

    #[test]
    fn a_panic_while_writing_leaves_the_writer_usable() {
        let temporary = Temporary::new();
        let result = temporary.store.write(|_| -> rusqlite::Result<()> { panic!("on purpose") });
        assert!(matches!(result, Err(StoreError::Panicked)));
        temporary.store.check().expect("it should go on");
    }
}
