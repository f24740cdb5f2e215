//! Start and stop: sockets, signals and leftover files.

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};
use rustix::process::{Pid, Signal, kill_process};

use crate::support::{Folder, PATIENCE, Runtime, Server, chat, exists, until};

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
