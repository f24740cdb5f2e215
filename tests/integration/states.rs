//! What is wrong is said in the same words everywhere: for each state of the service, what the log, `/readyz`, the metrics,
//! the status page and `adriaticum check` say. An expired certificate is in tls.rs, a full disk in tests/outside/full_disk.py.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rusqlite::Connection;
use rustix::process::Signal;
use serde_json::json;

use crate::budgets::with_clock;
use crate::console::{Browser, PASSWORD, has_verdict, set_password};
use crate::metrics::{get, metrics_key, value};
use crate::support::{
    ClosedPort, Reply, Runtime, Script, Server, chat, completion, request, until,
};

/// A state, as an operator finds it.
struct State<'a> {
    verdict: &'a str,
    /// The parts that `/readyz` names.
    parts: &'a str,
    /// What the log and the status page say; empty if there is nothing to say.
    sentence: &'a str,
    series: &'a str,
    value: f64,
    /// How lines of `check` begin.
    checks: &'a [&'a str],
}

impl State<'_> {
    #[track_caller]
    fn is_told(&self, watched: &Watched) {
        let Watched {
            server, watcher, ..
        } = watched;
        let mut browser = watched.browser();
        let (verdict, sentence) = (self.verdict, self.sentence);
        let expected = match verdict {
            "works" => "works\n".to_owned(),
            _ => format!("{verdict}: {}; the log says why\n", self.parts),
        };
        let status = if verdict == "failing" { 503 } else { 200 };
        until("/readyz says so", || {
            get(server, "/readyz") == (status, expected.clone())
        });
        until("the log says so", || server.log().contains(sentence));
        assert_eq!(value(server, watcher, self.series), self.value);
        has_verdict(&mut browser, verdict);
        let page = browser.get("/status").text();
        assert!(page.contains(sentence), "{page}");
        let mut check = server.command(&["check"]);
        let output = check.env("ADRIATICUM_LISTEN", &server.address).output();
        let printed = String::from_utf8(output.expect("it runs").stdout).expect("text");
        let service = match verdict {
            "works" => "ok    service        it runs, and says of itself: works",
            "degraded" => "warn  service        it runs, and says of itself: degraded",
            _ => "FAIL  service        it runs, and says of itself: failing",
        };
        for start in self.checks.iter().chain([&service]) {
            let is_there = printed.lines().any(|line| line.starts_with(start));
            assert!(is_there, "{start} is not in\n{printed}");
        }
    }
}

/// A service, and everything that a look at it needs: some faults prevent that it is made later.
struct Watched {
    server: Server,
    key: String,
    watcher: String,
    cookies: Vec<(String, String)>,
}

fn started(server: Server) -> Watched {
    let server = server.sqlite().start();
    assert!(set_password(&server, PASSWORD).status.success());
    Watched {
        key: server.key(),
        watcher: metrics_key(&server),
        cookies: Browser::signed_in(&server).cookies,
        server,
    }
}

impl Watched {
    fn browser(&self) -> Browser<'_> {
        Browser {
            cookies: self.cookies.clone(),
            ..Browser::new(&self.server)
        }
    }

    fn post(&self) -> Reply {
        self.server.post(&self.key, &chat("x"))
    }
}

/// A runtime whose calls end like this, three requests and a check long.
#[track_caller]
fn runtime_that(
    script: impl Fn() -> Script,
    server: impl Fn(Server) -> Server,
    cause: &str,
    checked: &str,
) {
    let runtime = Runtime::start();
    let watched = started(server(Server::new(Some(&runtime))));
    for _ in 0..3 {
        runtime.next(script());
        watched.post().is_error(502, "inference_error");
    }
    runtime.next(script());
    let url = runtime.url();
    State {
        verdict: "failing",
        parts: "runtime",
        sentence: &format!("{url}: {cause}"),
        series: &format!("adriaticum_runtime_up{{runtime=\"{url}\"}}"),
        value: 0.0,
        checks: &[&format!("{checked}  runtime        {url}: {cause}")],
    }
    .is_told(&watched);
}

#[test]
fn a_runtime_that_is_down() {
    let closed = ClosedPort::new();
    let url = format!("http://{}/v1", closed.address);
    let watched = started(Server::new(None).set("ADRIATICUM_RUNTIME_URL", &url));
    for _ in 0..3 {
        watched.post().is_error(502, "inference_error");
    }
    State {
        verdict: "failing",
        parts: "runtime",
        sentence: &format!("{url}: no connection: Connection refused"),
        series: &format!("adriaticum_runtime_up{{runtime=\"{url}\"}}"),
        value: 0.0,
        checks: &[&format!("FAIL  runtime        {url}: no connection")],
    }
    .is_told(&watched);
}

