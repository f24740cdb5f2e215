//! What happens to requests when the database fails, and that they succeed again afterwards without a restart.
//! docs/ledger.md describes the same. tests/outside/full_disk.py tests a full disk and a read-only one.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rusqlite::Connection;
use rusqlite::types::Value::{Integer, Text};
use rustix::process::Signal;

use crate::budgets::with_clock;
use crate::console::{Browser, PASSWORD, set_password};
use crate::metrics::{metrics_key, value};
use crate::support::{Runtime, Server, chat, request, until};

const DAY: i64 = 86_400;

fn lock(server: &Server) -> Connection {
    let connection =
        Connection::open(server.folder.path("adriaticum.db")).expect("the database should open");
    connection
        .execute_batch("BEGIN IMMEDIATE")
        .expect("it should be free");
    connection
}

#[test]
fn a_lock_that_stays_fails_what_was_spent_in_time_and_the_next_write_ends_it() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let key = server.key();
    let other = lock(&server);
    let began = Instant::now();
    let mut clients: Vec<_> = (0..4).map(|_| server.connect()).collect();
    for client in &mut clients {
        client.send(request(&key, &chat("x")));
    }
    for client in &mut clients {
        let reply = client.reply();
        reply.is_error(503, "service_unavailable");
        assert_eq!(
            reply.header("x-should-retry"),
            Some("false"),
            "the inference is spent"
        );
    }
    let waited = began.elapsed();
    assert!(
        waited >= Duration::from_secs(19) && waited < Duration::from_secs(60),
        "{waited:?}: 20 s for all together, not 80 s one after the other"
    );
    assert_eq!(runtime.count(), 4);
    drop(other);
    until("a test write ends it", || {
        server.complete(&key).status == 200
    });
    server.has_logged("locked by another process");
    assert_eq!(
        server.query("SELECT count(*), sum(total_tokens) FROM usage"),
        [[Integer(1), Integer(14)]]
    );
}

/// A service that writes all the time leaves only moments between its transactions.
#[test]
fn a_key_is_revoked_within_five_seconds_beside_full_load() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).sqlite().start();
    let key = server.key();
    let others: Vec<String> = (0..5)
        .map(|number| server.stdout_of(&["keys", "create", &format!("other {number}")]))
        .collect();
    let is_done = AtomicBool::new(false);
    let revoked = thread::scope(|scope| {
        for _ in 0..32 {
            scope.spawn(|| {
                let mut client = server.connect();
                while !is_done.load(Ordering::Acquire) {
                    client.ask(request(&key, &chat("x"))).is_completion();
                }
            });
        }
        until("all of them were answered", || runtime.count() > 100);
        let revoke = |secret: &String| {
            let began = Instant::now();
            let output = server.run(&["keys", "revoke", secret.trim()]);
            let status = server.complete(secret.trim()).status;
            (output, status, began.elapsed())
        };
        let revoked: Vec<_> = others.iter().map(revoke).collect();
        is_done.store(true, Ordering::Release);
        revoked
    });
    for (output, status, took) in revoked {
        assert!(output.status.success(), "{output:?}");
        assert_eq!(status, 401);
        assert!(took < Duration::from_secs(5), "{took:?}");
    }
}

#[test]
fn retention_removes_nothing_after_a_jump_of_the_clock() {
    let runtime = Runtime::start();
    let now = 1_900_000_000;
    let (server, set_clock) = with_clock(Server::new(Some(&runtime)).sqlite(), now);
    let mut server = server.set("ADRIATICUM_USAGE_RETENTION_DAYS", 30).start();
    let key = server.key();
    (0..3).for_each(|_| _ = server.complete(&key).is_completion());
    server.signal(Signal::TERM);
    server.wait();
    let later = now + 3650 * DAY;
    set_clock(later);
    let mut server = server.start();
    until("the log says so", || {
        server.log().contains("retention removes nothing")
    });
    // The first request of the day may be one of a wrong clock, too.
    server.complete(&key).is_completion();
    server.signal(Signal::TERM);
    server.wait();
    assert_eq!(server.query("SELECT count(*) FROM usage"), [[Integer(4)]]);
    set_clock(later + DAY);
    let server = server.start();
    until("the old rows are gone", || {
        server.query("SELECT 1 FROM usage").len() == 1
    });
    let usage = server.stdout_of(&["usage", "--since", "2030-01-01"]);
    assert!(
        usage.contains("\n4 requests"),
        "no sum was removed: {usage}"
    );
    let old = format!("SELECT count(*) FROM audit WHERE created < {later}");
    assert_ne!(
        server.query(&old),
        [[Integer(0)]],
        "the audit is not touched"
    );
}

