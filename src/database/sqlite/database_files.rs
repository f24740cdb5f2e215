//! The database's files: a lock on them, whether those that are open are still those that the path
//! names, and whether no other program has changed them.
//!
//! SQLite goes on writing into a file that was removed, and with the pages in its cache it would not
//! notice that another file was copied over this one: every acknowledged row would be gone at the
//! next start. So every transaction checks the files before it writes.

use std::fs::{self, File, Metadata, TryLockError};
use std::io::{self, Read, Write};
use std::mem::ManuallyDrop;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process;

use crate::database::Access;
use crate::error::{Problem, ProblemKind, Result};
use crate::files::{self, with_suffix};

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

/// The bytes of a page in the WAL: 4,096 and the header of its frame.
pub const FRAME: u64 = 4096 + 24;

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
            return Err(Problem::files_changed());
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
    pub fn check_unchanged(&mut self, wal_pages: impl Fn() -> Result<(u64, u64)>) -> Result<()> {
        let find = |path: &Path, known: FileIdentity| {
            FileState::read(path)
                .ok()
                .filter(|state| state.identity == known)
                .ok_or_else(Problem::files_changed)
        };
        let database = find(&self.database, self.state.identity)?;
        let [wal, shm] = &self.beside;
        let wal = find(&wal.0, wal.1)?;
        find(&shm.0, shm.1)?;
        // A TRUNCATE checkpoint of another process leaves nothing in use. The connection that
        // writes would not notice any other truncation, as long as it has its pages in its cache.
        if wal.bytes < self.wal_length && wal.bytes < wal_pages()?.0 * FRAME {
            return Err(Problem::files_changed());
        }
        self.wal_length = wal.bytes;
        if self.is_content_watched && database != self.state {
            // No checkpoint of ours: one of another process moves pages or begins the WAL again, a
            // copy over the file does neither.
            let (pages, moved) = wal_pages()?;
            if moved == self.moved && pages >= self.pages {
                return Err(Problem::files_changed());
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

/// The lock that keeps a second `serve`, and a `restore` or a `move`, off a database that is served.
/// Held until the process ends, even if the value is dropped.
///
/// SQLite names the WAL after the path and keeps the pages in the inode, so both are locked. Two
/// processes that use one file by two names, which are hard links, would each have a WAL and
/// overwrite each other's pages: the lock on the inode prevents it. Two that use one name for two
/// files, because the first one's was moved away, would share a WAL: the lock on the name prevents
/// it. That lock is on a file beside the database, which has the pid for the message.
///
/// The system releases both when the process ends, however it ends, so the lock file stays and is
/// no obstacle.
#[derive(Debug)]
pub struct FileLock {
    database: ManuallyDrop<File>,
}

impl FileLock {
    /// Creates an empty database if there is none. Does not wait: the holder may serve for years.
    pub fn take(database: &Path) -> Result<Self, Problem> {
        let taken = |pid: String| {
            Problem::new(
                ProblemKind::Busy,
                format!(
                    "another adriaticum serve uses it (pid {pid}): stop that process first, or choose another database"
                ),
            )
        };
        // Beside the database's own file, whichever link leads to it. A database that is yet to be
        // created has no link.
        let real = database
            .canonicalize()
            .unwrap_or_else(|_| database.to_owned());
        let path = with_suffix(&real, ".lock");
        let lock_file_error = |error: io::Error| Problem::from(error).of(path.display());
        files::create(&path).map_err(lock_file_error)?;
        let mut name = File::options()
            .read(true)
            .write(true)
            .open(&path)
            .map(keep_open)
            .map_err(lock_file_error)?;
        if !try_lock(&name).map_err(lock_file_error)? {
            let mut holder = String::new();
            let _ = name.read_to_string(&mut holder);
            // It is empty for the moment before the holder has written it.
            let is_pid = holder.trim().parse::<u32>().is_ok();
            return Err(taken(if is_pid {
                holder.trim().into()
            } else {
                "unknown".into()
            }));
        }
        // On a full disk this fails. The lock holds without it.
        let _ = name
            .set_len(0)
            .and_then(|()| writeln!(name, "{}", process::id()));
        // Only then: `create` closes a descriptor of a file that is there, and `move` has the
        // database open.
        if !real.exists() {
            files::create(&real)?;
        }
        let database = File::open(&real).map(keep_open)?;
        if !try_lock(&database)? {
            return Err(taken("unknown".into()));
        }
        Ok(Self { database })
    }

    pub(super) fn identity(&self) -> io::Result<FileIdentity> {
        Ok(FileState::of(&self.database.metadata()?).identity)
    }
}

/// Locks a file. Returns false if another process has locked it.
fn try_lock(file: &File) -> io::Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Keeps a descriptor open until the process ends. Closing one of a database would drop the locks
/// that SQLite has on it, because POSIX locks belong to the process and not to a descriptor.
pub(super) fn keep_open(file: File) -> ManuallyDrop<File> {
    ManuallyDrop::new(file)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, symlink};

    use super::*;
    use crate::database::Session;
    use crate::store::tests::Temporary;

    #[test]
    fn one_at_a_time_by_whichever_path() {
        let temporary = Temporary::sqlite();
        let [path, link, name] =
            ["test.db", "link.db", "name.db"].map(|file| temporary.folder.join(file));
        symlink("test.db", &link).expect("a link");
        fs::hard_link(&path, &name).expect("a second name");
        // A crash left this behind.
        fs::write(
            temporary.folder.join("test.db.lock"),
            "4194304\nmore than a pid",
        )
        .expect("a file");
        let _lock = FileLock::take(&path).expect("it is free");
        for (path, pid) in [
            (&path, Some(process::id())),
            (&link, Some(process::id())),
            (&name, None),
        ] {
            let error = FileLock::take(path).expect_err("it is held");
            let pid = pid.map_or("unknown".into(), |pid| pid.to_string());
            assert!(error.text.contains(&format!("(pid {pid})")), "{error}");
        }
        assert!(!temporary.folder.join("link.db.lock").exists());
        // Another file of the same name would have the same WAL.
        fs::rename(&path, temporary.folder.join("old.db")).expect("another place");
        let taken = FileLock::take(&path).expect_err("it is held");
        assert_eq!(taken.kind, ProblemKind::Busy);
    }

    /// SQLite's own locks, which are gone when the process closes any descriptor of the file.
    #[test]
    fn a_lock_that_is_dropped_or_refused_leaves_those_of_sqlite() {
        let temporary = Temporary::sqlite();
        let path = temporary.folder.join("test.db");
        let read = |session: &Session| {
            let locks = || fs::read_to_string("/proc/locks").expect("the locks of this host");
            let inode = format!(":{} ", path.metadata().expect("a file").ino());
            let posix = |line: &&str| line.contains("POSIX") && line.contains(&inode);
            let count = || locks().lines().filter(posix).count();
            session.value::<i64>("SELECT count(*) FROM keys", &[])?;
            let before = count();
            FileLock::take(&path).expect("it is free");
            FileLock::take(&path).expect_err("it is held until the process ends");
            assert!(before > 0 && count() == before);
            Ok(())
        };
        temporary.store.database.read(read).expect("a read");
    }

    #[test]
    fn a_lock_on_another_file_than_the_one_that_is_open_is_found() {
        let temporary = Temporary::sqlite();
        let [own, other] = ["test.db", "other.db"].map(|file| {
            let lock = FileLock::take(&temporary.folder.join(file)).expect("it is free");
            temporary.store.check_start(Some(&lock))
        });
        own.expect("it is the same");
        assert_eq!(other.expect_err("another").kind, ProblemKind::Unsafe);
    }

    #[test]
    fn its_file_is_for_the_owner_of_the_database() {
        let temporary = Temporary::sqlite();
        let path = temporary.folder.join("new.db");
        let _lock = FileLock::take(&path).expect("it is free");
        for file in ["new.db", "new.db.lock"] {
            let mode = temporary
                .folder
                .join(file)
                .metadata()
                .expect("a file")
                .mode();
            assert_eq!(mode & 0o007, 0, "others may not lock {file}");
        }
        let error =
            FileLock::take(Path::new("/dev/null/x.db")).expect_err("there is no such folder");
        assert!(
            error.to_string().starts_with("/dev/null/x.db.lock: "),
            "{error}"
        );
    }
}
