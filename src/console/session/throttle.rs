//! Throttles failed sign-ins: no thread waits, the response says how long to wait.
//!
//! Each address may fail a few times, then has to wait, twice as long each time. All unknown
//! addresses together have a budget as well, or a guesser with many addresses would have as many
//! guesses. A browser that the operator has signed in with before has its own attempts, and so have
//! the clients on this host, so an attacker who uses up that budget does not lock the operator out.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use crate::http::ClientInfo;
use crate::network::ClientNetwork;
use crate::rate_limiter::RateLimiter;
use crate::secret::SecretDigest;

/// The number of failures before the first wait.
const FREE: u32 = 4;

const LONGEST: Duration = Duration::from_secs(60);

/// The time without a failure after which a source is forgotten.
const FORGOTTEN: Duration = Duration::from_secs(900);

/// The attempts that all unknown addresses together may make.
const BUDGET: RateLimiter = RateLimiter::new(60, Duration::from_secs(2));

/// The part of the budget that an address leaves to those that failed less often, by its failures.
/// Forty guessers can make their first attempts at any time, also when others have used up their
/// share, and some are still left for the operator at a new address.
const LEFT_TO_OTHERS: [u32; 4] = [0, 45, 48, 51];

/// The most sources that are remembered, so that clients can't use up the memory.
const REMEMBERED: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SignInSource {
    /// `None` is a trusted proxy on a Unix socket that names no client.
    Unknown(Option<ClientNetwork>),
    /// All clients on this host together. Behind a proxy that is not trusted, every client seems to
    /// be one.
    Loopback,
    /// A browser that was signed in before.
    Browser(SecretDigest),
}

impl SignInSource {
    pub fn new(client: ClientInfo, browser: Option<SecretDigest>) -> Self {
        // Every program on this host has one of these addresses, unless it chooses another one from
        // 127.0.0.0/8. A guesser could choose a new one for each guess, so those count as unknown.
        let is_usual =
            |address: IpAddr| address == Ipv4Addr::LOCALHOST || address == Ipv6Addr::LOCALHOST;
        match browser {
            Some(digest) => Self::Browser(digest),
            None if client.is_local() && client.peer.is_none_or(is_usual) => Self::Loopback,
            None => Self::Unknown(client.peer.map(ClientNetwork::from)),
        }
    }
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
            Some(over) => Duration::from_secs(1 << (over - 1).min(6)).min(LONGEST),
        }
    }
}

pub struct SignInThrottle {
    failures: HashMap<SignInSource, Failures>,
    budget: RateLimiter,
}

impl SignInThrottle {
    pub fn new() -> Self {
        Self {
            failures: HashMap::new(),
            budget: BUDGET,
        }
    }

    /// Takes one attempt from the budget, or returns the time to wait for it.
    pub fn try_now(&mut self, source: SignInSource, now: Instant) -> Result<(), Duration> {
        self.failures
            .retain(|_, failures| now.duration_since(failures.last) < FORGOTTEN);
        let failures = self.failures.get(&source);
        if let Some(failures) = failures {
            let left = failures
                .wait()
                .saturating_sub(now.duration_since(failures.last));
            if !left.is_zero() {
                return Err(left);
            }
        }
        if matches!(source, SignInSource::Unknown(_)) {
            let count = failures.map_or(0, |failures| failures.count as usize);
            let reserve = LEFT_TO_OTHERS[count.min(LEFT_TO_OTHERS.len() - 1)];
            self.budget.take(reserve, now)?;
        }
        Ok(())
    }

    pub fn failed(&mut self, source: SignInSource, now: Instant) {
        if self.failures.len() >= REMEMBERED && !self.failures.contains_key(&source) {
            // The shared budget holds even if an address is forgotten.
            let oldest = self
                .failures
                .iter()
                .min_by_key(|(_, failures)| failures.last)
                .map(|(source, _)| *source);
            oldest.and_then(|oldest| self.failures.remove(&oldest));
        }
        let failures = self.failures.entry(source).or_insert(Failures {
            count: 0,
            last: now,
        });
        failures.count = failures.count.saturating_add(1);
        failures.last = now;
    }