#[test]
fn a_runtime_that_loads_its_model() {
    // It answers soon: for the check alone, that is a note.
    let cause = "it answered with HTTP status 503. It is loading its model, or is busy";
    runtime_that(|| Script::Answer(503, json!({})), |it| it, cause, "warn");
}

#[test]
fn a_runtime_that_refuses_the_key() {
    let cause = "it answered with HTTP status 401. It refuses the key: check runtime.api_key";
    runtime_that(|| Script::Answer(401, json!({})), |it| it, cause, "FAIL");
}

#[test]
fn a_runtime_that_is_too_slow() {
    let limit = |server: Server| server.set("ADRIATICUM_RUNTIME_TIMEOUT", 1);
    let cause = "no complete answer in 1.";
    runtime_that(|| Script::Silent, limit, cause, "FAIL");
}

#[test]
fn one_of_two_runtimes_that_is_down() {
    let (runtime, closed) = (Runtime::start(), ClosedPort::new());
    let down = format!("http://{}/v1", closed.address);
    let urls = format!("{down},{}", runtime.url());
    let watched = started(Server::new(None).set("ADRIATICUM_RUNTIME_URL", urls));
    // It is asked first, then by probes.
    watched.post().is_completion();
    State {
        verdict: "degraded",
        parts: "runtime",
        sentence: &format!("{down}: no connection"),
        series: &format!("adriaticum_runtime_up{{runtime=\"{down}\"}}"),
        value: 0.0,
        checks: &[
            &format!("FAIL  runtime        {down}: no connection"),
            &format!("ok    runtime        {}: answers", runtime.url()),
        ],
    }
    .is_told(&watched);
}

#[test]
fn a_ledger_that_takes_no_row() {
    let runtime = Runtime::start();
    let watched = started(Server::new(Some(&runtime)));
    watched.server.query(
        "CREATE TRIGGER no BEFORE INSERT ON usage BEGIN SELECT RAISE(ABORT, 'on purpose'); END",
    );
    watched.post().is_error(503, "service_unavailable");
    let database = watched.server.folder.path("adriaticum.db");
    let sentence = format!(
        "{}: on purpose. Until a row can be written, requests get 503",
        database.display()
    );
    State {
        verdict: "failing",
        parts: "database",
        sentence: &sentence,
        series: "adriaticum_ledger_available",
        value: 0.0,
        checks: &[&format!("FAIL  database       {sentence}")],
    }
    .is_told(&watched);
}

#[test]
fn a_ledger_that_another_process_has_locked() {
    let runtime = Runtime::start();
    let watched = started(Server::new(Some(&runtime)));
    let Watched {
        server,
        key,
        watcher,
        ..
    } = &watched;
    let mut browser = watched.browser();
    let database = server.folder.path("adriaticum.db");
    let other = Connection::open(&database).expect("the database");
    other.execute_batch("BEGIN IMMEDIATE").expect("a lock");
    let mut client = server.connect();
    client.send(request(key, &chat("x")));
    until("/readyz says so", || {
        get(server, "/readyz") == (503, "failing: database; the log says why\n".into())
    });
    let start = format!("{}: ", database.display());
    until("the log says so", || {
        server.log().contains(&format!("[ERROR] database: {start}"))
    });
    has_verdict(&mut browser, "failing");
    assert_eq!(value(server, watcher, "adriaticum_ledger_available"), 0.0);
    let printed = String::from_utf8(server.run(&["check"]).stdout).expect("text");
    let line = printed.lines().find(|line| line.contains("  database "));
    let line = line.unwrap_or_default();
    assert!(
        line.starts_with(&format!("FAIL  database       {start}"))
            && line.contains("Until a row can be written"),
        "{printed}"
    );
    other.execute_batch("ROLLBACK").expect("the lock goes");
    until("the log says that it is over", || {
        server.log().contains("[INFO] database works again")
    });
    has_verdict(&mut browser, "works");
}

