//! The queue: keys take turns, a limit on a key holds, and strangers leave room for the others.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::metrics::{metrics_key, value};
use crate::support::{
    Client, Runtime, Script, Server, chat, completion, connect_from, raw_request, request, until,
};

/// Holds the next calls of the runtime until the result is true.
fn hold(runtime: &Runtime, calls: usize) -> Arc<AtomicBool> {
    let gate = Arc::new(AtomicBool::new(false));
    (0..calls).for_each(|_| runtime.next(Script::Held(Arc::clone(&gate), completion("held"))));
    gate
}

/// Sends so many requests at once, each on a connection of its own.
fn burst(server: &Server, key: &str, text: &str, count: usize) -> Vec<Client> {
    let send = |_| {
        let mut client = server.connect();
        client.send(request(key, &chat(text)));
        client
    };
    (0..count).map(send).collect()
}

fn statuses(clients: &mut [Client]) -> Vec<u16> {
    let mut statuses: Vec<u16> = clients
        .iter_mut()
        .map(|client| client.reply().status)
        .collect();
    statuses.sort_unstable();
    statuses
}

/// What the runtime was asked, in its order.
fn asked(runtime: &Runtime) -> Vec<String> {
    let calls = runtime.calls.lock().expect("the calls");
    calls
        .iter()
        .map(|call| {
            call.body["messages"][0]["content"]
                .as_str()
                .unwrap_or_default()
                .into()
        })
        .collect()
}

fn count(runtime: &Runtime, text: &str) -> usize {
    asked(runtime).iter().filter(|asked| *asked == text).count()
}

#[track_caller]
fn until_waiting(server: &Server, watcher: &str, count: usize) {
    until("they wait", || {
        value(server, watcher, "adriaticum_queue_length") == count as f64
    });
}

#[test]
fn keys_take_turns() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime))
        .set("ADRIATICUM_WORKERS", 1)
        .start();
    let (one, other, watcher) = (server.key(), server.key(), metrics_key(&server));
    for key in [&one, &other] {
        server.post(key, &chat("first")).is_completion();
    }
    let gate = hold(&runtime, 1);
    let mut clients = burst(&server, &one, "held", 1);
    until("the worker is busy", || runtime.count() == 3);
    clients.extend(burst(&server, &one, "one", 8));
    until_waiting(&server, &watcher, 8);
    clients.extend(burst(&server, &other, "other", 3));
    until_waiting(&server, &watcher, 11);
    gate.store(true, Ordering::Release);
    assert_eq!(statuses(&mut clients), [200; 12]);
    let order = [
        "one", "other", "one", "other", "one", "other", "one", "one", "one", "one", "one",
    ];
    assert_eq!(asked(&runtime)[3..], order);
}

#[test]
fn a_key_with_many_clients_sheds_none_of_another() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime))
        .set("ADRIATICUM_WORKERS", 2)
        .set("ADRIATICUM_QUEUE", 16)
        .start();
    let (many, few, watcher) = (server.key(), server.key(), metrics_key(&server));
    for key in [&many, &few] {
        server.post(key, &chat("first")).is_completion();
    }
    let gate = hold(&runtime, 2);
    let mut crowd = burst(&server, &many, "many", 150);
    until("both workers are busy", || runtime.count() == 4);
    until_waiting(&server, &watcher, 16);
    let shed = "adriaticum_requests_shed_total{reason=\"queue\"}";
    until("the rest is shed", || {
        value(&server, &watcher, shed) == 132.0
    });
    let mut clients = burst(&server, &few, "few", 4);
    until("four more of the crowd are shed", || {
        value(&server, &watcher, shed) == 136.0
    });
    gate.store(true, Ordering::Release);
    assert_eq!(statuses(&mut clients), [200; 4]);
    let crowd = statuses(&mut crowd);
    assert_eq!(crowd.iter().filter(|status| **status == 200).count(), 14);
    assert_eq!(crowd.iter().filter(|status| **status == 503).count(), 136);
}

