//! The console's list of keys and the page that changes one.

use serde_json::Value;

use crate::console::{Browser, PASSWORD, set_password, with_console};
use crate::support::{Reply, Runtime, Server, chat};

fn keys(server: &Server) -> Vec<Value> {
    serde_json::from_str(&server.stdout_of(&["keys", "list", "--json"])).expect("JSON")
}

fn only_id(server: &Server) -> String {
    keys(server)[0]["id"].as_str().expect("an id").to_owned()
}

/// The names that a list shows, in its order.
fn names(reply: &Reply) -> Vec<String> {
    let text = reply.text();
    let rows = text.split("<th role=\"rowheader\"").skip(1);
    rows.map(|row| row.split('>').nth(2).and_then(|rest| rest.split('<').next()).expect("a name").to_owned())
        .collect()
}

/// The value of a hidden field.
fn hidden(page: &str, name: &str) -> String {
    let rest = page.split(&format!("name=\"{name}\" value=\"")).nth(1).expect("the field");
    rest.split('"').next().expect("its end").to_owned()
}

#[test]
fn the_list_is_filtered_sorted_and_paged() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).sqlite().start();
    assert!(set_password(&server, PASSWORD).status.success());
    let secret = server.stdout_of(&["keys", "create", "busy"]).trim().to_owned();
    server.stdout_of(&["keys", "create", "Ana", "--permission", "metrics", "--expires", "90d"]);
    server.stdout_of(&["keys", "create", "crawler", "--expires", "7d"]);
    for _ in 0..2 {
        server.post(&secret, &chat("x")).is_completion();
    }
    server.post(&secret, &serde_json::json!({})).is_error(400, "invalid_request");
    let mut browser = Browser::signed_in(&server);
    for (query, expected) in [
        ("sort=name", ["Ana", "busy", "crawler"]),
        ("sort=-name", ["crawler", "busy", "Ana"]),
        ("sort=end", ["crawler", "Ana", "busy"]),
        ("sort=-requests&q=a", ["crawler", "Ana", ""]),
        ("q=METRICS", ["Ana", "", ""]),
        ("q=nothing+of+that", ["", "", ""]),
    ] {
        let mut found = names(&browser.get(&format!("/keys?{query}")));
        if query.starts_with("sort=-requests") {
            // Both have no request, so their random ids decide.
            found.sort();
            found.reverse();
        }
        found.resize(3, String::new());
        assert_eq!(found, expected, "{query}");
    }
    let text = browser.get("/keys?sort=-requests").text();
    let first = text.split("<th role=\"rowheader\"").nth(1).expect("a row");
    assert!(first.contains("busy") && first.contains(">3</a>"), "requests: {first}");
    assert!(first.contains(">1</a>") && first.contains(">28</td>"), "errors and tokens: {first}");
    assert!(text.contains("aria-sort=\"descending\""));
    assert!(!text.contains("Next"), "there is one page");

    server.query(
        "WITH RECURSIVE n(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM n WHERE n < 59)
         INSERT INTO keys (id, digest, name, permissions, created, expires, hint)
         SELECT printf('key_%016x', n), randomblob(32), printf('many %02d', n), 'completions', 5, 4000000000,
         'adr_0123…4567' FROM n RETURNING 1",
    );
    let reply = browser.get("/keys?sort=name&q=many");
    assert_eq!(names(&reply).len(), 50);
    assert!(reply.text().contains("Page 1 of 2, 60 keys") && reply.text().contains("page=2"));
    assert!(reply.body.len() < 42_000, "{} bytes", reply.body.len());
    let second = names(&browser.get("/keys?sort=name&q=many&page=2"));
    assert_eq!((second.len(), second[0].as_str()), (10, "many 50"));
    assert_eq!(names(&browser.get("/keys?sort=name&q=many&page=99")), second, "the last page there is");
}

