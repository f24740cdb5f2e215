//! Compares the sums with the rows, day by day and in both directions: the hours with the rows, and
//! the days with their hours.
//!
//! Retention removes rows and leaves their sums. Such sums are larger than those of the rows that
//! are left, and all of them together by as many requests as were removed: by the number at which
//! the chain of the gateway now begins.

use std::collections::{BTreeMap, BTreeSet};

use super::fault::Fault;
use super::rollup::{FIGURES, KEY_COLUMNS, Span, columns, sums_of_rows};
use crate::database::{Result, Row, Session, values};
use crate::id::RequestId;
use crate::progress::Progress;
use crate::when::{DAY, HOUR};

/// Sums whose rows were removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnprovenSums {
    pub count: u64,
    /// All of their spans end by this time.
    pub before: i64,
}

pub(super) struct SumsCheck {
    /// The number of sums that equal those of their rows.
    pub proven: u64,
    pub unproven: Option<UnprovenSums>,
    /// The first thing that is wrong.
    pub fault: Option<Fault>,
}

pub(super) fn compare(session: &Session, progress: &Progress) -> Result<SumsCheck> {
    let chains = "SELECT name, anchor_seq, head_seq FROM gateways";
    let chains = session.rows(chains, &[], |mut row| {
        let (name, removed, rows) = (row.column()?, row.column()?, row.column()?);
        let missing = 0;
        Ok((
            name,
            Chain {
                removed,
                rows,
                missing,
            },
        ))
    })?;
    let mut missing = MissingRows {
        chains: chains.into_iter().collect(),
        unproven: None,
    };
    let mut fault = find_other_span(session)?;
    if fault.is_none() {
        fault = missing.compare_days(session, progress)?;
    }
    let MissingRows { chains, unproven } = missing;
    let wrong_total = |(gateway, chain): (String, Chain)| {
        let Chain {
            removed,
            rows,
            missing,
        } = chain;
        (missing != removed).then_some(Fault::Total {
            gateway,
            requests: rows - removed + missing,
            rows,
        })
    };
    let sums: i64 = session.value("SELECT count(*) FROM usage_rollup", &[])?;
    Ok(SumsCheck {
        proven: (sums as u64).saturating_sub(unproven.map_or(0, |unproven| unproven.count)),
        unproven,
        fault: fault.or_else(|| chains.into_iter().find_map(wrong_total)),
    })
}

/// Sums of other spans than hours and days belong to no rows.
fn find_other_span(session: &Session) -> Result<Option<Fault>> {
    let other =
        "SELECT span, start, key_id FROM usage_rollup WHERE span NOT IN (3600, 86400) LIMIT 1";
    session.first(other, &[], |mut row| {
        Ok(Fault::Sums {
            span: row.column()?,
            start: row.column()?,
            key_id: row.column()?,
            difference: "there are no such rows".into(),
        })
    })
}

/// The requests that sums count and no row has any more.
struct MissingRows {
    /// By the name of the gateway.
    chains: BTreeMap<String, Chain>,
    unproven: Option<UnprovenSums>,
}

struct Chain {
    /// The number of rows that the chain has had, with those that retention has removed.
    rows: i64,
    removed: i64,
    /// The requests that the sums have more than the rows.
    missing: i64,
}

