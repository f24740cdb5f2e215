//! Copies a database that may be in use.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rusqlite::OpenFlags;
use rusqlite::types::{ToSqlOutput, ValueRef};

use super::connection::{MEBIBYTE, OpenFile, connect, while_running};
use crate::database::{Problem, ProblemKind, Result};
use crate::files;
use crate::progress::Progress;

impl OpenFile {
    /// Copies the database as it is at this moment, while others write, to a new file that only its
    /// owner and group may read. An error begins with the path that it is about.
    pub fn copy_to(mut self, to: &Path, progress: &Progress) -> Result<()> {
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
        let unchanged = self.read_only.map_or(Ok(()), |file| file.check());
        unchanged
            .map_err(|error| Problem::from(error).of(&source))
            .and(copied)
            .inspect_err(|_| {
                let _ = fs::remove_file(to);
            })
    }

    fn vacuum_into(&mut self, to: &Path, progress: &Progress) -> Result<()> {
        // The connection's NOFOLLOW holds for the copy too.
        let to = files::resolve(to)?;
        let size = "SELECT (page_count - freelist_count) * page_size
            FROM pragma_page_count, pragma_freelist_count, pragma_page_size";
        let size: i64 = self.connection.query_row(size, [], |row| row.get(0))?;
        let size = size.max(0) as u64 / MEBIBYTE;
        let (copied, progress) = (to.clone(), progress.clone());
        progress.update("copying", 0, size, "MiB");
        while_running(&mut self.connection, move |_| {
            let done = copied.metadata().map_or(0, |file| file.len());
            progress.update("copying", done / MEBIBYTE, size, "MiB");
        })?;
        // A path need not be UTF-8, and SQLite takes any bytes as text.
        let path = ValueRef::Text(to.as_os_str().as_bytes());
        self.connection
            .execute("VACUUM INTO ?", [ToSqlOutput::Borrowed(path)])?;
        Ok(())
    }
}

/// Returns what a query for a number finds in a file that nothing has open.
pub fn count(path: &Path, query: &str) -> Result<i64> {
    let connection = connect(&files::resolve(path)?, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
    Ok(connection.query_row(query, [], |row| row.get(0))?)
}
