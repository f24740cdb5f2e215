//! What happens to requests when the database fails, and that they succeed again afterwards without a restart.
//! docs/ledger.md describes the same. tests/outside/full_disk.py tests a full disk and a read-only one.

use std::fs;
use std::time::{Duration, Instant};

use rusqlite::Connection;
use rusqlite::types::Value::Integer;
use rustix::process::Signal;

use crate::console::{Browser, PASSWORD, set_password};
use crate::support::{Runtime, Script, Server, chat, completion, request, until};

fn lock(server: &Server) -> Connection {
    let connection = Connection::open(server.folder.path("adriaticum.db")).expect("the database should open");
    connection.execute_batch("BEGIN IMMEDIATE").expect("it should be free");
    connection
}

#[test]
fn a_lock_that_passes_is_waited_for() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let key = server.key();
    let other = lock(&server);
    let mut client = server.connect();
    client.send(request(&key, &chat("x")));
    // A key is looked up while another process writes: reads do not wait for writes.
    server.post("adr_0", &chat("x")).is_error(401, "invalid_api_key");
    assert_eq!(runtime.count(), 0, "no inference before the row is there");
    other.execute_batch("ROLLBACK").expect("the lock goes");
    client.reply().is_completion();
}

#[test]
fn a_lock_that_stays_is_503_before_any_inference() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let key = server.key();
    let other = lock(&server);
    let began = Instant::now();
    let mut clients: Vec<_> = (0..8).map(|_| server.connect()).collect();
    for client in &mut clients {
        client.send(request(&key, &chat("x")));
    }
    for client in &mut clients {
        let reply = client.reply();
        reply.is_error(503, "service_unavailable");
        assert_eq!(reply.header("x-should-retry"), None, "nothing was spent: a client may try again");
    }
    let waited = began.elapsed();
    assert!(
        waited >= Duration::from_secs(5) && waited < Duration::from_secs(35),
        "{waited:?}: 5 s for all together, not 40 s one after the other"
    );
    assert_eq!(runtime.count(), 0);
    drop(other);
    server.post(&key, &chat("x")).is_completion();
    assert!(server.log().contains("locked by another process"), "{}", server.log());
}

#[test]
fn a_lock_during_the_inference_holds_the_answer_back() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let key = server.key();
    let gate = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    runtime.next(Script::Held(std::sync::Arc::clone(&gate), completion("late")));
    let mut client = server.connect();
    client.send(request(&key, &chat("x")));
    until("it is at the runtime", || runtime.count() == 1);
    let other = lock(&server);
    gate.store(true, std::sync::atomic::Ordering::Release);
    let reply = client.reply();
    reply.is_error(503, "service_unavailable");
    assert_eq!(reply.header("x-should-retry"), Some("false"), "the inference is spent");
    drop(other);
    server.post(&key, &chat("x")).is_completion();
}

#[test]
fn a_file_that_was_removed_or_replaced_is_not_written_on() {
    for (name, replace) in [("adriaticum.db", false), ("adriaticum.db-wal", false), ("adriaticum.db", true)] {
        let runtime = Runtime::start();
        let server = Server::new(Some(&runtime)).start();
        let key = server.key();
        server.post(&key, &chat("x")).is_completion();
        let path = server.folder.path(name);
        let aside = server.folder.path("aside");
        fs::rename(&path, &aside).expect("the file should move");
        if replace {
            fs::copy(&aside, &path).expect("another in its place");
        }
        server.post(&key, &chat("x")).is_error(503, "service_unavailable");
        assert_eq!(runtime.count(), 1, "{name}: no inference for a row that would be lost");
        assert!(server.log().contains("was removed, replaced or truncated"), "{}", server.log());
        fs::rename(&aside, &path).expect("the file should move back");
        server.post(&key, &chat("x")).is_completion();
    }
}

#[test]
fn a_damaged_page_is_refused_at_the_start_and_nothing_is_made_anew() {
    let runtime = Runtime::start();
    let mut server = Server::new(Some(&runtime)).start();
    let key = server.key();
    for _ in 0..30 {
        server.post(&key, &chat("x")).is_completion();
    }
    server.signal(Signal::TERM);
    server.wait();
    let path = server.folder.path("adriaticum.db");
    let good = fs::read(&path).expect("the database");
    for page in 0..good.len() / 4096 {
        let mut damaged = good.clone();
        damaged[page * 4096..(page + 1) * 4096].fill(0xa5);
        fs::write(&path, &damaged).expect("a damaged database");
        let output = server.run(&["serve"]);
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "page {page}: {printed}");
        assert!(printed.contains("damaged") && printed.contains(".recover"), "page {page}: {printed}");
        assert!(fs::read(&path).expect("the database") == damaged, "page {page}: it was written to");
    }
    fs::write(&path, &good).expect("the good one");
    let server = server.start();
    server.post(&key, &chat("x")).is_completion();
}

/// SQLite deletes the WAL of an empty database, and every row in it.
#[test]
fn a_database_that_has_lost_its_content_is_not_a_new_one() {
    let runtime = Runtime::start();
    let mut server = Server::new(Some(&runtime)).sqlite().start();
    let (path, wal) = (server.folder.path("adriaticum.db"), server.folder.path("adriaticum.db-wal"));
    let created = format!("created the database {}", path.display());
    assert!(server.log().contains(&created), "{}", server.log());
    server.key();
    server.signal(Signal::KILL);
    server.wait();
    let size = wal.metadata().expect("the WAL").len();
    for remove in [false, true] {
        match remove {
            false => fs::write(&path, "").expect("an empty file"),
            true => fs::remove_file(&path).expect("no file"),
        }
        for command in [&["serve"][..], &["keys", "list"], &["keys", "create", "x"]] {
            let output = server.run(command);
            let printed = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(1), "{command:?}: {printed}");
            let found = format!("{} beside it has {size} bytes", wal.display());
            assert!(
                printed.contains(&found) && printed.contains("Restore a backup, or delete both"),
                "{printed}"
            );
        }
    }
    assert_eq!(wal.metadata().expect("the WAL is still there").len(), size);
    fs::remove_file(&wal).expect("the WAL");
    let server = server.start();
    assert!(server.log().contains(&created), "{}", server.log());
}