impl MissingRows {
    /// Compares every day that has rows or sums.
    fn compare_days(&mut self, session: &Session, progress: &Progress) -> Result<Option<Fault>> {
        let first_row = "SELECT min(request_id) FROM usage WHERE request_id >= $1";
        let first_sum = "SELECT min(start) FROM usage_rollup WHERE span = $1 AND start >= $2";
        let [hours, days] = [hours_and_rows(), days_and_hours()];
        let (mut from, mut done) = (i64::MIN, 0);
        let all_days = "SELECT count(DISTINCT start) FROM usage_rollup WHERE span = 86400";
        let all_days: i64 = session.value(all_days, &[])?;
        loop {
            progress.update("verifying the sums", done, all_days as u64, "days");
            let row: Option<String> = session.value(first_row, &values![RequestId::from(from)])?;
            let mut next = row.and_then(|id| RequestId::time_of(&id));
            for span in [Span::Hour, Span::Day] {
                let start: Option<i64> =
                    session.value(first_sum, &values![span.seconds(), from])?;
                next = next.into_iter().chain(start).min();
            }
            let Some(day) = next.map(|time| Span::Day.start(time)) else {
                return Ok(None);
            };
            let until = day.saturating_add(DAY);
            let ids = [day, until].map(RequestId::from);
            let in_hours = values![day, until, &ids[0], &ids[1]];
            let mut differences = session.rows(&hours, &in_hours, Difference::read)?;
            for hour in &differences {
                self.add_unproven(hour.start, hour.span);
            }
            differences.extend(session.rows(&days, &values![day, until], Difference::read)?);
            // The day of an hour that can't be proven can't be proven either.
            let mut day_keys = BTreeSet::new();
            for difference in differences {
                if day_keys.insert(difference.rest.clone()) {
                    self.add_unproven(day, DAY);
                }
                if let Some(fault) = self.add(difference) {
                    return Ok(Some(fault));
                }
            }
            (from, done) = (until, done + 1);
        }
    }

    /// Adds the requests that sums have more than the rows, of a gateway that has lost rows to
    /// retention. Any other difference is a fault.
    fn add(&mut self, difference: Difference) -> Option<Fault> {
        let Difference { kept, counted, .. } = difference;
        let missing = kept[0].saturating_sub(counted[0]);
        let has_less = missing <= 0
            || kept
                .iter()
                .zip(counted)
                .any(|(kept, counted)| *kept < counted);
        match self.chains.get_mut(&difference.gateway) {
            Some(chain) if chain.removed > 0 && !has_less => {
                chain.missing = chain.missing.saturating_add(missing);
                None
            }
            _ => Some(difference.into_fault()),
        }
    }

    fn add_unproven(&mut self, start: i64, span: i64) {
        let unproven = self.unproven.get_or_insert(UnprovenSums {
            count: 0,
            before: i64::MIN,
        });
        unproven.count += 1;
        unproven.before = unproven.before.max(start.saturating_add(span));
    }
}

/// A query for the hours of a day that differ from their rows. $1 and $2 are the day, $3 and $4 its
/// ids.
fn hours_and_rows() -> String {
    let counted = sums_of_rows(HOUR, "request_id >= $3 AND request_id < $4");
    differences(HOUR, &counted)
}

/// No hour has a larger figure, unless it was changed. Even if every second of a day had it, their
/// sum would not overflow.
const LARGEST_FIGURE: i64 = i64::MAX / DAY;

/// A query for the sums of a day that differ from those of its hours. $1 and $2 are the day. A
/// figure that is too large counts as none: the database would refuse to add it.
fn days_and_hours() -> String {
    let sums = FIGURES.map(|figure| {
        format!(
            "CAST(sum(CASE WHEN {figure} BETWEEN -{LARGEST_FIGURE} AND {LARGEST_FIGURE} THEN {figure} END) AS BIGINT)"
        )
    });
    let counted = format!(
        "SELECT 86400, start / 86400 * 86400, key_id, key_name, status, error_code, gateway, {} FROM usage_rollup
         WHERE span = 3600 AND start >= $1 AND start < $2 GROUP BY 1, 2, 3, 4, 5, 6, 7",
        sums.join(", ")
    );
    differences(DAY, &counted)
}

