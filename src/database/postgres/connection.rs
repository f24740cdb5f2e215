//! A connection to one server: sign-in, and statements in the extended protocol, which are prepared
//! once.

use std::collections::HashMap;
use std::error::Error;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use fallible_iterator::FallibleIterator;
use postgres_protocol::authentication::sasl::{ChannelBinding, SCRAM_SHA_256, ScramSha256};
use postgres_protocol::message::backend::{
    DataRowBody, ErrorFields, ErrorResponseBody, Message, NoticeResponseBody,
};
use postgres_protocol::message::frontend;
use postgres_protocol::{IsNull, Oid, types};
use rustix::io::Errno;
use rustls::ClientConfig;

use super::stream::PgStream;
use crate::database::location::{DatabaseUri, Host, SslMode};
use crate::database::{Row, Statement, Value};
use crate::error::{Problem, ProblemKind, Result};
use crate::secret::Secret;

/// The time of a statement, unless its transaction sets another one.
pub const STATEMENT_TIMEOUT: Duration = Duration::from_secs(3);

/// The server cancels a statement that takes too long. If it does not answer for this time after
/// that, it hangs.
const GRACE: Duration = Duration::from_secs(1);

/// The timeout for the last message of a connection.
const TERMINATE_TIMEOUT: Duration = Duration::from_millis(100);

pub struct PgConnection {
    stream: PgStream,
    input: BytesMut,
    output: BytesMut,
    /// The statements that the server knows, by their text.
    pub(super) prepared: HashMap<String, Prepared>,
    /// The number of names that were given to statements.
    names: usize,
    /// The server has last reported that it is in no transaction.
    pub is_idle: bool,
    /// The number of its host in the URI.
    pub host: usize,
    /// See `Postgres::forget_connections`.
    pub generation: u64,
}

pub(super) struct Prepared {
    name: String,
    columns: Vec<Oid>,
}

impl PgConnection {
    /// Connects to one host. The error says why that failed; its kind is `Busy` if the server has no
    /// room for another connection.
    pub fn open(
        uri: &DatabaseUri,
        host: usize,
        tls: Option<&Arc<ClientConfig>>,
        deadline: Instant,
    ) -> Result<Self> {
        let address = &uri.hosts[host];
        let stream = PgStream::connect(address, deadline).map_err(explain_connect)?;
        let mut connection = Self {
            stream,
            input: BytesMut::new(),
            output: BytesMut::new(),
            prepared: HashMap::new(),
            names: 0,
            is_idle: false,
            host,
            generation: 0,
        };
        if let (Host::Tcp { name, .. }, SslMode::VerifyFull, Some(config)) =
            (address, uri.sslmode_for(address), tls)
        {
            connection.encrypt(config, name)?;
        }
        connection.sign_in(uri)?;
        Ok(connection)
    }

    fn encrypt(&mut self, config: &Arc<ClientConfig>, name: &str) -> Result<()> {
        frontend::ssl_request(&mut self.output);
        self.send()?;
        // One byte and no more: an attacker could have inserted the bytes that follow it before the
        // handshake.
        let mut answer = [0; 1];
        self.stream.receive(&mut answer)?;
        if answer != [b'S'] {
            return Err(unusable(
                "it has no TLS: set ssl = on there, or add sslmode=disable if the network can be trusted",
            ));
        }
        Ok(self.stream.encrypt(config, name)?)
    }

