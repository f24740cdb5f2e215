//! Values, rows and errors as the protocol has them.

use std::error::Error;
use std::io;
use std::ops::Range;

use bytes::BytesMut;
use fallible_iterator::FallibleIterator;
use postgres_protocol::message::backend::{DataRowBody, ErrorFields};
use postgres_protocol::{IsNull, Oid, types};

use crate::database::{Row, Value};

/// The type that a parameter is sent as. The server infers the type of a null.
pub fn type_of(value: &Value) -> Oid {
    match value {
        Value::Null => 0,
        Value::Integer(_) => INT8,
        Value::Real(_) => FLOAT8,
        Value::Text(_) => TEXT,
        Value::Blob(_) => BYTEA,
    }
}

const BOOL: Oid = 16;
const BYTEA: Oid = 17;
const INT8: Oid = 20;
const INT4: Oid = 23;
const TEXT: Oid = 25;
const FLOAT8: Oid = 701;

/// Numbers are sent as text, which any numeric type accepts: a statement may have been prepared
/// with a null in their place.
pub fn write_value(value: &Value, out: &mut BytesMut) -> IsNull {
    match value {
        Value::Null => return IsNull::Yes,
        Value::Integer(number) => out.extend_from_slice(number.to_string().as_bytes()),
        Value::Real(number) => out.extend_from_slice(format!("{number:?}").as_bytes()),
        Value::Text(text) => out.extend_from_slice(text.as_bytes()),
        Value::Blob(bytes) => out.extend_from_slice(bytes),
    }
    IsNull::No
}

pub fn read_row(body: &DataRowBody, columns: &[Oid]) -> io::Result<Row> {
    let mut oids = columns.iter();
    let read = |range: Option<Range<usize>>| match (range, oids.next()) {
        (Some(range), Some(&oid)) => {
            read_value(oid, &body.buffer()[range]).map_err(io::Error::other)
        }
        _ => Ok(Value::Null),
    };
    body.ranges().map(read).collect().map(Row::new)
}

/// Reads a column in the binary format.
fn read_value(oid: Oid, bytes: &[u8]) -> Result<Value, Box<dyn Error + Sync + Send>> {
    Ok(match oid {
        INT8 => types::int8_from_sql(bytes)?.into(),
        INT4 => i64::from(types::int4_from_sql(bytes)?).into(),
        BOOL => types::bool_from_sql(bytes)?.into(),
        FLOAT8 => types::float8_from_sql(bytes)?.into(),
        TEXT => types::text_from_sql(bytes)?.to_owned().into(),
        BYTEA => bytes.to_vec().into(),
        _ => return Err(format!("a column has the type {oid}, which is not read here").into()),
    })
}

/// The fields of an error or a warning from the server.
#[derive(Default)]
pub struct Fields {
    pub severity: String,
    pub state: String,
    pub message: String,
    /// The function in the server that reports it. The other texts may be translated.
    pub routine: String,
}

impl Fields {
    pub fn read(mut fields: ErrorFields<'_>) -> io::Result<Self> {
        let mut found = Self::default();
        while let Some(field) = fields.next()? {
            let text = String::from_utf8_lossy(field.value_bytes()).into_owned();
            match field.type_() {
                b'V' => found.severity = text,
                b'C' => found.state = text,
                b'M' => found.message = text,
                b'R' => found.routine = text,
                _ => {}
            }
        }
        Ok(found)
    }
}
