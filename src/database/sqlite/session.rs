//! Runs statements on a connection.

use rusqlite::{Connection, params_from_iter};

use super::database_files::Files;
use super::read_only_file::ReadOnlyFile;
use crate::database::error::Result;
use crate::database::statement::{BoundStatement, EachRow};
use crate::database::value::{Row, SqlValue};

#[derive(Clone, Copy)]
pub struct SqliteSession<'a> {
    pub(super) connection: &'a Connection,
    /// `None` while a database is opened or restored.
    pub(super) files: Option<&'a Files>,
    /// Set if SQLite reads the database without locks.
    pub(super) read_only: Option<&'a ReadOnlyFile>,
}

impl<'a> SqliteSession<'a> {
    /// On a connection that nothing else uses.
    pub(super) fn alone(connection: &'a Connection) -> Self {
        Self {
            connection,
            files: None,
            read_only: None,
        }
    }

    pub fn run_script(&self, script: &str) -> Result<()> {
        Ok(self.connection.execute_batch(script)?)
    }

    pub fn run(&self, statements: &[BoundStatement], each: EachRow) -> Result<Vec<usize>> {
        let result = run(self.connection, statements, each);
        // SQLite syncs by itself when a write begins the WAL again.
        let result = match self.files {
            Some(files) => files.keep_failed_sync(result),
            None => result,
        };
        // Another process may have written to the file, which SQLite would not notice.
        self.read_only.map_or(Ok(()), ReadOnlyFile::check)?;
        result
    }
}

fn run(
    connection: &Connection,
    statements: &[BoundStatement],
    each: EachRow,
) -> Result<Vec<usize>> {
    let run = |(number, (text, parameters)): (usize, &BoundStatement)| {
        let mut prepared = connection.prepare_cached(text)?;
        // For SQLite `$1` is a name, and names are numbered in the order in which they first
        // appear.
        debug_assert!(
            (1..=parameters.len()).all(|n| prepared.parameter_name(n) == Some(&format!("${n}"))),
            "the parameters first appear in another order than their numbers: {text}"
        );
        let columns = prepared.column_count();
        let mut rows = prepared.query(params_from_iter(*parameters))?;
        while let Some(row) = rows.next()? {
            let values: rusqlite::Result<Vec<SqlValue>> = (0..columns)
                .map(|column| row.get_ref(column).map(SqlValue::from))
                .collect();
            each(number, Row::new(values?))?;
        }
        Ok(connection.changes() as usize)
    };
    statements.iter().enumerate().map(run).collect()
}
