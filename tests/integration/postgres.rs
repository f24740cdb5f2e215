//! The service on PostgreSQL. With the feature `test-postgres`, the other tests run on it too.

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

/// The conformance run shows that the commands work.
#[test]
fn no_command_shows_the_password_and_two_are_refused() {
    let mut server = server(None);
    server.key();
    server = server.start();
    let mut printed = String::new();
    for (command, code) in [
        (&["usage"][..], 0),
        (&["keys", "list", "--json"], 0),
        (&["check"], 1),
        (&["backup", "copy.db"], 1),
        (&["serve"], 1),
    ] {
        let output = server.run(command);
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        printed += &String::from_utf8_lossy(&[output.stdout, output.stderr].concat());
    }
    for part in [
        "postgresql://adriaticum@127.0.0.1:",
        "pg_dump",
        "another adriaticum serve has the name",
    ] {
        assert!(printed.contains(part), "{part:?} expected in {printed}");
    }
    server.signal(Signal::TERM);
    assert!(server.wait().success());
    let all = printed + &server.log();
    assert!(!all.contains("secret"), "the password is printed: {all}");
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

/// The requests behind a worker that waits with its outcome got their 503 only when it gave up.
#[test]
fn a_database_that_went_away_is_found_again() {
    let runtime = Runtime::start();
    let uri = PostgresServer::shared().database();
    let server = Server::new(Some(&runtime))
        .set("ADRIATICUM_DATABASE", &uri)
        .set("ADRIATICUM_WORKERS", "1")
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
    for _ in 0..2 {
        server
            .post(&key, &chat("x"))
            .is_error(503, "service_unavailable");
    }
    assert_eq!(runtime.count(), 2, "no inference is spent");
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
