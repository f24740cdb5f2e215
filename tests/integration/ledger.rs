//! The ledger of a running service, beyond what the conformance run looks at.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use rusqlite::types::Value::{Integer, Null, Text};
use rustix::process::Signal;

use crate::metrics::{metrics_key, value};
use crate::support::{Runtime, Script, Server, chat, completion, head_seq, request, until};

#[test]
fn a_row_has_what_was_answered() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let key = server.key();
    server.post(&key, &chat("x")).is_completion();
    server
        .post(&key, &serde_json::json!({}))
        .is_error(400, "invalid_request");
    runtime.next(Script::Text(500, String::new()));
    server
        .post(&key, &chat("x"))
        .is_error(502, "inference_error");
    let rows = server
        .query("SELECT status, error_code, total_tokens, grounded FROM usage ORDER BY status");
    assert_eq!(
        rows,
        [
            [Integer(200), Null, Integer(14), Integer(0)],
            [
                Integer(400),
                Text("invalid_request".into()),
                Null,
                Integer(0)
            ],
            [
                Integer(502),
                Text("inference_error".into()),
                Null,
                Integer(0)
            ],
        ]
    );
    let odd =
        "SELECT count(*) FROM usage WHERE queue_ms + coalesce(runtime_ms, 0) > duration_ms + 0.002
               OR duration_ms <= 0 OR (status = 400) <> (runtime_ms IS NULL)";
    assert_eq!(server.query(odd), [[Integer(0)]]);
}

#[test]
fn created_is_when_the_request_was_complete_and_not_when_a_worker_took_it() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime))
        .set("ADRIATICUM_WORKERS", 1)
        .start();
    let (key, watcher) = (server.key(), metrics_key(&server));
    let gate = Arc::new(AtomicBool::new(false));
    runtime.next(Script::Held(Arc::clone(&gate), completion("first")));
    let mut clients = [server.connect(), server.connect()];
    clients[0].send(request(&key, &chat("x")));
    until("the worker is busy", || runtime.count() == 1);
    clients[1].send(request(&key, &chat("x")));
    until("the second waits", || {
        value(&server, &watcher, "adriaticum_queue_length") == 1.0
    });
    let complete = seconds();
    until("it has waited", || seconds() > complete + 1);
    gate.store(true, Ordering::Release);
    for client in &mut clients {
        let reply = client.reply();
        reply.is_completion();
        let (created, id) = (
            reply.json()["created"].as_u64(),
            reply.json()["id"].to_string(),
        );
        assert!(
            created.is_some_and(|created| created <= complete),
            "{created:?}, {complete}"
        );
        let prefix =
            u64::from_str_radix(&id["\"chatcmpl_".len()..][..12], 16).expect("milliseconds");
        assert_eq!(Some(prefix / 1000), created, "{id}");
    }
    let rows = server.query("SELECT created FROM usage ORDER BY created");
    assert!(
        rows.iter()
            .all(|row| matches!(row[..], [Integer(created)] if created as u64 <= complete))
    );
}

pub fn seconds() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("a time after 1970")
        .as_secs()
}

#[test]
fn what_comes_before_the_key_leaves_no_row() {
    let server = Server::new(None).start();
    let key = server.key();
    let mut client = server.connect();
    client.send("POST /v1/nowhere HTTP/1.1\r\nHost: api.test\r\n\r\n");
    client.reply().is_error(404, "not_found");
    server
        .post("adr_0", &chat("x"))
        .is_error(401, "invalid_api_key");
    let mut client = server.connect();
    client.send(crate::support::raw_request(&key, "", "").replace("Length: 0", "Length: 999999"));
    client.reply().is_error(413, "payload_too_large");
    assert_eq!(server.query("SELECT count(*) FROM usage"), [[Integer(0)]]);
    let keys: serde_json::Value =
        serde_json::from_str(&server.stdout_of(&["keys", "list", "--json"])).expect("JSON");
    assert_eq!(keys[0]["last_used"], serde_json::Value::Null);
}

#[test]
fn the_last_use_follows_the_rows() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let key = server.key();
    server.post(&key, &chat("x")).is_completion();
    let keys: serde_json::Value =
        serde_json::from_str(&server.stdout_of(&["keys", "list", "--json"])).expect("JSON");
    let last_used = keys[0]["last_used"].as_i64().expect("a time");
    assert_eq!(
        server.query("SELECT created FROM usage"),
        [[Integer(last_used)]],
        "it is the time of the row"
    );
}

/// How many requests each client makes; every fourth is refused.
const REQUESTS: usize = 35;

#[test]
fn a_row_is_in_the_chain_and_in_the_sums_when_its_answer_is_read() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                // Its sums are not changed by other clients.
                let (key, mut client) = (server.key(), server.connect());
                for number in 1..=REQUESTS {
                    let is_refused = number % 4 == 0;
                    let body = if is_refused {
                        serde_json::json!({})
                    } else {
                        chat("x")
                    };
                    client.send(request(&key, &body));
                    let reply = client.reply();
                    assert_eq!(
                        reply.status,
                        if is_refused { 400 } else { 200 },
                        "{reply:?}"
                    );
                    check_sealed_and_summed(
                        &server,
                        reply.header("x-request-id").expect("an id"),
                        number,
                    );
                }
            });
        }
    });
    let rows = 8 * REQUESTS;
    assert_eq!(
        head_seq(&server.stdout_of(&["usage", "verify"])),
        rows.to_string()
    );
}

