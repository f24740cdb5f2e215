//! Answers of a runtime or of Search that are as large as the service reads them, wide, deep and long: as many at once as there
//! are workers stay far below the `MemoryMax` of the service's unit, which is 512 MiB.

use crate::support::{Runtime, Script, Server, chat, request};

/// The most memory that the service may use at its peak, in KiB. It uses 50 to 75 MiB. As values in memory, answers of this
/// size took 200 to 400 MiB.
const MOST: u64 = 128 * 1024;

const WORKERS: usize = 16;
const MIB: usize = 1024 * 1024;

/// Fills a text up to a size: `begin`, then `unit` again and again, then `end`.
fn filled(size: usize, begin: &str, unit: &str, end: &str) -> String {
    let units = (size - begin.len() - end.len()) / unit.len();
    format!("{begin}{}{end}", unit.repeat(units))
}

/// A service with as many workers and as much memory for buffers as a large host has.
fn large(server: Server) -> Server {
    server
        .set("ADRIATICUM_WORKERS", WORKERS)
        .set("ADRIATICUM_BUFFER_LIMIT", 64 * MIB)
        .start()
}

/// Has each worker run a request at once, each of which gets this answer, and checks the peak of the service's memory.
#[track_caller]
fn check(server: &Server, key: &str, hostile: &Runtime, status: u16, answer: &str) {
    (0..WORKERS).for_each(|_| hostile.next(Script::Text(status, answer.into())));
    let mut clients: Vec<_> = (0..WORKERS).map(|_| server.connect()).collect();
    clients
        .iter_mut()
        .for_each(|client| client.send(request(key, &chat("x"))));
    for client in &mut clients {
        assert_ne!(client.reply().status, 0, "{}", server.log());
    }
    assert!(
        !server.log().contains("answer_too_large"),
        "the answers are to be read: {}",
        server.log()
    );
    let peak = server.status("VmHWM");
    let begin = &answer[..answer.len().min(60)];
    assert!(
        peak < MOST,
        "{peak} KiB after {WORKERS} answers of {} bytes: {begin}",
        answer.len()
    );
}

#[test]
fn of_a_runtime() {
    let runtime = Runtime::start();
    let server = large(Server::new(Some(&runtime)));
    let key = server.key();
    let filled = |begin: &str, unit: &str, end: &str| filled(MIB, begin, unit, end);
    let text = |unit: &str| filled(r#"{"choices":[{"message":{"content":""#, unit, r#""}}]}"#);
    for (status, answer) in [
        (200, filled(r#"{"choices":[[]"#, ",[]", "]}")),
        (
            200,
            filled(
                r#"{"choices":[{"message":{"content":"x"}}],"usage":"#,
                "[",
                "",
            ),
        ),
        (200, text(r"\u0000")),
        (200, text(r#"xxxxxxxx\""#)),
        (400, filled("[0", ",0", "]")),
        (400, filled(r#"{"error":[[]"#, ",[]", "]}")),
        (400, filled(r#"{"error":"#, "[", "")),
    ] {
        check(&server, &key, &runtime, status, &answer);
    }
}

#[test]
fn of_search() {
    let (runtime, search) = (Runtime::start(), Runtime::start());
    let server = large(
        Server::new(Some(&runtime))
            .set("ADRIATICUM_SEARCH_URL", search.url())
            .set("ADRIATICUM_SEARCH_GROUNDING", "always"),
    );
    let key = server.key();
    let filled = |begin: &str, unit: &str, end: &str| filled(MIB, begin, unit, end);
    for answer in [
        filled(r#"{"results":[{}"#, ",{}", "]}"),
        filled(r#"{"results":[{"x":[0"#, ",0", r#"],"content":"x"}]}"#),
        filled(r#"{"results":"#, "[", ""),
        filled(r#"{"results":[{"content":""#, r"\n", r#""}]}"#),
        filled(
            r#"{"results":[],"unresponsive_engines":[["a","timeout"]"#,
            ",[[],[]]",
            "]}",
        ),
    ] {
        check(&server, &key, &search, 200, &answer);
    }
}
