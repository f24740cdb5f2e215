//! Backups: a copy of a database that may be in use is made, and another one takes the database's
//! place.
//!
//! For a restore, a copy of the backup is prepared beside the database. Whenever that is interrupted,
//! the path names the database that it had, or all of the new one. So the copy has no WAL and is
//! synced before it is renamed, and a WAL of the old one is gone by then: SQLite would apply it to
//! the new one.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rusqlite::types::{ToSqlOutput, ValueRef};
use rusqlite::{Connection, OpenFlags};

use super::connection::{
    LOGS, OpenFile, check_every_page, check_every_page_and_index, connect, is_missing,
    switch_journal, uri,
};
use super::database_files::{FileState, keep_open};
use super::session;
use crate::database::schema::{self, refuse_other_program};
use crate::database::{Access, Schema, Session};
use crate::error::{Problem, ProblemKind, Result};
use crate::files::{self, with_suffix};
use crate::progress::Progress;
use crate::when::{self, Zone};

impl OpenFile {
    /// Copies the database as it is at this moment, while others write, to a new file that only its
    /// owner and group may read. An error begins with the path that it is about.
    pub fn copy_to(self, to: &Path, progress: &Progress) -> Result<()> {
        let source = self.path.display().to_string();
        match files::create(to) {
            Ok(true) => {}
            Ok(false) => {
                let exists = "it exists already: the copy needs a new file";
                return Err(Problem::other(exists).of(to.display()));
            }
            Err(error) => return Err(Problem::from(error).of(to.display())),
        }
        let copied = self.vacuum_into(to, progress);
        let copied = copied.map_err(|problem| match problem.kind {
            ProblemKind::Damaged => problem.of(&source),
            _ => problem.of(to.display()),
        });
        let unchanged = self.read_only.map_or(Ok(()), |file| file.check_unchanged());
        unchanged
            .map_err(|error| Problem::from(error).of(&source))
            .and(copied)
            .inspect_err(|_| {
                let _ = fs::remove_file(to);
            })
    }

    fn vacuum_into(&self, to: &Path, progress: &Progress) -> Result<()> {
        // The connection's NOFOLLOW holds for the copy too: in a folder that others may write to,
        // they could put a link in its place.
        let name = to.file_name().unwrap_or_default();
        let to = files::folder(to).canonicalize()?.join(name);
        progress.show("copying the database", 0);
        // A path need not be UTF-8, and SQLite takes any bytes as text.
        let path = ValueRef::Text(to.as_os_str().as_bytes());
        self.connection
            .execute("VACUUM INTO ?", [ToSqlOutput::Borrowed(path)])?;
        Ok(())
    }
}

