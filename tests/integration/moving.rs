//! `move`: a ledger goes from SQLite to PostgreSQL.

use std::os::unix::fs::symlink;
use std::process::Command;
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use adriaticum::database::{Access, DatabaseLocation};
use adriaticum::ledger::{LedgerRow, Tokens};
use adriaticum::store::Store;
use rusqlite::types::Value::Integer;
use rustix::process::{Pid, Signal, kill_process};

use crate::console::{Browser, PASSWORD, set_password};
use crate::postgres_server::PostgresServer;
use crate::support::{BINARY, Runtime, Server, chat, until};

const ROWS: i64 = 40_000;
const WRITERS: i64 = 8;

/// Writes rows of the last 60 days, with every kind of outcome.
fn fill(store: &Store) {
    let keys = store.keys.list().expect("the keys");
    let start = now() - 60 * 86_400;
    let write = |n: i64| {
        let (key, is_measured, is_grounded) =
            (&keys[n as usize % keys.len()], n % 10 < 3, n % 2 == 1);
        let (created, tokens) = (start + n * (60 * 86_400 / ROWS), |tokens| {
            is_measured.then_some(tokens)
        });
        let (status, error_code) = match n % 10 {
            3 => (Some(502), Some("inference_error")),
            7 => (None, Some("abandoned")),
            _ => (Some(200), None),
        };
        let row = LedgerRow {
            request_id: format!("chatcmpl_{:012x}{n:020x}", created * 1000),
            key_id: key.id.clone(),
            key_name: key.name.to_string(),
            created,
            status,
            error_code: error_code.map(String::from),
            cause: error_code.map(|_| "timeout".into()),
            tokens: Tokens {
                prompt_tokens: tokens(n),
                completion_tokens: tokens(1),
                total_tokens: tokens(n + 1),
            },
            duration_ms: Some(n as f64 / 7.0),
            queue_ms: Some(0.1),
            runtime_ms: Some(n as f64 / 9.0),
            grounded: is_grounded,
            search_reason: is_grounded.then(|| "match".into()),
            search_results: is_grounded.then_some(3),
            search_ms: is_grounded.then_some(0.5),
            ..LedgerRow::default()
        };
        store.ledger.append(row, None).expect("a row");
    };
    // Rows that several threads write at once share a transaction.
    thread::scope(|scope| {
        for first in 0..WRITERS {
            scope.spawn(move || (first..ROWS).step_by(WRITERS as usize).for_each(write));
        }
    });
}

fn now() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("a time after 1970")
        .as_secs() as i64
}

fn path(server: &Server) -> String {
    server.folder.path("adriaticum.db").display().to_string()
}

/// What a command prints on both outputs, and its exit code.
fn moved(server: &Server, from: &str, to: &str) -> (Option<i32>, String) {
    let output = server.run(&["move", "--from", from, "--to", to]);
    let printed = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(
        !printed.contains("secret"),
        "the password is printed: {printed}"
    );
    (output.status.code(), printed)
}

fn tables(uri: &str) -> Vec<Vec<rusqlite::types::Value>> {
    let server = Server::new(None).set("ADRIATICUM_DATABASE", uri);
    server.query("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")
}

/// What the commands say of the ledger.
fn reports(server: &Server) -> Vec<String> {
    let mut reports: Vec<String> = ["hour", "day", "month", "key", "status"]
        .map(|by| server.stdout_of(&["usage", "--until", "2100-01-01", "--by", by, "--json"]))
        .to_vec();
    reports.push(server.stdout_of(&["usage", "--until", "2100-01-01"]));
    reports.push(server.stdout_of(&["usage", "verify"]));
    reports.push(server.stdout_of(&["keys", "list", "--json"]));
    reports
}

/// The figures that the console shows. The session of one server is valid on the other.
fn figures(browser: &mut Browser) -> Vec<String> {
    let mut figures = Vec::new();
    for page in [
        "/usage?range=90d",
        "/usage?range=7d",
        "/usage?range=30d&outcome=failed",
    ] {
        let reply = browser.get(page);
        assert_eq!(reply.status, 200, "signed in");
        figures.extend(reply.text().split("<strong>").skip(1).map(|rest| {
            rest.split("</strong>")
                .next()
                .unwrap_or_default()
                .to_owned()
        }));
    }
    figures
}

