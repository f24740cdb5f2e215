//! Moves everything from a SQLite database to an empty PostgreSQL database.
//!
//! Creating the tables, filling them and verifying them is one transaction there: whatever ends it
//! early leaves an empty database, so a move is repeated from its beginning, and no program can use
//! half a copy.
//!
//! The source is marked as soon as the target is committed, in the transaction that has kept others
//! from changing it. If the process ends between the two commits, both databases can be used:
//! neither can know about the other's commit.

use std::cell::RefCell;
use std::mem;
use std::time::Instant;

use sha2::{Digest, Sha256};

use crate::database::postgres::Postgres;
use crate::database::{
    CHANGE_TIMEOUT, Database, DatabaseUri, Problem, Result, Row, Session, Value, values,
};
use crate::ledger::{self, SCHEMA, Verification};
use crate::progress::Progress;

/// The number of values that one statement sends. PostgreSQL's limit is 65,535.
const VALUES_AT_ONCE: usize = 8_000;

/// The tables of a SQLite database: their names, their columns, and the columns of their primary
/// keys.
const TABLES: &str = "SELECT name,
    (SELECT group_concat(name, ', ' ORDER BY cid) FROM pragma_table_info(tables.name)),
    (SELECT group_concat(name, ', ' ORDER BY pk) FROM pragma_table_info(tables.name) WHERE pk > 0)
    FROM sqlite_schema AS tables WHERE type = 'table' AND name NOT LIKE 'sqlite%' ORDER BY name";

/// The result of a move that has filled and verified the target.
pub struct MoveResult {
    pub found: Verification,
    /// Whether the source is marked, or why it can still be used by mistake.
    pub marked: Result<()>,
}

/// Copies every table of a SQLite database to an empty one, verifies the copy (each value, the
/// chains and the sums), and marks this database as moved. Nothing can be written here meanwhile.
pub fn move_to(
    database: &Database,
    target: &DatabaseUri,
    progress: &Progress,
) -> Result<MoveResult> {
    let filled = RefCell::new(None);
    let deadline = Instant::now() + CHANGE_TIMEOUT;
    let marked = database.with_writer(|connection| {
        connection.transaction(deadline, None, |source| {
            let verified =
                Postgres::create_with(target, &SCHEMA, |target| fill(source, target, progress))?;
            filled.replace(Some(verified));
            let mark = "INSERT INTO moved (id, target) VALUES (1, $1)";
            source.execute(mark, &values![target.to_string()]).map(drop)
        })
    });
    match (filled.into_inner(), marked) {
        (Some(found), marked) => Ok(MoveResult { found, marked }),
        (None, Err(problem)) => Err(problem),
        (None, Ok(())) => unreachable!("it is marked after it was copied"),
    }
}

fn fill(source: &Session, target: &Session, progress: &Progress) -> Result<Verification> {
    for table in source.rows(TABLES, &[], MovedTable::read)? {
        copy(source, target, &table, progress)?;
    }
    let [before, after] = [source, target].map(|session| ledger::verify(session, progress));
    let (before, after) = (before?, after?);
    if before != after {
        return Err(Problem::other(format!(
            "the copy does not verify as its source does: {after:?} instead of {before:?}"
        )));
    }
    // On PostgreSQL no gateway has the name of the moved chain.
    let retire = "UPDATE gateways SET epoch = 0, version = '', address = '', last_seen = NULL";
    target.execute(retire, &[])?;
    Ok(after)
}

fn copy(source: &Session, target: &Session, table: &MovedTable, progress: &Progress) -> Result<()> {
    // A new database has a row for the first chain.
    target.execute(&format!("DELETE FROM {}", table.name), &[])?;
    let (mut copied, mut compared) = (0, 0);
    let mut batch: Vec<Value> = Vec::new();
    let mut written = Sha256::new();
    let [copying, comparing] =
        ["copying", "comparing"].map(|verb| format!("{verb} the table {}", table.name));
    source.query(&table.select(), &[], &mut |row| {
        let values = row.values();
        add(&mut written, &values);
        batch.extend(values);
        copied += 1;
        progress.show(&copying, copied);
        match batch.len() >= VALUES_AT_ONCE {
            true => table.insert(target, &mem::take(&mut batch)),
            false => Ok(()),
        }
    })?;
    table.insert(target, &batch)?;
    let mut found = Sha256::new();
    let mut check = |row: Row| {
        compared += 1;
        progress.show(&comparing, compared);
        add(&mut found, &row.values());
        Ok(())
    };
    target.query(&table.select(), &[], &mut check)?;
    if written.finalize() == found.finalize() {
        Ok(())
    } else {
        Err(Problem::other(format!(
            "the copy of the table {} differs from its source",
            table.name
        )))
    }
}

/// Adds the values of a row to a fingerprint. No two rows have the same `Debug` text.
fn add(fingerprint: &mut Sha256, values: &[Value]) {
    fingerprint.update(format!("{values:?}"));
}

struct MovedTable {
    name: String,
    /// Comma separated, as the columns of the primary key are.
    columns: String,
    key: String,
}

impl MovedTable {
    /// Reads a row of [`TABLES`].
    fn read(mut row: Row) -> Result<Self> {
        Ok(Self {
            name: row.column()?,
            columns: row.column()?,
            key: row.column()?,
        })
    }

    fn width(&self) -> usize {
        self.columns.split(',').count()
    }

    /// Reads all rows in the order of their key.
    fn select(&self) -> String {
        format!(
            "SELECT {} FROM {} ORDER BY {}",
            self.columns, self.name, self.key
        )
    }

    /// Inserts the rows that have these values.
    fn insert(&self, target: &Session, values: &[Value]) -> Result<()> {
        match values.len() / self.width() {
            0 => Ok(()),
            rows => target
                .execute(&self.insert_statement(rows), values)
                .map(drop),
        }
    }

    fn insert_statement(&self, rows: usize) -> String {
        let width = self.width();
        let row = |row: usize| {
            let parameters = (1..=width).map(|column| format!("${}", row * width + column));
            format!("({})", parameters.collect::<Vec<_>>().join(", "))
        };
        let rows: Vec<String> = (0..rows).map(row).collect();
        format!(
            "INSERT INTO {} ({}) VALUES {}",
            self.name,
            self.columns,
            rows.join(", ")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements() {
        let table = MovedTable {
            name: "t".into(),
            columns: "a, b".into(),
            key: "b, a".into(),
        };
        assert_eq!(table.select(), "SELECT a, b FROM t ORDER BY b, a");
        assert_eq!(
            table.insert_statement(2),
            "INSERT INTO t (a, b) VALUES ($1, $2), ($3, $4)"
        );
    }
}
