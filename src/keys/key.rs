//! An API key as it is stored, its properties, and changes of these.

use serde::Serialize;

use crate::database::{Result, Row};
use crate::id::has_shape;
use crate::keys::{Budget, KeyBudget};
use crate::secret::{SecretDigest, contains_secret};
use crate::text::{count, grouped, is_unprintable};
use crate::when::{self, DAY};

/// A key as it is stored. The secret is not in it: reading the database does not allow using the
/// keys.
#[derive(Clone, Debug, Serialize)]
pub struct Key {
    pub id: String,
    pub name: String,
    /// The beginning and the end of the secret; unknown for a key that an earlier version made.
    pub hint: Option<String>,
    pub permissions: Vec<Permission>,
    pub created: i64,
    pub expires: Option<i64>,
    pub last_used: Option<i64>,
    pub revoked: Option<i64>,
    /// The number of its requests that a gateway processes at once; `None`: any number.
    pub concurrent: Option<u32>,
    pub budget: Option<KeyBudget>,
}

impl Key {
    /// The version of everything that can be changed about a key. A form that shows the key carries
    /// it, so that a save does not overwrite a later change.
    pub fn version(&self) -> String {
        let terms = (
            &self.permissions,
            self.expires,
            self.concurrent,
            self.budget(),
        );
        let all = format!("{:?}", (&self.name, terms, self.revoked));
        hex::encode(&SecretDigest::of(&all).0[..8])
    }

    /// Tells two keys of one name apart: the ends of the secret or, if they are unknown, the id.
    pub fn mark(&self) -> &str {
        self.hint.as_deref().unwrap_or(&self.id)
    }

    pub(super) fn budget(&self) -> Option<Budget> {
        self.budget.map(|budget| budget.budget)
    }

    /// Describes the properties that are different in another state of the key.
    pub fn differences(&self, after: &Self) -> Vec<String> {
        let properties = |key: &Self| {
            let name = ("name", format!("{:?}", key.name));
            let revoked = ("revoked", time_or_never(key.revoked));
            let terms = terms(&key.permissions, key.expires, key.concurrent, key.budget());
            [name].into_iter().chain(terms).chain([revoked])
        };
        let pairs = properties(self).zip(properties(after));
        let changed = pairs.filter(|(before, after)| before != after);
        changed
            .map(|((property, old), (_, new))| format!("{property}: {old} → {new}"))
            .collect()
    }

    pub fn state(&self, now: i64) -> KeyState {
        match (self.revoked, self.expires) {
            (Some(_), _) => KeyState::Revoked,
            (None, Some(expires)) if expires <= now => KeyState::Expired,
            (None, Some(expires)) if expires <= now + EXPIRING => KeyState::Expiring,
            (None, _) => KeyState::Active,
        }
    }

    /// Says in a sentence what it may do.
    pub fn in_words(&self, now: i64) -> String {
        if !self.is_valid(now) {
            let (state, since) = match self.revoked {
                Some(_) => ("was revoked", self.revoked),
                None => ("expired", self.expires),
            };
            let since = since.map(when::format_utc).unwrap_or_default();
            return format!("No request with it is accepted: it {state} at {since}.");
        }
        let permissions: Vec<&str> = self
            .permissions
            .iter()
            .map(|permission| permission.in_words())
            .collect();
        let mut words = vec![format!("It may {}", permissions.join(" and "))];
        if let Some(expires) = self.expires {
            words.push(format!(
                "until {} ({})",
                when::format_end(expires),
                time_left(expires - now)
            ));
        }
        words.extend(
            self.concurrent
                .map(|number| format!("at most {} at a time", grouped(number.into()))),
        );
        words.extend(self.budget().map(|Budget { tokens, per }| {
            format!("{} per {}", count(tokens, "token"), per.as_str())
        }));
        words.join(", ") + "."
    }

