//! The start of a connection: TLS, the password exchange, and whether the server is one that
//! writes.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use bytes::BytesMut;
use fallible_iterator::FallibleIterator;
use postgres_protocol::message::backend::Message;
use postgres_protocol::message::frontend;
use rustix::io::Errno;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;

use super::auth;
use super::encoding::Fields;
use super::protocol::PgConnection;
use super::stream::PgStream;
use super::tls;
use super::uri::{DatabaseUri, Host, SslMode};
use crate::secret::Secret;

const TOO_MANY_CONNECTIONS: &str = "53300";

/// The reason why there is no connection.
#[derive(Debug, Default)]
pub struct ConnectError {
    pub cause: String,
    /// The server has as many connections as it may have.
    pub is_full: bool,
    pub is_timeout: bool,
}

impl From<io::Error> for ConnectError {
    fn from(error: io::Error) -> Self {
        connect_error(&error, error.to_string())
    }
}

impl From<String> for ConnectError {
    fn from(cause: String) -> Self {
        Self {
            cause,
            ..Self::default()
        }
    }
}

impl From<&str> for ConnectError {
    fn from(cause: &str) -> Self {
        cause.to_owned().into()
    }
}

fn connect_error(error: &io::Error, cause: String) -> ConnectError {
    ConnectError {
        cause,
        is_full: false,
        is_timeout: error.kind() == io::ErrorKind::TimedOut,
    }
}

impl PgConnection {
    /// Connects to one host. The error says why that failed.
    pub fn open(
        uri: &DatabaseUri,
        host: &Host,
        tls: Option<&Arc<ClientConfig>>,
        deadline: Instant,
    ) -> Result<Self, ConnectError> {
        let mut stream = PgStream::connect(host, deadline)
            .map_err(|error| connect_error(&error, explain_connect(&error)))?;
        let mode = uri.sslmode_for(host);
        if let (Host::Tcp { name, .. }, Some(config)) = (host, tls)
            && mode != SslMode::Disable
        {
            encrypt(&mut stream, config, name)?;
        }
        let mut connection = Self {
            stream,
            input: BytesMut::new(),
            output: BytesMut::new(),
            prepared: HashMap::new(),
            names: 0,
            is_idle: false,
        };
        connection.start(uri, mode)?;
        Ok(connection)
    }

    /// Signs in, and waits until the server takes statements.
    fn start(&mut self, uri: &DatabaseUri, mode: SslMode) -> Result<(), ConnectError> {
        let parameters = [
            ("user", uri.user.as_str()),
            ("database", &uri.database),
            ("client_encoding", "UTF8"),
            ("application_name", "adriaticum"),
        ];
        frontend::startup_message(parameters, &mut self.output)?;
        let password = uri.password.as_ref().map_or("", Secret::expose).as_bytes();
        let (mut scram, mut is_finished, mut is_signed_in) = (None, false, false);
        loop {
            self.send()?;
            match self.message()? {
                Message::AuthenticationSasl(body) => {
                    if password.is_empty() {
                        return Err("it asks for a password: set one in the URI, or in the file that \
                                    database_password_file (ADRIATICUM_DATABASE_PASSWORD_FILE) names"
                            .into());
                    }
                    let offered: Vec<String> = body
                        .mechanisms()
                        .map(|name| Ok(name.to_owned()))
                        .collect()?;
                    let end_point = self
                        .stream
                        .certificate()
                        .and_then(|certificate| tls::end_point(certificate));
                    let is_unverified = mode == SslMode::Require;
                    let (mechanism, exchange) =
                        auth::begin(&offered, end_point, is_unverified, password)?;
                    frontend::sasl_initial_response(
                        mechanism,
                        exchange.message(),
                        &mut self.output,
                    )?;
                    scram = Some(exchange);
                }
                Message::AuthenticationSaslContinue(body) => {
                    let exchange = scram.as_mut().ok_or("it sent an unexpected message")?;
                    exchange.update(body.data())?;
                    frontend::sasl_response(exchange.message(), &mut self.output)?;
                }
                Message::AuthenticationSaslFinal(body) => {
                    let exchange = scram.as_mut().ok_or("it sent an unexpected message")?;
                    exchange
                        .finish(body.data())
                        .map_err(|_| "it could not prove that it knows the password")?;
                    is_finished = true;
                }
                Message::AuthenticationOk
                    if !is_finished && (scram.is_some() || mode == SslMode::Require) =>
                {
                    return Err("it does not prove who it is, and sslmode=require does not check its certificate: use \
                                sslmode=verify-full"
                        .into());
                }
                Message::AuthenticationOk => is_signed_in = true,
                Message::ParameterStatus(parameter) => {
                    let is_on = parameter.value()? == "on";
                    let name = parameter.name()?;
                    let says_read_only =
                        matches!(name, "in_hot_standby" | "default_transaction_read_only");
                    if says_read_only && is_on && uri.needs_writable {
                        return Err("it only reads: it is a standby, or set to read-only".into());
                    }
                }
                Message::BackendKeyData(_) | Message::NoticeResponse(_) => {}
                Message::ErrorResponse(body) => {
                    let refusal = Fields::read(body.fields())?.refusal();
                    return Err(ConnectError {
                        is_full: refusal.state() == TOO_MANY_CONNECTIONS,
                        cause: refusal.to_string(),
                        ..ConnectError::default()
                    });
                }
                Message::ReadyForQuery(_) if is_signed_in => {
                    self.is_idle = true;
                    return Ok(());
                }
                _ => {
                    return Err(
                        "it asks for another way to sign in than SCRAM-SHA-256: set password_encryption to \
                                scram-sha-256 and the password again"
                            .into(),
                    );
                }
            }
        }
    }
}

fn encrypt(
    stream: &mut PgStream,
    config: &Arc<ClientConfig>,
    name: &str,
) -> Result<(), ConnectError> {
    let mut request = BytesMut::new();
    frontend::ssl_request(&mut request);
    stream.send(&request)?;
    // One byte and no more: an attacker could have inserted the bytes that follow it before the
    // handshake.
    let mut answer = [0; 1];
    stream.receive(&mut answer)?;
    if answer != [b'S'] {
        return Err(
            "it has no TLS: set ssl = on there, or add sslmode=disable if the network can be trusted".into(),
        );
    }
    let name = ServerName::try_from(name.to_owned()).map_err(io::Error::other)?;
    stream
        .encrypt(Arc::clone(config), name)
        .map_err(|error| connect_error(&error, tls::explain(&error)))
}

/// If the system refuses to make a connection, the cause is the sandbox, which an operator would
/// not guess.
fn explain_connect(error: &io::Error) -> String {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::PERM | Errno::ACCESS | Errno::AFNOSUPPORT) => format!(
            "{error}. If systemd runs the service, its sandbox may not allow this: run systemctl edit adriaticum, and add \
             IPAddressAllow= with the address, or RestrictAddressFamilies= with its family, under [Service]"
        ),
        _ => error.to_string(),
    }
}
