//! The audit: what the console, the command line and a signal leave in it.

use rustix::process::Signal;
use serde_json::Value;

use crate::console::{Browser, PASSWORD, set_password};
use crate::support::{Server, until};

fn audit(server: &Server) -> Vec<Value> {
    serde_json::from_str(&server.stdout_of(&["audit", "--json"])).expect("JSON")
}

/// The rows of an action: via and actor.
fn rows(server: &Server, action: &str) -> Vec<(String, String)> {
    let text = |row: &Value, name: &str| row[name].as_str().expect("a text").to_owned();
    let rows = audit(server)
        .into_iter()
        .filter(|row| row["action"] == action);
    rows.map(|row| (text(&row, "via"), text(&row, "actor")))
        .collect()
}

#[test]
fn every_way_to_change_something_leaves_a_row() {
    let server = Server::new(None).set("SUDO_USER", "ana\u{202e}").start();
    assert!(set_password(&server, PASSWORD).status.success());
    let secret = server
        .stdout_of(&["keys", "create", "first"])
        .trim()
        .to_owned();
    let (via, user) = rows(&server, "key_created").remove(0);
    assert!(
        via == "command" && !user.is_empty() && !user.contains("ana"),
        "a name that can't be one: {user}"
    );
    let server_of_ana = |arguments: &[&str]| {
        let output = server
            .command(arguments)
            .env("SUDO_USER", "ana")
            .output()
            .expect("it should run");
        assert!(output.status.success(), "{output:?}");
    };
    let id = audit(&server)[1]["key_id"]
        .as_str()
        .expect("an id")
        .to_owned();
    server_of_ana(&["keys", "set", &id, "--concurrent", "7"]);
    server_of_ana(&["keys", "rename", &id, "second"]);
    let by_ana = ("command".to_owned(), format!("ana as {user}"));
    assert_eq!(rows(&server, "key_changed"), [by_ana.clone(), by_ana]);

    let mut browser = Browser::new(&server);
    browser.get("/sign-in");
    for _ in 0..3 {
        assert_eq!(
            browser
                .post("/sign-in", &[("password", "a wrong password")])
                .status,
            401
        );
    }
    assert_eq!(
        browser.post("/sign-in", &[("password", PASSWORD)]).status,
        303
    );
    let web = [("console".to_owned(), "127.0.0.1".to_owned())];
    assert_eq!(rows(&server, "signed_in"), web);
    browser.get("/keys");
    for _ in 0..2 {
        browser.post(&format!("/keys/{id}/revoke"), &[]);
    }
    assert_eq!(
        rows(&server, "key_revoked"),
        web,
        "the second time changes nothing"
    );

    server.signal(Signal::HUP);
    until("the settings are reloaded", || {
        !rows(&server, "settings_reloaded").is_empty()
    });
    assert_eq!(
        rows(&server, "settings_reloaded"),
        [("signal".to_owned(), "SIGHUP".to_owned())]
    );

    let page = browser.get("/audit").text();
    for part in [
        "key created",
        "concurrent: none → 7",
        "SIGHUP",
        "ana as",
        "second</a>",
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
    let table = server.stdout_of(&["audit", "--since", "1h"]);
    assert!(
        table.lines().count() == audit(&server).len() + 1 && table.contains("key revoked"),
        "{table}"
    );
    for printed in [page, table, server.stdout_of(&["audit", "--json"])] {
        assert!(
            !printed.contains(&secret) && !printed.contains("horse"),
            "a secret: {printed}"
        );
    }

    // Failed sign-ins are in the log, in a form for fail2ban.
    let failed = "[WARN] console: sign-in failed, client=127.0.0.1";
    assert_eq!(server.log().matches(failed).count(), 3, "{}", server.log());
}

#[test]
fn the_page_has_pages() {
    let server = Server::new(None).start();
    server.key();
    assert!(set_password(&server, PASSWORD).status.success());
    let insert = |server: &Server, number: i64, created: i64| {
        server.query(&format!(
            "INSERT INTO audit VALUES ('audit_{number:032x}', {created}, 'signed_in', 'console', 'row {number}', '', NULL, NULL)
             RETURNING 1"
        ));
    };
    let now = std::time::UNIX_EPOCH
        .elapsed()
        .expect("a time after 1970")
        .as_secs() as i64;
    for number in 0..110 {
        insert(
            &server,
            number,
            if number < 10 { now - 40 * 86_400 } else { now },
        );
    }
    let mut browser = Browser::signed_in(&server);
    let mut next = Some("/audit".to_owned());
    let (mut pages, mut seen) = (0, String::new());
    while let Some(address) = next {
        let text = browser.get(&address).text();
        assert!(text.len() < 40_000, "{}", text.len());
        pages += 1;
        next = text
            .split("href=\"/audit?before=")
            .nth(1)
            .map(|rest| format!("/audit?before={}", rest.split('"').next().expect("its end")));
        seen += &text;
    }
    assert_eq!(pages, 3);
    for (about, has_keys) in [("keys", true), ("sign-ins", false), ("settings", false)] {
        let text = browser.get(&format!("/audit?about={about}")).text();
        assert_eq!(text.contains("key created"), has_keys, "{about}: {text}");
        assert_eq!(
            text.contains("signed in"),
            about == "sign-ins",
            "{about}: {text}"
        );
    }
    for number in 0..110 {
        assert_eq!(
            seen.matches(&format!(">row {number}<")).count(),
            1,
            "{number}"
        );
    }
}
