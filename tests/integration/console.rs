//! A browser's side of the console, for tests that need a fault or a scripted runtime. The conformance run tests its pages.

use crate::support::{Reply, Runtime, Server};

pub const PASSWORD: &str = "correct horse battery staple";

/// A browser on this host, with its cookies.
pub struct Browser<'a> {
    pub server: &'a Server,
    pub cookies: Vec<(String, String)>,
}

impl<'a> Browser<'a> {
    pub fn new(server: &'a Server) -> Self {
        Self {
            server,
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
        self.send("GET", path, "")
    }

    /// Sends a form of our own page.
    pub fn post(&mut self, path: &str, fields: &[(&str, &str)]) -> Reply {
        let encode =
            |text: &str| -> String { text.bytes().map(|byte| format!("%{byte:02X}")).collect() };
        let fields: Vec<String> = fields
            .iter()
            .map(|(name, value)| format!("{name}={}", encode(value)))
            .collect();
        self.send("POST", path, &fields.join("&"))
    }

    fn send(&mut self, method: &str, path: &str, body: &str) -> Reply {
        let cookies: Vec<String> = self
            .cookies
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        let mut client = self.server.connect();
        client.send(format!(
            "{method} {path} HTTP/1.1\r\nHost: console.localhost:8080\r\nCookie: {}\r\n\
             Sec-Fetch-Site: same-origin\r\nContent-Length: {}\r\n\r\n{body}",
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
