//! Metrics and health probes on the console host.

use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rusqlite::types::Value::Integer;
use rustix::process::Signal;
use serde_json::json;

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
fn what_was_answered_is_counted() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let (key, watcher) = (server.key(), metrics_key(&server));
    let unmeasured =
        json!({"choices": [{"message": {"content": "x"}}], "usage": {"prompt_tokens": 5}});
    for script in [
        Script::Answer(200, completion("x")),
        Script::Answer(200, unmeasured),
        Script::Answer(500, json!({})),
    ] {
        runtime.next(script);
        server.post(&key, &chat("x"));
    }
    server
        .post("adr_wrong", &chat("x"))
        .is_error(401, "invalid_api_key");
    server
        .post(&watcher, &chat("x"))
        .is_error(403, "insufficient_permission");
    server
        .post(&key, &json!({}))
        .is_error(400, "invalid_request");
    ask(&server, "GET", "other.test", "/", None).is_error(404, "not_found");
    let mut broken = server.connect();
    broken.send("no HTTP at all\r\n\r\n");
    broken.reply().is_error(400, "invalid_request");
    for (series, expected) in [
        ("adriaticum_requests_total{status=\"200\",code=\"ok\"}", 2.0),
        (
            "adriaticum_requests_total{status=\"400\",code=\"invalid_request\"}",
            2.0,
        ),
        (
            "adriaticum_requests_total{status=\"401\",code=\"invalid_api_key\"}",
            1.0,
        ),
        (
            "adriaticum_requests_total{status=\"403\",code=\"insufficient_permission\"}",
            1.0,
        ),
        (
            "adriaticum_requests_total{status=\"404\",code=\"not_found\"}",
            1.0,
        ),
        (
            "adriaticum_requests_total{status=\"502\",code=\"inference_error\"}",
            1.0,
        ),
        (
            "adriaticum_requests_total{status=\"503\",code=\"service_unavailable\"}",
            0.0,
        ),
        ("adriaticum_tokens_total{kind=\"prompt\"}", 16.0),
        ("adriaticum_tokens_total{kind=\"completion\"}", 3.0),
        ("adriaticum_completions_unmeasured_total", 1.0),
        (
            "adriaticum_request_duration_seconds_count{outcome=\"completion\"}",
            2.0,
        ),
        // Broken HTTP has no time, nor has a request that its head refuses.
        (
            "adriaticum_request_duration_seconds_count{outcome=\"error\"}",
            3.0,
        ),
        ("adriaticum_queue_duration_seconds_count", 5.0),
        ("adriaticum_runtime_duration_seconds_count", 3.0),
        // All that a valid key asked for.
        ("adriaticum_ledger_duration_seconds_count", 5.0),
        ("adriaticum_ledger_errors_total", 0.0),
        ("adriaticum_ledger_available", 1.0),
    ] {
        assert_eq!(value(&server, &watcher, series), expected, "{series}");
    }
    let parts = ["queue", "runtime", "ledger"].map(|part| {
        value(
            &server,
            &watcher,
            &format!("adriaticum_{part}_duration_seconds_sum"),
        )
    });
    let whole = ["completion", "error"].map(|outcome| {
        let series = format!("adriaticum_request_duration_seconds_sum{{outcome=\"{outcome}\"}}");
        value(&server, &watcher, &series)
    });
    assert!(
        parts.iter().sum::<f64>() <= whole.iter().sum(),
        "{parts:?} {whole:?}"
    );
    assert!(parts[2] > 0.0, "the ledger takes its time");
}

#[test]
fn shed_requests_are_counted_each_and_logged_once_a_minute() {
    let runtime = Runtime::start();
    let mut server = Server::new(Some(&runtime))
        .set("ADRIATICUM_WORKERS", 1)
        .set("ADRIATICUM_QUEUE", 0)
        .start();
    let (key, watcher) = (server.key(), metrics_key(&server));
    let gate = Arc::new(AtomicBool::new(false));
    runtime.next(Script::Held(Arc::clone(&gate), completion("x")));
    let mut held = server.connect();
    held.send(request(&key, &chat("x")));
    until("the worker is busy", || runtime.count() == 1);
    for _ in 0..50 {
        server
            .post(&key, &chat("x"))
            .is_error(503, "service_unavailable");
    }
    assert_eq!(
        value(
            &server,
            &watcher,
            "adriaticum_requests_shed_total{reason=\"queue\"}"
        ),
        50.0
    );
    let lines = || -> Vec<String> {
        let mentions = |line: &&str| line.contains("queue_full") || line.contains("status=503");
        server
            .log()
            .lines()
            .filter(mentions)
            .map(str::to_owned)
            .collect()
    };
    assert_eq!(lines().len(), 1, "{:?}", lines());
    assert!(
        lines()[0].ends_with("[WARN] listener, since the last line: queue_full=1"),
        "{:?}",
        lines()
    );
    gate.store(true, Ordering::Release);
    held.reply().is_completion();
    server.signal(Signal::TERM);
    server.wait();
    let log = server.log();
    assert!(
        log.contains("[WARN] listener, since the last line: queue_full=49"),
        "{log}"
    );
}

