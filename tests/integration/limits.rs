//! The listener alone, with limits small enough for a test to reach.

use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use adriaticum::error::Failure;
use adriaticum::http::{self, MAX_HEAD, Request, RequestHead, Response};
use adriaticum::listener::{
    Acceptor, Admission, Certificate, Dispatcher, Gauge, Lane, Limits, ListenerState, LoadEvent,
    PendingRequest, Service,
};

use crate::support::{
    Client, Folder, PATIENCE, admit_with_key, connect_from, local_listener, until,
};
use crate::tls;

const SHORT: Duration = Duration::from_millis(300);
/// Within which a client on a busy machine has sent what it has to send.
const ENOUGH: Duration = Duration::from_secs(4);

/// Answers with the path; some paths have further effects.
#[derive(Default)]
struct Echo {
    gate: AtomicBool,
    under_way: AtomicUsize,
    looked_up: AtomicUsize,
    threads: Mutex<Vec<thread::ThreadId>>,
    /// Refusals begun. The loop stays in one for as long as it is held.
    refusals: AtomicUsize,
    hold_loop: AtomicBool,
    /// The loop stays with a request for /head for as long as it is held.
    hold_head: AtomicBool,
    /// Requests for /head so far; one for /heads asks how many.
    heads: AtomicUsize,
    is_head_held: AtomicBool,
    /// Refusals have at least so many bytes.
    refusal_bytes: AtomicUsize,
}

impl Service for Echo {
    fn serves(&self, _: &http::ClientInfo, _: &RequestHead) -> bool {
        true
    }

    fn admit(&self, _: &http::ClientInfo, head: &RequestHead) -> Result<Admission, Response> {
        match head.path() {
            "/heads" => {
                let count = self.heads.load(Ordering::Acquire);
                Err(Response::json(200, count.to_string().into_bytes()))
            }
            "/head" => {
                self.heads.fetch_add(1, Ordering::AcqRel);
                if self.hold_head.load(Ordering::Acquire) {
                    self.is_head_held.store(true, Ordering::Release);
                    until("the loop may go on", || {
                        !self.hold_head.load(Ordering::Acquire)
                    });
                }
                Err(Response::json(404, b"from the head".to_vec()))
            }
            _ => Ok(admit_with_key(head.query())),
        }
    }

    fn look_up(&self, pending: &PendingRequest) -> Result<Lane, Response> {
        if pending.request.head.path() == "/look-up" {
            self.looked_up.fetch_add(1, Ordering::AcqRel);
            until("the gate opens", || self.gate.load(Ordering::Acquire));
        }
        Ok(Lane {
            name: pending.request.head.query().to_owned(),
            limit: None,
        })
    }

    fn respond(&self, pending: &PendingRequest, dispatcher: &Dispatcher) -> Response {
        dispatcher.authenticate(pending, pending.request.head.query(), None);
        self.response(&pending.request)
    }

    fn refuse(&self, _: Option<IpAddr>, failure: Failure) -> Response {
        let mut body = failure.message.as_bytes().to_vec();
        body.resize(
            body.len().max(self.refusal_bytes.load(Ordering::Acquire)),
            b' ',
        );
        self.refusals.fetch_add(1, Ordering::AcqRel);
        until("the loop may go on", || {
            !self.hold_loop.load(Ordering::Acquire)
        });
        Response::json(failure.error.status(), body)
    }
}

impl Echo {
    fn response(&self, request: &Request) -> Response {
        self.under_way.fetch_add(1, Ordering::AcqRel);
        self.threads
            .lock()
            .expect("the list")
            .push(thread::current().id());
        match request.head.path() {
            "/panic" => panic!("on purpose"),
            "/hold" => until("the gate opens", || self.gate.load(Ordering::Acquire)),
            "/large" => return Response::json(200, vec![b'x'; 8 * 1024 * 1024]),
            _ => {}
        }
        let status = if request.body.is_some() { 200 } else { 413 };
        Response::json(status, request.head.path().as_bytes().to_vec())
    }
}

/// A listener that serves until the value goes.
struct Running {
    echo: Arc<Echo>,
    state: Arc<ListenerState>,
    address: SocketAddr,
    stopper: UnixStream,
    thread: Option<JoinHandle<()>>,
}

fn serve(limits: Limits) -> Running {
    serve_with(limits, None)
}

fn serve_with(limits: Limits, acceptor: Option<Acceptor>) -> Running {
    let (mut listener, address) = local_listener(limits);
    listener.acceptor = acceptor.map(Arc::new);
    let stopper = listener.stopper().expect("a stopper");
    let (echo, state) = (Arc::new(Echo::default()), Arc::clone(&listener.state));
    let service = Arc::clone(&echo);
    let thread = thread::spawn(move || {
        listener
            .start(vec![service])
            .expect("threads")
            .run()
            .expect("it should serve")
    });
    Running {
        echo,
        state,
        address,
        stopper,
        thread: Some(thread),
    }
}

impl Running {
    fn connect(&self) -> Client {
        Client::new(TcpStream::connect(self.address).expect("a connection"))
    }

