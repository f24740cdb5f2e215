//! The service on PostgreSQL. With the feature `test-postgres`, the other tests run on it too.

use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rusqlite::types::Value::Integer;
use rustix::process::Signal;

use crate::metrics::get;
use crate::postgres_server::PostgresServer;
use crate::support::{Runtime, Script, Server, chat, completion, request, until};

fn server(runtime: Option<&Runtime>) -> Server {
    Server::new(runtime).set("ADRIATICUM_DATABASE", PostgresServer::shared().database())
}

#[test]
fn every_command_works_and_none_shows_the_password() {
    let runtime = Runtime::start();
    let mut server = server(Some(&runtime));
    let key = server.key();
    let mut password = server.command(&["console", "password"]);
    let mut child = password
        .stdin(Stdio::piped())
        .spawn()
        .expect("it should start");
    let line = b"a long enough password\n";
    std::io::Write::write_all(&mut child.stdin.take().expect("its input"), line)
        .expect("it should read");
    assert!(child.wait().expect("its end").success());
    server = server.start();
    server.post(&key, &chat("x")).is_completion();
    let mut printed = server.stdout_of(&["usage"])
        + &server.stdout_of(&["usage", "verify"])
        + &server.stdout_of(&["check"]);
    assert!(
        printed.contains("1 request, 0 errors") && printed.contains("1 row, nothing wrong"),
        "{printed}"
    );
    assert!(
        printed.contains("postgresql://adriaticum@127.0.0.1:") && printed.contains("writable"),
        "{printed}"
    );
    let id = printed_id(&server.stdout_of(&["keys", "list", "--json"]));
    server.stdout_of(&["keys", "revoke", &id]);
    server
        .post(&key, &chat("x"))
        .is_error(401, "invalid_api_key");
    let backup = server.run(&["backup", "copy.db"]);
    let second = server.run(&["serve"]);
    assert_eq!(
        (backup.status.code(), second.status.code()),
        (Some(1), Some(1))
    );
    for output in [backup, second] {
        printed += &String::from_utf8_lossy(&output.stderr);
    }
    assert!(
        printed.contains("pg_dump") && printed.contains("another adriaticum serve has the name"),
        "{printed}"
    );
    server.signal(Signal::TERM);
    assert!(server.wait().success());
    assert!(
        !(printed + &server.log()).contains("secret"),
        "the password is printed"
    );
}

fn printed_id(keys: &str) -> String {
    let keys: serde_json::Value = serde_json::from_str(keys).expect("JSON");
    keys[0]["id"].as_str().expect("an id").to_owned()
}

/// Ends every session of a database, and refuses or accepts new ones.
pub fn set_usable(uri: &str, is_usable: bool) {
    let name = uri
        .rsplit_once('/')
        .and_then(|(_, rest)| rest.split_once('?'))
        .expect("a name")
        .0;
    let postgres = PostgresServer::shared();
    postgres.psql(&format!(
        "ALTER DATABASE {name} ALLOW_CONNECTIONS {is_usable}"
    ));
    let end = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname";
    postgres.psql(&format!("{end} = '{name}'"));
}

/// All workers of a busy gateway wait with an outcome while the database is lost. The requests behind them got their 503
/// only when the workers gave up.
#[test]
fn requests_that_wait_for_a_worker_are_refused_while_the_database_is_lost() {
    let runtime = Runtime::start();
    let uri = PostgresServer::shared().database();
    let server = Server::new(Some(&runtime))
        .set("ADRIATICUM_DATABASE", &uri)
        .set("ADRIATICUM_WORKERS", "1");
    let server = server.start();
    let key = server.key();
    let gate = Arc::new(AtomicBool::new(false));
    runtime.next(Script::Held(Arc::clone(&gate), completion("at last")));
    let [mut running, mut waiting] = [(); 2].map(|()| server.connect());
    running.send(request(&key, &chat("x")));
    until("it is running", || runtime.count() == 1);
    set_usable(&uri, false);
    gate.store(true, Ordering::Release);
    until("it is found out", || get(&server, "/readyz").0 == 503);
    waiting.send(request(&key, &chat("x")));
    waiting.reply().is_error(503, "service_unavailable");
    set_usable(&uri, true);
    running.reply().is_completion();
    assert_eq!(runtime.count(), 1);
}

#[test]
fn a_database_that_went_away_is_found_again() {
    let runtime = Runtime::start();
    let uri = PostgresServer::shared().database();
    let server = Server::new(Some(&runtime))
        .set("ADRIATICUM_DATABASE", &uri)
        .start();
    let key = server.key();
    server.post(&key, &chat("x")).is_completion();
    let gate = Arc::new(AtomicBool::new(false));
    runtime.next(Script::Held(Arc::clone(&gate), completion("at last")));
    let mut running = server.connect();
    running.send(request(&key, &chat("x")));
    until("it is running", || runtime.count() == 2);
    set_usable(&uri, false);
    gate.store(true, Ordering::Release);
    until("it is found out", || get(&server, "/readyz").0 == 503);
    server
        .post(&key, &chat("x"))
        .is_error(503, "service_unavailable");
    let calls = runtime.count();
    server
        .post(&key, &chat("x"))
        .is_error(503, "service_unavailable");
    assert_eq!(runtime.count(), calls, "no inference is spent");
    set_usable(&uri, true);
    running.reply().is_completion();
    until("it is served again", || {
        server.post(&key, &chat("x")).status == 200
    });
    let rows = "SELECT count(*) FROM usage WHERE status = 200";
    assert_eq!(server.query(rows), [[Integer(3)]]);
}

#[test]
fn a_database_that_is_not_there_is_named_without_its_password() {
    let server = Server::new(None).set(
        "ADRIATICUM_DATABASE",
        "postgresql://user:secret@127.0.0.1:1/db",
    );
    for command in [&["serve"][..], &["keys", "list"], &["check"]] {
        let output = server.run(command);
        let printed =
            String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert_eq!(output.status.code(), Some(1), "{printed}");
        assert!(
            printed.contains("postgresql://user@127.0.0.1:1/db") && !printed.contains("secret"),
            "{printed}"
        );
    }
}
