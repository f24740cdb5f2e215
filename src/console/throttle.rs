//! Throttles failed sign-ins: no thread waits, the response says how long to wait.
//!
//! Each address may fail a few times, then has to wait, twice as long each time. All strangers together have a
//! budget as well, or a guesser with many addresses would have as many guesses. A browser that the operator has
//! signed in with before is no stranger, nor is a client on this host, so an attacker who uses up that budget does not lock
//! the operator out.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use crate::http::ClientInfo;
use crate::secret::SecretDigest;

/// How many times one may fail before the first wait.
const FREE: u32 = 4;

/// The longest wait.
const LONGEST: Duration = Duration::from_secs(60);

/// After so long without a failure, all is forgotten.
const FORGOTTEN: Duration = Duration::from_secs(900);

/// What all strangers together may try at once, and how often one more.
const BUDGET: f64 = 60.0;
const REFILL_PER_SECOND: f64 = 0.5;

/// For each time that it failed, up to three, an address leaves so much of the budget to those that failed less. Guessers
/// with dozens of addresses soon use up their own share, and the operator at a new address finds what is left.
const LEFT_TO_OTHERS: f64 = 15.0;

/// How many are remembered: more would be a stranger's way to our memory.
const REMEMBERED: usize = 1024;

/// Who signs in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Who {
    /// An address or network. `None` is a trusted proxy on a Unix socket that names no client.
    Stranger(Option<IpAddr>),
    /// All clients on this host together. Behind a proxy that is not trusted, every client seems to be one.
    Loopback,
    /// A browser that was signed in before.
    Browser(SecretDigest),
}

impl Who {
    pub fn new(client: ClientInfo, browser: Option<SecretDigest>) -> Self {
        // Every program on this host has one of these addresses, unless it chooses another one from 127.0.0.0/8. A guesser
        // could choose a new one for each guess, so those count as strangers.
        let is_usual = |address: IpAddr| address == Ipv4Addr::LOCALHOST || address == Ipv6Addr::LOCALHOST;
        match browser {
            Some(digest) => Self::Browser(digest),
            None if client.is_local() && client.peer.is_none_or(is_usual) => Self::Loopback,
            None => Self::Stranger(client.peer.map(network)),
        }
    }
}

/// A host has a whole /64 network of IPv6 to itself.
fn network(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            [a, b, c, d, 0, 0, 0, 0].into()
        }
        IpAddr::V4(_) => address,
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

pub struct Slowing {
    failures: HashMap<Who, Failures>,
    budget: f64,
    filled: Instant,
}

impl Slowing {
    pub fn new(now: Instant) -> Self {
        Self { failures: HashMap::new(), budget: BUDGET, filled: now }
    }

    /// Takes one try from what there is, or tells how long to wait for it.
    pub fn try_now(&mut self, who: Who, now: Instant) -> Result<(), Duration> {
        self.failures.retain(|_, failures| now.duration_since(failures.last) < FORGOTTEN);
        let failures = self.failures.get(&who);
        if let Some(failures) = failures {
            let left = failures.wait().saturating_sub(now.duration_since(failures.last));
            if !left.is_zero() {
                return Err(left);
            }
        }
        if matches!(who, Who::Stranger(_)) {
            let needed =
                1.0 + LEFT_TO_OTHERS * f64::from(failures.map_or(0, |failures| failures.count.min(3)));
            let passed = now.duration_since(self.filled).as_secs_f64();
            self.budget = (self.budget + passed * REFILL_PER_SECOND).min(BUDGET);
            self.filled = now;
            if self.budget < needed {
                return Err(Duration::from_secs_f64((needed - self.budget) / REFILL_PER_SECOND));
            }
            self.budget -= 1.0;
        }
        Ok(())
    }

    pub fn failed(&mut self, who: Who, now: Instant) {
        if self.failures.len() >= REMEMBERED && !self.failures.contains_key(&who) {
            // The shared budget holds even if an address is forgotten.
            let oldest = self.failures.iter().min_by_key(|(_, failures)| failures.last).map(|(who, _)| *who);
            oldest.and_then(|oldest| self.failures.remove(&oldest));
        }
        let failures = self.failures.entry(who).or_insert(Failures { count: 0, last: now });
        failures.count = failures.count.saturating_add(1);
        failures.last = now;
    }

