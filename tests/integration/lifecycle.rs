//! Start and stop: sockets, signals and leftover files.

use std::fs::{self, File};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};
use rustix::io::FdFlags;
use rustix::process::{Pid, Signal, kill_process};

use crate::support::{
    Client, Folder, PATIENCE, Runtime, Script, Server, chat, completion, exists, request, until,
};

/// Constant use of the console would cost completions a third of their rate.
#[test]
fn the_consoles_threads_give_way_to_the_workers() {
    let server = Server::new(None).start();
    let nice_values = |name: &str| -> Vec<i32> {
        let threads = fs::read_dir(format!("/proc/{}/task", server.pid())).expect("the threads");
        threads
            .filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("stat")).ok())
            .filter(|stat| stat.contains(&format!("({name})")))
            .filter_map(|stat| stat.split(' ').nth(18)?.parse().ok())
            .collect()
    };
    until("the threads run", || {
        let (console, workers) = (nice_values("console"), nice_values("worker"));
        let least = workers.first().map(|nice| nice + 1);
        (console.len(), workers.len()) == (2, 16) && console.iter().all(|nice| Some(*nice) >= least)
    });
}

#[test]
fn a_unix_socket() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime));
    let path = server.folder.path("api.sock");
    let listen = format!("unix:{}", path.display());
    // What a killed service left behind is no obstacle.
    drop(UnixListener::bind(&path).expect("a socket"));
    assert!(exists(&path));
    let mut server = server.set("ADRIATICUM_LISTEN", &listen).start();
    let key = server.key();
    let mut client = Client::of(UnixStream::connect(&path).expect("a connection"));
    for _ in 0..2 {
        client.send(request(&key, &chat("x")));
        client.reply().is_completion();
    }
    let second = server.run(&["serve"]);
    assert_eq!(
        second.status.code(),
        Some(1),
        "the socket of a running service is not taken from it"
    );
    client.send(request(&key, &chat("x")));
    client.reply().is_completion();
    server.signal(Signal::TERM);
    assert!(server.wait().success());
    assert!(!exists(&path), "it takes its socket with it");
}

#[test]
fn a_file_in_the_place_of_the_socket_is_not_removed() {
    let server = Server::new(None);
    let path = server.folder.path("precious");
    std::fs::write(&path, "text").expect("a file");
    let server = server.set("ADRIATICUM_LISTEN", format!("unix:{}", path.display()));
    assert_eq!(server.run(&["serve"]).status.code(), Some(1));
    assert!(exists(&path));
}

#[test]
fn a_unix_socket_has_the_mode_of_the_setting() {
    for (umask, setting, mode) in [
        ("000", None, 0o660),
        ("077", None, 0o660),
        ("077", Some("0666"), 0o666),
    ] {
        let server = Server::new(None);
        let path = server.folder.path("api.sock");
        let mut server = server.set("ADRIATICUM_LISTEN", format!("unix:{}", path.display()));
        if let Some(setting) = setting {
            server = server.set("ADRIATICUM_SOCKET_MODE", setting);
        }
        let _server =
            server.start_with(&["sh", "-c", &format!("umask {umask}; exec \"$@\""), "sh"]);
        let found = std::fs::metadata(&path)
            .expect("the socket")
            .permissions()
            .mode();
        assert_eq!(found & 0o7777, mode, "umask {umask}, {setting:?}");
    }
}

