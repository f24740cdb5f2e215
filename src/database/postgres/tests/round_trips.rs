//! One connection to a real server: values, errors, sign-in and TLS.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

use crate::database::location::{DatabaseUri, SslMode};
use crate::database::postgres::connection::{PgConnection, STATEMENT_TIMEOUT};
use crate::database::postgres::stream;
use crate::database::{Row, Statement, Value, values};
use crate::error::{ProblemKind, Result};
use crate::store::test_server::PostgresServer;

fn open(uri: &str) -> Result<PgConnection> {
    let uri = DatabaseUri::parse(uri).expect("a good URI");
    let tls = (uri.sslmode_for(&uri.hosts[0]) == SslMode::VerifyFull)
        .then(|| stream::tls_config(uri.sslrootcert.as_deref()).expect("TLS"));
    let soon = Instant::now() + Duration::from_secs(30);
    PgConnection::open(&uri, 0, tls.as_ref(), soon)
}

fn connection() -> PgConnection {
    open(&PostgresServer::shared().uri).expect("a connection")
}

fn rows(
    connection: &mut PgConnection,
    statement: &str,
    parameters: &[Value],
) -> Result<Vec<Vec<Value>>> {
    let mut rows = Vec::new();
    let mut read = |_, row: Row| rows.push(row.values());
    let statement = Statement::new(statement.to_owned(), parameters);
    connection.run(None, &[statement], None, STATEMENT_TIMEOUT, &mut read)?;
    Ok(rows)
}

#[test]
fn values_come_back_as_they_were_sent() {
    let mut connection = connection();
    let statement =
        "SELECT CAST($1 AS BIGINT), CAST($2 AS DOUBLE PRECISION), $3, $4, CAST($5 AS TEXT)";
    for (number, real, text) in [
        (i64::MIN, f64::MIN_POSITIVE, ""),
        (i64::MAX, 0.1 + 0.2, "x' $1 \\ \u{1f30a}"),
        (0, -1e300, "\r\n"),
        (-1, f64::INFINITY, "a"),
    ] {
        let sent = values![number, real, text, [0_u8, 255, 92], None::<i64>];
        assert_eq!(
            rows(&mut connection, statement, &sent),
            Ok(vec![sent.to_vec()])
        );
    }
    let nulls = vec![Value::Null; 5];
    assert_eq!(
        rows(&mut connection, statement, &nulls),
        Ok(vec![nulls]),
        "prepared with other types"
    );
    assert_eq!(connection.prepared.len(), 1, "it is prepared once");
}

#[test]
fn statements_in_one_trip_are_one_transaction() {
    let mut connection = connection();
    let table = "CREATE TEMPORARY TABLE t (x BIGINT PRIMARY KEY)";
    connection
        .run_text(table, STATEMENT_TIMEOUT)
        .expect("a table");
    let insert = |x: i64| Statement::new("INSERT INTO t VALUES ($1)", values![x]);
    let mut run = |begin, statements: &[Statement]| {
        connection.run(begin, statements, None, STATEMENT_TIMEOUT, &mut |_, _| ())
    };
    let twice = run(None, &[insert(1), insert(2), insert(1)]).expect_err("a duplicate");
    assert!(twice.text.contains("23505"), "{twice}");
    assert_eq!(
        run(None, &[insert(2), insert(1)]),
        Ok(vec![1, 1]),
        "none of the others was done"
    );
    assert_eq!(
        run(Some("BEGIN"), &[Statement::new("DELETE FROM t", [])]),
        Ok(vec![2])
    );
    assert!(!connection.is_usable(), "a transaction is open");
    connection
        .run_text("ROLLBACK", STATEMENT_TIMEOUT)
        .expect("an end");
    assert!(connection.is_usable());
    assert_eq!(
        rows(&mut connection, "SELECT x FROM t", &[]).map(|rows| rows.len()),
        Ok(2)
    );
}

