//! The log: what strangers may add to it, and a standard error that is not read.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::Instant;

use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};
use rustix::process::Signal;

use crate::support::{Client, PATIENCE, Runtime, Server, chat, request, until};

const SUMMARY: &str = "further requests refused without a valid key in the last ";

/// Keys that do not exist were logged one by one, 5 MB per second on 8 connections.
#[test]
fn refusals_of_strangers_have_few_lines_and_a_summary() {
    let runtime = Runtime::start();
    let mut server = Server::new(Some(&runtime)).start();
    let key = server.key();
    let unknown = request(&format!("adr_{}", "0".repeat(48)), &chat("x"));
    let without =
        "POST /v1/chat/completions HTTP/1.1\r\nHost: api.test\r\nContent-Length: 0\r\n\r\n"
            .to_owned();
    let elsewhere = "GET / HTTP/1.1\r\nHost: api.test\r\n\r\n".to_owned();
    let began = Instant::now();
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for (request, status) in
                    [(&unknown, 401), (&without, 401), (&elsewhere, 404)].repeat(4)
                {
                    let mut client = server.connect();
                    client.send(request.repeat(30));
                    (0..30).for_each(|_| assert_eq!(client.reply().status, status));
                }
            });
        }
    });
    server.post(&key, &chat("x")).is_completion();
    server.signal(Signal::TERM);
    assert!(server.wait().success());
    let log = server.log();
    let lines = log
        .lines()
        .filter(|line| line.contains(" status=4"))
        .count() as u64;
    assert!(
        (20..=21 + began.elapsed().as_secs()).contains(&lines),
        "{lines} lines:\n{log}"
    );
    assert_eq!(log.matches(" status=200 ").count(), 1, "{log}");
    let summed: u64 = log
        .lines()
        .filter_map(|line| {
            line.split_once(SUMMARY)?
                .1
                .split_once(" s: ")?
                .1
                .split(' ')
                .next()?
                .parse::<u64>()
                .ok()
        })
        .sum();
    assert_eq!(lines + summed, 8 * 3 * 4 * 30, "{log}");
    for cause in [
        "(",
        "unknown_key ",
        "no_key ",
        "route ",
        "), most from 127.0.0.1\n",
    ] {
        assert!(
            log.split_once(SUMMARY)
                .is_some_and(|(_, summary)| summary.contains(cause)),
            "{log}"
        );
    }
}

/// Fills a pipe until it takes no further byte.
fn fill(mut pipe: &File) {
    for size in [4096, 1] {
        while pipe.write(&vec![b'.'; size]).is_ok() {}
    }
}

fn connect(path: &Path) -> Client<UnixStream> {
    let stream = UnixStream::connect(path).expect("it should take a connection");
    stream
        .set_read_timeout(Some(PATIENCE))
        .expect("a timeout can be set");
    Client::of(stream)
}

/// Everything waited for standard error: the API, the probes and the stop.
#[test]
fn a_standard_error_that_is_not_read_blocks_nothing() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).set("ADRIATICUM_LOG_LEVEL", "debug");
    let (socket, path) = (server.folder.path("api.sock"), server.folder.path("pipe"));
    mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a pipe with a name");
    let nonblocking = OFlags::NONBLOCK.bits() as i32;
    let pipe = File::options()
        .read(true)
        .write(true)
        .custom_flags(nonblocking)
        .open(&path)
        .expect("a pipe");
    let key = server.key();
    let mut server = server
        .set("ADRIATICUM_LISTEN", format!("unix:{}", socket.display()))
        .spawn(&["bash", "-c", "exec \"$@\" 2> pipe", "bash"]);
    until("it listens", || UnixStream::connect(&socket).is_ok());
    fill(&pipe);
    // Each has a line at the level `debug`, all together more than the buffer takes.
    for _ in 0..25 {
        let mut client = connect(&socket);
        client.send("GET / HTTP/1.1\r\nHost: api.test\r\n\r\n".repeat(100));
        (0..100).for_each(|_| _ = client.reply().is_error(404, "not_found"));
    }
    let mut client = connect(&socket);
    client.send(request(&key, &chat("x")));
    client.reply().is_completion();
    for path in ["/healthz", "/readyz"] {
        client.send(format!(
            "GET {path} HTTP/1.1\r\nHost: console.localhost\r\n\r\n"
        ));
        assert_eq!(client.reply().status, 200, "{path}");
    }
    // A change of state finds room although lines about requests are dropped.
    server.signal(Signal::HUP);
    let mut log = String::new();
    until("what was kept is written", || {
        let mut bytes = [0; 65536];
        let count = (&pipe).read(&mut bytes).unwrap_or(0);
        log += &String::from_utf8_lossy(&bytes[..count]);
        log.contains("configuration reloaded") && log.contains(" log lines dropped: ")
    });
    assert!(log.matches("[DEBUG]").count() > 100, "{log}");
    fill(&pipe);
    client.send(request(&key, &chat("x")));
    client.reply().is_completion();
    server.signal(Signal::TERM);
    assert_eq!(server.wait().code(), Some(0));
}
