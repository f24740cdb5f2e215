//! Why a request was refused or failed: the same word in its log line and in its row.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rusqlite::types::Value::{Null, Text};
use serde_json::{Value, json};

use crate::console::{Browser, PASSWORD, set_password};
use crate::support::{
    Reply, Runtime, Script, Server, chat, completion, raw_request, request, until,
};

/// The lines about a request, each as its names and values. Everything in such a line is one or the other, the id first.
#[track_caller]
fn lines(server: &Server, reply: &Reply) -> Vec<BTreeMap<String, String>> {
    let id = reply.header("x-request-id").expect("an id");
    until("its line is written", || server.log().contains(id));
    let log = server.log();
    let texts = log.lines().filter(|line| line.contains(id)).map(|line| {
        line.split_once("] ")
            .expect("a time and a level")
            .1
            .to_owned()
    });
    texts.map(|text| pairs(&text, id)).collect()
}

#[track_caller]
fn pairs(text: &str, id: &str) -> BTreeMap<String, String> {
    assert!(text.starts_with(&format!("id={id} ")), "{text}");
    let (mut pairs, mut rest) = (BTreeMap::new(), text);
    while !rest.is_empty() {
        let (name, value) = rest
            .split_once('=')
            .unwrap_or_else(|| panic!("no name: {rest}"));
        assert!(
            name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'),
            "{name}: {text}"
        );
        let end = match value.strip_prefix('"') {
            Some(quoted) => quoted.find('"').expect("the end of the quotation") + 2,
            None => value.find(' ').unwrap_or(value.len()),
        };
        assert!(end > 0, "{name} has no value: {text}");
        pairs.insert(name.into(), value[..end].into());
        rest = value[end..].trim_start_matches(' ');
    }
    pairs
}

/// The id of the key with a name.
fn id_of(server: &Server, name: &str) -> String {
    match &server.query(&format!("SELECT id FROM keys WHERE name = '{name}'"))[..] {
        [row] => match &row[..] {
            [Text(id)] => id.clone(),
            _ => panic!("{row:?}"),
        },
        rows => panic!("{rows:?}"),
    }
}

/// The cause in the row of a request; `None` if it has no row.
fn cause_in_row(server: &Server, reply: &Reply) -> Option<rusqlite::types::Value> {
    let id = reply.header("x-request-id").expect("an id");
    server
        .query(&format!(
            "SELECT cause FROM usage WHERE request_id = '{id}'"
        ))
        .pop()?
        .pop()
}

