//! The request for a page: its fields, origin and session; and the result, a response or an error.

use super::html::form::{Form, link};
use super::session::cookies::{self, BROWSER, SESSION, form_token};
use super::session::credentials;
use super::state::Console;
use crate::audit::Actor;
use crate::database::Problem;
use crate::http::{Request, Response};
use crate::secret::{SecretDigest, contains_secret};
use crate::store::Store;
use crate::when;

/// The most bytes of a form: names and passwords are short.
const MAX_FORM: usize = 16 * 1024;

/// The longest address that carries what was typed into a form.
const MAX_TYPED_ADDRESS: usize = 2 * 1024;

/// The field of such an address that has the token of this browser, so that no other site's link
/// fills a form in.
const TYPED: &str = "typed";

/// The fields of a key's form that such an address keeps: those that a person fills in, and those
/// that the result depends on.
const KEPT_FIELDS: [&str; 9] = [
    "name",
    "permission",
    "expires",
    "date",
    "concurrent",
    "budget",
    "budget_per",
    "loaded",
    "version",
];

pub struct PageRequest<'a> {
    pub http: &'a Request,
    /// HEAD is GET without the body, which the listener leaves out.
    pub method: &'a str,
    pub path: &'a str,
    pub query: Form,
    pub form: Form,
    pub now: i64,
}

/// A signed-in operator and the request.
pub struct Operator<'a> {
    pub console: &'a Console,
    pub request: &'a PageRequest<'a>,
    /// The cookie of the session.
    pub session: &'a str,
}

impl<'a> PageRequest<'a> {
    pub fn read(request: &'a Request) -> Result<Self, PageError> {
        let head = &request.head;
        let method = match head.method() {
            "HEAD" => "GET",
            method @ ("GET" | "POST") => method,
            _ => return Err(PageError::Method),
        };
        let body = request
            .body
            .as_deref()
            .filter(|body| body.len() <= MAX_FORM)
            .ok_or(PageError::TooLarge)?;
        let form = if method == "POST" { body } else { b"" };
        Ok(Self {
            http: request,
            method,
            path: head.path(),
            query: Form::parse(head.query()),
            form: Form::parse(str::from_utf8(form).unwrap_or("")),
            now: when::now(),
        })
    }

    /// A path with the query of this request.
    pub fn with_query(&self, path: &str) -> String {
        link(path, self.query.pairs())
    }

    /// The address of the page of a form that was sent without its session, with what was typed.
    pub fn typed_address(&self) -> String {
        let path = match self.path {
            "/keys" => "/keys/new",
            "/sign-out" => "/",
            path => path,
        };
        let is_typed =
            |(name, value): &(&str, &str)| KEPT_FIELDS.contains(name) && !contains_secret(value);
        let mut fields: Vec<(&str, &str)> = self.form.pairs().filter(is_typed).collect();
        let token = self.cookie(BROWSER).map(form_token).unwrap_or_default();
        if !fields.is_empty() {
            fields.push((TYPED, &token));
        }
        let address = link(path, self.query.pairs().chain(fields));
        if address.len() > MAX_TYPED_ADDRESS {
            path.to_owned()
        } else {
            address
        }
    }

    /// The fields of a form, from such an address.
    pub fn typed(&self) -> Option<&Form> {
        let is_ours = |cookie: &str| self.query.get(TYPED) == form_token(cookie);
        self.cookie(BROWSER)
            .is_some_and(is_ours)
            .then_some(&self.query)
    }

    /// Refuses a form that another site's page sent. Browsers send the origin `null` for a page
    /// with `no-referrer`, as ours are; `sec-fetch-site` then identifies the site. The form's token
    /// is checked in addition.
    pub fn check_origin(&self) -> Result<(), PageError> {
        let head = &self.http.head;
        let is_ours = |origin: &[u8]| match str::from_utf8(origin) {
            Ok("null") => true,
            Ok(origin) => origin.split_once("://").is_some_and(|(scheme, authority)| {
                matches!(scheme, "http" | "https")
                    && authority.eq_ignore_ascii_case(head.authority())
            }),
            Err(_) => false,
        };
        let is_ours = head.header("origin").count() <= 1
            && head.header("origin").all(is_ours)
            && head
                .header("sec-fetch-site")
                .all(|site| site == b"same-origin");
        if self.method == "POST" && !is_ours {
            return Err(PageError::Foreign);
        }
        Ok(())
    }

    /// True if the browser followed a link on another site's page: it then sends no cookie.
    pub fn is_from_elsewhere(&self) -> bool {
        let mut sites = self.http.head.header("sec-fetch-site");
        self.method == "GET" && sites.any(|site| matches!(site, b"cross-site" | b"same-site"))
    }

    /// The address for the log.
    pub fn client(&self) -> String {
        let peer = self.http.client.peer;
        peer.map_or("-".into(), |address| address.to_string())
    }

    pub fn actor(&self) -> Actor {
        Actor::console(self.client())
    }

    pub fn cookie(&self, name: &str) -> Option<&'a str> {
        cookies::find(self.http.client, &self.http.head, name)
    }

    /// Returns the cookie of the session, if it is valid.
    pub fn session(&self, store: &Store) -> Result<Option<&'a str>, PageError> {
        let Some(cookie) = self.cookie(SESSION) else {
            return Ok(None);
        };
        let is_valid = credentials::has_session(store, &SecretDigest::of(cookie), self.now)?;
        Ok(is_valid.then_some(cookie))
    }

    pub fn has_form_token(&self, cookie: &str) -> bool {
        self.form.get("token") == form_token(cookie)
    }
}

pub type PageResult = Result<Response, PageError>;

#[derive(Debug)]
pub enum PageError {
    NotFound,
    /// A filter by key that means none, or several.
    AmbiguousKey,
    /// A method that the address does not take.
    Method,
    TooLarge,
    /// A form of a session that has ended.
    Stale,
    /// A form that another site sent.
    Foreign,
    Store(Problem),
    /// A range of time that can't be displayed, and why.
    Range(String),
    /// Another export is in progress.
    TooManyExports,
    /// An export that is too long for a page, and the command that writes it.
    LargeExport(String),
    /// There is no room for the request.
    Busy,
    Panic,
}

impl From<Problem> for PageError {
    fn from(error: Problem) -> Self {
        Self::Store(error)
    }
}
