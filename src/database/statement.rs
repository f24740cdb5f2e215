//! Statements, and the transactions that they run in.

use std::borrow::Cow;
use std::time::Instant;

use super::error::Result;
use super::value::{Row, SqlValue};

/// Takes the number of a statement and a row of it.
pub type EachRow<'a> = &'a mut dyn FnMut(usize, Row) -> Result<()>;

#[derive(Clone, Copy)]
pub enum TransactionMode {
    /// One statement that reads, without BEGIN and COMMIT.
    Statement,
    /// All statements see the same state.
    Read,
    /// A read whose statements may take minutes.
    Report,
    Write,
    /// A write that waits until its deadline, also for a database that is lost.
    WriteUntil(Instant),
    /// The same for a group of rows, with a connection that nothing else can use.
    Append(Instant),
}

impl TransactionMode {
    /// Returns whether there is time to try again. Modes without a deadline are tried once.
    pub(super) fn allows_retry(self) -> bool {
        match self {
            Self::WriteUntil(deadline) | Self::Append(deadline) => Instant::now() < deadline,
            _ => false,
        }
    }
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

    /// Adds a query that finds a row if the statement was done. It is needed if the answer was lost
    /// and a repetition changes nothing; a statement without one can be repeated with the same
    /// result.
    pub fn settled_by(self, query: &'static str, parameters: impl Into<Vec<SqlValue>>) -> Self {
        Self {
            done: Some(Box::new(Self::new(query, parameters))),
            ..self
        }
    }
}
