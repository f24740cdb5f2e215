//! Metrics and health probes on the console host.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support::{Client, Reply, Runtime, Script, Server, chat, completion, request, until};

pub const CONSOLE: &str = "console.localhost";

#[track_caller]
fn ask(server: &Server, method: &str, host: &str, path: &str, key: Option<&str>) -> Reply {
    let authorization = key.map_or(String::new(), |key| {
        format!("Authorization: Bearer {key}\r\n")
    });
    let mut client = server.connect();
    client.send(format!(
        "{method} {path} HTTP/1.1\r\nHost: {host}\r\n{authorization}\r\n"
    ));
    client.reply()
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
fn a_scrape_does_not_wait_for_a_locked_database() {
    let server = Server::new(None).sqlite().start();
    let watcher = metrics_key(&server);
    let database = rusqlite::Connection::open(server.folder.path("adriaticum.db"))
        .expect("the database should open");
    database.execute_batch("BEGIN IMMEDIATE").expect("a lock");
    // More than there are threads for the console's host.
    let began = Instant::now();
    for _ in 0..5 {
        assert_eq!(
            ask(&server, "GET", CONSOLE, "/metrics", Some(&watcher)).status,
            200
        );
    }
    // Each of the five waited 5 s for the lock when a scrape wrote to the database.
    assert!(
        began.elapsed() < Duration::from_secs(20),
        "{:?}",
        began.elapsed()
    );
}

#[test]
fn ready_is_with_a_runtime_and_a_ledger_that_takes_a_write() {
    let runtime = Runtime::start();
    let without = Server::new(None).start();
    assert_eq!(get(&without, "/healthz"), (200, "ok\n".into()));
    let (status, reason) = get(&without, "/readyz");
    assert_eq!(status, 503);
    assert_eq!(reason, "failing: runtime; the log says why\n");
    let watcher = metrics_key(&without);
    let head_refused = || value(&without, &watcher, "adriaticum_requests_head_refused_total");
    assert_eq!(head_refused(), 0.0, "a probe is not refused");
    ask(&without, "GET", "other.test", "/", None).is_error(404, "not_found");
    assert_eq!(head_refused(), 1.0);

    let server = Server::new(Some(&runtime)).sqlite().start();
    assert_eq!(get(&server, "/readyz"), (200, "works\n".into()));
    let refused = ask(&server, "POST", CONSOLE, "/readyz", None);
    assert_eq!(
        (refused.status, refused.header("allow")),
        (405, Some("GET, HEAD"))
    );

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
    let pages = 7 * (4096 + 24);
    assert!(
        size() - before <= seconds * pages,
        "{} bytes in {seconds} s",
        size() - before
    );

    // Another process holds the database. No probe waits for it: all get the last result.
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
    // The probe is answered while the try still waits for the lock.
    let said = || server.log().matches("[ERROR] database: ").count();
    until("the log says so", || said() == 1);
    database.execute_batch("ROLLBACK").expect("the lock goes");
    until("it is ready again", || get(&server, "/readyz").0 == 200);
    until("and says so", || {
        server.log().contains("[INFO] database works again")
    });
    assert_eq!(said(), 1, "{}", server.log());
    assert_eq!(get(&server, "/healthz").0, 200);
}

/// An orchestrator restarts a service whose probes fail.
#[test]
fn probes_are_answered_whatever_else_is_asked() {
    let runtime = Runtime::start();
    let gate = Arc::new(AtomicBool::new(false));
    runtime.next(Script::Held(Arc::clone(&gate), completion("x")));
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
    server
        .post(&key, &chat("x"))
        .is_error(503, "service_unavailable");
    gate.store(true, Ordering::Release);
    busy.reply().is_completion();
}
