//! Statements, and the sessions that run them.

use std::borrow::Cow;

use super::{FromValue, Row, SqlValue};
use crate::store::{DatabaseError, Result};

/// A statement's text and its parameters.
pub type BoundStatement<'a> = (&'a str, &'a [SqlValue]);

/// Takes the number of a statement and a row of it.
pub type EachRow<'a> = &'a mut dyn FnMut(usize, Row) -> Result<()>;

/// Runs statements, in a transaction or on one state of the database.
pub trait SqlSession {
    /// Runs statements one after the other, on PostgreSQL in one round trip. Calls `each` with the number of the statement
    /// and every row of it, until that returns an error. Returns how many rows each statement changed.
    fn run(&self, statements: &[BoundStatement], each: EachRow) -> Result<Vec<usize>>;
}

impl dyn SqlSession + '_ {
    /// Returns how many rows were changed.
    pub fn execute(&self, statement: &str, parameters: &[SqlValue]) -> Result<usize> {
        Ok(self
            .run(&[(statement, parameters)], &mut |_, _| Ok(()))?
            .pop()
            .unwrap_or(0))
    }

    /// Calls `each` with every row, until it returns an error.
    pub fn query(
        &self,
        statement: &str,
        parameters: &[SqlValue],
        each: &mut dyn FnMut(Row) -> Result<()>,
    ) -> Result<()> {
        self.run(&[(statement, parameters)], &mut |_, row| each(row))
            .map(drop)
    }

    pub fn rows<T>(
        &self,
        statement: &str,
        parameters: &[SqlValue],
        mut read: impl FnMut(Row) -> Result<T>,
    ) -> Result<Vec<T>> {
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
        parameters: &[SqlValue],
        read: impl FnMut(Row) -> Result<T>,
    ) -> Result<Option<T>> {
        Ok(self.rows(statement, parameters, read)?.into_iter().next())
    }

    /// The only value of a statement that always has one row.
    pub fn value<T: FromValue>(&self, statement: &str, parameters: &[SqlValue]) -> Result<T> {
        self.first(statement, parameters, |mut row| row.next())?
            .ok_or(DatabaseError::NoRow)
    }
}

pub fn bound(statements: &[Statement]) -> Vec<BoundStatement<'_>> {
    statements
        .iter()
        .map(|statement| (&*statement.text, statement.parameters.as_slice()))
        .collect()
}

#[derive(Clone)]
pub struct Statement {
    pub(super) text: Cow<'static, str>,
    pub(super) parameters: Vec<SqlValue>,
    /// A query that finds a row if the statement was done.
    pub(super) done: Option<Box<Statement>>,
}

impl Statement {
    pub fn new(text: impl Into<Cow<'static, str>>, parameters: impl Into<Vec<SqlValue>>) -> Self {
        Self {
            text: text.into(),
            parameters: parameters.into(),
            done: None,
        }
    }

    /// Adds a query that finds a row if the statement was done. It is needed if the answer was lost and a repetition changes
    /// nothing; a statement without one can be repeated with the same result.
    pub fn settled_by(self, query: &'static str, parameters: impl Into<Vec<SqlValue>>) -> Self {
        Self {
            done: Some(Box::new(Self::new(query, parameters))),
            ..self
        }
    }
}
