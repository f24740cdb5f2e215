//! The console's list of keys and the page that changes one.

use serde_json::Value;

use crate::console::{Browser, PASSWORD, encode, set_password, with_console};
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
    rows.map(|row| {
        row.split('>')
            .nth(2)
            .and_then(|rest| rest.split('<').next())
            .expect("a name")
            .to_owned()
    })
    .collect()
}

/// The value of a hidden field.
fn hidden(page: &str, name: &str) -> String {
    let rest = page
        .split(&format!("name=\"{name}\" value=\""))
        .nth(1)
        .expect("the field");
    rest.split('"').next().expect("its end").to_owned()
}

#[test]
fn the_list_is_filtered_sorted_and_paged() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime)).sqlite().start();
    assert!(set_password(&server, PASSWORD).status.success());
    let secret = server
        .stdout_of(&["keys", "create", "busy"])
        .trim()
        .to_owned();
    server.stdout_of(&[
        "keys",
        "create",
        "Ana",
        "--permission",
        "metrics",
        "--expires",
        "90d",
    ]);
    server.stdout_of(&["keys", "create", "crawler", "--expires", "7d"]);
    for _ in 0..2 {
        server.post(&secret, &chat("x")).is_completion();
    }
    server
        .post(&secret, &serde_json::json!({}))
        .is_error(400, "invalid_request");
    let mut browser = Browser::signed_in(&server);
    for (query, expected) in [
        ("sort=name", ["Ana", "busy", "crawler"]),
        ("sort=-name", ["crawler", "busy", "Ana"]),
        ("sort=expires", ["crawler", "Ana", "busy"]),
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
    assert!(
        first.contains("busy") && first.contains(">3</a>"),
        "requests: {first}"
    );
    assert!(
        first.contains(">1</a>") && first.contains(">28</td>"),
        "errors and tokens: {first}"
    );
    assert!(text.contains("aria-sort=\"descending\""));
    assert!(!text.contains("Next"), "there is one page");

    server.query(
        "WITH RECURSIVE n(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM n WHERE n < 59)
         INSERT INTO keys (id, name, permissions, created, expires)
         SELECT printf('key_%016x', n), printf('many %02d', n), 'completions', 5, 4000000000 FROM n RETURNING 1",
    );
    server.query(
        "INSERT INTO key_secrets (digest, key_id, hint, created)
         SELECT randomblob(32), id, 'adr_0123…4567', 5 FROM keys WHERE name LIKE 'many %' RETURNING 1",
    );
    let reply = browser.get("/keys?sort=name&q=many");
    assert_eq!(names(&reply).len(), 50);
    assert!(reply.text().contains("Page 1 of 2, 60 keys") && reply.text().contains("page=2"));
    assert!(reply.body.len() < 60 * 1024, "{} bytes", reply.body.len());
    let second = names(&browser.get("/keys?sort=name&q=many&page=2"));
    assert_eq!((second.len(), second[0].as_str()), (10, "many 50"));
    assert_eq!(
        names(&browser.get("/keys?sort=name&q=many&page=99")),
        second,
        "the last page there is"
    );
}

