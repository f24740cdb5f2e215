//! Signing in and out.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use maud::html;

use super::form::link;
use super::page_request::{BROWSER, ConsoleSession, PageRequest, SESSION, VISITOR, form_token, presented};
use super::throttle::{SignInSource, SignInThrottle};
use super::{Console, PageResult, error_pages, layout, password};
use crate::error::FailureCause;
use crate::http::{ClientInfo, Request, RequestHead, Response};
use crate::listener::Ticket;
use crate::logging;
use crate::secret::{SecretDigest, secret_hex};
use crate::store::{PasswordHash, Store, StoreError, TokenKind};
use crate::text::count;
use crate::when;

/// The lifetime of a session in seconds. Its cookie stays longer, so that the sign-in page can say that it ended.
const SESSION_TIME: i64 = 12 * 3600;

/// The time in seconds that a browser stays known after its last sign-in.
const BROWSER_TIME: i64 = 90 * 86_400;

pub struct SignIn {
    throttle: Mutex<SignInThrottle>,
    /// The known browsers, for the event loop, which can't query the database. A browser that signed in through another gateway
    /// is added when its first request is looked up.
    browsers: Mutex<Vec<SecretDigest>>,
}

/// The message after a failed sign-in.
pub enum Refused {
    Wrong,
    Stale,
    Wait(Duration),
}

impl SignIn {
    pub fn new(store: &Store) -> Self {
        let throttle = Mutex::new(SignInThrottle::new(Instant::now()));
        let sign_in = Self { throttle, browsers: Mutex::default() };
        if let Err(error) = sign_in.read_browsers(store, when::now()) {
            log::warn!("console: could not read the known browsers: {error}");
        }
        sign_in
    }

    /// The place of a request in the queue. A known browser has a lane of its own and so have the clients on this host:
    /// strangers can neither delay them nor take their places.
    pub fn ticket(&self, client: ClientInfo, head: &RequestHead) -> Ticket {
        let browser = presented(client, head, BROWSER).filter(|digest| self.browsers().contains(digest));
        let (lane, origin) = match SignInSource::new(client, browser) {
            SignInSource::Browser(digest) => (Some(hex::encode(digest.0).into()), None),
            SignInSource::Loopback => (Some("loopback".into()), None),
            SignInSource::Stranger(address) => (None, address),
        };
        Ticket {
            credential: presented(client, head, SESSION),
            lane,
            origin,
            exclusive: (head.method(), head.path()) == ("POST", "/sign-in"),
            is_begun: false,
        }
    }

    /// Looks up a browser that is not known here. If it is known to another gateway, its next request has a lane.
    pub fn look_up_browser(&self, store: &Store, request: &Request) {
        let browser = presented(request.client, &request.head, BROWSER);
        if browser.is_some_and(|digest| !self.browsers().contains(&digest)) {
            // On an error it stays unknown. The page itself reports a failing database.
            let _ = self.read_browsers(store, when::now());
        }
    }

    fn read_browsers(&self, store: &Store, now: i64) -> Result<(), StoreError> {
        let browsers = store.known_browsers(now)?;
        *self.browsers() = browsers;
        Ok(())
    }

    fn browsers(&self) -> MutexGuard<'_, Vec<SecretDigest>> {
        self.browsers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn form(&self, console: &Console, request: &PageRequest, refused: Option<&Refused>) -> Response {
        // The form's token is bound to a cookie here too, or another site could sign its visitor in.
        let known = request.cookie(VISITOR).filter(|cookie| cookie.len() == 64);
        let fresh = secret_hex::<32>();
        let visitor = known.unwrap_or(&fresh);
        let next =
            if request.method == "POST" { request.form.get("next") } else { request.query.get("next") };
        let content = html! {
            main.narrow {
                h1 { "Sign in" }
                @match refused {
                    Some(Refused::Wrong) => p.alert role="alert" { "That is not the password. Try again." },
                    Some(Refused::Stale) => p.alert role="alert" { "The form was too old. Try again." },
                    Some(Refused::Wait(time)) => p.alert role="alert" {
                        "There were too many attempts. Try again in "
                        span data-seconds=(seconds(*time)) { (count(seconds(*time), "second")) } "."
                    },
                    None if request.query.get("ended") == "1" => {
                        p.notice { "Your session ended; nothing was saved. Sign in to return to the page." }
                    },
                    None => {}
                }
                form method="post" action="/sign-in" {
                    input type="hidden" name="token" value=(form_token(visitor));
                    input type="hidden" name="next" value=(next);
                    // For the browser's password manager, which needs a user name.
                    input type="text" name="name" value="operator" autocomplete="username" hidden;
                    label for="password" { "Operator password" }
                    input #password type="password" name="password" autocomplete="current-password" required
                        autofocus maxlength="1024";
                    button.primary type="submit" { "Sign in" }
                }
                p.muted {
                    "Forgotten? The operator can set a new one: " code.text { (console.config.password_command(request.http.client.is_local())) }
                }
            }
        };
        let status = match refused {
            None => 200,
            Some(Refused::Wrong) => 401,
            Some(Refused::Stale) => 403,
            Some(Refused::Wait(_)) => 429,
        };
        let mut response = layout::plain_page(&console.assets, status, "Sign in", &content);
        if let Some(Refused::Wait(time)) = refused {
            response = response.with("retry-after", seconds(*time).to_string());
        }
        response.with("set-cookie", request.set_cookie(VISITOR, visitor, SESSION_TIME))
    }

