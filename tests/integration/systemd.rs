//! Notifications to the service manager, and reloads on SIGHUP.

use std::fs::{self, File};
use std::io::Write;
use std::net::{IpAddr, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use adriaticum::error::Failure;
use adriaticum::http::{self, RequestHead, Response};
use adriaticum::listener::{
    Admission, Dispatcher, Lane, Limits, PendingRequest, Service, Watchdog,
};
use rustix::process::Signal;
use serde_json::json;

use crate::support::{
    Client, PATIENCE, Runtime, Script, Server, admit_with_key, chat, completion, local_listener,
    request, until,
};

/// The socket on which systemd would listen.
struct Manager(UnixDatagram);

impl Manager {
    fn at(path: &Path) -> Self {
        let socket = UnixDatagram::bind(path).expect("a socket");
        socket
            .set_read_timeout(Some(PATIENCE))
            .expect("a time-out can be set");
        Self(socket)
    }

    #[track_caller]
    fn hears(&self) -> String {
        let mut received = [0; 4096];
        let length = self
            .0
            .recv(&mut received)
            .expect("something should be received");
        let message = str::from_utf8(&received[..length]).expect("it should be text");
        message.trim_end().to_owned()
    }

    /// Waits for this message, and ignores others before it.
    #[track_caller]
    fn waits_for(&self, start: &str) -> String {
        loop {
            let received = self.hears();
            if received.starts_with(start) {
                return received;
            }
        }
    }

    /// Discards the messages received so far.
    fn forget(&self) {
        self.0
            .set_nonblocking(true)
            .expect("it can be asked not to wait");
        while self.0.recv(&mut [0; 4096]).is_ok() {}
        self.0
            .set_nonblocking(false)
            .expect("it can be asked to wait");
    }
}

#[test]
fn systemd_is_notified_of_the_start_the_reload_and_the_stop() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime));
    let config = server.folder.path("adriaticum.toml");
    fs::write(&config, "log_level = 'warn'\n").expect("a file");
    let path = server.folder.path("notify");
    let manager = Manager::at(&path);
    let mut server = server
        .set("ADRIATICUM_CONFIG", config.display())
        .set("NOTIFY_SOCKET", path.display())
        .spawn(&[]);
    assert_eq!(manager.hears(), "READY=1");
    server.signal(Signal::HUP);
    let received = manager.waits_for("RELOADING=1");
    let time = received
        .strip_prefix("RELOADING=1\nMONOTONIC_USEC=")
        .expect("the time of the reload");
    assert!(time.parse::<u64>().is_ok_and(|time| time > 0), "{received}");
    assert_eq!(manager.hears(), "READY=1");
    assert!(!server.log().contains("INFO"), "{}", server.log());

    fs::write(
        &config,
        "log_level = 'info'\nworkers = 3\n[usage]\nretention_days = 9\n",
    )
    .expect("a file");
    server.signal(Signal::HUP);
    manager.waits_for("RELOADING=1");
    assert_eq!(manager.hears(), "READY=1");
    assert!(
        server
            .log()
            .contains("[INFO] configuration reloaded: log_level = info\n"),
        "{}",
        server.log()
    );
    assert!(
        server
            .log()
            .contains("restart: workers, usage.retention_days\n"),
        "{}",
        server.log()
    );

    fs::write(&config, "log_level = 'error'\nworkers = 0\n").expect("a file");
    server.signal(Signal::HUP);
    manager.waits_for("RELOADING=1");
    assert_eq!(manager.hears(), "READY=1");
    let log = server.log();
    let refused = log
        .lines()
        .find(|line| line.contains("[ERROR] configuration not reloaded: "))
        .expect("a line");
    assert!(refused.contains(":2: workers = 0: expected"), "{refused}");
    fs::write(&config, "").expect("a file");
    server.signal(Signal::HUP);
    manager.waits_for("RELOADING=1");
    assert_eq!(manager.hears(), "READY=1");
    assert_eq!(
        server.log().matches("configuration reloaded").count(),
        2,
        "the broken one changed nothing"
    );
    assert!(
        server
            .log()
            .contains("configuration reloaded: nothing changed\n"),
        "{}",
        server.log()
    );

    server.signal(Signal::TERM);
    manager.waits_for("STOPPING=1");
    assert!(server.wait().success());
}

