//! Signing in and out.

use std::sync::{Mutex, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use maud::html;

use super::slowing::{Slowing, Who};
use super::visit::{BROWSER, SESSION, Session, VISITOR, Visit, form_token};
use super::{Console, Stop, page, password};
use crate::http::Response;
use crate::id::secret_hex;
use crate::logging;
use crate::store::{Digest, PasswordHash, TokenKind};
use crate::text::percent_encoded;

/// How long a session lasts, in seconds.
const SESSION_TIME: i64 = 12 * 3600;

/// How long a browser is known after it was last signed in with.
const BROWSER_TIME: i64 = 90 * 86_400;

pub struct SignIn {
    slowing: Mutex<Slowing>,
    /// Held while a password is verified: one at a time needs memory once.
    verifying: Mutex<()>,
}

/// The message after a failed sign-in.
pub enum Refused {
    Wrong,
    Stale,
    Wait(Duration),
}

impl SignIn {
    pub fn new() -> Self {
        Self { slowing: Mutex::new(Slowing::new(Instant::now())), verifying: Mutex::default() }
    }

    pub fn form(&self, console: &Console, visit: &Visit, refused: Option<&Refused>) -> Response {
        // The form's token is bound to a cookie here too, or another site could sign its visitor in.
        let known = visit.cookie(VISITOR).filter(|cookie| cookie.len() == 64);
        let fresh = secret_hex::<32>();
        let visitor = known.unwrap_or(&fresh);
        let next = if visit.method == "POST" { visit.form.get("next") } else { visit.query.get("next") };
        let content = html! {
            main.narrow {
                h1 { "Sign in" }
                @match refused {
                    Some(Refused::Wrong) => p.alert role="alert" { "That is not the password. Try again." },
                    Some(Refused::Stale) => p.alert role="alert" { "The form was too old. Try again." },
                    Some(Refused::Wait(time)) => p.alert role="alert" {
                        "There were too many attempts. Try again in "
                        span data-seconds=(seconds(*time)) { (page::count(seconds(*time), "second")) } "."
                    },
                    None => {}
                }
                form method="post" action="/sign-in" {
                    input type="hidden" name="token" value=(form_token(visitor));
                    input type="hidden" name="next" value=(next);
                    // For the browser's store of passwords, which wants a name with each.
                    input type="text" name="name" value="operator" autocomplete="username" hidden;
                    label for="password" { "Password of the operator" }
                    input #password type="password" name="password" autocomplete="current-password" required
                        autofocus maxlength="1024";
                    button.primary type="submit" { "Sign in" }
                }
                p.muted {
                    "Forgotten? The operator can set a new one: " code.text { (console.config.password_command(visit.request.client.is_local())) }
                }
            }
        };
        let status = match refused {
            None => 200,
            Some(Refused::Wrong) => 401,
            Some(Refused::Stale) => 403,
            Some(Refused::Wait(_)) => 429,
        };
        let mut response = page::outside(&console.assets, status, "Sign in", &content);
        if let Some(Refused::Wait(time)) = refused {
            response = response.with("retry-after", seconds(*time).to_string());
        }
        response.with("set-cookie", visit.set_cookie(VISITOR, visitor, SESSION_TIME))
    }

    pub fn submit(&self, console: &Console, visit: &Visit, kept: &PasswordHash) -> Result<Response, Stop> {
        let refused = |refused| Ok(self.form(console, visit, Some(&refused)));
        let is_ours =
            visit.cookie(VISITOR).is_some_and(|cookie| visit.form.get("token") == form_token(cookie));
        if !is_ours {
            return refused(Refused::Stale);
        }
        let browser = visit.cookie(BROWSER).map(Digest::of);
        let browser = match browser {
            Some(digest) if console.store.has_token(&digest, TokenKind::Browser, visit.now)? => Some(digest),
            _ => None,
        };
        let who = Who::new(visit.request.client.peer, browser);
        let slowing = || self.slowing.lock().unwrap_or_else(PoisonError::into_inner);
        let verifying = match self.verifying.try_lock() {
            Ok(verifying) => verifying,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return refused(Refused::Wait(Duration::from_secs(1))),
        };
        if let Err(wait) = slowing().try_now(who, Instant::now()) {
            return refused(Refused::Wait(wait));
        }
        let is_right = password::verify(visit.form.get("password"), kept);
        drop(verifying);
        if !is_right {
            slowing().failed(who, Instant::now());
            console.store.note_failed_sign_in(visit.request.client.peer, visit.now);
            if logging::allow_stranger("sign_in", visit.request.client.peer) {
                log::warn!("console: sign-in failed, client={}", visit.client());
            }
            return refused(Refused::Wrong);
        }
        slowing().succeeded(who);
        let (session, browser) = (secret_hex::<32>(), secret_hex::<32>());
        let tokens = [
            (Digest::of(&session), TokenKind::Session, SESSION_TIME),
            (Digest::of(&browser), TokenKind::Browser, BROWSER_TIME),
        ];
        if !console.store.sign_in(tokens, visit.now, kept, &visit.actor())? {
            // The password was changed meanwhile.
            return refused(Refused::Wrong);
        }
        log::info!("console: operator signed in, client={}", visit.client());
        Ok(page::redirect(place(visit.form.get("next")))
            .with("set-cookie", visit.set_cookie(SESSION, &session, SESSION_TIME))
            .with("set-cookie", visit.set_cookie(BROWSER, &browser, BROWSER_TIME)))
    }

    pub fn sign_out(&self, console: &Console, visit: &Visit, session: &Session) -> Result<Response, Stop> {
        console.store.remove_token(session.digest())?;
        Ok(page::redirect("/sign-in").with("set-cookie", visit.set_cookie(SESSION, "", 0)))
    }
}

/// Redirects to the sign-in page, which leads back to this one.
pub fn ask(console: &Console, visit: &Visit) -> Response {
    let head = &visit.request.head;
    let address = if head.query().is_empty() {
        head.path().to_owned()
    } else {
        format!("{}?{}", head.path(), head.query())
    };
    if visit.is_from_elsewhere() && place(&address) == address {
        // Asked once more, by our own page, the browser sends its cookie.
        return page::once_more(&console.assets, &address);
    }
    if visit.method == "POST" || matches!(address.as_str(), "/" | "/keys") {
        return page::redirect("/sign-in");
    }
    page::redirect(&format!("/sign-in?next={}", percent_encoded(&address)))
}

/// Where to go next: an address of the console, never another's.
fn place(next: &str) -> &str {
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
    fn nobody_is_sent_elsewhere() {
        for good in ["/", "/usage", "/usage?range=7d&key=key_1", "/a//b"] {
            assert_eq!(place(good), good);
        }
        for bad in
            ["", "//evil.test", "https://evil.test", "/\\evil.test", "usage", "/a\r\nx: y", "/a b", "/é"]
        {
            assert_eq!(place(bad), "/", "{bad:?}");
        }
    }
}
