//! An API key as it is stored, its terms and its budget.

use std::fmt;

use serde::Serialize;

use crate::database::{Row, Value, values};
use crate::error::{Problem, Result};
use crate::id::has_shape;
use crate::secret::contains_secret;
use crate::text::{count, grouped, is_unprintable, words};
use crate::when::{DAY, Date, Range, Zone};

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

/// The most tokens of a budget: a runtime that makes a million per second would need eleven days
/// for them.
const MOST_TOKENS: i64 = 1_000_000_000_000;

/// The share, in percent, from which on an operator should know about it. The alert rule has the
/// same threshold.
const NEARLY_USED_UP: i64 = 90;

/// Columns of `keys`: the budget, its period and, only if there is a budget, the tokens that all
/// gateways together have used of it. $1 is the day and $2 the first day of the month that they are
/// about. A sum that was tampered with counts as ten times the largest budget: added up, it would
/// overflow, and the look-up of its key fail.
pub(super) const BUDGET_COLUMNS: &str = "budget, budget_per, CASE WHEN budget IS NOT NULL THEN
     (SELECT CAST(coalesce(sum(CASE WHEN total_tokens BETWEEN 0 AND 10000000000000 THEN total_tokens
         ELSE 10000000000000 END), 0) AS BIGINT) FROM usage_days
     WHERE key_id = keys.id AND day BETWEEN CASE budget_per WHEN 'day' THEN $1 ELSE $2 END AND $1) END";

/// The first parameters of a statement with [`BUDGET_COLUMNS`]: for the budget of a request that
/// was created at this time.
pub(super) fn budget_parameters(created: i64, zone: &Zone) -> [Value; 2] {
    let day = zone.date(created);
    values![day.to_string(), day.first_of_month().to_string()]
}

words! {
    pub enum BudgetPeriod {
        Day = "day",
        Month = "month",
    }
}

impl BudgetPeriod {
    /// The calendar day or month of a time.
    pub fn containing(self, time: i64, zone: &Zone) -> Range {
        match self {
            Self::Day => zone.day(time),
            Self::Month => zone.month(time),
        }
    }
}

/// The number of `total_tokens` that a key may use in a period.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Budget {
    pub tokens: i64,
    pub per: BudgetPeriod,
    /// What all gateways together have used of it; 0 for one that is to be set.
    pub used: i64,
}

impl Budget {
    pub const TAKES: &str = "a number of tokens from 1 to 1000000000000, such as 750000, 750k or 2M, a slash, and day or \
                             month";

    /// Parses `1000000/month`, `500k/day` or `2M/month`.
    pub fn parse(text: &str) -> Option<Self> {
        let (number, per) = text.split_once('/')?;
        let (digits, unit) = match number.as_bytes().last()? {
            b'k' => (&number[..number.len() - 1], 1_000),
            b'M' => (&number[..number.len() - 1], 1_000_000),
            _ => (number, 1),
        };
        let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
        let number: i64 = digits.parse().ok().filter(|_| is_number)?;
        let tokens = number.checked_mul(unit)?;
        if !(1..=MOST_TOKENS).contains(&tokens) {
            return None;
        }
        Some(Self {
            tokens,
            per: BudgetPeriod::parse(per)?,
            used: 0,
        })
    }

    /// Reads [`BUDGET_COLUMNS`].
    pub(super) fn read(row: &mut Row) -> Result<Option<Self>> {
        let (tokens, per): (Option<i64>, Option<String>) = (row.column()?, row.column()?);
        let used: Option<i64> = row.column()?;
        let Some(tokens) = tokens else {
            return Ok(None);
        };
        let per = per.as_deref().and_then(BudgetPeriod::parse);
        let per = per.ok_or_else(|| Problem::damaged("the period of a budget is unknown"))?;
        let used = used.unwrap_or(0);
        Ok(Some(Self { tokens, per, used }))
    }

    pub fn is_used_up(&self) -> bool {
        self.used >= self.tokens
    }

    pub fn is_nearly_used_up(&self) -> bool {
        self.percent() >= NEARLY_USED_UP
    }

