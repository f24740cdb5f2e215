//! Ready means that a request would succeed: each of these faults fails every request, and `/readyz` has to say so.

use std::fs::{self, File};

use rusqlite::types::Value::Integer;
use serde_json::json;

use crate::console::{Browser, PASSWORD, has_verdict, set_password};
use crate::metrics::get;
use crate::support::{Runtime, Script, Server, chat, until};

/// Does something to the database under a running service that fails every request. Returns the service and its key.
#[track_caller]
fn fails_after(damage: impl FnOnce(&Server)) -> (Server, String) {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).sqlite().start();
    let key = server.key();
    server.post(&key, &chat("x")).is_completion();
    assert_eq!(get(&server, "/readyz").0, 200);
    damage(&server);
    // A connection that reads may have a page in its cache, until something is written.
    until("every request fails", || {
        server.post(&key, &chat("x")).status == 503
    });
    until("it is not ready", || get(&server, "/readyz").0 == 503);
    until("the log says why", || {
        server.log().contains("[ERROR] database: ")
    });
    (server, key)
}

#[test]
fn damaged_pages() {
    fails_after(|server| {
        let path = server.folder.path("adriaticum.db");
        server.query("PRAGMA wal_checkpoint(TRUNCATE)");
        let mut bytes = fs::read(&path).expect("the file");
        for row in server.query("SELECT rootpage FROM sqlite_schema WHERE tbl_name = 'keys'") {
            let Integer(page) = row[0] else {
                panic!("no page: {row:?}")
            };
            bytes[(page as usize - 1) * 4096..][..4096].fill(0xa5);
        }
        fs::write(&path, bytes).expect("the same file");
    });
}

#[test]
fn a_truncated_wal() {
    fails_after(|server| {
        let wal = File::options()
            .write(true)
            .open(server.folder.path("adriaticum.db-wal"));
        wal.and_then(|wal| wal.set_len(0)).expect("the WAL");
    });
}

#[test]
fn a_gateway_without_its_row() {
    let (server, _) = fails_after(|server| {
        server.query("DELETE FROM gateways");
    });
    let log = server.log();
    assert!(
        log.contains("the row of this gateway is missing in the table gateways"),
        "{log}"
    );
}

#[test]
fn a_table_that_is_gone() {
    for table in ["usage", "keys"] {
        let (server, key) = fails_after(|server| {
            server.query(&format!("ALTER TABLE {table} RENAME TO gone"));
        });
        server.query(&format!("ALTER TABLE gone RENAME TO {table}"));
        until("it is ready again", || get(&server, "/readyz").0 == 200);
        assert_ne!(server.post(&key, &chat("x")).status, 503);
    }
}

#[test]
fn an_insert_that_fails() {
    let (server, _) = fails_after(|server| {
        server.query(
            "CREATE TRIGGER no BEFORE INSERT ON usage BEGIN SELECT RAISE(ABORT, 'on purpose'); END",
        );
    });
    assert!(
        server.log().contains("adriaticum.db: on purpose. Until"),
        "{}",
        server.log()
    );
    server.query("DROP TRIGGER no");
    until("it is ready again", || get(&server, "/readyz").0 == 200);
}

#[test]
fn no_runtime_that_works() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let key = server.key();
    for ready in [200, 200, 200, 503] {
        assert_eq!(get(&server, "/readyz").0, ready);
        runtime.next(Script::Answer(500, json!({})));
        server
            .post(&key, &chat("x"))
            .is_error(502, "inference_error");
    }
    runtime.is_ready();
    until("it answers a probe", || get(&server, "/readyz").0 == 200);
    assert_eq!(runtime.count(), 4, "no request has tried it");
}

#[test]
fn every_page_of_the_console_has_the_dot_until_a_row_is_written() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).sqlite().start();
    assert!(set_password(&server, PASSWORD).status.success());
    let (key, mut browser) = (server.key(), Browser::signed_in(&server));
    server.query(
        "CREATE TRIGGER no BEFORE INSERT ON usage BEGIN SELECT RAISE(ABORT, 'on purpose'); END",
    );
    server
        .post(&key, &chat("x"))
        .is_error(503, "service_unavailable");
    let page = browser.get("/keys").text();
    assert!(page.contains("(failing)"), "{page}");
    has_verdict(&mut browser, "failing");
    let text = browser.get("/status").text();
    assert!(text.contains("on purpose. Until a row can be"), "{text}");
    server.query("DROP TRIGGER no");
    until("a row is written", || {
        server.post(&key, &chat("x")).status == 200
    });
    has_verdict(&mut browser, "works");
    let text = browser.get("/status").text();
    assert!(!text.contains("on purpose"), "{text}");
}

#[test]
#[cfg(feature = "test-postgres")]
fn an_insert_that_fails_on_postgres() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let key = server.key();
    for (fault, repair) in [
        (
            "ALTER TABLE usage ADD CONSTRAINT no CHECK (false) NOT VALID",
            "ALTER TABLE usage DROP CONSTRAINT no",
        ),
        (
            "ALTER TABLE keys RENAME TO gone",
            "ALTER TABLE gone RENAME TO keys",
        ),
    ] {
        until("it is ready", || get(&server, "/readyz").0 == 200);
        server.query(fault);
        server
            .post(&key, &chat("x"))
            .is_error(503, "service_unavailable");
        until("it is not ready", || get(&server, "/readyz").0 == 503);
        server.query(repair);
    }
    // A foreign key is no obstacle.
    server.query("ALTER TABLE usage ADD FOREIGN KEY (key_id) REFERENCES keys (id)");
    until("it is ready", || get(&server, "/readyz").0 == 200);
}
