//! Signing in and out, and the throttle of wrong passwords.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use maud::{Markup, html};

use super::browsers;
use super::layout;
use super::page::{Operator, PageRequest, PageResult};
use super::password::{self, PasswordHash};
use super::state::Console;
use crate::error::FailureCause;
use crate::http::{ClientInfo, Response};
use crate::logging;
use crate::mutex::lock;
use crate::network::ClientNetwork;
use crate::rate_limiter::RateLimiter;
use crate::report::form::link;
use crate::secret::{SecretDigest, secret_hex};
use crate::text::count;

/// Verifies a password, and signs its browser in.
pub fn submit(console: &Console, request: &PageRequest, stored: &PasswordHash) -> PageResult {
    let client = request.http.client;
    let refused = |status: u16, alert: Markup| form(console, request, Some((status, alert)));
    let wrong = || {
        let alert = html! { "That is not the password. Try again." };
        Ok(refused(401, alert))
    };
    // Another gateway may have given the browser a new value.
    console.browsers.refresh(&console.store)?;
    let browser = request.browser();
    let source = console.sign_in_source(client, browser);
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
        return wrong();
    }
    throttle.succeeded(source);
    let (cookie, by) = (secret_hex::<32>(), request.actor());
    let digest = SecretDigest::of(&cookie);
    if !browsers::sign_in(&console.store, digest, browser, request.now, stored, &by)? {
        // The password was changed meanwhile.
        return wrong();
    }
    // The browser's next request needs its lane. It gets it later if this fails.
    let _ = console.browsers.refresh(&console.store);
    log::info!("console: operator signed in, client={}", request.client());
    Ok(layout::redirect(own_address(request.form.get("next")))
        .with("set-cookie", browsers::set_cookie(client, &cookie)))
}

/// The form, with the status and the message of a refused attempt.
pub fn form(console: &Console, request: &PageRequest, refused: Option<(u16, Markup)>) -> Response {
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
                p.notice { "Your session ended, and the change was not saved. Sign in, then make it again." }
            } @else if request.query.get("ended") == "page" { p.notice { "Your session ended. Sign in again." } }
            form method="post" action="/sign-in" {
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
    layout::plain_page(status.unwrap_or(200), "Sign in", &content)
}

pub fn sign_out(operator: &Operator) -> PageResult {
    browsers::sign_out(&operator.console.store, operator.browser)?;
    Ok(layout::redirect("/sign-in"))
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
    let ended = match request.browser() {
        _ if is_form && page.starts_with("/keys") => "form",
        Some(_) => "page",
        None => "",
    };
    let next = match request.with_query(page) {
        first if matches!(first.as_str(), "/" | "/keys") => String::new(),
        next => next,
    };
    layout::redirect(&link("/sign-in", [("ended", ended), ("next", &next)]))
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

/// The wrong passwords that each class of clients may send at once; one more per interval.
const WRONG_PASSWORDS: RateLimiter = RateLimiter::new(60, Duration::from_secs(2));

/// The part of these that a source leaves to those of its class that failed less often, by its
/// failures. Forty guessers can make their first attempts at any time, also when others have used
/// up their share, and some are still left for the operator at a new address.
const LEFT_TO_OTHERS: [u32; 4] = [0, 45, 48, 51];

/// The number of failures before the first wait.
const FREE: u32 = 4;

const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// The time without a failure after which a source is forgotten.
const FORGOTTEN: Duration = Duration::from_secs(900);

/// The client of an attempt. The variants are the classes of clients, which share nothing: those
/// elsewhere can lock out neither a known browser nor the clients on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SignInSource {
    KnownBrowser(SecretDigest),
    /// All clients on this host together. Behind a proxy that is not trusted, every client seems to
    /// be one.
    ThisHost,
    /// `None` is a trusted proxy on a Unix socket that names no client.
    Elsewhere(Option<ClientNetwork>),
}