    /// Connects from an address that no other client has.
    fn connect_elsewhere(&self) -> Client {
        self.connect_from(2)
    }

    /// Connects from an address with this last byte.
    fn connect_from(&self, host: u8) -> Client {
        Client::new(connect_from([127, 0, 0, host], self.address))
    }

    /// Connects, and waits until the listener has accepted the connection.
    fn hold_from(&self, host: u8) -> Client {
        let before = self.state.snapshot().accepted;
        let client = self.connect_from(host);
        until("it is accepted", || self.state.snapshot().accepted > before);
        client
    }

    fn counted(&self, event: LoadEvent) -> u64 {
        self.state.snapshot().count_of(event)
    }

    #[track_caller]
    fn get(&self, path: &str) -> u16 {
        let mut client = self.connect();
        client.send(get(path));
        client.reply().status
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.echo.gate.store(true, Ordering::Release);
        self.echo.hold_loop.store(false, Ordering::Release);
        self.echo.hold_head.store(false, Ordering::Release);
        let _ = self.stopper.write_all(b"x");
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(
                ended.is_ok() || thread::panicking(),
                "the listener should not panic"
            );
        }
    }
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: h\r\n\r\n")
}

/// The head of a request and as much of its body.
fn post(length: usize, sent: usize) -> String {
    format!(
        "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: {length}\r\n\r\n{}",
        "x".repeat(sent)
    )
}

#[test]
fn half_a_request_has_a_deadline_for_the_whole_of_it() {
    let running = serve(Limits {
        request_time: SHORT,
        drain_time: SHORT,
        ..Limits::default()
    });
    for start in [
        "G",
        "GET / HTTP/1.1\r\nHost: h\r\n",
        &post(1000, 0),
        &post(1000, 10),
    ] {
        let began = Instant::now();
        let mut client = running.connect();
        client.send(start);
        let reply = client.reply();
        assert_eq!(reply.status, 400, "{start:?}");
        assert!(String::from_utf8_lossy(&reply.body).contains("in time"));
        assert!(client.ends());
        assert!(began.elapsed() >= SHORT, "{start:?} was cut off early");
    }
    // Bytes that keep coming do not move it.
    let mut client = running.connect();
    client.send(post(1_000_000 / 4, 0));
    let mut writer = client.stream.try_clone().expect("a second handle");
    let drip = thread::spawn(move || {
        while writer.write_all(b"x").is_ok() {
            thread::sleep(Duration::from_millis(5));
        }
    });
    assert_eq!(client.reply().status, 400);
    drop(client);
    drip.join().expect("the drip ends when the connection does");
}

/// The times are long: on a busy machine the client may need seconds to send the rest.
#[test]
fn requests_that_arrive_during_a_stop_are_answered() {
    let limits = Limits {
        stop_time: PATIENCE,
        ..Limits::default()
    };
    let mut running = serve(limits);
    let mut used = running.connect();
    used.send(get("/"));
    assert_eq!(used.reply().status, 200);
    let (mut fresh, mut half) = (running.connect(), running.connect());
    half.send(post(2, 1));
    // The listener has accepted and read them when a later connection is answered.
    assert_eq!(running.get("/"), 200);
    running.stopper.write_all(b"x").expect("a stop");
    until("no connection is taken", || {
        TcpStream::connect(running.address).is_err()
    });
    used.send(get("/"));
    fresh.send(get("/"));
    half.send("x");
    for client in [&mut used, &mut fresh, &mut half] {
        let reply = client.reply();
        assert_eq!(
            (reply.status, reply.header("connection")),
            (200, Some("close"))
        );
        assert!(client.ends());
    }
}

#[test]
fn a_client_that_does_not_read_its_answer_is_dropped() {
    let running = serve(Limits {
        send_time: SHORT,
        workers: 1,
        ..Limits::default()
    });
    let mut client = running.connect();
    client.send(get("/large"));
    assert_eq!(running.get("/"), 200, "the worker does not wait for it");
    // Nothing is read here, so only a connection that is gone refuses to be written to.
    until("it is dropped", || client.stream.write_all(b"x").is_err());
    assert!(
        client.reply().body.len() < 8 * 1024 * 1024,
        "the answer was not to come whole"
    );
}

#[test]
fn slow_clients_hold_no_thread() {
    let running = serve(Limits {
        workers: 2,
        buffered_bytes: 256 * 1024 * 1024,
        ..Limits::default()
    });
    // More than there are threads of any kind, and none of them reads.
    let mut slow: Vec<Client> = (0..8).map(|_| running.connect()).collect();
    for client in &mut slow {
        client.send(get("/large"));
    }
    let mut client = running.connect();
    for _ in 0..2 {
        client.send(get("/large"));
        assert_eq!(client.reply().body.len(), 8 * 1024 * 1024);
    }
    assert_eq!(
        slow[0].reply().body.len(),
        8 * 1024 * 1024,
        "a slow one gets all of it when it reads"
    );
    client.send(get("/large").replace("GET", "HEAD"));
    client.send(get("/after"));
    let mut head = Vec::new();
    while !head.ends_with(b"/after") {
        let mut byte = [0];
        client.stream.read_exact(&mut byte).expect("both answers");
        head.push(byte[0]);
    }
    assert!(
        !String::from_utf8_lossy(&head).contains("xxx"),
        "a HEAD has no body"
    );
}

