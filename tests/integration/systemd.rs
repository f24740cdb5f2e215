//! Notifications to the service manager, reloads on SIGHUP, and signals during a start.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Instant;

use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::support::{PATIENCE, Runtime, Script, Server, chat, exists, request, until};

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

    /// Has the service reload, and waits until it has.
    #[track_caller]
    fn reloads(&self, server: &Server) -> String {
        server.signal(Signal::HUP);
        let received = self.waits_for("RELOADING=1");
        assert_eq!(self.hears(), "READY=1");
        received
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
    let received = manager.reloads(&server);
    let time = received
        .strip_prefix("RELOADING=1\nMONOTONIC_USEC=")
        .expect("the time of the reload");
    assert!(time.parse::<u64>().is_ok_and(|time| time > 0), "{received}");
    assert!(!server.log().contains("INFO"), "{}", server.log());

    fs::write(
        &config,
        "log_level = 'info'\nworkers = 3\n[usage]\nretention_days = 9\n",
    )
    .expect("a file");
    manager.reloads(&server);
    server.has_logged("[INFO] configuration reloaded: log_level = info\n");
    server.has_logged("restart: workers, usage.retention_days\n");

    fs::write(&config, "log_level = 'error'\nworkers = 0\n").expect("a file");
    manager.reloads(&server);
    let log = server.log();
    let refused = log
        .lines()
        .find(|line| line.contains("[ERROR] configuration not reloaded: "))
        .expect("a line");
    assert!(refused.contains(":2: workers = 0: expected"), "{refused}");
    fs::write(&config, "").expect("a file");
    manager.reloads(&server);
    assert_eq!(
        server.log().matches("configuration reloaded").count(),
        2,
        "the broken one changed nothing"
    );
    server.has_logged("configuration reloaded: nothing changed\n");

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
    let gate = runtime.hold("at last");
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
    let gate = runtime.hold("at last");
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
        .complete(&server.key())
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

/// The signals that the process has handlers for, as a mask.
fn caught(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

#[test]
fn a_signal_during_the_start_ends_it_with_0() {
    // The database is locked, so that the start takes 5 s. It has its own lock by then.
    for signal in [Signal::TERM, Signal::INT] {
        let server = Server::new(None).sqlite();
        let other =
            rusqlite::Connection::open(server.folder.path("adriaticum.db")).expect("a database");
        other
            .execute_batch("CREATE TABLE t (x); BEGIN EXCLUSIVE")
            .expect("a lock");
        let mut server = server.spawn(&[]);
        until("it is starting", || {
            exists(&server.folder.path("adriaticum.db.lock"))
        });
        server.signal(signal);
        assert_eq!(server.wait().code(), Some(0), "{signal:?}");
    }
    // As soon as it has a handler, and when it is about to serve.
    for _ in 0..10 {
        let mut early = Server::new(None).spawn(&[]);
        let pid = early.pid();
        let began = Instant::now();
        // Without a pause, so that the signal comes right after. The handler for SIGINT is installed after that for SIGTERM:
        // signal-hook loses a signal between the system call and its own note of the action.
        while caught(pid) & 1 << (Signal::INT.as_raw() - 1) == 0 {
            assert!(
                began.elapsed() < PATIENCE,
                "it has no handler: {}",
                early.log()
            );
        }
        kill_process(Pid::from_raw(pid as i32).expect("a pid"), Signal::TERM)
            .expect("it should get it");
        assert_eq!(early.wait().code(), Some(0));
        let mut late = Server::new(None).start();
        late.signal(Signal::TERM);
        assert_eq!(late.wait().code(), Some(0));
    }
}

/// A SIGHUP ended a service that had just been started.
#[test]
fn a_reload_that_is_requested_during_the_start_follows_it() {
    let server = Server::new(None);
    let config = server.folder.path("pipe.toml");
    mknodat(CWD, &config, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a pipe");
    let mut server = server.set("ADRIATICUM_CONFIG", config.display()).spawn(&[]);
    // The first configuration is empty and comes after the signal. The reload finds a file in the place of the pipe.
    let mut pipe = None;
    until("it reads its configuration", || {
        let flags = OFlags::NONBLOCK.bits() as i32;
        pipe = File::options()
            .write(true)
            .custom_flags(flags)
            .open(&config)
            .ok();
        pipe.is_some()
    });
    server.signal(Signal::HUP);
    fs::remove_file(&config).expect("it should go");
    fs::write(&config, "log_level = 'debug'").expect("a file");
    drop(pipe);
    server.await_address();
    until("it has reloaded", || {
        server
            .log()
            .contains("configuration reloaded: log_level = debug")
    });
}
