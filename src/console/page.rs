//! A page: the request for it, its frame, the files that it loads, and the page in its place if
//! something is wrong.

use std::net::IpAddr;
use std::sync::LazyLock;

use maud::{DOCTYPE, Markup, PreEscaped, html};
use sha2::{Digest, Sha256};

use super::Console;
use crate::audit::Actor;
use crate::error::{Problem, ProblemKind};
use crate::health::{Health, Verdict};
use crate::http::{Request, RequestHead, Response};
use crate::logging;
use crate::report::query::{Form, link};
use crate::secret::SecretDigest;
use crate::when;

/// The most bytes of a form: names and passwords are short.
const MAX_FORM: usize = 16 * 1024;

pub struct PageRequest<'a> {
    pub http: &'a Request,
    /// HEAD is GET without the body, which the listener leaves out.
    pub method: &'a str,
    pub path: &'a str,
    pub query: Form,
    pub form: Form,
    /// The browser that sent the request, which may be unknown.
    pub browser: Option<SecretDigest>,
    pub now: i64,
}

impl<'a> PageRequest<'a> {
    pub fn read(request: &'a Request, browser: Option<SecretDigest>) -> Result<Self, PageError> {
        let head = &request.head;
        let method = match head.method() {
            "HEAD" => "GET",
            method @ ("GET" | "POST") => method,
            _ => return Err(PageError::method()),
        };
        let body = request
            .body
            .as_deref()
            .filter(|body| body.len() <= MAX_FORM)
            .ok_or_else(|| {
                PageError::new(413, "The form is too large", "It has more than 16 KiB.")
            })?;
        let form = if method == "POST" { body } else { b"" };
        Ok(Self {
            http: request,
            method,
            path: head.path(),
            query: Form::parse(head.query()),
            form: Form::parse(str::from_utf8(form).unwrap_or("")),
            browser,
            now: when::now(),
        })
    }

    /// A path with the query of this request.
    pub fn with_query(&self, path: &str) -> String {
        link(path, self.query.pairs())
    }

    pub fn scheme(&self) -> &'static str {
        if self.http.client.secure {
            "https"
        } else {
            "http"
        }
    }

    /// Refuses a form that another site's page sent. Browsers say in `Sec-Fetch-Site` which site
    /// sent it; those that do not, by plain HTTP or because they are old, name its origin.
    pub fn check_origin(&self) -> Result<(), PageError> {
        let head = &self.http.head;
        let origin = format!("{}://{}", self.scheme(), head.authority());
        let is = |name: &str, own: &str| {
            let mut values = head.header(name).peekable();
            values.peek()?;
            Some(values.all(|value| value.eq_ignore_ascii_case(own.as_bytes())))
        };
        let is_ours = is("sec-fetch-site", "same-origin").or_else(|| is("origin", &origin));
        match (self.method, is_ours) {
            ("GET", _) | (_, Some(true)) => Ok(()),
            _ => Err(PageError::new(
                403,
                "The form came from elsewhere",
                "Another site's page sent it. Nothing was changed. If you did not intend this, contact the \
                 operator of that site.",
            )),
        }
    }

    /// The address for the log.
    pub fn client(&self) -> String {
        let peer = self.http.client.peer;
        peer.map_or("-".into(), |address| address.to_string())
    }

    pub fn actor(&self) -> Actor {
        Actor::console(self.client())
    }
}

/// A signed-in operator and the request.
pub struct Operator<'a> {
    pub console: &'a Console,
    pub request: &'a PageRequest<'a>,
    pub health: Health,
}

