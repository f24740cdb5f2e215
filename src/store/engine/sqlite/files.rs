//! The database's files: how the first one is created, and whether those that are open are still those that the path
//! names.
//!
//! SQLite goes on writing into a file that was removed, and every acknowledged row in it would be gone at the next
//! start. So every group checks the files before it writes.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

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

pub(super) struct Files([(PathBuf, Identity); 2]);

/// What stays the same for as long as a file is the same: its device and its number there.
type Identity = (u64, u64);

impl Files {
    /// The database and its WAL, as they are now.
    pub fn of(path: &Path) -> Result<Self, StoreError> {
        let mut wal = OsString::from(path);
        wal.push("-wal");
        let wal = PathBuf::from(wal);
        let identities = (identity(path)?, identity(&wal)?);
        Ok(Self([(path.to_owned(), identities.0), (wal, identities.1)]))
    }

    pub fn wal(&self) -> &Path {
        &self.0[1].0
    }

    pub fn check(&self) -> Result<(), StoreError> {
        for (path, known) in &self.0 {
            if identity(path).ok() != Some(*known) {
                return Err(StoreError::Replaced);
            }
        }
        Ok(())
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
