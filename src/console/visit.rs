//! A request to the console: what it asks for, where it comes from, and who sent it.

use super::PageError;
use super::form::Form;
use crate::http::{ClientInfo, Request, RequestHead};
use crate::secret::SecretDigest;
use crate::store::{Actor, Store, TokenKind};
use crate::when;

/// The most bytes of a form: names and passwords are short.
const MAX_FORM: usize = 16 * 1024;

/// The cookies.
pub const SESSION: &str = "adriaticum_session";
pub const BROWSER: &str = "adriaticum_browser";
pub const VISITOR: &str = "adriaticum_visitor";

/// With the prefix, a browser takes the cookie over HTTPS and from this very host only: a page of another host, or a forged
/// answer by plain HTTP, can't replace it.
const HOST_PREFIX: &str = "__Host-";

pub struct Visit<'a> {
    pub request: &'a Request,
    /// HEAD is GET without the body, which the listener leaves out.
    pub method: &'a str,
    pub path: &'a str,
    pub query: Form,
    pub form: Form,
    pub now: i64,
}

/// Somebody who is signed in.
pub struct ConsoleSession {
    token: String,
}

impl<'a> Visit<'a> {
    pub fn read(request: &'a Request) -> Result<Self, PageError> {
        let head = &request.head;
        let method = match head.method() {
            "HEAD" => "GET",
            method @ ("GET" | "POST") => method,
            _ => return Err(PageError::Method),
        };
        let body =
            request.body.as_deref().filter(|body| body.len() <= MAX_FORM).ok_or(PageError::TooLarge)?;
        let form = match method {
            "POST" => Form::parse(str::from_utf8(body).unwrap_or("")),
            _ => Form::default(),
        };
        let query = Form::parse(head.query());
        Ok(Self { request, method, path: head.path(), query, form, now: when::now() })
    }

    fn head(&self) -> &RequestHead {
        &self.request.head
    }

    /// Refuses a form that another site's page sent. Browsers say `null` where a page wants no referrer told, as
    /// ours do; then they say in another header whose page it was. The form's own token is looked at besides.
    pub fn check_origin(&self) -> Result<(), PageError> {
        if self.method != "POST" {
            return Ok(());
        }
        let mut origins = self.head().header("origin");
        let is_ours = match (origins.next(), origins.next()) {
            (None, _) | (Some(b"null"), None) => true,
            (Some(origin), None) => str::from_utf8(origin)
                .ok()
                .and_then(|origin| origin.strip_prefix("http://").or(origin.strip_prefix("https://")))
                .is_some_and(|authority| authority.eq_ignore_ascii_case(self.head().authority())),
            (Some(_), Some(_)) => false,
        };
        if is_ours && self.head().header("sec-fetch-site").all(|site| site == b"same-origin") {
            return Ok(());
        }
        Err(PageError::Foreign)
    }

    /// Whether the browser came by a link on another site's page: it then keeps its cookie to itself.
    pub fn is_from_elsewhere(&self) -> bool {
        self.method == "GET"
            && self.head().header("sec-fetch-site").any(|site| matches!(site, b"cross-site" | b"same-site"))
    }

    /// The address for the log.
    pub fn client(&self) -> String {
        self.request.client.peer.map_or("-".into(), |address| address.to_string())
    }

    /// Who sent it, for the audit.
    pub fn actor(&self) -> Actor {
        Actor::console(self.client())
    }

    /// The scheme by which the browser came.
    pub fn scheme(&self) -> &'static str {
        if self.request.client.secure { "https" } else { "http" }
    }

    /// The first cookie of a name.
    pub fn cookie(&self, name: &str) -> Option<&'a str> {
        cookie(self.request.client, &self.request.head, name)
    }

    /// A line that sets a cookie for some seconds; none ends it.
    pub fn set_cookie(&self, name: &str, value: &str, seconds: i64) -> String {
        let name = cookie_name(self.request.client, name);
        // A cookie that came by HTTPS is kept to that.
        let secure = if self.request.client.secure { "; Secure" } else { "" };
        format!("{name}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}")
    }

    /// Who sent it, if that is somebody who is signed in.
    pub fn session(&self, store: &Store) -> Result<Option<ConsoleSession>, PageError> {
        let Some(token) = self.cookie(SESSION) else {
            return Ok(None);
        };
        let is_valid = store.has_token(&SecretDigest::of(token), TokenKind::Session, self.now)?;
        Ok(is_valid.then(|| ConsoleSession { token: token.to_owned() }))
    }
}

impl ConsoleSession {
    pub fn digest(&self) -> SecretDigest {
        SecretDigest::of(&self.token)
    }

    /// What every form of this session carries, and no other site can know.
    pub fn form_token(&self) -> String {
        form_token(&self.token)
    }

    pub fn check_form(&self, visit: &Visit) -> Result<(), PageError> {
        if visit.form.get("token") == self.form_token() { Ok(()) } else { Err(PageError::Stale) }
    }
}

/// The digest of the token in a cookie. It may be nobody's.
pub fn presented(client: ClientInfo, head: &RequestHead, name: &str) -> Option<SecretDigest> {
    cookie(client, head, name).map(SecretDigest::of)
}

fn cookie_name(client: ClientInfo, name: &str) -> String {
    let prefix = if client.secure { HOST_PREFIX } else { "" };
    format!("{prefix}{name}")
}

/// The first cookie of a name.
fn cookie<'a>(client: ClientInfo, head: &'a RequestHead, name: &str) -> Option<&'a str> {
    let name = cookie_name(client, name);
    head.header("cookie")
        .filter_map(|line| str::from_utf8(line).ok())
        .flat_map(|line| line.split(';'))
        .filter_map(|pair| pair.trim().split_once('='))
        .find(|(known, _)| **known == name)
        .map(|(_, value)| value)
}

/// What a form carries for the holder of a cookie. The cookie can't be found from it.
pub fn form_token(cookie: &str) -> String {
    hex::encode(SecretDigest::of(&format!("form {cookie}")).0)
}
