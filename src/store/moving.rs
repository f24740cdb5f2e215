//! Moves everything from a SQLite database to an empty PostgreSQL database.
//!
//! Creating the tables, filling them and verifying them is one transaction there: whatever ends it early leaves an empty
//! database, so a move is repeated from its beginning, and no program can use half a copy.

use sha2::{Digest, Sha256};

use super::engine::postgres::Postgres;
use super::engine::{Row, SqlSession, SqlValue, Table, TransactionMode};
use super::{DatabaseUri, Store, StoreError, Verification, chain};
use crate::when;

/// The number of values that one statement sends. PostgreSQL's limit is 65,535.
const VALUES_AT_ONCE: usize = 8_000;

/// The progress of a copy: the table, its rows copied, and all of its rows.
pub struct MoveProgress<'a> {
    pub table: &'a str,
    pub copied: i64,
    pub rows: i64,
}

impl Store {
    /// Copies every table to an empty database and verifies the copy: each value, the chains and the sums. Nothing can
    /// be written here meanwhile.
    pub fn move_to(
        &self,
        target: &DatabaseUri,
        progress: &mut dyn FnMut(MoveProgress),
    ) -> Result<Verification, StoreError> {
        let sqlite = self
            .engine
            .sqlite()
            .ok_or_else(|| StoreError::Other("only a SQLite database can be moved".into()))?;
        self.engine.run(TransactionMode::Write, |source| {
            Postgres::create_with(target, |target| {
                for table in sqlite.tables(source)? {
                    copy(source, target, &table, progress)?;
                }
                // At one time, because older minutes are not compared.
                let now = when::now();
                let (before, after) = (chain::verify(source, now)?, chain::verify(target, now)?);
                if before != after {
                    return Err(StoreError::Other(format!(
                        "the copy does not verify as its source does: {after:?} instead of {before:?}"
                    )));
                }
                // On PostgreSQL no gateway has the name of the moved chain.
                let retire = "UPDATE gateways SET epoch = 0, version = '', address = '', last_seen = 0";
                target.execute(retire, &[])?;
                Ok(after)
            })
        })
    }
}

fn copy(
    source: &dyn SqlSession,
    target: &dyn SqlSession,
    table: &Table,
    progress: &mut dyn FnMut(MoveProgress),
) -> Result<(), StoreError> {
    // A new database has a row for the first chain.
    target.execute(&format!("DELETE FROM {}", table.name), &[])?;
    let rows: i64 = source.value(&format!("SELECT count(*) FROM {}", table.name), &[])?;
    let mut copied = 0;
    let mut batch: Vec<SqlValue> = Vec::new();
    let mut written = Sha256::new();
    progress(MoveProgress { table: &table.name, copied, rows });
    source.query(&table.select(), &[], &mut |row| {
        let values = row.values();
        add(&mut written, &values);
        batch.extend(values);
        copied += 1;
        if copied == rows || batch.len() >= VALUES_AT_ONCE {
            target.execute(&table.insert(batch.len() / table.columns.len()), &batch)?;
            batch.clear();
            progress(MoveProgress { table: &table.name, copied, rows });
        }
        Ok(())
    })?;
    let mut found = Sha256::new();
    let mut check = |row: Row| {
        add(&mut found, &row.values());
        Ok(())
    };
    target.query(&table.select(), &[], &mut check)?;
    if written.finalize() == found.finalize() {
        Ok(())
    } else {
        Err(StoreError::Other(format!("the copy of the table {} differs from its source", table.name)))
    }
}

/// Adds the values of a row to a fingerprint. No two rows have the same `Debug` text.
fn add(fingerprint: &mut Sha256, values: &[SqlValue]) {
    fingerprint.update(format!("{values:?}"));
}