impl SignInSource {
    pub fn new(client: ClientInfo, known_browser: Option<SecretDigest>) -> Self {
        // Every program on this host has one of these addresses, unless it chooses another one from
        // 127.0.0.0/8. A guesser could choose a new one for each guess, so those count as elsewhere.
        let is_usual =
            |address: IpAddr| address == Ipv4Addr::LOCALHOST || address == Ipv6Addr::LOCALHOST;
        match known_browser {
            Some(digest) => Self::KnownBrowser(digest),
            None if client.is_local() && client.peer.is_none_or(is_usual) => Self::ThisHost,
            None => Self::Elsewhere(client.peer.map(ClientNetwork::from)),
        }
    }
}

/// Throttles wrong passwords, by class and by source. No thread waits: the response says how long
/// to wait. It is locked while a password is verified, so one is verified at a time.
pub struct SignInThrottle {
    known_browsers: RateLimiter,
    this_host: RateLimiter,
    elsewhere: RateLimiter,
    /// The limits of the classes bound their number.
    failures: HashMap<SignInSource, Failures>,
}

#[derive(Clone, Copy)]
struct Failures {
    count: u32,
    last: Instant,
}

impl Failures {
    fn wait(&self) -> Duration {
        match self.count.checked_sub(FREE) {
            None | Some(0) => Duration::ZERO,
            Some(over) => Duration::from_secs(1 << (over - 1).min(6)).min(LONGEST_WAIT),
        }
    }
}

impl SignInThrottle {
    pub fn new() -> Self {
        Self {
            known_browsers: WRONG_PASSWORDS,
            this_host: WRONG_PASSWORDS,
            elsewhere: WRONG_PASSWORDS,
            failures: HashMap::new(),
        }
    }

    fn class(&mut self, source: SignInSource) -> &mut RateLimiter {
        match source {
            SignInSource::KnownBrowser(_) => &mut self.known_browsers,
            SignInSource::ThisHost => &mut self.this_host,
            SignInSource::Elsewhere(_) => &mut self.elsewhere,
        }
    }

    /// Returns the time to wait before an attempt, if it can't be made now.
    fn check(&mut self, source: SignInSource, now: Instant) -> Result<(), Duration> {
        self.failures
            .retain(|_, failures| now.duration_since(failures.last) < FORGOTTEN);
        let (count, own) = self
            .failures
            .get(&source)
            .map_or((0, Duration::ZERO), |own| {
                let left = own.wait().saturating_sub(now.duration_since(own.last));
                (own.count as usize, left)
            });
        let reserve = LEFT_TO_OTHERS[count.min(LEFT_TO_OTHERS.len() - 1)];
        match self.class(source).wait(reserve, now).max(own) {
            Duration::ZERO => Ok(()),
            wait => Err(wait),
        }
    }

    fn failed(&mut self, source: SignInSource, now: Instant) {
        self.class(source).allow(now);
        let failures = self.failures.entry(source).or_insert(Failures {
            count: 0,
            last: now,
        });
        failures.count = failures.count.saturating_add(1);
        failures.last = now;
    }

    fn succeeded(&mut self, source: SignInSource) {
        self.failures.remove(&source);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elsewhere(number: u32) -> SignInSource {
        SignInSource::Elsewhere(Some(IpAddr::from(number.to_be_bytes()).into()))
    }

    fn known(number: u32) -> SignInSource {
        SignInSource::KnownBrowser(SecretDigest::of(&number.to_string()))
    }

    /// Sends a wrong password, if the source does not have to wait. Returns whether it was sent.
    fn guess(throttle: &mut SignInThrottle, source: SignInSource, now: Instant) -> bool {
        let allowed = throttle.check(source, now).is_ok();
        if allowed {
            throttle.failed(source, now);
        }
        allowed
    }

    #[test]
    fn one_address_waits_longer_each_time_and_no_other_does() {
        let mut now = Instant::now();
        let mut throttle = SignInThrottle::new();
        let mut waits = Vec::new();
        for _ in 0..12 {
            if let Err(wait) = throttle.check(elsewhere(1), now) {
                waits.push(wait.as_secs());
                now += wait;
            }
            assert!(guess(&mut throttle, elsewhere(1), now), "it has waited");
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60]);
        assert!(throttle.check(elsewhere(1), now).is_err());
        let other = throttle.check(elsewhere(2), now);
        other.expect("another address has not failed");
        let later = throttle.check(elsewhere(1), now + LONGEST_WAIT);
        later.expect("no address is locked out");
        throttle.succeeded(elsewhere(1));
        let again = throttle.check(elsewhere(1), now);
        again.expect("a correct password clears the count");
    }

