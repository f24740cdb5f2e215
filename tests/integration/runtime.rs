//! Calls to the runtimes: how their answers are read, which runtime is called, and how a failed one comes back.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::types::Value::Integer;
use serde_json::json;

use crate::metrics::{metrics_key, value};
use crate::support::{Runtime, Script, Server, chat, completion, request, until};

/// A server with these runtimes, in this order.
fn server(urls: &[String]) -> Server {
    Server::new(None).set("ADRIATICUM_RUNTIME_URL", urls.join(","))
}

fn series(name: &str, url: &str) -> String {
    format!("adriaticum_runtime_{name}{{runtime=\"{url}\"}}")
}

#[test]
fn an_answer_has_a_largest_size() {
    let runtime = Runtime::start();
    // A worker's share is 128 KiB. Three times what the request has is added to it.
    let server = Server::new(Some(&runtime))
        .set("ADRIATICUM_BUFFER_LIMIT", 4 * 1024 * 1024)
        .set("ADRIATICUM_WORKERS", 32)
        .start();
    let key = server.key();
    for (prompt, answer_kib, fits) in [
        (1, 127, true),
        (1, 130, false),
        (10_000, 156, true),
        (10_000, 159, false),
    ] {
        runtime.next(Script::Answer(
            200,
            completion(&"x".repeat(answer_kib * 1024)),
        ));
        let reply = server.post(&key, &chat(&"x".repeat(prompt)));
        if fits {
            reply.is_completion();
        } else {
            reply.is_error(502, "inference_error");
        }
    }
    server.has_logged("too large for a worker's share");
}

/// `tests/integration/client.rs` has other answers without an end.
#[test]
fn trailers_without_an_end_take_no_memory() {
    let content = completion("x").to_string();
    let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    let answer = format!(
        "{head}{:x}\r\n{content}\r\n0\r\n{}",
        content.len(),
        "x: y\r\n".repeat(3_000_000)
    );
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
    let address = listener.local_addr().expect("it has an address");
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            let _ = stream.read(&mut [0; 65536]);
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    let server = server(&[format!("http://{address}/v1")]).start();
    let key = server.key();
    let before = server.status("VmHWM");
    server.complete(&key);
    let grown = server.status("VmHWM") - before;
    assert!(grown < 8 * 1024, "{grown} KiB more for 18 MB of trailers");
}

/// Another service as the runtime, because it speaks HTTPS.
#[test]
fn a_runtime_behind_https() {
    let runtime = Runtime::start();
    let behind = Server::new(Some(&runtime))
        .set("ADRIATICUM_API_HOSTS", "127.0.0.1")
        .set("ADRIATICUM_COMPATIBILITY", "openai");
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).expect("a certificate");
    let (cert, key) = (
        behind.folder.path("cert.pem"),
        behind.folder.path("key.pem"),
    );
    fs::write(&cert, made.cert.pem()).expect("a file");
    fs::write(&key, made.signing_key.serialize_pem()).expect("a file");
    let behind = behind
        .set("ADRIATICUM_TLS_CERT", cert.display())
        .set("ADRIATICUM_TLS_KEY", key.display())
        .start();
    let server = |ca: Option<&Path>| {
        let server = Server::new(None)
            .set(
                "ADRIATICUM_RUNTIME_URL",
                format!("https://{}/v1", behind.address),
            )
            .set("ADRIATICUM_RUNTIME_API_KEY", behind.key());
        match ca {
            Some(ca) => server.set("ADRIATICUM_RUNTIME_CA", ca.display()),
            None => server,
        }
    };
    let trusting = server(Some(&cert)).start();
    let key = trusting.key();
    for _ in 0..3 {
        assert_eq!(trusting.complete(&key).is_completion(), "Zagreb.");
    }
    assert!(trusting.stdout_of(&["check"]).contains("answers in"));
    // Without the setting, the system's CAs are asked, which do not know this one.
    let doubting = server(None).start();
    doubting
        .complete(&doubting.key())
        .is_error(502, "inference_error");
    assert!(
        doubting.log().contains("not signed by a trusted CA"),
        "{}",
        doubting.log()
    );
    let printed = doubting.run(&["check"]);
    let printed = String::from_utf8_lossy(&printed.stdout);
    assert!(
        printed.contains("FAIL  runtime") && printed.contains("runtime.ca"),
        "{printed}"
    );
    // The wrong file stops the program, which names the setting.
    let output = server(Some(&behind.folder.path("key.pem"))).run(&["serve"]);
    let printed = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{printed}");
    assert!(
        printed.contains("ADRIATICUM_RUNTIME_CA") && printed.contains("no certificate in it"),
        "{printed}"
    );
}