#[test]
fn all_buffers_together_have_a_bound() {
    let running = serve(Limits {
        buffered_bytes: 600_000,
        ..Limits::default()
    });
    let mut first = running.connect();
    first.send(post(200_000, 199_999));
    until("the bytes are buffered", || running.get("/") == 200);
    let mut second = running.connect();
    second.send(post(250_000, 249_999));
    until("both are buffered", || {
        running.state.snapshot().buffered_bytes.now >= 449_998
    });
    let mut third = running.connect();
    third.send(post(250_000, 249_999));
    // It grew past the limit: the oldest of the address is evicted, and the others continue.
    let shed = first.reply();
    assert_eq!((shed.status, first.ends()), (503, true));
    assert_eq!(
        (
            running.counted(LoadEvent::UnfinishedEvicted),
            running.counted(LoadEvent::BuffersFull)
        ),
        (1, 0)
    );
    // The loop reports its buffers at the end of its round, after the answer.
    until("the rest is counted", || {
        (499_998..600_000).contains(&running.state.snapshot().buffered_bytes.now)
    });
    // When the body is complete, the whole cost of the request is counted. To evict the other one would not be enough.
    second.send("x");
    assert_eq!(second.reply().status, 503);
    assert_eq!(
        (
            running.counted(LoadEvent::UnfinishedEvicted),
            running.counted(LoadEvent::BuffersFull)
        ),
        (1, 1)
    );
    // For this one it is.
    let mut fourth = running.connect();
    fourth.send(post(150_000, 150_000));
    assert_eq!((fourth.reply().status, third.reply().status), (200, 503));
    assert_eq!(
        (
            running.counted(LoadEvent::UnfinishedEvicted),
            running.counted(LoadEvent::BuffersFull)
        ),
        (2, 1)
    );
    until("nothing is buffered", || {
        running.state.snapshot().buffered_bytes.now < 100_000
    });
}

/// It was once counted as running.
#[test]
fn a_client_that_leaves_during_its_look_up_has_waited() {
    let running = serve(Limits::default());
    let mut client = running.connect();
    client.send(get("/look-up?a"));
    until("it is looked up", || {
        running.echo.looked_up.load(Ordering::Acquire) == 1
    });
    drop(client);
    // When a later request is answered from its head, the end of that one was read.
    assert_eq!(running.get("/head"), 404);
    running.echo.gate.store(true, Ordering::Release);
    until("it is counted", || {
        running.counted(LoadEvent::AbandonedWaiting) == 1
    });
    assert_eq!(running.counted(LoadEvent::AbandonedRunning), 0);
    assert_eq!(running.echo.under_way.load(Ordering::Acquire), 0);
}

/// A listener that speaks TLS, and how to connect to it.
fn serve_tls(limits: Limits) -> (Running, impl Fn() -> tls::Secured) {
    let folder = Folder::new();
    let trusted = tls::certify(&folder.path(""));
    let certificate = Certificate::read(&folder.path("cert.pem"), &folder.path("key.pem"))
        .expect("a certificate");
    let running = serve_with(
        limits,
        Some(Acceptor::new(certificate).expect("an acceptor")),
    );
    let (address, config) = (
        running.address,
        tls::client_config(&trusted, rustls::ALL_VERSIONS),
    );
    (running, move || {
        tls::shake_hands(address, &config).expect("a handshake")
    })
}

#[test]
fn an_idle_session_gives_way_to_a_request() {
    let (running, connect) = serve_tls(Limits {
        buffered_bytes: 1_200_000,
        ..Limits::default()
    });
    let mut idle: Vec<tls::Secured> = (0..50).map(|_| connect()).collect();
    let mut client = connect();
    client.send(post(250_000, 250_000));
    assert_eq!(client.reply().status, 200);
    assert_eq!(
        (
            running.counted(LoadEvent::BuffersFull),
            running.counted(LoadEvent::Rejected)
        ),
        (0, 0)
    );
    assert!(
        (1..50).contains(&running.counted(LoadEvent::IdleEvicted)),
        "{:?}",
        running.state.snapshot()
    );
    assert!(idle[0].ends(), "the longest idle is the first to go");
    idle[49].send(get("/"));
    assert_eq!(idle[49].reply().status, 200);
}

/// Three TLS connections: one that has sent this much, one that is idle, and one whose refusal holds the loop.
fn hold_the_loop(
    running: &Running,
    connect: impl Fn() -> tls::Secured,
    sent: &str,
) -> [tls::Secured; 3] {
    let mut growing = connect();
    growing.send(sent);
    let (idle, mut broken) = (connect(), connect());
    running.echo.hold_loop.store(true, Ordering::Release);
    broken.send("nonsense\n\n");
    until("the loop is held", || {
        running.echo.refusals.load(Ordering::Acquire) == 1
    });
    [growing, idle, broken]
}

