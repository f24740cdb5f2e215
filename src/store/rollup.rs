//! The rollup: sums of sealed rows by minute, hour and day. sums.rs reads it.

use std::collections::BTreeMap;

use super::durations::Durations;
use super::engine::{Row, SqlSession, SqlValue, Statement, bound, values};
use super::ledger_row::{LedgerRow, Tokens};
use super::{DAY, Result, Store, StoreError};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Span {
    Minute,
    Hour,
    Day,
}

impl Span {
    pub const ALL: [Self; 3] = [Self::Minute, Self::Hour, Self::Day];

    pub fn seconds(self) -> i64 {
        match self {
            Self::Minute => 60,
            Self::Hour => 3600,
            Self::Day => DAY,
        }
    }

    /// The start of the span that contains a time.
    pub(super) fn start(self, time: i64) -> i64 {
        time.div_euclid(self.seconds()).saturating_mul(self.seconds())
    }

    /// The time since which sums of it are kept.
    pub fn kept_since(self, now: i64) -> i64 {
        match self {
            Self::Minute => now - 2 * 3600,
            Self::Hour => now - 400 * DAY,
            Self::Day => i64::MIN,
        }
    }
}

/// Sums of the rows of one place.
#[derive(Default)]
pub(super) struct SpanSums {
    /// They contain what the database has.
    is_stored: bool,
    /// In the order of their columns, from `requests` to `unmeasured`.
    pub counts: [i64; 5],
    pub runtime: Durations,
    pub own: Durations,
}

/// The columns that [`RollupKey::read`] and [`SpanSums::read`] read.
pub(super) const SUMS_COLUMNS: &str =
    "span, start, key_id, key_name, status, error_code, gateway, requests, prompt_tokens,
    completion_tokens, total_tokens, unmeasured, runtime_times, own_times";

impl SpanSums {
    /// Reads the columns from `requests` to `own_times`.
    pub fn read(row: Row) -> Result<Self> {
        let mut sums = Self::default();
        sums.add_stored(row)?;
        Ok(sums)
    }

    fn add_row(&mut self, row: &LedgerRow) {
        let Tokens { prompt_tokens, completion_tokens, total_tokens } = row.tokens;
        let is_unmeasured = row.status == Some(200) && total_tokens.is_none();
        let [prompt, completion, total] =
            [prompt_tokens, completion_tokens, total_tokens].map(Option::unwrap_or_default);
        self.add_counts([1, prompt, completion, total, is_unmeasured.into()]);
        if let Some(runtime) = row.runtime_ms {
            self.runtime.add(runtime);
        }
        if let Some(duration) = row.duration_ms {
            self.own.add(duration - row.runtime_ms.unwrap_or(0.0) - row.search_ms.unwrap_or(0.0));
        }
    }

    fn add_stored(&mut self, mut row: Row) -> Result<()> {
        self.is_stored = true;
        self.add_counts([row.next()?, row.next()?, row.next()?, row.next()?, row.next()?]);
        self.runtime.merge_bytes(&row.next::<Vec<u8>>()?);
        self.own.merge_bytes(&row.next::<Vec<u8>>()?);
        Ok(())
    }

    fn add_counts(&mut self, counts: [i64; 5]) {
        self.counts.iter_mut().zip(counts).for_each(|(sum, more)| *sum = sum.saturating_add(more));
    }
}

/// The primary key of the rollup.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct RollupKey {
    pub span: i64,
    pub start: i64,
    pub key_id: String,
    key_name: String,
    status: i64,
    error_code: String,
    pub gateway: String,
}

impl RollupKey {
    fn of(row: &LedgerRow, span: Span) -> Self {
        Self {
            span: span.seconds(),
            start: span.start(row.created),
            key_id: row.key_id.clone(),
            key_name: row.key_name.clone(),
            status: row.status.unwrap_or(0),
            error_code: row.error_code.clone().unwrap_or_default(),
            gateway: row.gateway.clone(),
        }
    }

    pub fn read(row: &mut Row) -> Result<Self> {
        Ok(Self {
            span: row.next()?,
            start: row.next()?,
            key_id: row.next()?,
            key_name: row.next()?,
            status: row.next()?,
            error_code: row.next()?,
            gateway: row.next()?,
        })
    }

    fn values(&self) -> Vec<SqlValue> {
        let Self { span, start, key_id, key_name, status, error_code, gateway } = self;
        values![*span, *start, key_id, key_name, *status, error_code, gateway].into()
    }
}

/// Rows to be added, summed up by minute, hour and day. The stored sums of each place are read before the new ones are
/// written.
#[derive(Default)]
pub(super) struct Batch(pub BTreeMap<RollupKey, SpanSums>);