/// Returns what a query for a number finds in a file that nothing has open.
pub fn count(path: &Path, query: &str) -> Result<i64> {
    let connection = connect(&path.canonicalize()?, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
    Ok(connection.query_row(query, [], |row| row.get(0))?)
}

/// A backup that is to be restored. It is only read, and nothing beside it is ever applied to it:
/// in a folder that others may write to, they could replace every page with a WAL of theirs.
pub struct Backup {
    /// For messages.
    pub name: String,
    file: OpenFile,
}

/// A copy of a backup beside the database that it is to replace.
pub struct Replacement {
    /// The database's own file, whichever link leads to it.
    database: PathBuf,
    copy: CopyFile,
    /// To the copy. The present database is attached to it as `present`.
    connection: Connection,
}

/// It is removed unless it was put in place.
struct CopyFile(PathBuf);

/// The database that is to be replaced.
pub enum PresentDatabase {
    Missing,
    /// No other process can change it until the replacement is dropped.
    Sound,
    /// A part of it may be readable. It is only read, and not locked.
    Damaged,
    Unreadable(Problem),
}

impl Backup {
    /// Refuses the database itself. An error begins with the name.
    pub fn open(path: &Path, name: String, database: &Path) -> Result<Self> {
        match open_backup(database, path) {
            Ok(file) => Ok(Self { name, file }),
            Err(problem) => Err(about_backup(&name, problem)),
        }
    }
}

fn about_backup(name: &str, problem: Problem) -> Problem {
    match problem.kind {
        ProblemKind::Damaged => Problem::other(format!(
            "{name}: it is damaged or not a database. Use another backup"
        )),
        _ => problem.of(name),
    }
}

impl Replacement {
    /// Copies a backup, checks all of the copy, and brings it to the present version. An error
    /// begins with the name of the file that it is about.
    pub fn prepare(
        database: &Path,
        Backup { name, file }: Backup,
        schema: &Schema,
        progress: &Progress,
    ) -> Result<Self> {
        let about_backup = |problem: Problem| about_backup(&name, problem);
        let database = match database.canonicalize() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => database.to_owned(),
            resolved => resolved.map_err(|error| Problem::from(error).of(database.display()))?,
        };
        let copy = CopyFile(with_suffix(&database, ".restoring"));
        // An interrupted restore may have left a copy.
        copy.remove()
            .map_err(|error| Problem::from(error).of(copy.0.display()))?;
        file.copy_to(&copy.0, progress)
            .map_err(|problem| match problem.kind {
                ProblemKind::Damaged => about_backup(problem),
                _ => problem,
            })?;
        let connection = check_copy(&copy.0, schema, progress).map_err(about_backup)?;
        Ok(Self {
            database,
            copy,
            connection,
        })
    }

    pub fn session(&self) -> Session<'_> {
        session(&self.connection)
    }

    /// Changes the copy: all that `work` does, or nothing.
    pub fn change<T>(&self, work: impl FnOnce(&Session) -> Result<T>) -> Result<T> {
        let transaction = self.connection.unchecked_transaction()?;
        let value = work(&self.session())?;
        transaction.commit()?;
        Ok(value)
    }

    /// Attaches the present database as `present`. A sound one is locked, which fails while another
    /// process has it open.
    pub fn attach_present(&self, progress: &Progress) -> Result<PresentDatabase> {
        let path = &self.database;
        match is_missing(path) {
            Ok(true) => return Ok(PresentDatabase::Missing),
            Ok(false) => {}
            Err(_) => {
                let lost = Problem::other("its file has lost its content");
                return Ok(PresentDatabase::Unreadable(lost));
            }
        }
        let is_sound = match check_present(path, progress) {
            Ok(()) => true,
            Err(problem) if problem.kind == ProblemKind::Damaged => false,
            Err(problem) => return Err(problem.of(path.display())),
        };
        let comparing = "comparing it with the present database";
        progress.show(comparing, 0);
        match self.attach(is_sound) {
            Ok(()) if is_sound => Ok(PresentDatabase::Sound),
            Ok(()) => Ok(PresentDatabase::Damaged),
            Err(problem) if problem.kind == ProblemKind::Busy => {
                Err(problem.of(self.database.display()))
            }
            Err(problem) => Ok(PresentDatabase::Unreadable(problem)),
        }
    }

    fn attach(&self, is_sound: bool) -> Result<()> {
        // To be read: SQLite might delete the WAL of a damaged one.
        let present = uri(&self.database, "mode=ro");
        self.connection.execute("ATTACH ? AS present", [present])?;
        if is_sound {
            // Without a WAL, the lock of a reader keeps every other process from writing, and in
            // this mode it is kept from the first read on.
            self.connection
                .pragma_update(Some("present"), "locking_mode", "EXCLUSIVE")?;
        }
        let number = |query: &str| {
            self.connection
                .query_row(query, [], |row| row.get::<_, i64>(0))
        };
        let found = number("PRAGMA present.user_version")?;
        if Some(found) != schema::version(&self.session())? {
            return Err(Problem::other(format!(
                "its version is {found}, and that of the program another"
            )));
        }
        number("SELECT count(*) FROM present.sqlite_schema")?;
        let journal: String =
            self.connection
                .query_row("PRAGMA present.journal_mode", [], |row| row.get(0))?;
        match is_sound && journal == "wal" {
            // It was opened again since the WAL was moved.
            true => Err(Problem::new(
                ProblemKind::Busy,
                "another process has opened it: try again",
            )),
            false => Ok(()),
        }
    }

    /// Puts the copy in the place of the database. Returns the path of the former database, if there
    /// was one, and the reason why the folder could not be synced after the rename: after a power
    /// failure the path may name the former database again.
    pub fn put_in_place(&self) -> Result<(Option<PathBuf>, Option<io::Error>)> {
        let database = &self.database;
        self.replace()
            .map_err(|error| Problem::from(error).of(database.display()))
    }

    fn replace(&self) -> io::Result<(Option<PathBuf>, Option<io::Error>)> {
        self.sync_copy()?;
        let database = &self.database;
        // A colon would make it a host's name for some programs.
        let time = Zone::utc()
            .iso(when::now())
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
        fs::rename(&self.copy.0, database)?;
        Ok((is_kept.then_some(kept), self.sync_folder().err()))
    }

    /// Gives the copy the mode of the database, and syncs it.
    fn sync_copy(&self) -> io::Result<()> {
        let file = OpenOptions::new().read(true).write(true).open(&self.copy.0);
        let file = keep_open(file?);
        if let Ok(old) = fs::symlink_metadata(&self.database) {
            file.set_permissions(fs::Permissions::from_mode(old.mode() & 0o777))?;
        }
        file.sync_all()
    }

    fn sync_folder(&self) -> io::Result<()> {
        File::open(files::folder(&self.database))?.sync_all()
    }
}

