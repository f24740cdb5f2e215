//! Budgets: how many tokens a key may use in a calendar day or month of the database's time zone.

use std::fmt;

use serde::Serialize;

use crate::database::{Problem, Result, Row, Value, values};
use crate::text::words;
use crate::when::{Range, Zone};

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
