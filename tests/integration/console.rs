//! The console from outside: sign-in, forms, and that all input is escaped.

use rusqlite::types::Value;
use rustix::process::Signal;
use serde_json::json;

use crate::support::{
    Client, Reply, Runtime, Script, Server, chat, completion, connect_from, request, until,
};

pub const PASSWORD: &str = "correct horse battery staple";

/// A browser's side of it, with its cookies.
#[derive(Clone)]
pub struct Browser<'a> {
    pub server: &'a Server,
    /// The address that it connects from.
    pub source: [u8; 4],
    pub cookies: Vec<(String, String)>,
}

impl<'a> Browser<'a> {
    pub fn new(server: &'a Server) -> Self {
        Self {
            server,
            source: [127, 0, 0, 1],
            cookies: Vec::new(),
        }
    }

    pub fn signed_in(server: &'a Server) -> Self {
        let mut browser = Self::new(server);
        browser.get("/sign-in");
        let reply = browser.post("/sign-in", &[("password", PASSWORD)]);
        assert_eq!(
            (reply.status, reply.header("location")),
            (303, Some("/")),
            "{}",
            reply.text()
        );
        browser.get("/keys");
        browser
    }

    pub fn get(&mut self, path: &str) -> Reply {
        self.send("GET", path, "", "")
    }

    /// Sends a form of our own page.
    pub fn post(&mut self, path: &str, fields: &[(&str, &str)]) -> Reply {
        self.post_with(path, "Sec-Fetch-Site: same-origin\r\n", fields)
    }

    fn post_with(&mut self, path: &str, headers: &str, fields: &[(&str, &str)]) -> Reply {
        let body: Vec<String> = fields
            .iter()
            .map(|(name, value)| format!("{name}={}", encode(value)))
            .collect();
        self.send("POST", path, headers, &body.join("&"))
    }

    fn send(&mut self, method: &str, path: &str, headers: &str, body: &str) -> Reply {
        let cookies: Vec<String> = self
            .cookies
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        let address = self.server.address.parse().expect("an address of IPv4");
        let mut client = Client::new(connect_from(self.source, address));
        client.send(format!(
            "{method} {path} HTTP/1.1\r\nHost: console.localhost:8080\r\nCookie: {}\r\n{headers}Content-Length: {}\r\n\r\n{body}",
            cookies.join("; "),
            body.len()
        ));
        let reply = client.reply();
        for line in reply
            .head
            .lines()
            .filter_map(|line| line.strip_prefix("set-cookie: "))
        {
            let (name, value) = line
                .split(';')
                .next()
                .and_then(|pair| pair.split_once('='))
                .expect("a cookie");
            self.cookies.retain(|(known, _)| known != name);
            self.cookies.push((name.into(), value.into()));
        }
        reply
    }
}

