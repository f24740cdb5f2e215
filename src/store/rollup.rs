//! The rollup: sums of sealed rows by minute, hour and day. Rows that are not sealed yet are read from the ledger.

use std::collections::BTreeMap;

use super::durations::Durations;
use super::engine::{Row, Session, Value, values};
use super::ledger::{COLUMNS, LedgerRow, Tokens, read_row};
use super::sealing::COUNT_UNSEALED;
use super::{DAY, Filter, Matching, Range, Store, StoreError};

/// How many unsealed rows a page reads at most. There are more only if sealing has stopped.
const MOST_UNSEALED: i64 = 20_000;

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

    /// Since when there are sums of it.
    pub fn kept_since(self, now: i64) -> i64 {
        match self {
            Self::Minute => now - 2 * 3600,
            Self::Hour => now - 400 * DAY,
            Self::Day => i64::MIN,
        }
    }
}

/// Sums of some requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpanSums {
    pub requests: i64,
    pub prompt_tokens: i64,
    pub completion_tokens: i64,
    pub total_tokens: i64,
    pub unmeasured: i64,
    /// The calls to the runtime.
    pub runtime: Durations,
    /// The rest of the requests' time.
    pub own: Durations,
}

impl SpanSums {
    pub fn add(&mut self, other: &Self) {
        self.add_stored(&other.to_stored());
    }

    fn add_row(&mut self, row: &LedgerRow) {
        let Tokens { prompt_tokens, completion_tokens, total_tokens } = row.tokens;
        let is_unmeasured = row.status == Some(200) && total_tokens.is_none();
        let [prompt, completion, total] =
            [prompt_tokens, completion_tokens, total_tokens].map(Option::unwrap_or_default);
        self.add_counts(&[1, prompt, completion, total, is_unmeasured.into()]);
        if let Some(runtime) = row.runtime_ms {
            self.runtime.add(runtime);
        }
        if let Some(duration) = row.duration_ms {
            self.own.add(duration - row.runtime_ms.unwrap_or(0.0) - row.search_ms.unwrap_or(0.0));
        }
    }

    pub fn add_stored(&mut self, stored: &StoredSums) {
        self.add_counts(&stored.counts);
        self.runtime.merge_bytes(&stored.runtime);
        self.own.merge_bytes(&stored.own);
    }

    fn to_stored(&self) -> StoredSums {
        let Self { requests, prompt_tokens, completion_tokens, total_tokens, unmeasured, runtime, own } =
            self;
        let counts =
            [requests, prompt_tokens, completion_tokens, total_tokens, unmeasured].map(|count| *count);
        StoredSums { counts, runtime: runtime.to_bytes(), own: own.to_bytes() }
    }

    pub fn add_counts(&mut self, counts: &[i64; 5]) {
        let Self { requests, prompt_tokens, completion_tokens, total_tokens, unmeasured, .. } = self;
        let sums = [requests, prompt_tokens, completion_tokens, total_tokens, unmeasured];
        for (sum, more) in sums.into_iter().zip(counts) {
            *sum = sum.saturating_add(*more);
        }
    }
}

/// Sums as the database has them: most are merged into others, for which the histograms need not be unpacked.
pub struct StoredSums {
    /// In the order of their columns, from `requests` to `unmeasured`.
    pub counts: [i64; 5],
    pub runtime: Vec<u8>,
    own: Vec<u8>,
}

impl StoredSums {
    pub fn requests(&self) -> i64 {
        self.counts[0]
    }

    pub fn total_tokens(&self) -> i64 {
        self.counts[3]
    }

    /// Reads the columns from `requests` to `own_times`.
    fn read(mut row: Row) -> Result<Self, StoreError> {
        let counts = [row.next()?, row.next()?, row.next()?, row.next()?, row.next()?];
        Ok(Self { counts, runtime: row.next()?, own: row.next()? })
    }
}

/// Sums of one key and one outcome in one span, of one gateway.
pub struct RollupRow {
    pub start: i64,
    pub key_id: String,
    pub status: Option<i64>,
    pub error_code: Option<String>,
    pub sums: StoredSums,
}

/// The primary key of the rollup.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    span: i64,
    start: i64,
    key_id: String,
    key_name: String,
    status: i64,
    error_code: String,
    gateway: String,
}

impl Place {
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

    fn values(&self) -> Vec<Value> {
        let Self { span, start, key_id, key_name, status, error_code, gateway } = self;
        values![*span, *start, key_id, key_name, *status, error_code, gateway].into()
    }
}

