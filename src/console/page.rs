//! The request for a page: its fields, origin and browser; and the result, a response or an error.

use super::browsers;
use super::state::Console;
use crate::audit::Actor;
use crate::database::Problem;
use crate::http::{Request, Response};
use crate::report::form::{Form, link};
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
    pub now: i64,
}

/// A signed-in operator and the request.
pub struct Operator<'a> {
    pub console: &'a Console,
    pub request: &'a PageRequest<'a>,
    pub browser: SecretDigest,
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

    /// Refuses a form that another site's page sent. Browsers say in `Sec-Fetch-Site` which site
    /// sent it; those that do not, by plain HTTP or because they are old, name its origin.
    pub fn check_origin(&self) -> Result<(), PageError> {
        let head = &self.http.head;
        let scheme = if self.http.client.secure {
            "https"
        } else {
            "http"
        };
        let origin = format!("{scheme}://{}", head.authority());
        let is = |name: &str, own: &str| {
            let mut values = head.header(name).peekable();
            values.peek()?;
            Some(values.all(|value| value.eq_ignore_ascii_case(own.as_bytes())))
        };
        let is_ours = is("sec-fetch-site", "same-origin").or_else(|| is("origin", &origin));
        match (self.method, is_ours) {
            ("GET", _) | (_, Some(true)) => Ok(()),
            _ => Err(PageError::Foreign),
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

    /// The browser that sent the request, which may be unknown.
    pub fn browser(&self) -> Option<SecretDigest> {
        browsers::presented(self.http.client, &self.http.head)
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
    /// A form without a field that our page fills in.
    IncompleteForm,
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
