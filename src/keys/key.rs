//! An API key as it is stored, and its terms.

use serde::Serialize;

use crate::database::{Result, Row, Value, values};
use crate::id::has_shape;
use crate::keys::Budget;
use crate::secret::contains_secret;
use crate::text::{count, grouped, is_unprintable, words};
use crate::when::{DAY, Date, Zone};

/// A key as it is stored. Its secrets are not in it: reading the database does not allow using the
/// keys.
#[derive(Clone, Debug, Serialize)]
pub struct Key {
    pub id: String,
    pub name: String,
    /// The beginning and the end of the present secret. It distinguishes two keys of one name.
    pub hint: String,
    #[serde(flatten)]
    pub terms: KeyTerms,
    pub created: i64,
    pub last_used: Option<i64>,
    pub revoked: Option<i64>,
    pub overlap: Option<Overlap>,
}

/// What a key allows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KeyTerms {
    pub permissions: Vec<Permission>,
    pub expires: Option<i64>,
    /// The number of its requests that a gateway processes at once; `None`: any number.
    pub concurrent: Option<u32>,
    pub budget: Option<Budget>,
}

/// A secret that was replaced and works until a time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Overlap {
    pub hint: String,
    pub ends: i64,
}

impl KeyTerms {
    /// The values of what can be changed about a key. What was used of its budget is none of them.
    pub(super) fn values(&self, name: &str) -> Vec<Value> {
        values![
            name,
            Permission::join(&self.permissions),
            self.expires,
            self.concurrent,
            self.budget.map(|budget| budget.tokens),
            self.budget.map(|budget| budget.per.as_str())
        ]
        .into()
    }

    /// Each property in words, as the audit has it.
    pub(super) fn properties(&self, zone: &Zone) -> [(&'static str, String); 4] {
        let budget = self.budget.map(|budget| budget.to_string());
        let concurrent = self.concurrent.map(|number| number.to_string());
        [
            ("permissions", Permission::join(&self.permissions)),
            ("expires", time_or_never(self.expires, zone)),
            ("concurrent", concurrent.unwrap_or_else(|| "none".into())),
            ("budget", budget.unwrap_or_else(|| "none".into())),
        ]
    }
}

fn time_or_never(time: Option<i64>, zone: &Zone) -> String {
    time.map_or("never".into(), |_| zone.format_minute(time))
}

impl Key {
    /// Describes the properties that are different in another state of the key.
    pub(super) fn differences(&self, after: &Self, zone: &Zone) -> String {
        let properties = |key: &Self| {
            let name = ("name", format!("{:?}", key.name));
            [name].into_iter().chain(key.terms.properties(zone))
        };
        let pairs = properties(self).zip(properties(after));
        let changed = pairs.filter(|(before, after)| before != after);
        changed
            .map(|((property, old), (_, new))| format!("{property}: {old} → {new}"))
            .collect::<Vec<_>>()
            .join(", ")
    }

    pub fn state(&self, now: i64) -> KeyState {
        match (self.revoked, self.terms.expires) {
            (Some(_), _) => KeyState::Revoked,
            (None, Some(expires)) if expires <= now => KeyState::Expired,
            (None, Some(expires)) if expires <= now + EXPIRING => KeyState::Expiring,
            (None, _) => KeyState::Active,
        }
    }

    /// Says in a sentence what it may do.
    pub fn in_words(&self, now: i64, zone: &Zone) -> String {
        let terms = &self.terms;
        if !self.is_valid(now) {
            let (state, since) = match self.revoked {
                Some(_) => ("was revoked", self.revoked),
                None => ("expired", terms.expires),
            };
            let since = since.map(|since| zone.format_local(since));
            return format!(
                "No request with it is accepted: it {state} at {}.",
                since.unwrap_or_default()
            );
        }
        let permissions: Vec<&str> = terms
            .permissions
            .iter()
            .map(|permission| permission.in_words())
            .collect();
        let mut words = vec![format!("It may {}", permissions.join(" and "))];
        if let Some(expires) = terms.expires {
            words.push(format!(
                "until {} ({})",
                zone.format_end(expires),
                time_left(expires - now)
            ));
        }
        words.extend(
            terms
                .concurrent
                .map(|number| format!("at most {} at a time", grouped(number.into()))),
        );
        words.extend(terms.budget.map(|Budget { tokens, per, .. }| {
            format!("{} per {}", count(tokens, "token"), per.as_str())
        }));
        words.join(", ") + "."
    }

