//! Sessions: the sign-in page, the cookie, and the row that is stored about each browser.
//!
//! A sign-in gives the browser a new random value. For 12 hours it is a session; for 90 days it
//! marks a known browser, which has attempts to sign in of its own and gets no access by it.

use std::sync::Mutex;
use std::time::Instant;

use maud::{Markup, html};

use super::Console;
use super::page::{Operator, PageRequest, PageResult, dialog, redirect};
use super::password::{self, PasswordHash};
use crate::audit::{Actor, NewAuditRow};
use crate::database::values;
use crate::error::{FailureCause, Result};
use crate::http::{ClientInfo, RequestHead, Response};
use crate::locks::lock;
use crate::logging;
use crate::report::query::link;
use crate::secret::{SecretDigest, secret_hex};
use crate::store::Store;
use crate::text::count;
use crate::when::{self, DAY, HOUR};

/// Verifies a password, and signs its browser in.
pub fn sign_in(console: &Console, request: &PageRequest, stored: &PasswordHash) -> PageResult {
    let client = request.http.client;
    let refused = |status: u16, alert: Markup| Response {
        status,
        ..sign_in_form(console, request, Some(alert))
    };
    let wrong = || refused(401, html! { "That is not the password. Try again." });
    // Another gateway may have given the browser a new value.
    console.browsers.refresh(&console.store)?;
    let source = console.sign_in_source(client, request.browser);
    let mut throttle = lock(&console.sign_ins);
    if let Err(wait) = throttle.check(source, Instant::now()) {
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
        return Ok(wrong());
    }
    throttle.succeeded(source);
    let cookie = secret_hex::<32>();
    let (browser, by) = (SecretDigest::of(&cookie), request.actor());
    if !begin(
        &console.store,
        browser,
        request.browser,
        request.now,
        stored,
        &by,
    )? {
        // The password was changed meanwhile.
        return Ok(wrong());
    }
    // The browser's next request needs its lane. It gets it later if this fails.
    let _ = console.browsers.refresh(&console.store);
    log::info!("console: operator signed in, client={}", request.client());
    Ok(redirect(own_address(request.form.get("next")))
        .with("set-cookie", set_cookie(client, &cookie)))
}

/// The sign-in page, with the message of a refused attempt.
pub fn sign_in_form(console: &Console, request: &PageRequest, alert: Option<Markup>) -> Response {
    let fields = if request.method == "POST" {
        &request.form
    } else {
        &request.query
    };
    let command = console
        .config
        .command("console password", request.http.client.is_local());
    let content = html! {
        @match (alert, fields.get("ended")) {
            (Some(alert), _) => p.alert role="alert" { (alert) },
            (None, "form") => p.notice { "Your session ended, and the change was not saved. Sign in, then make it again." },
            (None, "page") => p.notice { "Your session ended. Sign in again." },
            _ => {},
        }
        form method="post" action="/sign-in" {
            input type="hidden" name="next" value=(fields.get("next"));
            // For the browser's password manager, which needs a user name.
            input type="text" name="name" value="operator" autocomplete="username" hidden;
            label for="password" { "Operator password" }
            input #password type="password" name="password" autocomplete="current-password" required
                autofocus maxlength="1024";
            button.primary type="submit" { "Sign in" }
        }
        p.muted { "Forgotten? The operator can set a new one: " code.text { (command) } }
    };
    dialog(None, "Sign in", &content)
}

pub fn sign_out(operator: &Operator) -> PageResult {
    if let Some(browser) = operator.request.browser {
        end(&operator.console.store, browser)?;
    }
    Ok(redirect("/sign-in"))
}