impl Operator<'_> {
    /// A page with the navigation.
    pub fn page(&self, title: &str, content: &Markup) -> Response {
        let console = self.console;
        let gateway = console.config.gateway_name();
        let verdict = self.health.verdict();
        let dot = if verdict != Verdict::Works {
            "● "
        } else {
            ""
        };
        let part = self.request.path.split('/').nth(1).unwrap_or_default();
        let navigation = html! {
            span.gateway.text { (gateway) }
            nav aria-label="Console" {
                ul {
                    @for (address, name) in PARTS {
                        li { a href=(address) aria-current=[(address[1..] == *part).then_some("page")] {
                            (name)
                            @if address == "/status" && verdict != Verdict::Works { " " span class=(format!("dot {}", class(verdict))) { span.unseen { "(" (verdict.word()) ")" } } }
                        } }
                    }
                }
            }
            form.out method="post" action="/sign-out" {
                button.quiet type="submit" { "Sign out" }
            }
        };
        let zone = html! { " · Time zone: " (console.store.zone.name()) };
        let title = format!("{dot}{title} · {gateway}");
        frame(&title, &navigation, content, &zone)
    }
}

/// The style sheet's class for a verdict.
pub fn class(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Works => "good",
        Verdict::Degraded => "warn",
        Verdict::Failing => "bad",
    }
}

/// The parts of the console in the navigation: their addresses and names.
const PARTS: [(&str, &str); 5] = [
    ("/keys", "API Keys"),
    ("/usage", "Usage"),
    ("/requests", "Requests"),
    ("/status", "Status"),
    ("/audit", "Audit"),
];

/// A narrow page with its title as the heading. An operator has the navigation.
pub fn dialog(operator: Option<&Operator>, title: &str, content: &Markup) -> Response {
    let content = html! { main.narrow { h1.text { (title) } (content) } };
    match operator {
        Some(operator) => operator.page(title, &content),
        None => frame(title, &html! {}, &content, &html! {}),
    }
}

fn frame(title: &str, navigation: &Markup, content: &Markup, zone: &Markup) -> Response {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) " · Adriaticum" }
                link rel="icon" href=(asset_address("icon.svg")) type="image/svg+xml";
                link rel="stylesheet" href=(asset_address("style.css"));
                script src=(asset_address("script.js")) defer {}
            }
            body {
                a.skip href="#content" { "Skip to the content" }
                header {
                    a.brand href="/" { (MARK) "Adriaticum" }
                    (navigation)
                }
                div #content { (content) }
                footer { p { "Adriaticum " (crate::VERSION) (zone) } }
            }
        }
    };
    let body = page.into_string().into_bytes();
    with_headers(Response::new(200, "text/html; charset=utf-8", body))
}

/// The waves of the icon, in the text's own colours.
const MARK: PreEscaped<&str> = PreEscaped(
    "<svg class=\"mark\" viewBox=\"0 0 24 24\" width=\"22\" height=\"22\" aria-hidden=\"true\"><path d=\"M2 9c3.3 0 \
     3.3-3 6.7-3s3.3 3 6.6 3 3.4-3 6.7-3M2 14c3.3 0 3.3-3 6.7-3s3.3 3 6.6 3 3.4-3 6.7-3M2 19c3.3 0 3.3-3 \
     6.7-3s3.3 3 6.6 3 3.4-3 6.7-3\" fill=\"none\" stroke=\"currentColor\" stroke-width=\"2\" \
     stroke-linecap=\"round\"/></svg>",
);

/// Allows nothing but what this host serves, no script or style within a page, and no frame around
/// it.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; \
    form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

pub fn with_headers(response: Response) -> Response {
    response
        .with("content-security-policy", CONTENT_SECURITY_POLICY)
        .with("x-content-type-options", "nosniff")
        .with("x-frame-options", "DENY")
        .with("cache-control", "no-store")
        .with("referrer-policy", "same-origin")
        .with("cross-origin-opener-policy", "same-origin")
        .with("cross-origin-resource-policy", "same-origin")
}

pub fn redirect(to: &str) -> Response {
    with_headers(Response::new(303, "text/plain; charset=utf-8", Vec::new())).with("location", to)
}

/// A text with a button that copies it. The script makes the button visible.
pub fn copy_box(title: &str, id: &str, text: &str) -> Markup {
    html! {
        div.copy {
            h2 { (title) }
            pre tabindex="0" aria-label=(title) { code id=(id) { (text) } }
            button type="button" data-copy=(id) hidden { "Copy" }
        }
    }
}

