//! A database of version 9 is upgraded by `serve` and by no other command (`restore` and `move` upgrade their copy), and a
//! running service notices that its database was changed.

use rusqlite::Connection;
use rusqlite::types::Value::Integer;
use rustix::process::Signal;

use crate::metrics::get;
#[cfg(feature = "test-postgres")]
use crate::postgres_server::PostgresServer;
use crate::support::{Runtime, Server, chat};

pub const BACK_TO_9: &str = include_str!("../back_to_9.sql");

/// What version 9 left when it was killed: open rows, and sums of minutes.
const LEFT_BEHIND: [&str; 2] = [
    "INSERT INTO usage (request_id, key_id, key_name, created, gateway, epoch)
     SELECT request_id || 'z', key_id, key_name, created, gateway, 1 FROM usage",
    "INSERT INTO usage_rollup SELECT 60, start, key_id, key_name, status, error_code, gateway, requests, prompt_tokens,
     completion_tokens, total_tokens, unmeasured, runtime_times, own_times FROM usage_rollup WHERE span = 3600",
];

fn stop(server: &mut Server) {
    server.signal(Signal::TERM);
    assert!(server.wait().success());
}

fn make_version_9(server: &Server, note_version: &str) {
    BACK_TO_9
        .split(';')
        .chain(LEFT_BEHIND)
        .chain([note_version])
        .for_each(|statement| _ = server.query(statement));
}

/// Every command that opens the database of the configuration, but `serve` and `backup`.
fn commands(server: &Server) -> Vec<Vec<String>> {
    let text = |sql| match &server.query(sql)[0][0] {
        rusqlite::types::Value::Text(text) => text.clone(),
        other => panic!("{other:?}"),
    };
    let (key, request) = (
        text("SELECT min(id) FROM keys"),
        text("SELECT min(request_id) FROM usage"),
    );
    [
        "keys list",
        "keys create another",
        &format!("keys rename {key} renamed"),
        &format!("keys set {key} --concurrent 5"),
        "usage",
        "usage --by day",
        "usage verify",
        &format!("usage show {request}"),
        "audit",
        "check",
        &format!("keys revoke {key}"),
    ]
    .map(|line| line.split(' ').map(str::to_owned).collect())
    .into()
}

fn refuses(server: &Server, command: &[&str]) {
    let output = server.run(command);
    let message = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert_eq!(output.status.code(), Some(1), "{command:?}: {message}");
    for part in [
        "has version 9",
        "needs version 10",
        "adriaticum serve",
        "backup",
    ] {
        assert!(message.contains(part), "{command:?}: {message}");
    }
}

fn check_refusals(server: &Server) {
    for command in commands(server) {
        refuses(
            server,
            &command.iter().map(String::as_str).collect::<Vec<_>>(),
        );
    }
    refuses(server, &["console", "password"]);
}

/// That the chains verify, and that all sums equal the rows.
fn check_ledger(server: &Server, rows: i64) {
    let message = server.stdout_of(&["usage", "verify"]);
    assert!(
        message.contains(&format!("{rows} rows, nothing wrong")),
        "{message}"
    );
    let expected = server
        .query("SELECT count(*), sum(total_tokens) FROM usage")
        .remove(0);
    assert_eq!(expected[0], Integer(rows));
    for span in [3600, 86_400] {
        let kept = format!(
            "SELECT sum(requests), sum(total_tokens) FROM usage_rollup WHERE span = {span}"
        );
        assert_eq!(server.query(&kept)[0], expected, "{span}");
    }
    assert!(
        server
            .query("SELECT 1 FROM usage_rollup WHERE span = 60")
            .is_empty()
    );
    for command in commands(server) {
        server.stdout_of(&command.iter().map(String::as_str).collect::<Vec<_>>());
    }
}

