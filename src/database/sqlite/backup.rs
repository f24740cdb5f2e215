//! Copies of a database that is in use.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rusqlite::OpenFlags;

use super::connection::{MEBIBYTE, connect, connect_to_read, is_missing, readable, while_running};
use crate::database::error::{BackupError, DatabaseError, Result};
use crate::progress::Progress;

/// Makes a consistent copy of this moment, while others write. It may have any version. Returns
/// what a query for the number of its rows finds in it.
pub fn backup(path: &Path, to: &Path, rows: &str, progress: &Progress) -> Result<i64, BackupError> {
    let connect_to_database = || {
        if is_missing(path)? {
            return Err(DatabaseError::Missing);
        }
        connect_to_read(&readable(path)?)
    };
    let (mut connection, read_only) = connect_to_database().map_err(BackupError::Database)?;
    // Not by SQLite, which would say "table already exists" for a file that is there.
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o640)
        .open(to)
        .map_err(|error| BackupError::Copy(error.into()))?;
    let mut copy = || {
        // The connection's NOFOLLOW holds for the copy too.
        let to = crate::files::resolve(to)?;
        let size = "SELECT (page_count - freelist_count) * page_size
            FROM pragma_page_count, pragma_freelist_count, pragma_page_size";
        let size = connection
            .query_row(size, [], |row| row.get::<_, i64>(0))?
            .max(0) as u64;
        let (copied, progress) = (to.clone(), progress.clone());
        progress.update("copying", 0, size / MEBIBYTE, "MiB");
        while_running(&mut connection, move |_| {
            let done = copied.metadata().map_or(0, |file| file.len());
            progress.update("copying", done / MEBIBYTE, size / MEBIBYTE, "MiB");
        })?;
        connection.execute("VACUUM INTO ?", [to.to_string_lossy()])?;
        let copy = connect(&to, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
        Ok(copy.query_row(rows, [], |row| row.get(0))?)
    };
    let copied = copy().map_err(|error: DatabaseError| match error {
        DatabaseError::Damaged(_) => BackupError::Database(error),
        error => BackupError::Copy(error),
    });
    let unchanged = read_only
        .map_or(Ok(()), |file| file.check())
        .map_err(|error| BackupError::Database(error.into()));
    unchanged.and(copied).inspect_err(|_| {
        let _ = fs::remove_file(to);
    })
}