/// A socket that can't be tried may still be in use.
#[test]
fn only_a_socket_on_which_no_process_listens_is_removed() {
    let refused = |path: &Path, server: Server, printed: &str| {
        let mut server = server
            .set("ADRIATICUM_LISTEN", format!("unix:{}", path.display()))
            .spawn(&[]);
        assert_eq!(server.wait().code(), Some(1), "{}", server.log());
        assert!(server.log().contains(printed), "{}", server.log());
        assert!(exists(path));
    };
    let server = Server::new(None);
    let path = server.folder.path("datagrams.sock");
    let _datagrams = UnixDatagram::bind(&path).expect("a socket");
    refused(&path, server, "Protocol wrong type for socket");
    // A service that hangs: its backlog is full.
    let server = Server::new(None);
    let path = server.folder.path("busy.sock");
    let busy = UnixListener::bind(&path).expect("a socket");
    rustix::net::listen(&busy, 0).expect("a shorter backlog");
    let _waiting = UnixStream::connect(&path).expect("a connection");
    refused(&path, server, "another program uses this address");
}

/// The stacks of 1,024 threads do not fit. For the service this is like a limit on threads, which root does not have.
#[test]
fn too_few_threads_are_an_error_with_advice() {
    // Stacks of 64 MiB and no arenas: what is left when the next stack does not fit is enough for the threads that start.
    let server = Server::new(None)
        .set("ADRIATICUM_WORKERS", 1024)
        .set("RUST_MIN_STACK", 64 << 20)
        .set("MALLOC_ARENA_MAX", 1);
    let limited = ["bash", "-c", "ulimit -v 500000; exec \"$@\"", "bash"];
    let output = server
        .prefixed(&limited, &["serve"])
        .output()
        .expect("the binary should run");
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(
        message.contains("can't start all threads: ") && message.contains("TasksMax="),
        "{message}"
    );
    assert!(!message.contains("panicked"), "{message}");
}

#[test]
fn a_start_logs_what_runs_and_where() {
    let server = Server::new(None).sqlite().start();
    let (_, port) = server.address.rsplit_once(':').expect("a port");
    for line in [
        format!(
            "adriaticum {}, database {}",
            adriaticum::VERSION,
            server.folder.path("adriaticum.db").display()
        ),
        format!("console at http://console.localhost:{port}/"),
    ] {
        until("the line is logged", || {
            server.log().contains(&format!("{line}\n"))
        });
    }
}

/// A local user who listened on [::1], where the service did not, got the keys of clients that use `localhost`.
#[test]
fn localhost_is_both_loopback_addresses() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime))
        .set("ADRIATICUM_LISTEN", "localhost:0")
        .start();
    let port = server
        .address
        .strip_prefix("127.0.0.1:")
        .expect("IPv4 first");
    let key = server.key();
    for host in ["127.0.0.1", "[::1]"] {
        let address = format!("{host}:{port}");
        let mut client = Client::new(TcpStream::connect(&address).expect("a connection"));
        client.send(request(&key, &chat("x")));
        client.reply().is_completion();
        let line = format!("listening on http://{address}\n");
        assert!(server.log().contains(&line), "{}", server.log());
    }
    let second = server.run(&["check"]);
    let printed = String::from_utf8_lossy(&second.stdout);
    assert!(!printed.contains("other hosts can reach"), "{printed}");
    let line = format!("console at http://console.localhost:{port}/\n");
    assert_eq!(server.log().matches(&line).count(), 1, "{}", server.log());
}

#[test]
fn localhost_is_not_shared_with_another_user() {
    // Another test may have the port of the thief on 127.0.0.1.
    until("only the thief has the port", || {
        let thief = TcpListener::bind("[::1]:0").expect("a port should be free");
        let port = thief.local_addr().expect("an address").port();
        let server = Server::new(None).set("ADRIATICUM_LISTEN", format!("localhost:{port}"));
        let output = server.run(&["serve"]);
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert!(
            message.contains("localhost is both 127.0.0.1 and [::1]"),
            "{message}"
        );
        let taken =
            format!("can't listen on http://[::1]:{port}: another program uses this address");
        message.contains(&taken) && TcpListener::bind(("127.0.0.1", port)).is_ok()
    });
}

#[test]
fn ipv6() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime))
        .set("ADRIATICUM_LISTEN", "[::1]:0")
        .set("ADRIATICUM_API_HOSTS", "::1")
        .start();
    let mut client = server.connect();
    client.send(request(&server.key(), &chat("x")).replace("api.test", "[::1]:8080"));
    client.reply().is_completion();
}