/// systemd takes the time of the stop from this message, and shows that the service is stopping.
#[test]
fn systemd_is_notified_of_a_stop_before_the_running_requests_are_completed() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime));
    let path = server.folder.path("notify");
    let manager = Manager::at(&path);
    let mut server = server.set("NOTIFY_SOCKET", path.display()).start();
    let gate = Arc::new(AtomicBool::new(false));
    runtime.next(Script::Held(Arc::clone(&gate), completion("at last")));
    let mut client = server.connect();
    client.send(request(&server.key(), &chat("x")));
    until("it is under way", || runtime.count() == 1);
    server.signal(Signal::TERM);
    manager.waits_for("STOPPING=1");
    gate.store(true, Ordering::Release);
    client.reply().is_completion();
    assert!(server.wait().success());
}

#[test]
fn a_reload_and_a_stop_work_without_a_service_manager() {
    let mut server = Server::new(None)
        .set("NOTIFY_SOCKET", "/nonexistent/notify")
        .start();
    server.signal(Signal::HUP);
    until("it has reloaded", || {
        server.log().contains("configuration reloaded")
    });
    server.signal(Signal::TERM);
    assert!(server.wait().success());
    let log = server.log();
    assert!(
        log.contains("could not notify the service manager"),
        "{log}"
    );
}

#[test]
fn the_watchdog_is_fed_while_idle_while_the_workers_have_their_work_and_while_another_holds_the_database()
 {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime));
    let path = server.folder.path("notify");
    let manager = Manager::at(&path);
    let server = server
        .set("NOTIFY_SOCKET", path.display())
        .set("WATCHDOG_USEC", 100_000)
        .set("ADRIATICUM_WORKERS", 1)
        .start();
    for _ in 0..5 {
        manager.waits_for("WATCHDOG=1");
    }
    let key = server.key();
    let gate = Arc::new(AtomicBool::new(false));
    runtime.next(Script::Held(Arc::clone(&gate), completion("at last")));
    let mut client = server.connect();
    client.send(request(&key, &chat("x")));
    until("it is under way", || runtime.count() == 1);
    manager.forget();
    for _ in 0..5 {
        manager.waits_for("WATCHDOG=1");
    }
    gate.store(true, Ordering::Release);
    client.reply().is_completion();

    let other =
        rusqlite::Connection::open(server.folder.path("adriaticum.db")).expect("the database");
    other.execute_batch("BEGIN IMMEDIATE").expect("a lock");
    manager.forget();
    for _ in 0..2 {
        manager.waits_for("WATCHDOG=1");
    }
    assert!(!server.log().contains("not fed"), "{}", server.log());
}

#[test]
fn the_watchdog_of_another_process_is_not_fed() {
    let server = Server::new(None);
    let path = server.folder.path("notify");
    let manager = Manager::at(&path);
    let mut server = server
        .set("NOTIFY_SOCKET", path.display())
        .set("WATCHDOG_USEC", 1000)
        .set("WATCHDOG_PID", 1)
        .start();
    assert_eq!(manager.hears(), "READY=1");
    server.signal(Signal::HUP);
    manager.waits_for("RELOADING=1");
    server.signal(Signal::TERM);
    assert!(server.wait().success());
    while manager.0.set_nonblocking(true).is_ok() {
        let mut received = [0; 4096];
        match manager.0.recv(&mut received) {
            Ok(length) => assert!(
                !received[..length].starts_with(b"WATCHDOG"),
                "it was meant for another"
            ),
            Err(_) => break,
        }
    }
}

/// Blocks its caller: a worker with a request, or the loop with one that it refuses.
#[derive(Default)]
struct Stuck {
    worker: AtomicBool,
    turn: AtomicBool,
}

impl Service for Stuck {
    fn serves(&self, _: &http::ClientInfo, _: &RequestHead) -> bool {
        true
    }

    fn admit(&self, _: &http::ClientInfo, _: &RequestHead) -> Result<Admission, Response> {
        Ok(admit_with_key("key"))
    }

    fn look_up(&self, _: &PendingRequest) -> Result<Lane, Response> {
        Ok(Lane {
            name: "key".into(),
            limit: None,
        })
    }

    fn respond(&self, _: &PendingRequest, _: &Dispatcher) -> Response {
        until("the worker may go on", || {
            !self.worker.load(Ordering::Acquire)
        });
        Response::json(200, Vec::new())
    }

