//! The HTTP client against scripted sockets.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use adriaticum::client::{Call, CallError, Cancellation, HttpClient};
use adriaticum::http::MAX_HEAD;
use ureq::http::Uri;

use crate::support::{ClosedPort, PATIENCE, until};

const LIMIT: u64 = 64;
const SHORT: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

/// A server that gives each connection's requests these answers, and then closes it.
struct Scripted {
    base: String,
    /// The requests, and `None` for a connection that was closed.
    heard: mpsc::Receiver<Option<String>>,
}

impl Scripted {
    fn new(connections: Vec<Vec<&'static str>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
        let port = listener.local_addr().expect("it listens").port();
        let (sender, heard) = mpsc::channel();
        thread::spawn(move || {
            for answers in connections {
                let mut stream = listener.accept().expect("a connection").0;
                for answer in answers {
                    let Some(request) = read_request(&mut stream) else {
                        break;
                    };
                    let _ = sender.send(Some(request));
                    let _ = stream.write_all(answer.as_bytes());
                }
                drop(stream);
                let _ = sender.send(None);
            }
        });
        Self {
            base: format!("http://127.0.0.1:{port}/v1"),
            heard,
        }
    }

    /// The next request; `None` at the end of a connection.
    #[track_caller]
    fn next(&self) -> Option<String> {
        let heard = self
            .heard
            .recv_timeout(PATIENCE)
            .expect("the server should go on");
        if heard.is_none() {
            // On a busy machine, the system delivers it some time after the server has closed its side.
            until("the end has reached the client", || !self.has_open_client());
        }
        heard
    }

    /// Whether the system takes a client's side of a connection for open, which is its state 01.
    fn has_open_client(&self) -> bool {
        let port = self
            .base
            .rsplit(':')
            .next()
            .and_then(|rest| rest.split('/').next())
            .expect("a port");
        let remote = format!(":{:04X} 01 ", port.parse::<u16>().expect("a number"));
        fs::read_to_string("/proc/net/tcp")
            .expect("the connections")
            .contains(&remote)
    }
}

/// Reads a request, which has no body or `{}`. Its head and body are two writes.
fn read_request(stream: &mut impl Read) -> Option<String> {
    let mut request = String::new();
    let mut bytes = [0; 64 * 1024];
    loop {
        let count = stream.read(&mut bytes).ok()?;
        request += &String::from_utf8_lossy(&bytes[..count]);
        let end = if request.starts_with("POST") {
            "\r\n\r\n{}"
        } else {
            "\r\n\r\n"
        };
        if request.ends_with(end) {
            return Some(request);
        }
        if count == 0 {
            return None;
        }
    }
}

fn call(
    client: &HttpClient,
    base: &str,
    body: Option<&[u8]>,
    time: Duration,
) -> Result<(u16, String), CallError> {
    let uri = format!("{base}/x").parse().expect("a good address");
    let answer = client.call(&Call {
        uri: &uri,
        authorization: Some("Bearer y"),
        body,
        deadline: Instant::now() + time,
        limit: LIMIT,
        cancellation: &Cancellation::default(),
    })?;
    Ok((
        answer.status().as_u16(),
        String::from_utf8_lossy(answer.body()).into_owned(),
    ))
}

fn get(client: &HttpClient, base: &str) -> Result<(u16, String), CallError> {
    call(client, base, None, Duration::from_secs(10))
}

fn client() -> HttpClient {
    HttpClient::new("http://", None)
}

#[test]
fn the_request() {
    let server = Scripted::new(vec![vec![SHORT, SHORT]]);
    let client = client();
    call(&client, &server.base, Some(b"{}"), Duration::from_secs(10)).expect("an answer");
    let heard = server.next().expect("a request");
    assert!(heard.starts_with("POST /v1/x HTTP/1.1\r\n"), "{heard}");
    let host = server
        .base
        .strip_prefix("http://")
        .and_then(|rest| rest.strip_suffix("/v1"))
        .expect("a host");
    for line in [
        &format!("host: {host}"),
        "authorization: Bearer y",
        "content-type: application/json",
        "content-length: 2",
        "accept: application/json",
        &format!("user-agent: adriaticum/{}", adriaticum::VERSION),
    ] {
        assert!(
            heard
                .to_lowercase()
                .contains(&format!("\r\n{}\r\n", line.to_lowercase())),
            "{line}: {heard}"
        );
    }
    assert!(!heard.contains("transfer-encoding"), "{heard}");
    get(&client, &server.base).expect("an answer");
    let heard = server.next().expect("a request on the same connection");
    assert!(
        heard.starts_with("GET /v1/x HTTP/1.1\r\n") && heard.ends_with("\r\n\r\n"),
        "{heard}"
    );
}

