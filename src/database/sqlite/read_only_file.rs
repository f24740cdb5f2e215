//! Reads a SQLite file beside which nothing can be created: on a read-only file system, or in a
//! folder of another user.
//!
//! SQLite reads a database in WAL mode only with its `-wal` and `-shm`, and creates them if they
//! are missing. If they can't be created and no `-wal` has content, all of the database is in its
//! file: with `immutable`, SQLite reads that without locks. Another process may still write to it,
//! which owns the folder or has it mounted elsewhere. So every read ends with a check that the file
//! is as it was.

use std::fmt::Write;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rusqlite::{Connection, OpenFlags};
use rustix::fs::Access;

use super::database_files::FileState;
use crate::files::{self, with_suffix};

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
            Some(log) => Err(check_usable(&log, Access::READ_OK).err().unwrap_or_else(|| io::Error::other(format!(
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
    pub fn check(&self) -> io::Result<()> {
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
pub fn check_usable(path: &Path, wanted: Access) -> io::Result<()> {
    let is_expected = |kind: fs::FileType| {
        if wanted.contains(Access::EXEC_OK) {
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
        read_only.check().expect("nothing was written");
        assert_eq!(
            fs::read_dir(&folder).expect("a folder").count(),
            1,
            "no file was created"
        );
        let writer = Connection::open(&path).expect("a database");
        writer
            .execute("INSERT INTO t VALUES (2)", [])
            .expect("a row");
        assert!(read_only.check().is_err(), "a WAL has appeared");
        drop(writer);
        assert!(read_only.check().is_err(), "the file has changed");
        fs::remove_dir_all(&folder).expect("a folder of this test");
    }
}
