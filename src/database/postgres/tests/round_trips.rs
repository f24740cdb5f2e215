//! One connection to a real server: values, errors, sign-in and TLS.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rcgen::{
    BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, PKCS_ECDSA_P256_SHA256,
    PKCS_ED25519, SignatureAlgorithm,
};

use crate::database::postgres::encoding::SqlError;
use crate::database::postgres::protocol::PgConnection;
use crate::database::postgres::tls;
use crate::database::postgres::uri::{DatabaseUri, SslMode};
use crate::database::{Row, SqlValue, Statement, values};
use crate::store::test_server::PostgresServer;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

fn open(uri: &str) -> Result<PgConnection, String> {
    let uri = DatabaseUri::parse(uri).expect("a good URI");
    let mode = uri.sslmode_for(&uri.hosts[0]);
    let tls = (mode != SslMode::Disable)
        .then(|| tls::config(mode, uri.sslrootcert.as_deref()).expect("TLS"));
    PgConnection::open(&uri, &uri.hosts[0], tls.as_ref(), soon()).map_err(|error| error.cause)
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
    let mut read = |row: Row| {
        let mut values = row.values();
        values.resize(5, SqlValue::Null);
        rows.push(values);
    };
    connection.run_one(
        Statement::new(statement.to_owned(), parameters),
        soon(),
        &mut read,
    )?;
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
    let statement =
        "SELECT CAST($1 AS BIGINT), CAST($2 AS DOUBLE PRECISION), $3, $4, CAST($5 AS TEXT)";
    for (number, real, text) in [
        (i64::MIN, f64::MIN_POSITIVE, ""),
        (i64::MAX, 0.1 + 0.2, "x' $1 \\ \u{1f30a}"),
        (0, -1e300, "\r\n"),
        (-1, f64::INFINITY, "a"),
    ] {
        let sent = values![number, real, text, vec![0_u8, 255, 92], None::<i64>];
        assert_eq!(
            rows(&mut connection, statement, &sent),
            Ok(vec![sent.to_vec()])
        );
    }
    let nulls = vec![SqlValue::Null; 5];
    assert_eq!(
        rows(&mut connection, statement, &nulls),
        Ok(vec![nulls]),
        "prepared with other types"
    );
    assert_eq!(connection.prepared.len(), 1);
    assert_eq!(connection.names, 1, "it is prepared once");
}

#[test]
fn statements_in_one_trip_are_one_transaction() {
    let mut connection = connection();
    connection
        .run_text("CREATE TEMPORARY TABLE t (x BIGINT PRIMARY KEY)", soon())
        .expect("a table");
    let insert = |x: i64| Statement::new("INSERT INTO t VALUES ($1)", values![x]);
    let mut run = |begin, statements: &[Statement]| {
        connection.run(begin, statements, None, soon(), &mut |_, _| ())
    };
    let twice = run(None, &[insert(1), insert(2), insert(1)]).expect_err("a duplicate");
    assert_eq!(state(&twice), "23505");
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
    connection.run_text("ROLLBACK", soon()).expect("an end");
    assert!(connection.is_usable());
    assert_eq!(
        rows(&mut connection, "SELECT x FROM t", &[]).map(|rows| rows.len()),
        Ok(2)
    );
}

#[test]
fn three_kinds_of_errors() {
    let mut connection = connection();
    assert_eq!(
        state(&rows(&mut connection, "SELEC", &[]).expect_err("no SQL")),
        "42601"
    );
    assert!(matches!(
        rows(&mut connection, "SELECT '\0'", &[]),
        Err(SqlError::NotSent(_))
    ));
    assert!(connection.is_usable(), "both are over");
    let ended = rows(
        &mut connection,
        "SELECT pg_terminate_backend(pg_backend_pid())",
        &[],
    );
    assert!(
        matches!(&ended, Err(SqlError::Unknown(cause)) if cause.contains("57P01")),
        "{ended:?}"
    );
    assert!(!connection.is_usable());
    connection = self::connection();
    let (began, limit) = (Instant::now(), Duration::from_millis(200));
    let late = connection.run_one(
        Statement::new("SELECT pg_sleep(60)", []),
        began + limit,
        &mut |_| (),
    );
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
    server.psql(&format!(
        "ALTER DATABASE {name} SET default_transaction_read_only = on"
    ));
    assert!(refused(database.clone()).contains("only reads"));
    open(&(database + "&target_session_attrs=any")).expect("any server will do");
    open(&server.socket_uri()).expect("a Unix socket");
}

