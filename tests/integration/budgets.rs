//! Budgets: how many tokens a key may use in a day or a month.

use std::os::unix::fs::symlink;
use std::process::Command;
use std::thread;

use rusqlite::types::Value::Integer;
use serde_json::Value;

use crate::support::{Reply, Runtime, Server, chat, request};

/// What a completion of the scripted runtime costs.
const COST: i64 = 14;

fn key_with(server: &Server, name: &str, budget: &str) -> String {
    server
        .stdout_of(&["keys", "create", name, "--budget", budget])
        .trim()
        .to_owned()
}

#[track_caller]
fn is_used_up(reply: &Reply) -> String {
    let message = reply.is_error(403, "insufficient_permission");
    assert_eq!(reply.header("x-should-retry"), Some("false"), "{reply:?}");
    message
}

/// 32 clients send requests until they are refused, to these servers in turn, each of which has 16 workers. Checks how many
/// completions there were: `completions` use the budget up.
#[track_caller]
pub fn use_up(servers: &[&Server], key: &str, completions: i64) {
    let client = |number: usize| {
        let mut client = servers[number % servers.len()].connect();
        for count in 0..=completions {
            client.send(request(key, &chat("x")));
            let reply = client.reply();
            if reply.status != 200 {
                is_used_up(&reply);
                return count;
            }
        }
        panic!("a client has all completions of the budget and was not refused");
    };
    let count: i64 = thread::scope(|scope| {
        let clients: Vec<_> = (0..32)
            .map(|number| scope.spawn(move || client(number)))
            .collect();
        clients
            .into_iter()
            .map(|client| client.join().expect("no panic"))
            .sum()
    });
    let running = 32.min(16 * servers.len() as i64);
    // The first refusal comes after the budget is used up, and what runs at that moment is completed.
    assert!(
        (completions..completions + running).contains(&count),
        "{count} completions, {completions} fit"
    );
    let row = "SELECT sum(total_tokens), count(*) FROM usage WHERE status = 200";
    assert_eq!(
        servers[0].query(row),
        [[Integer(count * COST), Integer(count)]]
    );
    let refused =
        "SELECT count(*) FROM usage WHERE status = 403 AND error_code = 'insufficient_permission'";
    assert_eq!(
        servers[0].query(refused),
        [[Integer(32)]],
        "each client has one refusal, with a row"
    );
    let keys = servers[0].stdout_of(&["keys", "list", "--json"]);
    let keys: Value = serde_json::from_str(&keys).expect("JSON");
    assert_eq!(keys[0]["budget"]["used"], count * COST);
    assert!(
        servers[0]
            .stdout_of(&["usage", "verify"])
            .contains("nothing wrong")
    );
}

#[test]
fn many_clients_exceed_a_budget_by_no_more_than_what_was_running() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).start();
    let key = key_with(&server, "x", &format!("{}/month", 100 * COST - 1));
    use_up(&[&server], &key, 100);
}

/// Gives a service a clock of its own. Returns a function that sets it.
pub fn with_clock(server: Server, time: i64) -> (Server, impl Fn(i64)) {
    let (library, now) = (
        server.folder.path("frozen_clock.so"),
        server.folder.path("now"),
    );
    let source = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/integration/frozen_clock.c"
    );
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(source)
        .status();
    assert!(built.expect("cc should run").success());
    let server = server
        .set("LD_PRELOAD", library.display())
        .set("FROZEN_CLOCK", now.display());
    let set_clock = move |time: i64| {
        let new = now.with_extension("new");
        symlink(time.to_string(), &new)
            .and_then(|()| std::fs::rename(new, &now))
            .expect("a link");
    };
    set_clock(time);
    (server, set_clock)
}

#[test]
fn budgets_are_renewed_at_midnight() {
    let runtime = Runtime::start();
    // The last second of 2031-01-31.
    let last = 1_927_670_399;
    let (server, set_clock) = with_clock(Server::new(Some(&runtime)), last);
    let server = server.start();
    let day = key_with(&server, "a day", "14/day");
    let month = key_with(&server, "a month", "28/month");
    for key in [&day, &month, &month] {
        server.post(key, &chat("x")).is_completion();
    }
    for (key, per) in [(&day, "14 tokens per day"), (&month, "28 tokens per month")] {
        let message = is_used_up(&server.post(key, &chat("x")));
        assert!(
            message.contains(per) && message.contains("renewed at 2031-02-01 00:00Z"),
            "{message}"
        );
    }
    // A request is created when it was complete, which is before the present by its wait for a worker.
    let wait = 60;
    set_clock(last + wait);
    for key in [&day, &month] {
        server.post(key, &chat("x")).is_completion();
    }
    let message = is_used_up(&server.post(&day, &chat("x")));
    assert!(
        message.contains("renewed at 2031-02-02 00:00Z"),
        "{message}"
    );
    set_clock(last + wait + 86_400);
    for key in [&day, &month] {
        server.post(key, &chat("x")).is_completion();
    }
    let message = is_used_up(&server.post(&month, &chat("x")));
    assert!(
        message.contains("28 of 28") && message.contains("renewed at 2031-03-01 00:00Z"),
        "{message}"
    );
}
