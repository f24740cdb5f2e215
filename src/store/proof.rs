//! Proves the sums: each one of the rollup has to be that of its rows.
//!
//! Neither side is kept in memory: a year of hours and of many keys would not fit. Instead every figure has a random weight, by
//! its place and its column. Rows add their figures times the weights to a balance of each span, and the sums take theirs
//! away. A span whose balance is not zero has a sum that differs; only its rows are then summed again, to name it.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, RandomState};
use std::mem;

use super::Result;
use super::chain::Fault;
use super::engine::{SqlSession, values};
use super::ledger_row::{COLUMNS, LedgerRow, read_row};
use super::rollup::{Batch, RollupKey, SUMS_COLUMNS, Span, SpanSums};

/// The number of rows that are summed before they are added to the balances.
const ROWS_AT_ONCE: usize = 1000;

/// The figures from `requests` to `unmeasured`, by their columns.
const FIGURES: [&str; 5] = ["requests", "prompt_tokens", "completion_tokens", "total_tokens", "unmeasured"];

/// Sums whose rows were removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnprovenSums {
    pub count: u64,
    /// Spans that begin earlier may be among them.
    pub before: i64,
}

#[derive(Default)]
pub(super) struct SumsProof {
    /// Rows that are not in the balances yet.
    rows: Batch,
    pending: usize,
    /// By the length of a span and its start.
    balances: BTreeMap<(i64, i64), u128>,
    weights: RandomState,
    /// By the gateways from which retention has removed rows.
    kept_since: BTreeMap<String, i64>,
    now: i64,
    pub proven: u64,
    pub unproven: Option<UnprovenSums>,
}

impl SumsProof {
    pub fn new(session: &dyn SqlSession, now: i64) -> Result<Self> {
        let kept_since = "SELECT name, kept_since FROM gateways WHERE anchor_seq > 0";
        let kept_since = session.rows(kept_since, &[], |mut row| Ok((row.next()?, row.next()?)))?;
        Ok(Self { kept_since: kept_since.into_iter().collect(), now, ..Self::default() })
    }

    pub fn add(&mut self, row: &LedgerRow) {
        self.rows.add(row);
        self.pending += 1;
        if self.pending == ROWS_AT_ONCE {
            self.add_pending();
        }
    }

    /// Compares the rows with all sums. Returns the first sum that differs.
    pub fn find_fault(&mut self, session: &dyn SqlSession) -> Result<Option<Fault>> {
        self.add_pending();
        let all = format!("SELECT {SUMS_COLUMNS} FROM usage_rollup");
        session.query(&all, &[], &mut |mut row| {
            let (place, sums) = (RollupKey::read(&mut row)?, SpanSums::read(row)?);
            if self.is_proven(&place) {
                self.proven += 1;
                self.add_weight(&place, self.weigh(&place, &sums).wrapping_neg());
            } else if self.is_kept(&place) {
                let before = self.kept_since.get(&place.gateway).copied().unwrap_or(i64::MIN);
                let unproven = self.unproven.get_or_insert(UnprovenSums { count: 0, before });
                *unproven = UnprovenSums { count: unproven.count + 1, before: unproven.before.max(before) };
            }
            Ok(())
        })?;
        let differing: Vec<_> = self.balances.iter().filter(|(_, balance)| **balance != 0).collect();
        for (&(span, start), _) in differing {
            // Sums stop at the greatest number, which balances do not: only this finds a fault.
            if let Some(fault) = self.name_fault(session, span, start)? {
                return Ok(Some(fault));
            }
        }
        Ok(None)
    }

    /// Returns whether all rows of a place and its sums exist.
    fn is_proven(&self, place: &RollupKey) -> bool {
        let kept_since = self.kept_since.get(&place.gateway);
        self.is_kept(place) && kept_since.is_none_or(|&kept_since| place.start >= kept_since)
    }

    /// Returns whether sums of this age are kept. The oldest may be gone or incomplete: another host's clock may be ahead, and a row
    /// that was interrupted long ago adds to a minute that was removed.
    fn is_kept(&self, place: &RollupKey) -> bool {
        let span = Span::ALL.into_iter().find(|span| span.seconds() == place.span);
        span.is_none_or(|span| place.start >= span.kept_since(self.now).saturating_add(span.seconds()))
    }

    fn add_pending(&mut self) {
        self.pending = 0;
        for (place, sums) in mem::take(&mut self.rows).0 {
            if self.is_proven(&place) {
                self.add_weight(&place, self.weigh(&place, &sums));
            }
        }
    }