/// Starts the service as systemd does: with sockets from descriptor 3 on, meant for its process.
fn start_with_sockets(server: Server, first: impl AsFd, second: impl AsFd) -> Server {
    for socket in [first.as_fd(), second.as_fd()] {
        rustix::io::fcntl_setfd(socket, FdFlags::empty()).expect("a child may have it");
    }
    // Through two temporary descriptors, because the present numbers may be the ones that are needed.
    let script = format!(
        "exec 203<&{} 204<&{}; exec 3<&203 4<&204; LISTEN_PID=$$ LISTEN_FDS=2 exec \"$@\"",
        first.as_fd().as_raw_fd(),
        second.as_fd().as_raw_fd()
    );
    server.start_with(&["bash", "-c", &script, "bash"])
}

#[test]
fn sockets_that_are_handed_over() {
    let runtime = Runtime::start();
    let tcp = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
    let server = Server::new(Some(&runtime));
    let path = server.folder.path("handed.sock");
    let unix = UnixListener::bind(&path).expect("a socket");
    let mut server = start_with_sockets(server, &tcp, &unix);
    let key = server.key();
    let stream = TcpStream::connect(tcp.local_addr().expect("an address")).expect("a connection");
    let mut client = Client::new(stream);
    client.send(request(&key, &chat("x")));
    client.reply().is_completion();
    let mut client = Client::of(UnixStream::connect(&path).expect("a connection"));
    client.send(request(&key, &chat("x")));
    client.reply().is_completion();
    server.signal(Signal::TERM);
    assert!(server.wait().success());
    assert!(
        exists(&path),
        "a socket that was handed over is its owner's to remove"
    );
    TcpStream::connect(tcp.local_addr().expect("an address"))
        .expect("the owner's socket still listens");
}

#[test]
fn a_stop_answers_what_is_under_way_and_what_waits() {
    let runtime = Runtime::start();
    let mut server = Server::new(Some(&runtime))
        .set("ADRIATICUM_WORKERS", 1)
        .start();
    let key = server.key();
    let mut idle = server.connect();
    idle.send(request("none", &chat("x")));
    idle.reply().is_error(401, "invalid_api_key");
    let gate = Arc::new(AtomicBool::new(false));
    runtime.next(Script::Held(Arc::clone(&gate), completion("under way")));
    let mut under_way = server.connect();
    under_way.send(request(&key, &chat("x")));
    until("it is under way", || runtime.count() == 1);
    let mut waiting = server.connect();
    waiting.send(request(&key, &chat("x")));
    // The listener answers this one itself. It came later, so the waiting one has arrived too.
    let mut broken = server.connect();
    broken.send("broken\r\n\r\n");
    broken.reply().is_error(400, "invalid_request");
    server.signal(Signal::TERM);
    until("the stop is logged", || server.log().contains("stopping: "));
    assert!(
        server
            .log()
            .contains("[INFO] stopping: no new connections; waits for 2 requests\n"),
        "{}",
        server.log()
    );
    assert!(idle.ends(), "an idle connection ends");
    until("no connection is taken", || {
        TcpStream::connect(&server.address).is_err()
    });
    gate.store(true, Ordering::Release);
    assert_eq!(under_way.reply().is_completion(), "under way");
    let reply = waiting.reply();
    reply.is_completion();
    assert_eq!(reply.header("connection"), Some("close"));
    for mut client in [under_way, waiting] {
        assert!(client.ends());
    }
    assert!(server.wait().success());
}

#[test]
fn half_a_request_does_not_hold_a_stop_up_for_long() {
    let mut server = Server::new(None).start();
    let mut half = server.connect();
    half.send("POST /v1/chat");
    until("it was read", || {
        server.post("none", &chat("x")).status == 401
    });
    server.signal(Signal::INT);
    half.reply().is_error(400, "invalid_request");
    assert!(server.wait().success());
}

