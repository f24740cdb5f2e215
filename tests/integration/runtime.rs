//! Calls to the runtime: what is sent, and how answers are read.

use std::collections::HashSet;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use serde_json::json;

use crate::metrics::{metrics_key, value};
use crate::support::{Runtime, Script, Server, chat, completion, request, until};

#[test]
fn only_what_the_service_knows_is_sent() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime))
        .set("ADRIATICUM_COMPATIBILITY", "openai")
        .start();
    let mut body = chat("x");
    body["stream"] = json!(false);
    body["user"] = json!(null);
    server.post(&server.key(), &body).is_completion();
    let calls = runtime.calls.lock().expect("the calls");
    assert_eq!(calls[0].url, "/v1/chat/completions");
    assert_eq!(
        calls[0].body,
        json!({"model": "adriaticum", "messages": body["messages"], "temperature": 0.7, "max_tokens": 248,
               "stream": false})
    );
    assert!(
        calls[0]
            .headers
            .iter()
            .all(|(name, _)| name != "authorization")
    );
}

#[test]
fn the_connection_is_kept() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let key = server.key();
    for _ in 0..10 {
        server.post(&key, &chat("x")).is_completion();
    }
    let calls = runtime.calls.lock().expect("the calls");
    let ports: HashSet<_> = calls
        .iter()
        .map(|call| call.from.map(|from| from.port()))
        .collect();
    assert_eq!(ports.len(), 1, "one after the other needs one connection");
}

#[test]
fn the_environments_proxy_is_not_asked() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime))
        .set("http_proxy", "http://127.0.0.1:1")
        .set("HTTP_PROXY", "http://127.0.0.1:1")
        .set("ALL_PROXY", "http://127.0.0.1:1")
        .start();
    server.post(&server.key(), &chat("x")).is_completion();
}

#[test]
fn a_redirect_is_not_followed() {
    let (runtime, other) = (Runtime::start(), Runtime::start());
    let server = Server::new(Some(&runtime)).start();
    runtime.next(Script::Redirect(format!(
        "{}/chat/completions",
        other.url()
    )));
    server
        .post(&server.key(), &chat("x"))
        .is_error(502, "inference_error");
    assert_eq!((runtime.count(), other.count()), (1, 0));
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
    assert!(
        server.log().contains("too large for a worker's share"),
        "{}",
        server.log()
    );
}

#[test]
fn a_prompt_too_long_is_the_clients_to_mend() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let error = json!({"type": "exceed_context_size_error", "n_prompt_tokens": 9000, "n_ctx": 4096, "message": "x"});
    runtime.next(Script::Answer(400, json!({"error": error})));
    let message = server
        .post(&server.key(), &chat("x"))
        .is_error(400, "invalid_request");
    assert!(
        message.contains("9000") && message.contains("4096"),
        "{message}"
    );
}

#[test]
fn what_the_runtime_writes_is_neither_sent_nor_logged() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime))
        .set("ADRIATICUM_LOG_LEVEL", "trace")
        .start();
    let key = server.key();
    for script in [
        Script::Text(500, "xyzzy".into()),
        Script::Text(200, "xyzzy".into()),
        Script::Answer(400, json!({"error": {"message": "xyzzy", "code": "xyzzy"}})),
        Script::Answer(
            200,
            json!({"choices": [{"message": {"content": ["xyzzy"]}}]}),
        ),
    ] {
        runtime.next(script);
        let message = server
            .post(&key, &chat("xyzzy"))
            .is_error(502, "inference_error");
        assert!(!message.contains("xyzzy"), "{message}");
    }
    assert!(!server.log().contains("xyzzy"), "{}", server.log());
}

/// A runtime that takes a call and breaks the connection off, in the head or in the body of its answer.
fn breaking(answer: &'static str) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
    let url = format!(
        "http://{}/v1",
        listener.local_addr().expect("it has an address")
    );
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            let mut head = [0; 65536];
            let _ = stream.read(&mut head);
            // Its end is no call.
            counted.fetch_add(head.starts_with(b"POST").into(), Ordering::AcqRel);
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    (url, calls)
}

