//! Whether the files that are open are still those that the path names.
//!
//! SQLite writes on into a file that was removed, and every row in it would be gone at the next start: what
//! was acknowledged would be lost. So it is looked at before each group is written.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::StoreError;

pub(super) struct Files([(PathBuf, Identity); 2]);

/// What stays the same for as long as a file is the same: its device and its number there.
type Identity = (u64, u64);

impl Files {
    /// The database and its log, as they are now.
    pub fn of(path: &Path) -> Result<Self, StoreError> {
        let mut log = OsString::from(path);
        log.push("-wal");
        let files = [path.to_owned(), log.into()].map(|path| {
            let identity = identity(&path).map_err(|error| StoreError::Io(Arc::new(error)));
            (path, identity)
        });
        let [(database, first), (log, second)] = files;
        Ok(Self([(database, first?), (log, second?)]))
    }

    /// The path of the log.
    pub fn log(&self) -> &Path {
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

fn identity(path: &Path) -> std::io::Result<Identity> {
    fs::metadata(path).map(|file| (file.dev(), file.ino()))
}
