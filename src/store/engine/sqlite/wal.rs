//! The WAL file: its fsync, and how many pages it holds.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::super::super::StoreError;

/// The bytes of a page in the WAL: 4,096 and the header of its frame.
const FRAME: u64 = 4096 + 24;

pub(super) struct Wal {
    file: File,
    /// After a failed fsync the content of the disk is unknown, and a later fsync would not report it.
    failed: OnceLock<Arc<io::Error>>,
    /// Pages in use, as the last look at it found.
    pages: AtomicU64,
}

impl Wal {
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        Ok(Self { file: File::open(path)?, failed: OnceLock::new(), pages: AtomicU64::new(0) })
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

    pub fn pages(&self) -> u64 {
        self.pages.load(Ordering::Acquire)
    }

    pub fn bytes(&self) -> u64 {
        self.pages() * FRAME
    }

    pub fn set_pages(&self, pages: u64) {
        self.pages.store(pages, Ordering::Release);
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
        let wal = Wal { file, failed: OnceLock::new(), pages: AtomicU64::new(0) };
        wal.check().expect("nothing has failed yet");
        assert!(matches!(wal.sync(), Err(StoreError::NotSynced(_))));
        assert!(wal.check().is_err() && wal.sync().is_err());
    }
}