    /// Signs in and limits the time of statements, which PgBouncer refuses among the parameters of a
    /// sign-in. All of that ends at the socket's deadline.
    fn sign_in(&mut self, uri: &DatabaseUri) -> Result<()> {
        let parameters = [
            ("user", uri.user.as_str()),
            ("database", &uri.database),
            ("client_encoding", "UTF8"),
            ("application_name", "adriaticum"),
        ];
        frontend::startup_message(parameters, &mut self.output)?;
        let password = uri.password.as_ref().map_or("", Secret::expose).as_bytes();
        let mut scram = ScramSha256::new(password, ChannelBinding::unsupported());
        let (mut is_asked, mut is_proven, mut is_signed_in) = (false, false, false);
        loop {
            self.send()?;
            match self.message()? {
                Message::AuthenticationSasl(body) => {
                    if password.is_empty() {
                        return Err(unusable(
                            "it asks for a password: set one in the URI, or in the file that database_password_file \
                             (ADRIATICUM_DATABASE_PASSWORD_FILE) names",
                        ));
                    }
                    if !body.mechanisms().any(|name| Ok(name == SCRAM_SHA_256))? {
                        return Err(unusable(SIGN_IN));
                    }
                    is_asked = true;
                    let first = scram.message();
                    frontend::sasl_initial_response(SCRAM_SHA_256, first, &mut self.output)?;
                }
                Message::AuthenticationSaslContinue(body) => {
                    scram.update(body.data())?;
                    frontend::sasl_response(scram.message(), &mut self.output)?;
                }
                Message::AuthenticationSaslFinal(body) => {
                    scram
                        .finish(body.data())
                        .map_err(|_| unusable(NOT_PROVEN))?;
                    is_proven = true;
                }
                Message::AuthenticationOk if is_asked && !is_proven => {
                    return Err(unusable(NOT_PROVEN));
                }
                Message::ParameterStatus(parameter) => {
                    let is_on = parameter.value()? == "on";
                    if is_on
                        && matches!(
                            parameter.name()?,
                            "in_hot_standby" | "default_transaction_read_only"
                        )
                    {
                        return Err(unusable(
                            "it only reads: it is a standby, or set to read-only",
                        ));
                    }
                }
                Message::AuthenticationOk
                | Message::BackendKeyData(_)
                | Message::CommandComplete(_)
                | Message::NoticeResponse(_) => {}
                Message::ErrorResponse(body) => return Err(refusal(&body)?),
                Message::ReadyForQuery(_) if !is_signed_in => {
                    is_signed_in = true;
                    let time = STATEMENT_TIMEOUT.as_millis();
                    frontend::query(&format!("SET statement_timeout = {time}"), &mut self.output)?;
                }
                Message::ReadyForQuery(_) => {
                    self.is_idle = true;
                    return Ok(());
                }
                _ => return Err(unusable(SIGN_IN)),
            }
        }
    }

    /// Returns whether a statement can be sent: no transaction is open, and the server has not
    /// closed the connection.
    pub fn is_usable(&self) -> bool {
        self.is_idle && self.stream.socket.is_quiet()
    }

    /// Sends statements in one round trip, after `begin` and before `end`, which are texts such as
    /// `COMMIT`. Without `begin` they are one transaction by themselves. Calls `each` with the
    /// number of the statement and every row of it. Returns how many rows each statement changed or
    /// found. `time` is the server's limit for each statement.
    ///
    /// The connection can't be used any more after a problem of the kinds `Unknown` (no final answer
    /// came) and `Unavailable` (it was not done, because the host shuts down or only reads).
    pub fn run(
        &mut self,
        begin: Option<&str>,
        statements: &[Statement],
        end: Option<&str>,
        time: Duration,
        each: &mut dyn FnMut(usize, Row),
    ) -> Result<Vec<usize>> {
        self.output.clear();
        let fresh = self
            .write_messages(begin, statements, end)
            .map_err(Problem::from)?;
        self.is_idle = false;
        let time = time + GRACE;
        self.stream.socket.deadline = Instant::now() + time;
        // Each part of the answer ends with ReadyForQuery.
        let parts = [begin.is_some(), !statements.is_empty(), end.is_some()];
        let answer = self
            .send()
            .and_then(|()| self.read_answer(parts, statements, fresh, time, each));
        answer.unwrap_or_else(|error| Err(Problem::unknown(error)))
    }