#[test]
fn a_refusal_says_why_in_a_word_of_the_list() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime))
        .set("ADRIATICUM_LOG_LEVEL", "trace")
        .start();
    let key = |name: &str, permission: &str| {
        server
            .stdout_of(&["keys", "create", name, "--permission", permission])
            .trim()
            .to_owned()
    };
    let (good, metrics) = (key("good", "completions"), key("watch", "metrics"));
    let (revoked, expired) = (key("revoked", "completions"), key("expired", "completions"));
    server.stdout_of(&["keys", "revoke", &id_of(&server, "revoked")]);
    server.query("UPDATE keys SET expires = 1 WHERE name = 'expired'");
    let unknown = format!("adr_{}", "0".repeat(48));
    let valid = chat("xyzzy").to_string();
    let with = |members: Value| {
        let mut body = chat("xyzzy");
        body.as_object_mut()
            .expect("an object")
            .extend(members.as_object().expect("members").clone());
        request(&good, &body)
    };
    let large = "Content-Length: 300000\r\n";
    for (sent, status, cause, name) in [
        (
            request(&good, &chat("x")).replace("api.test", "xyzzy.test"),
            404,
            "host",
            "",
        ),
        (
            request(&good, &chat("x")).replace("/v1/chat", "/v1/xyzzy"),
            404,
            "route",
            "",
        ),
        (
            format!("POST /v1/chat/completions HTTP/1.1\r\nHost: api.test\r\n{large}\r\n"),
            413,
            "too_large",
            "",
        ),
        ("XYZZY\r\n\r\n".into(), 400, "http", ""),
        (request("xyzzy", &chat("x")), 401, "no_key", ""),
        (request(&unknown, &chat("x")), 401, "unknown_key", ""),
        (request(&revoked, &chat("x")), 401, "revoked", "revoked"),
        (request(&expired, &chat("x")), 401, "expired", "expired"),
        (request(&metrics, &chat("x")), 403, "permission", "watch"),
        (
            request(&good, &chat("x")).replace("application/json", "text/xyzzy"),
            400,
            "content_type",
            "good",
        ),
        (
            raw_request(&good, "Content-Encoding: xyzzy\r\n", &valid),
            400,
            "content_encoding",
            "good",
        ),
        (raw_request(&good, "", "xyzzy"), 400, "body", "good"),
        (with(json!({"max_tokens": 513})), 400, "max_tokens", "good"),
        (
            with(json!({"max_completion_tokens": 5})),
            400,
            "max_completion_tokens",
            "good",
        ),
        (
            with(json!({"messages": [{"role": "xyzzy", "content": "x"}]})),
            400,
            "role",
            "good",
        ),
        (
            with(json!({"messages": [{"role": "user", "content": ["xyzzy"]}]})),
            400,
            "content",
            "good",
        ),
        (
            with(json!({"xyzzy": "xyzzy"})),
            400,
            "unknown_member",
            "good",
        ),
    ] {
        let mut client = server.connect();
        client.send(&sent);
        let reply = client.reply();
        assert_eq!(reply.status, status, "{cause}: {reply:?}");
        let lines = lines(&server, &reply);
        // What a host is not is in a line of its own.
        let details = usize::from(cause == "host");
        assert_eq!(lines.len(), 1 + details, "{lines:?}");
        let line = &lines[0];
        let key = if name.is_empty() {
            "-".into()
        } else {
            id_of(&server, name)
        };
        let found = (
            line["cause"].as_str(),
            line["status"].as_str(),
            line["key"].as_str(),
        );
        assert_eq!(found, (cause, &*status.to_string(), &*key), "{line:?}");
        let has_row = matches!(status, 400 | 403) && !name.is_empty();
        assert_eq!(
            cause_in_row(&server, &reply),
            has_row.then(|| Text(cause.into())),
            "{cause}"
        );
    }
    let reply = server.post(&good, &chat("xyzzy"));
    reply.is_completion();
    assert_eq!(lines(&server, &reply)[0]["cause"], "-");
    assert_eq!(cause_in_row(&server, &reply), Some(Null));
    assert!(
        !server.log().contains("xyzzy"),
        "what a client wrote is logged: {}",
        server.log()
    );
    assert!(
        server
            .stdout_of(&["usage", "verify"])
            .contains("nothing wrong")
    );
}

#[test]
fn a_failure_has_its_class_and_a_second_line_has_the_details() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime))
        .set("ADRIATICUM_RUNTIME_TIMEOUT", 1)
        .start();
    let key = server.key();
    let error = json!({"error": {"code": "context_length_exceeded"}});
    for (script, status, cause, details) in [
        (Script::Silent, 502, "timeout", "no complete answer in 1."),
        (
            Script::Text(500, "x".into()),
            502,
            "status_500",
            "HTTP status 500",
        ),
        (
            Script::Text(404, "x".into()),
            502,
            "status_404",
            "HTTP status 404",
        ),
        (
            Script::Text(200, "x".into()),
            502,
            "not_json",
            "not JSON of the expected form",
        ),
        (
            Script::Answer(200, json!({"choices": []})),
            502,
            "no_text",
            "has no text",
        ),
        (
            Script::Text(200, "x".repeat(8 << 20)),
            502,
            "answer_too_large",
            "too large",
        ),
        (Script::Answer(400, error), 400, "context", ""),
    ] {
        runtime.next(script);
        let reply = server.post(&key, &chat("x"));
        assert_eq!(reply.status, status, "{cause}: {reply:?}");
        // A retry would cost another inference.
        let no_retry = ["timeout", "no_text"].contains(&cause).then_some("false");
        assert_eq!(reply.header("x-should-retry"), no_retry, "{cause}");
        is_logged(&server, &reply, cause, details);
        assert_eq!(cause_in_row(&server, &reply), Some(Text(cause.into())));
    }
    assert!(
        server
            .stdout_of(&["usage", "verify"])
            .contains("nothing wrong")
    );

    let server = Server::new(None)
        .set("ADRIATICUM_RUNTIME_URL", "http://127.0.0.1:1/v1")
        .start();
    let reply = server.post(&server.key(), &chat("x"));
    reply.is_error(502, "inference_error");
    assert_eq!(
        reply.header("x-should-retry"),
        None,
        "no inference was spent"
    );
    is_logged(&server, &reply, "refused", "no connection: ");

    let server = Server::new(None).start();
    let reply = server.post(&server.key(), &chat("x"));
    reply.is_error(503, "service_unavailable");
    is_logged(&server, &reply, "no_runtime", "set runtime.url");
}

