//! The console: server-rendered pages for the operator, on a host of their own.
//!
//! The steps of a request: assets, monitoring endpoints, is a password set, the form's origin,
//! session, the page.

mod audit;
pub mod browsers;
mod error_pages;
mod export;
mod filters;
mod html;
mod keys;
mod layout;
mod page;
pub mod password;
mod requests;
mod sign_in;
mod state;
mod status;
mod usage;

use std::net::IpAddr;
use std::panic::{self, AssertUnwindSafe};

use self::page::{Operator, PageError, PageRequest, PageResult};
use self::sign_in::SignInSource;
pub use self::state::Console;
use crate::api::head;
use crate::error::Failure;
use crate::http::{ClientInfo, RequestHead, Response};
use crate::listener::{Admission, Area, Dispatcher, Lane, PendingRequest, Service};
use crate::logging;
use crate::monitoring::MonitoringEndpoints;
use crate::secret::SecretDigest;

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
            && (is_allowed || MonitoringEndpoints::is_probe(head))
    }

    /// The place of a request in the queue, from its head, without a database look-up. A known
    /// browser has a lane of its own and so have the clients on this host: clients elsewhere can
    /// neither delay them nor take their places.
    fn admit(&self, client: &ClientInfo, head: &RequestHead) -> Result<Admission, Response> {
        if let Some(response) = self.monitoring.probe(head) {
            return Err(response);
        }
        let browser = browsers::presented(*client, head);
        let (lane, network) = match self.sign_in_source(*client, browser) {
            SignInSource::KnownBrowser(digest) => (Some(hex::encode(digest.0).into()), None),
            SignInSource::ThisHost => (Some("this host".into()), None),
            SignInSource::Elsewhere(network) => (None, network),
        };
        let credential = match MonitoringEndpoints::takes_key(head) {
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
        let mut response =
            served.unwrap_or_else(|_| error_pages::error(None, None, &PageError::Panic));
        if pending.request.client.secure {
            response = response.with("strict-transport-security", HTTPS_ONLY);
        }
        log::debug!(target: logging::REQUEST, "host=console status={}", response.status);
        response
    }

    fn refuse(&self, _: Option<IpAddr>, _: Failure) -> Response {
        error_pages::error(None, None, &PageError::Busy)
    }
}

impl Console {
    fn serve(&self, pending: &PendingRequest, dispatcher: &Dispatcher) -> Response {
        let request = &pending.request;
        if let Some(response) = html::assets::find(&request.head)
            .or_else(|| self.monitoring.respond(pending, dispatcher))
        {
            return response;
        }
        self.page(pending, dispatcher)
            .unwrap_or_else(|error| error_pages::error(None, request.client.peer, &error))
    }

    fn page(&self, pending: &PendingRequest, dispatcher: &Dispatcher) -> PageResult {
        let http = &pending.request;
        let request = PageRequest::read(http)?;
        let Some(password) = password::stored(&self.store)? else {
            let is_local = http.client.is_local();
            let command = self.config.command("console password", is_local);
            return Ok(error_pages::no_password(&command));
        };
        request.check_origin()?;
        let browser = request.browser();
        if browser.is_some_and(|browser| !self.browsers.contains(&browser)) {
            // If it is known to another gateway, its next request has a lane. On an error it stays
            // unknown: the page itself reports a failing database.
            let _ = self.browsers.refresh(&self.store);
        }
        let session = match browser {
            Some(browser) if browsers::is_signed_in(&self.store, &browser, request.now)? => {
                // From now on, two of its requests may run at the same time.
                dispatcher.authenticate(pending, &hex::encode(browser.0), None);
                Some(browser)
            }
            _ => {
                dispatcher.forget(pending);
                None
            }
        };
        match (request.method, request.path, session) {
            ("GET", "/sign-in", None) => Ok(sign_in::form(self, &request, None)),
            ("POST", "/sign-in", _) => sign_in::submit(self, &request, &password),
            ("GET", "/sign-in", Some(_)) => Ok(layout::redirect("/")),
            (_, _, None) => Ok(sign_in::redirect_to_sign_in(&request)),
            (_, _, Some(browser)) => {
                let operator = Operator {
                    console: self,
                    request: &request,
                    browser,
                };
                let page = signed_in(&operator);
                Ok(page.unwrap_or_else(|error| {
                    error_pages::error(Some(&operator), http.client.peer, &error)
                }))
            }
        }
    }

    /// The client of a request, as far as its browser is known here.
    fn sign_in_source(&self, client: ClientInfo, browser: Option<SecretDigest>) -> SignInSource {
        let known = browser.filter(|browser| self.browsers.contains(browser));
        SignInSource::new(client, known)
    }
}

fn signed_in(operator: &Operator) -> PageResult {
    let request = operator.request;
    let parts: Vec<&str> = request.path.trim_start_matches('/').split('/').collect();
    match (request.method, parts.as_slice()) {
        ("GET", [""]) => Ok(layout::redirect("/keys")),
        ("POST", ["sign-out"]) => sign_in::sign_out(operator),
        ("GET", ["keys"]) => keys::list::page(operator),
        ("POST", ["keys"]) => keys::create(operator),
        ("GET", ["keys", "new"]) => keys::new(operator),
        ("GET", ["keys", id]) => keys::page(operator, id),
        ("POST", ["keys", id]) => keys::change(operator, id),
        ("GET", ["keys", id, "rotate"]) => keys::confirm_rotate(operator, id),
        ("POST", ["keys", id, "rotate"]) => keys::rotate(operator, id),
        ("GET", ["keys", id, "revoke"]) => keys::confirm_revoke(operator, id),
        ("POST", ["keys", id, "revoke"]) => keys::revoke(operator, id),
        ("GET", ["usage"]) => usage::page(operator),
        ("GET", ["usage", "totals.csv"]) => export::totals(operator),
        ("GET", ["requests"]) => requests::list(operator),
        ("GET", ["requests", "find"]) => requests::find(operator),
        ("GET", ["requests", "export.csv"]) => export::requests(operator),
        ("GET", ["requests", id]) => requests::page(operator, id),
        ("GET", ["audit"]) => audit::page(operator),
        ("GET", ["status"]) => status::page(operator),
        ("POST", ["status"]) => status::check_again(operator),
        (
            "POST",
            [
                "keys" | "usage" | "requests" | "status" | "audit" | "sign-out",
                ..,
            ]
            | [""],
        ) => Err(PageError::Method),
        _ => Err(PageError::NotFound),
    }
}
