//! HTTP as a client sees it, beyond what the conformance run looks at.

use crate::support::{Runtime, Script, Server, chat, completion, raw_request, request, until};

#[test]
fn pipelined_requests_are_answered_in_order() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let key = server.key();
    for number in 0..50 {
        runtime.next(Script::Answer(200, completion(&number.to_string())));
    }
    let mut client = server.connect();
    client.send(request(&key, &chat("x")).repeat(50));
    for number in 0..50 {
        assert_eq!(client.reply().is_completion(), number.to_string());
    }
}

#[test]
fn every_response_has_its_date() {
    let server = Server::new(None).start();
    let reply = server.connect_and_send("GET / HTTP/1.1\r\nHost: api.test\r\n\r\n");
    let date = reply.header("date").expect("a date");
    assert!(date.ends_with(" GMT") && date.len() == 29, "{date}");
}

#[test]
fn http_1_0_is_answered_and_closed_unless_it_asks() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let key = server.key();
    let old = |headers: &str| {
        raw_request(&key, headers, &chat("x").to_string()).replace("HTTP/1.1", "HTTP/1.0")
    };
    let mut client = server.connect();
    client.send(old(""));
    let reply = client.reply();
    reply.is_completion();
    assert_eq!(reply.header("connection"), Some("close"));
    assert!(client.ends());
    let mut client = server.connect();
    for _ in 0..2 {
        client.send(old("Connection: keep-alive\r\n"));
        let reply = client.reply();
        reply.is_completion();
        assert_eq!(reply.header("connection"), Some("keep-alive"));
    }
}

#[test]
fn an_early_answer_reaches_a_client_that_is_still_sending() {
    let server = Server::new(None).start();
    let key = server.key();
    for (start, status, code) in [
        (
            raw_request(&key, "", "").replace("Content-Length: 0", "Content-Length: 6000000"),
            413,
            "payload_too_large",
        ),
        ("NONSENSE\r\n\r\n".into(), 400, "invalid_request"),
    ] {
        let mut client = server.connect();
        client.send(&start);
        // By now it may have answered and shut down its side; it still accepts what the client sends.
        client.send(vec![b'x'; 6_000_000]);
        client.reply().is_error(status, code);
        assert!(client.ends());
    }
}

/// At once: the test would end before the 20 s that half a request has.
#[test]
fn what_cannot_begin_a_request_is_refused_at_once() {
    let server = Server::new(None).start();
    let began = std::time::Instant::now();
    for bytes in [
        &b"\x16\x03\x01\x00\xf8\x01"[..],
        b"\0",
        b"SSH-2.0-x\r\n",
        b"GET /\r\n",
        b"\n",
        b"\r\n\r\n\r\n",
        b"GET /\xc3\xa9 HTTP/1.1\r\n",
        b"GET /# HTTP/1.1\r\n",
    ] {
        let mut client = server.connect();
        client.send(bytes);
        client.reply().is_error(400, "invalid_request");
        assert!(client.ends());
    }
    assert!(
        began.elapsed() < std::time::Duration::from_secs(15),
        "{:?}",
        began.elapsed()
    );
}

/// Contract 1: the head decides, in the order of precedence, and no client is asked for a body that is not read.
#[test]
fn a_request_is_refused_from_its_head() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let key = server.key();
    let good = raw_request(&key, "Expect: 100-continue\r\n", "")
        .replace("Content-Length: 0", "Content-Length: 10");
    let chunked = good.replace("Content-Length: 10", "Transfer-Encoding: chunked");
    let unkeyed = |head: &str| head.replace(&format!("Authorization: Bearer {key}\r\n"), "");
    for (head, status, code) in [
        (unkeyed(&good), 401, "invalid_api_key"),
        (unkeyed(&chunked), 401, "invalid_api_key"),
        (
            good.replace("Expect", "Authorization: Bearer x\r\nExpect"),
            401,
            "invalid_api_key",
        ),
        (
            unkeyed(&good).replace("Length: 10", "Length: 262145"),
            413,
            "payload_too_large",
        ),
        (
            unkeyed(&good)
                .replace("POST", "PUT")
                .replace("Length: 10", "Length: 262145"),
            404,
            "not_found",
        ),
        (
            unkeyed(&chunked).replace("api.test", "other.test"),
            404,
            "not_found",
        ),
    ] {
        let mut client = server.connect();
        client.send(&head);
        let reply = client.reply();
        reply.is_error(status, code);
        assert_eq!(reply.header("connection"), Some("close"), "{head}");
        assert_eq!(
            reply.header("x-request-id"),
            reply.json()["error"]["request_id"].as_str()
        );
        assert!(
            server
                .log()
                .contains(reply.header("x-request-id").expect("an id"))
        );
        assert!(client.ends());
    }
    // With its body, or without one, the connection stays.
    let mut client = server.connect();
    client.send("GET / HTTP/1.1\r\nHost: api.test\r\n\r\n".repeat(3));
    client.send(unkeyed(&request(&key, &chat("x"))) + &request(&key, &chat("x")));
    for _ in 0..3 {
        client.reply().is_error(404, "not_found");
    }
    client.reply().is_error(401, "invalid_api_key");
    client.reply().is_completion();
    assert_eq!(runtime.count(), 1);
}

#[test]
fn a_client_that_has_shut_its_side_has_gone() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let key = server.key();
    runtime.next(Script::Silent);
    let mut client = server.connect();
    client.send(request(&key, &chat("x")));
    until("it runs", || runtime.count() == 1);
    client
        .stream
        .shutdown(std::net::Shutdown::Write)
        .expect("one side can be shut");
    assert!(client.ends());
}

#[test]
fn answers_larger_than_the_sockets_buffers_come_whole() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime))
        .set("ADRIATICUM_WORKERS", 1)
        .start();
    let key = server.key();
    // The buffers of a connection on one host hold some 4 MB.
    let long = "é".repeat(500_000);
    (0..7).for_each(|_| runtime.next(Script::Answer(200, completion(&long))));
    let mut slow = server.connect();
    slow.send(request(&key, &chat("x")).repeat(6));
    // The one worker is free again although its answers are not read.
    assert_eq!(server.post(&key, &chat("y")).is_completion(), long);
    for _ in 0..6 {
        assert_eq!(slow.reply().is_completion(), long);
    }
    slow.send(request(&key, &chat("z")));
    assert_eq!(slow.reply().is_completion(), "Zagreb.");
}

#[test]
fn a_chunked_body_is_the_same_body() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let key = server.key();
    let body = chat("in pieces").to_string();
    let (first, second) = body.split_at(9);
    let head = raw_request(&key, "", "").replace("Content-Length: 0", "Transfer-Encoding: chunked");
    let mut client = server.connect();
    client.send(format!(
        "{head}{:X};ext=\"a\"\r\n{first}\r\n{:x}\r\n{second}\r\n0\r\nX-Trailer: ignored\r\n\r\n{}",
        first.len(),
        second.len(),
        request(&key, &chat("next")),
    ));
    client.reply().is_completion();
    client.reply().is_completion();
    let calls = runtime.calls.lock().expect("the calls");
    let contents: Vec<_> = calls
        .iter()
        .map(|call| call.body["messages"][0]["content"].clone())
        .collect();
    assert_eq!(contents, ["in pieces", "next"]);
}

impl Server {
    #[track_caller]
    fn connect_and_send(&self, bytes: &str) -> crate::support::Reply {
        let mut client = self.connect();
        client.send(bytes);
        client.reply()
    }
}