#[test]
fn a_ledger_is_the_same_afterwards() {
    let server = Server::new(None).sqlite();
    (0..3).for_each(|_| drop(server.key()));
    assert!(set_password(&server, PASSWORD).status.success());
    let store = Store::open(
        &DatabaseLocation::Sqlite(path(&server).into()),
        Access::Existing,
    )
    .expect("the database");
    fill(&store);
    drop(store);
    let before = reports(&server);
    assert!(
        before[5].contains("\n40,000 requests, 8,000 errors"),
        "{}",
        before[5]
    );
    let mut server = server.start();
    let mut browser = Browser::signed_in(&server);
    let (cookies, figures_before) = (browser.cookies.clone(), figures(&mut browser));
    let uri = PostgresServer::shared().database();
    let (code, printed) = moved(&server, &path(&server), &uri);
    assert!(
        code == Some(1) && printed.contains("another adriaticum serve uses it"),
        "{printed}"
    );
    server.signal(Signal::TERM);
    assert!(server.wait().success());

    // A kill in the middle leaves nothing, so that the move can be repeated.
    let mut moving = server
        .command(&["move", "--from", &path(&server), "--to", &uri])
        .spawn()
        .expect("it should start");
    let target = Server::new(None).set("ADRIATICUM_DATABASE", &uri);
    // Other tests move to other databases of the same server.
    let copying = "SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND query LIKE 'INSERT INTO usage (%'";
    until("rows are copied", || {
        target.query(copying) == [[Integer(1)]]
    });
    let pid = Pid::from_raw(moving.id() as i32).expect("a pid");
    kill_process(pid, Signal::STOP).expect("it should be running");
    assert_eq!(tables(&uri), [[Integer(0)]], "half a copy is never visible");
    let changed = server.run(&["keys", "create", "meanwhile"]);
    assert_eq!(changed.status.code(), Some(1), "a change now would be lost");
    assert!(String::from_utf8_lossy(&changed.stderr).contains("locked by another process"));
    moving.kill().expect("it should be running");
    moving.wait().expect("its end");
    let (code, printed) = moved(&server, &path(&server), &uri);
    assert_eq!(code, Some(0), "{printed}");
    assert!(
        printed.contains("3 keys and 40,000 rows moved from ")
            && printed.contains(" to postgresql://"),
        "{printed}"
    );
    let (code, printed) = moved(
        &server,
        &path(&server),
        &PostgresServer::shared().database(),
    );
    assert!(
        code == Some(1) && printed.contains("everything in it was moved to "),
        "{printed}"
    );
    let other = Server::new(None).sqlite();
    other.key();
    let (code, printed) = moved(&other, &path(&other), &uri);
    assert!(
        code == Some(1) && printed.contains("it has a ledger already"),
        "{printed}"
    );

    let server = server.set("ADRIATICUM_DATABASE", &uri);
    assert_eq!(reports(&server), before);
    let server = server.start();
    let mut browser = Browser::new(&server);
    browser.cookies = cookies;
    assert_eq!(figures(&mut browser), figures_before);
}

#[test]
fn the_keys_and_the_chain_work_afterwards() {
    let runtime = Runtime::start();
    let mut server = Server::new(Some(&runtime)).sqlite().start();
    let key = server.key();
    server.post(&key, &chat("x")).is_completion();
    server.signal(Signal::TERM);
    assert!(server.wait().success());
    let head = server.stdout_of(&["usage", "verify"]);
    let uri = PostgresServer::shared().database();
    let (user, rest) = uri.split_once(":secret@").expect("a password");
    std::fs::write(server.folder.path("password"), "secret\n").expect("a file");
    let file = server.folder.path("password").display().to_string();
    let server = server.set("ADRIATICUM_DATABASE_PASSWORD_FILE", file);
    let (code, printed) = moved(&server, &path(&server), &format!("{user}@{rest}"));
    assert_eq!(code, Some(0), "{printed}");
    let query = Server::new(None).set("ADRIATICUM_DATABASE", &uri);
    let chain = "SELECT name = '', epoch, anchor_seq FROM gateways";
    assert_eq!(
        query.query(chain),
        [[Integer(1), Integer(0), Integer(0)]],
        "no gateway has this name"
    );
    let server = server
        .set("ADRIATICUM_DATABASE", format!("{user}@{rest}"))
        .start();
    assert!(
        server
            .stdout_of(&["usage"])
            .contains("\n1 request, 0 errors")
    );
    server.post(&key, &chat("x")).is_completion();
    let (_, head) = head.trim_end().rsplit_once(' ').expect("a head");
    let printed = server.stdout_of(&["usage", "verify", "--through", head]);
    assert!(
        printed.starts_with("2 rows, nothing wrong.") && printed.contains("is part of the chain"),
        "{printed}"
    );
}

