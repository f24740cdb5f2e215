//! Errors of the database, the same for every engine.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use crate::error::FailureCause;
use crate::text::shell_word;
use crate::when;

/// As `io::Result` is for `io::Error`.
pub type Result<T, E = DatabaseError> = std::result::Result<T, E>;

#[derive(Clone, Debug)]
pub enum DatabaseError {
    /// Other writers held the database for too long.
    Busy,
    /// This process's own connections were in use for too long.
    NoConnection,
    Full,
    ReadOnly,
    CannotOpen,
    /// There is no database, and none is to be created.
    Missing,
    /// It is damaged, or not a database of ours.
    Damaged(String),
    /// The database was made by a later version of the program.
    Newer {
        found: i64,
        known: i64,
    },
    /// It was made by an earlier version, and this open may not upgrade it.
    Older {
        found: i64,
        known: i64,
    },
    /// It was made by a build before the first release.
    Unreleased(i64),
    /// Another program has changed its schema since it was opened.
    VersionChanged {
        found: i64,
        known: i64,
    },
    /// The file that is open is not the one that the path names any more.
    Replaced,
    /// Everything was moved to another database, so a change of this one would be lost.
    Moved {
        source: PathBuf,
        target: String,
    },
    /// The database is empty, but its WAL is not.
    LostContent {
        wal: PathBuf,
        bytes: u64,
    },
    NotSynced(Arc<io::Error>),
    Io(Arc<io::Error>),
    /// A write panicked, and was rolled back.
    Panicked,
    /// The row that should be read is not there.
    NoRow,
    /// A range cuts the hour that begins at this time, and retention has removed its rows: the
    /// figures would be wrong.
    RowsRemoved(i64),
    /// The key was revoked before the request arrived, or does not exist.
    KeyRevoked,
    /// A write to the ledger has waited for long, and has not failed yet.
    Stalled,
    Fenced,
    /// No host of the database can be used. The engine logs this once, and once when it is over.
    Unavailable(String),
    /// No answer came to what was sent: it may have been done or not.
    Unknown(String),
    /// Anything else, in the engine's words.
    Other(String),
}

impl fmt::Display for DatabaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Busy => f.write_str("the database is locked by another process"),
            Self::NoConnection => f.write_str(
                "all of this process's connections to the database are in use: try again when its long reads are done",
            ),
            Self::Full => f.write_str("the disk is full: free some space and try again"),
            Self::ReadOnly => {
                f.write_str("the database can't be written: check who owns the file and its folder, and whether the file system is read-only")
            }
            Self::CannotOpen => {
                f.write_str("the database can't be opened: check that its folder exists and who owns it")
            }
            Self::Missing => f.write_str(
                "it does not exist: create it with adriaticum serve, keys create, console password, restore or move",
            ),
            Self::Damaged(cause) => write!(
                f,
                "the file is damaged or not a database ({cause}): stop the service and restore a backup \
                 (adriaticum restore FILE), or save what can be read of it: sqlite3 DAMAGED .recover | sqlite3 NEW"
            ),
            Self::Newer { found, known } => write!(
                f,
                "the database has version {found}, and this program knows versions up to {known}: \
                 install the version that made it, or a later one"
            ),
            Self::Older { found, known } => write!(
                f,
                "the database has version {found}, and this program needs version {known}: make a backup, then \
                 restart the service (or start adriaticum serve) of this version, which upgrades the database"
            ),
            Self::Unreleased(found) => write!(
                f,
                "the database has version {found}, which no release had: begin with a new database, or upgrade it with an \
                 earlier build first"
            ),
            Self::VersionChanged { found, known } => write!(
                f,
                "the database now has version {found}, because another program has changed it, and this one knows version \
                 {known}: install the version that changed it, or restore a backup"
            ),
            Self::Replaced => f.write_str(
                "the database's file, or its -wal, was removed, replaced or truncated under the running service: put \
                 it back or restore a backup, then restart",
            ),
            Self::Moved { source, target } => write!(
                f,
                "everything in it was moved to {target}: use that one. Only if you have given up the new one, take the mark \
                 back with: sqlite3 {} 'DELETE FROM moved'",
                shell_word(&source.to_string_lossy())
            ),
            Self::LostContent { wal, bytes } => write!(
                f,
                "it has lost its content: its file is empty or missing, but {} beside it has {bytes} bytes. Restore a \
                 backup, or delete both files to begin with an empty database",
                wal.display()
            ),
            Self::NotSynced(error) => {
                write!(f, "fsync failed ({error}), so nothing more is written: check the disk, then restart")
            }
            Self::Io(error) => write!(f, "{error}"),
            Self::Panicked => f.write_str("a write panicked"),
            Self::NoRow => f.write_str("the row is not there"),
            Self::RowsRemoved(hour) => {
                let [from, to] = [*hour, hour + when::HOUR].map(|time| when::iso(time).unwrap_or_default());
                write!(
                    f,
                    "the rows of the hour from {from} to {to} were removed (usage.retention_days), so a range can't begin or \
                     end inside it: begin or end with a full hour"
                )
            }
            Self::KeyRevoked => f.write_str("the key was revoked"),
            Self::Stalled => f.write_str("a write to the ledger has waited for more than 5 seconds"),
            Self::Fenced => f.write_str("another process serves under the name of this gateway"),
            Self::Unavailable(cause) => write!(f, "the database can't be used: {cause}"),
            Self::Unknown(cause) => write!(f, "the database did not confirm the write: {cause}"),
            Self::Other(cause) => f.write_str(cause),
        }
    }
}

