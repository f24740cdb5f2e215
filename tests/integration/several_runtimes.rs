//! Several runtimes: which one is called, when the next is tried, and how a failed one comes back.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rusqlite::types::Value::Integer;
use serde_json::json;

use crate::console::{Browser, PASSWORD, has_verdict, set_password};
use crate::metrics::{metrics_key, value};
use crate::support::{ClosedPort, Runtime, Script, Server, chat, completion, request, until};

/// A server with these runtimes, in this order.
fn server(urls: &[String]) -> Server {
    Server::new(None).set("ADRIATICUM_RUNTIME_URL", urls.join(","))
}

fn series(name: &str, url: &str) -> String {
    format!("adriaticum_runtime_{name}{{runtime=\"{url}\"}}")
}

#[test]
fn the_least_busy_runtime_is_asked() {
    let runtimes = [Runtime::start(), Runtime::start()];
    let urls = format!("{},{}", runtimes[0].url(), runtimes[1].url());
    let server = Server::new(None)
        .set("ADRIATICUM_RUNTIME_URL", urls)
        .start();
    let key = server.key();
    let gate = Arc::new(AtomicBool::new(false));
    let mut held = Vec::new();
    for busy in 1..=4 {
        for runtime in &runtimes {
            runtime.next(Script::Held(Arc::clone(&gate), completion("held")));
        }
        let mut client = server.connect();
        client.send(request(&key, &chat("x")));
        held.push(client);
        until("the call is under way", || {
            runtimes[0].count() + runtimes[1].count() == busy
        });
    }
    assert_eq!((runtimes[0].count(), runtimes[1].count()), (2, 2));
    gate.store(true, Ordering::Release);
    for mut client in held {
        assert_eq!(client.reply().is_completion(), "held");
    }
}

/// A runtime that refuses at once is always the least busy: it got 54 of 67 requests, and each of them failed.
#[test]
fn no_request_fails_because_another_runtime_refuses() {
    for status in [503, 429] {
        let (refusing, good) = (Runtime::start(), Runtime::start());
        // Its probes succeed, so it is called again from time to time.
        refusing.is_ready();
        (0..60).for_each(|_| {
            refusing.next(Script::Answer(status, json!({"error": {"message": "x"}})))
        });
        let server = server(&[refusing.url(), good.url()]).start();
        let key = server.key();
        for _ in 0..60 {
            server.post(&key, &chat("x")).is_completion();
        }
        assert_eq!(good.count(), 60, "{status}");
        assert!(
            (1..5).contains(&refusing.count()),
            "{status}: it got {} calls",
            refusing.count()
        );
        // A refusal costs nothing, so the figures are those of the completion.
        let sums = server.query("SELECT count(*), sum(total_tokens) FROM usage WHERE status = 200");
        assert_eq!(sums, [[60, 60 * 14].map(Integer)]);
    }
}

#[test]
fn no_request_fails_because_another_runtime_cannot_be_reached() {
    let good = Runtime::start();
    let closed = ClosedPort::new();
    let server = server(&[format!("http://{}/v1", closed.address), good.url()]).start();
    let key = server.key();
    for _ in 0..60 {
        server.post(&key, &chat("x")).is_completion();
    }
    assert_eq!(good.count(), 60);
}

#[test]
fn a_call_that_may_have_been_run_is_not_repeated_and_the_next_request_goes_elsewhere() {
    for (script, no_retry) in [
        (Script::Silent, Some("false")),
        (Script::Text(500, "x".into()), None),
        (Script::Text(502, "x".into()), None),
        (Script::Text(200, "x".into()), None),
    ] {
        let (failing, good) = (Runtime::start(), Runtime::start());
        failing.next(script);
        let server = server(&[failing.url(), good.url()])
            .set("ADRIATICUM_RUNTIME_TIMEOUT", 1)
            .start();
        let key = server.key();
        let reply = server.post(&key, &chat("x"));
        reply.is_error(502, "inference_error");
        assert_eq!(reply.header("x-should-retry"), no_retry);
        assert_eq!((failing.count(), good.count()), (1, 0));
        for _ in 0..5 {
            server.post(&key, &chat("x")).is_completion();
        }
        assert_eq!((failing.count(), good.count()), (1, 5));
    }
}