    fn add_weight(&mut self, place: &RollupKey, weight: u128) {
        let balance = self.balances.entry((place.span, place.start)).or_default();
        *balance = balance.wrapping_add(weight);
    }

    /// The figures times their weights, modulo 2^128. As a weight is odd and a figure has 64 bits, another figure alone has
    /// another product; that several changes cancel out is as likely as guessing 64 random bits.
    fn weigh(&self, place: &RollupKey, sums: &SpanSums) -> u128 {
        // The texts of a place are hashed once, not for every figure.
        let seed = [0_u8, 1].map(|number| self.weights.hash_one((place, number)));
        let weight = |column: usize| {
            let half = |number: u8| u128::from(self.weights.hash_one((seed, column, number)));
            half(0) << 64 | half(1) | 1
        };
        // A sum of no rows has no figures, but it should not be there.
        let is_empty = sums.counts[0] == 0;
        let counts = sums.counts.into_iter().chain([is_empty.into()]).map(|count| count as u128).enumerate();
        let times = [(1000, &sums.runtime), (2000, &sums.own)].into_iter().flat_map(|(first, times)| {
            times.buckets().map(move |(bucket, count)| (first + usize::from(bucket), u128::from(count)))
        });
        let figures = counts.chain(times).filter(|(_, figure)| *figure != 0);
        figures.fold(0, |sum, (column, figure)| sum.wrapping_add(weight(column).wrapping_mul(figure)))
    }

    /// The first sum of a span that is not that of its rows.
    fn name_fault(&self, session: &dyn SqlSession, span: i64, start: i64) -> Result<Option<Fault>> {
        let mut counted = Batch::default();
        let known =
            Span::ALL.into_iter().find(|known| known.seconds() == span && known.start(start) == start);
        if let Some(span) = known {
            let rows = format!(
                "SELECT {COLUMNS} FROM usage WHERE seq IS NOT NULL AND created >= $1 AND created < $2"
            );
            let range = values![start, start.saturating_add(span.seconds())];
            session.query(&rows, &range, &mut |row| {
                counted.add_to(span, &read_row(row)?);
                Ok(())
            })?;
        }
        let mut counted = counted.0;
        let kept = format!("SELECT {SUMS_COLUMNS} FROM usage_rollup WHERE span = $1 AND start = $2");
        let kept = session.rows(&kept, &values![span, start], |mut row| {
            Ok((RollupKey::read(&mut row)?, SpanSums::read(row)?))
        })?;
        let mut kept: BTreeMap<RollupKey, SpanSums> = kept.into_iter().collect();
        let mut places: BTreeSet<RollupKey> = counted.keys().chain(kept.keys()).cloned().collect();
        places.retain(|place| self.is_proven(place));
        Ok(places.into_iter().find_map(|place| {
            let difference = difference(kept.remove(&place), counted.remove(&place))?;
            Some(Fault::Sums { span, start, key_id: place.key_id, difference })
        }))
    }
}