/// Redirects to the sign-in page, which leads back to the requested page, or to that of the form
/// which was sent.
pub fn redirect_to_sign_in(request: &PageRequest) -> Response {
    let is_form = request.method == "POST";
    let page = match request.path {
        "/keys" if is_form => "/keys/new",
        "/sign-out" => "/",
        path => path,
    };
    let ended = match request.browser {
        _ if is_form && page.starts_with("/keys") => "form",
        Some(_) => "page",
        None => "",
    };
    let next = match request.with_query(page) {
        first if matches!(first.as_str(), "/" | "/keys") => String::new(),
        next => next,
    };
    redirect(&link("/sign-in", [("ended", ended), ("next", &next)]))
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

/// The lifetime of a session in seconds.
const SESSION_TIME: i64 = 12 * HOUR;

/// The time in seconds that a browser stays known after its last sign-in.
const KNOWN_TIME: i64 = 90 * DAY;

/// The maximum number of known browsers. Each has attempts of its own, and a person who knew an old
/// password may have signed in with any number of them.
const MAX_KNOWN: i64 = 32;

/// The digest of the cookie that a request presents, which may be unknown.
pub fn presented(client: ClientInfo, head: &RequestHead) -> Option<SecretDigest> {
    let name = cookie_name(client);
    head.header("cookie")
        .filter_map(|line| str::from_utf8(line).ok())
        .flat_map(|line| line.split(';'))
        .filter_map(|pair| pair.trim().split_once('='))
        .find(|(known, _)| *known == name)
        .map(|(_, value)| SecretDigest::of(value))
}

/// The `Set-Cookie` line of a sign-in. With `Lax`, a link on another site opens the page it leads
/// to; `check_origin` refuses the forms of other sites.
fn set_cookie(client: ClientInfo, value: &str) -> String {
    let name = cookie_name(client);
    // A cookie that was set over HTTPS is sent over HTTPS only.
    let secure = if client.secure { "; Secure" } else { "" };
    format!("{name}={value}; Path=/; Max-Age={KNOWN_TIME}; HttpOnly; SameSite=Lax{secure}")
}

/// With the prefix `__Host-`, a browser accepts the cookie over HTTPS and from this host only:
/// neither a page of another host nor a forged response over plain HTTP can replace it.
fn cookie_name(client: ClientInfo) -> &'static str {
    if client.secure {
        "__Host-adriaticum_browser"
    } else {
        "adriaticum_browser"
    }
}

/// Begins a session, in place of the `former` value of the same browser. Returns false if the
/// password is not the one that was verified any more.
pub fn begin(
    store: &Store,
    browser: SecretDigest,
    former: Option<SecretDigest>,
    now: i64,
    password: &PasswordHash,
    by: &Actor,
) -> Result<bool> {
    let row = values![browser.0, now, now + SESSION_TIME, &password.hash];
    let replaced = values![former.map(|former| former.0), now - KNOWN_TIME];
    NewAuditRow::new("signed_in", by).transaction(&store.database, move |session, audit| {
        let insert =
            "INSERT INTO console_browsers SELECT $1, $2, $3 FROM console_password WHERE hash = $4";
        if session.execute(insert, &row)? == 0 {
            return Ok(false);
        }
        let remove = "DELETE FROM console_browsers WHERE digest = $1 OR signed_in <= $2";
        session.execute(remove, &replaced)?;
        audit.insert(session, None, "")?;
        Ok(true)
    })
}

pub fn is_signed_in(store: &Store, browser: &SecretDigest, now: i64) -> Result<bool> {
    let statement = "SELECT count(*) FROM console_browsers WHERE digest = $1 AND session_ends > $2";
    let parameters = values![browser.0, now];
    let count: i64 = store
        .database
        .read(|session| session.value(statement, &parameters))?;
    Ok(count > 0)
}

/// Ends the session of a browser, which stays known.
pub fn end(store: &Store, browser: SecretDigest) -> Result<()> {
    store.database.transaction(None, move |session| {
        let end = "UPDATE console_browsers SET session_ends = NULL WHERE digest = $1";
        session.execute(end, &values![browser.0]).map(drop)
    })
}