/// The bytes of the largest body.
const FULL: usize = 262_144;

/// Full bodies of some keys fill the memory. A key that holds less gets through, a stranger and the key that holds most do not.
#[test]
fn a_key_with_full_bodies_sheds_none_of_another() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime))
        .set("ADRIATICUM_WORKERS", 1)
        .set("ADRIATICUM_BUFFER_LIMIT", 4 * 1024 * 1024)
        .start();
    let (most, much, few, watcher) = (
        server.key(),
        server.key(),
        server.key(),
        metrics_key(&server),
    );
    for key in [&most, &much, &few] {
        server.post(key, &chat("first")).is_completion();
    }
    let shed = || {
        value(
            &server,
            &watcher,
            "adriaticum_requests_shed_total{reason=\"buffer\"}",
        )
    };
    // Each of them needs three times its body and some more: five have room.
    let padded = |key: &str, size: usize, count: usize| -> Vec<Client> {
        let text = chat("full").to_string();
        let body = format!(
            "{}{}}}",
            &text[..text.len() - 1],
            " ".repeat(size - text.len())
        );
        let send = |_| {
            let mut client = server.connect();
            client.send(raw_request(key, "", &body));
            client
        };
        (0..count).map(send).collect()
    };
    let gate = hold(&runtime, 1);
    let mut crowd = padded(&most, FULL, 1);
    until("the worker is busy", || runtime.count() == 4);
    crowd.extend(padded(&most, FULL, 5));
    until("three quarters of the memory are its share", || {
        shed() == 3.0
    });
    let mut second = padded(&much, FULL, 2);
    until_waiting(&server, &watcher, 4);
    // There is room for two small ones; a scrape needs as much.
    let stranger = server.key();
    let refused = statuses(&mut padded(&stranger, 30_000, 1));
    assert_eq!(
        (refused, shed()),
        (vec![503], 4.0),
        "a key that is not known displaces no other"
    );
    let mut clients = burst(&server, &few, "few", 3);
    until("one more of the crowd is shed", || shed() == 5.0);
    until_waiting(&server, &watcher, 6);
    gate.store(true, Ordering::Release);
    assert_eq!(
        (statuses(&mut clients), statuses(&mut second)),
        (vec![200; 3], vec![200; 2])
    );
    assert_eq!(statuses(&mut crowd), [200, 200, 503, 503, 503, 503]);
}

#[test]
fn a_limit_on_a_key_holds() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime))
        .set("ADRIATICUM_WORKERS", 8)
        .start();
    let limited = server
        .stdout_of(&["keys", "create", "limited", "--concurrent", "2"])
        .trim()
        .to_owned();
    let (free, watcher) = (server.key(), metrics_key(&server));
    let id = {
        let keys: serde_json::Value =
            serde_json::from_str(&server.stdout_of(&["keys", "list", "--json"])).expect("a list");
        let keys = keys.as_array().expect("a list").clone();
        let key = keys
            .into_iter()
            .find(|key| key["name"] == "limited")
            .expect("the key");
        key["id"].as_str().expect("an id").to_owned()
    };
    // Nothing is known of the key before its first burst; then its limit is changed.
    for (text, limit) in [("first", 2), ("lower", 1), ("none", 5)] {
        match text {
            "lower" => _ = server.stdout_of(&["keys", "set", &id, "--concurrent", "1"]),
            "none" => _ = server.stdout_of(&["keys", "set", &id, "--concurrent", "none"]),
            _ => {}
        }
        let gate = hold(&runtime, limit);
        let mut clients = burst(&server, &limited, text, 20);
        until("as many run as may", || count(&runtime, text) >= limit);
        if text != "none" {
            until_waiting(&server, &watcher, 20 - limit);
            for _ in 0..5 {
                server.post(&free, &chat("free")).is_completion();
            }
            assert_eq!(count(&runtime, text), limit, "the others wait");
            assert_eq!(
                value(&server, &watcher, "adriaticum_workers_busy"),
                limit as f64
            );
        }
        gate.store(true, Ordering::Release);
        assert_eq!(statuses(&mut clients), [200; 20]);
    }
}