/// A handshake with an RSA key of 4,096 bits costs milliseconds.
#[test]
fn established_sessions_come_before_handshakes() {
    let (running, connect) = serve_tls(Limits::default());
    let strangers: Vec<TcpStream> = (0..50).map(|_| running.connect().stream).collect();
    let [mut established, _idle, mut broken] = hold_the_loop(&running, connect, "");
    assert_eq!(running.state.snapshot().accepted, 53);
    for stranger in &strangers {
        (&*stranger)
            .write_all(&tls::client_hello())
            .expect("the system takes it");
    }
    established.send(get("/head"));
    running.echo.hold_head.store(true, Ordering::Release);
    running.echo.hold_loop.store(false, Ordering::Release);
    until("it has its turn", || {
        running.echo.is_head_held.load(Ordering::Acquire)
    });
    for stranger in &strangers {
        stranger
            .set_nonblocking(true)
            .expect("an option of the socket");
        assert!(
            stranger.peek(&mut [0]).is_err(),
            "a handshake was answered first"
        );
        stranger
            .set_nonblocking(false)
            .expect("an option of the socket");
    }
    running.echo.hold_head.store(false, Ordering::Release);
    assert_eq!(
        (established.reply().status, broken.reply().status),
        (404, 400)
    );
    for stranger in &strangers {
        assert_eq!(
            stranger
                .peek(&mut [0])
                .expect("the server's part of the handshake"),
            1
        );
    }
}

/// Many handshakes of some addresses delay another address by a step of each.
#[test]
fn the_handshakes_of_addresses_take_turns() {
    let (running, connect) = serve_tls(Limits::default());
    let flood: Vec<TcpStream> = (0..100)
        .map(|number| running.hold_from(3 + number % 2).stream)
        .collect();
    let other = running.hold_from(5).stream;
    let [.., mut broken] = hold_the_loop(&running, connect, "");
    for client in flood.iter().chain([&other]) {
        (&*client)
            .write_all(&tls::client_hello())
            .expect("the system takes it");
    }
    running.echo.hold_loop.store(false, Ordering::Release);
    assert_eq!(broken.reply().status, 400);
    assert_eq!(
        other
            .peek(&mut [0])
            .expect("the server's part of the handshake"),
        1
    );
    let is_answered = |client: &&TcpStream| {
        client
            .set_nonblocking(true)
            .expect("an option of the socket");
        client.peek(&mut [0]).is_ok()
    };
    let before = flood.iter().filter(is_answered).count();
    assert!(before < 50, "{before} were answered before the other's");
}

/// A handshake whose client has gone costs nothing more.
#[test]
fn a_client_that_leaves_its_handshake_is_closed_at_once() {
    let (running, connect) = serve_tls(Limits::default());
    let strangers: Vec<TcpStream> = (0..20).map(|_| running.hold_from(3).stream).collect();
    let [_growing, _idle, mut broken] = hold_the_loop(&running, connect, "");
    for stranger in &strangers {
        (&*stranger)
            .write_all(&tls::client_hello())
            .expect("the system takes it");
        stranger
            .shutdown(Shutdown::Write)
            .expect("it can be shut down");
    }
    running.echo.hold_loop.store(false, Ordering::Release);
    assert_eq!(broken.reply().status, 400);
    for mut stranger in strangers {
        let received = stranger.read_to_end(&mut Vec::new()).unwrap_or_default();
        assert_eq!(received, 0, "the server's part of the handshake");
    }
}

/// A stop reads what has arrived on every connection. What it reads on the first may evict the second.
#[test]
fn a_session_is_evicted_during_a_stop() {
    let (mut running, connect) = serve_tls(Limits {
        buffered_bytes: 60_000,
        ..Limits::default()
    });
    let [mut growing, mut idle, mut broken] = hold_the_loop(&running, connect, "");
    // The stop comes first, so that the loop reads these bytes while it stops.
    running.stopper.write_all(b"x").expect("it can be stopped");
    growing.send(post(250_000, 50_000));
    running.echo.hold_loop.store(false, Ordering::Release);
    assert_eq!(broken.reply().status, 400);
    assert_eq!(growing.reply().status, 503);
    assert!(idle.ends());
    assert_eq!(running.counted(LoadEvent::UnfinishedEvicted), 1);
}

/// Two connections expire at the same time. The refusal of the first may evict the second.
#[test]
fn a_session_is_evicted_when_it_has_expired() {
    let refusal = 8 * 1024 * 1024;
    // Room for the refusal, what is encrypted of it, and one session.
    let buffered_bytes = refusal + 80_000;
    let limits = Limits {
        buffered_bytes,
        idle_time: ENOUGH,
        request_time: ENOUGH,
        ..Limits::default()
    };
    let (running, connect) = serve_tls(limits);
    let [mut growing, mut idle, mut broken] = hold_the_loop(&running, connect, "GET / HT");
    let began = Instant::now();
    running.echo.refusal_bytes.store(refusal, Ordering::Release);
    until("both have expired", || began.elapsed() > ENOUGH);
    running.echo.hold_loop.store(false, Ordering::Release);
    assert_eq!(broken.reply().status, 400);
    assert!(idle.ends());
    assert_eq!(growing.reply().status, 400);
}

