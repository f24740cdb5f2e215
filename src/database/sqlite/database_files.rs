//! The database's files: whether those that are open are still those that the path names, and
//! whether no other program has changed them.
//!
//! SQLite goes on writing into a file that was removed, and with the pages in its cache it would not
//! notice that another file was copied over this one: every acknowledged row would be gone at the
//! next start. So every transaction checks the files before it writes.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::writer::FRAME;
use crate::database::{Access, Problem, Result};
use crate::files::with_suffix;

pub struct Files {
    database: PathBuf,
    /// Its content changes only by a checkpoint.
    state: FileState,
    /// False in a command, because a service makes checkpoints beside it.
    is_content_watched: bool,
    /// The pages of the WAL that were in the database when that was noted.
    moved: u64,
    /// The pages of the WAL after the last commit: if there are fewer, it has begun again.
    pages: u64,
    /// The `-wal` and the `-shm`.
    beside: [(PathBuf, FileIdentity); 2],
    /// The WAL's length at the last check. It becomes shorter when the WAL begins again, or if
    /// another process cuts it.
    wal_length: u64,
}

/// A file at one time.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct FileState {
    pub identity: FileIdentity,
    bytes: u64,
    /// The time of the last change, in seconds and nanoseconds.
    changed: (i64, i64),
}

/// Identifies a file: its device and its inode.
pub type FileIdentity = (u64, u64);

impl FileState {
    pub fn read(path: &Path) -> io::Result<Self> {
        fs::metadata(path).map(|file| Self::of(&file))
    }

    pub fn of(file: &Metadata) -> Self {
        Self {
            identity: (file.dev(), file.ino()),
            bytes: file.len(),
            changed: (file.mtime(), file.mtime_nsec()),
        }
    }
}

impl Files {
    /// The database, which was `opened`, and the files beside it. A restore may have replaced it
    /// meanwhile.
    pub fn open(path: &Path, opened: FileIdentity, access: Access) -> Result<Self> {
        let state = FileState::read(path)?;
        if state.identity != opened {
            return Err(Problem::replaced());
        }
        let beside = |suffix| -> io::Result<_> {
            let path = with_suffix(path, suffix);
            FileState::read(&path).map(|state| (path, state.identity))
        };
        Ok(Self {
            database: path.to_owned(),
            state,
            is_content_watched: access == Access::Serve,
            moved: 0,
            pages: 0,
            beside: [beside("-wal")?, beside("-shm")?],
            wal_length: 0,
        })
    }

    /// Fails if a file was removed, replaced, cut or changed. `wal_pages` returns how many pages of
    /// the WAL are in use, and how many of those are in the database.
    pub fn check(&mut self, wal_pages: impl Fn() -> Result<(u64, u64)>) -> Result<()> {
        let find = |path: &Path, known: FileIdentity| {
            FileState::read(path)
                .ok()
                .filter(|state| state.identity == known)
                .ok_or_else(Problem::replaced)
        };
        let database = find(&self.database, self.state.identity)?;
        let [wal, shm] = &self.beside;
        let wal = find(&wal.0, wal.1)?;
        find(&shm.0, shm.1)?;
        // A TRUNCATE checkpoint of another process leaves nothing in use. The connection that
        // writes would not notice any other truncation, as long as it has its pages in its cache.
        if wal.bytes < self.wal_length && wal.bytes < wal_pages()?.0 * FRAME {
            return Err(Problem::replaced());
        }
        self.wal_length = wal.bytes;
        if self.is_content_watched && database != self.state {
            // No checkpoint of ours: one of another process moves pages or begins the WAL again, a
            // copy over the file does neither.
            let (pages, moved) = wal_pages()?;
            if moved == self.moved && pages >= self.pages {
                return Err(Problem::replaced());
            }
            (self.state, self.moved, self.pages) = (database, moved, pages);
        }
        Ok(())
    }

    /// Notes the file as a checkpoint of this process has left it.
    pub fn note_checkpoint(&mut self, moved: u64) {
        // A file that was replaced meanwhile keeps the old state, and is found by the next check.
        if let Ok(state) = FileState::read(&self.database)
            && state.identity == self.state.identity
        {
            (self.state, self.moved) = (state, moved);
        }
    }

    /// Notes the pages of the WAL after a commit.
    pub fn note_commit(&mut self, pages: u64) {
        if pages < self.pages {
            self.moved = 0;
        }
        self.pages = pages;
    }
}
