//! The listener alone, with limits small enough for a test to reach: deadlines, turns, threads. Evictions are in
//! eviction.rs, handshakes in tls.rs.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use adriaticum::error::Failure;
use adriaticum::http::{self, MAX_HEAD, Request, RequestHead, Response};
use adriaticum::listener::{
    Admission, Dispatcher, Gauge, Lane, Limits, Listener, ListenerState, LoadEvent, PendingRequest,
    Service, Watchdog,
};

use crate::support::{Client, PATIENCE, admit_with_key, connect_from, local_listener, until};

pub const SHORT: Duration = Duration::from_millis(300);
/// Within which a client on a busy machine has sent what it has to send.
pub const ENOUGH: Duration = Duration::from_secs(4);

/// Answers with the path; some paths have further effects.
#[derive(Default)]
pub struct Echo {
    pub gate: AtomicBool,
    pub under_way: AtomicUsize,
    pub looked_up: AtomicUsize,
    /// Refusals begun. The loop stays in one for as long as it is held.
    pub refusals: AtomicUsize,
    pub hold_loop: AtomicBool,
    /// The loop stays with a request for /head for as long as it is held.
    pub hold_head: AtomicBool,
    /// Requests for /head so far; one for /heads asks how many.
    pub heads: AtomicUsize,
    pub is_head_held: AtomicBool,
    /// Refusals have at least so many bytes.
    pub refusal_bytes: AtomicUsize,
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
        dispatcher.note_accepted(pending, pending.request.head.query(), None);
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
pub struct Running {
    pub echo: Arc<Echo>,
    pub state: Arc<ListenerState>,
    pub address: SocketAddr,
    pub stopper: UnixStream,
    pub thread: Option<JoinHandle<()>>,
}

/// Starts a listener with the default limits but those that a test sets.
pub fn serve(set: impl FnOnce(&mut Limits)) -> Running {
    serve_with(set, |_| {})
}

pub fn serve_with(set: impl FnOnce(&mut Limits), prepare: impl FnOnce(&mut Listener)) -> Running {
    let mut limits = Limits::default();
    set(&mut limits);
    let (mut listener, address) = local_listener(limits);
    prepare(&mut listener);
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
    pub fn connect(&self) -> Client {
        Client::new(TcpStream::connect(self.address).expect("a connection"))
    }

    /// Connects from an address that no other client has.
    pub fn connect_elsewhere(&self) -> Client {
        self.connect_from(2)
    }

    /// Connects from an address with this last byte.
    pub fn connect_from(&self, host: u8) -> Client {
        Client::new(connect_from([127, 0, 0, host], self.address))
    }

    /// Connects, and waits until the listener has accepted the connection.
    pub fn hold_from(&self, host: u8) -> Client {
        let before = self.state.snapshot().accepted;
        let client = self.connect_from(host);
        until("it is accepted", || self.state.snapshot().accepted > before);
        client
    }

    pub fn counted(&self, event: LoadEvent) -> u64 {
        self.state.snapshot().count_of(event)
    }

    #[track_caller]
    pub fn has_counted(&self, event: LoadEvent, count: u64) {
        assert_eq!(self.counted(event), count, "{event:?}");
    }

    pub fn buffered_bytes(&self) -> usize {
        self.state.snapshot().buffered_bytes.now
    }

    /// Has the loop stay in the refusal of what this client sends, until `hold_loop` is false.
    pub fn hold_loop<S: Read + Write>(&self, broken: &mut Client<S>) {
        self.echo.hold_loop.store(true, Ordering::Release);
        broken.send("nonsense\n\n");
        until("the loop is held", || {
            self.echo.refusals.load(Ordering::Acquire) == 1
        });
    }

    pub fn release_loop(&self) {
        self.echo.hold_loop.store(false, Ordering::Release);
    }

    /// Waits until so many requests for /hold are under way.
    pub fn until_under_way(&self, count: usize) {
        until("they are under way", || {
            self.echo.under_way.load(Ordering::Acquire) == count
        });
    }

    #[track_caller]
    pub fn get(&self, path: &str) -> u16 {
        let mut client = self.connect();
        client.ask(get(path)).status
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

pub fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: h\r\n\r\n")
}

/// The head of a request and as much of its body.
pub fn post(length: usize, sent: usize) -> String {
    format!(
        "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: {length}\r\n\r\n{}",
        "x".repeat(sent)
    )
}

#[test]
fn half_a_request_has_a_deadline_for_the_whole_of_it() {
    let running = serve(|limits| {
        limits.request_time = SHORT;
        limits.drain_time = SHORT;
    });
    for start in [
        "G",
        "GET / HTTP/1.1\r\nHost: h\r\n",
        &post(1000, 0),
        &post(1000, 10),
    ] {
        let began = Instant::now();
        let mut client = running.connect();
        let reply = client.ask(start);
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
    let mut running = serve(|limits| limits.stop_time = PATIENCE);
    let mut used = running.connect();
    assert_eq!(used.ask(get("/")).status, 200);
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
    let running = serve(|limits| {
        limits.send_time = SHORT;
        limits.workers = 1;
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
    let running = serve(|limits| {
        limits.workers = 2;
        limits.buffered_bytes = 256 * 1024 * 1024;
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

/// It was once counted as running.
#[test]
fn a_client_that_leaves_during_its_look_up_has_waited() {
    let running = serve(|_| {});
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

#[test]
fn a_panic_costs_one_connection_and_no_thread() {
    let running = serve(|limits| {
        limits.workers = 2;
        limits.queue = 0;
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
    running.until_under_way(before + 2);
    assert_eq!(running.get("/"), 503, "and no more than two");
    running.echo.gate.store(true, Ordering::Release);
    for client in &mut held {
        assert_eq!(client.reply().status, 200);
    }
}

#[test]
fn what_is_sent_after_the_end_is_taken_up_to_a_bound() {
    let running = serve(|limits| {
        limits.drain_bytes = 1_000_000;
        limits.drain_time = SHORT;
    });
    // A client that goes on sending without end is cut off at the bound.
    let mut endless = running.connect();
    assert_eq!(endless.ask(post(usize::MAX, 0)).status, 413);
    let mut sent = 0;
    while endless.stream.write_all(&[b'x'; 65536]).is_ok() {
        sent += 65536;
        assert!(sent < 100_000_000, "it takes whatever comes");
    }
    // One that sends nothing and does not go is closed when its time is up.
    let mut silent = running.connect();
    assert_eq!(silent.ask(post(usize::MAX, 0)).status, 413);
    assert!(silent.ends());
    until("the connection is closed for good", || {
        silent.stream.write_all(b"x").is_err()
    });
}

#[test]
fn a_request_answered_from_its_head_costs_no_body() {
    let running = serve(|_| {});
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
        assert!(running.buffered_bytes() < 10_000);
    }
}

#[test]
fn pipelined_requests_that_are_refused_take_turns() {
    let running = serve(|_| {});
    let (mut flood, mut other, mut broken) =
        (running.connect(), running.connect(), running.connect());
    until("all are accepted", || {
        running.state.snapshot().accepted == 3
    });
    running.hold_loop(&mut broken);
    flood.send(get("/head").repeat(100));
    other.send(get("/heads"));
    running.release_loop();
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
    let running = serve(|_| {});
    let mut flood: Vec<Client> = (0..50).map(|_| running.hold_from(3)).collect();
    let (mut other, mut broken) = (running.hold_from(4), running.hold_from(5));
    running.hold_loop(&mut broken);
    flood
        .iter_mut()
        .for_each(|client| client.send(get("/head")));
    other.send(get("/heads"));
    running.release_loop();
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
    let running = serve(|_| {});
    let (mut client, mut broken) = (running.hold_from(3), running.hold_from(4));
    running.hold_loop(&mut broken);
    client.send(get("/hold") + &get("/").repeat(3_000));
    running.release_loop();
    running.until_under_way(1);
    // What a request without a body holds, and a head.
    until("it is counted", || running.buffered_bytes() > 0);
    let held = running.buffered_bytes();
    assert!((MAX_HEAD..MAX_HEAD + 40_000).contains(&held), "{held}");
    running.echo.gate.store(true, Ordering::Release);
    for _ in 0..=3_000 {
        assert_eq!(client.reply().status, 200);
    }
}

#[test]
fn clients_that_never_stop_sending_delay_no_other() {
    let running = serve(|limits| {
        limits.drain_bytes = usize::MAX;
        limits.drain_time = PATIENCE;
    });
    let sent = Arc::new(AtomicUsize::new(0));
    let flood: Vec<_> = (0..4)
        .map(|_| {
            let (mut client, sent) = (running.connect(), Arc::clone(&sent));
            assert_eq!(client.ask(post(usize::MAX, 0)).status, 413);
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
    let running = serve(|limits| {
        limits.workers = 1;
        limits.queue = 2;
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
    running.has_counted(LoadEvent::QueueFull, 1);
    running.has_counted(LoadEvent::BuffersFull, 0);
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
                    assert_eq!(client.ask(get("/")).status, 200);
                }
            })
        })
        .collect();
    for client in clients {
        client.join().expect("no request was shed");
    }
}

#[test]
fn the_watchdog_is_not_fed_for_a_loop_or_workers_that_are_stuck() {
    let (fed, time) = (Arc::new(AtomicUsize::new(0)), Duration::from_millis(40));
    let feed = Arc::clone(&fed);
    let watchdog = Watchdog::new(time, move || _ = feed.fetch_add(1, Ordering::AcqRel));
    let running = serve_with(
        |limits| {
            limits.workers = 1;
            limits.longest_work = Duration::from_millis(1);
        },
        |listener| listener.watchdog = Some(watchdog),
    );
    let count = || fed.load(Ordering::Acquire);
    let is_fed = || {
        let before = count();
        until("the watchdog is fed", || count() > before + 2);
    };
    let is_silent = || {
        let before = count();
        thread::sleep(time * 10);
        count() == before
    };
    is_fed();
    let mut held = running.connect();
    held.send(get("/hold"));
    until("the watchdog is not fed for the worker", is_silent);
    running.echo.gate.store(true, Ordering::Release);
    assert_eq!(held.reply().status, 200);
    is_fed();
    let mut broken = running.connect();
    running.hold_loop(&mut broken);
    until("the watchdog is not fed for the loop", is_silent);
    running.release_loop();
    assert_eq!(broken.reply().status, 400);
    is_fed();
}