    /// Returns whether requests with it are accepted, if it has the permission.
    pub fn is_valid(&self, now: i64) -> bool {
        matches!(self.state(now), KeyState::Active | KeyState::Expiring)
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

words! {
    pub enum KeyState {
        Active = "active",
        /// Accepted, but not for longer than ten days.
        Expiring = "expiring",
        Expired = "expired",
        Revoked = "revoked",
    }
}

words! {
    pub enum Permission {
        /// Run completions.
        Completions = "completions",
        /// Read the console host's metrics.
        Metrics = "metrics",
    }
}

impl Permission {
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
pub struct KeyName(String);

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

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The result of a change.
#[derive(Debug)]
pub enum KeyChanged {
    /// The key is as it should be, by this change or an earlier one.
    Done,
    NoSuchKey,
    /// The key was changed since it was read, or is in a state that does not allow the change; this
    /// is its present state. Nothing was changed now.
    Meanwhile(Box<Key>),
}

pub const CONCURRENT_TAKES: &str = "a number from 1 to 10000";

/// Parses how many requests of a key may be processed at once.
pub fn parse_concurrent(text: &str) -> Option<u32> {
    text.parse()
        .ok()
        .filter(|number| (1..=10_000).contains(number))
}

/// Reads the columns that `Keys` selects.
pub(super) fn read_key(row: &mut Row, zone: &Zone) -> Result<Key> {
    let (id, name, hint) = (row.column()?, row.column()?, row.column()?);
    let permissions: String = row.column()?;
    let (created, expires) = (row.column()?, row.column()?);
    let (last_row, last_day): (Option<i64>, Option<String>) = (row.column()?, row.column()?);
    let start = || Some(zone.start(last_day?.parse::<Date>().ok()?));
    let (revoked, concurrent) = (row.column()?, row.column()?);
    let budget = Budget::read(row)?;
    let (old_hint, old_ends): (Option<String>, Option<i64>) = (row.column()?, row.column()?);
    Ok(Key {
        id,
        name,
        hint,
        terms: KeyTerms {
            permissions: permissions
                .split(',')
                .filter_map(Permission::parse)
                .collect(),
            expires,
            concurrent,
            budget,
        },
        created,
        last_used: last_row.or_else(start),
        revoked,
        overlap: old_hint
            .zip(old_ends)
            .map(|(hint, ends)| Overlap { hint, ends }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    impl KeyTerms {
        /// The terms of a key that may run completions.
        pub fn example() -> Self {
            Self {
                permissions: vec![Permission::Completions],
                expires: None,
                concurrent: None,
                budget: None,
            }
        }
    }

    impl Key {
        /// A key for tests that need no store.
        pub fn example() -> Self {
            Self {
                id: "key_example".into(),
                name: "example".into(),
                hint: "adr_0123…cdef".into(),
                terms: KeyTerms::example(),
                created: 5,
                last_used: None,
                revoked: None,
                overlap: None,
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
        #[track_caller]
        fn check(key: &Key, now: i64, words: &str) {
            assert_eq!(key.in_words(now, &Zone::utc()), words);
        }
        let mut key = Key::example();
        check(&key, now, "It may run completions.");
        key.terms = KeyTerms {
            permissions: Permission::ALL.into(),
            expires: Some(20_046 * DAY),
            concurrent: Some(4),
            budget: Budget::parse("500000/day"),
        };
        check(
            &key,
            now,
            "It may run completions and read the metrics, until 2024-11-18 24:00 UTC (46 days), at most 4 at a time, \
             500,000 tokens per day.",
        );
        key.terms = KeyTerms {
            expires: Some(now + 12 * 3600),
            ..KeyTerms::example()
        };
        let until = "It may run completions, until 2024-10-04 13:00 UTC (12 hours).";
        check(&key, now, until);
        key.terms.expires = Some(now);
        let expired = "No request with it is accepted: it expired at 2024-10-04 01:00 UTC.";
        check(&key, now, expired);
        key.revoked = Some(now - 60);
        let revoked = "No request with it is accepted: it was revoked at 2024-10-04 00:59 UTC.";
        check(&key, now, revoked);
    }

    #[test]
    fn a_key_as_json() {
        let key = Key {
            terms: KeyTerms {
                budget: Budget::parse("10/day").map(|budget| Budget { used: 3, ..budget }),
                ..KeyTerms::example()
            },
            overlap: Some(Overlap {
                hint: "adr_old…".into(),
                ends: 9,
            }),
            ..Key::example()
        };
        assert_eq!(
            serde_json::to_value(&key).expect("JSON"),
            serde_json::json!({
                "id": "key_example", "name": "example", "hint": "adr_0123…cdef", "permissions": ["completions"],
                "created": 5, "expires": null, "last_used": null, "revoked": null, "concurrent": null,
                "budget": {"tokens": 10, "per": "day", "used": 3}, "overlap": {"hint": "adr_old…", "ends": 9},
            })
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
            key.terms.expires = expires;
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