#[test]
fn each_runtime_is_tried_once_and_the_first_refusal_is_reported() {
    let runtimes = [Runtime::start(), Runtime::start(), Runtime::start()];
    for (runtime, status) in runtimes.iter().zip([429, 503, 503]) {
        runtime.next(Script::Answer(status, json!({})));
    }
    let server = server(&runtimes.each_ref().map(Runtime::url)).start();
    let reply = server.post(&server.key(), &chat("x"));
    reply.is_error(502, "inference_error");
    assert_eq!(reply.header("x-should-retry"), None, "nothing was run");
    assert_eq!(runtimes.each_ref().map(Runtime::count), [1, 1, 1]);
    let log = server.log();
    let details = format!(
        "details=\"runtime {}: it answered with HTTP status 429\"",
        runtimes[0].url()
    );
    assert!(
        log.contains("cause=status_429") && log.contains(&details),
        "{log}"
    );
}

/// The connection took all of the request's time, so the good runtime got none and timed out at once.
#[test]
fn a_runtime_that_gets_no_time_has_not_failed() {
    let good = Runtime::start();
    let full = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
    let address: SocketAddr = full.local_addr().expect("it has an address");
    rustix::net::listen(&full, 0).expect("a shorter backlog");
    let _waiting = TcpStream::connect(address).expect("one fits");
    let server = server(&[format!("http://{address}/v1"), good.url()])
        .set("ADRIATICUM_RUNTIME_TIMEOUT", 1)
        .start();
    let (key, watcher) = (server.key(), metrics_key(&server));
    server
        .post(&key, &chat("x"))
        .is_error(502, "inference_error");
    assert_eq!(value(&server, &watcher, &series("up", &good.url())), 1.0);
    server.post(&key, &chat("x")).is_completion();
}

#[test]
fn a_failed_runtime_is_back_when_it_answers_a_probe() {
    let (loading, good) = (Runtime::start(), Runtime::start());
    loading.next(Script::Answer(
        503,
        json!({"error": {"message": "Loading model"}}),
    ));
    let server = server(&[loading.url(), good.url()]).start();
    let (key, watcher) = (server.key(), metrics_key(&server));
    let figure = |name: &str| value(&server, &watcher, &series(name, &loading.url()));
    server.post(&key, &chat("x")).is_completion();
    assert_eq!(
        (figure("up"), figure("failures_total"), figure("running")),
        (1.0, 1.0, 0.0),
        "one failure is no verdict"
    );
    until("a probe has failed, too", || {
        figure("failures_total") == 2.0
    });
    server.post(&key, &chat("x")).is_completion();
    assert_eq!(
        (loading.count(), good.count()),
        (1, 2),
        "requests go to the other"
    );
    loading.is_ready();
    let count = |runtime: &Runtime| runtime.probes.count.load(Ordering::Acquire);
    until("it is probed again", || count(&loading) == 2);
    until("the probe finds it well", || {
        server.post(&key, &chat("x")).is_completion();
        loading.count() == 2
    });
    assert_eq!(count(&good), 0, "only what has failed is probed");
    let completions = loading.count() + good.count() - 1;
    let rows = server.query("SELECT count(*) FROM usage");
    assert_eq!(rows, [[Integer(completions as i64)]], "a probe has no row");
}

/// With clients that give up before `runtime.timeout`, a runtime that hangs counted as well: idle and first in the list, it took
/// every request.
#[test]
fn a_runtime_that_hangs_behind_clients_that_give_up_is_avoided() {
    let (hanging, good) = (Runtime::start(), Runtime::start());
    let server = server(&[hanging.url(), good.url()]).start();
    let (key, watcher) = (server.key(), metrics_key(&server));
    let gate = Arc::new(AtomicBool::new(false));
    let (mut lost, mut held) = (Vec::new(), Vec::new());
    for number in 1..=3 {
        hanging.next(Script::Silent);
        good.next(Script::Held(Arc::clone(&gate), completion("held")));
        for (clients, runtime) in [(&mut lost, &hanging), (&mut held, &good)] {
            let mut client = server.connect();
            client.send(request(&key, &chat("x")));
            clients.push(client);
            until("the least busy one is asked", || runtime.count() == number);
        }
    }
    let began = Instant::now();
    until("the clients lose their patience", || {
        began.elapsed() > Duration::from_millis(5_100)
    });
    drop(lost);
    let failures = || value(&server, &watcher, &series("failures_total", &hanging.url()));
    until("each of them counts", || failures() == 3.0);
    gate.store(true, Ordering::Release);
    for mut client in held {
        assert_eq!(client.reply().is_completion(), "held");
    }
    for _ in 0..5 {
        hanging.next(Script::Silent);
        server.post(&key, &chat("x")).is_completion();
    }
    assert_eq!((hanging.count(), good.count()), (3, 8));
}