#[test]
fn everything_of_a_key_is_changed_in_one_place() {
    let runtime = Runtime::start();
    let server = with_console(Some(&runtime));
    let secret = server
        .stdout_of(&["keys", "create", "first"])
        .trim()
        .to_owned();
    let id = only_id(&server);
    let mut browser = Browser::signed_in(&server);
    let address = format!("/keys/{id}");
    let page = browser.get(&address).text();
    assert!(
        page.contains(&id) && !page.contains(&secret) && page.contains("Requests, 30"),
        "{page}"
    );
    // A term counts from when the form is sent, so the same form sent twice has a date.
    let created = keys(&server)[0]["created"].as_i64().expect("a time");
    let day = jiff::Timestamp::from_second(created + 90 * 86_400).expect("a time");
    let day = day.strftime("%F").to_string();
    let form = |name: &'static str| {
        [
            ("name", name),
            ("permission", "completions"),
            ("permission", "metrics"),
            ("expires", day.as_str()),
            ("term", ""),
            ("concurrent", "7"),
            ("budget", "20,000"),
            ("budget_per", "day"),
        ]
    };
    let saved = format!("/keys?changed={id}");
    let term = [
        ("name", "first"),
        ("permission", "completions"),
        ("expires", ""),
        ("term", "90d"),
    ];
    browser.post(&address, &term);
    let ends = keys(&server)[0]["expires"].as_i64().expect("a time");
    assert!((90 * 86_400..90 * 86_400 + 600).contains(&(ends - created)));
    for attempt in ["once", "sent twice"] {
        assert_eq!(
            browser.post(&address, &form("second")).header("location"),
            Some(saved.as_str()),
            "{attempt}"
        );
    }
    assert!(browser.get(&saved).text().contains("Saved"));
    let key = keys(&server).remove(0);
    assert_eq!(
        (&key["name"], &key["concurrent"]),
        (&"second".into(), &7.into())
    );
    assert_eq!(
        key["permissions"],
        serde_json::json!(["completions", "metrics"])
    );
    assert_eq!(
        key["budget"],
        serde_json::json!({"tokens": 20_000, "per": "day", "used": 0})
    );
    let [expires, created] = ["expires", "created"].map(|name| key[name].as_i64().expect("a time"));
    assert!((90 * 86_400..92 * 86_400).contains(&(expires - created)));
    assert_eq!(
        server
            .query("SELECT id FROM audit WHERE action = 'key_changed'")
            .len(),
        2,
        "one change, one row: the term, and what was sent twice"
    );

    // The expiry stays to the second if it is kept, and the other terms can be taken back.
    server.query(&format!(
        "UPDATE keys SET expires = {} RETURNING 1",
        expires - 3600
    ));
    let key = keys(&server).remove(0);
    let page = browser.get(&address).text();
    let last_day = page
        .split("name=\"expires\" value=\"")
        .nth(1)
        .expect("the field")[..10]
        .to_owned();
    let expected = server.query(&format!("SELECT date({}, 'unixepoch')", expires - 3600 - 1));
    assert_eq!(expected, [[rusqlite::types::Value::Text(last_day.clone())]]);
    assert!(
        page.contains("value=\"20000\"") && page.contains("<progress max=\"20000\" value=\"0\""),
        "{page}"
    );
    let keep = [
        ("name", "second"),
        ("permission", "completions"),
        ("expires", last_day.as_str()),
    ];
    assert_eq!(browser.post(&address, &keep).status, 303);
    let kept = keys(&server).remove(0);
    assert_eq!(
        (&kept["expires"], &kept["concurrent"]),
        (&key["expires"], &Value::Null)
    );
    assert_eq!(kept["budget"], Value::Null);
    for (field, bad) in [
        ("name", "\u{202e}"),
        ("permission", "nonsense"),
        ("expires", "soon"),
        ("concurrent", "0"),
        ("budget", "0"),
    ] {
        let mut fields = vec![("name", "x"), ("permission", "completions")];
        fields.retain(|(name, _)| *name != field);
        fields.push((field, bad));
        let reply = browser.post(&address, &fields);
        let text = reply.text();
        assert!(
            reply.status == 400 && text.contains("role=\"alert\""),
            "{field}: {text}"
        );
        assert_eq!(
            text.matches("aria-invalid=\"true\"").count(),
            1,
            "{field}: {text}"
        );
        let focused = text
            .split('<')
            .find(|element| element.contains(" autofocus"))
            .expect("the focus");
        assert!(focused.contains(&format!("name=\"{field}\"")), "{focused}");
    }
    let typed = [
        ("name", "x"),
        ("permission", "metrics"),
        ("expires", "2001-01-01"),
        ("budget", "1, x"),
    ];
    let text = browser.post(&address, &typed).text();
    for kept in [
        "value=\"2001-01-01\"",
        "value=\"1, x\"",
        "value=\"metrics\" checked",
    ] {
        assert!(text.contains(kept), "{kept}: {text}");
    }
    assert_eq!(keys(&server).remove(0), kept, "nothing was changed");
    server.post(&secret, &chat("x")).is_completion();

    // Its page and the list show what was used of a budget, once.
    for (budget, figures) in [
        ("15/day", "</progress>93% of 15 a day"),
        (
            "14/day",
            "% of 14 a day <span class=\"badge bad\">used up</span>",
        ),
        ("28/month", "</progress>50% of 28 a month"),
    ] {
        server.stdout_of(&["keys", "set", &id, "--budget", budget, "--concurrent", "3"]);
        for path in [&*address, "/keys"] {
            let text = browser.get(path).text();
            assert_eq!(text.matches(figures).count(), 1, "{text}");
        }
        assert!(browser.get("/keys").text().contains(">3 concurrent<"));
    }
    for (expires, left) in [("5d", "5 days"), ("3h", "3 hours"), ("12d", "")] {
        server.stdout_of(&["keys", "set", &id, "--expires", expires]);
        for path in [&*address, "/keys"] {
            let text = browser.get(path).text();
            let badge = text
                .split(">expires in ")
                .nth(1)
                .map_or("", |rest| rest.split('<').next().expect("its end"));
            assert_eq!(badge, left, "{text}");
        }
    }
}

