//! Sums for the console: rows are folded into minutes, hours and days some time after they are complete, so that
//! a request has no part in it. What is not folded yet is read from the rows.

use std::collections::BTreeMap;
use std::sync::Arc;

use rusqlite::{Connection, OptionalExtension, Row};

use super::times::Times;
use super::{DAY, Range, Store, StoreError};

/// How long sums are kept beside the days, which stay: a little longer than any page shows them.
const KEPT: [(Span, i64); 2] = [(Span::Minute, 2 * 3600), (Span::Hour, 10 * DAY)];

/// How many rows that are not folded a page reads, at most. There are more only when folding has much to catch up
/// with, as after an upgrade.
pub(super) const TAIL: i64 = 20_000;

/// How finely sums are kept.
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

    /// When that one began in which a time is.
    fn start(self, time: i64) -> i64 {
        time.div_euclid(self.seconds()) * self.seconds()
    }

    /// Since when there are sums of it.
    pub fn kept_since(self, now: i64) -> i64 {
        KEPT.iter().find(|(span, _)| *span == self).map_or(i64::MIN, |(_, time)| now - time)
    }
}

/// What some requests of one key with one outcome add up to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpanSums {
    pub requests: i64,
    pub prompt_tokens: i64,
    pub completion_tokens: i64,
    pub total_tokens: i64,
    pub unmeasured: i64,
    /// How long the calls to the runtime took.
    pub runtime: Times,
    /// How long the rest took: all of a request but its calls.
    pub own: Times,
}

impl SpanSums {
    pub fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.prompt_tokens += other.prompt_tokens;
        self.completion_tokens += other.completion_tokens;
        self.total_tokens += other.total_tokens;
        self.unmeasured += other.unmeasured;
        self.runtime.merge(&other.runtime);
        self.own.merge(&other.own);
    }
}

/// One piece of what a range adds up to.
pub struct Figures {
    pub start: i64,
    pub key_id: String,
    pub status: Option<i64>,
    pub error_code: Option<String>,
    pub sums: SpanSums,
}

/// What the sums of a span are told apart by.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    span: i64,
    start: i64,
    key_id: String,
    status: i64,
    error_code: String,
}

impl Place {
    /// The place of a longer span that this one is a part of.
    fn within(&self, span: Span) -> Self {
        Self { span: span.seconds(), start: span.start(self.start), ..self.clone() }
    }
}

impl Store {
    /// Folds the next rows, `most` at once; says how many they were. One thread at a time does it.
    pub fn fold(&self, most: i64, now: i64) -> Result<usize, StoreError> {
        // Read and added up before the transaction, which others wait for.
        let step = self.read(|connection| Step::next(connection, most, now))?;
        let count = step.rows;
        if count > 0 {
            let step = Arc::new(step);
            self.write(move |connection| step.write(connection, now))?;
        }
        Ok(count)
    }

    /// Hands out what a range adds up to, piece by piece; of one key, or of all. Says how many rows are not in
    /// it yet, because folding has not come to them.
    pub fn figures(
        &self,
        span: Span,
        range: Range,
        key_id: Option<&str>,
        mut take: impl FnMut(Figures),
    ) -> Result<i64, StoreError> {
        self.read(|connection| {
            // All of it as of one moment: a row is in the spans or in the tail, never in both.
            let transaction = connection.unchecked_transaction()?;
            let mut statement = transaction.prepare_cached(
                "SELECT start, key_id, status, error_code, requests, prompt_tokens, completion_tokens, total_tokens,
                 unmeasured, runtime_times, own_times FROM usage_spans
                 WHERE span = ?1 AND start >= ?2 AND start < ?3 AND (?4 IS NULL OR key_id = ?4)",
            )?;
            let parameters = rusqlite::params![span.seconds(), range.since, range.until, key_id];
            let mut rows = statement.query(parameters)?;
            while let Some(row) = rows.next()? {
                take(Figures {
                    start: row.get(0)?,
                    key_id: row.get(1)?,
                    status: Some(row.get(2)?).filter(|&status| status != 0),
                    error_code: Some(row.get(3)?).filter(|code: &String| !code.is_empty()),
                    sums: SpanSums {
                        requests: row.get(4)?,
                        prompt_tokens: row.get(5)?,
                        completion_tokens: row.get(6)?,
                        total_tokens: row.get(7)?,
                        unmeasured: row.get(8)?,
                        ..read_times(row, 9)?
                    },
                });
            }
            let folded = folded(&transaction)?;
            let mut statement = transaction.prepare_cached(TAIL_ROWS)?;
            let mut rows = statement.query([folded, TAIL])?;
            let mut last = folded;
            while let Some(row) = rows.next()? {
                let completed = Completed::read(row)?;
                last = completed.seq;
                let is_wanted = (range.since..range.until).contains(&completed.created)
                    && key_id.is_none_or(|key_id| key_id == completed.key_id);
                if is_wanted {
                    take(completed.figures(span));
                }
            }
            drop(rows);
            let newest: Option<i64> = transaction.query_row("SELECT max(seq) FROM usage WHERE seq IS NOT NULL", [], |row| row.get(0))?;
            Ok(newest.unwrap_or(last) - last)
        })
    }
}

