//! Several gateways on one database.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rusqlite::types::Value::{Integer, Text};
use rustix::process::Signal;

use crate::budgets::use_up;
use crate::console::{Browser, PASSWORD, set_password};
use crate::postgres::set_usable;
use crate::postgres_server::{PostgresServer, psql};
use crate::support::{Client, Runtime, Script, Server, chat, completion, request, until};

fn gateway(uri: &str, name: &str, runtime: &Runtime) -> Server {
    Server::new(Some(runtime))
        .set("ADRIATICUM_DATABASE", uri)
        .set("ADRIATICUM_GATEWAY", name)
}

/// A request that runs until the gate is opened.
fn held(server: &Server, runtime: &Runtime, key: &str) -> (Client, Arc<AtomicBool>) {
    let (gate, calls) = (Arc::new(AtomicBool::new(false)), runtime.count());
    runtime.next(Script::Held(Arc::clone(&gate), completion("at last")));
    let mut client = server.connect();
    client.send(request(key, &chat("x")));
    until("it is running", || runtime.count() == calls + 1);
    (client, gate)
}

#[test]
fn keys_and_sessions_are_the_same_at_every_gateway() {
    let (runtime, uri) = (Runtime::start(), PostgresServer::shared().database());
    let a = gateway(&uri, "a", &runtime).start();
    assert!(set_password(&a, PASSWORD).status.success());
    let b = gateway(&uri, "b", &runtime).start();
    assert!(b.log().contains("[INFO] gateway b\n"), "{}", b.log());
    let second = gateway(&uri, "a", &runtime).run(&["serve"]);
    let printed = String::from_utf8_lossy(&second.stderr).into_owned();
    assert_eq!(second.status.code(), Some(1), "{printed}");
    assert!(
        printed.contains(&format!("http://{}", a.address))
            && printed.contains("set gateway (ADRIATICUM_GATEWAY)"),
        "{printed}"
    );
    assert!(
        printed.contains("such as a-2") && !printed.contains("ADRIATICUM_DATABASE"),
        "{printed}"
    );
    for _ in 0..20 {
        let key = a.key();
        b.post(&key, &chat("x")).is_completion();
        let id = "SELECT id FROM keys WHERE revoked IS NULL";
        let Text(id) = &a.query(id)[0][0] else {
            panic!("no id")
        };
        a.stdout_of(&["keys", "revoke", id]);
        b.post(&key, &chat("x")).is_error(401, "invalid_api_key");
    }
    let mut browser = Browser::signed_in(&a);
    browser.server = &b;
    assert_eq!(
        browser.get("/usage").status,
        200,
        "the session is valid here too"
    );
    let printed = b.stdout_of(&["usage", "verify"]);
    assert!(
        printed.contains("20 rows, nothing wrong") && printed.contains("b:20:"),
        "{printed}"
    );
}

#[test]
fn a_budget_holds_over_all_gateways() {
    let (runtime, uri) = (Runtime::start(), PostgresServer::shared().database());
    let [a, b] = ["a", "b"].map(|name| gateway(&uri, name, &runtime).start());
    let key = a
        .stdout_of(&["keys", "create", "x", "--budget", "1400/month"])
        .trim()
        .to_owned();
    use_up(&[&a, &b], &key, 100);
    a.post(&key, &chat("x"))
        .is_error(403, "insufficient_permission");
    b.post(&key, &chat("x"))
        .is_error(403, "insufficient_permission");
}

#[test]
fn the_console_separates_the_gateways() {
    let (runtime, uri) = (Runtime::start(), PostgresServer::shared().database());
    let a = gateway(&uri, "north", &runtime).start();
    assert!(set_password(&a, PASSWORD).status.success());
    let mut browser = Browser::signed_in(&a);
    assert!(
        !browser.get("/usage").text().contains("All gateways"),
        "there is one"
    );
    let b = gateway(&uri, "south", &runtime).start();
    let key = a.key();
    for server in [&a, &b, &b] {
        server.post(&key, &chat("x")).is_completion();
    }
    let mut figures_of = |query: &str| {
        let usage = browser.get(&format!("/usage?range=24h{query}")).text();
        // A link with the number of requests.
        let requests = usage
            .split("<strong>")
            .nth(1)
            .and_then(|rest| rest.split("</").next()?.rsplit('>').next());
        let rows = browser.get(&format!("/requests?range=24h{query}")).text();
        let cells = |name: &str| {
            rows.matches(&format!("data-label=\"Gateway\">{name}</td>"))
                .count()
        };
        (
            requests.unwrap_or("").to_owned(),
            cells("north"),
            cells("south"),
        )
    };
    assert_eq!(figures_of(""), ("3".into(), 1, 2));
    assert_eq!(figures_of("&gateway=south"), ("2".into(), 0, 2));
    assert_eq!(figures_of("&gateway=elsewhere"), ("0".into(), 0, 0));
    let row = |text: &str, name: &str| -> String {
        let row = text
            .split(&format!(
                "scope=\"row\"><span class=\"text\">{name}</span></th>"
            ))
            .nth(1)
            .unwrap_or("");
        row.split("</tr>").next().unwrap_or("").to_owned()
    };
    let text = browser.get("/status").text();
    for name in ["north", "south"] {
        let row = row(&text, name);
        assert!(
            row.contains(adriaticum::VERSION) && row.contains(">now<"),
            "{row}"
        );
    }
}

