//! A connection to one server: statements in the extended protocol, prepared once. Every call ends at its deadline.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use fallible_iterator::FallibleIterator;
use postgres_protocol::Oid;
use postgres_protocol::message::backend::Message;
use postgres_protocol::message::frontend;

use super::encoding::{Fields, SqlError, read_row, type_of, write_value};
use super::stream::PgStream;
use crate::store::engine::{BoundStatement, Row, SqlValue};

/// The timeout for the last message of a connection.
const TERMINATE_TIMEOUT: Duration = Duration::from_millis(100);

pub(super) struct PgConnection {
    pub(super) link: PgStream,
    pub(super) input: BytesMut,
    pub(super) output: BytesMut,
    /// The statements that the server knows, by their text.
    pub(super) prepared: HashMap<String, Prepared>,
    /// The number of names that were given to statements.
    pub(super) names: usize,
    /// The server has last reported that it is in no transaction.
    pub(super) is_idle: bool,
}

pub(super) struct Prepared {
    name: String,
    columns: Arc<[Oid]>,
}

impl PgConnection {
    /// Returns whether a statement can be sent: no transaction is open, and the server has not closed the connection.
    pub fn is_usable(&mut self) -> bool {
        self.is_idle && self.link.is_quiet()
    }

    /// Sends statements in one round trip, after `BEGIN …` if there is one. Without, they are one transaction by
    /// themselves. Calls `each` with every row, and returns how many rows the last statement changed or found.
    pub fn run(
        &mut self,
        begin: Option<&str>,
        statements: &[BoundStatement],
        deadline: Instant,
        each: &mut dyn FnMut(Row),
    ) -> Result<usize, SqlError> {
        let changed = self.run_between(begin, statements, None, deadline, &mut |_, row| each(row))?;
        Ok(changed.last().copied().unwrap_or(0))
    }

    /// Does the same with a text after the statements, such as `COMMIT`. Calls `each` with the number of the statement too, and returns
    /// how many rows each statement changed or found.
    pub fn run_between(
        &mut self,
        begin: Option<&str>,
        statements: &[BoundStatement],
        end: Option<&str>,
        deadline: Instant,
        each: &mut dyn FnMut(usize, Row),
    ) -> Result<Vec<usize>, SqlError> {
        self.output.clear();
        let fresh = self
            .write_messages(begin, statements, end)
            .map_err(|error| SqlError::NotSent(error.to_string()))?;
        self.is_idle = false;
        self.link.set_deadline(deadline);
        // Each part of the answer ends with ReadyForQuery. Only the statements have results.
        let parts = [(begin.is_some(), false), (!statements.is_empty(), true), (end.is_some(), false)];
        let parts = parts.into_iter().filter(|(is_sent, _)| *is_sent).map(|(_, has_results)| has_results);
        let answer = self.send().and_then(|()| self.read_answer(parts, statements, fresh, each));
        answer.unwrap_or_else(|error| Err(SqlError::Unknown(error.to_string())))
    }

    /// Runs statements without parameters and results.
    pub fn run_text(&mut self, statements: &str, deadline: Instant) -> Result<(), SqlError> {
        self.run(Some(statements), &[], deadline, &mut |_| ()).map(drop)
    }