    /// Returns whether requests with it are accepted, if it has the permission.
    pub fn is_valid(&self, now: i64) -> bool {
        matches!(self.state(now), KeyState::Active | KeyState::Expiring)
    }

    /// Returns whether it allows something that another state of the key does not.
    pub fn is_wider_than(&self, other: &Self) -> bool {
        fn exceeds<T: PartialOrd>(one: Option<T>, other: Option<T>) -> bool {
            other.is_some_and(|other| one.is_none_or(|one| one > other))
        }
        let has_more_tokens = match (self.budget(), other.budget()) {
            (Some(own), Some(other)) => own.per != other.per || own.tokens > other.tokens,
            (own, other) => own.is_none() && other.is_some(),
        };
        self.permissions
            .iter()
            .any(|permission| !other.permissions.contains(permission))
            || exceeds(self.expires, other.expires)
            || exceeds(self.concurrent, other.concurrent)
            || has_more_tokens
    }
}

/// The time until a key expires, in words. It is rounded before its unit is chosen: two days are
/// not 48 hours a second later.
pub fn time_left(seconds: i64) -> String {
    let (minutes, hours) = ((seconds + 59) / 60, (seconds + 1_800) / 3_600);
    if minutes < 120 {
        count(minutes, "minute")
    } else if hours < 48 {
        count(hours, "hour")
    } else {
        count((seconds + DAY / 2) / DAY, "day")
    }
}

/// The time before its end during which a key is marked as expiring, in seconds.
const EXPIRING: i64 = 10 * DAY;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyState {
    Active,
    /// Accepted, but not for longer than ten days.
    Expiring,
    Expired,
    Revoked,
}

impl KeyState {
    pub const ALL: [Self; 4] = [Self::Active, Self::Expiring, Self::Expired, Self::Revoked];

    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.as_str() == word)
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Expiring => "expiring",
            Self::Expired => "expired",
            Self::Revoked => "revoked",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Permission {
    /// Run completions.
    Completions,
    /// Read the console host's metrics.
    Metrics,
}

impl Permission {
    pub const ALL: [Self; 2] = [Self::Completions, Self::Metrics];

    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|permission| permission.as_str() == word)
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Completions => "completions",
            Self::Metrics => "metrics",
        }
    }

    /// Says what a key with it may do.
    pub fn in_words(self) -> &'static str {
        match self {
            Self::Completions => "run completions",
            Self::Metrics => "read the metrics",
        }
    }

    /// The words, comma separated.
    pub fn join(permissions: &[Self]) -> String {
        permissions
            .iter()
            .map(|permission| permission.as_str())
            .collect::<Vec<_>>()
            .join(",")
    }
}

/// A name that people give a key: 1 to 64 printable characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyName(pub(super) String);

impl KeyName {
    pub const TAKES: &str =
        "1 to 64 printable characters, and not the form of a key's id or secret";

    pub fn parse(text: &str) -> Option<Self> {
        let length = text.chars().count();
        // One key's name must not look like another's, or like its id.
        let is_name = (1..=64).contains(&length)
            && !text.chars().any(is_unprintable)
            && !text.trim().is_empty();
        let is_id = has_shape(&text.trim().to_ascii_lowercase(), "key_", 16);
        (is_name && !is_id && !contains_secret(text)).then(|| Self(text.to_owned()))
    }
}

/// The properties of a new key besides its id and its secret.
pub struct NewKey<'a> {
    pub name: &'a KeyName,
    pub permissions: &'a [Permission],
    pub created: i64,
    pub expires: Option<i64>,
    pub concurrent: Option<u32>,
    pub budget: Option<Budget>,
}

/// A property of a key with its new value.
pub enum KeyChange {
    Name(KeyName),
    Permissions(Vec<Permission>),
    Expires(Option<i64>),
    Concurrent(Option<u32>),
    Budget(Option<Budget>),
}