    fn refuse(&self, _: Option<IpAddr>, _: Failure) -> Response {
        until("the loop may go on", || !self.turn.load(Ordering::Acquire));
        Response::json(400, Vec::new())
    }
}

#[test]
fn the_watchdog_is_not_fed_for_a_loop_or_workers_that_are_stuck() {
    let (mut listener, address) = local_listener(Limits {
        workers: 1,
        longest_work: Duration::from_millis(1),
        ..Limits::default()
    });
    let fed = Arc::new(AtomicU64::new(0));
    let feed = Arc::clone(&fed);
    let time = Duration::from_millis(40);
    listener.watchdog = Some(Watchdog::new(time, move || {
        _ = feed.fetch_add(1, Ordering::AcqRel)
    }));
    let mut stopper = listener.stopper().expect("a stopper");
    let stuck = Arc::new(Stuck::default());
    let service = Arc::clone(&stuck);
    let serving = thread::spawn(move || {
        listener
            .start(vec![service])
            .expect("threads")
            .run()
            .expect("it should serve")
    });
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
    for (held, bytes) in [
        (&stuck.worker, "GET / HTTP/1.1\r\nHost: h\r\n\r\n"),
        (&stuck.turn, "nonsense\n\n"),
    ] {
        is_fed();
        held.store(true, Ordering::Release);
        let mut client = Client::new(TcpStream::connect(address).expect("a connection"));
        client.send(bytes);
        until("the watchdog is not fed", is_silent);
        held.store(false, Ordering::Release);
        assert_ne!(client.reply().status, 0);
        is_fed();
    }
    stopper.write_all(b"x").expect("it can be stopped");
    serving.join().expect("the listener should not panic");
}

#[test]
fn a_line_for_the_journal_bears_its_priority_and_no_time() {
    let logging_to = |server: Server, named: bool| {
        let log = File::create(server.folder.path("log"))
            .expect("a log")
            .metadata()
            .expect("its inode");
        let stream = format!(
            "{}:{}",
            log.dev(),
            if named { log.ino() } else { log.ino() + 1 }
        );
        server.set("JOURNAL_STREAM", stream)
    };
    let plain = logging_to(Server::new(None), false).start();
    assert!(
        plain.log().starts_with("20") && plain.log().contains("Z [INFO] listening on"),
        "{}",
        plain.log()
    );
    let journal = logging_to(Server::new(None), true).start();
    until("the log says what is wrong", || {
        let line = "\n<3>runtime: no runtime is configured";
        journal.log().contains(line)
    });
    assert!(
        journal.log().starts_with("<6>adriaticum "),
        "{}",
        journal.log()
    );
    assert!(
        journal.log().contains("\n<6>listening on "),
        "{}",
        journal.log()
    );
    let broken = Server::new(None).set("ADRIATICUM_QUEUE", "x");
    let mut broken = logging_to(broken, true).spawn(&[]);
    assert_eq!(
        broken.wait().code(),
        Some(2),
        "a supervisor should know that trying again does not help"
    );
    assert!(
        broken
            .log()
            .starts_with("<3>adriaticum: ADRIATICUM_QUEUE=\"x\": expected "),
        "{}",
        broken.log()
    );
}

/// A probe waits for another host, so it has a thread of its own, which a stop does not join.
#[test]
fn a_probe_that_hangs_holds_up_neither_a_reload_nor_a_stop() {
    let runtime = Runtime::start();
    runtime.next(Script::Answer(500, json!({})));
    runtime.probes.status.store(0, Ordering::Release);
    let mut server = Server::new(Some(&runtime)).start();
    server
        .post(&server.key(), &chat("x"))
        .is_error(502, "inference_error");
    until("the runtime is probed", || {
        runtime.probes.count.load(Ordering::Acquire) == 1
    });
    server.signal(Signal::HUP);
    until("it has reloaded", || {
        server.log().contains("configuration reloaded")
    });
    server.signal(Signal::TERM);
    until("it has stopped serving", || {
        server.log().contains("[INFO] stopped")
    });
    let probes = runtime.probes.count.load(Ordering::Acquire);
    assert_eq!(probes, 1, "it still hangs");
    assert!(server.wait().success());
}