#[test]
fn the_load_is_reported() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime))
        .set("ADRIATICUM_WORKERS", 2)
        .set("ADRIATICUM_QUEUE", 1)
        .start();
    let (key, watcher) = (server.key(), metrics_key(&server));
    let figure = |series: &str| value(&server, &watcher, series);
    let gate = Arc::new(AtomicBool::new(false));
    let mut held: Vec<_> = (0..3)
        .map(|_| {
            runtime.next(Script::Held(Arc::clone(&gate), completion("x")));
            let mut client = server.connect();
            client.send(request(&key, &chat(&"x".repeat(9000))));
            client
        })
        .collect();
    let load = || {
        (
            figure("adriaticum_queue_length"),
            figure("adriaticum_workers_busy"),
        )
    };
    until("two run and one waits", || load() == (1.0, 2.0));
    assert_eq!(figure("adriaticum_workers"), 2.0);
    // The scrape is answered all the same, and counts as a connection and not as a worker.
    until("four are open", || {
        figure("adriaticum_connections_open") == 4.0
    });
    // Each is counted for what it costs until it is answered.
    assert!(figure("adriaticum_buffered_bytes") > 3.0 * (27_000.0 + 32_768.0));
    server
        .post(&key, &chat("x"))
        .is_error(503, "service_unavailable");
    assert_eq!(
        figure("adriaticum_requests_shed_total{reason=\"queue\"}"),
        1.0
    );
    assert_eq!(
        figure("adriaticum_requests_total{status=\"503\",code=\"service_unavailable\"}"),
        1.0
    );
    gate.store(true, Ordering::Release);
    for client in &mut held {
        client.reply().is_completion();
    }
    assert_eq!(
        (
            figure("adriaticum_workers_busy"),
            figure("adriaticum_queue_length")
        ),
        (0.0, 0.0)
    );
    until("the memory is free", || {
        figure("adriaticum_buffered_bytes") < 50_000.0
    });
}

#[test]
fn what_the_ledger_did_not_take_is_counted() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).sqlite().start();
    let (key, watcher) = (server.key(), metrics_key(&server));
    let figures = || {
        ["errors_total", "available"]
            .map(|name| value(&server, &watcher, &format!("adriaticum_ledger_{name}")))
    };
    server.query(
        "CREATE TRIGGER no BEFORE INSERT ON usage BEGIN SELECT raise(ABORT, 'on purpose'); END",
    );
    let reply = server.post(&key, &chat("x"));
    reply.is_error(503, "service_unavailable");
    assert_eq!(
        reply.header("x-should-retry"),
        Some("false"),
        "the inference is spent"
    );
    assert_eq!(figures(), [1.0, 0.0]);
    for _ in 0..10 {
        let reply = server.post(&key, &chat("x"));
        reply.is_error(503, "service_unavailable");
        assert_eq!(reply.header("x-should-retry"), None);
        server
            .post(&key, &json!({}))
            .is_error(400, "invalid_request");
    }
    assert_eq!(figures(), [1.0, 0.0], "neither is tried");
    assert_eq!(
        runtime.count(),
        1,
        "no inference is spent while no row can be written"
    );
    server.query("DROP TRIGGER no");
    until("a test write ends it", || figures() == [1.0, 1.0]);
    server.post(&key, &chat("x")).is_completion();
    let written =
        "SELECT (SELECT count(*) FROM usage), sum(requests), sum(total_tokens) FROM usage_days";
    assert_eq!(server.query(written), [[1, 1, 14].map(Integer)]);
}

#[test]
fn a_scrape_needs_its_permission_and_leaves_no_row() {
    let server = Server::new(None).start();
    let (key, watcher) = (server.key(), metrics_key(&server));
    ask(&server, "GET", CONSOLE, "/metrics", None).is_error(401, "invalid_api_key");
    ask(&server, "GET", CONSOLE, "/metrics", Some("adr_wrong")).is_error(401, "invalid_api_key");
    ask(&server, "GET", CONSOLE, "/metrics", Some(&key)).is_error(403, "insufficient_permission");
    let reply = ask(&server, "GET", CONSOLE, "/metrics", Some(&watcher));
    assert_eq!(
        reply.header("content-type"),
        Some("text/plain; version=0.0.4; charset=utf-8")
    );
    assert_eq!(reply.header("cache-control"), Some("no-store"));
    let mut client = server.connect();
    client.send(format!(
        "HEAD /metrics HTTP/1.1\r\nHost: {CONSOLE}\r\nAuthorization: Bearer {watcher}\r\nConnection: close\r\n\r\n"
    ));
    let mut figure = String::new();
    client
        .stream
        .read_to_string(&mut figure)
        .expect("an answer and the end");
    assert!(
        figure.starts_with("HTTP/1.1 200 ") && figure.ends_with("\r\n\r\n"),
        "{figure}"
    );
    // Neither on an API host nor on an unknown one.
    for host in ["api.test", "other.test"] {
        for path in ["/metrics", "/healthz", "/readyz"] {
            ask(&server, "GET", host, path, Some(&watcher)).is_error(404, "not_found");
        }
    }
    assert!(server.query("SELECT * FROM usage").is_empty());
    let keys: serde_json::Value =
        serde_json::from_str(&server.stdout_of(&["keys", "list", "--json"])).expect("JSON");
    assert!(
        keys.as_array()
            .expect("a list")
            .iter()
            .all(|key| key["last_used"].is_null()),
        "{keys}"
    );
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
