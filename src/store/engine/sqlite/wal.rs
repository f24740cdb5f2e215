//! The fsync of the WAL.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use super::super::super::StoreError;

pub(super) struct Wal {
    file: File,
    /// After a failed fsync the content of the disk is unknown, and a later fsync would not report it.
    failed: OnceLock<Arc<io::Error>>,
}

impl Wal {
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        Ok(Self { file: File::open(path)?, failed: OnceLock::new() })
    }

    /// Makes every earlier commit durable.
    pub fn sync(&self) -> Result<(), StoreError> {
        self.check()?;
        self.file.sync_data().map_err(|error| {
            let error = Arc::new(error);
            StoreError::NotSynced(Arc::clone(self.failed.get_or_init(|| error)))
        })
    }

    /// Returns the error of an earlier fsync that failed.
    pub fn check(&self) -> Result<(), StoreError> {
        match self.failed.get() {
            Some(error) => Err(StoreError::NotSynced(Arc::clone(error))),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_failed_fsync_nothing_is_written() {
        // A pipe can't be synced.
        let (reader, _writer) = io::pipe().expect("a pipe");
        let file = File::from(std::os::fd::OwnedFd::from(reader));
        let wal = Wal { file, failed: OnceLock::new() };
        wal.check().expect("nothing has failed yet");
        assert!(matches!(wal.sync(), Err(StoreError::NotSynced(_))));
        assert!(wal.check().is_err() && wal.sync().is_err());
    }
}
