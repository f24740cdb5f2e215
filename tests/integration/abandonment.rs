//! Clients that close their connection before the answer: their requests are dropped or cancelled.

use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rusqlite::types::Value;
use rustix::net::sockopt::set_socket_linger;

use crate::metrics::{metrics_key, value};
use crate::support::{Client, Runtime, Script, Server, chat, completion, request, until};

const WAITING: &str = "adriaticum_requests_abandoned_total{phase=\"waiting\"}";
const RUNNING: &str = "adriaticum_requests_abandoned_total{phase=\"running\"}";

/// The silent runtime would take until the service's timeout, 120 s; an answer in this time was not waited for.
const SOON: Duration = Duration::from_secs(20);

/// The rows of completions. Within a millisecond they are in no order.
fn rows(server: &Server) -> Vec<Vec<Value>> {
    server.query(
        "SELECT status, error_code, total_tokens, search_reason FROM usage ORDER BY request_id",
    )
}

fn abandoned() -> Vec<Value> {
    vec![
        Value::Null,
        Value::Text("abandoned".into()),
        Value::Null,
        Value::Null,
    ]
}

fn send(server: &Server, key: &str) -> Client {
    let mut client = server.connect();
    client.send(request(key, &chat("x")));
    client
}

#[test]
fn a_waiting_request_is_dropped() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime))
        .set("ADRIATICUM_WORKERS", 2)
        .start();
    let limited = server
        .stdout_of(&["keys", "create", "limited", "--concurrent", "1"])
        .trim()
        .to_owned();
    let (key, watcher) = (server.key(), metrics_key(&server));
    let gate = Arc::new(AtomicBool::new(false));
    (0..2).for_each(|_| runtime.next(Script::Held(Arc::clone(&gate), completion("held"))));
    let mut first = send(&server, &limited);
    until("it runs", || runtime.count() == 1);
    // One waits for its key's limit, one for a worker.
    let waiting = send(&server, &limited);
    until("it waits", || {
        value(&server, &watcher, "adriaticum_queue_length") == 1.0
    });
    let mut second = send(&server, &key);
    until("it runs", || runtime.count() == 2);
    let other = send(&server, &key);
    until("both wait", || {
        value(&server, &watcher, "adriaticum_queue_length") == 2.0
    });
    drop(waiting);
    until("it is dropped", || {
        value(&server, &watcher, "adriaticum_queue_length") == 1.0
    });
    other
        .stream
        .shutdown(Shutdown::Write)
        .expect("one side can be shut");
    until("it is dropped", || value(&server, &watcher, WAITING) == 2.0);
    gate.store(true, Ordering::Release);
    first.reply().is_completion();
    second.reply().is_completion();
    let together = request(&key, &chat("x"));
    let mut at_once = server.connect();
    at_once.send(&together);
    at_once.reply().is_completion();
    assert_eq!(
        (rows(&server).len(), runtime.count()),
        (3, 3),
        "the others left no row"
    );
    assert_eq!(value(&server, &watcher, RUNNING), 0.0);
    assert!(
        server.log().contains("abandoned_waiting="),
        "{}",
        server.log()
    );
}