#[test]
fn there_is_no_second_try_once_the_request_was_sent() {
    let good = Runtime::start();
    for answer in [
        "",
        "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{\"choices\":",
        "nonsense\r\n\r\n",
    ] {
        let (url, calls) = breaking(answer);
        let server = Server::new(None)
            .set("ADRIATICUM_RUNTIME_URL", format!("{url},{}", good.url()))
            .start();
        server
            .post(&server.key(), &chat("x"))
            .is_error(502, "inference_error");
        assert_eq!(calls.load(Ordering::Acquire), 1, "{answer:?}");
    }
    assert_eq!(good.count(), 0, "the other runtime was not to be asked");
}

#[test]
fn an_answer_that_is_only_the_beginning_of_one_is_502_at_once() {
    // The first stays open: to wait for more would be to wait for the timeout, which is longer than any test waits.
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
    let switching = format!(
        "http://{}/v1",
        listener.local_addr().expect("it has an address")
    );
    let (sender, open) = std::sync::mpsc::channel();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a connection");
        let _ = stream.read(&mut [0; 65536]);
        let _ = stream.write_all(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n");
        let _ = sender.send(stream);
    });
    let (breaking_off, _) = breaking("HTTP/1.1 102 Processing\r\n\r\n");
    for url in [switching, breaking_off] {
        let server = Server::new(None).set("ADRIATICUM_RUNTIME_URL", url).start();
        server
            .post(&server.key(), &chat("x"))
            .is_error(502, "inference_error");
    }
    drop(open);
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
    let (url, _) = breaking(answer.leak());
    let server = Server::new(None).set("ADRIATICUM_RUNTIME_URL", url).start();
    let key = server.key();
    let before = server.status("VmHWM");
    server.post(&key, &chat("x"));
    let grown = server.status("VmHWM") - before;
    assert!(grown < 8 * 1024, "{grown} KiB more for 18 MB of trailers");
}

#[test]
fn a_figure_that_is_not_plausible_is_null() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let key = server.key();
    for figure in [
        "9".repeat(400),
        "1000000001".into(),
        "-1".into(),
        "1.5".into(),
    ] {
        let answer = completion("x")
            .to_string()
            .replace("\"total_tokens\":14", &format!("\"total_tokens\":{figure}"));
        assert!(answer.contains(&figure), "{answer}");
        runtime.next(Script::Text(200, answer));
        let reply = server.post(&key, &chat("x"));
        assert_eq!(reply.is_completion(), "x", "{figure}");
        let usage = json!({"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": null});
        assert_eq!(reply.json()["usage"], usage, "{figure}");
    }
    let rows = server.query(
        "SELECT count(*) FROM usage WHERE status = 200 AND prompt_tokens = 11 AND total_tokens IS NULL",
    );
    assert_eq!(rows, [[rusqlite::types::Value::Integer(4)]]);
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
        assert_eq!(trusting.post(&key, &chat("x")).is_completion(), "Zagreb.");
    }
    assert!(trusting.stdout_of(&["check"]).contains("answers in"));
    // Without the setting, the system's CAs are asked, which do not know this one.
    let doubting = server(None).start();
    doubting
        .post(&doubting.key(), &chat("x"))
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
    let gate = Arc::new(AtomicBool::new(false));
    runtime.next(Script::Held(Arc::clone(&gate), completion("x")));
    let mut client = server.connect();
    client.send(request(&key, &chat("x")));
    until("the call is under way", || runtime.count() == 1);
    assert_eq!(server.threads(), before);
    gate.store(true, Ordering::Release);
    client.reply().is_completion();
}

fn figure(server: &Server, key: &str, name: &str, runtime: &Runtime) -> f64 {
    let name = format!("adriaticum_runtime_{name}{{runtime=\"{}\"}}", runtime.url());
    value(server, key, &name)
}