#[test]
fn the_last_change_of_two_operators_wins_and_the_audit_has_both() {
    let server = with_console(None);
    server.stdout_of(&["keys", "create", "first"]);
    let id = only_id(&server);
    let address = format!("/keys/{id}");
    let mut one = Browser::signed_in(&server);
    let mut other = Browser::signed_in(&server);
    one.get(&address);
    other.get(&address);
    let send = |browser: &mut Browser, name: &str| {
        browser.post(&address, &[("name", name), ("permission", "completions")])
    };
    assert_eq!(send(&mut other, "theirs").status, 303);
    assert_eq!(send(&mut one, "mine").status, 303);
    assert_eq!(keys(&server)[0]["name"], "mine");
    let audit = server.stdout_of(&["audit"]);
    for change in ["\"first\" → \"theirs\"", "\"theirs\" → \"mine\""] {
        assert!(audit.contains(change), "{audit}");
    }

    assert!(server.run(&["keys", "revoke", &id]).status.success());
    let reply = send(&mut one, "late");
    let text = reply.text();
    assert!(
        reply.status == 400
            && text.contains("The key is revoked")
            && text.contains("Nothing was changed."),
        "{text}"
    );
    assert!(!text.contains("name=\"name\""), "a revoked key has no form");
    assert_eq!(one.get(&address).status, 200);
    let again = one.get(&format!("{address}/revoke"));
    assert_eq!(
        (again.status, again.header("location")),
        (303, Some(address.as_str())),
        "back after the revocation"
    );
    assert_eq!(keys(&server)[0]["name"], "mine");
    assert_eq!(one.post("/keys/key_none", &[]).status, 404);
}

#[test]
fn an_expiry_of_today_is_the_end_of_today() {
    let server = with_console(None);
    let mut browser = Browser::signed_in(&server);
    let page = browser.get("/keys/new").text();
    // The first day that the field offers.
    let today = page.split(" min=\"").nth(1).expect("the field")[..10].to_owned();
    let once = hidden(&page, "once");
    let form = [
        ("name", "x"),
        ("permission", "completions"),
        ("expires", today.as_str()),
        ("once", once.as_str()),
    ];
    let reply = browser.post("/keys", &form);
    assert_eq!(reply.status, 200, "{}", reply.text());
    let key = keys(&server).remove(0);
    let [expires, created] = ["expires", "created"].map(|name| key[name].as_i64().expect("a time"));
    assert_eq!(expires % 86_400, 0);
    assert!((1..=86_400).contains(&(expires - created)), "{key}");
}