/// The clock is ten years ahead: the other way round, everything in the database is ten years old.
#[test]
fn retention_removes_nothing_after_a_jump_of_the_clock() {
    let runtime = Runtime::start();
    let mut server = Server::new(Some(&runtime)).sqlite().start();
    let key = server.key();
    assert!(set_password(&server, PASSWORD).status.success());
    (0..3).for_each(|_| _ = server.post(&key, &chat("x")).is_completion());
    server.signal(Signal::TERM);
    server.wait();
    for (table, column) in [("usage", "created"), ("audit", "created"), ("gateways", "last_seen")] {
        server.query(&format!("UPDATE {table} SET {column} = {column} - 3650 * 86400"));
    }
    let rows = "SELECT (SELECT count(*) FROM usage), (SELECT count(*) FROM audit WHERE created < unixepoch() - 86400),
        last_seen FROM gateways";
    let before = server.query(rows);
    let mut server = server.set("ADRIATICUM_USAGE_RETENTION_DAYS", 30);
    // A restart does not make the clock trusted.
    for _ in 0..2 {
        server = server.start();
        until("the log says so", || server.log().contains("retention removes nothing"));
        assert_eq!(server.query(rows), before);
        let printed = String::from_utf8_lossy(&server.run(&["check"]).stdout).into_owned();
        let clock = printed.lines().find(|line| line.contains(" clock ")).unwrap_or_default();
        assert!(clock.starts_with("warn") && clock.contains("retention removes nothing"), "{printed}");
        let mut browser = Browser::signed_in(&server);
        until("the status page says so", || {
            browser.get("/status").text().contains("retention removes nothing")
        });
        server.signal(Signal::TERM);
        server.wait();
        assert_eq!(server.query(rows), before, "the heartbeat does not follow the clock either");
    }
    assert_eq!(before[0][0], Integer(3));
    server.query("UPDATE gateways SET last_seen = unixepoch() - 86000");
    let server = server.start();
    until("the old rows are gone", || server.query("SELECT 1 FROM usage").is_empty());
}

#[test]
fn the_heartbeat_follows_the_clock() {
    // Without a runtime, a probe would not test the ledger.
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).sqlite().start();
    server.query("UPDATE gateways SET last_seen = last_seen - 80000");
    let mut probe = server.connect();
    probe.send("GET /readyz HTTP/1.1\r\nHost: console.localhost\r\n\r\n");
    until("it is seen", || {
        server.query("SELECT last_seen > unixepoch() - 60 FROM gateways") == [[Integer(1)]]
    });
}

#[test]
fn the_audit_has_its_retention_even_if_that_of_the_ledger_fails() {
    let runtime = Runtime::start();
    let mut server = Server::new(Some(&runtime)).sqlite().start();
    server.post(&server.key(), &chat("x")).is_completion();
    server.signal(Signal::TERM);
    server.wait();
    server.query("UPDATE usage SET created = created - 10 * 86400");
    server.query("UPDATE audit SET created = created - 10 * 86400");
    server.query("CREATE TRIGGER keep BEFORE DELETE ON usage WHEN OLD.seq IS NOT NULL BEGIN SELECT RAISE(ABORT, 'on purpose'); END");
    let server = server.set("ADRIATICUM_USAGE_RETENTION_DAYS", 7).start();
    until("the audit's rows are gone", || server.query("SELECT 1 FROM audit").is_empty());
    assert_eq!(server.query("SELECT count(*) FROM usage"), [[Integer(1)]]);
    assert!(server.log().contains("retention failed: on purpose"), "{}", server.log());
}

#[test]
fn old_rows_are_removed_while_it_serves() {
    let runtime = Runtime::start();
    let mut server = Server::new(Some(&runtime)).start();
    let key = server.key();
    let serve_rows = |server: &mut Server, count: usize| {
        (0..count).for_each(|_| _ = server.post(&key, &chat("x")).is_completion());
        server.signal(Signal::TERM);
        server.wait();
    };
    serve_rows(&mut server, 3);
    // Ten days pass for the first three rows and their sums. Their hashes do not fit any more, but the walk
    // afterwards begins after them.
    server.query("UPDATE usage SET created = created - 10 * 86400 RETURNING seq");
    server.query("UPDATE usage_rollup SET start = start - 10 * 86400 RETURNING start");
    let mut server = server.start();
    serve_rows(&mut server, 2);
    let server = server.set("ADRIATICUM_USAGE_RETENTION_DAYS", 7).start();
    until("the old rows are gone", || server.query("SELECT 1 FROM usage").len() == 2);
    server.post(&key, &chat("x")).is_completion();
    let message = server.stdout_of(&["usage", "verify"]);
    assert!(message.starts_with("3 rows, nothing wrong"), "{message}");
    assert!(message.contains(" can't be proven: retention has removed their rows.\n"), "{message}");
    assert!(server.stdout_of(&["usage"]).starts_with("6 requests"), "what they add up to stays");
    until("it is printed", || server.log().contains("removed 3 rows older than 7 days"));
}