const READ_SUMS: &str = "SELECT requests, prompt_tokens, completion_tokens, total_tokens, unmeasured, runtime_times, own_times
    FROM usage_rollup WHERE span = $1 AND start = $2 AND key_id = $3 AND key_name = $4 AND status = $5 AND error_code = $6
    AND gateway = $7";

/// Sums of a place that has none, and of one that has some. INSERT … ON CONFLICT is one statement for both, but SQLite would
/// copy each page that it changes.
const INSERT_SUMS: &str =
    "INSERT INTO usage_rollup (requests, prompt_tokens, completion_tokens, total_tokens, unmeasured,
    runtime_times, own_times, span, start, key_id, key_name, status, error_code, gateway)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)";
const UPDATE_SUMS: &str = "UPDATE usage_rollup SET requests = $1, prompt_tokens = $2, completion_tokens = $3, total_tokens = $4,
    unmeasured = $5, runtime_times = $6, own_times = $7 WHERE span = $8 AND start = $9 AND key_id = $10 AND key_name = $11
    AND status = $12 AND error_code = $13 AND gateway = $14";

impl Batch {
    pub fn add(&mut self, row: &LedgerRow) {
        Span::ALL.into_iter().for_each(|span| self.add_to(span, row));
    }

    pub fn add_to(&mut self, span: Span, row: &LedgerRow) {
        self.0.entry(RollupKey::of(row, span)).or_default().add_row(row);
    }

    /// The queries for the stored sums.
    pub fn reads(&self) -> impl Iterator<Item = Statement> {
        self.0.keys().map(|place| Statement::new(READ_SUMS, place.values()))
    }

    /// Adds the stored sums that the query with this number has found.
    pub fn add_known(&mut self, number: usize, found: Row) -> Result<()> {
        self.0.values_mut().nth(number).ok_or(StoreError::NoRow)?.add_stored(found)
    }

    pub fn writes(&self) -> impl Iterator<Item = Statement> {
        self.0.iter().map(|(place, sums)| {
            let mut parameters = sums.counts.map(SqlValue::from).to_vec();
            parameters.extend(values![sums.runtime.to_bytes(), sums.own.to_bytes()]);
            parameters.extend(place.values());
            Statement::new(if sums.is_stored { UPDATE_SUMS } else { INSERT_SUMS }, parameters)
        })
    }

    /// Reads the stored sums, and writes the new ones.
    pub fn write(mut self, session: &dyn SqlSession) -> Result<()> {
        let reads: Vec<Statement> = self.reads().collect();
        session.run(&bound(&reads), &mut |number, row| self.add_known(number, row))?;
        let writes: Vec<Statement> = self.writes().collect();
        session.run(&bound(&writes), &mut |_, _| Ok(())).map(drop)
    }
}

impl Store {
    /// Removes the minutes and hours that have become too old.
    pub fn remove_old_sums(&self, now: i64) -> Result<()> {
        let remove = "DELETE FROM usage_rollup WHERE span = $1 AND start < $2";
        let of = |span: Span| Statement::new(remove, values![span.seconds(), span.kept_since(now)]);
        self.engine.write(false, &[Span::Minute, Span::Hour].map(of)).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::ledger::tests::write;
    use crate::store::tests::Temporary;
    use crate::store::{Filter, Range, Sums};

    #[test]
    fn minutes_and_hours_are_removed_and_days_stay() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let now = 1000 * DAY;
        for (end, age) in [("1", 401 * DAY), ("2", 399 * DAY), ("3", 7260), ("4", 7140), ("5", 0)] {
            write(store, end, "key_1", now - age, 200, Some(1));
        }
        let requests = |span: Span| {
            let sum = "SELECT CAST(sum(requests) AS BIGINT) FROM usage_rollup WHERE span =";
            store.value::<i64>(&format!("{sum} {}", span.seconds()))
        };
        let spans_at = |now| {
            store.remove_old_sums(now).expect("a removal");
            Span::ALL.map(requests)
        };
        assert_eq!(spans_at(now), [2, 4, 5]);
        let later = now + 430 * DAY;
        write(store, "newer", "key_1", later, 200, Some(1));
        assert_eq!(spans_at(later), [1, 1, 6]);
    }

    /// An earlier version took figures up to 2^53 from the runtime.
    #[test]
    fn sums_do_not_overflow() {
        let most = Sums { total_tokens: i64::MAX, ..Sums::default() };
        let mut sums = most.clone();
        sums.add(&most);
        assert_eq!(sums.total_tokens, i64::MAX);
        let temporary = Temporary::new();
        for number in 0..3 {
            write(&temporary.store, &number.to_string(), "key_1", 7, 200, Some(i64::MAX / 2));
        }
        let sums = temporary.store.sums(Range::ALL, Filter::ALL).expect("the figures");
        assert_eq!(sums.total_tokens, i64::MAX);
    }
}