/// The one worker has a long inference. Strangers do not wait for it, and take no place of a key that is new to the process.
#[test]
fn strangers_are_refused_at_once_and_shut_out_no_new_key() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime))
        .set("ADRIATICUM_WORKERS", 1)
        .set("ADRIATICUM_QUEUE", 8)
        .start();
    let (known, new, watcher) = (server.key(), server.key(), metrics_key(&server));
    let gate = hold(&runtime, 1);
    let mut clients = burst(&server, &known, "held", 1);
    until("the worker is busy", || runtime.count() == 1);
    let unknown = format!("adr_{}", "0".repeat(48));
    for _ in 0..40 {
        server
            .post(&unknown, &chat("stranger"))
            .is_error(401, "invalid_api_key");
    }
    clients.extend(burst(&server, &new, "new", 4));
    clients.extend(burst(&server, &known, "known", 4));
    until_waiting(&server, &watcher, 8);
    // Where there is no room, a new key sheds one of the longest lane, as a known one does.
    let mut more = burst(&server, &server.key(), "another", 1);
    let shed = "adriaticum_requests_shed_total{reason=\"queue\"}";
    until("one is shed", || value(&server, &watcher, shed) == 1.0);
    assert_eq!(server.post(&unknown, &chat("stranger")).status, 401);
    gate.store(true, Ordering::Release);
    assert_eq!(statuses(&mut more), [200]);
    let statuses = statuses(&mut clients);
    assert_eq!(
        statuses.iter().filter(|status| **status == 200).count(),
        8,
        "{statuses:?}"
    );
}

#[test]
fn a_raised_limit_starts_the_requests_that_wait_with_the_next_one() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime))
        .set("ADRIATICUM_WORKERS", 8)
        .start();
    let limited = server
        .stdout_of(&["keys", "create", "limited", "--concurrent", "1"])
        .trim()
        .to_owned();
    let keys: serde_json::Value =
        serde_json::from_str(&server.stdout_of(&["keys", "list", "--json"])).expect("a list");
    let id = keys[0]["id"].as_str().expect("an id");
    let (first, others) = (hold(&runtime, 1), hold(&runtime, 4));
    let mut clients = burst(&server, &limited, "x", 5);
    until("one runs", || runtime.count() == 1);
    server.stdout_of(&["keys", "set", id, "--concurrent", "4"]);
    first.store(true, Ordering::Release);
    until("all others run", || runtime.count() == 5);
    others.store(true, Ordering::Release);
    assert_eq!(statuses(&mut clients), [200; 5]);
}

/// Pages that need no session must not delay a scrape.
#[test]
fn strangers_leave_room_on_the_console() {
    let server = Server::new(None).start();
    let watcher = metrics_key(&server);
    value(&server, &watcher, "adriaticum_workers");
    let address = server.address.parse().expect("an address of IPv4");
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..30 {
            scope.spawn(|| {
                while !done.load(Ordering::Acquire) {
                    let mut client = Client::new(connect_from([127, 0, 0, 2], address));
                    client.send("GET /sign-in HTTP/1.1\r\nHost: console.localhost\r\n\r\n");
                    client.reply();
                }
            });
        }
        // Each of these fails the test if it is answered 503.
        let shed = "adriaticum_requests_shed_total{reason=\"console\"}";
        let scraped = || {
            (0..50)
                .map(|_| value(&server, &watcher, shed))
                .fold(0.0, f64::max)
        };
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(scraped));
        done.store(true, Ordering::Release);
        assert!(
            result.expect("every scrape is answered") > 0.0,
            "there was not enough to do"
        );
    });
}