impl Reply {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

pub fn encode(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

pub fn set_password(server: &Server, password: &str) -> std::process::Output {
    use std::io::Write;
    let mut child = server
        .command(&["console", "password"])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("the command should start");
    writeln!(child.stdin.take().expect("its input"), "{password}").expect("it should read");
    child.wait_with_output().expect("it should end")
}

pub fn with_console(runtime: Option<&Runtime>) -> Server {
    let server = Server::new(runtime).start();
    assert!(set_password(&server, PASSWORD).status.success());
    server
}

#[test]
fn without_a_password_it_only_says_how_to_set_one() {
    let server = Server::new(None).start();
    let mut browser = Browser::new(&server);
    for path in ["/", "/keys", "/usage", "/sign-in", "/nonsense"] {
        let reply = browser.get(path);
        assert!(
            reply.status == 200 && reply.text().contains("console password"),
            "{path}"
        );
    }
    assert!(
        browser
            .post("/keys", &[("name", "x")])
            .text()
            .contains("console password")
    );
    for short in ["", "eleven char"] {
        let output = set_password(&server, short);
        assert_eq!(output.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&output.stderr).contains("12 characters"));
    }
    assert!(set_password(&server, PASSWORD).status.success());
    assert_eq!(
        browser.get("/keys").header("location"),
        Some("/sign-in"),
        "it holds at once"
    );
    assert!(!server.log().contains("horse"));
}

#[test]
fn each_host_serves_its_own() {
    let runtime = Runtime::start();
    let server = with_console(Some(&runtime));
    let key = server.key();
    let ask = |host: &str, method: &str, path: &str| {
        let mut client = server.connect();
        let body = chat("x").to_string();
        client.send(format!(
            "{method} {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        ));
        client.reply()
    };
    assert_eq!(ask("api.test", "POST", "/v1/chat/completions").status, 200);
    ask("CONSOLE.localhost:99", "POST", "/v1/chat/completions").is_error(404, "not_found");
    for path in ["/sign-in", "/keys", "/usage", "/status", "/"] {
        ask("api.test", "GET", path).is_error(404, "not_found");
        ask("other.test", "GET", path).is_error(404, "not_found");
    }
    assert_eq!(runtime.count(), 1);
    let without = Server::new(None).set("ADRIATICUM_CONSOLE_HOST", "").start();
    Browser::new(&without)
        .get("/sign-in")
        .is_error(404, "not_found");
}

/// Under `make run` the command that the console showed changed another database.
#[test]
fn the_command_for_a_forgotten_password_names_the_database() {
    let server = with_console(None).sqlite();
    let database = server.folder.path("adriaticum.db");
    let command = format!(
        "ADRIATICUM_DATABASE='{}' adriaticum console password",
        database.display()
    );
    if cfg!(not(feature = "test-postgres")) {
        let page = Browser::new(&server).get("/sign-in").text();
        assert!(page.contains(&command), "{page}");
        let page = Browser::new(&Server::new(None).sqlite().start())
            .get("/")
            .text();
        assert!(
            page.contains("adriaticum.db' adriaticum console password"),
            "{page}"
        );
    }
    // A name of its own may be served through a proxy, whose clients all seem to be on this host.
    let named = Server::new(None)
        .set("ADRIATICUM_CONSOLE_HOST", "console.test")
        .start();
    let mut client = named.connect();
    client.send("GET / HTTP/1.1\r\nHost: console.test\r\n\r\n");
    let page = client.reply().text();
    assert!(
        page.contains("adriaticum console password") && !page.contains("ADRIATICUM_DATABASE"),
        "{page}"
    );
}

#[test]
fn every_page_has_its_headers() {
    let server = with_console(None);
    let mut browser = Browser::signed_in(&server);
    for path in [
        "/keys",
        "/keys/new",
        "/usage",
        "/status",
        "/audit",
        "/requests",
        "/requests/chatcmpl_0",
        "/nothing",
    ] {
        let reply = browser.get(path);
        for (name, value) in [
            ("x-content-type-options", "nosniff"),
            ("cache-control", "no-store"),
            ("referrer-policy", "same-origin"),
            ("x-frame-options", "DENY"),
        ] {
            assert_eq!(reply.header(name), Some(value), "{path}: {name}");
        }
        let policy = reply.header("content-security-policy").expect(path);
        assert!(
            policy.starts_with("default-src 'none';") && policy.contains("frame-ancestors 'none'")
        );
        assert!(!policy.contains("unsafe"));
        let text = reply.text();
        assert!(
            !text.contains(" style=") && !text.contains("<style") && !text.contains(" onclick="),
            "{path}: {text}"
        );
        assert_eq!(text.matches("<script").count(), 1);
        // In a shared database the status page shows the address of this gateway.
        let text = text.replace(&format!("http://{}", server.address), "");
        assert!(
            !text.contains("http://") && !text.contains("https://"),
            "nothing from outside: {path}"
        );
    }
    let page = browser.get("/keys").text();
    for (mark, kind) in [
        ("href=\"/assets/style", "text/css"),
        ("src=\"/assets/script", "text/javascript"),
    ] {
        let start = page.find(mark).expect("the file is named") + mark.find('/').expect("a path");
        let path = page[start..].split('"').next().expect("its end");
        let file = Browser::new(&server).get(path);
        assert!(
            file.status == 200
                && file
                    .header("content-type")
                    .is_some_and(|k| k.starts_with(kind))
        );
        assert!(
            file.header("cache-control")
                .is_some_and(|value| value.contains("immutable"))
        );
    }
}

#[test]
fn signing_in_and_out() {
    let server = Server::new(None).sqlite().start();
    assert!(set_password(&server, PASSWORD).status.success());
    let mut browser = Browser::new(&server);
    assert_eq!(
        browser.get("/usage?range=7d").header("location"),
        Some("/sign-in?next=%2Fusage%3Frange%3D7d")
    );
    browser.get("/sign-in?next=%2Fusage");
    assert_eq!(
        browser
            .post("/sign-in", &[("password", "wrong password")])
            .status,
        401
    );
    assert!(
        server.log().contains("sign-in failed, client=127.0.0.1"),
        "{}",
        server.log()
    );
    let reply = browser.post(
        "/sign-in",
        &[("password", PASSWORD), ("next", "/usage?range=7d")],
    );
    assert_eq!(reply.header("location"), Some("/usage?range=7d"));
    assert!(
        server
            .log()
            .contains("operator signed in, client=127.0.0.1"),
        "{}",
        server.log()
    );
    assert_eq!(
        reply.header("strict-transport-security"),
        None,
        "it came by plain HTTP"
    );
    for line in reply
        .head
        .lines()
        .filter(|line| line.starts_with("set-cookie: "))
    {
        assert!(
            line.contains("; HttpOnly; SameSite=Lax") && line.contains("Path=/;"),
            "{line}"
        );
    }
    let cookie = browser
        .cookies
        .iter()
        .find(|(name, _)| name == "adriaticum_browser")
        .expect("a session")
        .1
        .clone();
    assert_eq!(cookie.len(), 64);
    assert!(
        !std::fs::read(server.folder.path("adriaticum.db-wal"))
            .expect("the log of the database")
            .windows(64)
            .any(|bytes| bytes == cookie.as_bytes()),
        "only its hash is kept"
    );
    assert_eq!(browser.get("/keys").status, 200);
    let other = browser.cookies.clone();
    assert_eq!(
        browser.post("/sign-out", &[]).header("location"),
        Some("/sign-in")
    );
    browser.cookies = other;
    assert_eq!(
        browser.get("/keys").status,
        303,
        "the cookie opens nothing afterwards"
    );
    for next in ["https://evil.test/", "//evil.test", "/\\evil.test"] {
        let mut browser = Browser::new(&server);
        browser.get("/sign-in");
        let reply = browser.post("/sign-in", &[("password", PASSWORD), ("next", next)]);
        assert_eq!(reply.header("location"), Some("/"), "{next}");
    }
    let mut browser = Browser::signed_in(&server);
    assert!(
        set_password(&server, "another password than before")
            .status
            .success()
    );
    assert_eq!(
        browser.get("/keys").status,
        303,
        "another password ends every session"
    );
    browser.get("/sign-in");
    assert_eq!(
        browser.post("/sign-in", &[("password", PASSWORD)]).status,
        401
    );
}

/// Any client can send `Host: console.localhost`.
#[test]
fn the_default_host_is_not_reached_through_a_proxy() {
    let server = Server::new(None)
        .set("ADRIATICUM_TRUSTED_PROXIES", "127.0.0.1")
        .start();
    for headers in [
        "",
        "X-Forwarded-For: 203.0.113.7\r\n",
        "X-Forwarded-For: 127.0.0.1\r\n",
    ] {
        for path in ["/", "/sign-in", "/metrics", "/assets/"] {
            let reply = Browser::new(&server).send("GET", path, headers, "");
            reply.is_error(404, "not_found");
        }
        assert_eq!(
            Browser::new(&server)
                .send("GET", "/healthz", headers, "")
                .status,
            200
        );
        assert_eq!(
            Browser::new(&server)
                .send("GET", "/readyz", headers, "")
                .status,
            503,
            "without a runtime"
        );
    }
    let named = Server::new(None)
        .set("ADRIATICUM_TRUSTED_PROXIES", "127.0.0.1")
        .set("ADRIATICUM_CONSOLE_HOST", "console.localhost")
        .start();
    assert_eq!(
        Browser::new(&named).get("/").status,
        200,
        "it is set, so it is meant"
    );
}

#[test]
fn https_has_cookies_of_its_own() {
    let server = Server::new(None)
        .set("ADRIATICUM_TRUSTED_PROXIES", "127.0.0.1")
        .set("ADRIATICUM_CONSOLE_HOST", "console.localhost")
        .start();
    assert!(set_password(&server, PASSWORD).status.success());
    let https = "X-Forwarded-Proto: https\r\nX-Forwarded-For: 203.0.113.7\r\n";
    let mut browser = Browser::new(&server);
    assert!(
        browser
            .send("GET", "/sign-in", https, "")
            .header("strict-transport-security")
            .is_some()
    );
    let body = format!("password={}", encode(PASSWORD));
    let from = |origin: &str| format!("{https}Origin: {origin}://console.localhost:8080\r\n");
    let reply = browser.send("POST", "/sign-in", &from("http"), &body);
    assert_eq!(reply.status, 403, "plain HTTP is another site");
    let reply = browser.send("POST", "/sign-in", &from("https"), &body);
    assert_eq!(reply.status, 303, "{}", reply.text());
    assert!(
        server
            .log()
            .contains("operator signed in, client=203.0.113.7"),
        "{}",
        server.log()
    );
    let lines: Vec<&str> = reply
        .head
        .lines()
        .filter_map(|line| line.strip_prefix("set-cookie: "))
        .collect();
    let [line] = lines[..] else {
        panic!("one cookie: {lines:?}")
    };
    assert!(
        line.starts_with("__Host-adriaticum_browser=") && line.ends_with("; Secure"),
        "{line}"
    );
    assert_eq!(browser.send("GET", "/keys", https, "").status, 200);
    assert_eq!(
        browser.get("/keys").status,
        303,
        "a cookie of HTTPS is none of plain HTTP"
    );
    for (name, _) in &mut browser.cookies {
        *name = name.replace("__Host-", "");
    }
    assert_eq!(
        browser.send("GET", "/keys", https, "").status,
        303,
        "nor the other way round"
    );
}

#[test]
fn a_cookie_of_thirteen_hours_opens_nothing_and_does_not_revive() {
    let server = with_console(None);
    let mut browser = Browser::signed_in(&server);
    let row = server.query("SELECT session_ends - signed_in, signed_in FROM console_browsers");
    let [Value::Integer(lifetime), Value::Integer(signed_in)] = row[0][..] else {
        panic!("times in seconds: {row:?}")
    };
    let now = std::time::UNIX_EPOCH.elapsed();
    let now = now.expect("a time after 1970").as_secs() as i64;
    assert!((now - 60..=now).contains(&signed_in), "{signed_in}");
    assert_eq!(lifetime, 12 * 3600);
    assert_eq!(browser.get("/keys").status, 200);
    let thirteen_hours_later = "UPDATE console_browsers
        SET signed_in = signed_in - 46800, session_ends = session_ends - 46800 RETURNING 1";
    server.query(thirteen_hours_later);
    let mut old = browser.clone();
    for path in ["/", "/keys", "/usage", "/requests", "/status", "/audit"] {
        assert_eq!(old.get(path).status, 303, "{path}");
    }
    assert_eq!(old.post("/keys", &[("name", "x")]).status, 303);
    let reply = browser.post("/sign-in", &[("password", PASSWORD)]);
    assert_eq!(reply.status, 303);
    assert_ne!(browser.cookies, old.cookies, "every sign-in has its own");
    assert_eq!(browser.get("/keys").status, 200);
    assert_eq!(old.get("/keys").status, 303, "the old one stays old");
    let rows = server.query("SELECT 1 FROM console_browsers");
    assert_eq!(rows.len(), 1, "one browser, one row");
    // A copy of a cookie ends when its browser signs in again.
    let mut copy = browser.clone();
    assert_eq!(copy.get("/keys").status, 200);
    browser.post("/sign-in", &[("password", PASSWORD)]);
    assert_eq!(copy.get("/keys").status, 303);
    assert_eq!(browser.get("/keys").status, 200);
}

#[test]
fn a_form_from_elsewhere_changes_nothing() {
    let server = with_console(None);
    let mut browser = Browser::signed_in(&server);
    let once = "0".repeat(32);
    let form = [
        ("name", "x"),
        ("permission", "completions"),
        ("once", once.as_str()),
    ];
    let sign_in = [("password", PASSWORD)];
    for headers in [
        "",
        "Origin: null\r\n",
        "Origin: http://evil.test\r\n",
        "Origin: https://console.localhost:8080\r\n",
        "Origin: http://console.localhost:9999\r\n",
        "Origin: http://console.localhost\r\n",
        "Origin: http://api.test:8080\r\n",
        "Origin: null\r\nSec-Fetch-Site: cross-site\r\n",
        "Origin: http://console.localhost:8080\r\nSec-Fetch-Site: same-site\r\n",
        "Origin: http://console.localhost:8080\r\nSec-Fetch-Site: none\r\n",
        "Origin: http://console.localhost:8080\r\nOrigin: http://evil.test\r\n",
        "Sec-Fetch-Site: same-origin\r\nSec-Fetch-Site: cross-site\r\n",
    ] {
        let keys = browser.post_with("/keys", headers, &form).status;
        // Else another site could sign its visitor in, or out.
        let sign_out = browser.post_with("/sign-out", headers, &[]).status;
        let sign_in = Browser::new(&server).post_with("/sign-in", headers, &sign_in);
        assert_eq!([keys, sign_out, sign_in.status], [403; 3], "{headers}");
    }
    assert_eq!(server.stdout_of(&["keys", "list", "--json"]).trim(), "[]");
    for (headers, status) in [
        ("Origin: http://console.localhost:8080\r\n", 200),
        ("Sec-Fetch-Site: same-origin\r\n", 303),
    ] {
        let reply = browser.post_with("/keys", headers, &form);
        assert_eq!(reply.status, status, "our own is taken: {headers}");
    }
    let linked = browser.send("GET", "/usage", "Sec-Fetch-Site: cross-site\r\n", "");
    assert_eq!(linked.status, 200, "a link of another site opens the page");
}

#[test]
fn wrong_passwords_are_throttled_and_no_worker_waits() {
    let server = with_console(None);
    let mut known = Browser::signed_in(&server);
    let mut guesser = Browser::new(&server);
    guesser.get("/sign-in");
    let mut refused = 0;
    let reply = loop {
        let reply = guesser.post("/sign-in", &[("password", "a wrong password")]);
        match reply.status {
            401 => refused += 1,
            429 => break reply,
            other => panic!("{other}"),
        }
        assert!(refused < 20, "it is never slowed");
    };
    let seconds: u64 = reply
        .header("retry-after")
        .and_then(|value| value.parse().ok())
        .expect("how long");
    assert!((1..=60).contains(&seconds) && reply.text().contains(&format!("{seconds} second")));
    assert_eq!(
        guesser.post("/sign-in", &[("password", PASSWORD)]).status,
        429,
        "the wait is not held in a thread"
    );
    known.post("/sign-out", &[]);
    known.get("/sign-in");
    assert_eq!(
        known.post("/sign-in", &[("password", PASSWORD)]).status,
        303,
        "a known browser is not locked out"
    );
    until("the wait is over", || {
        guesser.post("/sign-in", &[("password", PASSWORD)]).status == 303
    });
}

#[test]
fn a_form_that_is_sent_twice_creates_one_key() {
    let mut server = with_console(None);
    let mut browser = Browser::signed_in(&server);
    let once_of = |page: Reply| {
        let page = page.text();
        page.split("name=\"once\" value=\"")
            .nth(1)
            .expect("the form's number")[..32]
            .to_owned()
    };
    // Two tabs, each of them sent four times at once.
    let tabs = [
        once_of(browser.get("/keys/new")),
        once_of(browser.get("/keys/new")),
    ];
    let send = |browser: &Browser, once: &str| {
        browser.clone().post(
            "/keys",
            &[("name", "x"), ("permission", "completions"), ("once", once)],
        )
    };
    let replies: Vec<Reply> = std::thread::scope(|scope| {
        let sending: Vec<_> = tabs
            .iter()
            .flat_map(|once| [once; 4])
            .map(|once| scope.spawn(|| send(&browser, once)))
            .collect();
        sending
            .into_iter()
            .map(|reply| reply.join().expect("a reply"))
            .collect()
    });
    let statuses = |wanted: u16| {
        replies
            .iter()
            .filter(|reply| reply.status == wanted)
            .count()
    };
    assert_eq!((statuses(200), statuses(303)), (2, 6));
    assert_eq!(server.query("SELECT id FROM keys").len(), 2);
    assert_eq!(send(&browser, "not one of ours").status, 400);

    // A restart forgets nothing.
    let cookies = browser.cookies;
    server.signal(Signal::TERM);
    server.wait();
    let server = server.start();
    let browser = Browser {
        cookies,
        ..Browser::new(&server)
    };
    assert_eq!(send(&browser, &tabs[0]).status, 303);
    assert_eq!(server.query("SELECT id FROM keys").len(), 2);
}

#[test]
fn a_key_from_its_making_to_its_end() {
    let runtime = Runtime::start();
    let server = with_console(Some(&runtime));
    let mut browser = Browser::signed_in(&server);
    assert!(browser.get("/keys").text().contains("Create the first key"));
    let once = browser.get("/keys/new").text();
    let once = once
        .split("name=\"once\" value=\"")
        .nth(1)
        .expect("the form's number")[..32]
        .to_owned();
    let form = [
        ("name", "first"),
        ("permission", "completions"),
        ("expires", "90d"),
        ("concurrent", "7"),
        ("once", once.as_str()),
    ];
    let made = browser.post("/keys", &form).text();
    let secret = made.split("id=\"secret\">").nth(1).expect("the secret")[..52].to_owned();
    assert!(
        made.contains("curl https://api.test/v1/chat/completions"),
        "{made}"
    );
    server.post(&secret, &chat("x")).is_completion();
    let again = browser.post("/keys", &form);
    let again = again
        .header("location")
        .expect("a page that is loaded again makes no other key");
    assert!(again.starts_with("/keys?made=key_"), "{again}");
    let page = browser.get(again).text();
    assert!(
        page.contains("This form has already created") && page.contains("first</strong>"),
        "{page}"
    );
    assert!(
        !page.contains(&secret) && page.contains(&format!("{}…{}", &secret[..8], &secret[48..])),
        "{page}"
    );
    let list: serde_json::Value =
        serde_json::from_str(&server.stdout_of(&["keys", "list", "--json"])).expect("JSON");
    let id = list[0]["id"].as_str().expect("an id").to_owned();
    assert_eq!(
        (list.as_array().map(Vec::len), &list[0]["concurrent"]),
        (Some(1), &7.into())
    );
    assert!(page.contains("7 concurrent"), "{page}");
    let asked = browser.get(&format!("/keys/{id}/revoke")).text();
    assert!(asked.contains("first") && asked.contains("can’t be undone"));
    server.post(&secret, &chat("x")).is_completion();
    browser.post(&format!("/keys/{id}/revoke"), &[]);
    server
        .post(&secret, &chat("x"))
        .is_error(401, "invalid_api_key");
    assert!(browser.get("/keys").text().contains("Revoked (1)"));
    assert!(
        browser
            .get("/keys?state=revoked")
            .text()
            .contains("first</a>")
    );
    for bad in [
        [("name", ""), ("permission", "completions"), ("expires", "")],
        [("name", "x"), ("permission", "nonsense"), ("expires", "")],
        [
            ("name", "x"),
            ("permission", "completions"),
            ("expires", "soon"),
        ],
        [
            ("name", "x"),
            ("permission", "completions"),
            ("concurrent", "0"),
        ],
    ] {
        let reply = browser.post("/keys", &bad);
        assert!(
            reply.status == 400 && reply.text().contains("role=\"alert\""),
            "{bad:?}"
        );
    }
    for id in ["key_none", "..", "%2e%2e"] {
        assert_eq!(browser.get(&format!("/keys/{id}/revoke")).status, 404);
        assert_eq!(browser.get(&format!("/keys/{id}")).status, 404);
        assert_eq!(
            browser
                .post(&format!("/keys/{id}"), &[("name", "x")])
                .status,
            404
        );
    }
    assert_eq!(
        browser
            .post("/keys", &[("name", "x".repeat(20_000).as_str())])
            .status,
        413
    );
    assert_eq!(browser.send("DELETE", "/keys", "", "").status, 405);
}

#[test]
fn what_a_person_typed_is_never_markup() {
    let runtime = Runtime::start();
    let server = with_console(Some(&runtime));
    let hostile = "\"'><script>alert(1)</script><b>&{{7*7}}=HYPERLINK(1)";
    let secret = server
        .stdout_of(&["keys", "create", hostile])
        .trim()
        .to_owned();
    server.post(&secret, &chat("x")).is_completion();
    runtime.next(Script::Answer(500, json!({})));
    let failed = server.post(&secret, &chat("x"));
    let mut browser = Browser::signed_in(&server);
    let list: serde_json::Value =
        serde_json::from_str(&server.stdout_of(&["keys", "list", "--json"])).expect("JSON");
    let id = list[0]["id"].as_str().expect("an id").to_owned();
    let request = failed.json()["error"]["request_id"]
        .as_str()
        .expect("an id")
        .to_owned();
    let inject = encode("\"><script>alert(2)</script>");
    let places = [
        "/keys".to_owned(),
        format!("/keys/{id}/revoke"),
        format!("/keys?changed={id}"),
        format!(
            "/keys?changed={inject}&revoked={inject}&q={inject}&sort={inject}&page={inject}&state={inject}"
        ),
        "/usage?range=1h".into(),
        format!(
            "/usage?range={inject}&key={inject}&outcome={inject}&from={inject}&to={inject}&before={inject}&least={inject}&sort={inject}&gateway={inject}"
        ),
        format!("/usage?key={id}"),
        format!(
            "/requests?range={inject}&key={inject}&outcome={inject}&from={inject}&to={inject}&before={inject}&after={inject}&least={inject}"
        ),
        format!("/requests/{request}"),
        format!("/requests/find?id={inject}"),
        format!("/requests/{inject}"),
        format!("/sign-in?next={inject}"),
        "/status".into(),
        format!("/keys/{id}"),
        "/audit".into(),
        format!("/audit?before={inject}"),
    ];
    for place in &places {
        let text = browser.get(place).text();
        assert!(
            !text.contains("<script>") && !text.contains("<b>"),
            "{place}: {text}"
        );
    }
    for place in [
        &places[0],
        &places[1],
        &places[4],
        &places[8],
        &places[13],
        &places[14],
    ] {
        let text = browser.get(place).text();
        assert!(
            text.contains("&lt;script&gt;alert(1)&lt;/script&gt;&lt;b&gt;&amp;"),
            "{place}: {text}"
        );
    }
    let form = browser.post(
        "/keys",
        &[
            ("name", "\"><script>alert(3)</script>"),
            ("expires", "\"><script>"),
        ],
    );
    assert!(
        form.status == 400 && !form.text().contains("<script>"),
        "what is filled in comes back escaped"
    );
    let visitor = Browser::new(&server)
        .get(&format!("/sign-in?next={inject}"))
        .text();
    assert!(!visitor.contains("<script>"));
    let csv = browser.get("/requests/export.csv?range=1h").text();
    let quoted = format!("\"{}\"", hostile.replace('"', "\"\""));
    assert!(csv.contains(&quoted), "{csv}");
    assert!(csv.starts_with(
        "\u{feff}\"request_id\",\"key_id\",\"key_name\",\"created\",\"created_utc\",\"created_local\",\"status\","
    ));
    let cells: Vec<&str> = csv.lines().nth(1).expect("a row").split("\",\"").collect();
    let created: i64 = cells[3].parse().expect("Unix time");
    let seconds = created.rem_euclid(60);
    assert!(
        cells[4].len() == 20
            && cells[4].ends_with(&format!(":{seconds:02}Z"))
            && cells[5] == cells[4],
        "{csv}"
    );
}

#[test]
fn usage_has_what_the_ledger_holds() {
    let runtime = Runtime::start();
    let server = with_console(Some(&runtime));
    let (one, other) = (
        server.key(),
        server
            .stdout_of(&["keys", "create", "other"])
            .trim()
            .to_owned(),
    );
    let mut unmeasured = completion("x");
    unmeasured
        .as_object_mut()
        .expect("an object")
        .remove("usage");
    for script in [
        Script::Answer(200, unmeasured),
        Script::Answer(500, json!({})),
    ] {
        runtime.next(script);
        server.post(&one, &chat("x"));
    }
    for _ in 0..3 {
        server.post(&other, &chat("x")).is_completion();
    }
    server
        .post(&other, &json!({}))
        .is_error(400, "invalid_request");
    let mut browser = Browser::signed_in(&server);
    let figures = |text: &str| -> Vec<String> {
        text.split("<strong>")
            .skip(1)
            .take(3)
            // The first is a link.
            .map(|rest| {
                rest.split("</")
                    .next()
                    .unwrap_or("")
                    .rsplit('>')
                    .next()
                    .unwrap_or("")
                    .to_owned()
            })
            .collect()
    };
    for range in ["1h", "24h", "7d", "30d", "90d", "all"] {
        let text = browser.get(&format!("/usage?range={range}")).text();
        assert_eq!(figures(&text), ["6", "66.7 %", "42"], "{range}");
        assert!(
            text.contains("33 in, 9 out<br>1 request unmeasured"),
            "{range}"
        );
        assert!(text.contains(">of 4 completions"), "{range}");
        assert!(text.len() < 45_000, "{}", text.len());
    }
    let list: serde_json::Value =
        serde_json::from_str(&server.stdout_of(&["keys", "list", "--json"])).expect("JSON");
    let key = list
        .as_array()
        .and_then(|list| list.iter().find(|key| key["name"] == "test"))
        .expect("the key")["id"]
        .clone();
    let key = key.as_str().expect("an id");
    let text = browser.get(&format!("/usage?range=1h&key={key}")).text();
    assert_eq!(
        figures(&text),
        ["2", "50.0 %", "–"],
        "what was not measured is no zero"
    );
    assert!(!text.contains("Tokens by key"), "nor is it drawn");
    // An outcome changes the rows. Rates and shares are still those of all requests.
    let text = browser.get("/usage?outcome=invalid_request").text();
    assert_eq!(figures(&text), ["1", "66.7 %", "–"]);
    assert!(
        text.contains(">of 6</a>") && text.contains(">of 4 completions"),
        "{text}"
    );
    assert!(text.contains(">75.0 %</td>"), "{text}");
    let text = browser.get("/usage?by=outcome").text();
    for share in ["16.7 %", "66.7 %"] {
        let cell = format!("data-label=\"Share of requests\">{share}</td>");
        assert!(text.contains(&cell), "{text}");
    }
    let by_day = browser.get("/usage?by=day").text();
    assert!(by_day.contains("data-label=\"Requests\""), "{by_day}");
    assert_eq!(
        browser
            .get("/requests?outcome=failed")
            .text()
            .matches("class=\"badge bad\"")
            .count(),
        2
    );
    assert_eq!(
        browser
            .get("/requests?outcome=ok")
            .text()
            .matches("class=\"badge good\"")
            .count(),
        4
    );
    // By tokens: "other" has all of them.
    let by_key = |browser: &mut Browser, sort: &str| -> Vec<String> {
        let text = browser.get(&format!("/usage?range=24h&sort={sort}")).text();
        let table = text
            .split("class=\"cards groups\"")
            .nth(1)
            .and_then(|rest| rest.split("</table>").next());
        let rows = table.expect("the table").split("<tr role=\"row\">").skip(2);
        rows.map(|row| {
            row.replace("</td>", "|")
                .split('<')
                .map(|part| part.split('>').nth(1).unwrap_or(""))
                .collect()
        })
        .collect()
    };
    let rows = by_key(&mut browser, "");
    assert!(
        rows[0].starts_with("other")
            && rows[0].contains("4|75.0 %|33|9|42|")
            && rows[0].ends_with("100 %|"),
        "{rows:?}"
    );
    assert!(
        rows[1].starts_with("test")
            && rows[1].contains("2|50.0 %|–|–|–|")
            && rows[1].ends_with("–|"),
        "{rows:?}"
    );
    assert!(
        by_key(&mut browser, "total_tokens")[0].starts_with("test"),
        "the other way round"
    );
    let listed = |browser: &mut Browser, query: &str| {
        let text = browser.get(&format!("/requests?range=1h&{query}")).text();
        text.matches("href=\"/requests/chatcmpl_").count()
    };
    assert_eq!(
        (
            listed(&mut browser, "least=0"),
            listed(&mut browser, "least=4000000")
        ),
        (6, 0)
    );
    assert_eq!(listed(&mut browser, "most=4000000&outcome=failed"), 2);
    assert_eq!(
        browser
            .get("/requests/export.csv?range=1h&least=4000000")
            .text()
            .matches("chatcmpl_")
            .count(),
        0
    );
    let rows = browser
        .get("/requests/export.csv?range=1h&outcome=ok")
        .text();
    assert_eq!(rows.matches("chatcmpl_").count(), 4);
    assert_eq!(browser.get("/requests/export.json").status, 404);
    assert_eq!(
        browser
            .get("/requests/export.csv?range=1h")
            .text()
            .matches("chatcmpl_")
            .count(),
        6
    );
    assert!(
        browser.get("/keys").text().contains(">4</a>"),
        "requests of 30 days"
    );
}

#[test]
fn the_status_page_shows_how_the_runtime_does() {
    let runtime = Runtime::start();
    let server = with_console(Some(&runtime));
    let key = server.key();
    let mut browser = Browser::signed_in(&server);
    let text = browser.get("/status").text();
    assert!(
        text.contains("not asked yet")
            && text.contains("0 of 16")
            && text.contains(adriaticum::VERSION),
        "{text}"
    );
    server.post(&key, &chat("x")).is_completion();
    let text = browser.get("/status").text();
    assert_eq!(text.matches(">works</span>").count(), 2, "{text}");
    runtime.is_ready();
    let fail = || {
        runtime.next(Script::Answer(500, json!({})));
        server
            .post(&key, &chat("x"))
            .is_error(502, "inference_error");
    };
    fail();
    let text = browser.get("/status").text();
    assert!(
        text.contains(">last call failed</span>")
            && text.contains("it answered with HTTP status 500"),
        "{text}"
    );
    has_verdict(&mut browser, "works");
    (0..2).for_each(|_| fail());
    has_verdict(&mut browser, "failing");
    server.post(&key, &chat("x")).is_completion();
    has_verdict(&mut browser, "works");
    assert_eq!(runtime.count(), 5, "no page asks the runtime");
}

/// Every page has the dot if the status page has the badge, in the same word.
#[track_caller]
pub fn has_verdict(browser: &mut Browser, word: &str) {
    let text = browser.get("/status").text();
    let lead = text.split("role=\"status\">").nth(1).unwrap_or_default();
    let badge = lead.split("</span>").next().unwrap_or_default();
    assert!(badge.ends_with(&format!(">{word}")), "{text}");
    let dot = (word != "works").then(|| format!("<span class=\"unseen\">({word})</span>"));
    for path in [
        "/keys",
        "/usage",
        "/requests",
        "/status",
        "/audit",
        "/nothing",
    ] {
        let text = browser.get(path).text();
        match &dot {
            Some(dot) => assert!(
                text.contains(dot) && text.contains("<title>● "),
                "{path}: {text}"
            ),
            None => assert!(
                !text.contains("class=\"dot") && !text.contains("<title>● "),
                "{path}: {text}"
            ),
        }
    }
}

#[test]
fn without_a_runtime_every_page_has_the_dot() {
    let server = with_console(None);
    let mut browser = Browser::signed_in(&server);
    has_verdict(&mut browser, "failing");
    let text = browser.get("/status").text();
    assert!(text.contains("Set runtime.url"), "{text}");
}

#[test]
fn a_search_finds_a_rare_request_among_many() {
    let server = Server::new(None).sqlite().start();
    assert!(set_password(&server, PASSWORD).status.success());
    let mut browser = Browser::signed_in(&server);
    // The oldest row is the only slow one, behind several windows of a search. The times are 10 minutes ago.
    server.query(
        "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 9000),
         t(time) AS (SELECT CAST(strftime('%s', 'now') AS INTEGER) - 600)
         INSERT INTO usage (request_id, key_id, key_name, created, status, duration_ms, day)
         SELECT printf('chatcmpl_%012x%020x', time * 1000, i), 'key_1', 'x', time, 200,
         CASE i WHEN 0 THEN 9000 ELSE 1 END, date(time, 'unixepoch') FROM n, t",
    );
    let text = browser.get("/requests?range=1h&least=5000").text();
    assert_eq!(
        text.matches("href=\"/requests/chatcmpl_").count(),
        1,
        "{text}"
    );
    assert!(!text.contains("Searched"), "it has come to the end: {text}");
    let none = browser.get("/requests?range=1h&least=50000").text();
    assert!(none.contains("None matches"), "{none}");
}

#[test]
fn a_request_has_no_figure_that_was_not_measured_and_nothing_about_search_while_it_is_off() {
    let runtime = Runtime::start();
    let server = with_console(Some(&runtime));
    let mut unmeasured = completion("x");
    unmeasured
        .as_object_mut()
        .expect("an object")
        .remove("usage");
    runtime.next(Script::Answer(200, unmeasured));
    let key = server.key();
    let answered = server.post(&key, &chat("x")).json()["id"]
        .as_str()
        .expect("an id")
        .to_owned();
    let refused = server.post(&key, &json!({})).json()["error"]["request_id"]
        .as_str()
        .expect("an id")
        .to_owned();
    let mut browser = Browser::signed_in(&server);
    let details = browser.get(&format!("/requests/{answered}")).text();
    for name in ["Tokens in", "Tokens out", "Total tokens"] {
        assert!(
            details.contains(&format!("<dt>{name}</dt><dd>–</dd>")),
            "{name}: {details}"
        );
    }
    assert!(details.contains(">200</span> Answered in "), "{details}");
    let details = browser.get(&format!("/requests/{refused}")).text();
    assert!(
        details.contains("of the request broke a rule") && !details.contains("</span>Runtime"),
        "{details}"
    );
    assert!(details.contains(">400 invalid_request</span>"), "{details}");
    for text in [details, browser.get("/status").text()] {
        for gone in [
            "Status sent",
            "Error code",
            "Place in the ledger",
            ">Search<",
            ">search<",
            "Grounded",
        ] {
            assert!(!text.contains(gone), "{gone}: {text}");
        }
    }
    assert!(browser.get("/requests").text().contains("Find a request"));
    assert!(!browser.get("/usage").text().contains("Find a request"));
}

#[test]
fn totals_are_exported_by_key_and_day() {
    let runtime = Runtime::start();
    let server = with_console(Some(&runtime));
    let key = server.key();
    for _ in 0..3 {
        server.post(&key, &chat("x")).is_completion();
    }
    server
        .post(&key, &json!({}))
        .is_error(400, "invalid_request");
    let mut browser = Browser::signed_in(&server);
    let csv = browser.get("/usage/totals.csv?range=24h").text();
    let lines: Vec<&str> = csv.split("\r\n").collect();
    let columns = "day key_id key_name requests errors prompt_tokens completion_tokens total_tokens unmeasured";
    let heading: Vec<String> = columns
        .split(' ')
        .map(|column| format!("\"{column}\""))
        .collect();
    assert_eq!(lines[0], format!("\u{feff}{}", heading.join(",")));
    // At midnight it may be two days.
    let column = |number: usize| -> i64 {
        let cell = |line: &&str| {
            line.split(',')
                .nth(number)
                .map(|cell| cell.trim_matches('"').parse().expect("a number"))
        };
        lines[1..]
            .iter()
            .filter_map(|line| cell(line).filter(|_: &i64| !line.is_empty()))
            .sum()
    };
    assert_eq!(
        [3, 4, 5, 6, 7, 8].map(column),
        [4, 1, 33, 9, 42, 0],
        "{csv}"
    );
    assert_eq!(
        browser
            .get("/usage/totals.csv?from=2020-01-01&to=2020-02-01")
            .text()
            .matches("\r\n")
            .count(),
        1
    );
}

#[test]
fn a_long_export_is_refused_with_its_command() {
    let server = Server::new(None).sqlite().start();
    assert!(set_password(&server, PASSWORD).status.success());
    let mut browser = Browser::signed_in(&server);
    // One row too many, and lines too many for the totals of 3,601 days.
    server.query(
        "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 10000),
         t(time, i) AS (SELECT unixepoch('2020-01-01') + i, i FROM n)
         INSERT INTO usage (request_id, key_id, key_name, created, status, gateway, day)
         SELECT printf('chatcmpl_%012x%020x', time * 1000, i), 'key_1', 'x', time, 200, 'a', '2020-01-01' FROM t",
    );
    server.query(
        "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 3600)
         INSERT INTO usage_days SELECT key, date(i * 86400, 'unixepoch'), 200, '', '', 1, 1, 1, 2, 0
         FROM n, (SELECT 'key_1' AS key UNION SELECT 'key_2' UNION SELECT 'key_3')",
    );
    let prefix = format!(
        "ADRIATICUM_DATABASE='{}' adriaticum",
        server.folder.path("adriaticum.db").display()
    );
    let mut check = |address: &str, command: &str| {
        let page = browser.get(address);
        let text = page.text().replace("&quot;", "\"");
        let command = format!("{prefix} {command}");
        assert!(page.status == 400 && text.contains(&command), "{text}");
    };
    let day = "from=2020-01-01&to=2020-01-01";
    check(
        &format!("/requests/export.csv?{day}"),
        "usage list --limit 100000 --csv --since 2020-01-01 --until 2020-01-01<",
    );
    check(
        &format!("/requests/export.csv?{day}&gateway=a&outcome=ok"),
        "usage list --limit 100000 --csv --since 2020-01-01 --until 2020-01-01 --gateway a --status ok<",
    );
    check(
        "/usage/totals.csv?from=1970-01-01&to=1979-12-31",
        "usage --by day,key --csv --since 1970-01-01 --until 1979-12-31<",
    );
    let whole = browser.get("/requests/export.csv?from=2020-01-01T00:00&to=2020-01-01T02:00");
    assert_eq!(whole.text().matches("chatcmpl_").count(), 7_200);
}

#[test]
fn one_export_is_in_progress() {
    use std::io::Read;
    let server = Server::new(None).sqlite().start();
    assert!(set_password(&server, PASSWORD).status.success());
    let mut browser = Browser::signed_in(&server);
    // More bytes than the system buffers for a connection.
    server.query(
        "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 4000)
         INSERT INTO usage (request_id, key_id, key_name, created, status, day)
         SELECT printf('chatcmpl_%012x%020x', (1577836800 + i) * 1000, i), 'key_1', printf('%.3000c', 'x'),
         1577836800 + i, 200, '2020-01-01' FROM n",
    );
    let path = "/requests/export.csv?from=2020-01-01&to=2020-01-01";
    let cookies: Vec<String> = browser
        .cookies
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    let begin = || {
        let mut client = server.connect();
        client.send(format!(
            "GET {path} HTTP/1.0\r\nHost: console.localhost\r\nCookie: {}\r\n\r\n",
            cookies.join("; ")
        ));
        let mut start = [0; 12];
        client.stream.read_exact(&mut start).expect("a reply");
        assert_eq!(&start, b"HTTP/1.1 200", "also through HTTP/1.0");
        client
    };
    let mut slow = begin();
    let refused = browser.get(path);
    assert_eq!(
        (refused.status, refused.header("retry-after")),
        (429, Some("10"))
    );
    let mut rest = Vec::new();
    slow.stream.read_to_end(&mut rest).expect("the rest");
    assert_eq!(
        String::from_utf8_lossy(&rest).matches("chatcmpl_").count(),
        4_001
    );
    // The end of the response, or of the connection, ends the export.
    drop(begin());
    until("the next one may begin", || browser.get(path).status == 200);
}

#[test]
fn the_status_page_shows_the_queue_by_key() {
    let runtime = Runtime::start();
    let server = Server::new(Some(&runtime))
        .set("ADRIATICUM_WORKERS", 1)
        .start();
    assert!(set_password(&server, PASSWORD).status.success());
    let key = server
        .stdout_of(&["keys", "create", "Crawler <1>", "--concurrent", "7"])
        .trim()
        .to_owned();
    let mut browser = Browser::signed_in(&server);
    // Before the page is asked for: its checks ask the runtime, too.
    runtime.next(Script::Silent);
    let send = || {
        let mut client = server.connect();
        client.send(request(&key, &chat("x")));
        client
    };
    let running = send();
    until("it runs", || runtime.count() == 1);
    let waiting = send();
    let row = |figures: [&str; 5]| {
        let labels = ["Waiting", "Longest wait", "Running", "Limit", "Shed"];
        let cells = labels.iter().zip(figures).map(|(label, figure)| {
            format!("<td role=\"cell\" class=\"n\" data-label=\"{label}\">{figure}</td>")
        });
        format!(
            "<span class=\"text\">Crawler &lt;1&gt;</span></th>{}",
            cells.collect::<String>()
        )
    };
    let expected = row(["1", "0 seconds", "1", "7", "0"]);
    until("one runs and one waits", || {
        // The wait may have grown on a slow machine.
        let text = browser.get("/status").text();
        text.contains(&expected) || text.contains(&expected.replace("0 seconds", "1 second"))
    });
    drop((running, waiting));
    until("nothing is left", || {
        !browser.get("/status").text().contains("Queue by key")
    });
}
