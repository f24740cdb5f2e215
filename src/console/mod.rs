//! The console: server-rendered pages for the operator, on a host of their own.
//!
//! The steps of a request: assets, monitoring endpoints, is a password set, origin, session, the
//! form's token, the page.

mod audit;
mod error_pages;
mod html;
mod keys;
mod layout;
mod page;
mod requests;
pub mod session;
mod state;
mod status;
mod usage;

use std::panic::{self, AssertUnwindSafe};

use self::page::{Operator, PageError, PageRequest, PageResult};
use self::session::{cookies, credentials, sign_in};
pub use self::state::Console;
use crate::api::key;
use crate::http::{ClientInfo, Request, RequestHead, Response};
use crate::listener::{Admission, Destination, Lane};
use crate::logging;
use crate::monitoring::MonitoringEndpoints;
use crate::when;

/// Makes a browser that came by HTTPS use nothing else for a year.
const HTTPS_ONLY: &str = "max-age=31536000";

impl Console {
    pub fn respond(&self, request: &Request) -> Response {
        let served = panic::catch_unwind(AssertUnwindSafe(|| self.serve(request)));
        let mut response =
            served.unwrap_or_else(|_| error_pages::error(None, None, &PageError::Panic));
        if request.client.secure {
            response = response.with("strict-transport-security", HTTPS_ONLY);
        }
        log::debug!(target: logging::REQUEST, "host=console status={}", response.status);
        response
    }

    /// The place of a request in the queue, from its head, without a database look-up.
    pub fn admit(&self, client: ClientInfo, head: &RequestHead) -> Admission {
        let mut admission = self.browsers.admit(client, head);
        if MonitoringEndpoints::takes_key(head) {
            admission.destination = Destination::Console(key::digest(head).ok());
        }
        admission
    }

    /// Looks up the lane of a request: one for each session that is signed in, and for each key
    /// that may read the metrics.
    pub fn identify(&self, request: &Request) -> Option<Lane> {
        let find = || {
            if MonitoringEndpoints::takes_key(&request.head) {
                return self
                    .monitoring
                    .admit(&request.head, when::now())
                    .ok()
                    .map(|key| key.id);
            }
            self.browsers.look_up(&self.store, request);
            let session = cookies::digest(request.client, &request.head, cookies::SESSION)?;
            let is_valid = credentials::has_session(&self.store, &session, when::now()).ok()?;
            is_valid.then(|| hex::encode(session.0))
        };
        let name = panic::catch_unwind(AssertUnwindSafe(find)).ok()??;
        Some(Lane { name, limit: None })
    }

    /// Answers a request for which there is no room.
    pub fn refuse(&self) -> Response {
        error_pages::error(None, None, &PageError::Busy)
    }

    fn serve(&self, request: &Request) -> Response {
        if let Some(response) =
            html::assets::find(&request.head).or_else(|| self.monitoring.respond(request))
        {
            return response;
        }
        self.page(request)
            .unwrap_or_else(|error| error_pages::error(None, request.client.peer, &error))
    }

    fn page(&self, http: &Request) -> PageResult {
        let request = PageRequest::read(http)?;
        let Some(password) = credentials::password(&self.store)? else {
            let is_local = http.client.is_local();
            let command = self.config.command("console password", is_local);
            return Ok(error_pages::no_password(&command));
        };
        request.check_origin()?;
        match (request.method, request.path, request.session(&self.store)?) {
            ("GET", "/sign-in", None) => Ok(sign_in::form(self, &request, None)),
            ("POST", "/sign-in", _) => sign_in::submit(self, &request, &password),
            ("GET", "/sign-in", Some(_)) => Ok(layout::redirect("/")),
            (_, _, None) => Ok(sign_in::redirect_to_sign_in(&request)),
            (_, _, Some(session)) => {
                let operator = Operator {
                    console: self,
                    request: &request,
                    session,
                };
                let page = signed_in(&operator);
                Ok(page.unwrap_or_else(|error| {
                    error_pages::error(Some(&operator), http.client.peer, &error)
                }))
            }
        }
    }
}

fn signed_in(operator: &Operator) -> PageResult {
    let request = operator.request;
    if request.method == "POST" && !request.has_form_token(operator.session) {
        return Err(PageError::Stale);
    }
    let parts: Vec<&str> = request.path.trim_start_matches('/').split('/').collect();
    match (request.method, parts.as_slice()) {
        ("GET", [""]) => Ok(layout::redirect("/keys")),
        ("POST", ["sign-out"]) => sign_in::sign_out(operator),
        ("GET", ["keys"]) => keys::list::page(operator),
        ("POST", ["keys"]) => keys::create(operator),
        ("GET", ["keys", "new"]) => keys::new(operator),
        ("GET", ["keys", id]) => keys::page(operator, id),
        ("POST", ["keys", id]) => keys::change(operator, id),
        ("GET", ["keys", id, "revoke"]) => keys::confirm_revoke(operator, id),
        ("POST", ["keys", id, "revoke"]) => keys::revoke(operator, id),
        ("GET", ["usage"]) => usage::page(operator),
        ("GET", ["usage", "totals.csv"]) => requests::export::totals(operator),
        ("GET", ["requests"]) => requests::list::page(operator),
        ("GET", ["requests", "find"]) => requests::details::find(operator),
        ("GET", ["requests", "export.csv"]) => requests::export::rows(operator, false),
        ("GET", ["requests", "export.json"]) => requests::export::rows(operator, true),
        ("GET", ["requests", id]) => requests::details::page(operator, id),
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