/// The listener logs how many requests were shed; at the level `debug` each has its line.
#[test]
fn a_shed_request_has_its_cause() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime))
        .set("ADRIATICUM_WORKERS", 1)
        .set("ADRIATICUM_QUEUE", 0)
        .set("ADRIATICUM_LOG_LEVEL", "debug")
        .start();
    let (key, gate) = (server.key(), Arc::new(AtomicBool::new(false)));
    runtime.next(Script::Held(Arc::clone(&gate), completion("x")));
    let mut held = server.connect();
    held.send(request(&key, &chat("x")));
    until("the worker is busy", || runtime.count() == 1);
    let reply = server.post(&key, &chat("x"));
    reply.is_error(503, "service_unavailable");
    assert_eq!(reply.header("retry-after"), Some("1"), "it is soon over");
    is_logged(&server, &reply, "queue_full", "");
    let counted = "listener, since the last line: queue_full=1";
    until("the listener has counted it", || {
        server.log().contains(counted)
    });
    assert_eq!(cause_in_row(&server, &reply), None, "it has no row");
    gate.store(true, Ordering::Release);
    held.reply().is_completion();
}

#[track_caller]
fn is_logged(server: &Server, reply: &Reply, cause: &str, details: &str) {
    let lines = lines(server, reply);
    assert_eq!(lines[0]["cause"], cause, "{lines:?}");
    assert_eq!(
        lines.len(),
        if details.is_empty() { 1 } else { 2 },
        "{lines:?}"
    );
    assert!(
        details.is_empty() || lines[1]["details"].contains(details),
        "{lines:?}"
    );
}

#[test]
fn the_cause_is_part_of_a_requests_story() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    assert!(set_password(&server, PASSWORD).status.success());
    let mut browser = Browser::signed_in(&server);
    let key = server.key();
    runtime.next(Script::Text(503, "x".into()));
    runtime.next(Script::Answer(200, completion("x")));
    for (cause, line, entry) in [
        (
            json!("status_503"),
            "status_503",
            Some("<dd><code>status_503</code></dd>"),
        ),
        (json!(null), "", None),
    ] {
        let id = server
            .post(&key, &chat("x"))
            .header("x-request-id")
            .expect("an id")
            .to_owned();
        let record: Value =
            serde_json::from_str(&server.stdout_of(&["usage", "show", &id, "--json"]))
                .expect("JSON");
        assert_eq!(record["cause"], cause, "{record}");
        let record = server.stdout_of(&["usage", "show", &id]);
        let words = record
            .lines()
            .find_map(|record| record.strip_prefix("cause"))
            .unwrap_or_default();
        assert_eq!(words.trim(), line, "{record}");
        let page = browser.get(&format!("/requests/{id}")).text();
        let shown = page.split("<dt>Cause</dt>").nth(1);
        assert!(shown.is_some() == entry.is_some(), "{page}");
        assert!(
            shown
                .zip(entry)
                .is_none_or(|(shown, entry)| shown.starts_with(entry)),
            "{page}"
        );
    }
}
