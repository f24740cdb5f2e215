//! What is wrong is said in the same words everywhere: for each state of the service, what the log, `/readyz`, the metrics,
//! the status page and `adriaticum check` say. An expired certificate is in tls.rs, a full disk in tests/outside/full_disk.py.

use std::sync::atomic::Ordering;

use rustix::process::Signal;
use serde_json::json;

use crate::budgets::with_clock;
use crate::console::{Browser, PASSWORD, has_verdict, set_password};
use crate::metrics::{get, metrics_key, value};
use crate::support::{ClosedPort, Reply, Runtime, Script, Server, chat, request, until};

/// A state, as an operator finds it.
struct State<'a> {
    verdict: &'a str,
    /// The parts that `/readyz` names.
    parts: &'a str,
    /// What the log and the status page say.
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
        let expected = format!("{verdict}: {}; the log says why\n", self.parts);
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

/// The third failure makes it failing. The status page has its last one, and the page of a request the cause of its own.
#[test]
fn a_runtime_that_does_not_work() {
    let loading = || Some(Script::Answer(503, json!({})));
    let silent = || Some(Script::Silent);
    for (script, cause, word, checked) in [
        (
            (|| None) as fn() -> Option<Script>,
            "no connection: Connection refused",
            "refused",
            "FAIL",
        ),
        // It answers soon: for the check alone, that is a note.
        (
            loading,
            "it answered with HTTP status 503. It is loading its model, or is busy",
            "status_503",
            "warn",
        ),
        (silent, "no complete answer in 1.", "timeout", "FAIL"),
    ] {
        let (runtime, closed) = (Runtime::start(), ClosedPort::new());
        let url = match script() {
            Some(_) => runtime.url(),
            None => format!("http://{}/v1", closed.address),
        };
        let server = Server::new(None).set("ADRIATICUM_RUNTIME_URL", &url);
        let watched = started(server.set("ADRIATICUM_RUNTIME_TIMEOUT", 1));
        // Three requests and a check.
        (0..4).for_each(|_| runtime.script.lock().expect("the script").extend(script()));
        let replies = [(); 3].map(|()| watched.post());
        State {
            verdict: "failing",
            parts: "runtime",
            sentence: &format!("{url}: {cause}"),
            series: &format!("adriaticum_runtime_up{{runtime=\"{url}\"}}"),
            value: 0.0,
            checks: &[&format!("{checked}  runtime        {url}: {cause}")],
        }
        .is_told(&watched);
        for reply in replies {
            reply.is_error(502, "inference_error");
            let id = reply.header("x-request-id").expect("an id");
            let page = watched.browser().get(&format!("/requests/{id}")).text();
            let entry = format!("<dt>Cause</dt><dd><code>{word}</code></dd>");
            assert!(page.contains(&entry), "{page}");
        }
    }
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
    watched.server.query("DROP TRIGGER no");
    until("a row is written", || watched.post().status == 200);
    let mut browser = watched.browser();
    has_verdict(&mut browser, "works");
    let page = browser.get("/status").text();
    assert!(!page.contains("on purpose"), "{page}");
}

/// The process ends, so there is nobody to ask; another process finds nothing wrong.
#[test]
fn a_ledger_that_another_process_serves() {
    let runtime = Runtime::start();
    let mut server = started(Server::new(Some(&runtime))).server;
    server.query("UPDATE gateways SET epoch = epoch + 1");
    assert_eq!(server.wait().code(), Some(1));
    server.has_logged(": this process stops");
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
    let gate = runtime.hold("held");
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