/// A query for the keys of a span at which the sums that are kept differ from those that a query
/// counts. $1 and $2 are the time.
fn differences(span: i64, counted: &str) -> String {
    let columns = columns();
    // Each side has a key at most once, so the greatest figure of a side is its only one.
    let figure = |figure: &str, is_kept: u8| {
        format!("coalesce(max({figure}) FILTER (WHERE is_kept = {is_kept}), 0)")
    };
    let side = |is_kept| FIGURES.map(|name| figure(name, is_kept)).join(", ");
    let differs = FIGURES
        .map(|name| format!("{} <> {}", figure(name, 1), figure(name, 0)))
        .join(" OR ");
    format!(
        "WITH kept AS (SELECT {columns} FROM usage_rollup WHERE span = {span} AND start >= $1 AND start < $2),
         counted ({columns}) AS ({counted}),
         sides AS (SELECT 1 AS is_kept, kept.* FROM kept UNION ALL SELECT 0, counted.* FROM counted)
         SELECT {KEY_COLUMNS}, CAST(sum(is_kept) AS BIGINT), count(*), {}, {} FROM sides
         GROUP BY {KEY_COLUMNS} HAVING count(*) <> 2 OR {differs} ORDER BY start",
        side(1),
        side(0),
    )
}

/// A key of the rollup at which sums differ from what was counted.
struct Difference {
    span: i64,
    start: i64,
    gateway: String,
    /// The rest of the key.
    rest: (String, String, i64, String, String),
    is_kept: bool,
    is_counted: bool,
    kept: [i64; FIGURES.len()],
    counted: [i64; FIGURES.len()],
}

impl Difference {
    fn read(mut row: Row) -> Result<Self> {
        let (span, start) = (row.column()?, row.column()?);
        let (key_id, key_name, status) = (row.column()?, row.column()?, row.column()?);
        let (error_code, gateway): (String, String) = (row.column()?, row.column()?);
        let (kept_sides, sides): (i64, i64) = (row.column()?, row.column()?);
        let mut figures = || -> Result<[i64; 5]> {
            Ok([
                row.column()?,
                row.column()?,
                row.column()?,
                row.column()?,
                row.column()?,
            ])
        };
        Ok(Self {
            span,
            start,
            rest: (key_id, key_name, status, error_code, gateway.clone()),
            gateway,
            is_kept: kept_sides > 0,
            is_counted: sides > kept_sides,
            kept: figures()?,
            counted: figures()?,
        })
    }

