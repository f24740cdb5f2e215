//! Opens connections to a file, and what every one of them needs.
//!
//! SQLite reads a database in WAL mode only with its `-wal` and `-shm`, and creates them if they
//! are missing. If they can't be created, because the file system is read-only or the folder is
//! another user's, and no `-wal` has content, all of the database is in its file: with `immutable`,
//! SQLite reads that without locks. Another process may still write to it, which owns the folder or
//! has it mounted elsewhere. So every such read ends with a check that the file is as it was.

use std::fmt::Write;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags};
use rustix::fs::Access as FileAccess;

use super::database_files::{FileIdentity, FileState};
use crate::error::{Problem, ProblemKind, Result};
use crate::files::{self, with_suffix};

/// The time that a new connection waits for other processes.
const START_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection's page cache in KiB: enough for the pages that a request reads and writes.
const PAGE_CACHE: i64 = 128;

/// The number of prepared statements that a connection keeps: more than there are on a request's
/// path.
const STATEMENTS: usize = 64;

/// A database, as it was opened.
pub struct OpenFile {
    /// Without links.
    pub path: PathBuf,
    /// Before it was opened: see `Files::open`.
    pub identity: FileIdentity,
    pub connection: Connection,
    /// Set if SQLite reads it without locks.
    pub read_only: Option<ReadOnlyFile>,
}

impl OpenFile {
    /// Creates an empty file if there is none. Fails if it can't be written.
    pub fn to_write(path: &Path) -> Result<Self> {
        let path = files::create(path).and_then(|_| path.canonicalize())?;
        let identity = FileState::read(&path)?.identity;
        let open = || -> rusqlite::Result<Connection> {
            let connection = connect(&path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
            if path.metadata().is_ok_and(|file| file.len() == 0) {
                // Retention can then give space back to the file system.
                connection.pragma_update(None, "auto_vacuum", "INCREMENTAL")?;
            }
            switch_journal(&connection, "WAL")?;
            Ok(connection)
        };
        Ok(Self {
            connection: open().map_err(|error| name_cause(&path, error))?,
            path,
            identity,
            read_only: None,
        })
    }

    /// The flag to write is for the end: the last connection to close moves the WAL into the
    /// database and deletes it, which a read-only one can't. If the file can't be written, SQLite
    /// opens it to read.
    pub fn to_read(path: &Path) -> Result<Self> {
        if is_missing(path)? {
            return Err(Problem::missing());
        }
        // SQLite would not say why it can't be read.
        rustix::fs::access(path, FileAccess::READ_OK).map_err(io::Error::from)?;
        if path.is_dir() {
            return Err(io::Error::from(io::ErrorKind::IsADirectory).into());
        }
        let path = path.canonicalize()?;
        let identity = FileState::read(&path)?.identity;
        match connect(&path, OpenFlags::SQLITE_OPEN_READ_WRITE) {
            Err(error) if can_t_be_written(&error) => Self::alone(path),
            connection => Ok(Self {
                connection: connection?,
                path,
                identity,
                read_only: None,
            }),
        }
    }

    /// Opens it so that nothing beside it is ever applied to it. The path has no links.
    pub fn alone(path: PathBuf) -> Result<Self> {
        let read_only = ReadOnlyFile::new(&path)?;
        Ok(Self {
            identity: read_only.state.identity,
            connection: set_up(read_only.connect()?)?,
            path,
            read_only: Some(read_only),
        })
    }
}

pub fn is_missing(path: &Path) -> Result<bool> {
    // Before the database's own: a process that creates one fills its WAL last.
    let wal = with_suffix(
        &fs::canonicalize(path).unwrap_or_else(|_| path.to_owned()),
        "-wal",
    );
    let bytes = wal.metadata().map_or(0, |file| file.len());
    // An empty file is what a start that was interrupted has left.
    let is_missing = match path.metadata() {
        Ok(file) => file.len() == 0,
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    };
    // SQLite would delete the WAL.
    if is_missing && bytes > 0 {
        Err(Problem::new(
            ProblemKind::Damaged,
            format!(
                "it has lost its content: its file is empty or missing, but {} beside it has {bytes} bytes. Restore a backup, or \
             delete both files to begin with an empty database",
                wal.display()
            ),
        ))
    } else {
        Ok(is_missing)
    }
}

pub fn connect(path: &Path, mode: OpenFlags) -> rusqlite::Result<Connection> {
    set_up(Connection::open_with_flags(path, mode | FLAGS)?)
}

pub fn set_up(connection: Connection) -> rusqlite::Result<Connection> {
    connection.busy_timeout(START_TIMEOUT)?;
    connection.pragma_update(None, "cache_size", -PAGE_CACHE)?;
    // SQLite would ignore a failed fsync of a checkpoint that it runs by itself: see writer.rs.
    connection.pragma_update(None, "wal_autocheckpoint", 0)?;
    connection.set_prepared_statement_cache_capacity(STATEMENTS);
    // Otherwise a parameter with the value 1, as the first epoch of a gateway is, has its statement
    // planned again whenever it is bound.
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)?;
    Ok(connection)
}