impl KeyChange {
    pub(super) fn apply(&self, key: &mut Key) {
        match self {
            Self::Name(name) => key.name.clone_from(&name.0),
            Self::Permissions(permissions) => key.permissions.clone_from(permissions),
            Self::Expires(time) => key.expires = *time,
            Self::Concurrent(number) => key.concurrent = *number,
            Self::Budget(budget) => key.budget = budget.map(|budget| KeyBudget { budget, used: 0 }),
        }
    }
}

/// The result of a change.
#[derive(Debug)]
pub enum KeyChanged {
    /// The key is as it should be, by this change or an earlier one.
    Done,
    NoSuchKey,
    /// The key was changed since it was read; this is its present state. Nothing was changed now.
    Meanwhile(Box<Key>),
}

pub const CONCURRENT_TAKES: &str = "a number from 1 to 10000";

/// Parses how many requests of a key may be processed at once.
pub fn parse_concurrent(text: &str) -> Option<u32> {
    text.parse()
        .ok()
        .filter(|number| (1..=10_000).contains(number))
}

/// A key's terms in words.
pub(super) fn terms(
    permissions: &[Permission],
    expires: Option<i64>,
    concurrent: Option<u32>,
    budget: Option<Budget>,
) -> [(&'static str, String); 4] {
    [
        ("permissions", Permission::join(permissions)),
        ("expires", time_or_never(expires)),
        (
            "concurrent",
            concurrent.map_or("none".into(), |number| number.to_string()),
        ),
        (
            "budget",
            budget.map_or("none".into(), |budget| budget.to_string()),
        ),
    ]
}

fn time_or_never(time: Option<i64>) -> String {
    time.map_or("never".into(), |time| when::format_minute(Some(time)))
}

pub fn read_key(mut row: Row) -> Result<Key> {
    Ok(Key {
        id: row.column()?,
        name: row.column()?,
        hint: row.column()?,
        permissions: row
            .column::<String>()?
            .split(',')
            .filter_map(Permission::parse)
            .collect(),
        created: row.column()?,
        expires: row.column()?,
        last_used: row.column()?,
        revoked: row.column()?,
        concurrent: row.column()?,
        budget: KeyBudget::read(&mut row)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::BudgetPeriod;

    impl Key {
        /// A key for tests that need no store.
        pub fn example() -> Self {
            Self {
                id: "key_example".into(),
                name: "example".into(),
                hint: None,
                permissions: vec![Permission::Completions],
                created: 5,
                expires: None,
                last_used: None,
                revoked: None,
                concurrent: None,
                budget: None,
            }
        }
    }

    #[test]
    fn names() {
        for text in [
            "x",
            "Ünïcode ☂",
            "<script>alert(1)</script>",
            &"é".repeat(64),
        ] {
            assert!(KeyName::parse(text).is_some(), "{text}");
        }
        for text in [
            "",
            " ",
            "a\nb",
            "a\u{0}",
            "\u{202e}abc",
            "a\u{200b}",
            &"x".repeat(65),
        ] {
            assert!(KeyName::parse(text).is_none(), "{text:?}");
        }
        for text in [
            "key_0123456789abcdef",
            " KEY_0123456789ABCDEF",
            "adr_0123456789",
            "was Adr_0123456789ab",
        ] {
            assert!(KeyName::parse(text).is_none(), "{text:?}");
        }
        for text in [
            "key_1",
            "key_0123456789abcdef0",
            "key_of_Ana",
            "adr_ic",
            "ana@example.org",
        ] {
            assert!(KeyName::parse(text).is_some(), "{text}");
        }
    }

    #[test]
    fn what_a_key_may_do_in_words() {
        let now = 20_000 * DAY + 3600;
        let mut key = Key::example();
        assert_eq!(key.in_words(now), "It may run completions.");
        key.permissions = Permission::ALL.into();
        key.expires = Some(20_046 * DAY);
        key.concurrent = Some(4);
        key.budget = Budget::parse("500000/day").map(|budget| KeyBudget { budget, used: 7 });
        assert_eq!(
            key.in_words(now),
            "It may run completions and read the metrics, until 2024-11-18 24:00 UTC (46 days), at most 4 at a time, \
             500,000 tokens per day."
        );
        key.expires = Some(now + 12 * 3600);
        assert!(
            key.in_words(now)
                .contains(", until 2024-10-04 13:00 UTC (12 hours), ")
        );
        key.expires = Some(now);
        assert_eq!(
            key.in_words(now),
            "No request with it is accepted: it expired at 2024-10-04 01:00 UTC."
        );
        key.revoked = Some(now - 60);
        assert_eq!(
            key.in_words(now),
            "No request with it is accepted: it was revoked at 2024-10-04 00:59 UTC."
        );
    }

    #[test]
    fn the_time_left_is_rounded_in_its_unit() {
        for (seconds, text) in [
            (1, "1 minute"),
            (7_140, "119 minutes"),
            (7_199, "2 hours"),
            (DAY + 1, "24 hours"),
            (2 * DAY - 1_801, "47 hours"),
            (2 * DAY - 1, "2 days"),
            (5 * DAY - 9, "5 days"),
        ] {
            assert_eq!(time_left(seconds), text);
        }
    }

    #[test]
    fn states() {
        let mut key = Key::example();
        for (expires, now, state) in [
            (None, 5, KeyState::Active),
            (Some(20 * DAY), 10 * DAY - 1, KeyState::Active),
            (Some(20 * DAY), 10 * DAY, KeyState::Expiring),
            (Some(20 * DAY), 20 * DAY - 1, KeyState::Expiring),
            (Some(20 * DAY), 20 * DAY, KeyState::Expired),
        ] {
            key.expires = expires;
            assert_eq!(key.state(now), state, "{expires:?}");
            assert_eq!(key.is_valid(now), state != KeyState::Expired);
        }
        key.revoked = Some(5);
        assert_eq!(key.state(20 * DAY), KeyState::Revoked);
        for state in KeyState::ALL {
            assert_eq!(KeyState::parse(state.as_str()), Some(state));
        }
    }

    #[test]
    fn one_term_that_allows_more_makes_a_key_wider() {
        let budget = |tokens, per| {
            let budget = Budget { tokens, per };
            Some(KeyBudget { budget, used: 0 })
        };
        let narrow = Key {
            expires: Some(100),
            concurrent: Some(2),
            budget: budget(1_000, BudgetPeriod::Day),
            ..Key::example()
        };
        let changed = |change: fn(&mut Key)| {
            let mut key = narrow.clone();
            change(&mut key);
            key
        };
        let wider_ones = [
            changed(|key| key.permissions.push(Permission::Metrics)),
            changed(|key| key.expires = Some(101)),
            changed(|key| key.expires = None),
            changed(|key| key.concurrent = Some(3)),
            changed(|key| key.concurrent = None),
            changed(|key| key.budget = None),
            Key {
                budget: budget(1_001, BudgetPeriod::Day),
                ..narrow.clone()
            },
        ];
        assert!(!narrow.is_wider_than(&narrow));
        for wider in wider_ones {
            assert!(wider.is_wider_than(&narrow), "{wider:?}");
            assert!(!narrow.is_wider_than(&wider), "{wider:?}");
        }
        let monthly = Key {
            budget: budget(1, BudgetPeriod::Month),
            ..narrow.clone()
        };
        assert!(
            monthly.is_wider_than(&narrow) && narrow.is_wider_than(&monthly),
            "which of two periods allows more depends on the day"
        );
    }

    #[test]
    fn limits() {
        for (text, number) in [
            ("1", Some(1)),
            ("10000", Some(10_000)),
            ("0", None),
            ("10001", None),
            ("-1", None),
        ] {
            assert_eq!(parse_concurrent(text), number, "{text}");
        }
    }
}