/// Rows to be added, summed up by minute, hour and day.
#[derive(Default)]
pub(super) struct Batch(BTreeMap<Place, SpanSums>);

impl Batch {
    pub fn add(&mut self, row: &LedgerRow, now: i64) {
        for span in Span::ALL.into_iter().filter(|span| span.start(row.created) >= span.kept_since(now)) {
            self.0.entry(Place::of(row, span)).or_default().add_row(row);
        }
    }

    pub fn write(self, session: &dyn Session) -> Result<(), StoreError> {
        self.0.into_iter().try_for_each(|(place, sums)| add(session, &place, sums))
    }
}

/// Removes the minutes and hours that have become too old.
pub(super) fn remove_old(session: &dyn Session, now: i64) -> Result<(), StoreError> {
    let remove = "DELETE FROM usage_rollup WHERE span = $1 AND start < $2";
    [Span::Minute, Span::Hour].into_iter().try_for_each(|span| {
        session.execute(remove, &values![span.seconds(), span.kept_since(now)]).map(drop)
    })
}

/// Replaces the row of a place by its sum with these.
fn add(session: &dyn Session, place: &Place, mut sums: SpanSums) -> Result<(), StoreError> {
    let known = session.first(
        "DELETE FROM usage_rollup
         WHERE span = $1 AND start = $2 AND key_id = $3 AND key_name = $4 AND status = $5 AND error_code = $6
         AND gateway = $7 RETURNING requests, prompt_tokens, completion_tokens, total_tokens, unmeasured, runtime_times, own_times",
        &place.values(),
        StoredSums::read,
    )?;
    if let Some(known) = known {
        sums.add_stored(&known);
    }
    let StoredSums { counts, runtime, own } = sums.to_stored();
    let mut parameters = place.values();
    parameters.extend(counts.map(Value::from));
    parameters.extend(values![runtime, own]);
    let insert =
        "INSERT INTO usage_rollup VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)";
    session.execute(insert, &parameters).map(drop)
}

