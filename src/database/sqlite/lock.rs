//! The lock that keeps a second `serve`, and a `restore` or a `move`, off a database that is
//! served.
//!
//! SQLite names the WAL after the path and keeps the pages in the inode, so both are locked. Two
//! processes that use one file by two names, which are hard links, would each have a WAL and
//! overwrite each other's pages: the lock on the inode prevents it. Two that use one name for two
//! files, because the first one's was moved away, would share a WAL: the lock on the name prevents
//! it. That lock is on a file beside the database, which has the pid for the message.
//!
//! The system releases both when the process ends, however it ends, so the lock file stays and is
//! no obstacle.

use std::fs::{File, TryLockError};
use std::io::{self, Read, Write};
use std::mem::ManuallyDrop;
use std::path::Path;
use std::process;

use super::database_files::{FileIdentity, FileState};
use crate::database::{Problem, ProblemKind};
use crate::files::{self, with_suffix};

/// Held until the process ends, even if the value is dropped.
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
        assert_eq!(other.expect_err("another").kind, ProblemKind::Replaced);
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