#[test]
fn how_a_statement_can_end() {
    #[track_caller]
    fn check(connection: &mut PgConnection, statement: &str, kind: ProblemKind, text: &str) {
        let problem = rows(connection, statement, &[]).expect_err(text);
        assert_eq!(problem.kind, kind, "{problem}");
        assert!(problem.text.contains(text), "{problem}");
        let is_lost = kind == ProblemKind::Unknown;
        assert_eq!(connection.is_usable(), !is_lost, "{problem}");
    }
    let mut connection = connection();
    check(&mut connection, "SELEC", ProblemKind::Other, "42601");
    check(&mut connection, "SELECT '\0'", ProblemKind::Other, "");
    let sleep = "SELECT CAST(pg_sleep(60) AS TEXT)";
    check(&mut connection, sleep, ProblemKind::Busy, "57014");
    let refuse = "DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '25006'; END $$";
    check(&mut connection, refuse, ProblemKind::Unavailable, "25006");
    let end = "SELECT pg_terminate_backend(pg_backend_pid())";
    check(&mut connection, end, ProblemKind::Unknown, "57P01");
    // A server that hangs does not cancel the statement in time.
    connection = self::connection();
    let (began, limit) = (Instant::now(), Duration::from_millis(200));
    let sleep = [Statement::new(sleep, [])];
    let late = connection.run(None, &sleep, None, limit, &mut |_, _| ());
    let late = late.expect_err("it is late");
    assert_eq!(late.kind, ProblemKind::Unknown, "{late}");
    assert!(began.elapsed() >= limit && began.elapsed() < STATEMENT_TIMEOUT);
}

#[test]
fn a_connection_that_the_server_closed_is_noticed() {
    let mut connection = connection();
    let found = rows(&mut connection, "SELECT pg_backend_pid()", &[]).expect("its pid");
    let Value::Integer(pid) = found[0][0] else {
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
    let refused = |uri: String| open(&uri).err().expect("it should be refused").text;
    assert!(refused(database.replace("secret", "wrong")).contains("28P01"));
    assert!(refused(database.replace(":secret", "")).contains("PASSWORD_FILE"));
    assert!(refused(database.clone() + "&sslmode=verify-full").contains("no TLS"));
    let name = DatabaseUri::parse(&database).expect("a good URI").database;
    server.psql(&format!(
        "ALTER DATABASE {name} SET default_transaction_read_only = on"
    ));
    assert!(refused(database).contains("only reads"));
    open(&server.socket_uri()).expect("a Unix socket");
}

/// Writes a CA and a certificate for localhost that it has signed.
fn certificates(expires: i32) -> PathBuf {
    let folder =
        std::env::temp_dir().join(format!("adriaticum-{}", crate::secret::secret_hex::<8>()));
    fs::create_dir(&folder).expect("a folder");
    let mut ca = CertificateParams::default();
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca_key = KeyPair::generate().expect("a key");
    let ca_certificate = ca.self_signed(&ca_key).expect("a CA");
    let mut server = CertificateParams::new(["localhost".into()]).expect("a name");
    server.not_after = rcgen::date_time_ymd(expires, 1, 1);
    let key = KeyPair::generate().expect("a key");
    let issued = server
        .signed_by(&key, &Issuer::new(ca, ca_key))
        .expect("a certificate");
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
fn tls_checks_the_certificate_and_its_name() {
    let (good, expired) = (certificates(4000), certificates(2001));
    let [server, expired_server] =
        [&good, &expired].map(|folder| PostgresServer::start(Some(folder)));
    let uri = |server: &PostgresServer, host, ca: &Path| {
        let ca = ca.join("ca.crt");
        let uri = server.uri.replace("127.0.0.1", host);
        format!("{uri}&sslmode=verify-full&sslrootcert={}", ca.display())
    };
    let mut connection = open(&uri(&server, "localhost", &good)).expect("a connection");
    let is_encrypted = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()";
    let found = rows(&mut connection, is_encrypted, &[]).expect("a row");
    assert_eq!(found, [[Value::Integer(1)]]);
    for (server, host, ca, error_text) in [
        (&server, "127.0.0.1", &good, "not for this name"),
        (&server, "localhost", &expired, "not signed by a trusted CA"),
        (&expired_server, "localhost", &expired, "has expired"),
    ] {
        let problem = open(&uri(server, host, ca)).err().expect(error_text);
        assert!(problem.text.contains(error_text), "{host}: {problem}");
    }
    for folder in [good, expired] {
        let _ = fs::remove_dir_all(folder);
    }
}