#[test]
fn the_longest_idle_connection_makes_room() {
    let running = serve(Limits {
        max_connections: 4,
        ..Limits::default()
    });
    let mut idle: Vec<Client> = [false, true, false, true]
        .map(|elsewhere| {
            let mut client = if elsewhere {
                running.connect_elsewhere()
            } else {
                running.connect()
            };
            client.send(get("/"));
            assert_eq!(client.reply().status, 200);
            client
        })
        .into();
    // The address has its half, so its own longest idle connection is evicted and not the other address's.
    let mut new = running.connect_elsewhere();
    new.send(get("/"));
    assert_eq!(new.reply().status, 200);
    assert!(
        idle[1].ends(),
        "the one that was idle longest, of its address"
    );
    let mut third = Client::new(connect_from([127, 0, 0, 3], running.address));
    third.send(get("/"));
    assert_eq!(third.reply().status, 200);
    assert!(idle[0].ends(), "the one that was idle longest of all");
    for client in [2, 3] {
        idle[client].send(get("/"));
        assert_eq!(idle[client].reply().status, 200);
    }
    let snapshot = running.state.snapshot();
    assert_eq!(
        (snapshot.connections, snapshot.accepted),
        (Gauge { now: 4, limit: 4 }, 6)
    );
    assert_eq!(
        (
            snapshot.count_of(LoadEvent::IdleEvicted),
            snapshot.count_of(LoadEvent::UnfinishedEvicted)
        ),
        (2, 0)
    );
}

/// Two addresses hold all connections in silence, and reopen what is closed. Once they evicted every upload and every idle
/// connection of the others.
#[test]
fn the_largest_holder_gives_way_although_it_is_idle() {
    let running = serve(Limits {
        max_connections: 8,
        ..Limits::default()
    });
    let (mut upload, mut kept) = (running.connect_elsewhere(), running.connect_elsewhere());
    upload.send(post(2, 1));
    kept.send(get("/"));
    assert_eq!(kept.reply().status, 200);
    let flood: Vec<Client> = (0..30)
        .map(|number| running.hold_from(3 + number % 2))
        .collect();
    assert_eq!(
        running.counted(LoadEvent::IdleEvicted),
        30 - 6,
        "they evict one another"
    );
    upload.send("x");
    kept.send(get("/"));
    assert_eq!((upload.reply().status, kept.reply().status), (200, 200));
    assert_eq!(
        (
            running.counted(LoadEvent::UnfinishedEvicted),
            running.counted(LoadEvent::Rejected)
        ),
        (0, 0)
    );
    drop(flood);
}

#[test]
fn an_address_loses_its_longest_idle_connection_first_and_then_its_oldest_request() {
    let running = serve(Limits {
        max_connections: 6,
        ..Limits::default()
    });
    let mut other = running.connect_elsewhere();
    // When a later request is answered, what came before is read.
    let mut unfinished = || {
        let mut client = running.hold_from(3);
        client.send("P");
        other.send(get("/"));
        assert_eq!(other.reply().status, 200);
        client
    };
    let mut requests = vec![unfinished()];
    let mut idle = [running.hold_from(3), running.hold_from(3)];
    // The address has its half: each of these evicts one of its own.
    for client in &mut idle {
        requests.push(unfinished());
        assert!(client.ends());
    }
    requests.push(unfinished());
    assert_eq!(requests[0].reply().status, 503);
    assert_eq!(
        (
            running.counted(LoadEvent::IdleEvicted),
            running.counted(LoadEvent::UnfinishedEvicted)
        ),
        (2, 1)
    );
}

#[test]
fn running_requests_count_as_held_and_are_not_evicted() {
    let running = serve(Limits {
        max_connections: 6,
        ..Limits::default()
    });
    let mut busy = [running.connect_from(3), running.connect_from(3)];
    for client in &mut busy {
        client.send(get("/hold"));
    }
    until("both are under way", || {
        running.echo.under_way.load(Ordering::Acquire) == 2
    });
    let mut others = [
        running.hold_from(4),
        running.hold_from(4),
        running.hold_from(5),
    ];
    let mut third = running.hold_from(3);
    let _new = running.hold_from(6);
    assert!(third.ends(), "its address has three connections");
    let _newer = running.hold_from(7);
    assert!(
        others[0].ends(),
        "nothing of the largest holder can be evicted, so the next one gives way"
    );
    running.echo.gate.store(true, Ordering::Release);
    for client in &mut busy {
        assert_eq!(client.reply().status, 200);
    }
    assert_eq!(
        (
            running.counted(LoadEvent::IdleEvicted),
            running.counted(LoadEvent::Rejected)
        ),
        (2, 0)
    );
    for client in &mut others[1..] {
        client.send(get("/"));
        assert_eq!(client.reply().status, 200);
    }
}