#[test]
fn a_running_request_is_cancelled() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime))
        .set("ADRIATICUM_WORKERS", 1)
        .start();
    let (key, watcher) = (server.key(), metrics_key(&server));
    type Leave = fn(Client);
    let ways: [(&str, Leave); 4] = [
        ("it closes", drop),
        ("it shuts its side", |mut client| {
            client
                .stream
                .shutdown(Shutdown::Write)
                .expect("one side can be shut");
            assert!(client.ends(), "nothing is sent");
        }),
        ("it resets", |client| {
            set_socket_linger(&client.stream, Some(Duration::ZERO))
                .expect("an option of the socket");
        }),
        ("it closes behind another request", |mut client| {
            client.send(request("adr_none", &chat("next")))
        }),
    ];
    for (number, (way, go)) in ways.into_iter().enumerate() {
        // A connection that was kept from before, and is then needed again.
        server.post(&key, &chat("before")).is_completion();
        runtime.next(Script::Silent);
        let calls = runtime.count();
        let client = send(&server, &key);
        until("it runs", || runtime.count() == calls + 1);
        let began = Instant::now();
        go(client);
        let ended = number as u64 + 1;
        until(way, || runtime.ended.load(Ordering::Acquire) == ended);
        assert!(began.elapsed() < SOON, "{way}: {:?}", began.elapsed());
        server.post(&key, &chat("after")).is_completion();
        assert!(began.elapsed() < SOON, "{way}: the worker was not free");
        assert_eq!(value(&server, &watcher, RUNNING), ended as f64, "{way}");
        let rows = rows(&server);
        assert_eq!(
            rows.iter().filter(|row| **row == abandoned()).count(),
            number + 1,
            "{way}: {rows:?}"
        );
    }
    assert_eq!(value(&server, &watcher, WAITING), 0.0);
    assert_eq!(
        value(
            &server,
            &watcher,
            "adriaticum_requests_total{status=\"502\",code=\"inference_error\"}"
        ),
        0.0
    );
    // They count as requests and as errors.
    assert!(
        server
            .stdout_of(&["usage"])
            .contains("\n12 requests, 4 errors"),
        "{}",
        server.stdout_of(&["usage"])
    );
    assert!(
        server
            .stdout_of(&["usage", "--by", "status"])
            .contains("abandoned")
    );
    server.stdout_of(&["usage", "verify"]);
    assert!(
        server.log().contains("status=- error=abandoned"),
        "{}",
        server.log()
    );
    assert!(
        !server.log().contains("WARN] chatcmpl"),
        "a cancelled call is no fault: {}",
        server.log()
    );
}

#[test]
fn a_cancelled_call_is_not_tried_elsewhere_and_blames_no_runtime() {
    let (first, second) = (Runtime::start(), Runtime::start());
    let server = Server::new(None)
        .set(
            "ADRIATICUM_RUNTIME_URL",
            format!("{},{}", first.url(), second.url()),
        )
        .start();
    let key = server.key();
    first.next(Script::Silent);
    let client = send(&server, &key);
    until("it runs", || first.count() == 1);
    drop(client);
    until("it is cancelled", || {
        rows(&server).first() == Some(&abandoned())
    });
    server.post(&key, &chat("x")).is_completion();
    assert_eq!((first.count(), second.count()), (2, 0));
}

#[test]
fn a_search_is_cancelled() {
    let (runtime, search) = (Runtime::start(), Runtime::start());
    let server = Server::new(Some(&runtime))
        .set(
            "ADRIATICUM_SEARCH_URL",
            search.url().trim_end_matches("/v1"),
        )
        .set("ADRIATICUM_SEARCH_GROUNDING", "always")
        .set("ADRIATICUM_SEARCH_TIMEOUT", 100)
        .start();
    let (key, watcher) = (server.key(), metrics_key(&server));
    search.next(Script::Silent);
    let client = send(&server, &key);
    until("Search is asked", || search.count() == 1);
    let began = Instant::now();
    drop(client);
    until("the call is ended", || {
        search.ended.load(Ordering::Acquire) == 1
    });
    until("the row is written", || rows(&server) == [abandoned()]);
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    assert_eq!(runtime.count(), 0, "no inference is spent");
    let unavailable = "adriaticum_searches_total{reason=\"always\",outcome=\"unavailable\"}";
    assert_eq!(
        value(&server, &watcher, unavailable),
        0.0,
        "Search is not to blame"
    );
}

#[test]
fn an_outcome_that_is_recorded_stays() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let key = server.key();
    // The client closes its connection before it has read any of a large answer.
    runtime.next(Script::Answer(200, completion(&"é".repeat(500_000))));
    let client = send(&server, &key);
    let status = || rows(&server).first().map(|row| row[0].clone());
    until("there is an outcome", || {
        status() == Some(Value::Integer(200))
    });
    drop(client);
    assert_eq!(status(), Some(Value::Integer(200)));
    assert!(
        server
            .stdout_of(&["usage"])
            .contains("\n1 request, 0 errors"),
        "{}",
        server.stdout_of(&["usage"])
    );
}