#[test]
fn a_name_is_looked_up_without_another_thread() {
    let runtime = Runtime::start();
    // The system's resolver knows this name even where /etc/hosts is missing.
    let url = runtime.url().replace("127.0.0.1", "127.1");
    let server = Server::new(None).set("ADRIATICUM_RUNTIME_URL", url).start();
    let key = server.key();
    let before = server.threads();
    let gate = runtime.hold("x");
    let mut client = server.connect();
    client.send(request(&key, &chat("x")));
    until("the call is under way", || runtime.count() == 1);
    assert_eq!(server.threads(), before);
    gate.store(true, Ordering::Release);
    client.reply().is_completion();
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
            server.complete(&key).is_completion();
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
    server.complete(&key).is_error(502, "inference_error");
    assert_eq!(value(&server, &watcher, &series("up", &good.url())), 1.0);
    server.complete(&key).is_completion();
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
    server.complete(&key).is_completion();
    assert_eq!(
        (figure("up"), figure("failures_total"), figure("running")),
        (1.0, 1.0, 0.0),
        "one failure is no verdict"
    );
    until("a probe has failed, too", || {
        figure("failures_total") == 2.0
    });
    server.complete(&key).is_completion();
    assert_eq!(
        (loading.count(), good.count()),
        (1, 2),
        "requests go to the other"
    );
    loading.is_ready();
    let count = |runtime: &Runtime| runtime.probes.count.load(Ordering::Acquire);
    until("it is probed again", || count(&loading) == 2);
    until("the probe finds it well", || {
        server.complete(&key).is_completion();
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
        server.complete(&key).is_completion();
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
        server.complete(&key).is_error(502, "inference_error");
        assert_eq!(up(), expected);
    }
    until("the log says so", || {
        server.log().contains("[ERROR] runtime: http://")
    });
    server.complete(&key).is_completion();
    assert_eq!(up(), 1.0);
    runtime.next(Script::Answer(500, json!({})));
    server.complete(&key).is_error(502, "inference_error");
    server.complete(&key).is_completion();
    let back = || server.log().matches("/v1 works again").count();
    until("the log says that, too", || back() == 1);
    assert_eq!(
        value(&server, &watcher, &series("failures_total", &runtime.url())),
        4.0
    );
}

// Answers of a runtime or of Search that are as large as the service reads them, wide, deep and long: as many at once as there
// are workers stay far below the `MemoryMax` of the service's unit, which is 512 MiB.

/// The most memory that the service may use at its peak, in KiB. It uses 50 to 75 MiB. As values in memory, answers of this
/// size took 200 to 400 MiB.
const MOST: u64 = 128 * 1024;

const WORKERS: usize = 16;
const MIB: usize = 1024 * 1024;

/// Fills a text up to a size: `begin`, then `unit` again and again, then `end`.
fn filled(size: usize, begin: &str, unit: &str, end: &str) -> String {
    let units = (size - begin.len() - end.len()) / unit.len();
    format!("{begin}{}{end}", unit.repeat(units))
}

/// A service with as many workers and as much memory for buffers as a large host has.
fn large(server: Server) -> Server {
    server
        .set("ADRIATICUM_WORKERS", WORKERS)
        .set("ADRIATICUM_BUFFER_LIMIT", 64 * MIB)
        .start()
}

/// Has each worker run a request at once, each of which gets this answer, and checks the peak of the service's memory.
#[track_caller]
fn stays_small(server: &Server, key: &str, hostile: &Runtime, status: u16, answer: &str) {
    (0..WORKERS).for_each(|_| hostile.next(Script::Text(status, answer.into())));
    let mut clients: Vec<_> = (0..WORKERS).map(|_| server.connect()).collect();
    clients
        .iter_mut()
        .for_each(|client| client.send(request(key, &chat("x"))));
    for client in &mut clients {
        assert_ne!(client.reply().status, 0, "{}", server.log());
    }
    assert!(
        !server.log().contains("answer_too_large"),
        "the answers are to be read: {}",
        server.log()
    );
    let peak = server.status("VmHWM");
    let begin = &answer[..answer.len().min(60)];
    assert!(
        peak < MOST,
        "{peak} KiB after {WORKERS} answers of {} bytes: {begin}",
        answer.len()
    );
}

#[test]
fn hostile_answers_of_a_runtime_take_little_memory() {
    let runtime = Runtime::start();
    let server = large(Server::new(Some(&runtime)));
    let key = server.key();
    let filled = |begin: &str, unit: &str, end: &str| filled(MIB, begin, unit, end);
    let text = |unit: &str| filled(r#"{"choices":[{"message":{"content":""#, unit, r#""}}]}"#);
    for (status, answer) in [
        (200, filled(r#"{"choices":[[]"#, ",[]", "]}")),
        (
            200,
            filled(
                r#"{"choices":[{"message":{"content":"x"}}],"usage":"#,
                "[",
                "",
            ),
        ),
        (200, text(r"\u0000")),
        (200, text(r#"xxxxxxxx\""#)),
        (400, filled("[0", ",0", "]")),
        (400, filled(r#"{"error":[[]"#, ",[]", "]}")),
        (400, filled(r#"{"error":"#, "[", "")),
    ] {
        stays_small(&server, &key, &runtime, status, &answer);
    }
}

#[test]
fn hostile_answers_of_search_take_little_memory() {
    let (runtime, search) = (Runtime::start(), Runtime::start());
    let server = large(
        Server::new(Some(&runtime))
            .set("ADRIATICUM_SEARCH_URL", search.url())
            .set("ADRIATICUM_SEARCH_GROUNDING", "always"),
    );
    let key = server.key();
    let filled = |begin: &str, unit: &str, end: &str| filled(MIB, begin, unit, end);
    for answer in [
        filled(r#"{"results":[{}"#, ",{}", "]}"),
        filled(r#"{"results":[{"x":[0"#, ",0", r#"],"content":"x"}]}"#),
        filled(r#"{"results":"#, "[", ""),
        filled(r#"{"results":[{"content":""#, r"\n", r#""}]}"#),
        filled(
            r#"{"results":[],"unresponsive_engines":[["a","timeout"]"#,
            ",[[],[]]",
            "]}",
        ),
    ] {
        stays_small(&server, &key, &search, 200, &answer);
    }
}