#[test]
fn unfinished_requests_of_the_busiest_address_make_room() {
    let running = serve(Limits {
        max_connections: 8,
        ..Limits::default()
    });
    let mut honest = running.connect_elsewhere();
    honest.send("GET /");
    let mut kept = running.connect_elsewhere();
    kept.send(get("/"));
    assert_eq!(kept.reply().status, 200);
    let mut flood: Vec<Client> = (0..40)
        .map(|_| {
            let mut client = running.connect();
            client.send("P");
            // When a later request is answered, the byte is read before the next connection is accepted.
            kept.send(get("/"));
            assert_eq!(kept.reply().status, 200);
            client
        })
        .collect();
    assert_eq!(
        running.counted(LoadEvent::UnfinishedEvicted),
        36,
        "they have half of the connections"
    );
    for source in 3..20 {
        let mut other = Client::new(connect_from([127, 0, 0, source], running.address));
        other.send(get("/"));
        assert_eq!(other.reply().status, 200);
    }
    kept.send(get("/"));
    assert_eq!(
        kept.reply().status,
        200,
        "an idle connection of another address stays"
    );
    honest.send(" HTTP/1.1\r\nHost: h\r\n\r\n");
    assert_eq!(
        honest.reply().status,
        200,
        "so does half a request of another address"
    );
    let reply = flood[0].reply();
    assert_eq!(reply.status, 503, "a victim is answered if it can be");
    assert!(flood[0].ends());
}

/// 20 large bodies that are never finished fill the memory. Another address's requests get through.
#[test]
fn unfinished_bodies_of_the_busiest_address_make_room() {
    let running = serve(Limits {
        buffered_bytes: 2_000_000,
        ..Limits::default()
    });
    let mut flood: Vec<Client> = (0..20)
        .map(|_| {
            let mut client = running.connect();
            client.send(post(250_000, 249_999));
            client
        })
        .collect();
    for _ in 0..10 {
        let mut honest = running.connect_elsewhere();
        honest.send(post(200_000, 200_000));
        assert_eq!(honest.reply().status, 200);
    }
    assert_eq!(running.counted(LoadEvent::BuffersFull), 0);
    assert_eq!(flood[0].reply().status, 503);
    assert!(running.counted(LoadEvent::UnfinishedEvicted) >= 12);
}

#[test]
fn without_a_victim_a_new_connection_is_turned_away_with_a_response() {
    let running = serve(Limits {
        max_connections: 2,
        ..Limits::default()
    });
    let mut busy = [running.connect(), running.connect_elsewhere()];
    for client in &mut busy {
        client.send(get("/hold"));
    }
    until("both are under way", || {
        running.echo.under_way.load(Ordering::Acquire) == 2
    });
    for number in 1..=2 {
        let mut new = Client::new(connect_from([127, 0, 0, number], running.address));
        new.send(get("/"));
        let reply = new.reply();
        assert_eq!(
            (reply.status, reply.header("connection")),
            (503, Some("close"))
        );
        assert!(new.ends());
        assert_eq!(running.counted(LoadEvent::Rejected), u64::from(number));
    }
    running.echo.gate.store(true, Ordering::Release);
    for client in &mut busy {
        assert_eq!(client.reply().status, 200);
    }
    assert_eq!(running.get("/"), 200);
}

#[test]
fn a_panic_costs_one_connection_and_no_thread() {
    let running = serve(Limits {
        workers: 2,
        queue: 0,
        ..Limits::default()
    });
    for _ in 0..20 {
        let mut client = running.connect();
        client.send(get("/panic"));
        assert!(client.ends());
    }
    // Both places are free, and there are threads for both.
    let mut held: Vec<Client> = (0..2).map(|_| running.connect()).collect();
    let before = running.echo.under_way.load(Ordering::Acquire);
    for client in &mut held {
        client.send(get("/hold"));
    }
    until("both are under way", || {
        running.echo.under_way.load(Ordering::Acquire) == before + 2
    });
    assert_eq!(running.get("/"), 503, "and no more than two");
    running.echo.gate.store(true, Ordering::Release);
    for client in &mut held {
        assert_eq!(client.reply().status, 200);
    }
}

#[test]
fn what_is_sent_after_the_end_is_taken_up_to_a_bound() {
    let running = serve(Limits {
        drain_bytes: 1_000_000,
        drain_time: SHORT,
        ..Limits::default()
    });
    // A client that goes on sending without end is cut off at the bound.
    let mut endless = running.connect();
    endless.send(post(usize::MAX, 0));
    assert_eq!(endless.reply().status, 413);
    let mut sent = 0;
    while endless.stream.write_all(&[b'x'; 65536]).is_ok() {
        sent += 65536;
        assert!(sent < 100_000_000, "it takes whatever comes");
    }
    // One that sends nothing and does not go is closed when its time is up.
    let mut silent = running.connect();
    silent.send(post(usize::MAX, 0));
    assert_eq!(silent.reply().status, 413);
    assert!(silent.ends());
    until("the connection is closed for good", || {
        silent.stream.write_all(b"x").is_err()
    });
}