    /// Verifies a password. The queue runs one such request at a time, so hashing needs its memory once, and the others wait
    /// in their lanes without a thread.
    pub fn submit(&self, console: &Console, request: &PageRequest, kept: &PasswordHash) -> PageResult {
        let refused = |refused| Ok(self.form(console, request, Some(&refused)));
        let is_ours =
            request.cookie(VISITOR).is_some_and(|cookie| request.form.get("token") == form_token(cookie));
        if !is_ours {
            return refused(Refused::Stale);
        }
        self.read_browsers(&console.store, request.now)?;
        let browser =
            request.cookie(BROWSER).filter(|token| self.browsers().contains(&SecretDigest::of(token)));
        let source = SignInSource::new(request.http.client, browser.map(SecretDigest::of));
        let throttle = || self.throttle.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(wait) = throttle().try_now(source, Instant::now()) {
            return refused(Refused::Wait(wait));
        }
        let is_right = password::verify(request.form.get("password"), kept);
        if !is_right {
            throttle().failed(source, Instant::now());
            console.store.note_failed_sign_in(request.http.client.peer, request.now);
            if logging::allow_stranger(FailureCause::SignIn, request.http.client.peer) {
                log::warn!("console: sign-in failed, client={}", request.client());
            }
            return refused(Refused::Wrong);
        }
        throttle().succeeded(source);
        // A known browser keeps its token, so that it stays known if this response is lost.
        let (session, browser) = (secret_hex::<32>(), browser.map_or_else(secret_hex::<32>, str::to_owned));
        let tokens = [
            (SecretDigest::of(&session), TokenKind::Session, SESSION_TIME),
            (SecretDigest::of(&browser), TokenKind::Browser, BROWSER_TIME),
        ];
        if !console.store.sign_in(tokens, request.now, kept, &request.actor())? {
            // The password was changed meanwhile.
            return refused(Refused::Wrong);
        }
        // The browser's next request needs its lane. It gets it later if this fails.
        let _ = self.read_browsers(&console.store, request.now);
        log::info!("console: operator signed in, client={}", request.client());
        Ok(layout::redirect(own_address(request.form.get("next")))
            .with("set-cookie", request.set_cookie(SESSION, &session, BROWSER_TIME))
            .with("set-cookie", request.set_cookie(BROWSER, &browser, BROWSER_TIME)))
    }

    pub fn sign_out(&self, console: &Console, request: &PageRequest, session: &ConsoleSession) -> PageResult {
        console.store.remove_token(session.digest())?;
        Ok(layout::redirect("/sign-in").with("set-cookie", request.set_cookie(SESSION, "", 0)))
    }
}

/// Redirects to the sign-in page, which leads back to the requested one.
pub fn redirect_to_sign_in(console: &Console, request: &PageRequest) -> Response {
    let head = &request.http.head;
    let address = if head.query().is_empty() {
        head.path().to_owned()
    } else {
        format!("{}?{}", head.path(), head.query())
    };
    if request.is_from_elsewhere() && own_address(&address) == address {
        // Requested from our own page, the browser sends its cookie.
        return error_pages::reload_from_here(&console.assets, &address);
    }
    let is_ended = request.method == "POST" || request.cookie(SESSION).is_some();
    // A form leads back to its page.
    let next = match (request.method, head.path()) {
        ("POST", "/keys") => "/keys/new",
        ("POST", "/sign-out") => "/",
        ("POST", path) => path,
        _ => &address,
    };
    let next = Some(next).filter(|next| !matches!(*next, "/" | "/keys"));
    let fields = [is_ended.then(|| ("ended", "1".to_owned())), next.map(|next| ("next", next.to_owned()))];
    layout::redirect(&link("/sign-in", fields.into_iter().flatten()))
}

/// Returns the address if it is one of the console, or the first page: a redirect never leads to another site.
fn own_address(next: &str) -> &str {
    let is_ours = next.starts_with('/')
        && !next.starts_with("//")
        && next.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'\\');
    if is_ours { next } else { "/" }
}

/// Whole seconds, and at least one.
fn seconds(time: Duration) -> i64 {
    (time.as_secs_f64().ceil() as i64).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_redirect_leaves_the_console() {
        for good in ["/", "/usage", "/usage?range=7d&key=key_1", "/a//b"] {
            assert_eq!(own_address(good), good);
        }
        for bad in
            ["", "//evil.test", "https://evil.test", "/\\evil.test", "usage", "/a\r\nx: y", "/a b", "/é"]
        {
            assert_eq!(own_address(bad), "/", "{bad:?}");
        }
    }
}