#[test]
fn a_second_signal_ends_it_at_once() {
    let runtime = Runtime::start();
    let mut server = Server::new(Some(&runtime)).start();
    let gate = Arc::new(AtomicBool::new(false));
    runtime.next(Script::Held(Arc::clone(&gate), completion("never")));
    let mut client = server.connect();
    client.send(request(&server.key(), &chat("x")));
    until("it is under way", || runtime.count() == 1);
    server.signal(Signal::TERM);
    until("it stops", || TcpStream::connect(&server.address).is_err());
    server.signal(Signal::INT);
    assert_eq!(server.wait().code(), Some(1));
    gate.store(true, Ordering::Release);
}

/// The signals that the process has handlers for, as a mask.
fn caught(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
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

#[test]
fn an_unknown_variable_is_warned_of() {
    let server = Server::new(None).set("ADRIATICUM_WORKER", 3).start();
    assert!(
        server
            .log()
            .contains("unknown variable in the environment: ADRIATICUM_WORKER (did you mean"),
        "{}",
        server.log()
    );
}

#[test]
fn a_second_service_on_the_same_database_is_refused() {
    let runtime = Runtime::start();
    let mut first = Server::new(Some(&runtime)).sqlite().start();
    let key = first.key();
    let gate = Arc::new(AtomicBool::new(false));
    runtime.next(Script::Held(Arc::clone(&gate), completion("under way")));
    let mut client = first.connect();
    client.send(request(&key, &chat("x")));
    until("it is under way", || runtime.count() == 1);
    let database = first.folder.path("adriaticum.db");
    let second = || Server::new(Some(&runtime)).set("ADRIATICUM_DATABASE", database.display());
    let mut refused = second().spawn(&[]);
    assert_eq!(refused.wait().code(), Some(1));
    let printed = refused.log();
    let holder = format!(
        "adriaticum.db: another adriaticum serve uses it (pid {})",
        first.pid()
    );
    assert!(
        printed.contains(&holder) && printed.contains("ADRIATICUM_DATABASE"),
        "{printed}"
    );
    gate.store(true, Ordering::Release);
    assert_eq!(
        client.reply().is_completion(),
        "under way",
        "the first one's requests are its own"
    );

    // Whatever ends the first, the next can start at once.
    first.signal(Signal::KILL);
    first.wait();
    let mut next = second().start();
    next.post(&key, &chat("x")).is_completion();
    next.signal(Signal::TERM);
    assert!(next.wait().success());
    second().start().post(&key, &chat("x")).is_completion();
}

/// Waits until it has stopped because another process may serve in its place.
#[track_caller]
fn stops(server: &mut Server, mut probe: Client, printed: &str) {
    // While it is probed, it finds out within a second.
    probe.send("GET /readyz HTTP/1.1\r\nHost: console.localhost\r\n\r\n");
    assert_eq!(server.wait().code(), Some(1), "{}", server.log());
    let log = server.log();
    assert!(
        log.lines()
            .any(|line| line.contains(printed) && line.ends_with(": this process stops")),
        "{log}"
    );
    let last = log.lines().last().unwrap_or_default();
    assert!(
        last.starts_with("adriaticum: the database ") && last.contains(printed),
        "{last}"
    );
}

/// Each of two services had a WAL of its own for one file, and half of the acknowledged rows were lost.
#[test]
fn a_second_service_on_another_name_of_the_file_is_refused() {
    let runtime = Runtime::start();
    let mut first = Server::new(Some(&runtime)).sqlite().start();
    let key = first.key();
    first.post(&key, &chat("x")).is_completion();
    let (folder, copy) = (first.folder.path(""), Folder::new());
    let (database, link) = (folder.join("adriaticum.db"), folder.join("link.db"));
    std::fs::hard_link(&database, &link).expect("a hard link");
    let linked = copy.path("linked");
    let run = Command::new("cp")
        .arg("-al")
        .args([&folder, &linked])
        .status();
    assert!(run.expect("cp should run").success());
    let at = |path: &Path| Server::new(Some(&runtime)).set("ADRIATICUM_DATABASE", path.display());
    let refuse = |path: &Path, holder: &str| {
        let mut refused = at(path).spawn(&[]);
        assert_eq!(refused.wait().code(), Some(1));
        let printed = refused.log();
        let message = format!(
            "{}: another adriaticum serve uses it (pid {holder}): stop that",
            path.display()
        );
        assert!(
            printed.contains(&message) && printed.contains("ADRIATICUM_DATABASE"),
            "{printed}"
        );
    };
    refuse(&link, "unknown");
    refuse(&linked.join("adriaticum.db"), &first.pid().to_string());
    // Without its lock file, the file itself is still locked.
    std::fs::remove_file(folder.join("adriaticum.db.lock")).expect("it is there");
    refuse(&database, "unknown");
    first.stdout_of(&["backup", "copy.db"]);
    let output = at(&link).run(&["restore", &folder.join("copy.db").display().to_string()]);
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.code() == Some(1) && printed.contains("(pid unknown)"),
        "{printed}"
    );
    first.post(&key, &chat("x")).is_completion();
    first.signal(Signal::TERM);
    assert!(first.wait().success());

    let mut next = at(&link).start();
    next.post(&key, &chat("x")).is_completion();
    refuse(&database, "unknown");
    next.signal(Signal::TERM);
    assert!(next.wait().success());
    assert!(
        next.stdout_of(&["usage", "verify"])
            .starts_with("3 rows, nothing wrong")
    );
}