/// Where folding has come to.
pub(super) fn folded(connection: &Connection) -> rusqlite::Result<i64> {
    connection.prepare_cached("SELECT seq FROM usage_folded")?.query_row([], |row| row.get(0))
}

const TAIL_ROWS: &str =
    "SELECT seq, request_id, key_id, created, status, error_code, prompt_tokens, completion_tokens,
    total_tokens, duration_ms, runtime_ms, search_ms FROM usage WHERE seq > ? ORDER BY seq LIMIT ?";

/// A completed row, as far as it is folded.
struct Completed {
    seq: i64,
    request_id: String,
    key_id: String,
    created: i64,
    status: Option<i64>,
    error_code: Option<String>,
    prompt_tokens: Option<i64>,
    completion_tokens: Option<i64>,
    total_tokens: Option<i64>,
    duration_ms: Option<f64>,
    runtime_ms: Option<f64>,
    search_ms: Option<f64>,
}

impl Completed {
    fn read(row: &Row) -> rusqlite::Result<Self> {
        Ok(Self {
            seq: row.get(0)?,
            request_id: row.get(1)?,
            key_id: row.get(2)?,
            created: row.get(3)?,
            status: row.get(4)?,
            error_code: row.get(5)?,
            prompt_tokens: row.get(6)?,
            completion_tokens: row.get(7)?,
            total_tokens: row.get(8)?,
            duration_ms: row.get(9)?,
            runtime_ms: row.get(10)?,
            search_ms: row.get(11)?,
        })
    }

    fn place(&self, span: Span) -> Place {
        Place {
            span: span.seconds(),
            start: span.start(self.created),
            key_id: self.key_id.clone(),
            status: self.status.unwrap_or(0),
            error_code: self.error_code.clone().unwrap_or_default(),
        }
    }

    fn add_to(&self, sums: &mut SpanSums) {
        sums.requests += 1;
        sums.prompt_tokens += self.prompt_tokens.unwrap_or(0);
        sums.completion_tokens += self.completion_tokens.unwrap_or(0);
        sums.total_tokens += self.total_tokens.unwrap_or(0);
        sums.unmeasured += i64::from(self.status == Some(200) && self.total_tokens.is_none());
        if let Some(runtime) = self.runtime_ms {
            sums.runtime.add(runtime);
        }
        if let Some(duration) = self.duration_ms {
            sums.own.add(duration - self.runtime_ms.unwrap_or(0.0) - self.search_ms.unwrap_or(0.0));
        }
    }

    fn figures(self, span: Span) -> Figures {
        let mut sums = SpanSums::default();
        self.add_to(&mut sums);
        Figures {
            start: self.place(span).start,
            key_id: self.key_id,
            status: self.status,
            error_code: self.error_code,
            sums,
        }
    }
}

/// Some rows, added up.
struct Step {
    from: i64,
    to: i64,
    rows: usize,
    sums: BTreeMap<Place, SpanSums>,
    failures: Vec<[String; 3]>,
}

impl Step {
    fn next(connection: &Connection, most: i64, now: i64) -> rusqlite::Result<Self> {
        let from = folded(connection)?;
        let mut step = Self { from, to: from, rows: 0, sums: BTreeMap::new(), failures: Vec::new() };
        let mut statement = connection.prepare_cached(TAIL_ROWS)?;
        let mut rows = statement.query([from, most])?;
        // Each row is added up once; hours and days are made of minutes, which are few.
        let mut minutes: BTreeMap<Place, SpanSums> = BTreeMap::new();
        while let Some(row) = rows.next()? {
            let row = Completed::read(row)?;
            row.add_to(minutes.entry(row.place(Span::Minute)).or_default());
            step.to = row.seq;
            step.rows += 1;
            if let Some(code) = row.error_code {
                step.failures.push([row.request_id, row.key_id, code]);
            }
        }
        for (minute, sums) in &minutes {
            for span in Span::ALL {
                let place = minute.within(span);
                if place.start >= span.kept_since(now) {
                    step.sums.entry(place).or_default().add(sums);
                }
            }
        }
        Ok(step)
    }

    fn write(&self, connection: &Connection, now: i64) -> rusqlite::Result<()> {
        let moved = connection
            .prepare_cached("UPDATE usage_folded SET seq = ?2 WHERE seq = ?1")?
            .execute([self.from, self.to])?;
        if moved == 0 {
            // Another process has folded them.
            return Ok(());
        }
        for (place, sums) in &self.sums {
            add_to_span(connection, place, sums.clone())?;
        }
        let mut failure =
            connection.prepare_cached("INSERT OR IGNORE INTO usage_failures VALUES (?, ?, ?)")?;
        for row in &self.failures {
            failure.execute(rusqlite::params_from_iter(row))?;
        }
        for (span, _) in KEPT {
            connection
                .prepare_cached("DELETE FROM usage_spans WHERE span = ? AND start < ?")?
                .execute([span.seconds(), span.kept_since(now)])?;
        }
        Ok(())
    }
}