#[test]
fn a_request_answered_from_its_head_costs_no_body() {
    let running = serve(Limits::default());
    let head = |length: usize| post(length, 0).replace("POST /", "POST /head");
    let mut client = running.connect();
    // The body has come: the connection stays, and what follows is answered in order.
    let whole = head(5) + "12345";
    client.send(whole.repeat(99) + &get("/after") + &whole.repeat(2));
    for _ in 0..99 {
        let reply = client.reply();
        assert_eq!((reply.status, reply.header("connection")), (404, None));
    }
    assert_eq!(client.reply().body, b"/after");
    // The responses that a client gets for nothing but heads are bounded.
    assert_eq!(client.reply().header("connection"), Some("close"));
    assert!(client.ends());
    // Not whole: none of it is kept, and the connection ends after the response.
    let expecting = head(200_000).replace("Host", "Expect: 100-continue\r\nHost");
    for (wire, more) in [(head(200_000), 100_000), (expecting, 0)] {
        let mut client = running.connect();
        client.send(wire);
        client.send(vec![b'x'; more]);
        let reply = client.reply();
        assert_eq!(
            (reply.status, reply.header("connection")),
            (404, Some("close")),
            "no 100 Continue"
        );
        assert!(client.ends());
        assert!(running.state.snapshot().buffered_bytes.now < 10_000);
    }
}

#[test]
fn pipelined_requests_that_are_refused_take_turns() {
    let running = serve(Limits::default());
    let (mut flood, mut other, mut broken) =
        (running.connect(), running.connect(), running.connect());
    until("all are accepted", || {
        running.state.snapshot().accepted == 3
    });
    running.echo.hold_loop.store(true, Ordering::Release);
    broken.send("nonsense\n\n");
    until("the loop is held", || {
        running.echo.refusals.load(Ordering::Acquire) == 1
    });
    flood.send(get("/head").repeat(100));
    other.send(get("/heads"));
    running.echo.hold_loop.store(false, Ordering::Release);
    let before: usize = String::from_utf8_lossy(&other.reply().body)
        .parse()
        .expect("a number");
    assert!(before <= 2, "{before} were answered before the other's");
    for _ in 0..100 {
        assert_eq!(flood.reply().status, 404);
    }
}

/// Many connections of one address delay another address by one turn.
#[test]
fn addresses_take_turns() {
    let running = serve(Limits::default());
    let mut flood: Vec<Client> = (0..50).map(|_| running.hold_from(3)).collect();
    let (mut other, mut broken) = (running.hold_from(4), running.hold_from(5));
    running.echo.hold_loop.store(true, Ordering::Release);
    broken.send("nonsense\n\n");
    until("the loop is held", || {
        running.echo.refusals.load(Ordering::Acquire) == 1
    });
    flood
        .iter_mut()
        .for_each(|client| client.send(get("/head")));
    other.send(get("/heads"));
    running.echo.hold_loop.store(false, Ordering::Release);
    let before: usize = String::from_utf8_lossy(&other.reply().body)
        .parse()
        .expect("a number");
    assert!(before <= 1, "{before} were answered before the other's");
    flood
        .iter_mut()
        .for_each(|client| assert_eq!(client.reply().status, 404));
}

#[test]
fn a_connection_holds_at_most_a_head_of_what_it_has_not_read() {
    let running = serve(Limits::default());
    let (mut client, mut broken) = (running.hold_from(3), running.hold_from(4));
    running.echo.hold_loop.store(true, Ordering::Release);
    broken.send("nonsense\n\n");
    until("the loop is held", || {
        running.echo.refusals.load(Ordering::Acquire) == 1
    });
    client.send(get("/hold") + &get("/").repeat(3_000));
    running.echo.hold_loop.store(false, Ordering::Release);
    until("it is under way", || {
        running.echo.under_way.load(Ordering::Acquire) == 1
    });
    // What a request without a body holds, and a head.
    until("it is counted", || {
        running.state.snapshot().buffered_bytes.now > 0
    });
    let held = running.state.snapshot().buffered_bytes.now;
    assert!((MAX_HEAD..MAX_HEAD + 40_000).contains(&held), "{held}");
    running.echo.gate.store(true, Ordering::Release);
    for _ in 0..=3_000 {
        assert_eq!(client.reply().status, 200);
    }
}

