//! The database's files: how the first one is created, the fsync of the WAL, and whether the files that are open are still
//! those that the path names.
//!
//! SQLite goes on writing into a file that was removed, and every acknowledged row in it would be gone at the next
//! start. So every group checks the files before it writes.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use super::super::super::StoreError;

/// Creates the database's file if there is none: not by SQLite, so that only the service's own user and group may read
/// it.
pub(super) fn make(path: &Path) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.append(true).mode(0o640);
    match options.clone().create_new(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => options.open(path).map(drop),
        Err(error) => Err(error),
        Ok(file) => {
            // Root may create the first key before the service was ever started. The service could not open a file of
            // root's, so the file gets the folder's owner. SQLite does the same for the files beside it.
            let folder =
                path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
            let folder = fs::metadata(folder)?;
            if file.metadata()?.uid() == 0 && folder.uid() != 0 {
                fchown(&file, Some(folder.uid()), Some(folder.gid()))?;
            }
            Ok(())
        }
    }
}

pub(super) struct Files {
    /// The database and its WAL.
    known: [(PathBuf, Identity); 2],
    wal: File,
    /// After a failed fsync the content of the disk is unknown, and a later fsync would not report it.
    failed: OnceLock<Arc<io::Error>>,
}

/// What stays the same for as long as a file is the same: its device and its number there.
type Identity = (u64, u64);

impl Files {
    /// The database and its WAL, as they are now.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let mut wal = OsString::from(path);
        wal.push("-wal");
        let wal = PathBuf::from(wal);
        Ok(Self {
            wal: File::open(&wal)?,
            known: [(path.to_owned(), identity(path)?), (wal.clone(), identity(&wal)?)],
            failed: OnceLock::new(),
        })
    }

    /// Makes every earlier commit durable.
    pub fn sync(&self) -> Result<(), StoreError> {
        self.check_synced()?;
        self.wal.sync_data().map_err(|error| {
            let error = Arc::new(error);
            StoreError::NotSynced(Arc::clone(self.failed.get_or_init(|| error)))
        })
    }

    /// Whether what is written now would be there after the next start.
    pub fn check(&self) -> Result<(), StoreError> {
        self.check_synced()?;
        let is_known =
            |(path, known): &(PathBuf, Identity)| identity(path).is_ok_and(|found| found == *known);
        if self.known.iter().all(is_known) { Ok(()) } else { Err(StoreError::Replaced) }
    }

    /// Forgets an earlier failure, and puts a pipe in the place of the WAL: it can't be synced.
    #[cfg(test)]
    pub fn make_unsyncable(&mut self) {
        let (reader, _) = io::pipe().expect("a pipe");
        self.wal = File::from(std::os::fd::OwnedFd::from(reader));
        self.failed = OnceLock::new();
    }

    /// Returns the error of an earlier fsync that failed.
    fn check_synced(&self) -> Result<(), StoreError> {
        self.failed.get().map_or(Ok(()), |error| Err(StoreError::NotSynced(Arc::clone(error))))
    }
}

fn identity(path: &Path) -> io::Result<Identity> {
    fs::metadata(path).map(|file| (file.dev(), file.ino()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::chown;

    use super::*;

    /// Only root can give files away, so as another user this shows that nothing is tried.
    #[test]
    fn what_root_makes_belongs_to_the_folder_s_owner() {
        let folder = std::env::temp_dir().join(format!("adriaticum-{}", crate::id::secret_hex::<8>()));
        fs::create_dir(&folder).expect("the folder for temporary files should take one");
        let is_root = fs::metadata(&folder).expect("it was made").uid() == 0;
        if is_root {
            chown(&folder, Some(12_345), Some(54_321)).expect("root may");
        }
        let path = folder.join("test.db");
        make(&path).expect("it should be made");
        make(&path).expect("it is there already");
        let (made, of) = (fs::metadata(&path).expect("a file"), fs::metadata(&folder).expect("a folder"));
        assert_eq!((made.uid(), made.gid()), (of.uid(), of.gid()));
        assert_eq!(made.mode() & 0o007, 0, "others may not read it");
        fs::remove_dir_all(&folder).expect("it should go");
    }
}