/// Checks the row with this id, and the sums of its key, which has made `requests` of them.
#[track_caller]
fn check_sealed_and_summed(server: &Server, id: &str, requests: usize) {
    let found = server.query(&format!(
        "SELECT sum(requests), sum(sums.total_tokens), seq > 0, length(hash)
         FROM usage JOIN usage_days AS sums USING (key_id) WHERE request_id = '{id}' GROUP BY seq, hash"
    ));
    let (requests, tokens) = (requests as i64, 14 * (requests - requests / 4) as i64);
    assert_eq!(found, [[requests, tokens, 1, 32].map(Integer)], "{id}");
}

#[test]
fn a_running_request_has_no_row_and_is_in_no_sum() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let key = server.key();
    let gate = Arc::new(AtomicBool::new(false));
    runtime.next(Script::Held(Arc::clone(&gate), completion("at last")));
    let mut client = server.connect();
    client.send(request(&key, &chat("x")));
    until("it is running", || runtime.count() == 1);
    assert!(
        server
            .stdout_of(&["usage"])
            .contains("\n0 requests, 0 errors")
    );
    assert!(
        server.query("SELECT 1 FROM usage").is_empty(),
        "it is written once, with its outcome"
    );
    gate.store(true, Ordering::Release);
    client.reply().is_completion();
    assert!(
        server
            .stdout_of(&["usage"])
            .contains("\n1 request, 0 errors")
    );
}

#[test]
fn a_database_of_a_later_version_is_refused_and_left_alone() {
    let server = Server::new(None).sqlite();
    server.key();
    server.query("PRAGMA user_version = 99");
    let output = server.run(&["serve"]);
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        printed.contains("version 99") && printed.contains("install"),
        "{printed}"
    );
    assert_eq!(server.query("SELECT count(*) FROM keys"), [[Integer(1)]]);
}

#[test]
fn a_damaged_database_is_refused_with_what_to_do() {
    let server = Server::new(None).sqlite();
    std::fs::write(
        server.folder.path("adriaticum.db"),
        "not a database at all".repeat(100),
    )
    .expect("a file");
    for command in ["serve", "check"] {
        let output = server.run(&[command]);
        let printed =
            String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert_eq!(output.status.code(), Some(1));
        assert!(
            printed.contains("damaged") && printed.contains("restore a backup"),
            "{printed}"
        );
    }
}

#[test]
fn the_database_is_let_go_at_the_end() {
    let runtime = Runtime::start();
    let mut server = Server::new(Some(&runtime)).sqlite().start();
    let key = server.key();
    server.post(&key, &chat("x")).is_completion();
    assert!(crate::support::exists(
        &server.folder.path("adriaticum.db-wal")
    ));
    server.signal(Signal::TERM);
    assert!(server.wait().success());
    until("the log of the database is folded into it", || {
        !crate::support::exists(&server.folder.path("adriaticum.db-wal"))
    });
}

/// With a dead runtime, one key wrote 5,000 rows a second.
#[test]
fn failures_of_one_key_do_not_fill_the_ledger() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    drop(runtime);
    let (key, watcher) = (server.key(), metrics_key(&server));
    let unrecorded = || value(&server, &watcher, "adriaticum_refusals_unrecorded_total") as usize;
    let mut client = server.connect();
    let mut failed = 0;
    until("some leave no row", || {
        for _ in 0..100 {
            client.send(request(&key, &chat("x")));
            client.reply().is_error(502, "inference_error");
        }
        failed += 100;
        unrecorded() > 0
    });
    let rows = server.query("SELECT 1 FROM usage WHERE status = 502").len();
    assert!(rows >= 100);
    assert_eq!(rows + unrecorded(), failed, "each is counted once");
    let lines = server.log().matches("status=502").count();
    assert_eq!(lines, rows, "one beyond the bound has no line either");
}

#[test]
fn refusals_of_one_key_do_not_fill_the_ledger() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let (key, other, watcher) = (server.key(), server.key(), metrics_key(&server));
    let unrecorded = || value(&server, &watcher, "adriaticum_refusals_unrecorded_total") as usize;
    let rows = |status: u16| {
        server
            .query(&format!("SELECT 1 FROM usage WHERE status = {status}"))
            .len()
    };
    let mut client = server.connect();
    let mut refused = 0;
    // Even a slow machine refuses more than ten per second, so the burst is used up at some time.
    until("some leave no row", || {
        for _ in 0..100 {
            client.send(request(&key, &serde_json::json!({})));
            client.reply().is_error(400, "invalid_request");
        }
        refused += 100;
        unrecorded() > 0
    });
    assert!(rows(400) >= 100);
    assert_eq!(rows(400) + unrecorded(), refused, "each is counted once");
    // This key's completions and another key's refusals still get their rows.
    server.post(&key, &chat("x")).is_completion();
    let before = rows(400);
    server
        .post(&other, &serde_json::json!({}))
        .is_error(400, "invalid_request");
    assert_eq!((rows(200), rows(400)), (1, before + 1));
    assert!(
        server
            .log()
            .contains("requests without a measured token that were not recorded: 1 since"),
        "{}",
        server.log()
    );
}