/// Adds the file or the folder that is the reason why SQLite can't open or write a database: it
/// does not say which.
fn name_cause(path: &Path, error: rusqlite::Error) -> Problem {
    if !can_t_be_written(&error) {
        return error.into();
    }
    let read_write = FileAccess::READ_OK | FileAccess::WRITE_OK;
    let beside = ["-wal", "-shm"]
        .map(|suffix| with_suffix(path, suffix))
        .into_iter()
        .filter(|file| file.exists());
    let beside = beside.map(|file| check_usable(&file, read_write));
    let folder = check_usable(files::folder(path), read_write | FileAccess::EXEC_OK);
    beside
        .chain([folder])
        .find_map(io::Result::err)
        .map_or(error.into(), Problem::from)
}

fn can_t_be_written(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(ErrorCode::CannotOpen | ErrorCode::ReadOnly)
    )
}

/// Switches to another kind of journal. SQLite's own timeout does not cover this: it fails at once
/// if another process is writing, which happens when both create the database.
pub fn switch_journal(connection: &Connection, journal: &str) -> rusqlite::Result<()> {
    let end = Instant::now() + START_TIMEOUT;
    loop {
        let switched = connection.pragma_update(None, "journal_mode", journal);
        let is_busy = switched
            .as_ref()
            .is_err_and(|error| error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy));
        if !is_busy || Instant::now() >= end {
            return switched;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

pub fn check_every_page(connection: &Connection) -> Result<()> {
    run_check(connection, "PRAGMA quick_check(1)")
}

pub fn check_every_page_and_index(connection: &Connection) -> Result<()> {
    run_check(connection, "PRAGMA integrity_check(1)")
}

fn run_check(connection: &Connection, check: &str) -> Result<()> {
    let verdict: String = connection.query_row(check, [], |row| row.get(0))?;
    if verdict == "ok" {
        Ok(())
    } else {
        Err(Problem::damaged(verdict))
    }
}

/// The flags of every connection. One thread at a time uses it, so SQLite's own locks around it are
/// not needed. The path has no links: NOFOLLOW is for one that is put there meanwhile.
pub const FLAGS: OpenFlags = OpenFlags::SQLITE_OPEN_NO_MUTEX.union(OpenFlags::SQLITE_OPEN_NOFOLLOW);

/// The files that SQLite may have beside a database with content that is not in it.
pub const LOGS: [&str; 2] = ["-wal", "-journal"];

/// A database that nothing has written to since this was made.
pub struct ReadOnlyFile {
    path: PathBuf,
    /// The user who opened it may not be the one who checks it.
    file: File,
    pub state: FileState,
}

impl ReadOnlyFile {
    /// Fails if it can't be read, or if a part of the content is not in the file itself. The path
    /// has no links.
    pub fn new(path: &Path) -> io::Result<Self> {
        let file = files::open(path)?;
        let read_only = Self {
            path: path.to_owned(),
            state: FileState::of(&file.metadata()?),
            file,
        };
        match read_only.log() {
            None => Ok(read_only),
            Some(log) => Err(check_usable(&log, FileAccess::READ_OK).err().unwrap_or_else(|| io::Error::other(format!(
                "{} has changes that are not in the database yet, and they can't be read where nothing can be created. Copy both \
                 files to a folder that you may write to, and name the copy (ADRIATICUM_DATABASE)",
                log.display()
            )))),
        }
    }

    pub fn connect(&self) -> rusqlite::Result<Connection> {
        let flags = FLAGS | OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_URI;
        Connection::open_with_flags(uri(&self.path, "immutable=1"), flags)
    }

    /// Fails if another process may have written to it: what was read since may be wrong.
    pub fn check_unchanged(&self) -> io::Result<()> {
        match self.log() {
            None if FileState::of(&self.file.metadata()?) == self.state => Ok(()),
            _ => Err(io::Error::other(
                "another process changed it while it was read: try again",
            )),
        }
    }

    /// A file with content beside the database that is a part of it.
    fn log(&self) -> Option<PathBuf> {
        LOGS.map(|log| with_suffix(&self.path, log))
            .into_iter()
            .find(|log| fs::metadata(log).is_ok_and(|file| file.len() > 0))
    }
}

/// The URI of a file, whatever bytes its path has.
pub fn uri(path: &Path, parameter: &str) -> String {
    let mut uri = String::from("file:");
    for byte in path.as_os_str().as_bytes() {
        write!(uri, "%{byte:02x}").expect("a String takes it");
    }
    uri + "?" + parameter
}

/// Fails with the path in the message if a file or a folder can't be used. Opens nothing: closing a
/// descriptor would drop the locks that SQLite has on a file.
fn check_usable(path: &Path, wanted: FileAccess) -> io::Result<()> {
    let is_expected = |kind: fs::FileType| {
        if wanted.contains(FileAccess::EXEC_OK) {
            kind.is_dir()
        } else {
            kind.is_file()
        }
    };
    let cause = match (rustix::fs::access(path, wanted), fs::metadata(path)) {
        (Err(error), _) => error.into(),
        (Ok(()), Ok(file)) if is_expected(file.file_type()) => return Ok(()),
        _ => io::Error::other("it is not a regular file"),
    };
    Err(io::Error::new(
        cause.kind(),
        format!("{}: {cause}", path.display()),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secret::secret_hex;

    fn count(connection: &Connection) -> rusqlite::Result<i64> {
        connection.query_row("SELECT count(*) FROM t", [], |row| row.get(0))
    }

    #[test]
    fn all_of_a_file_is_read_and_a_change_or_a_wal_is_noticed() {
        let folder = std::env::temp_dir().join(format!("adriaticum-{}", secret_hex::<8>()));
        fs::create_dir(&folder).expect("a folder");
        // Characters that have a meaning in a URI.
        let path = folder.join("a?b#%20 ü.db");
        let writer = Connection::open(&path).expect("a database");
        writer
            .execute_batch(
                "PRAGMA journal_mode = WAL; CREATE TABLE t (x); INSERT INTO t VALUES (1)",
            )
            .expect("a row");
        let error = ReadOnlyFile::new(&path)
            .err()
            .expect("the row is in the WAL")
            .to_string();
        assert!(error.contains("%20 ü.db-wal has changes"), "{error}");
        drop(writer);
        let read_only = ReadOnlyFile::new(&path).expect("the last connection has moved the WAL");
        let connection = read_only.connect().expect("a connection");
        assert_eq!(count(&connection), Ok(1));
        assert!(connection.execute("INSERT INTO t VALUES (2)", []).is_err());
        read_only.check_unchanged().expect("nothing was written");
        assert_eq!(
            fs::read_dir(&folder).expect("a folder").count(),
            1,
            "no file was created"
        );
        let writer = Connection::open(&path).expect("a database");
        writer
            .execute("INSERT INTO t VALUES (2)", [])
            .expect("a row");
        assert!(read_only.check_unchanged().is_err(), "a WAL has appeared");
        drop(writer);
        assert!(read_only.check_unchanged().is_err(), "the file has changed");
        fs::remove_dir_all(&folder).expect("a folder of this test");
    }
}