impl DatabaseError {
    /// Returns true if the system denies this user a file.
    pub fn is_denied(&self) -> bool {
        matches!(self, Self::Io(error) if error.kind() == io::ErrorKind::PermissionDenied)
    }

    /// Returns whether another process may serve in the place of this one, or a later version, so
    /// that this one has to stop.
    pub fn is_replaced(&self) -> bool {
        matches!(self, Self::Fenced | Self::VersionChanged { .. })
    }

    /// Returns whether every row would fail with it, so that none of a group need be tried alone.
    /// If the outcome is unknown, none may be.
    pub fn fails_every_row(&self) -> bool {
        !matches!(self, Self::Other(_) | Self::NoRow | Self::Panicked)
    }

    /// The word for a request that failed because of it.
    pub fn cause(&self) -> FailureCause {
        match self {
            Self::Busy | Self::NoConnection | Self::Stalled => FailureCause::DatabaseBusy,
            Self::Full => FailureCause::DiskFull,
            Self::Unavailable(_) | Self::Unknown(_) => FailureCause::DatabaseLost,
            Self::Panicked => FailureCause::Panic,
            _ => FailureCause::Database,
        }
    }

    /// The log line about a request that failed at a step; `None` if the log has a line about the
    /// database already.
    pub fn details(&self, step: &str) -> Option<String> {
        (!matches!(self, Self::Unavailable(_))).then(|| format!("{step}: {self}"))
    }
}

impl std::error::Error for DatabaseError {}

impl From<io::Error> for DatabaseError {
    fn from(error: io::Error) -> Self {
        Self::Io(Arc::new(error))
    }
}

#[derive(Debug)]
pub enum LockError {
    /// Another process holds it. Its pid is unknown for the moment before it has written it, and if
    /// it uses another name of the file.
    Taken(Option<u32>),
    /// Another process serves under the name of this gateway. Its address is unknown if it has just
    /// started.
    NameTaken {
        name: String,
        address: Option<String>,
    },
    Io(PathBuf, io::Error),
    Database(DatabaseError),
}

impl fmt::Display for LockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Taken(pid) => {
                let pid = pid.map_or("unknown".into(), |pid| pid.to_string());
                write!(
                    f,
                    "another adriaticum serve uses it (pid {pid}): stop that process first, or choose another database"
                )
            }
            Self::NameTaken { name, address } => {
                let address = address.as_deref().unwrap_or("an unknown address");
                write!(
                    f,
                    "another adriaticum serve has the name {name} in it, at {address}. Each gateway needs its own name, which \
                     is the host's name unless it is set: set gateway (ADRIATICUM_GATEWAY) to another one, such as \
                     {name}-2, or stop that process"
                )
            }
            Self::Io(path, error) => write!(f, "{}: {error}", path.display()),
            Self::Database(error) => error.fmt(f),
        }
    }
}

impl From<DatabaseError> for LockError {
    fn from(error: DatabaseError) -> Self {
        Self::Database(error)
    }
}

/// The reason why there is no copy, by the file that it is about.
#[derive(Debug)]
pub enum BackupError {
    Database(DatabaseError),
    Copy(DatabaseError),
}