    fn into_fault(self) -> Fault {
        let source = if self.span == DAY { "hours" } else { "rows" };
        let mut figures = FIGURES
            .into_iter()
            .zip(self.kept.into_iter().zip(self.counted));
        let difference = match figures.find(|(_, (kept, counted))| kept != counted) {
            Some((column, (kept, counted))) if self.is_kept && self.is_counted => {
                format!("{column} is {kept}, and {counted} by the {source}")
            }
            _ if self.is_kept => format!("there are no such {source}"),
            _ => "they are missing".into(),
        };
        Fault::Sums {
            span: self.span,
            start: self.start,
            key_id: self.rest.0,
            difference,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::database::DatabaseError;
    use crate::ledger::LedgerRow;
    use crate::ledger::append::tests::{row, write};
    use crate::store::Store;
    use crate::store::tests::Temporary;
    use crate::when;

    /// Returns the fault that `verify` finds after a statement, which is then undone.
    #[track_caller]
    fn fault_after(store: &Store, statement: &str) -> Option<Fault> {
        let found = std::cell::Cell::new(None);
        let undone = store.database.transaction(|session| {
            assert!(session.execute(statement, &[])? > 0, "{statement}");
            found.set(crate::ledger::verify(session, &Progress::hidden())?.fault);
            Err::<(), _>(DatabaseError::Panicked)
        });
        assert!(
            matches!(undone, Err(DatabaseError::Panicked)),
            "{statement}: {undone:?}"
        );
        found.take()
    }

    /// Rows of some minutes, two keys and three outcomes.
    fn filled(now: i64) -> Temporary {
        let temporary = Temporary::new();
        let store = &temporary.store;
        for (number, key) in ["key_1", "key_2"].into_iter().cycle().take(20).enumerate() {
            let (number, end) = (number as i64, number.to_string());
            let total = Some(number).filter(|number| number % 3 > 0);
            write(
                store,
                &end,
                key,
                now - 300 + number * 7,
                if number % 5 == 4 { 502 } else { 200 },
                total,
            );
        }
        let (status, error_code) = (None, Some("abandoned".into()));
        store
            .ledger
            .append(LedgerRow {
                status,
                error_code,
                ..row("x", "key_1", now)
            })
            .expect("a row");
        temporary
    }

    #[test]
    fn a_change_of_any_number_in_the_sums_is_found() {
        let midnight = 20_000 * DAY;
        // The rows are of one hour, of two hours, and of two days.
        for now in [
            midnight + 13 * HOUR + 1000,
            midnight + 13 * HOUR + 240,
            midnight + 240,
        ] {
            check_every_change(&filled(now));
        }
    }

    fn check_every_change(temporary: &Temporary) {
        let store = &temporary.store;
        let found = store.ledger.verify().expect("a walk");
        let sums = store.value::<i64>("SELECT count(*) FROM usage_rollup");
        assert_eq!(
            (found.rows, found.sums as i64, found.unproven, found.fault),
            (21, sums, None, None)
        );
        for span in [3600, 86_400] {
            let these = format!("WHERE span = {span} AND key_id = 'key_1' AND status = 200");
            for change in [
                "span = span + 1",
                "start = start - 1",
                "start = start - 1000 * span",
                "key_id = 'key_9'",
                "key_name = 'x'",
                "status = 201",
                "status = 0",
                "error_code = 'x'",
                "gateway = 'x'",
                "requests = requests + 1",
                "requests = 0",
                "prompt_tokens = 1",
                "completion_tokens = completion_tokens - 1",
                "total_tokens = total_tokens + 1000",
                "total_tokens = -total_tokens - 1",
                "total_tokens = 9223372036854775807",
                "unmeasured = unmeasured + 1",
            ] {
                let statement = format!("UPDATE usage_rollup SET {change} {these}");
                let fault = fault_after(store, &statement);
                let Some(Fault::Sums {
                    span: found,
                    key_id,
                    ..
                }) = &fault
                else {
                    panic!("{statement}: {fault:?}")
                };
                // If a sum is at another place, either place has the fault.
                assert!((found - span).abs() <= 1 && ["key_1", "key_9"].contains(&key_id.as_str()));
            }
            let inserted = |figures: &str| {
                format!(
                    "INSERT INTO usage_rollup SELECT span, start, 'key_9', '', 200, '', '', {figures}
                     FROM usage_rollup {these}"
                )
            };
            for statement in [
                format!("DELETE FROM usage_rollup {these}"),
                format!("DELETE FROM usage_rollup WHERE span = {span}"),
                inserted("1, 0, 0, 0, 0"),
                inserted("0, 0, 0, 0, 0"),
            ] {
                let fault = fault_after(store, &statement);
                let is_found =
                    matches!(&fault, Some(Fault::Sums { span: found, .. }) if *found == span);
                assert!(is_found, "{statement}: {fault:?}");
            }
        }
        // Two changes that cancel each other out in a sum over all.
        let swap = "UPDATE usage_rollup SET total_tokens = total_tokens + CASE key_id WHEN 'key_1' THEN 1 ELSE -1 END
            WHERE span = 86400 AND status = 200";
        assert!(fault_after(store, swap).is_some());
        let both = "UPDATE usage_rollup SET requests = requests + 1 WHERE key_id = 'key_1' AND status = 200";
        assert!(
            fault_after(store, both).is_some(),
            "the days and their hours"
        );
        assert_eq!(
            store.ledger.verify().expect("a walk").fault,
            None,
            "all of it was undone"
        );
    }

    #[test]
    fn a_fault_names_the_span_the_key_and_the_figure() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let hour = Span::Hour.start(when::now());
        (0..3).for_each(|end| write(store, &end.to_string(), "key_1", hour, 200, Some(7)));
        let message = |change: &str| {
            let fault = fault_after(store, &format!("{change} WHERE span = 3600"))
                .expect("a fault")
                .to_string();
            let of = format!(
                "the sums differ: hour {}, key key_1: ",
                when::iso(hour).expect("a time")
            );
            fault
                .strip_prefix(&of)
                .unwrap_or_else(|| panic!("{fault}"))
                .to_owned()
        };
        let set = "UPDATE usage_rollup SET";
        assert_eq!(
            message(&format!("{set} requests = 1003")),
            "requests is 1003, and 3 by the rows"
        );
        assert_eq!(message("DELETE FROM usage_rollup"), "they are missing");
        let elsewhere = fault_after(store, &format!("{set} key_id = 'key_0' WHERE span = 3600"));
        assert!(
            elsewhere
                .expect("a fault")
                .to_string()
                .ends_with("key key_0: there are no such rows")
        );
        let day = fault_after(
            store,
            &format!("{set} total_tokens = 20 WHERE span = 86400"),
        );
        assert!(
            day.expect("a fault")
                .to_string()
                .ends_with("total_tokens is 20, and 21 by the hours")
        );
    }

    #[test]
    fn what_retention_has_removed_is_not_proven_and_adds_up() {
        let mut temporary = Temporary::new();
        let mut other = temporary.open_again();
        let day = Span::Day.start(when::now()) - 10 * DAY;
        for (store, name) in [(&mut temporary.store, "a"), (&mut other, "b")] {
            store.ledger.join(name, "").expect("a start");
            for number in 0..4 {
                write(
                    store,
                    &format!("{name}{number}"),
                    "key_1",
                    day + number * 40_000,
                    200,
                    Some(1),
                );
            }
        }
        let store = &temporary.store;
        let verify = || store.ledger.verify().expect("a walk");
        assert_eq!(
            (verify().sums, verify().unproven, verify().fault),
            (12, None, None),
            "days and hours"
        );
        // Each step removes one row, of another hour of the first day.
        for count in [2, 3, 5, 6] {
            assert_eq!(
                store
                    .ledger
                    .remove_before(day + 50_000, day + 5 * DAY, 1)
                    .expect("a step"),
                1
            );
            let found = verify();
            let before = day + DAY;
            assert_eq!(
                (found.unproven, found.fault),
                (Some(UnprovenSums { count, before }), None)
            );
            assert_eq!(found.sums, 12 - count);
        }
        assert_eq!(
            store
                .ledger
                .remove_before(day + 50_000, day + 5 * DAY, 1)
                .expect("a step"),
            0
        );
        let set = "UPDATE usage_rollup SET";
        let more = Some(Fault::Total {
            gateway: "a".into(),
            requests: 9,
            rows: 4,
        });
        let of_a = format!("gateway = 'a' AND start = {day}");
        assert_eq!(
            fault_after(
                store,
                &format!("{set} requests = requests + 5 WHERE {of_a}")
            ),
            more
        );
        assert_eq!(
            fault_after(
                store,
                &format!("DELETE FROM usage_rollup WHERE {of_a} AND span = 3600")
            ),
            None
        );
        let fewer = format!(
            "{set} requests = requests - 1 WHERE gateway = 'a' AND span = 86400 AND start = {day}"
        );
        assert!(
            matches!(fault_after(store, &fewer), Some(Fault::Sums { .. })),
            "fewer than its hours"
        );
        for change in [
            "total_tokens = total_tokens + 1",
            "requests = requests - 1",
            "unmeasured = 1",
        ] {
            let later = format!("{set} {change} WHERE start > {day} + 86400 AND gateway = 'a'");
            assert!(
                matches!(fault_after(store, &later), Some(Fault::Sums { .. })),
                "{change}"
            );
        }
        store.tamper("UPDATE gateways SET anchor_seq = 0 WHERE name = 'a'");
        assert!(verify().fault.is_some(), "retention has removed none");
    }

    #[test]
    fn a_day_without_hours_and_rows_is_one_that_an_earlier_version_has_thinned_out() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        (1..=3).for_each(|day| write(store, "x", "key_1", day * DAY, 200, Some(1)));
        while store
            .ledger
            .remove_before(3 * DAY, 4 * DAY, 100)
            .expect("a step")
            > 0
        {}
        store.tamper("DELETE FROM usage_rollup WHERE span = 3600 AND start = 86400");
        let found = store.ledger.verify().expect("a walk");
        assert_eq!(
            (found.unproven.map(|unproven| unproven.count), found.fault),
            (Some(3), None)
        );
    }
}
