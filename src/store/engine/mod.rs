//! The boundary to a database: values, rows and statements, without the name of any database library.
//!
//! Statements are written once, with `$1`, `$2` … as parameters, in SQL that SQLite and PostgreSQL both accept. An
//! engine provides
//!
//! - `read`: statements that all see the same state;
//! - `write`: statements that may share a transaction with those of other threads (group commit);
//! - `transaction`: statements that have a transaction to themselves;
//! - what is its own: opening, durability, checkpoints, backup, and the mapping of its errors to `StoreError`.

pub mod sqlite;
mod value;

pub use value::{FromValue, Row, Value};

use super::StoreError;

/// Runs statements, in a transaction or on one state of the database.
pub trait Session {
    /// Returns how many rows were changed.
    fn execute(&self, statement: &str, parameters: &[Value]) -> Result<usize, StoreError>;

    /// Calls `each` with every row, until it returns an error.
    fn query(
        &self,
        statement: &str,
        parameters: &[Value],
        each: &mut dyn FnMut(Row) -> Result<(), StoreError>,
    ) -> Result<(), StoreError>;
}

impl dyn Session + '_ {
    pub fn rows<T>(
        &self,
        statement: &str,
        parameters: &[Value],
        mut read: impl FnMut(Row) -> Result<T, StoreError>,
    ) -> Result<Vec<T>, StoreError> {
        let mut found = Vec::new();
        self.query(statement, parameters, &mut |row| {
            found.push(read(row)?);
            Ok(())
        })?;
        Ok(found)
    }

    /// The first row, or `None`.
    pub fn first<T>(
        &self,
        statement: &str,
        parameters: &[Value],
        read: impl FnMut(Row) -> Result<T, StoreError>,
    ) -> Result<Option<T>, StoreError> {
        Ok(self.rows(statement, parameters, read)?.into_iter().next())
    }

    /// The only value of a statement that always has one row.
    pub fn value<T: FromValue>(&self, statement: &str, parameters: &[Value]) -> Result<T, StoreError> {
        self.first(statement, parameters, |mut row| row.next())?.ok_or(StoreError::NoRow)
    }
}

/// Statements that are written together or not at all.
pub struct Write {
    pub statements: Vec<Statement>,
    /// Whether they have to be on the disk when the call returns.
    pub durable: bool,
}

pub struct Statement {
    pub text: &'static str,
    pub parameters: Vec<Value>,
}

impl Statement {
    pub fn new(text: &'static str, parameters: impl Into<Vec<Value>>) -> Self {
        Self { text, parameters: parameters.into() }
    }
}

/// Parameters of different types.
macro_rules! values {
    ($($value:expr),* $(,)?) => { [$($crate::store::engine::Value::from($value)),*] };
}
pub(in crate::store) use values;