/// Every gateway loses its connections, and one is killed.
#[test]
fn a_request_leaves_a_row_unless_its_gateway_is_killed() {
    let (runtime, uri) = (Runtime::start(), PostgresServer::shared().database());
    let [a, b, c] = ["a", "b", "c"].map(|name| gateway(&uri, name, &runtime).start());
    let key = a.key();
    let (mut running, gate) = held(&a, &runtime, &key);
    let (_lost, _gate) = held(&c, &runtime, &key);
    let others = "datname = current_database() AND pid <> pg_backend_pid()";
    a.query(&format!(
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE {others}"
    ));
    c.signal(Signal::KILL);
    gate.store(true, Ordering::Release);
    running.reply().is_completion();
    b.post(&key, &chat("x")).is_completion();
    let printed = b.stdout_of(&["usage", "verify"]);
    assert!(
        printed.contains("2 rows, nothing wrong") && printed.contains("a:1:"),
        "{printed}"
    );
    // A process that starts under the name continues its chain.
    let (_lost, _gate) = held(&a, &runtime, &key);
    a.signal(Signal::KILL);
    let a = gateway(&uri, "a", &runtime).start();
    a.post(&key, &chat("x")).is_completion();
    let printed = b.stdout_of(&["usage", "verify"]);
    assert!(
        printed.contains("3 rows, nothing wrong") && printed.contains("a:2:"),
        "{printed}"
    );
    let epochs = "SELECT name, epoch FROM gateways WHERE epoch > 0 ORDER BY name";
    let epochs = a
        .query(epochs)
        .into_iter()
        .map(|row| row[1].clone())
        .collect::<Vec<_>>();
    assert_eq!(epochs, [Integer(2), Integer(1), Integer(1)]);
}

#[test]
fn a_process_that_was_replaced_stops_and_writes_nothing_more() {
    let (runtime, uri) = (Runtime::start(), PostgresServer::shared().database());
    let mut server = gateway(&uri, "a", &runtime).start();
    let key = server.key();
    let (mut running, gate) = held(&server, &runtime, &key);
    server.query("UPDATE gateways SET epoch = epoch + 1 WHERE name = 'a'");
    until("it finds out", || {
        server
            .log()
            .contains("another process serves under the name")
    });
    gate.store(true, Ordering::Release);
    running.reply().is_error(503, "service_unavailable");
    assert_eq!(server.wait().code(), Some(1));
    assert!(server.query("SELECT 1 FROM usage").is_empty());
}

#[test]
fn a_row_that_can_not_be_written_in_time_is_not_written_later() {
    let (runtime, uri) = (Runtime::start(), PostgresServer::shared().database());
    let server = gateway(&uri, "a", &runtime).start();
    let key = server.key();
    let (mut running, gate) = held(&server, &runtime, &key);
    set_usable(&uri, false);
    gate.store(true, Ordering::Release);
    let reply = running.reply();
    reply.is_error(503, "service_unavailable");
    assert_eq!(reply.header("x-should-retry"), Some("false"));
    set_usable(&uri, true);
    until("it is served again", || {
        server.post(&key, &chat("x")).status == 200
    });
    assert_eq!(
        server.query("SELECT status, seq FROM usage"),
        [[Integer(200), Integer(1)]]
    );
    assert!(
        server
            .stdout_of(&["usage", "verify"])
            .contains("1 row, nothing wrong")
    );
    until("the log says so", || {
        server.log().contains("database works again")
    });
    let log = server.log();
    let printed = [
        ": the database can't be used: ",
        "database works again",
        "failed: ",
    ];
    assert_eq!(
        printed.map(|line| log.matches(line).count()),
        [1, 1, 0],
        "{log}"
    );
}

/// A primary that was replaced may still answer look-ups.
#[test]
fn a_completion_of_a_secret_that_ended_before_is_not_sent() {
    for (cause, change) in [
        ("revoked", "UPDATE keys SET revoked = created"),
        ("replaced", "UPDATE key_secrets SET ends = created"),
    ] {
        let (runtime, uri) = (Runtime::start(), PostgresServer::shared().database());
        let server = gateway(&uri, "a", &runtime).start();
        let key = server.key();
        server.post(&key, &chat("x")).is_completion();
        let (mut running, gate) = held(&server, &runtime, &key);
        // As if that had been done before the request arrived, and the look-up had not seen it.
        server.query(change);
        gate.store(true, Ordering::Release);
        let message = running.reply().is_error(401, "invalid_api_key");
        assert!(message.contains(cause), "{message}");
        assert_eq!(
            server.query("SELECT count(*) FROM usage"),
            [[Integer(1)]],
            "it leaves no row"
        );
        let log = server.log();
        assert!(log.contains(&format!("cause={cause}")), "{log}");
    }
}

#[test]
fn check_warns_of_a_clock_that_differs_from_that_of_the_database() {
    let (runtime, uri) = (Runtime::start(), PostgresServer::shared().database());
    let server = gateway(&uri, "a", &runtime);
    server.stdout_of(&["keys", "create", "x"]);
    let name = psql(&uri, &["-c", "SELECT current_database()"]);
    // A function of ours is found before the system's.
    psql(
        &uri,
        &[
            "-c",
            &format!("ALTER DATABASE {name} SET search_path = public, pg_catalog"),
        ],
    );
    for (difference, expected) in [
        ("- interval '1 hour'", "s ahead of"),
        ("+ interval '1 hour'", "s behind"),
        ("", ""),
    ] {
        let clock = format!(
            "CREATE OR REPLACE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql
             AS $$ SELECT pg_catalog.clock_timestamp() {difference} $$"
        );
        psql(&uri, &["-c", &clock]);
        let printed = String::from_utf8_lossy(&server.run(&["check"]).stdout).into_owned();
        let line = printed
            .lines()
            .find(|line| line.contains(" clock "))
            .unwrap_or_default();
        let warning = format!("{expected} the database's clock. Synchronize both with NTP");
        let found = (line.starts_with("warn"), line.contains(&warning));
        assert_eq!(
            found,
            (!expected.is_empty(), !expected.is_empty()),
            "{printed}"
        );
    }
}