    /// Runs statements without parameters and results.
    pub fn run_text(&mut self, statements: &str, time: Duration) -> Result<()> {
        self.run(Some(statements), &[], None, time, &mut |_, _| ())
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
                .map(|value| i16::from(matches!(value, Value::Blob(_))));
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
        parts: [bool; 3],
        statements: &[Statement],
        fresh: Vec<(&str, String)>,
        time: Duration,
        each: &mut dyn FnMut(usize, Row),
    ) -> io::Result<Result<Vec<usize>>> {
        let mut parts = (0..parts.len()).filter(|part| parts[*part]);
        // Only the statements have results.
        let mut has_results = parts.next() == Some(1);
        let mut fresh = fresh.into_iter();
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
                            failure.get_or_insert(Problem::other(error.to_string()));
                        }
                    }
                }
                Message::CommandComplete(body) => {
                    // The next statement has the same time.
                    self.stream.socket.deadline = Instant::now() + time;
                    if has_results {
                        let count = body.tag()?.rsplit(' ').next();
                        changed.push(count.and_then(|count| count.parse().ok()).unwrap_or(0));
                    }
                }
                Message::NoticeResponse(body) => doubt = doubt.or(doubt_of(&body)?),
                Message::ErrorResponse(body) => {
                    let problem = refusal(&body)?;
                    if problem.kind == ProblemKind::Unknown {
                        return Ok(Err(problem));
                    }
                    failure.get_or_insert(problem);
                }
                Message::ReadyForQuery(body) => match parts.next() {
                    Some(next) => has_results = next == 1,
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

    fn send(&mut self) -> io::Result<()> {
        if !self.output.is_empty() {
            self.stream.send(&self.output)?;
            self.output.clear();
        }
        Ok(())
    }

    fn message(&mut self) -> io::Result<Message> {
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

const SIGN_IN: &str = "it asks for another way to sign in than SCRAM-SHA-256: set password_encryption to scram-sha-256 and \
                       the password again";

const NOT_PROVEN: &str = "it could not prove that it knows the password";

fn unusable(cause: &str) -> Problem {
    Problem::new(ProblemKind::Unavailable, cause)
}

/// If the system refuses to make a connection, the cause is the sandbox, which an operator would
/// not guess.
fn explain_connect(error: io::Error) -> Problem {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::PERM | Errno::ACCESS | Errno::AFNOSUPPORT) => unusable(&format!(
            "{error}. If systemd runs the service, its sandbox may not allow this: run systemctl edit adriaticum, and add \
             IPAddressAllow= with the address, or RestrictAddressFamilies= with its family, under [Service]"
        )),
        _ => unusable(&error.to_string()),
    }
}

/// A refusal by the server. Of an `ERROR` it is certain that the statement was not done.
fn refusal(body: &ErrorResponseBody) -> io::Result<Problem> {
    let fields = Fields::read(body.fields())?;
    let kind = match &*fields.state {
        "53300" => ProblemKind::Busy,
        // The session has ended, perhaps between a commit and its acknowledgement.
        _ if fields.severity != "ERROR" => ProblemKind::Unknown,
        "53100" => ProblemKind::Full,
        // Another transaction was in the way, so that a retry helps: a serialization failure, a
        // deadlock, a lock that was not free in time, or any wait of that kind until the timeout.
        "40001" | "40P01" | "55P03" | "57014" => ProblemKind::Busy,
        // The host shuts down, only reads, or has lost the session's statements.
        state
            if state.starts_with("08")
                || state.starts_with("57P")
                || matches!(state, "25006" | "26000") =>
        {
            ProblemKind::Unavailable
        }
        _ => ProblemKind::Other,
    };
    Ok(Problem::new(
        kind,
        format!("{} (SQLSTATE {})", fields.message, fields.state),
    ))
}

/// The commit is on this server, and perhaps on no other.
fn doubt_of(body: &NoticeResponseBody) -> io::Result<Option<Problem>> {
    let fields = Fields::read(body.fields())?;
    let is_in_doubt = fields.routine == "SyncRepWaitForLSN";
    Ok(is_in_doubt.then(|| Problem::unknown(fields.message)))
}

/// The type that a parameter is sent as. The server infers the type of a null.
fn type_of(value: &Value) -> Oid {
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
fn write_value(value: &Value, out: &mut BytesMut) -> IsNull {
    match value {
        Value::Null => return IsNull::Yes,
        Value::Integer(number) => out.extend_from_slice(number.to_string().as_bytes()),
        Value::Real(number) => out.extend_from_slice(format!("{number:?}").as_bytes()),
        Value::Text(text) => out.extend_from_slice(text.as_bytes()),
        Value::Blob(bytes) => out.extend_from_slice(bytes),
    }
    IsNull::No
}

fn read_row(body: &DataRowBody, columns: &[Oid]) -> io::Result<Row> {
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
struct Fields {
    severity: String,
    state: String,
    message: String,
    /// The function in the server that reports it. The other texts may be translated.
    routine: String,
}

impl Fields {
    fn read(mut fields: ErrorFields<'_>) -> io::Result<Self> {
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