#[test]
fn the_only_runtime_is_called_although_it_has_failed() {
    let runtime = Runtime::start();
    let server = server(&[runtime.url()]).start();
    let (key, watcher) = (server.key(), metrics_key(&server));
    let up = || value(&server, &watcher, &series("up", &runtime.url()));
    for expected in [1.0, 1.0, 0.0] {
        runtime.next(Script::Answer(500, json!({})));
        server
            .post(&key, &chat("x"))
            .is_error(502, "inference_error");
        assert_eq!(up(), expected);
    }
    until("the log says so", || {
        server.log().contains("[ERROR] runtime: http://")
    });
    server.post(&key, &chat("x")).is_completion();
    assert_eq!(up(), 1.0);
    runtime.next(Script::Answer(500, json!({})));
    server
        .post(&key, &chat("x"))
        .is_error(502, "inference_error");
    server.post(&key, &chat("x")).is_completion();
    let back = || server.log().matches("/v1 works again").count();
    until("the log says that, too", || back() == 1);
    assert_eq!(
        value(&server, &watcher, &series("failures_total", &runtime.url())),
        4.0
    );
}

#[test]
fn a_client_that_goes_or_sends_too_much_says_nothing_about_the_runtime() {
    let runtime = Runtime::start();
    let server = server(&[runtime.url()]).start();
    let (key, watcher) = (server.key(), metrics_key(&server));
    let figure = |name: &str| value(&server, &watcher, &series(name, &runtime.url()));
    runtime.next(Script::Answer(
        400,
        json!({"error": {"type": "exceed_context_size_error"}}),
    ));
    server
        .post(&key, &chat("x"))
        .is_error(400, "invalid_request");
    runtime.next(Script::Silent);
    let mut client = server.connect();
    client.send(request(&key, &chat("x")));
    until("it runs", || figure("running") == 1.0);
    drop(client);
    until("it does not run", || figure("running") == 0.0);
    assert_eq!((figure("up"), figure("failures_total")), (1.0, 0.0));
}

#[test]
fn the_status_page_shows_a_failed_runtime() {
    let (failing, good) = (Runtime::start(), Runtime::start());
    let server = server(&[failing.url(), good.url()]).start();
    assert!(set_password(&server, PASSWORD).status.success());
    let mut browser = Browser::signed_in(&server);
    has_verdict(&mut browser, "works");
    // The other one is asked first after the first failure, unless it fails, too.
    (0..3).for_each(|_| failing.next(Script::Answer(503, json!({}))));
    let key = server.key();
    server.post(&key, &chat("x")).is_completion();
    good.next(Script::Answer(503, json!({})));
    server
        .post(&key, &chat("x"))
        .is_error(502, "inference_error");
    server.post(&key, &chat("x")).is_completion();
    has_verdict(&mut browser, "degraded");
    let text = browser.get("/status").text();
    assert!(
        text.contains(">failing</span> since ") && text.contains("HTTP status 503. It is loading"),
        "{text}"
    );
    let line = |start: &str| {
        server
            .log()
            .matches(&format!("{start}{}", failing.url()))
            .count()
    };
    until("the log says so", || line("[ERROR] runtime: ") == 1);
    failing.is_ready();
    until("a probe finds it well", || {
        !browser.get("/keys").text().contains("class=\"dot")
    });
    has_verdict(&mut browser, "works");
    let text = browser.get("/status").text();
    assert!(
        text.contains("HTTP status 503"),
        "the last error stays: {text}"
    );
    until("the log says that it is back", || {
        line("[INFO] runtime ") == 1
    });
    let other = format!("runtime: {}", good.url());
    assert!(!server.log().contains(&other), "{}", server.log());
}
