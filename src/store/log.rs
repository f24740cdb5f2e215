//! The database's log and its way to the disk.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use super::StoreError;

pub(super) struct Log {
    file: File,
    /// After a sync that failed, nobody knows what the disk holds, and a later one would not tell.
    failed: OnceLock<Arc<io::Error>>,
}

impl Log {
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let file = File::open(path).map_err(|error| StoreError::Io(Arc::new(error)))?;
        Ok(Self { file, failed: OnceLock::new() })
    }

    /// Returns when every commit that came before is on the disk.
    pub fn sync(&self) -> Result<(), StoreError> {
        self.check()?;
        self.file.sync_data().map_err(|error| {
            let error = Arc::new(error);
            StoreError::NotSynced(Arc::clone(self.failed.get_or_init(|| error)))
        })
    }

    /// Refuses to go on after a sync that failed.
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
    fn after_a_sync_that_failed_nothing_is_written() {
        // A pipe can't be synced.
        let (reader, _writer) = io::pipe().expect("a pipe");
        let file = File::from(std::os::fd::OwnedFd::from(reader));
        let log = Log { file, failed: OnceLock::new() };
        log.check().expect("nothing has failed yet");
        assert!(matches!(log.sync(), Err(StoreError::NotSynced(_))));
        assert!(log.check().is_err() && log.sync().is_err());
    }
}
