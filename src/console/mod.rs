//! The console: server-rendered pages for the operator, on a host of their own.
//!
//! The steps of a request: assets, monitoring endpoints, is a password set, origin, session, the form's token, the page.

mod assets;
mod audit;
mod bar_interval;
mod chart;
mod check_runner;
mod error_pages;
mod export;
mod filters;
mod form;
mod format;
mod html_table;
mod key_form;
mod key_list;
mod keys;
mod layout;
mod monitoring_endpoints;
mod page_request;
pub mod password;
mod request_details;
mod request_list;
mod sign_in;
mod status;
mod throttle;
mod usage;
mod usage_by_key;
mod usage_charts;
mod usage_report;
mod usage_view;
mod verdict;

use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::api::key;
use crate::config::Config;
use crate::http::{ClientInfo, Request, RequestHead, Response};
use crate::listener::{Lane, Ticket};
use crate::logging;
use crate::store::{Gateway, Store, StoreError, TokenKind};
use crate::when;

use self::check_runner::CheckRunner;
pub use self::monitoring_endpoints::MonitoringEndpoints;
use self::page_request::{Operator, PageRequest, SESSION};
use self::sign_in::SignIn;

/// Makes a browser that came by HTTPS use nothing else for a year.
const HTTPS_ONLY: &str = "max-age=31536000";

pub struct Console {
    config: Arc<Config>,
    store: Arc<Store>,
    started: Instant,
    sign_in: SignIn,
    checks: CheckRunner,
    /// Counts the exports in progress: each has a clone.
    exports: Arc<()>,
    pub monitoring: MonitoringEndpoints,
}

#[derive(Debug)]
enum PageError {
    NotFound,
    /// A filter by key that means none, or several.
    WhichKey,
    /// A method that the address does not take.
    Method,
    TooLarge,
    /// A form of a session that has ended.
    Stale,
    /// A form that another site sent.
    Foreign,
    Store(StoreError),
    /// A range of time that can't be displayed, and why.
    Range(String),
    Wait(Duration),
    /// There is no room for the request.
    Busy,
    Panic,
}

type PageResult = Result<Response, PageError>;

impl From<StoreError> for PageError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl Console {
    pub fn new(config: Arc<Config>, store: Arc<Store>, monitoring: MonitoringEndpoints) -> Self {
        Self {
            sign_in: SignIn::new(&store),
            config,
            store,
            started: Instant::now(),
            checks: CheckRunner::new(),
            exports: Arc::default(),
            monitoring,
        }
    }

    pub fn answer(&self, request: &Request) -> Response {
        let answer = panic::catch_unwind(AssertUnwindSafe(|| self.serve(request)));
        let mut response = answer.unwrap_or_else(|_| error_pages::error(None, None, &PageError::Panic));
        if request.client.secure {
            response = response.with("strict-transport-security", HTTPS_ONLY);
        }
        log::debug!(target: logging::REQUEST, "host=console status={}", response.status);
        response
    }

    /// The place of a request in the queue, from its head, without a database look-up.
    pub fn ticket(&self, client: ClientInfo, head: &RequestHead) -> Ticket {
        let ticket = self.sign_in.ticket(client, head);
        if MonitoringEndpoints::takes_key(head) {
            return Ticket { credential: key::digest(head).ok(), ..ticket };
        }
        ticket
    }

    /// The lane of a request: one for each session that is signed in, and for each key that may read the metrics.
    pub fn lane(&self, request: &Request) -> Option<Lane> {
        let find = || {
            if MonitoringEndpoints::takes_key(&request.head) {
                return self.monitoring.admit(&request.head, when::now()).ok().map(|key| key.id);
            }
            self.sign_in.look_up_browser(&self.store, request);
            let session = page_request::presented(request.client, &request.head, SESSION)?;
            let is_valid = self.store.has_token(&session, TokenKind::Session, when::now()).ok()?;
            is_valid.then(|| hex::encode(session.0))
        };
        let name = panic::catch_unwind(AssertUnwindSafe(find)).ok()??;
        Some(Lane { name, limit: None })
    }

    /// The gateways that share the database; empty if it is a file.
    fn shared_gateways(&self) -> Result<Vec<Gateway>, StoreError> {
        if self.config.database.file().is_some() { Ok(Vec::new()) } else { self.store.gateways() }
    }

    /// Answers a request for which there is no room.
    pub fn refuse(&self) -> Response {
        error_pages::error(None, None, &PageError::Busy)
    }

    fn serve(&self, request: &Request) -> Response {
        if let Some(answer) = assets::find(&request.head).or_else(|| self.monitoring.answer(request)) {
            return answer;
        }
        self.page(request).unwrap_or_else(|error| error_pages::error(None, request.client.peer, &error))
    }

    fn page(&self, http: &Request) -> PageResult {
        let request = PageRequest::read(http)?;
        let Some(password) = self.store.console_password()? else {
            let command = self.config.password_command(http.client.is_local());
            return Ok(error_pages::no_password(&command));
        };
        request.check_origin()?;
        match (request.method, request.path, request.session(&self.store)?) {
            ("GET", "/sign-in", None) => Ok(sign_in::form(self, &request, None)),
            ("POST", "/sign-in", _) => self.sign_in.submit(self, &request, &password),
            ("GET", "/sign-in", Some(_)) => Ok(layout::redirect("/")),
            (_, _, None) => Ok(sign_in::redirect_to_sign_in(&request)),
            (_, _, Some(session)) => {
                let operator = Operator { console: self, request: &request, session };
                let page = signed_in(&operator);
                Ok(page.unwrap_or_else(|error| error_pages::error(Some(&operator), http.client.peer, &error)))
            }
        }
    }
}

fn signed_in(operator: &Operator) -> PageResult {
    let request = operator.request;
    if request.method == "POST" && !request.has_token_of(operator.session) {
        return Err(PageError::Stale);
    }
    let parts: Vec<&str> = request.path.trim_start_matches('/').split('/').collect();
    match (request.method, parts.as_slice()) {
        ("GET", [""]) => Ok(layout::redirect("/keys")),
        ("POST", ["sign-out"]) => sign_in::sign_out(operator),
        ("GET", ["keys"]) => key_list::page(operator),
        ("POST", ["keys"]) => keys::create(operator),
        ("GET", ["keys", "new"]) => keys::new(operator),
        ("GET", ["keys", id]) => keys::page(operator, id),
        ("POST", ["keys", id]) => keys::change(operator, id),
        ("GET", ["keys", id, "revoke"]) => keys::confirm_revoke(operator, id),
        ("POST", ["keys", id, "revoke"]) => keys::revoke(operator, id),
        ("GET", ["usage"]) => usage::page(operator),
        ("GET", ["usage", "totals.csv"]) => export::totals(operator),
        ("GET", ["requests"]) => request_list::page(operator),
        ("GET", ["requests", "find"]) => request_details::find(operator),
        ("GET", ["requests", "export.csv"]) => export::rows(operator, false),
        ("GET", ["requests", "export.json"]) => export::rows(operator, true),
        ("GET", ["requests", id]) => request_details::page(operator, id),
        ("GET", ["audit"]) => audit::page(operator),
        ("GET", ["status"]) => status::page(operator),
        ("POST", ["status"]) => status::check_again(operator),
        ("POST", ["keys" | "usage" | "requests" | "status" | "audit" | "sign-out", ..] | [""]) => {
            Err(PageError::Method)
        }
        _ => Err(PageError::NotFound),
    }
}
