//! The console: API keys and usage for the operator, rendered here, on a host of its own.
//!
//! A request's way: the files that every page needs and what programs ask for, then whether a password is set, where
//! the request comes from, who is signed in, the form's token, and at last the page.

mod assets;
mod audit;
mod axis;
mod by_key;
mod chart;
mod charts;
mod export;
mod figures;
mod filters;
mod form;
mod html_table;
mod key_form;
mod key_table;
mod keys;
mod monitoring;
mod page;
pub mod password;
mod request;
mod requests;
mod sign_in;
mod status;
mod throttle;
mod totals;
mod usage;
mod view;
mod visit;

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

use self::assets::Assets;
pub use self::monitoring::Monitoring;
use self::sign_in::SignIn;
use self::status::Checks;
use self::visit::{SESSION, Visit};

/// A browser that came by HTTPS uses nothing else for a year.
const HTTPS_ONLY: &str = "max-age=31536000";

pub struct Console {
    config: Arc<Config>,
    store: Arc<Store>,
    started: Instant,
    assets: Assets,
    sign_in: SignIn,
    checks: Checks,
    /// As many clones as exports are under way.
    exports: Arc<()>,
    monitoring: Monitoring,
}

/// Why there is no page: each has one of its own.
#[derive(Debug)]
enum PageError {
    NotFound,
    /// A method that the address does not take.
    Method,
    TooLarge,
    /// A form from elsewhere, or one whose session is over.
    Stale,
    Foreign,
    Store(StoreError),
    Wait(Duration),
}

impl From<StoreError> for PageError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl Console {
    pub fn new(config: Arc<Config>, store: Arc<Store>, monitoring: Monitoring) -> Self {
        Self {
            sign_in: SignIn::new(&store),
            config,
            store,
            started: Instant::now(),
            assets: Assets::new(),
            checks: Checks::new(),
            exports: Arc::default(),
            monitoring,
        }
    }

    /// Answers a request for the console's host.
    pub fn answer(&self, request: &Request) -> Response {
        let answer = panic::catch_unwind(AssertUnwindSafe(|| self.serve(request)));
        let mut response = answer.unwrap_or_else(|_| page::broken(self));
        if request.client.secure {
            response = response.with("strict-transport-security", HTTPS_ONLY);
        }
        log::debug!(target: logging::REQUEST, "host=console status={}", response.status);
        response
    }

    /// Answers a probe of the service's health; `None` for any other request. It waits for nothing.
    pub fn probe(&self, head: &RequestHead) -> Option<Response> {
        self.monitoring.probe(head)
    }

    /// The place of a request in the queue, from its head. Nothing is looked up.
    pub fn ticket(&self, client: ClientInfo, head: &RequestHead) -> Ticket {
        if Monitoring::takes_key(head) {
            return Ticket { credential: key::digest(head).ok(), ..Ticket::default() };
        }
        self.sign_in.ticket(client, head)
    }

    /// The lane of a request: one for each session that is signed in, and for each key that may read the metrics.
    pub fn lane(&self, request: &Request) -> Option<Lane> {
        let find = || {
            if Monitoring::takes_key(&request.head) {
                return self.monitoring.admit(&request.head, when::now()).ok().map(|caller| caller.key_id);
            }
            self.sign_in.look_up_browser(&self.store, request);
            let session = visit::presented(request.client, &request.head, SESSION)?;
            let is_valid = self.store.has_token(&session, TokenKind::Session, when::now()).ok()?;
            is_valid.then(|| hex::encode(session.0))
        };
        let name = panic::catch_unwind(AssertUnwindSafe(find)).ok()??;
        Some(Lane { name, limit: None })
    }

    /// The gateways that share the database; none if it is a file.
    fn shared_gateways(&self) -> Result<Vec<Gateway>, StoreError> {
        if self.config.database.file().is_some() { Ok(Vec::new()) } else { self.store.gateways() }
    }

    /// Answers a request for which there is no room.
    pub fn refuse(&self) -> Response {
        page::busy(self)
    }

    fn serve(&self, request: &Request) -> Response {
        if let Some(file) = self.assets.find(&request.head) {
            return file;
        }
        if let Some(answer) = self.monitoring.answer(request) {
            return answer;
        }
        self.page(request).unwrap_or_else(|stop| page::stopped(self, None, request.client, &stop))
    }

    fn page(&self, request: &Request) -> Result<Response, PageError> {
        let visit = Visit::read(request)?;
        let Some(password) = self.store.console_password()? else {
            let command = self.config.password_command(request.client.is_local());
            return Ok(page::no_password(&self.assets, &command));
        };
        visit.check_origin()?;
        let session = visit.session(&self.store)?;
        let (method, path) = (visit.method, visit.path);
        match (method, path, session) {
            ("GET", "/sign-in", None) => Ok(self.sign_in.form(self, &visit, None)),
            ("POST", "/sign-in", _) => self.sign_in.submit(self, &visit, &password),
            ("GET", "/sign-in", Some(_)) => Ok(page::redirect("/")),
            (_, _, None) => Ok(sign_in::ask(self, &visit)),
            (_, _, Some(session)) => {
                let form = if method == "POST" { session.check_form(&visit) } else { Ok(()) };
                let answer = form.and_then(|()| self.signed_in(&visit, &session));
                let stopped = |stop| page::stopped(self, Some(&session), request.client, &stop);
                Ok(answer.unwrap_or_else(stopped))
            }
        }
    }

    fn signed_in(&self, visit: &Visit, session: &visit::ConsoleSession) -> Result<Response, PageError> {
        let parts: Vec<&str> = visit.path.trim_start_matches('/').split('/').collect();
        match (visit.method, parts.as_slice()) {
            ("GET", [""]) => Ok(page::redirect("/keys")),
            ("POST", ["sign-out"]) => self.sign_in.sign_out(self, visit, session),
            ("GET", ["keys"]) => key_table::list(self, visit, session),
            ("POST", ["keys"]) => keys::create(self, visit, session),
            ("GET", ["keys", "new"]) => keys::new(self, visit, session),
            ("GET", ["keys", id]) => keys::page(self, visit, session, id),
            ("POST", ["keys", id]) => keys::change(self, visit, session, id),
            ("GET", ["keys", id, "revoke"]) => keys::confirm_revoke(self, visit, session, id),
            ("POST", ["keys", id, "revoke"]) => keys::revoke(self, visit, id),
            ("GET", ["usage"]) => usage::page(self, visit, session),
            ("GET", ["usage", "keys"]) => by_key::page(self, visit, session),
            ("GET", ["usage", "totals.csv"]) => totals::csv(self, visit),
            ("GET", ["requests"]) => requests::page(self, visit, session),
            ("GET", ["requests", "find"]) => request::find(self, visit, session),
            ("GET", ["requests", "export.csv"]) => export::csv(self, visit),
            ("GET", ["requests", "export.json"]) => export::json(self, visit),
            ("GET", ["requests", id]) => request::page(self, session, id),
            ("GET", ["audit"]) => audit::page(self, visit, session),
            ("GET", ["status"]) => status::page(self, session),
            ("POST", ["status"]) => status::check_again(self),
            (_, ["keys" | "usage" | "requests" | "status" | "audit" | "sign-out", ..] | [""])
                if visit.method == "POST" =>
            {
                Err(PageError::Method)
            }
            _ => Err(PageError::NotFound),
        }
    }
}
