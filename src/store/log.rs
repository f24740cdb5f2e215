//! The database's log and its way to the disk: one sync serves all whose commits came before it began.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use super::StoreError;

pub(super) struct Log {
    file: File,
    state: Mutex<State>,
    /// Told at the end of every sync.
    ended: Condvar,
}

#[derive(Default)]
struct State {
    syncing: bool,
    /// The last commit that is to be on the disk, and the last that is.
    wanted: u64,
    synced: u64,
    /// After a sync that failed, nobody knows what the disk holds, and a later one would not tell.
    failed: Option<Arc<io::Error>>,
}

impl Log {
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let file = File::open(path).map_err(|error| StoreError::Io(Arc::new(error)))?;
        Ok(Self { file, state: Mutex::default(), ended: Condvar::new() })
    }

    /// Returns when the commit of this number, and with it every one before, is on the disk.
    pub fn sync(&self, commit: u64) -> Result<(), StoreError> {
        let mut state = self.lock();
        state.wanted = state.wanted.max(commit);
        while state.syncing && state.synced < commit {
            state = self.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        refuse_after_failure(&state)?;
        if state.synced >= commit {
            return Ok(());
        }
        state.syncing = true;
        drop(state);
        // The commits that others are about to end are served by this sync too.
        thread::yield_now();
        let reached = self.lock().wanted;
        let result = self.file.sync_data();
        let mut state = self.lock();
        state.syncing = false;
        match result {
            Ok(()) => state.synced = reached,
            Err(error) => state.failed = Some(Arc::new(error)),
        }
        self.ended.notify_all();
        refuse_after_failure(&state)
    }

    /// Refuses to go on after a sync that failed.
    pub fn check(&self) -> Result<(), StoreError> {
        refuse_after_failure(&self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn refuse_after_failure(state: &State) -> Result<(), StoreError> {
    match &state.failed {
        Some(error) => Err(StoreError::NotSynced(Arc::clone(error))),
        None => Ok(()),
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
        let log = Log { file, state: Mutex::default(), ended: Condvar::new() };
        log.check().expect("nothing has failed yet");
        assert!(matches!(log.sync(1), Err(StoreError::NotSynced(_))));
        assert!(log.check().is_err() && log.sync(2).is_err());
    }
}