impl CopyFile {
    fn remove(&self) -> io::Result<()> {
        ["", "-shm"]
            .into_iter()
            .chain(LOGS)
            .try_for_each(|suffix| remove(&with_suffix(&self.0, suffix)))
    }
}

impl Drop for CopyFile {
    fn drop(&mut self) {
        let _ = self.remove();
    }
}

fn open_backup(database: &Path, backup: &Path) -> Result<OpenFile> {
    let file = files::open(backup)?;
    if file.metadata()?.len() == 0 {
        return Err(Problem::other("it is empty. Use another backup"));
    }
    let backup_file = FileState::read(backup)?.identity;
    if FileState::read(database).is_ok_and(|file| file.identity == backup_file) {
        return Err(Problem::other("it is the database itself"));
    }
    // The links are resolved, as SQLite does it.
    let backup = fs::canonicalize(backup)?;
    let beside = LOGS.map(|log| with_suffix(&backup, log));
    let log = beside
        .into_iter()
        .find(|log| fs::symlink_metadata(log).is_ok());
    match log {
        Some(log) => Err(Problem::other(format!(
            "{} lies beside it, so the file may not be complete, and restore reads no other file. Make a backup with \
             adriaticum backup FILE; or if you know that the file is complete, remove the other one",
            log.display()
        ))),
        None => OpenFile::alone(backup),
    }
}

/// Reads every page and every index of a copy, and upgrades it.
fn check_copy(copy: &Path, schema: &Schema, progress: &Progress) -> Result<Connection> {
    let mode = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_URI;
    let connection = connect(copy, mode)?;
    progress.show("checking the copy", 0);
    check_every_page_and_index(&connection)?;
    let copy = session(&connection);
    if schema::version(&copy)?.is_none() {
        refuse_other_program(&copy)?;
        return Err(Problem::other(
            "it is an empty database. Use another backup",
        ));
    }
    schema.bring_up_to_date(&copy, Access::Serve)?;
    Ok(connection)
}

/// Reads every page of the present database and moves its WAL into it, which fails while another
/// process has it open.
fn check_present(path: &Path, progress: &Progress) -> Result<()> {
    let connection = connect(path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
    progress.show("checking the present database", 0);
    check_every_page(&connection)?;
    drop(connection);
    let connection = connect(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    Ok(switch_journal(&connection, "DELETE")?)
}

/// Keeps a file under a second name, or as a copy if the file system has no hard links.
fn keep(from: &Path, to: &Path) -> io::Result<()> {
    fs::hard_link(from, to).or_else(|_| {
        files::create(to)?;
        let mut copy = OpenOptions::new().write(true).open(to)?;
        io::copy(&mut &*keep_open(File::open(from)?), &mut copy)?;
        copy.sync_all()
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