    /// The used share in percent, rounded down: 100 means that it is used up.
    pub fn percent(&self) -> i64 {
        (i128::from(self.used) * 100 / i128::from(self.tokens.max(1))) as i64
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.tokens, self.per.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit::Actor;
    use crate::keys::{Key, KeyChanged};
    use crate::ledger::append::tests::write;
    use crate::secret::SecretDigest;
    use crate::store::Store;
    use crate::store::tests::Temporary;
    use crate::when::DAY;
    use crate::when::tests::zone;

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

    #[test]
    fn what_is_a_budget() {
        for (text, budget) in [
            ("1/day", Some((1, BudgetPeriod::Day))),
            ("1000000/month", Some((1_000_000, BudgetPeriod::Month))),
            ("1000000000000/day", Some((MOST_TOKENS, BudgetPeriod::Day))),
            ("1000000000001/day", None),
            ("750k/day", Some((750_000, BudgetPeriod::Day))),
            ("2M/month", Some((2_000_000, BudgetPeriod::Month))),
            ("1000000M/day", Some((MOST_TOKENS, BudgetPeriod::Day))),
            ("1000001M/day", None),
            ("9999999999999999M/day", None),
            ("k/day", None),
            ("2m/day", None),
            ("2kM/day", None),
            ("0/day", None),
            ("-1/day", None),
            ("+1/day", None),
            ("1,000/day", None),
            ("/day", None),
            ("1", None),
            ("1/year", None),
            ("1/day/", None),
            ("99999999999999999999/day", None),
        ] {
            let used = 0;
            let budget = budget.map(|(tokens, per)| Budget { tokens, per, used });
            assert_eq!(Budget::parse(text), budget, "{text}");
            if let Some(budget) = budget {
                assert_eq!(Budget::parse(&budget.to_string()), Some(budget));
            }
        }
    }

    #[test]
    fn a_share_is_rounded_down() {
        for (used, tokens, percent) in [
            (0, 3, 0),
            (2, 3, 66),
            (899, 1000, 89),
            (999, 1000, 99),
            (7, 3, 233),
        ] {
            let per = BudgetPeriod::Day;
            let budget = Budget { tokens, per, used };
            assert_eq!(budget.percent(), percent);
            assert_eq!(
                (budget.is_used_up(), budget.is_nearly_used_up()),
                (percent >= 100, percent >= 90)
            );
        }
    }

    fn set(store: &Store, budget: &str) {
        let budget = Budget::parse(budget);
        let change = move |key: &mut Key| key.terms.budget = budget;
        let done = store
            .keys
            .change("key_1", change, &Actor::command("ana".into()));
        assert!(matches!(done, Ok(KeyChanged::Done)));
    }

    /// 2024-02-29 and the days around it.
    const LEAP_DAY: i64 = 19_782 * DAY;

    fn found(store: &Store, created: i64) -> Key {
        let found = store.keys.find(&SecretDigest::of("key_1"), created);
        found.expect("a look-up").expect("the key").0
    }

    /// Returns whether the look-up of a request that was created at this time accepts the key.
    fn is_accepted(store: &Store, created: i64) -> bool {
        !found(store, created)
            .terms
            .budget
            .is_some_and(|budget| budget.is_used_up())
    }

    #[test]
    fn a_used_budget_is_refused_until_the_day_or_the_month_ends() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        // Of another key, of the day before and of the month before: they do not count.
        write(store, "other", "key_2", LEAP_DAY + 5, 200, Some(1000));
        write(store, "before", "key_1", LEAP_DAY - DAY, 200, Some(600));
        write(
            store,
            "january",
            "key_1",
            LEAP_DAY - 29 * DAY,
            200,
            Some(1000),
        );
        set(store, "1000/day");
        write(store, "first", "key_1", LEAP_DAY, 200, Some(999));
        assert!(is_accepted(store, LEAP_DAY + 9), "one token is left");
        write(store, "last", "key_1", LEAP_DAY + 9, 200, Some(500));
        let used = |created| {
            let budget = found(store, created).terms.budget;
            budget.expect("a budget").used
        };
        assert_eq!(
            (used(LEAP_DAY + 9), used(LEAP_DAY - 1), used(LEAP_DAY + DAY)),
            (1499, 600, 0)
        );
        assert!(!is_accepted(store, LEAP_DAY + 10));
        assert!(!is_accepted(store, LEAP_DAY + DAY - 1));
        assert!(is_accepted(store, LEAP_DAY + DAY), "it is renewed");
        set(store, "2100/month");
        assert_eq!(used(LEAP_DAY + 9), 2099);
        assert!(is_accepted(store, LEAP_DAY + 11));
        set(store, "2099/month");
        assert!(!is_accepted(store, LEAP_DAY + 11));
        assert!(!is_accepted(store, LEAP_DAY + DAY - 1));
        assert!(is_accepted(store, LEAP_DAY + DAY + 1), "it is renewed");
        set(store, "none");
        assert!(is_accepted(store, LEAP_DAY + 11), "it was removed");
        assert!(
            store
                .keys
                .get("key_1")
                .expect("a look-up")
                .expect("the key")
                .terms
                .budget
                .is_none()
        );
    }

    /// An office in California got its budgets back at four in the afternoon.
    #[test]
    fn a_budget_is_of_the_days_of_the_place() {
        let mut temporary = Temporary::new();
        let place = zone("America/Los_Angeles");
        temporary.set_zone(place.clone());
        let store = &temporary.store;
        set(store, "10/day");
        let midnight = LEAP_DAY + 8 * 3600;
        write(store, "x", "key_1", midnight - 1, 200, Some(10));
        assert!(!is_accepted(store, midnight - 1));
        assert!(is_accepted(store, midnight));
        write(store, "y", "key_1", midnight, 200, Some(10));
        assert!(!is_accepted(store, midnight + DAY - 1));
        assert!(is_accepted(store, midnight + DAY));
        assert_eq!(
            BudgetPeriod::Day.containing(midnight - 1, &place).until,
            midnight
        );
        set(store, "20/month");
        assert!(!is_accepted(store, midnight + DAY - 1));
        assert!(is_accepted(store, midnight + DAY), "it is March");
    }

    /// The look-up failed, so that every request of the key got 503.
    #[test]
    fn sums_that_were_tampered_with_use_a_budget_up() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        set(store, "1000000000000/month");
        for status in [200, 502] {
            write(
                store,
                &status.to_string(),
                "key_1",
                LEAP_DAY,
                status,
                Some(1),
            );
        }
        assert!(is_accepted(store, LEAP_DAY));
        for number in [i64::MAX, i64::MIN] {
            store.tamper(&format!("UPDATE usage_days SET total_tokens = {number}"));
            assert!(!is_accepted(store, LEAP_DAY), "{number}");
        }
    }

    #[test]
    fn completions_without_a_total_and_errors_use_nothing() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        set(store, "10/day");
        write(store, "unmeasured", "key_1", 5, 200, None);
        write(store, "failed", "key_1", 6, 502, None);
        assert!(is_accepted(store, 7));
    }
}
