//! Health probes and scrapes: ready means that a request would succeed, and asking costs nothing.

use std::fs;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rusqlite::types::Value::Integer;

use crate::support::{Client, Reply, Runtime, Server, chat, request, until};

pub const CONSOLE: &str = "console.localhost";

#[track_caller]
fn ask(server: &Server, method: &str, host: &str, path: &str, key: Option<&str>) -> Reply {
    let authorization = key.map_or(String::new(), |key| {
        format!("Authorization: Bearer {key}\r\n")
    });
    let mut client = server.connect();
    client.ask(format!(
        "{method} {path} HTTP/1.1\r\nHost: {host}\r\n{authorization}\r\n"
    ))
}

#[track_caller]
pub fn get(server: &Server, path: &str) -> (u16, String) {
    let reply = ask(server, "GET", CONSOLE, path, None);
    (reply.status, String::from_utf8(reply.body).expect("a text"))
}

pub fn metrics_key(server: &Server) -> String {
    server
        .stdout_of(&["keys", "create", "watcher", "--permission", "metrics"])
        .trim()
        .to_owned()
}

/// The value of a series.
#[track_caller]
pub fn value(server: &Server, key: &str, series: &str) -> f64 {
    let reply = ask(server, "GET", CONSOLE, "/metrics", Some(key));
    assert_eq!(reply.status, 200, "{reply:?}");
    let text = String::from_utf8(reply.body).expect("a text");
    let found = text
        .lines()
        .find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok());
    found.unwrap_or_else(|| panic!("{series} is not in\n{text}"))
}

#[test]
fn ready_is_with_a_ledger_that_takes_a_write_and_asking_often_writes_little() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).sqlite().start();
    let watcher = metrics_key(&server);
    assert_eq!(get(&server, "/readyz"), (200, "works\n".into()));
    let refused = ask(&server, "POST", CONSOLE, "/readyz", None);
    assert_eq!(
        (refused.status, refused.header("allow")),
        (405, Some("GET, HEAD"))
    );
    let head_refused = value(&server, &watcher, "adriaticum_requests_head_refused_total");
    assert_eq!(head_refused, 0.0, "a probe is not refused");

    // However often it is asked, it writes no more than once a second.
    let log = server.folder.path("adriaticum.db-wal");
    let size = || log.metadata().expect("the log should be there").len();
    let (before, began) = (size(), Instant::now());
    for _ in 0..200 {
        assert_eq!(get(&server, "/readyz").0, 200);
    }
    let seconds = began.elapsed().as_secs() + 1;
    // A row and its sums are inserted and deleted: pages of the ledger, its three indexes, the sums and their index, and
    // that of the gateway.
    let (written, pages) = (size() - before, 7 * (4096 + 24));
    assert!(written <= seconds * pages, "{written} bytes in {seconds} s");

    // Another process holds the database. No probe and no scrape waits for it: all get the last result.
    let database = rusqlite::Connection::open(server.folder.path("adriaticum.db"))
        .expect("the database should open");
    database.execute_batch("BEGIN IMMEDIATE").expect("a lock");
    until("it is found out", || {
        let mut askers: Vec<_> = (0..4).map(|_| server.connect()).collect();
        for asker in &mut askers {
            asker.send(format!("GET /readyz HTTP/1.1\r\nHost: {CONSOLE}\r\n\r\n"));
        }
        askers.iter_mut().any(|asker| asker.reply().status == 503)
    });
    let began = Instant::now();
    // More than there are threads for the console's host. Each waited 5 s for the lock when a scrape wrote to the database.
    for _ in 0..5 {
        value(&server, &watcher, "adriaticum_ledger_available");
    }
    let took = began.elapsed();
    assert!(took < Duration::from_secs(20), "{took:?}");
    let said = || server.log().matches("[ERROR] database: ").count();
    until("the log says so", || said() == 1);
    let checked = String::from_utf8(server.run(&["check"]).stdout).expect("text");
    let line = checked.lines().find(|line| line.contains("  database "));
    assert!(
        line.is_some_and(|line| line.starts_with("FAIL  ") && line.contains("Until a row can be")),
        "{checked}"
    );
    database.execute_batch("ROLLBACK").expect("the lock goes");
    until("it is ready again", || get(&server, "/readyz").0 == 200);
    until("and says so", || {
        server.log().contains("[INFO] database works again")
    });
    assert_eq!(said(), 1, "{}", server.log());
}

fn damage_pages(server: &Server) {
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
}

fn truncate_wal(server: &Server) {
    fs::write(server.folder.path("adriaticum.db-wal"), "").expect("the WAL");
}

fn rename_table(server: &Server) {
    server.query("ALTER TABLE keys RENAME TO gone");
}

/// A fault that fails every request makes a running service not ready.
#[test]
fn whatever_fails_every_request_is_found_by_a_probe() {
    for damage in [damage_pages, truncate_wal, rename_table] {
        let runtime = Runtime::start();
        let server = Server::new(Some(&runtime)).sqlite().start();
        let key = server.key();
        server.complete(&key).is_completion();
        assert_eq!(get(&server, "/readyz").0, 200);
        damage(&server);
        // A connection that reads may have a page in its cache, until something is written.
        until("every request fails", || {
            server.complete(&key).status == 503
        });
        until("it is not ready", || get(&server, "/readyz").0 == 503);
        until("the log says why", || {
            server.log().contains("[ERROR] database: ")
        });
    }
}

#[test]
#[cfg(feature = "test-postgres")]
fn whatever_fails_every_request_is_found_by_a_probe_on_postgres() {
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
        server.complete(&key).is_error(503, "service_unavailable");
        until("it is not ready", || get(&server, "/readyz").0 == 503);
        server.query(repair);
    }
    // A foreign key is no obstacle.
    server.query("ALTER TABLE usage ADD FOREIGN KEY (key_id) REFERENCES keys (id)");
    until("it is ready", || get(&server, "/readyz").0 == 200);
}

/// An orchestrator restarts a service whose probes fail.
#[test]
fn probes_are_answered_whatever_else_is_asked() {
    let runtime = Runtime::start();
    let gate = runtime.hold("x");
    let server = Server::new(Some(&runtime))
        .set("ADRIATICUM_WORKERS", 1)
        .set("ADRIATICUM_QUEUE", 0)
        .start();
    let key = server.key();
    let mut busy = server.connect();
    busy.send(request(&key, &chat("x")));
    until("the worker is busy", || runtime.count() == 1);
    let page = format!("GET /sign-in HTTP/1.1\r\nHost: {CONSOLE}\r\n\r\n");
    let mut shed = 0;
    until("the console sheds", || {
        let mut visitors: Vec<_> = (0..60).map(|_| server.connect()).collect();
        visitors.iter_mut().for_each(|visitor| visitor.send(&page));
        for path in ["/healthz", "/readyz"] {
            assert_eq!(get(&server, path).0, 200, "{path}");
        }
        shed += visitors
            .iter_mut()
            .map(Client::reply)
            .filter(|reply| reply.status == 503)
            .count();
        shed > 50
    });
    server.complete(&key).is_error(503, "service_unavailable");
    gate.store(true, Ordering::Release);
    busy.reply().is_completion();
}