    pub fn succeeded(&mut self, who: Who) {
        self.failures.remove(&who);
        if matches!(who, Who::Stranger(_)) {
            self.budget = (self.budget + 1.0).min(BUDGET);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stranger(number: u32) -> Who {
        Who::Stranger(Some(IpAddr::from(number.to_be_bytes())))
    }

    #[test]
    fn one_address_waits_longer_each_time_and_no_other_does() {
        let mut now = Instant::now();
        let mut slowing = Slowing::new(now);
        let mut waits = Vec::new();
        for _ in 0..12 {
            if let Err(wait) = slowing.try_now(stranger(1), now) {
                waits.push(wait.as_secs());
                now += wait;
                slowing.try_now(stranger(1), now).expect("it has waited");
            }
            slowing.failed(stranger(1), now);
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60]);
        assert!(slowing.try_now(stranger(1), now).is_err());
        slowing.try_now(stranger(2), now).expect("another address has not failed");
        slowing.try_now(stranger(1), now + LONGEST).expect("nobody is locked out");
        slowing.succeeded(stranger(1));
        slowing.try_now(stranger(1), now).expect("a correct password clears the count");
    }

    #[test]
    fn many_addresses_have_one_budget_and_the_operator_is_not_locked_out() {
        let now = Instant::now();
        let mut slowing = Slowing::new(now);
        let mut tried = 0;
        for number in 0..5000 {
            if slowing.try_now(stranger(number), now).is_ok() {
                tried += 1;
                slowing.failed(stranger(number), now);
            }
        }
        assert_eq!(tried, 60);
        let wait = slowing.try_now(stranger(9999), now).expect_err("the budget is used up");
        assert!(wait <= Duration::from_secs(2), "{wait:?}");
        for who in [Who::Browser(SecretDigest::of("known")), Who::Loopback] {
            let mut tried = 0;
            while slowing.try_now(who, now).is_ok() {
                tried += 1;
                slowing.failed(who, now);
            }
            assert_eq!(tried, 5, "{who:?} has its own, and waits like an address");
        }
        slowing.try_now(stranger(9999), now + wait).expect("one more after the wait");
        for number in 0..5000 {
            slowing.failed(stranger(number), now);
        }
        assert!(slowing.failures.len() <= REMEMBERED);
    }

    #[test]
    fn a_new_address_comes_before_those_that_guess() {
        let mut now = Instant::now();
        let mut slowing = Slowing::new(now);
        let (mut guesses, mut refused) = (0, 0);
        for second in 0..900 {
            for number in (0..40).cycle().take(200) {
                if slowing.try_now(stranger(number), now).is_ok() {
                    guesses += 1;
                    slowing.failed(stranger(number), now);
                }
            }
            let operator = stranger(1000 + second);
            match slowing.try_now(operator, now) {
                Ok(()) => slowing.succeeded(operator),
                Err(_) => refused += 1,
            }
            now += Duration::from_secs(1);
        }
        assert_eq!(refused, 0);
        assert!((400..=60 + 450).contains(&guesses), "{guesses}: the limit is the same");
    }

    #[test]
    fn who_is_who() {
        let client = |text: &str, proxied| ClientInfo { peer: text.parse().ok(), proxied, secure: false };
        let who = |text: &str| Who::new(client(text, false), None);
        assert_eq!(who("2001:db8:1:2::1"), who("2001:db8:1:2:ffff::9"), "a network of IPv6 is one");
        assert_ne!(who("2001:db8:1:2::1"), who("2001:db8:1:3::1"));
        assert_ne!(who("10.0.0.1"), who("10.0.0.2"));
        for local in ["127.0.0.1", "::1", "unix"] {
            assert_eq!(who(local), Who::Loopback, "{local}");
            assert_eq!(
                Who::new(client(local, true), None),
                Who::Stranger(local.parse().ok().map(network)),
                "{local}"
            );
        }
        assert_ne!(who("127.0.0.2"), who("127.0.0.3"), "these have to be chosen");
        assert_ne!(who("127.0.0.2"), Who::Loopback);
        let known = Who::new(client("10.0.0.1", true), Some(SecretDigest::of("known")));
        assert_eq!(known, Who::Browser(SecretDigest::of("known")));
    }
}
