//! A session runs statements, in a transaction or on one state of the database. Their values are
//! rusqlite's, for both engines.

use std::borrow::Cow;
use std::vec;

use rusqlite::types::{FromSql, ToSql, ToSqlOutput, Value, ValueRef};

use super::postgres::session::PgSession;
use super::sqlite::SqliteSession;
use super::{Problem, Result};

/// The words of a script in which the engines differ, for SQLite and for PostgreSQL. Text is
/// ordered by its bytes in both.
const DIALECT: [(&str, &str, &str); 7] = [
    ("{INT}", "INTEGER", "BIGINT"),
    ("{TEXT}", "TEXT", "TEXT COLLATE \"C\""),
    ("{REAL}", "REAL", "DOUBLE PRECISION"),
    ("{BLOB}", "BLOB", "BYTEA"),
    ("{STRICT}", "STRICT", ""),
    ("{CLUSTERED}", "STRICT, WITHOUT ROWID", ""),
    (
        "{ZERO_HASH}",
        "zeroblob(32)",
        "decode(repeat('00', 32), 'hex')",
    ),
];

pub enum Session<'a> {
    Sqlite(SqliteSession<'a>),
    Postgres(&'a PgSession<'a>),
}

#[derive(Clone)]
pub struct Statement {
    pub(super) text: Cow<'static, str>,
    pub(super) parameters: Vec<Value>,
}

impl Statement {
    pub fn new(text: impl Into<Cow<'static, str>>, parameters: impl Into<Vec<Value>>) -> Self {
        Self {
            text: text.into(),
            parameters: parameters.into(),
        }
    }
}

/// Parameters of different types.
macro_rules! values {
    ($($value:expr),* $(,)?) => { [$($crate::database::to_value(&$value)),*] };
}
pub(crate) use values;

pub fn to_value(value: &impl ToSql) -> Value {
    match value.to_sql() {
        Ok(ToSqlOutput::Borrowed(value)) => value.try_into().unwrap_or(Value::Null),
        Ok(ToSqlOutput::Owned(value)) => value,
        _ => unreachable!("the types of parameters are numbers, texts and bytes"),
    }
}

/// The columns of a row, read from the first to the last.
pub struct Row(vec::IntoIter<Value>);

impl Row {
    pub fn new(values: Vec<Value>) -> Self {
        Self(values.into_iter())
    }

    pub fn values(self) -> Vec<Value> {
        self.0.collect()
    }

    pub fn column<T: FromSql>(&mut self) -> Result<T> {
        let value = self.0.next().unwrap_or(Value::Null);
        T::column_result(ValueRef::from(&value))
            .map_err(|_| Problem::damaged("a column holds a value of another type"))
    }
}

/// Takes the number of a statement and a row of it.
pub type EachRow<'a> = &'a mut dyn FnMut(usize, Row) -> Result<()>;

impl Session<'_> {
    /// Runs statements one after the other, on PostgreSQL in one round trip. Calls `each` with the
    /// number of the statement and every row of it, until that returns an error. Returns how many
    /// rows each statement changed.
    pub fn run(&self, statements: &[Statement], each: EachRow) -> Result<Vec<usize>> {
        match self {
            Self::Sqlite(session) => session.run(statements, each),
            Self::Postgres(session) => session.run(statements, each),
        }
    }

    /// Runs statements without parameters that are separated by semicolons. `{INT}` and the other
    /// words of `DIALECT` stand for the engine's own.
    pub fn run_script(&self, script: &str) -> Result<()> {
        let script = DIALECT
            .iter()
            .fold(script.to_owned(), |script, (word, sqlite, postgres)| {
                let own = match self {
                    Self::Sqlite(_) => sqlite,
                    Self::Postgres(_) => postgres,
                };
                script.replace(word, own)
            });
        match self {
            Self::Sqlite(session) => session.run_script(&script),
            Self::Postgres(session) => session.run_script(&script),
        }
    }

    /// Runs the last statements and commits, on PostgreSQL in one round trip. What is not committed is
    /// rolled back when the session ends.
    pub(super) fn commit(&self, last: &[Statement]) -> Result<()> {
        match self {
            Self::Sqlite(session) => session.commit(last),
            Self::Postgres(session) => session.commit(last),
        }
    }

    /// Returns how many rows were changed.
    pub fn execute(&self, statement: &str, parameters: &[Value]) -> Result<usize> {
        self.query(statement, parameters, &mut |_| Ok(()))
    }

    /// Calls `each` with every row, until it returns an error. Returns how many rows were changed.
    pub fn query(
        &self,
        statement: &str,
        parameters: &[Value],
        each: &mut dyn FnMut(Row) -> Result<()>,
    ) -> Result<usize> {
        let statement = Statement::new(statement.to_owned(), parameters);
        let changed = self.run(&[statement], &mut |_, row| each(row))?;
        Ok(changed.first().copied().unwrap_or(0))
    }

    pub fn rows<T>(
        &self,
        statement: &str,
        parameters: &[Value],
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
        parameters: &[Value],
        read: impl FnMut(Row) -> Result<T>,
    ) -> Result<Option<T>> {
        Ok(self.rows(statement, parameters, read)?.into_iter().next())
    }

    /// The only value of a statement that always has one row.
    pub fn value<T: FromSql>(&self, statement: &str, parameters: &[Value]) -> Result<T> {
        self.first(statement, parameters, |mut row| row.column())?
            .ok_or_else(|| Problem::other("a row that has to be there is missing"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_read_in_order_and_a_wrong_type_is_an_error() {
        let mut row = Row::new(values![7, None::<i64>, "x", [1_u8]].into());
        assert_eq!(row.column::<i64>().expect("a number"), 7);
        assert_eq!(row.column::<Option<f64>>().expect("nothing"), None);
        assert!(row.column::<i64>().is_err(), "text is no number");
        assert!(row.column::<[u8; 32]>().is_err(), "a hash has 32 bytes");
    }
}