#[test]
fn everything_of_a_key_is_changed_in_one_place() {
    let runtime = Runtime::start();
    let server = with_console(Some(&runtime));
    let secret = server.stdout_of(&["keys", "create", "first"]).trim().to_owned();
    let id = only_id(&server);
    let mut browser = Browser::signed_in(&server);
    let address = format!("/keys/{id}");
    let page = browser.get(&address).text();
    assert!(page.contains(&id) && !page.contains(&secret) && page.contains("0 requests"), "{page}");
    let (version, loaded) = (hidden(&page, "version"), hidden(&page, "loaded"));
    let form = |name: &'static str| {
        [
            ("name", name),
            ("permission", "completions"),
            ("permission", "metrics"),
            ("expires", "90d"),
            ("concurrent", "7"),
            ("budget", "20,000"),
            ("budget_per", "day"),
            ("version", version.as_str()),
            ("loaded", loaded.as_str()),
        ]
    };
    let saved = format!("/keys?changed={id}");
    for attempt in ["once", "sent twice"] {
        assert_eq!(
            browser.post(&address, &form("second")).header("location"),
            Some(saved.as_str()),
            "{attempt}"
        );
    }
    assert!(browser.get(&saved).text().contains("Saved"));
    let key = keys(&server).remove(0);
    assert_eq!((&key["name"], &key["concurrent"]), (&"second".into(), &7.into()));
    assert_eq!(key["permissions"], serde_json::json!(["completions", "metrics"]));
    assert_eq!(key["budget"], serde_json::json!({"tokens": 20_000, "per": "day", "used": 0}));
    assert_eq!(key["expires"], loaded.parse::<i64>().expect("a time") + 90 * 86_400);
    assert_eq!(
        server.query("SELECT id FROM audit WHERE action = 'key_changed'").len(),
        1,
        "one change, one row"
    );

    // The expiry stays to the second if it is kept, and the other terms can be taken back.
    let page = browser.get(&address).text();
    let version = hidden(&page, "version");
    assert!(
        page.contains("value=\"20000\"") && page.contains("<progress max=\"20000\" value=\"0\""),
        "{page}"
    );
    let keep = [
        ("name", "second"),
        ("permission", "completions"),
        ("expires", "keep"),
        ("version", version.as_str()),
    ];
    assert_eq!(browser.post(&address, &keep).status, 303);
    let kept = keys(&server).remove(0);
    assert_eq!((&kept["expires"], &kept["concurrent"]), (&key["expires"], &Value::Null));
    assert_eq!(kept["budget"], Value::Null);
    let version = hidden(&browser.get(&address).text(), "version");
    for (field, bad) in [
        ("name", "\u{202e}"),
        ("permission", "nonsense"),
        ("expires", "soon"),
        ("concurrent", "0"),
        ("budget", "0"),
    ] {
        let mut fields = vec![("name", "x"), ("permission", "completions"), ("version", version.as_str())];
        fields.retain(|(name, _)| *name != field);
        fields.push((field, bad));
        let reply = browser.post(&address, &fields);
        assert!(reply.status == 400 && reply.text().contains("role=\"alert\""), "{field}: {}", reply.text());
    }
    assert_eq!(keys(&server).remove(0), kept, "nothing was changed");
    server.post(&secret, &chat("x")).is_completion();

    // Its page and the list show what was used of a budget.
    for (budget, badge) in [("15/day", "budget 93 %"), ("14/day", "budget used up"), ("28/month", "50%")] {
        server.stdout_of(&["keys", "set", &id, "--budget", budget]);
        for path in [&*address, "/keys"] {
            let text = browser.get(path).text();
            assert!(text.contains(badge), "{text}");
        }
    }
    for (expires, is_marked) in [("5d", true), ("12d", false)] {
        server.stdout_of(&["keys", "set", &id, "--expires", expires]);
        for path in [&*address, "/keys"] {
            let text = browser.get(path).text();
            assert_eq!(text.contains(">expires in 5 days<"), is_marked, "{text}");
        }
    }
}

#[test]
fn two_operators_do_not_overwrite_each_other() {
    let server = with_console(None);
    server.stdout_of(&["keys", "create", "first"]);
    let id = only_id(&server);
    let address = format!("/keys/{id}");
    let mut one = Browser::signed_in(&server);
    let mut other = Browser::signed_in(&server);
    let version = hidden(&one.get(&address).text(), "version");
    other.get(&address);
    let fields = |name: &'static str, version: &str| {
        [("name", name.to_owned()), ("permission", "completions".into()), ("version", version.to_owned())]
    };
    let send = |browser: &mut Browser, name: &'static str, version: &str| {
        let fields = fields(name, version);
        let fields: Vec<_> = fields.iter().map(|(name, value)| (*name, value.as_str())).collect();
        browser.post(&address, &fields)
    };
    assert_eq!(send(&mut other, "theirs", &version).status, 303);
    let reply = send(&mut one, "mine", &version);
    let text = reply.text();
    assert_eq!(reply.status, 409, "{text}");
    assert!(text.contains("theirs</h1>") && text.contains("value=\"mine\""), "both are on the page: {text}");
    assert_eq!(keys(&server)[0]["name"], "theirs");
    let version = hidden(&text, "version");
    assert_eq!(send(&mut one, "mine", &version).status, 303, "now it is meant");
    assert_eq!(keys(&server)[0]["name"], "mine");

    let version = hidden(&one.get(&address).text(), "version");
    assert!(server.run(&["keys", "revoke", &id]).status.success());
    let reply = send(&mut one, "late", &version);
    assert!(reply.status == 409 && reply.text().contains("was revoked since"), "{}", reply.text());
    assert!(!reply.text().contains("name=\"version\""), "a revoked key has no form");
    assert_eq!(one.get(&address).status, 200);
    let again = one.get(&format!("{address}/revoke"));
    assert_eq!(
        (again.status, again.header("location")),
        (303, Some(address.as_str())),
        "back after the revocation"
    );
    assert_eq!(keys(&server)[0]["name"], "mine");
    assert_eq!(one.post("/keys/key_none", &[]).status, 404);
    one.get("/keys");
    assert!(set_password(&server, "another password than before").status.success());
    let ended = format!("/sign-in?ended=1&next={}", address.replace('/', "%2F"));
    assert_eq!(send(&mut one, "x", "").header("location"), Some(ended.as_str()), "the session is over");
}