/// A filter that meant no key showed the figures of all keys, and one by a name only those of one key that has it.
#[test]
fn a_filter_by_key_means_one_key_or_all_of_a_name() {
    let runtime = Runtime::start();
    let server = with_console(Some(&runtime));
    let mut hints = Vec::new();
    for (name, requests) in [("twin", 1), ("twin", 2), ("key_of_Ana", 3)] {
        let secret = server
            .stdout_of(&["keys", "create", name])
            .trim()
            .to_owned();
        hints.push(format!("{}…{}", &secret[..8], &secret[48..]));
        for _ in 0..requests {
            server.post(&secret, &chat("x")).is_completion();
        }
    }
    let mut keys = keys(&server);
    // Those of one second are in the order of their random ids.
    keys.sort_by_key(|key| hints.iter().position(|hint| key["hint"] == **hint));
    let field = |number: usize, name: &str| keys[number][name].as_str().expect("a text").to_owned();
    let mut browser = Browser::signed_in(&server);
    // The listed and exported requests; `None` if the page has no figures.
    let mut shown = |text: &str| -> Option<usize> {
        let mut get = |path: &str| browser.get(&format!("{path}?range=24h&key={}", encode(text)));
        let (usage, requests) = (get("/usage").text(), get("/requests").text());
        let (csv, totals) = (get("/requests/export.csv"), get("/usage/totals.csv"));
        let listed = requests.matches("href=\"/requests/chatcmpl_").count();
        if !usage.contains("cards-row") {
            assert_eq!([csv.status, totals.status], [404; 2], "{text}");
            assert_eq!(
                (listed, requests.contains("export.csv")),
                (0, false),
                "{text}: {requests}"
            );
            return None;
        }
        let figure = usage
            .split("<strong>")
            .nth(1)
            .and_then(|rest| rest.split("</").next())
            .expect("a figure");
        assert!(figure.ends_with(&format!(">{listed}")), "{text}: {figure}");
        assert_eq!(csv.text().matches("chatcmpl_").count(), listed, "{text}");
        let field = requests.split("name=\"key\"").nth(1).expect("a field");
        let field = field.split('>').next().expect("its end");
        assert!(text.is_empty() || !field.contains("value=\"\""), "{field}");
        Some(listed)
    };
    for (text, expected) in [
        (String::new(), Some(6)),
        (field(0, "id"), Some(1)),
        (field(1, "id"), Some(2)),
        (format!("twin {}", field(0, "hint")), Some(1)),
        (format!("renamed {}", field(1, "hint")), Some(2)),
        ("key_of_Ana".into(), Some(3)),
        ("KEY_OF".into(), Some(3)),
        ("twin".into(), Some(3)),
        ("nobody".into(), None),
        ("key_0123456789abcdef".into(), None),
    ] {
        assert_eq!(shown(&text), expected, "{text}");
    }
    server.stdout_of(&["keys", "revoke", &field(0, "id")]);
    assert_eq!(shown("twin"), Some(3), "a revoked key counts");
    let text = browser.get("/usage?range=7d&key=in").text();
    let links = ["id", "hint"].map(|name| [0, 1].map(|number| field(number, name)));
    for number in [0, 1] {
        let link = format!(
            "href=\"/usage?range=7d&amp;key={}\">twin {}</a>",
            links[0][number], links[1][number]
        );
        assert!(text.contains(&link), "{link}: {text}");
    }
    let text = browser.get("/usage?range=7d&key=twin").text();
    assert!(
        text.contains("href=\"/usage?range=30d&amp;key=twin\""),
        "a range keeps the filter: {text}"
    );
}

