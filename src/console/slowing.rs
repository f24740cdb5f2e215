//! Throttles failed sign-ins: no thread waits, the response says how long to wait.
//!
//! Each address may fail a few times, then has to wait, twice as long each time. All strangers together have a
//! budget as well, or a guesser with many addresses would have as many guesses. A browser that the operator has
//! signed in with before is no stranger, so an attacker who uses up that budget does not lock the operator out.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::store::Digest;

/// How many times one may fail before the first wait.
const FREE: u32 = 4;

/// The longest wait.
const LONGEST: Duration = Duration::from_secs(60);

/// After so long without a failure, all is forgotten.
const FORGOTTEN: Duration = Duration::from_secs(900);

/// What all strangers together may try at once, and how often one more.
const BUDGET: f64 = 20.0;
const REFILL_PER_SECOND: f64 = 0.5;

/// How many are remembered: more would be a stranger's way to our memory.
const REMEMBERED: usize = 1024;

/// Who signs in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Who {
    /// An address; of IPv6 the network, as a host has a whole one to itself. None is that of a Unix socket.
    Stranger(Option<IpAddr>),
    /// A browser that was signed in before.
    Known([u8; 32]),
}

impl Who {
    pub fn new(address: Option<IpAddr>, browser: Option<Digest>) -> Self {
        match (browser, address) {
            (Some(digest), _) => Self::Known(digest.bytes()),
            (None, Some(IpAddr::V6(address))) => {
                let [a, b, c, d, ..] = address.segments();
                Self::Stranger(Some([a, b, c, d, 0, 0, 0, 0].into()))
            }
            (None, address) => Self::Stranger(address),
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
        if let Some(failures) = self.failures.get(&who) {
            let left = failures.wait().saturating_sub(now.duration_since(failures.last));
            if !left.is_zero() {
                return Err(left);
            }
        }
        if matches!(who, Who::Stranger(_)) {
            let passed = now.duration_since(self.filled).as_secs_f64();
            self.budget = (self.budget + passed * REFILL_PER_SECOND).min(BUDGET);
            self.filled = now;
            if self.budget < 1.0 {
                return Err(Duration::from_secs_f64((1.0 - self.budget) / REFILL_PER_SECOND));
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
        Who::new(Some(IpAddr::from(number.to_be_bytes())), None)
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
        assert_eq!(tried, 20);
        let wait = slowing.try_now(stranger(9999), now).expect_err("the budget is used up");
        assert!(wait <= Duration::from_secs(2), "{wait:?}");
        let known = Who::new(None, Some(Digest::of("known")));
        slowing.try_now(known, now).expect("a browser that was signed in before has its own");
        slowing.try_now(stranger(9999), now + wait).expect("one more after the wait");
        for number in 0..5000 {
            slowing.failed(stranger(number), now);
        }
        assert!(slowing.failures.len() <= REMEMBERED);
    }

    #[test]
    fn a_network_of_ipv6_is_one() {
        let who = |text: &str| Who::new(Some(text.parse().expect("an address")), None);
        assert_eq!(who("2001:db8:1:2::1"), who("2001:db8:1:2:ffff::9"));
        assert_ne!(who("2001:db8:1:2::1"), who("2001:db8:1:3::1"));
        assert_ne!(who("10.0.0.1"), who("10.0.0.2"));
    }
}
