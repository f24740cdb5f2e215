//! Copies a database that may be in use.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rusqlite::OpenFlags;
use rusqlite::types::{ToSqlOutput, ValueRef};

use super::connection::{OpenFile, connect};
use crate::database::{Problem, ProblemKind, Result};
use crate::files;
use crate::progress::Progress;

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
        let unchanged = self.read_only.map_or(Ok(()), |file| file.check());
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
