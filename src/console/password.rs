//! The operator's password, of which only an Argon2id hash is stored, and the throttle of wrong ones.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use argon2::{Algorithm, Argon2, Block, Params, Version};
use rand::TryRng;

use crate::audit::{Actor, NewAuditRow};
use crate::database::values;
use crate::error;
use crate::http::{ClientInfo, ClientNetwork};
use crate::rate_limiter::RateLimiter;
use crate::secret::SecretDigest;
use crate::store::Store;

/// The fewest and the most characters.
const FEWEST: usize = 12;
const MOST: usize = 1024;

/// The cost of a guess. OWASP lists several pairs of equal strength; this one needs the least
/// memory.
const MEMORY_KIB: u32 = 9 * 1024;
const PASSES: u32 = 4;

/// The blocks of 1 KiB that are allocated, though far fewer are touched. The C library returns a
/// block above 32 MiB to the system at once. It keeps a smaller one, and from then on all blocks up
/// to that size, for the thread that freed it: after the sign-ins of an hour the service would use
/// 28 MiB instead of 20.
const ALLOCATED_BLOCKS: usize = 33 * 1024;

/// A password as it is stored: its hash and the parameters of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PasswordHash {
    pub salt: Vec<u8>,
    pub hash: Vec<u8>,
    pub memory_kib: u32,
    pub passes: u32,
}

/// Reads the stored password; `None` if none was set.
pub fn stored(store: &Store) -> error::Result<Option<PasswordHash>> {
    let select = "SELECT salt, hash, memory_kib, passes FROM console_password";
    store.database.look_up(select, &[], |mut row| {
        Ok(PasswordHash {
            salt: row.column()?,
            hash: row.column()?,
            memory_kib: row.column()?,
            passes: row.column()?,
        })
    })
}

/// Sets the password, and ends all sessions. Browsers stay known, which gives no access.
pub fn set(store: &Store, password: PasswordHash, by: &Actor) -> error::Result<()> {
    let row = values![
        password.salt,
        password.hash,
        password.memory_kib,
        password.passes
    ];
    NewAuditRow::new("password_set", by)
        .transaction(&store.database, move |session, audit| {
            session.execute("UPDATE console_browsers SET session_ends = NULL", &[])?;
            session.execute(
                "INSERT INTO console_password VALUES (1, $1, $2, $3, $4) ON CONFLICT (id) DO UPDATE SET
                 salt = excluded.salt, hash = excluded.hash, memory_kib = excluded.memory_kib, passes = excluded.passes",
                &row,
            )?;
            audit.insert(session, None, "")
        })
}

/// Checks the length and the characters of a new password. Returns the message for the operator if
/// it can't be used.
pub fn check(password: &str) -> Result<(), &'static str> {
    let length = password.chars().count();
    if length < FEWEST {
        return Err(
            "the password has fewer than 12 characters. Choose a longer one: four random words will do.",
        );
    }
    if length > MOST || password.chars().any(char::is_control) {
        return Err(
            "the password has more than 1024 characters, or some that can't be typed. Choose another.",
        );
    }
    Ok(())
}

pub fn hash(password: &str) -> PasswordHash {
    let mut salt = vec![0; 16];
    rand::rngs::SysRng
        .try_fill_bytes(&mut salt)
        .expect("the operating system should give random bytes");
    let hash = derive(password, &salt, MEMORY_KIB, PASSES).expect("the parameters should be good");
    PasswordHash {
        salt,
        hash,
        memory_kib: MEMORY_KIB,
        passes: PASSES,
    }
}

/// Compares a password with the stored hash, which takes some hundredths of a second and 9 MiB.
pub fn verify(password: &str, stored: &PasswordHash) -> bool {
    let Some(found) = derive(password, &stored.salt, stored.memory_kib, stored.passes) else {
        return false;
    };
    // Every byte is compared, so that the time does not depend on the number of wrong ones.
    let differences = found
        .iter()
        .zip(&stored.hash)
        .fold(0, |all, (a, b)| all | (a ^ b));
    found.len() == stored.hash.len() && differences == 0
}

fn derive(password: &str, salt: &[u8], memory_kib: u32, passes: u32) -> Option<Vec<u8>> {
    let mut out = vec![0; 32];
    let params = Params::new(memory_kib, passes, 1, Some(out.len())).ok()?;
    let mut memory = Vec::with_capacity(ALLOCATED_BLOCKS.max(params.block_count()));
    memory.resize(params.block_count(), Block::default());
    Argon2::new(Algorithm::Argon2id, Version::V0x13, params)
        .hash_password_into_with_memory(password.as_bytes(), salt, &mut out, &mut memory)
        .ok()?;
    Some(out)
}