/// A host restarted weeks after the move, and its old service with it: it answered clients and wrote a second ledger.
#[test]
fn the_forgotten_old_service_is_refused() {
    let runtime = Runtime::start();
    let mut server = Server::new(Some(&runtime)).sqlite().start();
    let key = server.key();
    server.post(&key, &chat("x")).is_completion();
    server.signal(Signal::TERM);
    assert!(server.wait().success());
    let uri = PostgresServer::shared().database();
    let (code, printed) = moved(&server, &path(&server), &uri);
    assert_eq!(code, Some(0), "{printed}");
    let (_, place) = uri.split_once(":secret@").expect("a password");
    let target = format!(
        "postgresql://adriaticum@{}",
        place.split('?').next().expect("a part")
    );
    let undo = format!("sqlite3 {} 'DELETE FROM moved'", path(&server));
    let refused = |arguments: &[&str], code: i32| {
        let output = server.run(arguments);
        let printed =
            String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {printed}");
        let names_both =
            printed.contains(&format!("was moved to {target}: ")) && printed.contains(&undo);
        assert!(
            names_both && !printed.contains("secret"),
            "{arguments:?}: {printed}"
        );
    };
    // As a wrong setting, so that systemd does not restart it every second.
    refused(&["serve"], 2);
    refused(&["check"], 1);
    refused(&["keys", "create", "lost"], 2);
    refused(&["keys", "rename", "test", "lost"], 2);
    refused(&["keys", "set", "test", "--expires", "1h"], 2);
    refused(&["keys", "revoke", "test"], 2);
    refused(&["console", "password"], 2);
    refused(
        &[
            "move",
            "--from",
            &path(&server),
            "--to",
            &PostgresServer::shared().database(),
        ],
        1,
    );
    for reading in [
        &["keys", "list"][..],
        &["usage"],
        &["usage", "verify"],
        &["audit"],
        &["backup", "copy.db"],
    ] {
        server.stdout_of(reading);
    }
    let copy = Server::new(None).set(
        "ADRIATICUM_DATABASE",
        server.folder.path("copy.db").display().to_string(),
    );
    let output = copy.run(&["serve"]);
    assert!(
        String::from_utf8_lossy(&output.stderr).contains(&target),
        "a backup has the mark"
    );

    let at_target = Server::new(Some(&runtime))
        .set("ADRIATICUM_DATABASE", &uri)
        .start();
    assert_eq!(
        at_target.query("SELECT count(*) FROM moved"),
        [[Integer(0)]],
        "the mark is not copied"
    );
    at_target.post(&key, &chat("x")).is_completion();

    let undone = Command::new("sh")
        .args(["-c", &undo])
        .status()
        .expect("a shell");
    assert!(undone.success(), "{undo}");
    server.start().post(&key, &chat("x")).is_completion();
}

/// Neither database can know about the other's commit, so after a crash between both the operator decides.
#[test]
fn a_source_that_is_not_marked_is_named_and_both_are_usable() {
    let server = Server::new(None).sqlite();
    server.key();
    let source = rusqlite::Connection::open(path(&server)).expect("the database");
    let on_mark = |action: &str| {
        let trigger = format!(
            "DROP TRIGGER IF EXISTS mark; CREATE TRIGGER mark BEFORE INSERT ON moved BEGIN {action}; END"
        );
        source.execute_batch(&trigger).expect("a trigger");
    };
    on_mark("SELECT RAISE(ABORT, 'no mark')");
    let (code, printed) = moved(
        &server,
        &path(&server),
        &PostgresServer::shared().database(),
    );
    assert_eq!(code, Some(1), "{printed}");
    for part in [
        "1 key and 0 rows moved",
        "could not be marked as moved: no mark.",
        "Do not start the service",
    ] {
        assert!(printed.contains(part), "{part}: {printed}");
    }
    on_mark(
        "SELECT count(*) FROM (WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n) SELECT n FROM n)",
    );
    let uri = PostgresServer::shared().database();
    let mut moving = server
        .command(&["move", "--from", &path(&server), "--to", &uri])
        .spawn()
        .expect("it should start");
    until("the target is committed", || tables(&uri) != [[Integer(0)]]);
    moving.kill().expect("it should be running");
    moving.wait().expect("its end");
    source
        .execute_batch("DROP TRIGGER mark")
        .expect("no trigger");
    let target = Server::new(None).set("ADRIATICUM_DATABASE", &uri);
    assert_eq!(
        server.stdout_of(&["keys", "list"]),
        target.stdout_of(&["keys", "list"])
    );
    drop((server.start(), target.start()));
}