#[test]
fn serve_upgrades_and_any_other_command_refuses() {
    let runtime = Runtime::start();
    let mut server = Server::new(Some(&runtime)).sqlite().start();
    let key = server.key();
    (0..3).for_each(|_| _ = server.post(&key, &chat("x")).is_completion());
    stop(&mut server);
    make_version_9(&server, "PRAGMA user_version = 9");
    check_refusals(&server);
    let path = server.folder.path("adriaticum.db").display().to_string();
    refuses(
        &server,
        &[
            "move",
            "--from",
            &path,
            "--to",
            "postgresql://nobody@127.0.0.1:1/none",
        ],
    );
    let copy = server.folder.path("copy.db");
    let message = server.stdout_of(&["backup", copy.to_str().expect("a path")]);
    assert!(message.contains("copy.db: 6 rows, "), "{message}");
    let version = |path| -> i64 {
        let database = Connection::open(path).expect("the database");
        database
            .query_row("PRAGMA user_version", [], |row| row.get(0))
            .expect("its version")
    };
    assert_eq!((version(copy.as_path()), version(path.as_ref())), (9, 9));
    for name in ["adriaticum.db-wal", "adriaticum.db-shm"] {
        assert!(!server.folder.path(name).exists(), "{name}");
    }
    let mut server = server.start();
    let log = server.log();
    assert!(
        log.contains("upgrading the database to version 10"),
        "{log}"
    );
    server.post(&key, &chat("x")).is_completion();
    stop(&mut server);
    check_ledger(&server, 4);
    let old = server.set("ADRIATICUM_DATABASE", copy.display());
    refuses(&old, &["usage"]);
    check_ledger(&old.start(), 3);
}

#[test]
fn a_database_of_a_build_before_the_first_release_is_refused_and_left_alone() {
    let server = Server::new(None).sqlite();
    server.key();
    server.query("PRAGMA user_version = 8");
    for command in ["serve", "usage"] {
        let output = server.run(&[command]);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert!(
            message.contains("version 8, which no release had")
                && message.contains("begin with a new"),
            "{message}"
        );
    }
    assert_eq!(server.query("PRAGMA user_version"), [[Integer(8)]]);
}

/// Changes the schema's version under a running service, which has to stop.
fn stops_after(server: &mut Server, change: &str) {
    assert_eq!(get(server, "/readyz").0, 200);
    server.query(change);
    // While probes arrive, it looks every second.
    get(server, "/readyz");
    assert_eq!(server.wait().code(), Some(1));
    let log = server.log();
    assert!(
        log.contains("the database now has version 11") && log.contains("this process stops"),
        "{log}"
    );
    assert!(!log.contains("serves under the name"), "{log}");
}

#[test]
fn a_service_whose_schema_was_changed_stops() {
    let runtime = Runtime::start();
    stops_after(
        &mut Server::new(Some(&runtime)).sqlite().start(),
        "PRAGMA user_version = 11",
    );
}

#[test]
#[cfg(feature = "test-postgres")]
fn on_postgres_a_service_stops_if_the_oldest_known_version_is_later_than_its_own() {
    let runtime = Runtime::start();
    let mut server = Server::new(Some(&runtime)).start();
    let key = server.key();
    server.query("UPDATE schema_version SET version = 11");
    server.post(&key, &chat("x")).is_completion();
    stops_after(&mut server, "UPDATE schema_version SET oldest_known = 11");
}

#[test]
#[cfg(feature = "test-postgres")]
fn on_postgres_the_first_gateway_upgrades_and_fences_the_others() {
    let (runtime, uri) = (Runtime::start(), PostgresServer::shared().database());
    let start = |name: &str| {
        Server::new(Some(&runtime))
            .set("ADRIATICUM_DATABASE", &uri)
            .set("ADRIATICUM_GATEWAY", name)
            .start()
    };
    let (mut a, mut b) = (start("a"), start("b"));
    let key = a.key();
    for server in [&a, &b, &b] {
        server.post(&key, &chat("x")).is_completion();
    }
    stop(&mut a);
    stop(&mut b);
    make_version_9(
        &a,
        "UPDATE schema_version SET version = 9, oldest_known = 9",
    );
    check_refusals(&a);
    let a = start("a");
    assert!(
        a.log().contains("upgrading the database to version 10"),
        "{}",
        a.log()
    );
    let epochs = "SELECT epoch FROM gateways WHERE epoch > 0 ORDER BY name";
    assert_eq!(
        a.query(epochs),
        [[Integer(3)], [Integer(2)]],
        "raised by the upgrade, and by the start of a"
    );
    let b = start("b");
    assert!(!b.log().contains("upgrading"), "{}", b.log());
    b.post(&key, &chat("x")).is_completion();
    check_ledger(&b, 4);
}