impl Store {
    /// Calls `take` with the sums of a range. Returns how many rows are missing in them because
    /// sealing is too far behind.
    pub fn figures(
        &self,
        span: Span,
        range: Range,
        filter: Filter,
        matching: &Matching,
        mut take: impl FnMut(RollupRow),
    ) -> Result<i64, StoreError> {
        let mut parameters: Vec<Value> =
            values![span.seconds(), range.since, range.until, filter.key_id, filter.gateway].into();
        let outcome = match matching {
            Matching::Anything => "",
            Matching::Success => "AND status = 200",
            Matching::Failure => "AND error_code <> ''",
            Matching::Code(code) => {
                parameters.push(code.into());
                "AND error_code = $6"
            }
        };
        let sealed = format!(
            "SELECT start, key_id, status, error_code, requests, prompt_tokens, completion_tokens, total_tokens,
             unmeasured, runtime_times, own_times FROM usage_rollup
             WHERE span = $1 AND start >= $2 AND start < $3 AND (CAST($4 AS TEXT) IS NULL OR key_id = $4)
             AND (CAST($5 AS TEXT) IS NULL OR gateway = $5) {outcome}"
        );
        // On one state of the database a row is either in the rollup or unsealed.
        self.engine.read(|session| {
            session.query(&sealed, &parameters, &mut |mut row| {
                take(RollupRow {
                    start: row.next()?,
                    key_id: row.next()?,
                    status: Some(row.next()?).filter(|&status| status != 0),
                    error_code: Some(row.next()?).filter(|code: &String| !code.is_empty()),
                    sums: StoredSums::read(row)?,
                });
                Ok(())
            })?;
            let mut read = 0;
            let unsealed = format!(
                "SELECT {COLUMNS} FROM usage WHERE seq IS NULL AND (status IS NOT NULL OR error_code IS NOT NULL)
                 LIMIT $1"
            );
            session.query(&unsealed, &values![MOST_UNSEALED], &mut |row| {
                let row = read_row(row)?;
                read += 1;
                let is_wanted = (range.since..range.until).contains(&row.created)
                    && filter.key_id.is_none_or(|key_id| key_id == row.key_id)
                    && filter.gateway.is_none_or(|gateway| gateway == row.gateway)
                    && matching.takes(row.status, row.error_code.as_deref());
                if is_wanted {
                    let mut sums = SpanSums::default();
                    sums.add_row(&row);
                    take(RollupRow {
                        start: span.start(row.created),
                        sums: sums.to_stored(),
                        key_id: row.key_id,
                        status: row.status,
                        error_code: row.error_code,
                    });
                }
                Ok(())
            })?;
            Ok(session.value::<i64>(COUNT_UNSEALED, &[])? - read)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::ledger::tests::{row, write};
    use super::super::tests::Temporary;
    use super::*;

    /// Start, key, status and error code.
    type Group = (i64, String, Option<i64>, Option<String>);

    fn groups(
        store: &Store,
        span: Span,
        range: Range,
        key_id: Option<&str>,
        matching: &Matching,
    ) -> BTreeMap<Group, SpanSums> {
        let mut groups = BTreeMap::<_, SpanSums>::new();
        let take = |row: RollupRow| {
            let group = (row.start, row.key_id, row.status, row.error_code);
            groups.entry(group).or_default().add_stored(&row.sums);
        };
        assert_eq!(
            store.figures(span, range, Filter { key_id, ..Filter::ALL }, matching, take).expect("figures"),
            0,
            "no row is missing"
        );
        groups
    }

    fn total(store: &Store, span: Span) -> SpanSums {
        let mut sums = SpanSums::default();
        groups(store, span, Range::ALL, None, &Matching::Anything).values().for_each(|more| sums.add(more));
        sums
    }

    #[test]
    fn sealed_or_not_the_figures_are_the_same() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let now = 20 * DAY;
        for number in 0..100_i64 {
            let (status, tokens) = if number % 10 == 3 { (502, None) } else { (200, Some(number)) };
            let key = ["key_1", "key_2"][number as usize % 2];
            write(store, &format!("id{number}"), key, now - number * 50, status, tokens);
        }
        store.begin(&row("open", "key_1", now)).expect("a running request");
        let ranges = [
            (Span::Minute, Range { since: now - 3600, until: now + 60 }, None, Matching::Anything),
            (Span::Hour, Range { since: now - 7200, until: now + 3600 }, None, Matching::Anything),
            (Span::Hour, Range { since: now - 3600, until: now + 3600 }, Some("key_2"), Matching::Anything),
            (Span::Day, Range::ALL, None, Matching::Success),
            (Span::Day, Range::ALL, None, Matching::Failure),
            (Span::Day, Range::ALL, Some("key_2"), Matching::Code("inference_error".into())),
            (Span::Day, Range::ALL, None, Matching::Code("interrupted".into())),
        ];
        let figures = || {
            ranges
                .each_ref()
                .map(|(span, range, key_id, matching)| groups(store, *span, *range, *key_id, matching))
        };
        let before = figures();
        assert_eq!(
            before.each_ref().map(|groups| groups.values().map(|sums| sums.requests).sum::<i64>()),
            [73, 100, 36, 90, 10, 10, 0]
        );
        assert_eq!(store.seal(30, now).expect("a batch"), 30);
        assert_eq!(figures(), before, "partly sealed");
        store.seal_all(now);
        assert_eq!(figures(), before, "sealed");
        let sums = store.sums(Range::ALL, Filter::ALL).expect("sums");
        assert_eq!(total(store, Span::Day).total_tokens, sums.total_tokens);
    }

    #[test]
    fn minutes_and_hours_are_removed_and_days_stay() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let now = 1000 * DAY;
        for (end, age) in [("1", 401 * DAY), ("2", 399 * DAY), ("3", 7260), ("4", 7140), ("5", 0)] {
            write(store, end, "key_1", now - age, 200, Some(1));
        }
        store.seal_all(now);
        let spans = || Span::ALL.map(|span| total(store, span).requests);
        assert_eq!(spans(), [2, 4, 5]);
        let later = now + 430 * DAY;
        write(store, "newer", "key_1", later, 200, Some(1));
        store.seal_all(later);
        assert_eq!(spans(), [1, 1, 6]);
    }

    /// An earlier version took figures up to 2^53 from the runtime.
    #[test]
    fn sums_do_not_overflow() {
        let most = SpanSums { total_tokens: i64::MAX, ..SpanSums::default() };
        let mut sums = most.clone();
        sums.add(&most);
        assert_eq!(sums.total_tokens, i64::MAX);
        let temporary = Temporary::new();
        for number in 0..3 {
            write(&temporary.store, &number.to_string(), "key_1", 7, 200, Some(i64::MAX / 2));
        }
        temporary.store.seal_all(8);
        assert_eq!(total(&temporary.store, Span::Day).total_tokens, i64::MAX);
    }
}