#[test]
fn a_copy_made_of_hard_links_starts() {
    let runtime = Runtime::start();
    let mut first = Server::new(Some(&runtime)).sqlite().start();
    let key = first.key();
    first.post(&key, &chat("x")).is_completion();
    first.signal(Signal::TERM);
    assert!(first.wait().success());
    let copy = Folder::new();
    let run = Command::new("cp")
        .arg("-al")
        .args([first.folder.path(""), copy.path("linked")])
        .status();
    assert!(run.expect("cp should run").success());
    let database = copy.path("linked/adriaticum.db");
    assert!(database.metadata().expect("the copy").nlink() > 1);
    let second = Server::new(Some(&runtime))
        .set("ADRIATICUM_DATABASE", database.display())
        .start();
    second.post(&key, &chat("x")).is_completion();
}

/// A core file would have prompts and keys in it.
#[test]
fn a_crash_leaves_no_core_file() {
    let server =
        Server::new(None).start_with(&["bash", "-c", "ulimit -Sc unlimited; exec \"$@\"", "bash"]);
    let limits =
        std::fs::read_to_string(format!("/proc/{}/limits", server.pid())).expect("it runs");
    let core = limits
        .lines()
        .find(|line| line.starts_with("Max core file size"))
        .expect("a line");
    let values: Vec<&str> = core.split_whitespace().skip(4).take(2).collect();
    assert_eq!(values, ["0", "0"], "{core}");
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
    std::fs::remove_file(&config).expect("it should go");
    std::fs::write(&config, "log_level = 'debug'").expect("a file");
    drop(pipe);
    server.await_address();
    until("it has reloaded", || {
        server
            .log()
            .contains("configuration reloaded: log_level = debug")
    });
}

#[test]
fn a_service_that_was_replaced_stops() {
    // Without a runtime, a probe would not test the ledger.
    let runtime = Runtime::start();
    let mut server = Server::new(Some(&runtime)).sqlite().start();
    let probe = server.connect();
    server.query("UPDATE gateways SET epoch = epoch + 1");
    stops(
        &mut server,
        probe,
        "another process serves under the name of this gateway",
    );
}
