//! The values of parameters and columns.

use std::vec;

use super::error::{DatabaseError, Result};

#[derive(Clone, Debug, PartialEq)]
pub enum SqlValue {
    Null,
    Int(i64),
    Real(f64),
    Text(String),
    Blob(Vec<u8>),
}

/// Parameters of different types.
macro_rules! values {
    ($($value:expr),* $(,)?) => { [$($crate::database::SqlValue::from($value)),*] };
}
pub(crate) use values;

macro_rules! from {
    ($($type:ty => $value:ident $into:expr;)*) => {
        $(impl From<$type> for SqlValue {
            fn from($value: $type) -> Self {
                $into
            }
        })*
    };
}

from! {
    i64 => value Self::Int(value);
    u32 => value Self::Int(value.into());
    bool => value Self::Int(value.into());
    f64 => value Self::Real(value);
    &str => value Self::Text(value.to_owned());
    &String => value Self::Text(value.clone());
    String => value Self::Text(value);
    Vec<u8> => value Self::Blob(value);
    &[u8] => value Self::Blob(value.to_vec());
    [u8; 32] => value Self::Blob(value.to_vec());
}

impl<T: Into<SqlValue>> From<Option<T>> for SqlValue {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
}

/// A type that a column can be read as.
pub trait FromValue: Sized {
    fn from_value(value: SqlValue) -> Option<Self>;
}

macro_rules! from_value {
    ($($type:ty => $pattern:pat => $into:expr;)*) => {
        $(impl FromValue for $type {
            fn from_value(value: SqlValue) -> Option<Self> {
                match value {
                    $pattern => $into,
                    _ => None,
                }
            }
        })*
    };
}

from_value! {
    i64 => SqlValue::Int(number) => Some(number);
    u32 => SqlValue::Int(number) => number.try_into().ok();
    bool => SqlValue::Int(number) => Some(number != 0);
    f64 => SqlValue::Real(number) => Some(number);
    String => SqlValue::Text(text) => Some(text);
    Vec<u8> => SqlValue::Blob(bytes) => Some(bytes);
    [u8; 32] => SqlValue::Blob(bytes) => bytes.try_into().ok();
}

impl<T: FromValue> FromValue for Option<T> {
    fn from_value(value: SqlValue) -> Option<Self> {
        match value {
            SqlValue::Null => Some(None),
            value => T::from_value(value).map(Some),
        }
    }
}

/// The columns of a row, read from the first to the last.
pub struct Row(vec::IntoIter<SqlValue>);

impl Row {
    pub fn new(values: Vec<SqlValue>) -> Self {
        Self(values.into_iter())
    }

    pub fn values(self) -> Vec<SqlValue> {
        self.0.collect()
    }

    pub fn column<T: FromValue>(&mut self) -> Result<T> {
        let value = self.0.next().unwrap_or(SqlValue::Null);
        T::from_value(value)
            .ok_or_else(|| DatabaseError::Damaged("a column holds a value of another type".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_read_in_order_and_a_wrong_type_is_an_error() {
        let mut row = Row::new(vec![
            SqlValue::Int(7),
            SqlValue::Null,
            SqlValue::Text("x".into()),
            SqlValue::Blob(vec![1]),
        ]);
        assert_eq!(row.column::<i64>().expect("a number"), 7);
        assert_eq!(row.column::<Option<f64>>().expect("nothing"), None);
        assert!(row.column::<i64>().is_err(), "text is no number");
        assert!(row.column::<[u8; 32]>().is_err(), "a hash has 32 bytes");
    }
}
