//! The files of a restore: a copy of a backup is prepared beside the database and then put in its
//! place.
//!
//! Whenever this is interrupted, the path names the database that it had, or all of the new one. So
//! the copy has no WAL and is synced before it is renamed, and a WAL of the old one is gone by
//! then: SQLite would apply it to the new one.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use rusqlite::{Connection, OpenFlags};

use super::connection::{
    MEBIBYTE, check_every_page, check_every_page_and_index, connect, is_missing, show_time,
    switch_journal,
};
use super::database_files::{identity, identity_of};
use super::lock::keep_open;
use super::read_only_file::LOGS;
use super::session::SqliteSession;
use super::upgrades;
use crate::database::error::{DatabaseError, Result};
use crate::database::session::Session;
use crate::files::{self, NO_FOLLOW, with_suffix};
use crate::progress::Progress;
use crate::when;

/// The reason why there is no replacement, by the file that it is about.
pub enum ReplacementError {
    Backup(DatabaseError),
    /// This WAL or journal lies beside the backup, which may lack what is in there.
    Incomplete(PathBuf),
    Present(DatabaseError),
}

/// A copy of a backup beside the database that it is to replace. It is removed unless it was put in
/// place.
pub struct Replacement {
    /// The database's own file, whichever link leads to it.
    pub database: PathBuf,
    pub copy: PathBuf,
    /// The version that the backup has.
    pub version: i64,
}