/// A dump knows nothing of revocations that came after it. The documentation has the commands that repeat them.
#[test]
fn revocations_are_repeated_after_a_dump_is_restored() {
    let runtime = Runtime::start();
    let uri = PostgresServer::shared().database();
    let mut server = Server::new(Some(&runtime))
        .set("ADRIATICUM_DATABASE", &uri)
        .start();
    let key = |name: &str| {
        server
            .stdout_of(&["keys", "create", name])
            .trim()
            .to_owned()
    };
    let (leaked, good) = (key("leaked"), key("good"));
    // The commands find the program by its name.
    symlink(BINARY, server.folder.path("adriaticum")).expect("a link");
    let programs = format!(
        "{}:{}",
        server.folder.path("").display(),
        std::env::var("PATH").expect("a path")
    );
    let shell = |server: &Server, command: &str| {
        let output = server
            .prefixed(&["bash", "-c", command], &[])
            .env("PATH", &programs)
            .output()
            .expect("bash");
        assert!(
            output.status.success(),
            "{command}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    };
    shell(&server, &format!("pg_dump -Fc -f dump '{uri}'"));
    server.stdout_of(&["keys", "revoke", "leaked"]);
    server
        .post(&leaked, &chat("x"))
        .is_error(401, "invalid_api_key");
    let documented = include_str!("../../docs/cluster.md");
    let documented = documented
        .split("revives the keys")
        .nth(1)
        .expect("the section");
    let mut commands = documented
        .split("```")
        .nth(1)
        .expect("the commands")
        .lines()
        .filter(|line| !line.is_empty());
    let (save, repeat) = (
        commands.next().expect("a command"),
        commands.next().expect("a command"),
    );
    assert_eq!(commands.next(), None);
    shell(&server, save);
    server.signal(Signal::TERM);
    assert!(server.wait().success());
    shell(&server, &format!("pg_restore --clean -d '{uri}' dump"));
    let server = server.start();
    server.post(&leaked, &chat("x")).is_completion();
    shell(&server, repeat);
    server
        .post(&leaked, &chat("x"))
        .is_error(401, "invalid_api_key");
    server.post(&good, &chat("x")).is_completion();
}

#[test]
fn what_can_not_be_moved_is_refused() {
    let server = Server::new(None).sqlite();
    let uri = PostgresServer::shared().database();
    let source = path(&server);
    for (from, to, code, word) in [
        (source.as_str(), uri.as_str(), 1, "adriaticum.db"),
        (source.as_str(), "other.db", 2, "adriaticum backup"),
        (uri.as_str(), "other.db", 2, "pg_dump"),
        (uri.as_str(), uri.as_str(), 2, "pg_dump"),
        (
            source.as_str(),
            "postgresql://a:secret@b:c/d",
            2,
            "expected ports",
        ),
    ] {
        let (found, printed) = moved(&server, from, to);
        assert!(found == Some(code) && printed.contains(word), "{printed}");
    }
    for file in ["adriaticum.db", "adriaticum.db.lock", "other.db"] {
        assert!(!server.folder.path(file).exists(), "{file} is made");
    }
    server.key();
    let other = Server::new(None).set("ADRIATICUM_DATABASE", &uri);
    other.query("CREATE TABLE mine (x BIGINT)");
    let (code, printed) = moved(&server, &source, &uri);
    assert!(
        code == Some(1) && printed.contains("tables of another program"),
        "{printed}"
    );
    assert_eq!(tables(&uri), [[Integer(1)]]);
}
