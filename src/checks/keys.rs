//! Keys that an operator should know about: expired or expiring ones, and budgets that do not count
//! everything.

use std::collections::HashMap;

use super::named;
use crate::database::Problem;
use crate::health::Finding;
use crate::keys::{BudgetPeriod, Key, KeyState};
use crate::ledger::{Filter, Span};
use crate::store::Store;
use crate::text::count;
use crate::when;

pub fn check(store: &Store) -> Result<Vec<Finding>, Problem> {
    let now = when::now();
    let keys = store.keys.list()?;
    let date = |key: &&Key| {
        format!(
            "{} ({:?}, {})",
            key.id,
            key.name,
            store.zone.format_minute(key.terms.expires)
        )
    };
    let mut findings = Vec::new();
    for (state, verb, advice) in [
        (
            KeyState::Expired,
            "expired",
            "Revoke what is not needed: adriaticum keys revoke ID; or give it another date: adriaticum keys set ID --expires WHEN",
        ),
        (
            KeyState::Expiring,
            "will expire within ten days",
            "To give one another date: adriaticum keys set ID --expires WHEN",
        ),
    ] {
        let keys: Vec<&Key> = keys.iter().filter(|key| key.state(now) == state).collect();
        if !keys.is_empty() {
            let message = format!(
                "{} {verb}: {}. {advice}",
                count(keys.len() as i64, "key"),
                named(&keys, date)
            );
            findings.push(Finding::warn("keys", message));
        }
    }
    let unmeasured = unmeasured(store, &keys, now)?;
    if !unmeasured.is_empty() {
        let names = named(&unmeasured, |(key, number)| {
            let per = key.terms.budget.map_or("", |budget| budget.per.as_str());
            format!(
                "{} ({:?}, {} this {per})",
                key.id,
                key.name,
                count(*number, "completion")
            )
        });
        let message = format!(
            "completions without total_tokens do not count: {names}. Configure the runtime to report usage"
        );
        findings.push(Finding::warn("budgets", message));
    }
    Ok(findings)
}

/// Returns the keys with a budget and, in its period, completions without a total of the runtime,
/// and how many.
fn unmeasured<'a>(
    store: &Store,
    keys: &'a [Key],
    now: i64,
) -> Result<Vec<(&'a Key, i64)>, Problem> {
    let since = |key: &'a Key| {
        Some((
            key.id.as_str(),
            key.terms.budget?.per.containing(now, &store.zone).since,
        ))
    };
    let periods: HashMap<&str, i64> = keys
        .iter()
        .filter(|key| key.is_valid(now))
        .filter_map(since)
        .collect();
    if periods.is_empty() {
        return Ok(Vec::new());
    }
    let mut numbers: HashMap<String, i64> = HashMap::new();
    let month = BudgetPeriod::Month.containing(now, &store.zone);
    store.ledger.figures(Span::Day, month, Filter::ALL, |row| {
        if row.sums.unmeasured > 0
            && periods
                .get(row.key_id.as_str())
                .is_some_and(|since| row.start >= *since)
        {
            *numbers.entry(row.key_id).or_default() += row.sums.unmeasured;
        }
    })?;
    Ok(keys
        .iter()
        .filter_map(|key| Some((key, *numbers.get(&key.id)?)))
        .collect())
}