/// The process ends, so there is nobody to ask; another process finds nothing wrong.
#[test]
fn a_ledger_that_another_process_serves() {
    let runtime = Runtime::start();
    let mut server = started(Server::new(Some(&runtime))).server;
    server.query("UPDATE gateways SET epoch = epoch + 1");
    assert_eq!(server.wait().code(), Some(1));
    assert!(
        server.log().contains(": this process stops"),
        "{}",
        server.log()
    );
    let output = server.run(&["check"]);
    let printed = String::from_utf8(output.stdout).expect("text");
    assert!(
        output.status.success() && !printed.contains("service"),
        "{printed}"
    );
}

#[test]
fn a_search_that_fails() {
    let (runtime, search) = (Runtime::start(), Runtime::start());
    let server = Server::new(Some(&runtime))
        .set("ADRIATICUM_SEARCH_URL", search.url())
        .set("ADRIATICUM_SEARCH_GROUNDING", "always");
    let watched = started(server);
    (0..2).for_each(|_| search.next(Script::Answer(500, json!({}))));
    watched.post().is_error(503, "search_unavailable");
    let sentence = "Completions that need Search get 503 until it works";
    State {
        verdict: "degraded",
        parts: "search",
        sentence,
        series: "adriaticum_searches_total{reason=\"always\",outcome=\"unavailable\"}",
        value: 1.0,
        checks: &["FAIL  search         "],
    }
    .is_told(&watched);
    search.next(Script::Answer(200, json!({"results": []})));
    watched.post().is_completion();
    assert_eq!(get(&watched.server, "/readyz"), (200, "works\n".into()));
}

#[test]
fn a_queue_that_is_full() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime))
        .set("ADRIATICUM_WORKERS", 1)
        .set("ADRIATICUM_QUEUE", 1);
    let watched = started(server);
    let gate = Arc::new(AtomicBool::new(false));
    runtime.next(Script::Held(Arc::clone(&gate), completion("held")));
    let send = || {
        let mut client = watched.server.connect();
        client.send(request(&watched.key, &chat("x")));
        client
    };
    let mut running = send();
    until("it runs", || runtime.count() == 1);
    let mut waiting = send();
    State {
        verdict: "degraded",
        parts: "queue",
        sentence: "the queue is full (1 request): further ones get 503",
        series: "adriaticum_queue_length",
        value: 1.0,
        checks: &["ok    runtime        "],
    }
    .is_told(&watched);
    gate.store(true, Ordering::Release);
    running.reply().is_completion();
    waiting.reply().is_completion();
}

/// A key's budget is no state of the service: its request's line, the metric and the key's page have it.
#[test]
fn a_key_that_has_used_its_budget() {
    let runtime = Runtime::start();
    let watched = started(Server::new(Some(&runtime)));
    let server = &watched.server;
    let created = ["keys", "create", "small", "--budget", "10/month"];
    let key = server.stdout_of(&created).trim().to_owned();
    server.post(&key, &chat("x")).is_completion();
    server
        .post(&key, &chat("x"))
        .is_error(403, "insufficient_permission");
    until("the log says so", || server.log().contains("cause=budget"));
    let listed = server.stdout_of(&["keys", "list", "--json"]);
    let listed: serde_json::Value = serde_json::from_str(&listed).expect("JSON");
    let keys = listed.as_array().expect("keys");
    let small = keys.iter().find(|key| key["name"] == "small");
    let id = small.expect("the key")["id"].as_str().expect("its id");
    State {
        verdict: "works",
        parts: "",
        sentence: "",
        series: &format!(
            "adriaticum_key_budget_used_tokens{{key=\"{id}\",name=\"small\",per=\"month\"}}"
        ),
        value: 14.0,
        checks: &[],
    }
    .is_told(&watched);
}

#[test]
fn a_retention_that_is_held_up() {
    let (runtime, now) = (Runtime::start(), 1_900_000_000);
    let (server, set_clock) = with_clock(Server::new(Some(&runtime)).sqlite(), now);
    let server = server.set("ADRIATICUM_USAGE_RETENTION_DAYS", 30);
    let mut watched = started(server);
    watched.post().is_completion();
    watched.server.signal(Signal::TERM);
    watched.server.wait();
    set_clock(now + 300 * 86_400);
    watched.server = watched.server.start();
    watched.cookies = Browser::signed_in(&watched.server).cookies;
    State {
        verdict: "degraded",
        parts: "retention",
        sentence: "retention removes nothing: the ledger has rows from before",
        series: "adriaticum_ledger_available",
        value: 1.0,
        checks: &[
            "warn  retention      retention removes nothing: the ledger has rows from before",
        ],
    }
    .is_told(&watched);
}
