//! A connection to one server: statements in the extended protocol, prepared once. Every call ends
//! at its deadline.

use std::collections::HashMap;
use std::io;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use fallible_iterator::FallibleIterator;
use postgres_protocol::Oid;
use postgres_protocol::message::backend::Message;
use postgres_protocol::message::frontend;

use super::encoding::{Fields, SqlError, read_row, type_of, write_value};
use super::stream::PgStream;
use crate::database::statement::Statement;
use crate::database::value::{Row, SqlValue};

/// The timeout for the last message of a connection.
const TERMINATE_TIMEOUT: Duration = Duration::from_millis(100);

pub struct PgConnection {
    pub stream: PgStream,
    pub input: BytesMut,
    pub output: BytesMut,
    /// The statements that the server knows, by their text.
    pub prepared: HashMap<String, Prepared>,
    /// The number of names that were given to statements.
    pub names: usize,
    /// The server has last reported that it is in no transaction.
    pub is_idle: bool,
}

pub struct Prepared {
    name: String,
    columns: Vec<Oid>,
}

impl PgConnection {
    /// Returns whether a statement can be sent: no transaction is open, and the server has not
    /// closed the connection.
    pub fn is_usable(&self) -> bool {
        self.is_idle && self.stream.socket.is_quiet()
    }

    /// Runs one statement in a transaction of its own. Calls `each` with every row, and returns how
    /// many rows were changed or found.
    pub fn run_one(
        &mut self,
        statement: Statement,
        deadline: Instant,
        each: &mut dyn FnMut(Row),
    ) -> Result<usize, SqlError> {
        let changed = self.run(None, &[statement], None, deadline, &mut |_, row| each(row))?;
        Ok(changed.first().copied().unwrap_or(0))
    }

    /// Sends statements in one round trip, after `begin` and before `end`, which are texts such as
    /// `COMMIT`. Without `begin` they are one transaction by themselves. Calls `each` with the
    /// number of the statement and every row of it. Returns how many rows each statement changed or
    /// found.
    pub fn run(
        &mut self,
        begin: Option<&str>,
        statements: &[Statement],
        end: Option<&str>,
        deadline: Instant,
        each: &mut dyn FnMut(usize, Row),
    ) -> Result<Vec<usize>, SqlError> {
        self.output.clear();
        let fresh = self
            .write_messages(begin, statements, end)
            .map_err(|error| SqlError::NotSent(error.to_string()))?;
        self.is_idle = false;
        self.stream.socket.deadline = deadline;
        // Each part of the answer ends with ReadyForQuery. Only the statements have results.
        let parts = [
            (begin.is_some(), false),
            (!statements.is_empty(), true),
            (end.is_some(), false),
        ];
        let parts = parts
            .into_iter()
            .filter(|(is_sent, _)| *is_sent)
            .map(|(_, has_results)| has_results);
        let answer = self
            .send()
            .and_then(|()| self.read_answer(parts, statements, fresh, each));
        answer.unwrap_or_else(|error| Err(SqlError::Unknown(error.to_string())))
    }

    /// Runs statements without parameters and results.
    pub fn run_text(&mut self, statements: &str, deadline: Instant) -> Result<(), SqlError> {
        self.run(Some(statements), &[], None, deadline, &mut |_, _| ())
            .map(drop)
    }

