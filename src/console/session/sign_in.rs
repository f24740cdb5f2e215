//! Signing in and out.

use std::time::Instant;

use maud::{Markup, html};

use super::cookies::{self, BROWSER, SESSION, VISITOR};
use super::credentials::{self, PasswordHash, TokenKind};
use super::password;
use super::throttle::SignInSource;
use crate::console::{
    error_pages,
    html::form::link,
    layout,
    page::{Operator, PageRequest, PageResult},
    state::Console,
};
use crate::error::FailureCause;
use crate::http::Response;
use crate::logging;
use crate::mutex::lock;
use crate::secret::{SecretDigest, secret_hex};
use crate::text::count;
use crate::when::{DAY, HOUR};

/// The lifetime of a session in seconds. Its cookie stays longer, so that the sign-in page can say
/// that it ended.
const SESSION_TIME: i64 = 12 * HOUR;

/// The time in seconds that a browser stays known after its last sign-in.
const BROWSER_TIME: i64 = 90 * DAY;

/// Verifies a password, and signs its browser in.
pub fn submit(console: &Console, request: &PageRequest, stored: &PasswordHash) -> PageResult {
    let client = request.http.client;
    let refused = |status: u16, alert: Markup| form(console, request, Some((status, alert)));
    let wrong = || {
        Ok(refused(
            401,
            html! { "That is not the password. Try again." },
        ))
    };
    let visitor = request.cookie(VISITOR);
    if !visitor.is_some_and(|cookie| request.has_form_token(cookie)) {
        return Ok(refused(403, html! { "The form was too old. Try again." }));
    }
    console.browsers.refresh(&console.store)?;
    let browser = request
        .cookie(BROWSER)
        .filter(|token| console.browsers.contains(&SecretDigest::of(token)));
    let source = SignInSource::new(client, browser.map(SecretDigest::of));
    let mut throttle = lock(&console.sign_ins);
    if let Err(wait) = throttle.try_now(source, Instant::now()) {
        let seconds = (wait.as_secs_f64().ceil() as i64).max(1);
        let alert = html! {
            "There were too many attempts. Try again in "
            span data-seconds=(seconds) { (count(seconds, "second")) } "."
        };
        return Ok(refused(429, alert).with("retry-after", seconds.to_string()));
    }
    if !password::verify(request.form.get("password"), stored) {
        throttle.failed(source, Instant::now());
        if logging::allow_refusal_line(FailureCause::SignIn, client.peer) {
            log::warn!("console: sign-in failed, client={}", request.client());
        }
        return wrong();
    }
    throttle.succeeded(source);
    // A known browser keeps its token, so that it stays known if this response is lost.
    let session = secret_hex::<32>();
    let browser = browser.map_or_else(secret_hex::<32>, str::to_owned);
    let tokens = [
        (SecretDigest::of(&session), TokenKind::Session, SESSION_TIME),
        (SecretDigest::of(&browser), TokenKind::Browser, BROWSER_TIME),
    ];
    let by = request.actor();
    if !credentials::sign_in(&console.store, tokens, request.now, stored, &by)? {
        // The password was changed meanwhile.
        return wrong();
    }
    // The browser's next request needs its lane. It gets it later if this fails.
    let _ = console.browsers.refresh(&console.store);
    log::info!("console: operator signed in, client={}", request.client());
    let cookie = |name, value: &str| cookies::set_line(client, name, value, BROWSER_TIME);
    Ok(layout::redirect(own_address(request.form.get("next")))
        .with("set-cookie", cookie(SESSION, &session))
        .with("set-cookie", cookie(BROWSER, &browser)))
}

/// The form, with the status and the message of a refused attempt.
pub fn form(console: &Console, request: &PageRequest, refused: Option<(u16, Markup)>) -> Response {
    // The form's token is bound to a cookie here too, or another site could sign its visitor in.
    let known = request.cookie(VISITOR).filter(|cookie| cookie.len() == 64);
    let fresh = secret_hex::<32>();
    let visitor = known.unwrap_or(&fresh);
    let next = if request.method == "POST" {
        request.form.get("next")
    } else {
        request.query.get("next")
    };
    let (status, alert) = refused.unzip();
    let content = html! {
        main.narrow {
            h1 { "Sign in" }
            @if let Some(alert) = alert { p.alert role="alert" { (alert) } }
            @else if request.query.get("ended") == "form" {
                p.notice { "Your session ended, and the change was not saved. Sign in again to continue with it." }
            } @else if request.query.get("ended") == "page" { p.notice { "Your session ended. Sign in again." } }
            form method="post" action="/sign-in" {
                (layout::form_token(visitor))
                input type="hidden" name="next" value=(next);
                // For the browser's password manager, which needs a user name.
                input type="text" name="name" value="operator" autocomplete="username" hidden;
                label for="password" { "Operator password" }
                input #password type="password" name="password" autocomplete="current-password" required
                    autofocus maxlength="1024";
                button.primary type="submit" { "Sign in" }
            }
            p.muted {
                "Forgotten? The operator can set a new one: " code.text { (console.config.command("console password", request.http.client.is_local())) }
            }
        }
    };
    layout::plain_page(status.unwrap_or(200), "Sign in", &content).with(
        "set-cookie",
        cookies::set_line(request.http.client, VISITOR, visitor, SESSION_TIME),
    )
}

pub fn sign_out(operator: &Operator) -> PageResult {
    credentials::remove_token(&operator.console.store, SecretDigest::of(operator.session))?;
    let deleted = cookies::set_line(operator.request.http.client, SESSION, "", 0);
    Ok(layout::redirect("/sign-in").with("set-cookie", deleted))
}

/// Redirects to the sign-in page, which leads back to the requested one.
pub fn redirect_to_sign_in(request: &PageRequest) -> Response {
    let address = request.with_query(request.path);
    if request.is_from_elsewhere() && own_address(&address) == address {
        // Requested from our own page, the browser sends its cookie.
        return error_pages::reload_from_here(&address);
    }
    let is_form = request.method == "POST";
    let ended = match request.cookie(SESSION) {
        _ if is_form && request.path.starts_with("/keys") => "form",
        Some(_) => "page",
        None => "",
    };
    let next = if is_form {
        request.typed_address()
    } else {
        address
    };
    let next = if matches!(next.as_str(), "/" | "/keys") {
        ""
    } else {
        &next
    };
    layout::redirect(&link("/sign-in", [("ended", ended), ("next", next)]))
}

/// Returns the address if it is one of the console, or the first page: a redirect never leads to
/// another site.
fn own_address(next: &str) -> &str {
    let is_ours = next.starts_with('/')
        && !next.starts_with("//")
        && next
            .bytes()
            .all(|byte| byte.is_ascii_graphic() && byte != b'\\');
    if is_ours { next } else { "/" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_redirect_leaves_the_console() {
        for good in ["/", "/usage", "/usage?range=7d&key=key_1", "/a//b"] {
            assert_eq!(own_address(good), good);
        }
        for bad in [
            "",
            "//evil.test",
            "https://evil.test",
            "/\\evil.test",
            "usage",
            "/a\r\nx: y",
            "/a b",
            "/é",
        ] {
            assert_eq!(own_address(bad), "/", "{bad:?}");
        }
    }
}
