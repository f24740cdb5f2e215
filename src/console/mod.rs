//! The console: server-rendered pages for the operator, on a host of their own.
//!
//! The steps of a request: assets, what programs ask for, is a password set, the form's origin,
//! session, the page.

mod audit;
mod chart;
mod filters;
mod keys;
mod page;
pub mod password;
mod requests;
pub mod session;
mod status;
mod usage;

use std::net::IpAddr;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use maud::html;

use self::page::{Operator, PageError, PageRequest, PageResult, copy_box, dialog, redirect};
use self::password::{SignInSource, SignInThrottle};
use self::session::KnownBrowsers;
use crate::api::{head, key, reply};
use crate::config::Config;
use crate::error::{ApiError, Failure, FailureCause, Problem};
use crate::health::{ServiceParts, Verdict};
use crate::http::{ClientInfo, RequestHead, Response};
use crate::id::RequestId;
use crate::keys::{Key, Permission};
use crate::ledger::Gateway;
use crate::listener::{Admission, Area, Dispatcher, Lane, PendingRequest, Service};
use crate::logging;
use crate::metrics::Metrics;
use crate::secret::SecretDigest;
use crate::store::Store;

/// The console's state, which all pages share.
pub struct Console {
    /// The host that it is served on.
    host: String,
    config: Arc<Config>,
    store: Arc<Store>,
    started: Instant,
    browsers: KnownBrowsers,
    /// Held while a password is verified: hashing it takes 9 MiB, so one is verified at a time.
    sign_ins: Mutex<SignInThrottle>,
    /// An export holds a clone until its response was sent.
    exports: Arc<()>,
    service: Arc<ServiceParts>,
    metrics: Arc<Metrics>,
}

/// Makes a browser that came by HTTPS use nothing else for a year.
const HTTPS_ONLY: &str = "max-age=31536000";

impl Service for Console {
    /// The API is never served on the console's host, so that a program that asks it gets the API's
    /// own 404. Any client can name the default host: from elsewhere only its health is answered
    /// there, which load balancers probe.
    fn serves(&self, client: &ClientInfo, head: &RequestHead) -> bool {
        let is_allowed = !self.config.console_is_local || client.is_local();
        self.host.eq_ignore_ascii_case(head.host())
            && !head.path().starts_with("/v1/")
            && (is_allowed || is_probe(head))
    }

    /// The place of a request in the queue, from its head, without a database look-up. A known
    /// browser has a lane of its own and so have the clients on this host: clients elsewhere can
    /// neither delay them nor take their places.
    fn admit(&self, client: &ClientInfo, head: &RequestHead) -> Result<Admission, Response> {
        if let Some(response) = probe(self, head) {
            return Err(response);
        }
        let browser = session::presented(*client, head);
        let (lane, network) = match self.sign_in_source(*client, browser) {
            SignInSource::KnownBrowser(digest) => (Some(hex::encode(digest.0).into()), None),
            SignInSource::ThisHost => (Some("this host".into()), None),
            SignInSource::Elsewhere(network) => (None, network),
        };
        let credential = match takes_key(head) {
            true => head::digest(head).ok(),
            false => browser,
        };
        Ok(Admission {
            area: Area::Console,
            credential,
            lane,
            network,
        })
    }

    fn look_up(&self, _: &PendingRequest) -> Result<Lane, Response> {
        unreachable!("the console looks up its sessions when it responds")
    }

    fn respond(&self, pending: &PendingRequest, dispatcher: &Dispatcher) -> Response {
        let served = panic::catch_unwind(AssertUnwindSafe(|| self.serve(pending, dispatcher)));
        let mut response = served.unwrap_or_else(|_| {
            let text = "The service’s log has the reason. Completions are not affected.";
            PageError::new(503, "Something went wrong", text).page(None, None)
        });
        if pending.request.client.secure {
            response = response.with("strict-transport-security", HTTPS_ONLY);
        }
        log::debug!(target: logging::REQUEST, "host=console status={}", response.status);
        response
    }

    fn refuse(&self, _: Option<IpAddr>, _: Failure) -> Response {
        let text = "Try again in a moment. Completions are not affected.";
        PageError::new(503, "The console is busy", text).page(None, None)
    }
}