    /// Returns the statements that are prepared now, with their names.
    fn write_messages<'a>(
        &mut self,
        begin: Option<&str>,
        statements: &'a [Statement],
        end: Option<&str>,
    ) -> io::Result<Vec<(&'a str, String)>> {
        let out = &mut self.output;
        if let Some(begin) = begin {
            frontend::query(begin, out)?;
        }
        let mut fresh: Vec<(&str, String)> = Vec::new();
        for statement in statements {
            let (text, parameters) = (&*statement.text, &statement.parameters);
            let name = match self.prepared.get(text) {
                Some(prepared) => &prepared.name,
                None => {
                    if !fresh.iter().any(|(known, _)| *known == text) {
                        self.names += 1;
                        let name = format!("s{}", self.names);
                        frontend::parse(&name, text, parameters.iter().map(type_of), out)?;
                        frontend::describe(b'S', &name, out)?;
                        fresh.push((text, name));
                    }
                    fresh
                        .iter()
                        .find(|(known, _)| *known == text)
                        .map_or("", |(_, name)| name)
                }
            };
            let formats = parameters
                .iter()
                .map(|value| i16::from(matches!(value, SqlValue::Blob(_))));
            frontend::bind(
                "",
                name,
                formats,
                parameters,
                |value, out| Ok(write_value(value, out)),
                [1],
                out,
            )
            .map_err(|_| io::Error::other("a parameter is too long"))?;
            frontend::execute("", 0, out)?;
        }
        if !statements.is_empty() {
            frontend::sync(out);
        }
        if let Some(end) = end {
            frontend::query(end, out)?;
        }
        Ok(fresh)
    }

    fn read_answer(
        &mut self,
        mut parts: impl Iterator<Item = bool>,
        statements: &[Statement],
        fresh: Vec<(&str, String)>,
        each: &mut dyn FnMut(usize, Row),
    ) -> io::Result<Result<Vec<usize>, SqlError>> {
        let (mut has_results, mut fresh) = (parts.next().unwrap_or(false), fresh.into_iter());
        let mut changed = Vec::with_capacity(statements.len());
        let (mut failure, mut doubt) = (None, None);
        loop {
            match self.message()? {
                Message::RowDescription(body) if has_results => {
                    let columns: Vec<Oid> =
                        body.fields().map(|field| Ok(field.type_oid())).collect()?;
                    self.remember(fresh.next(), columns);
                }
                Message::NoData => self.remember(fresh.next(), Vec::new()),
                Message::DataRow(body) if has_results => {
                    let number = changed.len();
                    let prepared = self.prepared.get(&*statements[number].text);
                    let columns = prepared.map_or(&[][..], |prepared| &prepared.columns);
                    match read_row(&body, columns) {
                        Ok(row) => each(number, row),
                        Err(error) => {
                            let message = error.to_string();
                            failure.get_or_insert(SqlError::Refused {
                                state: String::new(),
                                message,
                            });
                        }
                    }
                }
                Message::CommandComplete(body) if has_results => {
                    let count = body
                        .tag()?
                        .rsplit(' ')
                        .next()
                        .and_then(|count| count.parse().ok());
                    changed.push(count.unwrap_or(0));
                }
                Message::NoticeResponse(body) => {
                    let fields = Fields::read(body.fields())?;
                    // The commit is on this server, and perhaps on no other.
                    if fields.routine == "SyncRepWaitForLSN" {
                        doubt = Some(SqlError::Unknown(fields.message));
                    }
                }
                Message::ErrorResponse(body) => {
                    let fields = Fields::read(body.fields())?;
                    if fields.severity != "ERROR" {
                        // The session has ended, perhaps between a commit and its acknowledgement.
                        return Ok(Err(SqlError::Unknown(fields.refusal().to_string())));
                    }
                    failure.get_or_insert(fields.refusal());
                }
                Message::ReadyForQuery(body) => match parts.next() {
                    Some(next) => has_results = next,
                    None => {
                        self.is_idle = body.status() == b'I' && doubt.is_none();
                        return Ok(failure.or(doubt).map_or(Ok(changed), Err));
                    }
                },
                _ => {}
            }
        }
    }

    /// Notes that a statement is prepared, and its columns.
    fn remember(&mut self, fresh: Option<(&str, String)>, columns: Vec<Oid>) {
        if let Some((text, name)) = fresh {
            self.prepared
                .insert(text.to_owned(), Prepared { name, columns });
        }
    }

    pub fn send(&mut self) -> io::Result<()> {
        if !self.output.is_empty() {
            self.stream.send(&self.output)?;
            self.output.clear();
        }
        Ok(())
    }

    pub fn message(&mut self) -> io::Result<Message> {
        loop {
            if let Some(message) = Message::parse(&mut self.input)? {
                return Ok(message);
            }
            let mut buffer = [0; 8192];
            let count = self.stream.receive(&mut buffer)?;
            self.input.extend_from_slice(&buffer[..count]);
        }
    }
}

impl Drop for PgConnection {
    /// Terminates the session, so that the server does not log a lost client.
    fn drop(&mut self) {
        if self.is_idle {
            self.output.clear();
            frontend::terminate(&mut self.output);
            self.stream.socket.deadline = Instant::now() + TERMINATE_TIMEOUT;
            let _ = self.send();
        }
    }
}