/// Clients that do not read their responses hold connections and memory until others need them.
#[test]
fn a_response_that_is_not_read_gives_way() {
    let limits = Limits {
        max_connections: 4,
        buffered_bytes: 40 * 1024 * 1024,
        ..Limits::default()
    };
    let running = serve(limits);
    let unread = |host: u8| {
        let mut client = running.connect_from(host);
        let before = running.state.snapshot().buffered_bytes.now;
        client.send(get("/large"));
        // The system's buffers take some of it.
        until("it is not sent", || {
            running.state.snapshot().buffered_bytes.now > before + 4 * 1024 * 1024
        });
        client
    };
    let mut slow: Vec<Client> = [3, 3, 4].map(unread).into();
    let mut honest = running.connect_elsewhere();
    honest.send(post(200_000, 200_000));
    assert_eq!(honest.reply().status, 200);
    assert_eq!(
        running.counted(LoadEvent::UnfinishedEvicted),
        0,
        "there was room"
    );
    let mut new = running.connect_from(5);
    new.send(get("/"));
    assert_eq!(new.reply().status, 200);
    assert_eq!(running.counted(LoadEvent::UnfinishedEvicted), 1);
    assert!(
        slow[0].reply().body.len() < 8 * 1024 * 1024,
        "the oldest of the address that holds most"
    );
    assert_eq!(
        slow[1].reply().body.len(),
        8 * 1024 * 1024,
        "the others get theirs when they read"
    );
    assert_eq!(slow[2].reply().body.len(), 8 * 1024 * 1024);

    let running = serve(Limits {
        buffered_bytes: 20 * 1024 * 1024,
        ..Limits::default()
    });
    let mut slow: Vec<Client> = (0..3).map(|_| running.connect_from(3)).collect();
    slow.iter_mut()
        .for_each(|client| client.send(get("/large")));
    until("one is evicted", || {
        running.counted(LoadEvent::UnfinishedEvicted) >= 1
    });
    for _ in 0..10 {
        let mut honest = running.connect_elsewhere();
        honest.send(post(250_000, 250_000));
        assert_eq!(honest.reply().status, 200);
    }
    assert_eq!(running.counted(LoadEvent::BuffersFull), 0);
}

#[test]
fn clients_that_never_stop_sending_delay_no_other() {
    let running = serve(Limits {
        drain_bytes: usize::MAX,
        drain_time: PATIENCE,
        ..Limits::default()
    });
    let sent = Arc::new(AtomicUsize::new(0));
    let flood: Vec<_> = (0..4)
        .map(|_| {
            let (mut client, sent) = (running.connect(), Arc::clone(&sent));
            client.send(post(usize::MAX, 0));
            assert_eq!(client.reply().status, 413);
            thread::spawn(move || {
                while client.stream.write_all(&[b'x'; 65536]).is_ok() {
                    sent.fetch_add(65536, Ordering::AcqRel);
                }
            })
        })
        .collect();
    for _ in 0..50 {
        let before = sent.load(Ordering::Acquire);
        assert_eq!(running.get("/"), 200);
        until("they still send", || sent.load(Ordering::Acquire) > before);
    }
    drop(running);
    for sender in flood {
        sender.join().expect("it ends with the listener");
    }
}

#[test]
fn a_full_queue_sheds_at_once_and_every_place_is_used() {
    let running = serve(Limits {
        workers: 1,
        queue: 2,
        ..Limits::default()
    });
    // A key that was accepted before may use every place.
    assert_eq!(running.get("/"), 200);
    let mut held: Vec<Client> = (0..3).map(|_| running.connect()).collect();
    for client in &mut held {
        client.send(get("/hold"));
    }
    // Which of them came first is the system's choice; that three are taken is not.
    until("a fourth is shed", || running.get("/hold") == 503);
    until("a worker has taken one", || {
        running.state.snapshot().workers.now == 1
    });
    let snapshot = running.state.snapshot();
    assert_eq!(
        (snapshot.workers, snapshot.queue),
        (Gauge { now: 1, limit: 1 }, Gauge { now: 2, limit: 2 })
    );
    assert_eq!(
        (
            snapshot.count_of(LoadEvent::QueueFull),
            snapshot.count_of(LoadEvent::BuffersFull)
        ),
        (1, 0)
    );
    // A response to HEAD has no body, from the loop or from a worker.
    let mut head = running.connect();
    head.send(get("/").replace("GET", "HEAD"));
    let mut snapshot = String::new();
    head.stream
        .read_to_string(&mut snapshot)
        .expect("an answer and the end");
    assert!(
        snapshot.starts_with("HTTP/1.1 503 ") && snapshot.ends_with("\r\n\r\n"),
        "{snapshot}"
    );
    running.echo.gate.store(true, Ordering::Release);
    for client in &mut held {
        assert_eq!(client.reply().status, 200);
    }
    let snapshot = running.state.snapshot();
    assert_eq!(
        (snapshot.workers.now, snapshot.queue.now),
        (0, 0),
        "the room is free before the answer is sent"
    );
    // If there are only as many clients as places, none is shed, however fast they are.
    let clients: Vec<JoinHandle<()>> = (0..3)
        .map(|_| {
            let mut client = running.connect();
            thread::spawn(move || {
                for _ in 0..500 {
                    client.send(get("/"));
                    assert_eq!(client.reply().status, 200);
                }
            })
        })
        .collect();
    for client in clients {
        client.join().expect("no request was shed");
    }
}