/// vLLM's answer was a 502 that clients repeated twice, and after three of them the runtime had failed.
#[test]
fn a_reasoning_model_that_has_used_up_its_tokens_has_answered_with_an_empty_text() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let (key, watcher) = (server.key(), metrics_key(&server));
    for _ in 0..3 {
        let mut answer = completion("");
        answer["choices"][0]["message"]["content"] = json!(null);
        answer["choices"][0]["finish_reason"] = json!("length");
        runtime.next(Script::Answer(200, answer));
        let reply = server.post(&key, &chat("x"));
        assert_eq!(reply.is_completion(), "");
        assert_eq!(reply.json()["choices"][0]["finish_reason"], "length");
        assert_eq!(reply.json()["usage"]["total_tokens"], 14);
    }
    assert_eq!(figure(&server, &watcher, "failures_total", &runtime), 0.0);
}

#[test]
fn an_answer_without_text_is_not_repeated_and_its_tokens_count() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let (key, watcher) = (server.key(), metrics_key(&server));
    for _ in 0..3 {
        let mut answer = completion("");
        answer["choices"][0]["message"]["content"] = json!(null);
        runtime.next(Script::Answer(200, answer));
        let reply = server.post(&key, &chat("x"));
        reply.is_error(502, "inference_error");
        assert_eq!(reply.header("x-should-retry"), Some("false"));
    }
    let rows = server.query("SELECT sum(total_tokens) FROM usage WHERE status = 502");
    assert_eq!(rows, [[rusqlite::types::Value::Integer(3 * 14)]]);
    let report = server.stdout_of(&["usage", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
    assert_eq!(report["total_tokens"], 3 * 14, "{report}");
    assert_eq!(figure(&server, &watcher, "failures_total", &runtime), 0.0);
}

/// One key with seven requests took three of four runtimes out.
#[test]
fn a_runtime_that_refuses_one_conversation_has_not_failed() {
    let (runtime, other) = (Runtime::start(), Runtime::start());
    let server = Server::new(None)
        .set(
            "ADRIATICUM_RUNTIME_URL",
            format!("{},{}", runtime.url(), other.url()),
        )
        .start();
    let (key, watcher) = (server.key(), metrics_key(&server));
    for status in [400, 413, 422, 400, 413, 422, 400] {
        runtime.next(Script::Answer(
            status,
            json!({"error": {"message": "bad template"}}),
        ));
        server
            .post(&key, &chat("x"))
            .is_error(502, "inference_error");
    }
    assert_eq!(figure(&server, &watcher, "up", &runtime), 1.0);
    assert_eq!((runtime.count(), other.count()), (7, 0));
    runtime.next(Script::Answer(
        400,
        json!({"error": {"message": "model not found"}}),
    ));
    server
        .post(&key, &chat("x"))
        .is_error(502, "inference_error");
    assert_eq!(
        figure(&server, &watcher, "failures_total", &runtime),
        1.0,
        "it can't run any other either"
    );
}

/// Each call took a worker, which waited for the next, until `runtime.timeout`.
#[test]
fn a_runtime_that_is_the_service_itself_is_refused() {
    let free = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
    let address = free.local_addr().expect("it listens");
    drop(free);
    let url = format!("http://localhost:{}/v1", address.port());
    let server = Server::new(None)
        .set("ADRIATICUM_LISTEN", address)
        .set("ADRIATICUM_RUNTIME_URL", &url);
    let mut server = server.spawn(&[]);
    let code = server.wait().code();
    let printed = server.log();
    assert_eq!(code, Some(1), "{printed}");
    let expected = format!("{url} leads to this service itself. Set runtime.url");
    assert!(printed.contains(&expected), "{printed}");
    let output = server.run(&["check"]);
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(
        printed.contains("FAIL  runtime") && printed.contains(&expected),
        "{printed}"
    );
}