    pub fn succeeded(&mut self, source: SignInSource) {
        self.failures.remove(&source);
        if matches!(source, SignInSource::Unknown(_)) {
            self.budget.give_back();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unknown(number: u32) -> SignInSource {
        SignInSource::Unknown(Some(IpAddr::from(number.to_be_bytes()).into()))
    }

    #[test]
    fn one_address_waits_longer_each_time_and_no_other_does() {
        let mut now = Instant::now();
        let mut throttle = SignInThrottle::new();
        let mut waits = Vec::new();
        for _ in 0..12 {
            if let Err(wait) = throttle.try_now(unknown(1), now) {
                waits.push(wait.as_secs());
                now += wait;
                throttle.try_now(unknown(1), now).expect("it has waited");
            }
            throttle.failed(unknown(1), now);
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60]);
        assert!(throttle.try_now(unknown(1), now).is_err());
        throttle
            .try_now(unknown(2), now)
            .expect("another address has not failed");
        throttle
            .try_now(unknown(1), now + LONGEST)
            .expect("no address is locked out");
        throttle.succeeded(unknown(1));
        throttle
            .try_now(unknown(1), now)
            .expect("a correct password clears the count");
    }

    #[test]
    fn many_addresses_have_one_budget_and_the_operator_is_not_locked_out() {
        let now = Instant::now();
        let mut throttle = SignInThrottle::new();
        let mut tried = 0;
        for number in 0..5000 {
            if throttle.try_now(unknown(number), now).is_ok() {
                tried += 1;
                throttle.failed(unknown(number), now);
            }
        }
        assert_eq!(tried, 60);
        let wait = throttle
            .try_now(unknown(9999), now)
            .expect_err("the budget is used up");
        assert!(wait <= Duration::from_secs(2), "{wait:?}");
        for source in [
            SignInSource::Browser(SecretDigest::of("known")),
            SignInSource::Loopback,
        ] {
            let mut tried = 0;
            while throttle.try_now(source, now).is_ok() {
                tried += 1;
                throttle.failed(source, now);
            }
            assert_eq!(
                tried, 5,
                "{source:?} has its own, and waits like an address"
            );
        }
        throttle
            .try_now(unknown(9999), now + wait)
            .expect("one more after the wait");
        for number in 0..5000 {
            throttle.failed(unknown(number), now);
        }
        assert!(throttle.failures.len() <= REMEMBERED);
    }

    #[test]
    fn a_new_address_comes_before_those_that_guess() {
        let mut now = Instant::now();
        let mut throttle = SignInThrottle::new();
        let (mut guesses, mut refused) = (0, 0);
        for second in 0..900 {
            for number in (0..40).cycle().take(200) {
                if throttle.try_now(unknown(number), now).is_ok() {
                    guesses += 1;
                    throttle.failed(unknown(number), now);
                }
            }
            let operator = unknown(1000 + second);
            match throttle.try_now(operator, now) {
                Ok(()) => throttle.succeeded(operator),
                Err(_) => refused += 1,
            }
            now += Duration::from_secs(1);
        }
        assert_eq!(refused, 0);
        assert!(
            (400..=60 + 450).contains(&guesses),
            "{guesses}: the limit is the same"
        );
    }

    #[test]
    fn guessers_that_come_later_leave_an_attempt_for_the_operator() {
        let now = Instant::now();
        let mut throttle = SignInThrottle::new();
        for number in (0..20).cycle().take(400).chain((20..40).cycle().take(400)) {
            if throttle.try_now(unknown(number), now).is_ok() {
                throttle.failed(unknown(number), now);
            }
        }
        throttle
            .try_now(unknown(1000), now)
            .expect("the operator has not failed yet");
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
            assert_eq!(source(local), SignInSource::Loopback, "{local}");
            assert_eq!(
                SignInSource::new(client(local, true), None),
                SignInSource::Unknown(local.parse().ok().map(|it: IpAddr| it.into())),
                "{local}"
            );
        }
        assert_ne!(
            source("127.0.0.2"),
            source("127.0.0.3"),
            "these have to be chosen"
        );
        assert_ne!(source("127.0.0.2"), SignInSource::Loopback);
        let known = SignInSource::new(client("10.0.0.1", true), Some(SecretDigest::of("known")));
        assert_eq!(known, SignInSource::Browser(SecretDigest::of("known")));
    }
}