impl Replacement {
    /// Copies a backup, which is only read, and checks all of the copy. Nothing beside the backup
    /// is ever applied to it: in a folder that others may write to, they could replace every page
    /// with a WAL of theirs.
    pub fn prepare(
        database: &Path,
        backup: &Path,
        progress: &Progress,
    ) -> Result<Self, ReplacementError> {
        let backup_error = |error: io::Error| ReplacementError::Backup(error.into());
        let target_error = |error: io::Error| ReplacementError::Present(error.into());
        let content = files::open(backup).map_err(backup_error)?;
        let file = identity_of(&content.metadata().map_err(backup_error)?);
        let database = match files::resolve(database) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => database.to_owned(),
            resolved => resolved.map_err(target_error)?,
        };
        if identity(&database).is_ok_and(|other| other == file) {
            return Err(backup_error(io::Error::other("it is the database itself")));
        }
        // The links are resolved, as SQLite does it.
        let backup = fs::canonicalize(backup).map_err(backup_error)?;
        let beside = LOGS.map(|log| with_suffix(&backup, log));
        if let Some(log) = beside
            .into_iter()
            .find(|log| fs::symlink_metadata(log).is_ok())
        {
            return Err(ReplacementError::Incomplete(log));
        }
        let mut replacement = Self {
            copy: with_suffix(&database, ".restoring"),
            database,
            version: 0,
        };
        // An interrupted restore may have left a copy.
        replacement.remove_copy().map_err(target_error)?;
        copy(&content, &replacement.copy, progress).map_err(target_error)?;
        replacement.version = replacement
            .check(progress)
            .map_err(ReplacementError::Backup)?;
        Ok(replacement)
    }

    /// Reads every page and every index. Returns the version.
    fn check(&self, progress: &Progress) -> Result<i64> {
        if is_missing(&self.copy)? {
            return Err(DatabaseError::Missing);
        }
        let mut connection = connect(&self.copy, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        show_time(&mut connection, "checking the copy", progress)?;
        check_every_page_and_index(&connection)?;
        Ok(upgrades::version(&connection)?)
    }

    /// Puts the copy, which nothing has open, in the place of the database. Returns the path of the
    /// former database, if there was one, and the reason why the folder could not be synced after
    /// the rename: after a power failure the path may name the former database again.
    pub fn put_in_place(self) -> Result<(Option<PathBuf>, Option<io::Error>)> {
        self.close_copy()?;
        let database = &self.database;
        // A colon would make it a host's name for some programs.
        let time = when::iso(when::now())
            .unwrap_or_default()
            .replace(['-', ':'], "");
        let kept = unused(database, &format!(".before-restore-{time}"));
        let mut is_kept = false;
        for suffix in [""].into_iter().chain(LOGS) {
            let from = with_suffix(database, suffix);
            if fs::symlink_metadata(&from).is_ok_and(|file| file.len() > 0) {
                keep(&from, &with_suffix(&kept, suffix))?;
                is_kept = true;
            }
        }
        self.sync_folder()?;
        for suffix in LOGS.into_iter().chain(["-shm"]) {
            remove(&with_suffix(database, suffix))?;
        }
        self.sync_folder()?;
        fs::rename(&self.copy, database)?;
        Ok((is_kept.then_some(kept), self.sync_folder().err()))
    }

    /// Moves the WAL into the copy, gives it the owner and the mode of the database, and syncs it.
    fn close_copy(&self) -> Result<()> {
        let connection = connect(&self.copy, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        switch_journal(&connection, "DELETE")?;
        drop(connection);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(NO_FOLLOW)
            .open(&self.copy)?;
        if let Ok(old) = fs::symlink_metadata(&self.database) {
            let new = file.metadata()?;
            if (old.uid(), old.gid()) != (new.uid(), new.gid()) {
                fchown(&file, Some(old.uid()), Some(old.gid()))?;
            }
            file.set_permissions(fs::Permissions::from_mode(old.mode() & 0o777))?;
        }
        Ok(file.sync_all()?)
    }

    fn sync_folder(&self) -> io::Result<()> {
        File::open(files::folder(&self.database))?.sync_all()
    }

    fn remove_copy(&self) -> io::Result<()> {
        ["", "-shm"]
            .into_iter()
            .chain(LOGS)
            .try_for_each(|suffix| remove(&with_suffix(&self.copy, suffix)))
    }
}

impl Drop for Replacement {
    fn drop(&mut self) {
        let _ = self.remove_copy();
    }
}

/// The database that is to be replaced. If it is sound, no other process can use it until this is
/// dropped.
pub struct PresentDatabase {
    connection: Connection,
    /// The damage that a check of its file found.
    pub damage: Option<DatabaseError>,
}

impl PresentDatabase {
    /// Moves the WAL into the database, which fails while another process has it open. A damaged
    /// one is only read, and not locked: SQLite might delete its WAL.
    pub fn lock(path: &Path, progress: &Progress) -> Result<Self> {
        if is_missing(path)? {
            return Err(DatabaseError::Missing);
        }
        let mut connection = connect(path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
        show_time(&mut connection, "checking the present database", progress)?;
        match check_every_page(&connection) {
            Err(damage @ DatabaseError::Damaged(_)) => {
                return Ok(Self {
                    connection,
                    damage: Some(damage),
                });
            }
            checked => checked?,
        }
        drop(connection);
        let connection = connect(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        switch_journal(&connection, "DELETE")?;
        connection.execute_batch("BEGIN EXCLUSIVE")?;
        Ok(Self {
            connection,
            damage: None,
        })
    }

    pub fn session(&self) -> Session<'_> {
        Session::Sqlite(SqliteSession::alone(&self.connection))
    }
}

/// Copies a file to a new one, which only the service's own user and group may read.
fn copy(from: &File, to: &Path, progress: &Progress) -> io::Result<()> {
    files::create(to)?;
    let mut copy = OpenOptions::new()
        .write(true)
        .custom_flags(NO_FOLLOW)
        .open(to)?;
    let total = from.metadata()?.len() / MEBIBYTE;
    for done in 0.. {
        progress.update("copying", done, total, "MiB");
        if io::copy(&mut from.take(MEBIBYTE), &mut copy)? < MEBIBYTE {
            break;
        }
    }
    Ok(())
}

/// Keeps a file under a second name, or as a copy if the file system has no hard links.
fn keep(from: &Path, to: &Path) -> io::Result<()> {
    fs::hard_link(from, to).or_else(|_| {
        copy(&keep_open(File::open(from)?), to, &Progress::hidden())?;
        File::open(to)?.sync_all()
    })
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// A path with this suffix that no file has.
fn unused(path: &Path, suffix: &str) -> PathBuf {
    let mut unused = with_suffix(path, suffix);
    let mut number = 1;
    while fs::symlink_metadata(&unused).is_ok() {
        number += 1;
        unused = with_suffix(path, &format!("{suffix}-{number}"));
    }
    unused
}