#[test]
fn a_connection_is_used_again_for_as_long_as_it_lasts() {
    let last = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok";
    let more = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok and more";
    let server = Scripted::new(vec![
        vec![SHORT, last],
        vec![more],
        vec![SHORT],
        vec![SHORT],
    ]);
    let client = client();
    for is_closed in [false, true, true, true, true] {
        assert_eq!(
            get(&client, &server.base).expect("an answer"),
            (200, "ok".into())
        );
        assert!(server.next().is_some());
        // A connection that was closed while it was kept is noticed before anything is sent.
        assert!(!is_closed || server.next().is_none());
    }
}

#[test]
fn answers() {
    for (wire, status, body) in [
        (
            "HTTP/1.1 200 OK\r\ncontent-length: 2\r\nContent-Length: 2\r\n\r\nok",
            200,
            "ok",
        ),
        ("HTTP/1.1 200 OK\r\n\r\nto the end", 200, "to the end"),
        (
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2;x=y\r\nok\r\n1\r\n!\r\n0\r\nx: y\r\n\r\n",
            200,
            "ok!",
        ),
        (
            "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nx: y\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
            200,
            "ok",
        ),
        // A redirect is not followed: the script has one connection.
        (
            "HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 2\r\n\r\nno",
            302,
            "no",
        ),
        (
            "HTTP/1.1 307 Found\r\nlocation: /y\r\ncontent-length: 0\r\n\r\n",
            307,
            "",
        ),
        // The largest that is read.
        (
            "HTTP/1.1 200 OK\r\ncontent-length: 64\r\n\r\n0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
            200,
            "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
        ),
    ] {
        let server = Scripted::new(vec![vec![wire]]);
        assert_eq!(
            get(&client(), &server.base).expect(wire),
            (status, body.into()),
            "{wire:?}"
        );
    }
}

#[test]
fn answers_that_are_broken() {
    for wire in [
        "",
        "HTTP/1.1 200 OK\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok",
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nok",
        "HTTP/1.1 200 OK\r\ncontent-length: -2\r\n\r\nok",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nx\r\n",
        "HTTP/2 200\r\n\r\n",
        "SSH-2.0-OpenSSH\r\n\r\n",
        // No final answer follows.
        "HTTP/1.1 100 Continue\r\n\r\n",
        "HTTP/1.1 103 Hints\r\nx: y\r\n\r\n",
    ] {
        let server = Scripted::new(vec![vec![wire]]);
        let error = get(&client(), &server.base).expect_err(wire);
        assert!(matches!(error, CallError::Broken(_)), "{wire:?}: {error:?}");
    }
    let long: &'static str =
        format!("HTTP/1.1 200 OK\r\nx: {}\r\n\r\n", "y".repeat(MAX_HEAD)).leak();
    let server = Scripted::new(vec![vec![long]]);
    assert!(matches!(
        get(&client(), &server.base),
        Err(CallError::Broken(_))
    ));
}

#[test]
fn an_answer_has_a_largest_size() {
    let rest = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef!";
    for wire in [
        // The length alone says it.
        "HTTP/1.1 200 OK\r\ncontent-length: 65\r\n\r\n".to_owned(),
        format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n41\r\n{rest}\r\n0\r\n\r\n"),
        format!("HTTP/1.1 200 OK\r\n\r\n{rest}"),
    ] {
        let server = Scripted::new(vec![vec![wire.leak()]]);
        assert!(matches!(
            get(&client(), &server.base),
            Err(CallError::TooLarge)
        ));
    }
}

/// The limit on the body covers neither trailers nor the heads before the final one. They are not
/// kept, and the deadline ends them.
#[test]
fn an_answer_that_never_ends_is_given_up() {
    for (beginning, more) in [
        (
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n",
            "x: y\r\n",
        ),
        (
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nx: ",
            "y",
        ),
        ("", "HTTP/1.1 103 Hints\r\nx: y\r\n\r\n"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
        let base = format!("http://{}", listener.local_addr().expect("it listens"));
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a connection");
            assert!(stream.read(&mut [0; 1024]).expect("a request") > 0);
            stream
                .write_all(beginning.as_bytes())
                .expect("the client reads");
            let block = more.repeat(64 * 1024 / more.len());
            while stream.write_all(block.as_bytes()).is_ok() {}
        });
        let error =
            call(&client(), &base, None, Duration::from_millis(500)).expect_err("it never ends");
        assert!(
            matches!(error, CallError::TimedOut(_) | CallError::Broken(_)),
            "{more:?}: {error:?}"
        );
        server.join().expect("no panic");
    }
}

#[test]
fn nothing_was_sent() {
    let closed = ClosedPort::new();
    let address = closed.address;
    for base in [
        format!("http://{address}"),
        format!("https://{address}"),
        "http://no-such-host.invalid".into(),
    ] {
        let error = get(&client(), &base).expect_err(&base);
        assert!(
            matches!(error, CallError::Unreachable(_)),
            "{base}: {error:?}"
        );
    }
}

