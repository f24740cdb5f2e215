//! Budgets: how many tokens a key may use in a calendar day or month, UTC.

use std::fmt;

use serde::Serialize;

use crate::database::{DatabaseError, Result, Row, SqlValue, values};
use crate::when::{self, DAY, Range};

/// The most tokens of a budget: a runtime that makes a million per second would need eleven days
/// for them.
const MOST_TOKENS: i64 = 1_000_000_000_000;

/// The share, in percent, from which on an operator should know about it. The alert rule has the
/// same threshold.
const NEARLY_USED_UP: i64 = 90;

/// Columns of `keys`: the budget, its period and, only if there is a budget, the tokens that all
/// gateways together have used of it. $1 is the day and $2 the beginning of the month that they are
/// about. The hint is that of the engine.
pub(super) fn budget_columns(days_hint: &str) -> String {
    format!(
        "budget, budget_per, CASE WHEN budget IS NOT NULL THEN
         (SELECT CAST(coalesce(sum(total_tokens), 0) AS BIGINT) FROM usage_rollup {days_hint} WHERE span = 86400
         AND key_id = keys.id AND start BETWEEN CASE budget_per WHEN 'day' THEN $1 ELSE $2 END AND $1) END"
    )
}

/// The first parameters of a statement with [`budget_columns`]: for the budget of a request that
/// was created at this time.
pub(super) fn budget_parameters(created: i64) -> [SqlValue; 2] {
    values![
        BudgetPeriod::Day.containing(created).since,
        BudgetPeriod::Month.containing(created).since
    ]
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum BudgetPeriod {
    Day,
    Month,
}

impl BudgetPeriod {
    pub const ALL: [Self; 2] = [Self::Day, Self::Month];

    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|period| period.as_str() == word)
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Day => "day",
            Self::Month => "month",
        }
    }

    /// The calendar day or month of a time.
    pub fn containing(self, time: i64) -> Range {
        let day = time.div_euclid(DAY).saturating_mul(DAY);
        match self {
            Self::Day => Range {
                since: day,
                until: day.saturating_add(DAY),
            },
            Self::Month => when::month(time).unwrap_or(Range::ALL),
        }
    }
}

/// The number of `total_tokens` that a key may use in a period.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Budget {
    pub tokens: i64,
    pub per: BudgetPeriod,
}

impl Budget {
    pub const TAKES: &str = "a number of tokens from 1 to 1000000000000, a slash, and day or month";

    /// Parses `1000000/month`.
    pub fn parse(text: &str) -> Option<Self> {
        let (tokens, per) = text.split_once('/')?;
        let is_number = tokens.bytes().all(|byte| byte.is_ascii_digit());
        let tokens = tokens
            .parse()
            .ok()
            .filter(|tokens| is_number && (1..=MOST_TOKENS).contains(tokens))?;
        Some(Self {
            tokens,
            per: BudgetPeriod::parse(per)?,
        })
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.tokens, self.per.as_str())
    }
}

/// A key's budget, and what was used of it in the period.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct KeyBudget {
    #[serde(flatten)]
    pub budget: Budget,
    pub used: i64,
}

impl KeyBudget {
    /// Reads [`budget_columns`].
    pub(super) fn read(row: &mut Row) -> Result<Option<Self>> {
        let (tokens, per): (Option<i64>, Option<String>) = (row.column()?, row.column()?);
        let used: Option<i64> = row.column()?;
        let Some(tokens) = tokens else {
            return Ok(None);
        };
        let per = per.as_deref().and_then(BudgetPeriod::parse);
        let per =
            per.ok_or_else(|| DatabaseError::Damaged("the period of a budget is unknown".into()))?;
        Ok(Some(Self {
            budget: Budget { tokens, per },
            used: used.unwrap_or(0),
        }))
    }

    pub fn is_used_up(&self) -> bool {
        self.used >= self.budget.tokens
    }

    pub fn is_nearly_used_up(&self) -> bool {
        self.percent() >= NEARLY_USED_UP
    }

    /// The used share in percent, rounded down: 100 means that it is used up.
    pub fn percent(&self) -> i64 {
        (i128::from(self.used) * 100 / i128::from(self.budget.tokens.max(1))) as i64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit::Actor;
    use crate::keys::{KeyChange, KeyChanged};
    use crate::ledger::append::tests::write;
    use crate::secret::SecretDigest;
    use crate::store::Store;
    use crate::store::tests::Temporary;

    #[test]
    fn what_is_a_budget() {
        for (text, budget) in [
            ("1/day", Some((1, BudgetPeriod::Day))),
            ("1000000/month", Some((1_000_000, BudgetPeriod::Month))),
            ("1000000000000/day", Some((MOST_TOKENS, BudgetPeriod::Day))),
            ("1000000000001/day", None),
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
            let budget = budget.map(|(tokens, per)| Budget { tokens, per });
            assert_eq!(Budget::parse(text), budget, "{text}");
            if let Some(budget) = budget {
                assert_eq!(budget.to_string(), text);
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
            let budget = KeyBudget {
                budget: Budget {
                    tokens,
                    per: BudgetPeriod::Day,
                },
                used,
            };
            assert_eq!(budget.percent(), percent);
            assert_eq!(
                (budget.is_used_up(), budget.is_nearly_used_up()),
                (percent >= 100, percent >= 90)
            );
        }
    }

    fn set(store: &Store, budget: &str) {
        let change = [KeyChange::Budget(Budget::parse(budget))];
        let done = store
            .keys
            .change("key_1", None, &change, &Actor::command("ana".into()));
        assert!(matches!(done, Ok(KeyChanged::Done)));
    }

    /// 2024-02-29 and the days around it.
    const LEAP_DAY: i64 = 19_782 * DAY;

    /// Returns whether the look-up of a request that was created at this time accepts the key.
    fn is_accepted(store: &Store, created: i64) -> bool {
        let key = store
            .keys
            .find(&SecretDigest::of("key_1"), created)
            .expect("a look-up")
            .expect("the key");
        !key.budget.is_some_and(|budget| budget.is_used_up())
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
            let key = store
                .keys
                .find(&SecretDigest::of("key_1"), created)
                .expect("a look-up")
                .expect("the key");
            key.budget.expect("a budget").used
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
                .budget
                .is_none()
        );
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