/// The files that a browser loads: name, type and content.
const ASSETS: [(&str, &str, &str); 3] = [
    (
        "style.css",
        "text/css; charset=utf-8",
        include_str!("html/style.css"),
    ),
    (
        "script.js",
        "text/javascript; charset=utf-8",
        include_str!("html/script.js"),
    ),
    ("icon.svg", "image/svg+xml", include_str!("html/icon.svg")),
];

/// A hash of all files. Their addresses have it, so browsers can cache them for good.
static ASSETS_HASH: LazyLock<String> = LazyLock::new(|| {
    let contents = ASSETS.map(|(_, _, content)| content).concat();
    hex::encode(&Sha256::digest(contents)[..8])
});

fn asset_address(name: &str) -> String {
    format!("/assets/{name}?{}", *ASSETS_HASH)
}

pub fn asset(head: &RequestHead) -> Option<Response> {
    let name = head.path().strip_prefix("/assets/")?;
    let (_, content_type, content) = ASSETS.into_iter().find(|(known, ..)| *known == name)?;
    if head.query() != *ASSETS_HASH || !matches!(head.method(), "GET" | "HEAD") {
        return None;
    }
    let response = Response::new(200, content_type, content.as_bytes().to_vec())
        .with("cache-control", "public, max-age=31536000, immutable")
        .with("content-security-policy", "default-src 'none'")
        .with("x-content-type-options", "nosniff")
        .with("cross-origin-resource-policy", "same-origin");
    Some(response)
}

pub type PageResult = Result<Response, PageError>;

/// What is wrong, and the next step: the page in place of the one that was asked for.
#[derive(Debug)]
pub struct PageError {
    status: u16,
    title: &'static str,
    text: String,
    /// A command that does what the console does not.
    command: Option<String>,
    /// A problem for the log.
    problem: Option<Problem>,
}

impl PageError {
    pub fn new(status: u16, title: &'static str, text: impl Into<String>) -> Self {
        Self {
            status,
            title,
            text: text.into(),
            command: None,
            problem: None,
        }
    }

    pub fn not_found() -> Self {
        Self::new(404, "Page not found", "Check the address.")
    }

    /// The address does not take the method.
    pub fn method() -> Self {
        Self::new(405, "Not possible here", "Nothing was changed.")
    }

    /// A form has no value in a field that our page fills in.
    pub fn incomplete_form() -> Self {
        let text = "Nothing was changed. Load its page again.";
        Self::new(400, "The form is incomplete", text)
    }

    /// A range of time that can't be displayed, and why.
    pub fn range(text: String) -> Self {
        Self::new(400, "No such range", text)
    }

    pub fn with_command(self, command: String) -> Self {
        Self {
            command: Some(command),
            ..self
        }
    }

    /// Its page. A signed-in operator keeps the navigation.
    pub fn page(self, operator: Option<&Operator>, peer: Option<IpAddr>) -> Response {
        // Without the database no session can be verified, so any client can cause this line.
        if let Some(problem) = &self.problem
            && logging::allow_refusal_line(problem.cause(), peer)
        {
            log::error!("console: {problem}");
        }
        let content = html! {
            p { (self.text) }
            @if let Some(command) = &self.command { (copy_box("Command", "command", command)) }
            p { a href="/" { "Back to API keys" } }
        };
        let response = Response {
            status: self.status,
            ..dialog(operator, self.title, &content)
        };
        match self.status {
            405 => response.with("allow", "GET, POST"),
            429 => response.with("retry-after", "10"),
            503 => response.with("retry-after", "5"),
            _ => response,
        }
    }
}

impl From<Problem> for PageError {
    fn from(problem: Problem) -> Self {
        if problem.kind == ProblemKind::RowsRemoved {
            return Self::new(400, "These figures are not kept", format!("{problem}."));
        }
        let text = "It can’t be read or written at the moment. The service’s log has the reason.";
        Self {
            problem: Some(problem),
            ..Self::new(503, "The database does not answer", text)
        }
    }
}