#[test]
fn a_call_ends_at_its_deadline() {
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
    let base = format!("http://{}", silent.local_addr().expect("it listens"));
    let began = Instant::now();
    let error =
        call(&client(), &base, Some(b"{}"), Duration::from_millis(50)).expect_err("no answer");
    assert!(matches!(error, CallError::TimedOut(_)), "{error:?}");
    assert!(matches!(
        call(&client(), &base, None, Duration::ZERO),
        Err(CallError::TimedOut(_))
    ));
    drop(silent);
    // An answer that arrives byte by byte does not extend the deadline.
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
    let base = format!("http://{}", listener.local_addr().expect("it listens"));
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a connection");
        stream
            .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 60\r\n\r\n")
            .expect("a head");
        while stream.write_all(b"x").is_ok() {
            thread::sleep(Duration::from_millis(20));
        }
    });
    let error = call(&client(), &base, None, Duration::from_millis(300)).expect_err("no answer");
    assert!(matches!(error, CallError::TimedOut(_)), "{error:?}");
    assert!(
        began.elapsed() < Duration::from_secs(20),
        "{:?}",
        began.elapsed()
    );
    server.join().expect("the connection should be closed");
}

#[test]
fn a_call_is_ended_by_another_thread() {
    let (first, second) = (Cancellation::default(), Cancellation::default());
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
    let uri: Uri = format!("http://{}/", listener.local_addr().expect("it listens"))
        .parse()
        .expect("an address");
    let client = client();
    let call = |cancellation: &Cancellation| {
        client.call(&Call {
            uri: &uri,
            authorization: None,
            body: None,
            deadline: Instant::now() + Duration::from_secs(10),
            limit: LIMIT,
            cancellation,
        })
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().expect("a connection");
            let mut bytes = [0; 1024];
            assert!(stream.read(&mut bytes).expect("a request") > 0);
            stream.write_all(SHORT.as_bytes()).expect("an answer");
            assert!(stream.read(&mut bytes).expect("another request") > 0);
            // The handle of a call that is over must not reach the next one on the same connection.
            first.cancel();
            stream.write_all(SHORT.as_bytes()).expect("an answer");
            assert!(stream.read(&mut bytes).expect("a third request") > 0);
            second.cancel();
            assert_eq!(stream.read(&mut bytes).expect("the end"), 0);
        });
        call(&first).expect("an answer");
        call(&second).expect("an answer on the same connection");
        assert!(matches!(call(&second), Err(CallError::Cancelled)));
    });
    // The next call is not made, although a server listens.
    assert!(matches!(call(&second), Err(CallError::Cancelled)));
    listener
        .set_nonblocking(true)
        .expect("an option of the socket");
    assert!(listener.accept().is_err(), "no connection was made");
}

#[test]
fn what_a_server_writes_is_not_in_an_error() {
    for wire in [
        "HTTP/1.1 200 xyzzy\r\nxyzzy\u{1}: xyzzy\r\n\r\n",
        "xyzzy\r\n\r\n",
    ] {
        let server = Scripted::new(vec![vec![wire]]);
        let error = get(&client(), &server.base).expect_err(wire);
        assert!(!format!("{error:?}").contains("xyzzy"), "{error:?}");
    }
}

/// The resolver of `ureq` starts a thread for each call. Ours asks IPv4 first: any local user can
/// listen on a port of `::1` that the server has on 127.0.0.1 only.
#[test]
fn localhost_is_asked_at_its_ipv4_address_first() {
    let server = Scripted::new(vec![vec![SHORT, SHORT]]);
    let port = server
        .base
        .rsplit(':')
        .next()
        .and_then(|rest| rest.split('/').next());
    let port: u16 = port.and_then(|port| port.parse().ok()).expect("a port");
    // This host may have no ::1.
    let thief = TcpListener::bind(("::1", port)).ok();
    let client = client();
    for name in ["localhost", "LOCALHOST"] {
        let base = server.base.replace("127.0.0.1", name);
        assert_eq!(get(&client, &base).expect("an answer").0, 200);
        if let Some(thief) = &thief {
            thief
                .set_nonblocking(true)
                .expect("an option of the socket");
            assert!(thief.accept().is_err(), "{name}: the thief was asked");
        }
    }
}

/// Requests that were sent are not sent again: after the head, the server may have run it.
#[test]
fn a_request_that_was_sent_is_not_one_that_had_no_connection() {
    let server = Scripted::new(vec![vec![SHORT, ""], vec![SHORT]]);
    let client = client();
    let post = || call(&client, &server.base, Some(b"{}"), Duration::from_secs(10));
    post().expect("an answer");
    let error = post().expect_err("the connection was closed");
    assert!(matches!(error, CallError::Broken(_)), "{error:?}");
    assert_eq!(
        server.heard.iter().take(3).flatten().count(),
        2,
        "each was sent once"
    );
}
