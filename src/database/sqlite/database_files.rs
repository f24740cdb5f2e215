//! The database's files: whether those that are open are still those that the path names, and
//! whether an fsync has failed.
//!
//! SQLite goes on writing into a file that was removed, and every acknowledged row in it would be
//! gone at the next start. So every group checks the files before it writes.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::lock::FileLock;
use crate::database::access::Access;
use crate::database::error::{DatabaseError, Result};
use crate::files::with_suffix;

pub struct Files {
    database: (PathBuf, FileIdentity),
    /// `None` if there was none for an open that only reads.
    wal: Option<(PathBuf, FileIdentity)>,
    /// The WAL's length at the last check. It becomes shorter when the WAL begins again, or if
    /// another process cuts it.
    wal_length: AtomicU64,
    /// After a failed fsync the content of the disk is unknown, and a later fsync would not report
    /// it.
    failed: OnceLock<Arc<io::Error>>,
}

/// Identifies a file: its device and its inode.
pub type FileIdentity = (u64, u64);

impl Files {
    /// The database, which was `opened`, and its WAL. A restore may have replaced it meanwhile.
    pub fn open(path: &Path, opened: FileIdentity, access: Access) -> Result<Self> {
        if identity(path)? != opened {
            return Err(DatabaseError::Replaced);
        }
        let wal = with_suffix(path, "-wal");
        let wal = match identity(&wal) {
            Err(_) if access == Access::Read => None,
            found => Some((wal, found?)),
        };
        Ok(Self {
            database: (path.to_owned(), opened),
            wal,
            wal_length: AtomicU64::new(0),
            failed: OnceLock::new(),
        })
    }

    /// Checks that a lock, which was taken before, is on the database that was opened then.
    pub fn check_lock(&self, lock: &FileLock) -> Result<()> {
        if identity_of(&lock.database.metadata()?) == self.database.1 {
            Ok(())
        } else {
            Err(DatabaseError::Replaced)
        }
    }

    /// Returns the result unchanged. If it is a failed fsync, every later write fails with it.
    pub fn remember_failed_sync<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(DatabaseError::NotSynced(cause)) = &result {
            self.failed.get_or_init(|| Arc::clone(cause));
        }
        result
    }

    /// Checks that the open files are still those at their paths, so that a write is not lost at
    /// the next start. If the WAL has become shorter, `wal_in_use` returns how many bytes of it are
    /// in use.
    pub fn check(&self, wal_in_use: impl FnOnce() -> Result<u64>) -> Result<()> {
        if let Some(error) = self.failed.get() {
            return Err(DatabaseError::NotSynced(Arc::clone(error)));
        }
        let find = |(path, known): &(PathBuf, FileIdentity)| {
            fs::metadata(path)
                .ok()
                .filter(|file| identity_of(file) == *known)
                .ok_or(DatabaseError::Replaced)
        };
        find(&self.database)?;
        let Some(wal) = self.wal.as_ref().map(find).transpose()? else {
            return Ok(());
        };
        // A TRUNCATE checkpoint of another process leaves nothing in use. The connection that
        // writes would not notice any other truncation, as long as it has its pages in its cache.
        if wal.len() < self.wal_length.load(Ordering::Relaxed) && wal.len() < wal_in_use()? {
            return Err(DatabaseError::Replaced);
        }
        self.wal_length.store(wal.len(), Ordering::Relaxed);
        Ok(())
    }
}

pub fn identity(path: &Path) -> io::Result<FileIdentity> {
    fs::metadata(path).map(|file| identity_of(&file))
}

pub fn identity_of(file: &Metadata) -> FileIdentity {
    (file.dev(), file.ino())
}
