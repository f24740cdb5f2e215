//! The lock that keeps a second `serve` off a database: the first one could not write rows any more.
//!
//! It is on a file of its own, because closing any other descriptor of the database's file would drop SQLite's locks.
//! The system releases it when the process ends, however it ends, so the file stays and is no obstacle.

use std::fs::{File, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::{fmt, process};

use super::database_files::with_suffix;
use crate::files;
use crate::store::StoreError;

/// Held until the value is dropped.
#[derive(Debug)]
pub struct FileLock {
    pub(super) file: File,
    pub(super) path: PathBuf,
}

#[derive(Debug)]
pub enum LockError {
    /// Another process holds it. Its pid is unknown for the moment before it has written it.
    Taken(Option<u32>),
    /// Another process serves under the name of this gateway. Its address is unknown if it has just started.
    NameTaken {
        name: String,
        address: Option<String>,
    },
    Io(PathBuf, io::Error),
    Database(StoreError),
}

impl fmt::Display for LockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Taken(pid) => {
                let pid = pid.map_or("unknown".into(), |pid| pid.to_string());
                write!(
                    f,
                    "another adriaticum serve uses it (pid {pid}): stop that process first, or choose another database"
                )
            }
            Self::NameTaken { name, address } => {
                let address = address.as_deref().unwrap_or("an unknown address");
                write!(
                    f,
                    "another adriaticum serve has the name {name} in it, at {address}. Each gateway needs its own name, which \
                     is the host's name unless it is set: set gateway (ADRIATICUM_GATEWAY) to another one, such as \
                     {name}-2, or stop that process"
                )
            }
            Self::Io(path, error) => write!(f, "{}: {error}", path.display()),
            Self::Database(error) => error.fmt(f),
        }
    }
}

impl FileLock {
    /// Does not wait: the holder may serve for years.
    pub fn take(database: &Path) -> Result<Self, LockError> {
        // Beside the database's own file, whichever link leads to it. A database that is yet to be created has no link.
        let real = files::resolve(database).unwrap_or_else(|_| database.to_owned());
        let path = with_suffix(&real, ".lock");
        let failed = |error| LockError::Io(path.clone(), error);
        files::create(&path).map_err(failed)?;
        let mut file = File::options()
            .read(true)
            .write(true)
            .custom_flags(files::NO_FOLLOW)
            .open(&path)
            .map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {
                // On a full disk this fails. The lock holds without it.
                let _ = file.set_len(0).and_then(|()| writeln!(file, "{}", process::id()));
                Ok(Self { file, path })
            }
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                let _ = file.read_to_string(&mut holder);
                Err(LockError::Taken(holder.trim().parse().ok()))
            }
            Err(TryLockError::Error(error)) => Err(failed(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, symlink};

    use super::*;
    use crate::store::tests::Temporary;

    #[test]
    fn one_at_a_time_by_whichever_path() {
        let temporary = Temporary::sqlite();
        let (path, link) = (temporary.folder.join("test.db"), temporary.folder.join("link.db"));
        symlink("test.db", &link).expect("a link");
        // A crash left this behind.
        fs::write(temporary.folder.join("test.db.lock"), "4194304\nmore than a pid").expect("a file");
        let first = FileLock::take(&path).expect("it is free");
        for path in [&path, &link] {
            let error = FileLock::take(path).expect_err("it is held");
            assert!(matches!(error, LockError::Taken(Some(pid)) if pid == process::id()), "{error}");
        }
        drop(first);
        FileLock::take(&link).expect("it was released");
        assert!(!temporary.folder.join("link.db.lock").exists());
    }

    #[test]
    fn its_file_is_for_the_owner_of_the_database() {
        let temporary = Temporary::sqlite();
        let path = temporary.folder.join("new.db");
        let _lock = FileLock::take(&path).expect("it is free");
        assert!(!path.exists(), "the database is not touched");
        let mode = temporary.folder.join("new.db.lock").metadata().expect("a file").mode();
        assert_eq!(mode & 0o007, 0, "others may not lock it");
        let error = FileLock::take(Path::new("/dev/null/x.db")).expect_err("there is no such folder");
        assert!(error.to_string().starts_with("/dev/null/x.db.lock: "), "{error}");
    }
}