    #[test]
    fn each_class_has_its_limit_and_no_class_locks_out_another() {
        let now = Instant::now();
        for class in [elsewhere, known] {
            let mut throttle = SignInThrottle::new();
            let sent = (0..5000).filter(|number| guess(&mut throttle, class(*number), now));
            assert_eq!(sent.count(), 60);
            let wait = throttle.check(class(9999), now);
            let wait = wait.expect_err("the attempts of the class are used up");
            assert!(wait <= Duration::from_secs(2), "{wait:?}");
            throttle
                .check(class(9999), now + wait)
                .expect("one more after the wait");
            for other in [elsewhere(1), known(1), SignInSource::ThisHost] {
                if throttle.failures.contains_key(&other) {
                    continue;
                }
                let sent = (0..100).filter(|_| guess(&mut throttle, other, now));
                assert_eq!(sent.count(), 5, "{other:?} has its own, and waits");
            }
        }
    }

    #[test]
    fn the_failures_that_are_remembered_are_bounded() {
        let mut now = Instant::now();
        let mut throttle = SignInThrottle::new();
        for number in 0..10_000 {
            guess(&mut throttle, elsewhere(number), now);
            now += Duration::from_millis(200);
        }
        assert!(throttle.failures.len() <= 60 + 450);
    }

    /// The same among known browsers, of which some may belong to a person who knew an old password.
    #[test]
    fn a_new_address_comes_before_those_that_guess() {
        for class in [elsewhere, known] {
            let mut now = Instant::now();
            let mut throttle = SignInThrottle::new();
            let (mut guesses, mut refused) = (0, 0);
            for second in 0..900 {
                let guessers = (0..40).cycle().take(200);
                guesses += guessers
                    .filter(|number| guess(&mut throttle, class(*number), now))
                    .count();
                if throttle.check(class(1000 + second), now).is_err() {
                    refused += 1;
                }
                now += Duration::from_secs(1);
            }
            assert_eq!(refused, 0);
            assert!(
                (400..=60 + 450).contains(&guesses),
                "{guesses}: the limit is the same"
            );
        }
    }

    #[test]
    fn guessers_that_come_later_leave_an_attempt_for_the_operator() {
        let now = Instant::now();
        let mut throttle = SignInThrottle::new();
        for number in (0..20).cycle().take(400).chain((20..40).cycle().take(400)) {
            guess(&mut throttle, elsewhere(number), now);
        }
        let operator = throttle.check(elsewhere(1000), now);
        operator.expect("the operator has not failed yet");
    }

    #[test]
    fn sources_of_sign_ins() {
        let client = |text: &str, proxied| ClientInfo {
            peer: text.parse().ok(),
            proxied,
            secure: false,
        };
        let source = |text: &str| SignInSource::new(client(text, false), None);
        assert_eq!(
            source("2001:db8:1:2::1"),
            source("2001:db8:1:3:ffff::9"),
            "a network of IPv6 is one"
        );
        assert_ne!(source("2001:db8:1:2::1"), source("2001:db8:2:2::1"));
        assert_ne!(source("10.0.0.1"), source("10.0.0.2"));
        for local in ["127.0.0.1", "::1", "unix"] {
            assert_eq!(source(local), SignInSource::ThisHost, "{local}");
            assert_eq!(
                SignInSource::new(client(local, true), None),
                SignInSource::Elsewhere(local.parse().ok().map(|it: IpAddr| it.into())),
                "{local}"
            );
        }
        assert_ne!(
            source("127.0.0.2"),
            source("127.0.0.3"),
            "these have to be chosen"
        );
        assert_ne!(source("127.0.0.2"), SignInSource::ThisHost);
        let digest = SecretDigest::of("known");
        let browser = SignInSource::new(client("10.0.0.1", true), Some(digest));
        assert_eq!(browser, SignInSource::KnownBrowser(digest));
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