/// A jump of three hours removed sums of minutes, one of 401 days all hours, and no new backup could be restored then.
#[test]
fn a_clock_that_was_ahead_leaves_a_ledger_that_verifies_and_can_be_restored() {
    let runtime = Runtime::start();
    let now = 1_900_000_000;
    let (server, set_clock) = with_clock(Server::new(Some(&runtime)).sqlite(), now);
    let mut server = server.set("ADRIATICUM_USAGE_RETENTION_DAYS", 30).start();
    let key = server.key();
    let mut requests = 0;
    for ahead in [3 * 3600, 8 * DAY, 3650 * DAY] {
        // Before the jump, during it, after a restart, and when the clock was corrected.
        for (time, is_restarted) in [
            (now, false),
            (now + ahead, false),
            (now + ahead, true),
            (now + 60, false),
        ] {
            set_clock(time);
            if is_restarted {
                server.signal(Signal::TERM);
                server.wait();
                server = server.start();
            }
            server.complete(&key).is_completion();
            requests += 1;
            let verified = server.stdout_of(&["usage", "verify"]);
            assert!(
                verified.starts_with(&format!("{requests} row"))
                    && verified.contains("nothing wrong"),
                "{verified}"
            );
        }
        let copy = format!("copy-{ahead}.db");
        server.stdout_of(&["backup", &copy]);
        server.signal(Signal::TERM);
        server.wait();
        server.stdout_of(&["restore", &copy]);
        server = server.start();
    }
    let sums = "SELECT sum(requests) FROM usage_days";
    assert_eq!(server.query(sums), [[Integer(requests)]]);
    // Retention, months later: the rows of the wrong clock do not hold back the others, and their sums stay.
    server.signal(Signal::TERM);
    server.wait();
    set_clock(now + 40 * DAY);
    server = server.start();
    server.complete(&key).is_completion();
    server.signal(Signal::TERM);
    server.wait();
    set_clock(now + 41 * DAY);
    server = server.start();
    until("the old rows are gone", || {
        server.query("SELECT 1 FROM usage").len() == 1
    });
    let verified = server.stdout_of(&["usage", "verify"]);
    assert!(
        verified.starts_with("1 row, nothing wrong") && verified.contains("can't be proven"),
        "{verified}"
    );
    assert_eq!(server.query(sums), [[Integer(requests + 1)]]);
}

#[test]
fn an_idle_service_writes_nothing_and_neither_does_a_page_or_a_scrape() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).sqlite().start();
    let (key, watcher) = (server.key(), metrics_key(&server));
    assert!(set_password(&server, PASSWORD).status.success());
    let mut browser = Browser::signed_in(&server);
    server.complete(&key).is_completion();
    let id = |query: &str| match &server.query(query)[0][0] {
        Text(id) => id.clone(),
        other => panic!("{other:?}"),
    };
    let request = id("SELECT request_id FROM usage");
    let key = id("SELECT id FROM keys LIMIT 1");
    let wal = server.folder.path("adriaticum.db-wal");
    let written = || {
        fs::metadata(&wal)
            .and_then(|file| file.modified())
            .expect("the WAL")
    };
    let (before, began) = (written(), Instant::now());
    let pages = [
        "/",
        "/keys",
        "/keys/new",
        &format!("/keys/{key}"),
        "/usage",
        "/usage/totals.csv",
        "/requests",
        "/requests/export.csv",
        &format!("/requests/{request}"),
        "/status",
        "/audit",
        "/sign-in",
    ];
    for page in pages {
        let reply = browser.get(page);
        assert!([200, 303].contains(&reply.status), "{page}: {reply:?}");
        assert_eq!(value(&server, &watcher, "adriaticum_ledger_available"), 1.0);
        assert_eq!(written(), before, "{page}");
    }
    // Longer than the pause between two looks at the database, which only read.
    until("it was idle", || began.elapsed() > Duration::from_secs(12));
    assert_eq!(written(), before);
}
