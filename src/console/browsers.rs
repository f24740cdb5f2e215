//! The operator's browsers: the cookie, and the row that is stored about each.
//!
//! A sign-in gives the browser a new random value. For 12 hours it is a session; for 90 days it
//! marks a known browser, which has attempts to sign in of its own and gets no access by it.

use std::sync::Mutex;

use super::password::PasswordHash;
use crate::audit::{Actor, NewAuditRow};
use crate::database::{Result, values};
use crate::http::{ClientInfo, RequestHead};
use crate::mutex::lock;
use crate::secret::SecretDigest;
use crate::store::Store;
use crate::when::{self, DAY, HOUR};

const COOKIE: &str = "adriaticum_browser";

/// With this prefix, a browser accepts the cookie over HTTPS and from this host only: neither a
/// page of another host nor a forged response over plain HTTP can replace it.
const HOST_PREFIX: &str = "__Host-";

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
        .find(|(known, _)| **known == name)
        .map(|(_, value)| SecretDigest::of(value))
}

/// The `Set-Cookie` line of a sign-in. With `Lax`, a link on another site opens the page it leads
/// to; `check_origin` refuses the forms of other sites.
pub fn set_cookie(client: ClientInfo, value: &str) -> String {
    let name = cookie_name(client);
    // A cookie that was set over HTTPS is sent over HTTPS only.
    let secure = if client.secure { "; Secure" } else { "" };
    format!("{name}={value}; Path=/; Max-Age={KNOWN_TIME}; HttpOnly; SameSite=Lax{secure}")
}

fn cookie_name(client: ClientInfo) -> String {
    let prefix = if client.secure { HOST_PREFIX } else { "" };
    format!("{prefix}{COOKIE}")
}

/// Begins a session, in place of the `former` value of the same browser. Returns false if the
/// password is not the one that was verified any more.
pub fn sign_in(
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
pub fn sign_out(store: &Store, browser: SecretDigest) -> Result<()> {
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
        let sign_in = |browser, former, now, password| {
            sign_in(store, browser, former, now, password, &by()).expect("a sign-in")
        };
        assert!(!sign_in(first, None, 1, &one), "no password is set");
        password::set(store, one.clone(), &by()).expect("a password");
        assert!(sign_in(first, None, 0, &one));
        check(store, &first, SESSION_TIME - 1, (true, true));
        check(store, &first, SESSION_TIME, (false, true));
        check(store, &first, KNOWN_TIME - 1, (false, true));
        check(store, &first, KNOWN_TIME, (false, false));

        assert!(sign_in(second, Some(first), HOUR, &one));
        check(store, &second, HOUR, (true, true));
        check(store, &first, HOUR, (false, false));
        sign_out(store, second).expect("a sign-out");
        check(store, &second, HOUR, (false, true));

        assert!(sign_in(third, Some(second), HOUR, &one));
        password::set(store, other.clone(), &by()).expect("another password");
        check(store, &third, HOUR, (false, true));
        assert!(!sign_in(first, Some(third), HOUR, &one), "the old password");
        check(store, &third, HOUR, (false, true));
        assert!(sign_in(first, None, KNOWN_TIME + HOUR, &other));
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
            let done = sign_in(store, browser(number), None, number, &password, &by());
            assert!(done.expect("a sign-in"));
        }
        let known = read_known(store, MAX_KNOWN).expect("a look-up");
        assert_eq!(known.len() as i64, MAX_KNOWN);
        assert!(!known.contains(&browser(0)) && known.contains(&browser(1)));
    }
}