/// The wrong passwords that each class of clients may send at once; one more per interval.
const WRONG_PASSWORDS: RateLimiter = RateLimiter::new(60, Duration::from_secs(2));

/// The part of these that a source which failed leaves to the others of its class. Forty guessers can
/// make their first attempts at any time, and some are still left for the operator at a new address.
const LEFT_TO_OTHERS: u32 = 45;

/// The failure with which the waits begin.
const FIRST_WAIT: u32 = 5;

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
/// to wait.
pub struct SignInThrottle {
    classes: [RateLimiter; 3],
    /// The failures of each source, and the time of the last. The limits of the classes bound their
    /// number.
    failures: HashMap<SignInSource, (u32, Instant)>,
}

impl Default for SignInThrottle {
    fn default() -> Self {
        Self {
            classes: [WRONG_PASSWORDS; 3],
            failures: HashMap::new(),
        }
    }
}

impl SignInThrottle {
    fn class(&mut self, source: SignInSource) -> &mut RateLimiter {
        let [known_browsers, this_host, elsewhere] = &mut self.classes;
        match source {
            SignInSource::KnownBrowser(_) => known_browsers,
            SignInSource::ThisHost => this_host,
            SignInSource::Elsewhere(_) => elsewhere,
        }
    }

    /// Returns the time to wait before an attempt, if it can't be made now.
    pub fn check(&mut self, source: SignInSource, now: Instant) -> Result<(), Duration> {
        self.failures
            .retain(|_, (_, last)| now.duration_since(*last) < FORGOTTEN);
        let (reserve, own) = match self.failures.get(&source) {
            None => (0, Duration::ZERO),
            Some((count, last)) => {
                let wait = wait_after(*count);
                (
                    LEFT_TO_OTHERS,
                    wait.saturating_sub(now.duration_since(*last)),
                )
            }
        };
        match self.class(source).wait(reserve, now).max(own) {
            Duration::ZERO => Ok(()),
            wait => Err(wait),
        }
    }

    pub fn failed(&mut self, source: SignInSource, now: Instant) {
        self.class(source).allow(now);
        let (count, last) = self.failures.entry(source).or_insert((0, now));
        (*count, *last) = (count.saturating_add(1), now);
    }

    /// Forgets the failures of a source.
    pub fn succeeded(&mut self, source: SignInSource) {
        self.failures.remove(&source);
    }
}

/// The wait after so many failures, which doubles.
fn wait_after(failures: u32) -> Duration {
    failures
        .checked_sub(FIRST_WAIT)
        .map_or(Duration::ZERO, |doublings| {
            Duration::from_secs(1 << doublings.min(6)).min(LONGEST_WAIT)
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::Temporary;

    impl PasswordHash {
        /// A hash that no password has.
        pub fn example(byte: u8) -> Self {
            Self {
                salt: vec![byte],
                hash: vec![byte],
                memory_kib: 8,
                passes: 1,
            }
        }
    }

    #[test]
    fn the_password_that_was_set_last_is_stored() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let stored = || stored(store).expect("a look-up");
        assert_eq!(stored(), None);
        for password in [1, 2].map(PasswordHash::example) {
            set(store, password.clone(), &Actor::command("ana".into())).expect("a password");
            assert_eq!(stored(), Some(password));
        }
    }

    #[test]
    fn passwords_that_can_be_used() {
        for good in [
            "twelve chars",
            "ünïcödé wörd",
            "correct horse battery staple",
            &"x".repeat(1024),
        ] {
            assert!(check(good).is_ok(), "{good}");
        }
        for bad in [
            "",
            "eleven char",
            "ééééééééééé",
            "tab\tin the middle",
            &"x".repeat(1025),
        ] {
            assert!(check(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn one_password_and_no_other() {
        let stored = hash("correct horse battery staple");
        assert!(verify("correct horse battery staple", &stored));
        for wrong in [
            "",
            "correct horse battery stapl",
            "Correct horse battery staple",
        ] {
            assert!(!verify(wrong, &stored), "{wrong}");
        }
        assert_ne!(
            hash("correct horse battery staple").hash,
            stored.hash,
            "every hash has its own salt"
        );
        assert!(!format!("{stored:?}").contains("horse"));
        assert!(!verify(
            "correct horse battery staple",
            &PasswordHash {
                hash: vec![],
                ..stored
            }
        ));
    }

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
        let mut throttle = SignInThrottle::default();
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
            let mut throttle = SignInThrottle::default();
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
        let mut throttle = SignInThrottle::default();
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
            let mut throttle = SignInThrottle::default();
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
        let mut throttle = SignInThrottle::default();
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
}
