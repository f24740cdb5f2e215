//! A database of another schema is refused by every command and left alone, and a running service notices that its
//! schema was changed.

use rusqlite::Connection;
use rusqlite::types::Value::Integer;

use crate::metrics::get;
use crate::support::{Runtime, Server};

/// The version of this program.
const VERSION: i64 = 11;

#[test]
fn a_database_of_another_schema_is_refused_and_left_alone() {
    let server = Server::new(None).sqlite();
    server.key();
    for (version, advice) in [
        (
            VERSION - 1,
            "no release had it, so begin with a new database",
        ),
        (
            VERSION + 1,
            "install the version that made it, or a later one",
        ),
    ] {
        server.query(&format!("PRAGMA user_version = {version}"));
        for command in [
            "serve",
            "check",
            "keys list",
            "keys create another",
            "keys revoke one",
            "usage",
            "usage list",
            "usage verify",
            "audit",
            "console password",
            "move --from adriaticum.db --to postgresql://nobody@127.0.0.1:1/none",
        ] {
            let words: Vec<&str> = command.split(' ').collect();
            let output = server.run(&words);
            let said = [output.stdout, output.stderr].concat();
            let message = String::from_utf8_lossy(&said).into_owned();
            assert_eq!(output.status.code(), Some(1), "{command}: {message}");
            let found = format!("has version {version}, and this program needs version {VERSION}");
            assert!(
                message.contains(&found) && message.contains(advice),
                "{command}: {message}"
            );
        }
        // The copy is for the program that knows it.
        let name = format!("copy-{version}.db");
        server.stdout_of(&["backup", &name]);
        let copy = Connection::open(server.folder.path(&name)).expect("the copy");
        let copied: i64 = copy
            .query_row("PRAGMA user_version", [], |row| row.get(0))
            .expect("its version");
        assert_eq!(copied, version);
        assert_eq!(server.query("PRAGMA user_version"), [[Integer(version)]]);
    }
}

/// Changes the schema's version under a running service, which has to stop.
fn stops_after(server: &mut Server, change: &str) {
    assert_eq!(get(server, "/readyz").0, 200);
    server.query(change);
    // While probes arrive, it looks every second.
    get(server, "/readyz");
    assert_eq!(server.wait().code(), Some(1));
    let log = server.log();
    let found = format!("the database now has version {}", VERSION + 1);
    assert!(
        log.contains(&found) && log.contains("this process stops"),
        "{log}"
    );
    assert!(!log.contains("serves under the name"), "{log}");
}

#[test]
fn a_service_whose_schema_was_changed_stops() {
    let runtime = Runtime::start();
    stops_after(
        &mut Server::new(Some(&runtime)).sqlite().start(),
        "PRAGMA user_version = 12",
    );
}

#[test]
#[cfg(feature = "test-postgres")]
fn on_postgres_too() {
    let runtime = Runtime::start();
    stops_after(
        &mut Server::new(Some(&runtime)).start(),
        "UPDATE schema_version SET version = 12",
    );
}