fn add_to_span(connection: &Connection, place: &Place, mut sums: SpanSums) -> rusqlite::Result<()> {
    let Place { span, start, key_id, status, error_code } = place;
    let known = connection
        .prepare_cached(
            "SELECT requests, prompt_tokens, completion_tokens, total_tokens, unmeasured, runtime_times, own_times
             FROM usage_spans WHERE span = ? AND start = ? AND key_id = ? AND status = ? AND error_code = ?",
        )?
        .query_row(rusqlite::params![span, start, key_id, status, error_code], |row| {
            Ok(SpanSums {
                requests: row.get(0)?,
                prompt_tokens: row.get(1)?,
                completion_tokens: row.get(2)?,
                total_tokens: row.get(3)?,
                unmeasured: row.get(4)?,
                ..read_times(row, 5)?
            })
        })
        .optional()?;
    if let Some(known) = known {
        sums.add(&known);
    }
    connection
        .prepare_cached("REPLACE INTO usage_spans VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)")?
        .execute(rusqlite::params![
            span,
            start,
            key_id,
            status,
            error_code,
            sums.requests,
            sums.prompt_tokens,
            sums.completion_tokens,
            sums.total_tokens,
            sums.unmeasured,
            sums.runtime.to_bytes(),
            sums.own.to_bytes()
        ])?;
    Ok(())
}

/// The times of two columns that stand side by side.
fn read_times(row: &Row, first: usize) -> rusqlite::Result<SpanSums> {
    let mut sums = SpanSums::default();
    sums.runtime.merge_bytes(row.get_ref(first)?.as_blob()?);
    sums.own.merge_bytes(row.get_ref(first + 1)?.as_blob()?);
    Ok(sums)
}

#[cfg(test)]
mod tests {
    use super::super::ledger::tests::{row, write};
    use super::super::tests::Temporary;
    use super::*;

    fn total(store: &Store, span: Span, range: Range) -> (SpanSums, i64) {
        let mut sums = SpanSums::default();
        let missing = store.figures(span, range, None, |figures| sums.add(&figures.sums)).expect("figures");
        (sums, missing)
    }

    #[test]
    fn folded_or_not_the_figures_are_the_same() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let now = 20 * DAY;
        for number in 0..100_i64 {
            let (status, tokens) = if number % 10 == 3 { (502, None) } else { (200, Some(number)) };
            write(
                store,
                &format!("id{number}"),
                ["key_1", "key_2"][number as usize % 2],
                now - number * 50,
                status,
                tokens,
            );
        }
        store.open_row(row("open", "key_1", now)).expect("one under way");
        let ranges = [
            (Span::Minute, Range { since: now - 3600, until: now + 60 }),
            (Span::Hour, Range { since: now - 7200, until: now + 3600 }),
            (Span::Day, Range::ALL),
        ];
        let before: Vec<_> = ranges.iter().map(|(span, range)| total(store, *span, *range)).collect();
        assert_eq!((before[2].0.requests, before[2].1), (100, 0));
        assert!(before[0].0.requests < 100);
        assert_eq!(store.fold(30, now).expect("a step"), 30);
        for (known, (span, range)) in before.iter().zip(ranges) {
            assert_eq!(total(store, span, range), *known, "half folded, {span:?}");
        }
        while store.fold(30, now).expect("a step") > 0 {}
        for (known, (span, range)) in before.iter().zip(ranges) {
            assert_eq!(total(store, span, range), *known, "folded, {span:?}");
        }
        let mut of_one = 0;
        store.figures(Span::Day, Range::ALL, Some("key_2"), |f| of_one += f.sums.requests).expect("figures");
        assert_eq!(of_one, 50);
        assert_eq!(
            total(store, Span::Day, Range::ALL).0.total_tokens,
            store.sums(Range::ALL).expect("sums").total_tokens
        );
    }

    #[test]
    fn minutes_and_hours_go_and_days_stay() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let now = 400 * DAY;
        write(store, "old", "key_1", now - 100 * DAY, 200, Some(1));
        write(store, "new", "key_1", now, 200, Some(1));
        while store.fold(1, now).expect("a step") > 0 {}
        let spans = |span| total(store, span, Range::ALL).0.requests;
        assert_eq!((spans(Span::Minute), spans(Span::Hour), spans(Span::Day)), (1, 1, 2));
        let later = now + 30 * DAY;
        write(store, "newer", "key_1", later, 200, Some(1));
        assert_eq!(store.fold(10, later).expect("a step"), 1);
        assert_eq!((spans(Span::Minute), spans(Span::Hour), spans(Span::Day)), (1, 1, 3));
        assert_eq!(store.fold(10, later).expect("a step"), 0);
    }
}