/// Writes a CA and a certificate for localhost that it has signed.
fn certificates(expires: i32, algorithm: &'static SignatureAlgorithm) -> PathBuf {
    let folder =
        std::env::temp_dir().join(format!("adriaticum-{}", crate::secret::secret_hex::<8>()));
    fs::create_dir(&folder).expect("a folder");
    let mut ca = CertificateParams::default();
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca_key = KeyPair::generate_for(algorithm).expect("a key");
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
fn tls_checks_what_sslmode_says() {
    let (good, expired) = (
        certificates(4000, &PKCS_ECDSA_P256_SHA256),
        certificates(2001, &PKCS_ED25519),
    );
    let [server, expired_server] =
        [&good, &expired].map(|folder| PostgresServer::start(Some(folder)));
    let uri = |server: &PostgresServer, host, mode: &str, ca: &Path| {
        let ca = ca.join("ca.crt");
        let uri = server.uri.replace("127.0.0.1", host);
        if mode.is_empty() {
            uri
        } else {
            format!("{uri}&sslmode={mode}&sslrootcert={}", ca.display())
        }
    };
    let is_encrypted = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()";
    for (host, mode) in [
        ("localhost", "verify-full"),
        ("localhost", "verify-ca"),
        ("127.0.0.1", "verify-ca"),
    ] {
        let mut connection = open(&uri(&server, host, mode, &good)).expect(mode);
        assert_eq!(
            rows(&mut connection, is_encrypted, &[]).expect("a row")[0][0],
            SqlValue::Int(1)
        );
    }
    open(&(uri(&server, "127.0.0.1", "", &good) + "&sslmode=require"))
        .expect("the password proves the server");
    // There is no channel binding with Ed25519.
    let unbound = open(&(expired_server.uri.clone() + "&sslmode=require"))
        .err()
        .unwrap_or_default();
    assert!(unbound.contains("no channel binding"), "{unbound}");
    for (server, host, mode, ca, error_text) in [
        (
            &server,
            "127.0.0.1",
            "verify-full",
            &good,
            "not for this name",
        ),
        (
            &server,
            "localhost",
            "verify-full",
            &expired,
            "not signed by a trusted CA",
        ),
        (
            &server,
            "localhost",
            "verify-ca",
            &expired,
            "not signed by a trusted CA",
        ),
        (
            &expired_server,
            "localhost",
            "verify-full",
            &expired,
            "has expired",
        ),
    ] {
        let error = open(&uri(server, host, mode, ca)).err().expect(error_text);
        assert!(error.contains(error_text), "{host} {mode}: {error}");
    }
    let without_password =
        uri(&server, "127.0.0.1", "", &good).replace("adriaticum:secret", "trusted");
    server.psql("CREATE ROLE trusted LOGIN");
    server.psql("COPY (SELECT 'host all all 127.0.0.1/32 trust') TO PROGRAM 'cat > pg_hba.conf'");
    server.psql("SELECT pg_reload_conf()");
    let refused = || {
        open(&(without_password.clone() + "&sslmode=require"))
            .err()
            .unwrap_or_default()
    };
    while !refused().contains("prove who it is") {
        assert!(refused().contains("PASSWORD_FILE"), "before the reload");
    }
    for folder in [good, expired] {
        let _ = fs::remove_dir_all(folder);
    }
}