/// Describes the first difference between sums and those of the rows.
fn difference(kept: Option<SpanSums>, counted: Option<SpanSums>) -> Option<String> {
    let (kept, counted) = match (kept, counted) {
        (Some(kept), Some(counted)) => (kept, counted),
        (None, Some(_)) => return Some("they are missing".into()),
        (Some(_), None) => return Some("there are no such rows".into()),
        (None, None) => return None,
    };
    let mut figures = FIGURES.into_iter().zip(kept.counts.into_iter().zip(counted.counts));
    if let Some((column, (kept, counted))) = figures.find(|(_, (kept, counted))| kept != counted) {
        return Some(format!("{column} is {kept}, and {counted} by the rows"));
    }
    let times = [("runtime_times", kept.runtime, counted.runtime), ("own_times", kept.own, counted.own)];
    let differing = times.into_iter().find(|(_, kept, counted)| kept != counted);
    differing.map(|(column, ..)| format!("{column} is not that of the rows"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::chain;
    use crate::store::ledger::tests::{outcome, row, write};
    use crate::store::tests::Temporary;
    use crate::store::{LedgerOutcome, Store, StoreError};
    use crate::when;

    /// Returns the fault that `verify` finds after a statement, which is then undone.
    #[track_caller]
    fn fault_after(store: &Store, statement: &str) -> Option<Fault> {
        let found = std::cell::Cell::new(None);
        let undone = store.engine.transaction(false, |session| {
            assert!(session.execute(statement, &[])? > 0, "{statement}");
            found.set(chain::verify(session, when::now())?.fault);
            Err::<(), _>(StoreError::Panicked)
        });
        assert!(matches!(undone, Err(StoreError::Panicked)), "{statement}: {undone:?}");
        found.take()
    }

    /// Rows of three minutes, two keys and three outcomes.
    fn filled(now: i64) -> Temporary {
        let temporary = Temporary::new();
        let store = &temporary.store;
        for (number, key) in ["key_1", "key_2"].into_iter().cycle().take(20).enumerate() {
            let (number, end) = (number as i64, number.to_string());
            let total = Some(number).filter(|number| number % 3 > 0);
            write(store, &end, key, now - 300 + number * 7, if number % 5 == 4 { 502 } else { 200 }, total);
        }
        let abandoned = LedgerOutcome { status: None, error_code: Some("abandoned"), ..outcome(200, None) };
        store.begin_row(&row("x", "key_1", now)).expect("a new row");
        store.finish(&row("x", "key_1", now), &abandoned).expect("its outcome");
        store.begin_row(&row("y", "key_1", now)).expect("a running request");
        temporary
    }

    #[test]
    fn a_change_of_any_number_in_the_sums_is_found() {
        let temporary = filled(when::now());
        let store = &temporary.store;
        let found = store.verify().expect("a walk");
        let sums = store.value::<i64>("SELECT count(*) FROM usage_rollup");
        assert_eq!((found.rows, found.sums as i64, found.unproven, found.fault), (21, sums, None, None));
        let empty = if store.engine.sqlite().is_some() { "CAST('' AS BLOB)" } else { "CAST('' AS BYTEA)" };
        for span in Span::ALL {
            let these = format!("WHERE span = {} AND key_id = 'key_1' AND status = 200", span.seconds());
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
                "unmeasured = unmeasured + 1",
                "runtime_times = own_times",
                "own_times = runtime_times",
                &format!("own_times = {empty}"),
            ] {
                let statement = format!("UPDATE usage_rollup SET {change} {these}");
                let fault = fault_after(store, &statement);
                let Some(Fault::Sums { span: found, key_id, .. }) = &fault else {
                    panic!("{statement}: {fault:?}")
                };
                // If a sum is at another place, either place has the fault.
                assert!((found - span.seconds()).abs() <= 1 && ["key_1", "key_9"].contains(&key_id.as_str()));
            }
            let inserted = |figures: &str| {
                format!(
                    "INSERT INTO usage_rollup SELECT span, start, 'key_9', '', 200, '', '', {figures}
                     FROM usage_rollup {these}"
                )
            };
            let kept = "SELECT max(start) FROM usage_rollup WHERE span =";
            let start = store.value::<i64>(&format!("{kept} {}", span.seconds()));
            for statement in [
                format!("DELETE FROM usage_rollup {these}"),
                format!("DELETE FROM usage_rollup WHERE span = {}", span.seconds()),
                format!("DELETE FROM usage_rollup WHERE span = {} AND start = {start}", span.seconds()),
                inserted("1, 0, 0, 0, 0, runtime_times, own_times"),
                inserted(&format!("0, 0, 0, 0, 0, {empty}, {empty}")),
            ] {
                let fault = fault_after(store, &statement);
                let is_found =
                    matches!(&fault, Some(Fault::Sums { span: found, .. }) if *found == span.seconds());
                assert!(is_found, "{statement}: {fault:?}");
            }
        }
        // Two changes that cancel each other out in a sum over all.
        let swap = "UPDATE usage_rollup SET total_tokens = total_tokens + CASE key_id WHEN 'key_1' THEN 1 ELSE -1 END
            WHERE span = 86400 AND status = 200";
        assert!(fault_after(store, swap).is_some());
        let flip = "UPDATE usage_rollup SET total_tokens = total_tokens + (-9223372036854775807 - 1)
            WHERE span = 86400 AND status = 200";
        assert!(fault_after(store, flip).is_some(), "numbers of 64 bits that would vanish modulo 2^64");
        assert_eq!(store.verify().expect("a walk").fault, None, "all of it was undone");
    }

    #[test]
    fn a_fault_names_the_span_the_key_and_the_figure() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let hour = Span::Hour.start(when::now());
        (0..3).for_each(|end| write(store, &end.to_string(), "key_1", hour, 200, Some(7)));
        let message = |change: &str| {
            let fault =
                fault_after(store, &format!("{change} WHERE span = 3600")).expect("a fault").to_string();
            let of = format!("the sums differ: hour {}, key key_1: ", when::iso(hour).expect("a time"));
            fault.strip_prefix(&of).unwrap_or_else(|| panic!("{fault}")).to_owned()
        };
        let set = "UPDATE usage_rollup SET";
        assert_eq!(message(&format!("{set} requests = 1003")), "requests is 1003, and 3 by the rows");
        assert_eq!(message(&format!("{set} own_times = runtime_times")), "own_times is not that of the rows");
        assert_eq!(message("DELETE FROM usage_rollup"), "they are missing");
        let elsewhere = fault_after(store, &format!("{set} key_id = 'key_0' WHERE span = 3600"));
        assert!(elsewhere.expect("a fault").to_string().ends_with("key key_0: there are no such rows"));
    }

    #[test]
    fn what_retention_has_removed_is_not_proven() {
        let mut temporary = Temporary::new();
        let mut other = temporary.open_again();
        let day = Span::Day.start(when::now()) - 10 * Span::Day.seconds();
        for (store, name) in [(&mut temporary.store, "a"), (&mut other, "b")] {
            store.join(name, "").expect("a start");
            for number in 0..4 {
                write(store, &format!("{name}{number}"), "key_1", day + number * 40_000, 200, Some(1));
            }
        }
        let store = &temporary.store;
        let verify = || store.verify().expect("a walk");
        assert_eq!((verify().sums, verify().unproven, verify().fault), (12, None, None), "days and hours");
        while store.remove_before(day + 50_000, 1).expect("a step") > 0 {}
        store.tamper(&format!("UPDATE gateways SET kept_since = {day} WHERE name = 'b'"));
        // The first day and two hours of a. By what its gateway says, b has all of its rows.
        let before = day + 40_001;
        let found = verify();
        assert_eq!(found.unproven, Some(UnprovenSums { count: 3, before }));
        assert!(matches!(found.fault, Some(Fault::Sums { .. })), "{:?}", found.fault);
        store.tamper(&format!("UPDATE gateways SET kept_since = {before} WHERE name = 'b'"));
        let found = verify();
        assert_eq!(
            (found.sums, found.unproven, found.fault),
            (6, Some(UnprovenSums { count: 6, before }), None)
        );
        assert_eq!(
            fault_after(store, &format!("UPDATE usage_rollup SET requests = 9 WHERE start = {day}")),
            None
        );
        let later = format!("UPDATE usage_rollup SET requests = 9 WHERE start > {before} AND gateway = 'a'");
        assert!(fault_after(store, &later).is_some());
    }

    #[test]
    fn what_age_has_removed_is_no_fault() {
        let temporary = Temporary::new();
        let (store, now) = (&temporary.store, when::now());
        let old = now - 8000;
        write(store, "a", "key_1", old, 200, Some(1));
        write(store, "b", "key_1", now - 5000, 200, Some(1));
        assert_eq!(store.verify().expect("a walk").fault, None, "before it is removed");
        store.remove_old_sums(now).expect("a removal");
        assert_eq!(store.verify().expect("a walk").fault, None);
        // An old row that was open for long adds to a minute that has lost its sums.
        write(store, "c", "key_1", old, 200, Some(1));
        let found = store.verify().expect("a walk");
        assert_eq!((found.rows, found.unproven, found.fault), (3, None, None));
    }

    /// A sum ends at the greatest number, and a balance does not.
    #[test]
    fn a_sum_that_has_reached_the_greatest_number_is_no_fault() {
        let temporary = Temporary::new();
        for number in 0..3 {
            write(&temporary.store, &number.to_string(), "key_1", when::now(), 200, Some(i64::MAX / 2));
        }
        assert_eq!(temporary.store.verify().expect("a walk").fault, None);
    }

    #[test]
    fn more_rows_than_are_summed_at_once() {
        let temporary = Temporary::sqlite();
        let (store, now) = (&temporary.store, when::now());
        let count = 2 * ROWS_AT_ONCE as i64 + 1;
        for number in 0..count {
            let created = now - number % 7 * 1000;
            store.record(&row(&number.to_string(), "key_1", created), &outcome(400, Some(1))).expect("a row");
        }
        let found = store.verify().expect("a walk");
        assert_eq!((found.rows as i64, found.fault), (count, None));
    }
}