/// Both secrets work during the overlap, and the former one ends with the next rotation.
#[test]
fn a_key_is_rotated_in_the_console() {
    let runtime = Runtime::start();
    let server = with_console(Some(&runtime));
    let first = server
        .stdout_of(&["keys", "create", "first"])
        .trim()
        .to_owned();
    let id = only_id(&server);
    let mut browser = Browser::signed_in(&server);
    let address = format!("/keys/{id}/rotate");
    let page = browser.get(&format!("/keys/{id}")).text();
    assert!(page.contains(&format!("href=\"{address}\"")), "{page}");
    let secret_of = |reply: &Reply| {
        let text = reply.text();
        assert_eq!(reply.status, 200, "{text}");
        let (_, rest) = text.split_once("adr_").expect("the new secret");
        format!("adr_{}", &rest[..48])
    };
    let second = secret_of(&browser.post(&address, &[("ends", "24")]));
    for secret in [&first, &second] {
        server.post(secret, &chat("x")).is_completion();
    }
    let again = browser.post(&address, &[("ends", "24")]);
    assert_eq!(
        again.header("location"),
        Some(&*address),
        "it has an overlap"
    );
    let hint = format!("{}…{}", &first[..8], &first[48..]);
    let page = browser.get(&address).text();
    assert!(page.contains(&hint) && !page.contains("<select"), "{page}");
    assert_eq!(browser.post(&address, &[("ends", "2")]).status, 400);
    let third = secret_of(&browser.post(&address, &[("ends", "0")]));
    server.post(&third, &chat("x")).is_completion();
    for secret in [&first, &second] {
        server
            .post(secret, &chat("x"))
            .is_error(401, "invalid_api_key");
    }
    let audit = server.stdout_of(&["audit", "--json"]);
    assert_eq!(audit.matches("key_rotated").count(), 2, "{audit}");
    browser.post(&format!("/keys/{id}/revoke"), &[]);
    let revoked = browser.post(&address, &[("ends", "0")]);
    assert_eq!(revoked.status, 303, "{}", revoked.text());
}

#[test]
fn the_page_of_a_key_shows_an_overlap() {
    let server = with_console(None);
    let first = server
        .stdout_of(&["keys", "create", "first"])
        .trim()
        .to_owned();
    let id = only_id(&server);
    let mut browser = Browser::signed_in(&server);
    let mut page = || browser.get(&format!("/keys/{id}")).text();
    assert!(!page().contains("</code> until <time"));
    server.stdout_of(&["keys", "rotate", &id, "--overlap", "24h"]);
    let hint = format!("{}…{}", &first[..8], &first[48..]);
    let text = page();
    assert!(
        text.contains(&format!("and <code>{hint}</code> until <time")),
        "{text}"
    );
    server.stdout_of(&["keys", "rotate", &id]);
    assert!(!page().contains("</code> until <time"));
}

#[test]
fn links_lead_to_a_key_and_back() {
    let runtime = Runtime::start();
    let server = with_console(Some(&runtime));
    let secret = server
        .stdout_of(&["keys", "create", "first"])
        .trim()
        .to_owned();
    server.post(&secret, &chat("x")).is_completion();
    let id = only_id(&server);
    let mut browser = Browser::signed_in(&server);
    let list = "/keys?sort=-tokens&amp;q=f";
    let text = browser.get("/keys?sort=-tokens&q=f").text();
    for path in ["/keys/new".to_owned(), format!("/keys/{id}")] {
        assert!(
            text.contains(&format!("href=\"{}\"", list.replace("/keys", &path))),
            "{text}"
        );
        let page = browser.get(&format!("{path}?sort=-tokens&q=f")).text();
        assert!(page.contains(&format!("href=\"{list}\"")), "{page}");
    }
    let text = browser.get("/requests?range=7d&outcome=ok").text();
    assert!(
        text.contains(&format!("href=\"/keys/{id}\">first</a>")),
        "{text}"
    );
    let request = text
        .split("href=\"/requests/chatcmpl_")
        .nth(1)
        .expect("a request")
        .split('"')
        .next()
        .expect("its end");
    let page = browser
        .get(&format!(
            "/requests/chatcmpl_{}",
            request.replace("&amp;", "&")
        ))
        .text();
    assert!(
        page.contains("href=\"/requests?range=7d&amp;outcome=ok\">Requests</a>"),
        "{page}"
    );
}