impl Console {
    pub fn new(host: String, service: Arc<ServiceParts>, metrics: Arc<Metrics>) -> Self {
        Self {
            host,
            browsers: KnownBrowsers::read(&service.store),
            sign_ins: Mutex::default(),
            config: Arc::clone(&service.config),
            store: Arc::clone(&service.store),
            started: Instant::now(),
            exports: Arc::default(),
            service,
            metrics,
        }
    }

    fn serve(&self, pending: &PendingRequest, dispatcher: &Dispatcher) -> Response {
        let request = &pending.request;
        page::asset(&request.head)
            .or_else(|| scrape(self, pending, dispatcher))
            .unwrap_or_else(|| {
                let page = self.page(pending, dispatcher);
                page.unwrap_or_else(|error| error.page(None, request.client.peer))
            })
    }

    fn page(&self, pending: &PendingRequest, dispatcher: &Dispatcher) -> PageResult {
        let http = &pending.request;
        let browser = session::presented(http.client, &http.head);
        let request = PageRequest::read(http, browser)?;
        let Some(password) = password::stored(&self.store)? else {
            return Ok(self.no_password(http.client.is_local()));
        };
        request.check_origin()?;
        if request
            .browser
            .is_some_and(|browser| !self.browsers.contains(&browser))
        {
            // If it is known to another gateway, its next request has a lane. On an error it stays
            // unknown: the page itself reports a failing database.
            let _ = self.browsers.refresh(&self.store);
        }
        let is_signed_in = match request.browser {
            Some(browser) if session::is_signed_in(&self.store, &browser, request.now)? => {
                // From now on, two of its requests may run at the same time.
                dispatcher.note_accepted(pending, &hex::encode(browser.0), None);
                true
            }
            _ => {
                dispatcher.forget(pending);
                false
            }
        };
        match (request.method, request.path) {
            ("POST", "/sign-in") => session::sign_in(self, &request, &password),
            ("GET", "/sign-in") if is_signed_in => Ok(redirect("/")),
            ("GET", "/sign-in") => Ok(session::sign_in_form(self, &request, None)),
            _ if !is_signed_in => Ok(session::redirect_to_sign_in(&request)),
            _ => {
                let operator = Operator {
                    console: self,
                    request: &request,
                    health: self.service.health(),
                };
                let page = signed_in(&operator);
                Ok(page.unwrap_or_else(|error| error.page(Some(&operator), http.client.peer)))
            }
        }
    }

    /// The only page of a console without a password.
    fn no_password(&self, is_local: bool) -> Response {
        let command = self.config.command("console password", is_local);
        let content = html! {
            p { "The console opens once it has a password. On the machine that the service runs on, as the user that \
                 it runs as:" }
            (copy_box("Command", "command", &command))
            p.muted { "At least 12 characters; takes effect immediately. Then " a href="/" { "load this page again" } "." }
        };
        dialog(None, "Set a password first", &content)
    }

    /// The client of a request, as far as its browser is known here.
    fn sign_in_source(&self, client: ClientInfo, browser: Option<SecretDigest>) -> SignInSource {
        let known = browser.filter(|browser| self.browsers.contains(browser));
        SignInSource::new(client, known)
    }

    /// The gateways that share the database; empty if it is a file.
    fn shared_gateways(&self) -> Result<Vec<Gateway>, Problem> {
        if self.config.database.file().is_some() {
            Ok(Vec::new())
        } else {
            self.store.ledger.gateways()
        }
    }
}

fn signed_in(operator: &Operator) -> PageResult {
    let request = operator.request;
    let parts: Vec<&str> = request.path.trim_start_matches('/').split('/').collect();
    match (request.method, parts.as_slice()) {
        ("GET", [""]) => Ok(redirect("/keys")),
        ("POST", ["sign-out"]) => session::sign_out(operator),
        ("GET", ["keys"]) => keys::list(operator),
        ("POST", ["keys"]) => keys::create(operator),
        ("GET", ["keys", "new"]) => keys::new(operator),
        ("GET", ["keys", id]) => keys::page(operator, id),
        ("POST", ["keys", id]) => keys::change(operator, id),
        ("GET", ["keys", id, "rotate"]) => keys::confirm_rotation(operator, id),
        ("POST", ["keys", id, "rotate"]) => keys::rotate(operator, id),
        ("GET", ["keys", id, "revoke"]) => keys::confirm_revocation(operator, id),
        ("POST", ["keys", id, "revoke"]) => keys::revoke(operator, id),
        ("GET", ["usage"]) => usage::page(operator),
        ("GET", ["usage", "totals.csv"]) => usage::totals(operator),
        ("GET", ["requests"]) => requests::list(operator),
        ("GET", ["requests", "find"]) => requests::find(operator),
        ("GET", ["requests", "export.csv"]) => requests::csv(operator),
        ("GET", ["requests", id]) => requests::page(operator, id),
        ("GET", ["audit"]) => audit::page(operator),
        ("GET", ["status"]) => status::page(operator),
        ("POST", _) => Err(PageError::method()),
        _ => Err(PageError::not_found()),
    }
}