    /// Returns the statements that are prepared now, with their names.
    fn write_messages<'a>(
        &mut self,
        begin: Option<&str>,
        statements: &[BoundStatement<'a>],
        end: Option<&str>,
    ) -> io::Result<Vec<(&'a str, String)>> {
        let out = &mut self.output;
        if let Some(begin) = begin {
            frontend::query(begin, out)?;
        }
        let mut fresh: Vec<(&str, String)> = Vec::new();
        for &(text, parameters) in statements {
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
                    fresh.iter().find(|(known, _)| *known == text).map_or("", |(_, name)| name)
                }
            };
            let formats = parameters.iter().map(|value| i16::from(matches!(value, SqlValue::Blob(_))));
            frontend::bind("", name, formats, parameters, |value, out| Ok(write_value(value, out)), [1], out)
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
        statements: &[BoundStatement],
        fresh: Vec<(&str, String)>,
        each: &mut dyn FnMut(usize, Row),
    ) -> io::Result<Result<Vec<usize>, SqlError>> {
        let (mut has_results, mut fresh) = (parts.next().unwrap_or(false), fresh.into_iter());
        let (mut columns, mut changed) = (None, Vec::with_capacity(statements.len()));
        let (mut failure, mut doubt) = (None, None);
        loop {
            match self.message()? {
                Message::RowDescription(body) if has_results => {
                    let columns: Vec<Oid> = body.fields().map(|field| Ok(field.type_oid())).collect()?;
                    self.remember(fresh.next(), columns);
                }
                Message::NoData => self.remember(fresh.next(), Vec::new()),
                Message::DataRow(body) if has_results => {
                    let number = changed.len();
                    let known = || self.prepared.get(statements[number].0).map(|it| Arc::clone(&it.columns));
                    let columns = columns.get_or_insert_with(|| known().unwrap_or_default());
                    match read_row(&body, columns) {
                        Ok(row) => each(number, row),
                        Err(error) => {
                            let message = error.to_string();
                            failure.get_or_insert(SqlError::Refused { state: String::new(), message });
                        }
                    }
                }
                Message::CommandComplete(body) if has_results => {
                    let count = body.tag()?.rsplit(' ').next().and_then(|count| count.parse().ok());
                    changed.push(count.unwrap_or(0));
                    columns = None;
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
            self.prepared.insert(text.to_owned(), Prepared { name, columns: columns.into() });
        }
    }

    pub(super) fn send(&mut self) -> io::Result<()> {
        if !self.output.is_empty() {
            self.link.send(&self.output)?;
            self.output.clear();
        }
        Ok(())
    }

    pub(super) fn message(&mut self) -> io::Result<Message> {
        loop {
            if let Some(message) = Message::parse(&mut self.input)? {
                return Ok(message);
            }
            let mut buffer = [0; 8192];
            let count = self.link.receive(&mut buffer)?;
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
            self.link.set_deadline(Instant::now() + TERMINATE_TIMEOUT);
            let _ = self.send();
        }
    }
}

#[cfg(all(test, feature = "test-postgres"))]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use rcgen::{
        BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ED25519,
        SignatureAlgorithm,
    };

    use super::*;
    use crate::store::engine::postgres::tls;
    use crate::store::engine::postgres::uri::{DatabaseUri, SslMode};
    use crate::store::engine::values;
    use crate::store::test_server::PostgresServer;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(30)
    }

    fn open(uri: &str) -> Result<PgConnection, String> {
        let uri = DatabaseUri::parse(uri).expect("a good URI");
        let mode = uri.sslmode_for(&uri.hosts[0]);
        let tls =
            (mode != SslMode::Disable).then(|| tls::config(mode, uri.sslrootcert.as_deref()).expect("TLS"));
        PgConnection::open(&uri, &uri.hosts[0], tls.as_ref(), soon())
    }

    fn connection() -> PgConnection {
        open(&PostgresServer::shared().uri).expect("a connection")
    }

    fn rows(
        connection: &mut PgConnection,
        statement: &str,
        parameters: &[SqlValue],
    ) -> Result<Vec<Vec<SqlValue>>, SqlError> {
        let mut rows = Vec::new();
        let mut read = |mut row: Row| rows.push((0..5).map(|_| row.next().expect("any value")).collect());
        connection.run(None, &[(statement, parameters)], soon(), &mut read)?;
        Ok(rows)
    }

    fn state(error: &SqlError) -> &str {
        match error {
            SqlError::Refused { state, .. } => state,
            _ => "none",
        }
    }

    #[test]
    fn values_come_back_as_they_were_sent() {
        let mut connection = connection();
        let statement = "SELECT CAST($1 AS BIGINT), CAST($2 AS DOUBLE PRECISION), $3, $4, CAST($5 AS TEXT)";
        for (number, real, text) in [
            (i64::MIN, f64::MIN_POSITIVE, ""),
            (i64::MAX, 0.1 + 0.2, "x' $1 \\ \u{1f30a}"),
            (0, -1e300, "\r\n"),
            (-1, f64::INFINITY, "a"),
        ] {
            let sent = values![number, real, text, vec![0_u8, 255, 92], None::<i64>];
            assert_eq!(rows(&mut connection, statement, &sent), Ok(vec![sent.to_vec()]));
        }
        let nulls = vec![SqlValue::Null; 5];
        assert_eq!(rows(&mut connection, statement, &nulls), Ok(vec![nulls]), "prepared with other types");
        assert_eq!(connection.prepared.len(), 1);
        assert_eq!(connection.names, 1, "it is prepared once");
    }

    #[test]
    fn statements_in_one_trip_are_one_transaction() {
        let mut connection = connection();
        connection.run_text("CREATE TEMPORARY TABLE t (x BIGINT PRIMARY KEY)", soon()).expect("a table");
        let insert = "INSERT INTO t VALUES ($1)";
        let [one, two] = [values![1_i64], values![2_i64]];
        let mut run =
            |begin, statements: &[BoundStatement]| connection.run(begin, statements, soon(), &mut |_| ());
        let twice = run(None, &[(insert, &one), (insert, &two), (insert, &one)]).expect_err("a duplicate");
        assert_eq!(state(&twice), "23505");
        assert_eq!(run(None, &[(insert, &two), (insert, &one)]), Ok(1), "none of the others was done");
        assert_eq!(run(Some("BEGIN"), &[("DELETE FROM t", &[])]), Ok(2));
        assert!(!connection.is_usable(), "a transaction is open");
        connection.run_text("ROLLBACK", soon()).expect("an end");
        assert!(connection.is_usable());
        assert_eq!(rows(&mut connection, "SELECT x FROM t", &[]).map(|rows| rows.len()), Ok(2));
    }

    #[test]
    fn three_kinds_of_errors() {
        let mut connection = connection();
        assert_eq!(state(&rows(&mut connection, "SELEC", &[]).expect_err("no SQL")), "42601");
        assert!(matches!(rows(&mut connection, "SELECT '\0'", &[]), Err(SqlError::NotSent(_))));
        assert!(connection.is_usable(), "both are over");
        let ended = rows(&mut connection, "SELECT pg_terminate_backend(pg_backend_pid())", &[]);
        assert!(matches!(&ended, Err(SqlError::Unknown(cause)) if cause.contains("57P01")), "{ended:?}");
        assert!(!connection.is_usable());
        connection = self::connection();
        let (began, limit) = (Instant::now(), Duration::from_millis(200));
        let late = connection.run(None, &[("SELECT pg_sleep(60)", &[])], began + limit, &mut |_| ());
        assert!(matches!(late, Err(SqlError::Unknown(_))), "{late:?}");
        assert!(began.elapsed() >= limit && began.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_connection_that_the_server_closed_is_noticed() {
        let mut connection = connection();
        let Ok([SqlValue::Int(pid), ..]) = rows(&mut connection, "SELECT pg_backend_pid()", &[])
            .map(|rows| <[SqlValue; 5]>::try_from(rows[0].clone()).expect("five"))
        else {
            panic!("no pid");
        };
        assert!(connection.is_usable());
        PostgresServer::shared().psql(&format!("SELECT pg_terminate_backend({pid}, 10000)"));
        assert!(!connection.is_usable());
    }

    #[test]
    fn who_is_let_in() {
        let server = PostgresServer::shared();
        let database = server.database();
        let refused = |uri: String| open(&uri).err().expect("it should be refused");
        assert!(refused(database.replace("secret", "wrong")).contains("28P01"));
        assert!(refused(database.replace(":secret", "")).contains("PASSWORD_FILE"));
        assert!(refused(database.clone() + "&sslmode=require").contains("no TLS"));
        let name = DatabaseUri::parse(&database).expect("a good URI").database;
        server.psql(&format!("ALTER DATABASE {name} SET default_transaction_read_only = on"));
        assert!(refused(database.clone()).contains("only reads"));
        open(&(database + "&target_session_attrs=any")).expect("any server will do");
        open(&server.socket_uri()).expect("a Unix socket");
    }

    /// Writes a CA and a certificate for localhost that it has signed.
    fn certificates(expires: i32, algorithm: &'static SignatureAlgorithm) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("adriaticum-{}", crate::secret::secret_hex::<8>()));
        fs::create_dir(&folder).expect("a folder");
        let mut ca = CertificateParams::default();
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca_key = KeyPair::generate_for(algorithm).expect("a key");
        let ca_certificate = ca.self_signed(&ca_key).expect("a CA");
        let mut server = CertificateParams::new(["localhost".into()]).expect("a name");
        server.not_after = rcgen::date_time_ymd(expires, 1, 1);
        let key = KeyPair::generate().expect("a key");
        let issued = server.signed_by(&key, &Issuer::new(ca, ca_key)).expect("a certificate");
        for (name, text) in [
            ("ca.crt", ca_certificate.pem()),
            ("server.crt", issued.pem()),
            ("server.key", key.serialize_pem()),
        ] {
            fs::write(folder.join(name), text).expect("a file");
        }
        folder
    }

    #[test]
    fn tls_checks_what_sslmode_says() {
        let (good, expired) =
            (certificates(4000, &PKCS_ECDSA_P256_SHA256), certificates(2001, &PKCS_ED25519));
        let [server, expired_server] = [&good, &expired].map(|folder| PostgresServer::start(Some(folder)));
        let uri = |server: &PostgresServer, host, mode: &str, ca: &Path| {
            let ca = ca.join("ca.crt");
            let uri = server.uri.replace("127.0.0.1", host);
            if mode.is_empty() { uri } else { format!("{uri}&sslmode={mode}&sslrootcert={}", ca.display()) }
        };
        let is_encrypted = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()";
        for (host, mode) in
            [("localhost", "verify-full"), ("localhost", "verify-ca"), ("127.0.0.1", "verify-ca")]
        {
            let mut connection = open(&uri(&server, host, mode, &good)).expect(mode);
            assert_eq!(rows(&mut connection, is_encrypted, &[]).expect("a row")[0][0], SqlValue::Int(1));
        }
        open(&(uri(&server, "127.0.0.1", "", &good) + "&sslmode=require"))
            .expect("the password proves the server");
        // There is no channel binding with Ed25519.
        let unbound = open(&(expired_server.uri.clone() + "&sslmode=require")).err().unwrap_or_default();
        assert!(unbound.contains("no channel binding"), "{unbound}");
        for (server, host, mode, ca, error_text) in [
            (&server, "127.0.0.1", "verify-full", &good, "not for this name"),
            (&server, "localhost", "verify-full", &expired, "not signed by a trusted CA"),
            (&server, "localhost", "verify-ca", &expired, "not signed by a trusted CA"),
            (&expired_server, "localhost", "verify-full", &expired, "has expired"),
        ] {
            let error = open(&uri(server, host, mode, ca)).err().expect(error_text);
            assert!(error.contains(error_text), "{host} {mode}: {error}");
        }
        let without_password = uri(&server, "127.0.0.1", "", &good).replace("adriaticum:secret", "trusted");
        server.psql("CREATE ROLE trusted LOGIN");
        server.psql("COPY (SELECT 'host all all 127.0.0.1/32 trust') TO PROGRAM 'cat > pg_hba.conf'");
        server.psql("SELECT pg_reload_conf()");
        let refused = || open(&(without_password.clone() + "&sslmode=require")).err().unwrap_or_default();
        while !refused().contains("prove who it is") {
            assert!(refused().contains("PASSWORD_FILE"), "before the reload");
        }
        for folder in [good, expired] {
            let _ = fs::remove_dir_all(folder);
        }
    }
}