/// The known browsers, for the event loop, which can't query the database. A browser that signed in
/// through another gateway is added when its first request is served.
pub struct KnownBrowsers(Mutex<Vec<SecretDigest>>);

impl KnownBrowsers {
    pub fn read(store: &Store) -> Self {
        let browsers = Self(Mutex::default());
        if let Err(error) = browsers.refresh(store) {
            log::warn!("console: could not read the known browsers: {error}");
        }
        browsers
    }

    pub fn refresh(&self, store: &Store) -> Result<()> {
        let browsers = read_known(store, when::now())?;
        *lock(&self.0) = browsers;
        Ok(())
    }

    pub fn contains(&self, browser: &SecretDigest) -> bool {
        lock(&self.0).contains(browser)
    }
}

/// The browsers from which the operator signed in last.
fn read_known(store: &Store, now: i64) -> Result<Vec<SecretDigest>> {
    let statement = "SELECT digest FROM console_browsers WHERE signed_in > $1
                     ORDER BY signed_in DESC LIMIT $2";
    let parameters = values![now - KNOWN_TIME, MAX_KNOWN];
    store.database.read(|session| {
        session.rows(statement, &parameters, |mut row| {
            row.column().map(SecretDigest)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::password;
    use crate::store::tests::Temporary;

    #[track_caller]
    fn check(store: &Store, browser: &SecretDigest, now: i64, expected: (bool, bool)) {
        let signed_in = is_signed_in(store, browser, now).expect("a look-up");
        let known = read_known(store, now).expect("a look-up");
        assert_eq!((signed_in, known.contains(browser)), expected, "at {now}");
    }

    fn by() -> Actor {
        Actor::console("192.0.2.1".into())
    }

    #[test]
    fn a_browser_from_its_first_sign_in_to_its_end() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let [one, other] = [1, 2].map(PasswordHash::example);
        let [first, second, third] = ["first", "second", "third"].map(SecretDigest::of);
        let begin = |browser, former, now, password| {
            begin(store, browser, former, now, password, &by()).expect("a sign-in")
        };
        assert!(!begin(first, None, 1, &one), "no password is set");
        password::set(store, one.clone(), &by()).expect("a password");
        assert!(begin(first, None, 0, &one));
        check(store, &first, SESSION_TIME - 1, (true, true));
        check(store, &first, SESSION_TIME, (false, true));
        check(store, &first, KNOWN_TIME - 1, (false, true));
        check(store, &first, KNOWN_TIME, (false, false));

        assert!(begin(second, Some(first), HOUR, &one));
        check(store, &second, HOUR, (true, true));
        check(store, &first, HOUR, (false, false));
        end(store, second).expect("a sign-out");
        check(store, &second, HOUR, (false, true));

        assert!(begin(third, Some(second), HOUR, &one));
        password::set(store, other.clone(), &by()).expect("another password");
        check(store, &third, HOUR, (false, true));
        assert!(!begin(first, Some(third), HOUR, &one), "the old password");
        check(store, &third, HOUR, (false, true));
        assert!(begin(first, None, KNOWN_TIME + HOUR, &other));
        let rows: i64 = store.value("SELECT count(*) FROM console_browsers");
        assert_eq!(rows, 1, "an expired row is removed");
    }

    #[test]
    fn the_browsers_that_signed_in_last_are_known() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let password = PasswordHash::example(1);
        password::set(store, password.clone(), &by()).expect("a password");
        let browser = |number: i64| SecretDigest::of(&number.to_string());
        for number in 0..=MAX_KNOWN {
            let done = begin(store, browser(number), None, number, &password, &by());
            assert!(done.expect("a sign-in"));
        }
        let known = read_known(store, MAX_KNOWN).expect("a look-up");
        assert_eq!(known.len() as i64, MAX_KNOWN);
        assert!(!known.contains(&browser(0)) && known.contains(&browser(1)));
    }

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