const TEXT: &str = "text/plain; charset=utf-8";

/// The content type of Prometheus's text format.
const METRICS_TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// True for a health probe.
fn is_probe(head: &RequestHead) -> bool {
    matches!(head.path(), "/healthz" | "/readyz")
}

/// True if a request presents a key, and not a session.
fn takes_key(head: &RequestHead) -> bool {
    head.path() == "/metrics"
}

/// Answers a health probe from memory, without waiting for anything. Returns `None` for another
/// path.
fn probe(console: &Console, head: &RequestHead) -> Option<Response> {
    match head.path() {
        "/healthz" => Some(respond_to_get(head, || plain(200, "ok"))),
        "/readyz" => Some(respond_to_get(head, || readiness(console))),
        _ => None,
    }
}

/// Responds to a scrape. Returns `None` if the request is for another path.
fn scrape(
    console: &Console,
    pending: &PendingRequest,
    dispatcher: &Dispatcher,
) -> Option<Response> {
    let head = &pending.request.head;
    takes_key(head).then(|| respond_to_get(head, || metrics(console, pending, dispatcher)))
}

/// 503 while no completion can be run.
fn readiness(console: &Console) -> Response {
    // The writer tests the ledger while this is asked.
    console.store.ledger.probe();
    let health = console.service.health();
    match health.verdict() {
        Verdict::Works | Verdict::Degraded => plain(200, &health.summary()),
        Verdict::Failing => plain(503, &health.summary()).with("retry-after", "1"),
    }
}

fn metrics(console: &Console, pending: &PendingRequest, dispatcher: &Dispatcher) -> Response {
    let (id, request) = (RequestId::now(), &pending.request);
    match authenticate_scrape(console, &request.head, id.created()) {
        Ok(key) => {
            dispatcher.note_accepted(pending, &key.id, None);
            // Without a database there are no budgets, but the other metrics are wanted most.
            let mut keys = console.store.keys.with_budget().unwrap_or_default();
            keys.retain(|key| key.is_valid(id.created()));
            let text = console.metrics.render(&console.service.health(), &keys);
            Response::new(200, METRICS_TEXT, text.into_bytes())
        }
        Err(failure) => {
            dispatcher.forget(pending);
            if let Some(details) = &failure.details
                && logging::allow_refusal_line(failure.cause, request.client.peer)
            {
                log::error!("id={id} cause={} details={details:?}", failure.cause);
            }
            reply::error(id, &failure)
        }
    }
}

/// Accepts a key with the permission. A scrape is not a request of the API, so it leaves no row.
fn authenticate_scrape(console: &Console, head: &RequestHead, now: i64) -> Result<Key, Failure> {
    let key = key::authenticate(&head::digest(head)?, &console.store, now)?;
    if !key.terms.permissions.contains(&Permission::Metrics) {
        return Err(Failure::new(
            ApiError::InsufficientPermission,
            FailureCause::Permission,
            "This API key may not read the metrics. Make one that may: \
             adriaticum keys create NAME --permission metrics",
        ));
    }
    Ok(key)
}

/// Responds to GET and HEAD, and refuses other methods.
fn respond_to_get(head: &RequestHead, response: impl FnOnce() -> Response) -> Response {
    let response = match head.method() {
        "GET" | "HEAD" => response(),
        _ => plain(405, "Only GET and HEAD are answered here.").with("allow", "GET, HEAD"),
    };
    response.with("cache-control", "no-store")
}

fn plain(status: u16, line: &str) -> Response {
    Response::new(status, TEXT, format!("{line}\n").into_bytes())
}
