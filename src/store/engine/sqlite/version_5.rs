//! The step from version 4 to 5: one rollup in place of `usage_daily` and `usage_spans`, and partial indexes in place of
//! `usage_failures` and `closed_before`.
//!
//! The sums of days come from `usage_daily`. Their histograms, and the hours and minutes, come from the rows; for days of
//! which retention has removed rows, from `usage_spans`. Rows, their places and their hashes are not touched.

use std::time::{Duration, Instant};

use rusqlite::Connection;

use super::super::super::ledger::{COLUMNS, read_row};
use super::super::super::rollup::{self, Batch, Place, Span, SpanSums};
use super::super::super::{DAY, StoreError, chain};
use super::super::{Session, values};
use super::Statements;
use crate::when;

/// How often the log says how far the upgrade is.
const PROGRESS_TIME: Duration = Duration::from_secs(5);

const CREATE: &str = "
    CREATE TABLE usage_rollup (
        span              INTEGER NOT NULL,
        start             INTEGER NOT NULL,
        key_id            TEXT    NOT NULL,
        key_name          TEXT    NOT NULL,
        status            INTEGER NOT NULL,
        error_code        TEXT    NOT NULL,
        requests          INTEGER NOT NULL,
        prompt_tokens     INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL,
        total_tokens      INTEGER NOT NULL,
        unmeasured        INTEGER NOT NULL,
        runtime_times     BLOB    NOT NULL,
        own_times         BLOB    NOT NULL,
        PRIMARY KEY (span, start, key_id, key_name, status, error_code)
    ) STRICT, WITHOUT ROWID;
    INSERT INTO usage_rollup
    SELECT 86400, day * 86400, key_id, key_name, status, error_code, requests, prompt_tokens, completion_tokens,
        total_tokens, unmeasured, x'', x'' FROM usage_daily;";

const FINISH: &str = "
    DROP TABLE usage_daily;
    DROP TABLE usage_spans;
    DROP TABLE usage_failures;
    DROP TABLE usage_folded;
    ALTER TABLE chain DROP COLUMN closed_before;
    CREATE INDEX usage_unsealed ON usage (seq, request_id) WHERE seq IS NULL;
    CREATE INDEX usage_failed ON usage (request_id, key_id, error_code) WHERE error_code IS NOT NULL;";

pub(super) fn upgrade(connection: &Connection) -> Result<(), StoreError> {
    let session = &Statements(connection);
    connection.execute_batch(CREATE)?;
    let whole_since = chain::first_whole_day(session)?.saturating_mul(DAY);
    copy_spans(session, whole_since)?;
    add_rows(session, whole_since, when::now())?;
    connection.execute_batch(FINISH)?;
    Ok(())
}

/// Copies the spans of days whose rows are not all there. Version 4 did not keep a key's name with them: the hours of a
/// key that was renamed on such a day get the first of its names, and so does the day's histogram.
fn copy_spans(session: &dyn Session, whole_since: i64) -> Result<(), StoreError> {
    session.query(
        "SELECT span, start, s.key_id, coalesce((SELECT min(d.key_name) FROM usage_daily d WHERE d.day = s.start / 86400
            AND d.key_id = s.key_id AND d.status = s.status AND d.error_code = s.error_code), ''),
         status, error_code, requests, prompt_tokens, completion_tokens, total_tokens, unmeasured, runtime_times, own_times
         FROM usage_spans s WHERE start < $1",
        &values![whole_since],
        &mut |mut row| {
            let place = Place {
                span: row.next()?,
                start: row.next()?,
                key_id: row.next()?,
                key_name: row.next()?,
                status: row.next()?,
                error_code: row.next()?,
            };
            add(session, &place, SpanSums::read(&mut row)?)
        },
    )
}

/// Adds the rows that `copy_spans` does not cover.
fn add_rows(session: &dyn Session, whole_since: i64, now: i64) -> Result<(), StoreError> {
    let folded: i64 = session.value("SELECT seq FROM usage_folded", &[])?;
    let total: i64 = session.value(
        "SELECT coalesce((SELECT max(seq) FROM usage WHERE seq IS NOT NULL), anchor_seq) - anchor_seq FROM chain",
        &[],
    )?;
    let (mut done, mut reported) = (0_i64, Instant::now());
    let (mut batch, mut hour) = (Batch::default(), i64::MIN);
    session.query(
        &format!("SELECT {COLUMNS} FROM usage WHERE seq IS NOT NULL ORDER BY request_id"),
        &[],
        &mut |mut row| {
            done += 1;
            if reported.elapsed() > PROGRESS_TIME {
                reported = Instant::now();
                log::info!("upgrading the database: {done} of {total} rows");
            }
            let row = read_row(&mut row)?;
            if row.created < whole_since && row.seq <= Some(folded) {
                return Ok(());
            }
            // Rows are in the order of time, so an hour's sums are written once and do not add up in memory.
            if Span::Hour.start(row.created) != hour {
                hour = Span::Hour.start(row.created);
                write(session, std::mem::take(&mut batch), now)?;
            }
            batch.add(&row);
            Ok(())
        },
    )?;
    write(session, batch, now)
}

fn write(session: &dyn Session, batch: Batch, now: i64) -> Result<(), StoreError> {
    batch.spans(now).into_iter().try_for_each(|(place, sums)| add(session, &place, sums))
}

/// Adds to the rollup. The sums of days are there already.
fn add(session: &dyn Session, place: &Place, sums: SpanSums) -> Result<(), StoreError> {
    let sums = if place.span == DAY { sums.durations_only() } else { sums };
    rollup::add(session, place, sums)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::{Path, PathBuf};

    use super::super::super::super::tests::Temporary;
    use super::super::super::super::{Grouping, LedgerRow, Range, Store, Tokens};
    use super::super::super::Row;
    use super::super::upgrades::tests::make_version;
    use super::*;
    use crate::id::RequestId;

    /// Sums by start, key, status and error code.
    type Figures = BTreeMap<(i64, String, i64, String), SpanSums>;

    /// A database of version 4 with rows over 30 days, of three keys of which one is renamed. The newest 300 rows are not
    /// in `usage_spans` yet, and three requests are open. Of the rows, the oldest `removed` were removed by retention.
    fn version_4(folder: &Path, rows: i64, removed: i64, now: i64) -> PathBuf {
        let path = folder.join("old.db");
        let mut connection = Connection::open(&path).expect("a file");
        connection.pragma_update(None, "journal_mode", "WAL").expect("WAL mode");
        make_version(&mut connection, 4);
        connection.execute_batch("BEGIN").expect("a transaction");
        let session = &Statements(&connection);
        let mut head = chain::head(session).expect("the anchor");
        let (mut batch, folded) = (Batch::default(), rows - 300);
        for number in 1..=rows {
            let row = old_row(number, rows, now);
            head = head.next(&row);
            let Tokens { prompt_tokens, completion_tokens, total_tokens } = row.tokens;
            let insert = format!(
                "INSERT INTO usage ({COLUMNS}, hash) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, 0, $13, $14,
                 $15, $16, $17)"
            );
            let columns = values![
                &row.request_id,
                &row.key_id,
                &row.key_name,
                row.created,
                row.status,
                row.error_code.as_ref(),
                prompt_tokens,
                completion_tokens,
                total_tokens,
                row.duration_ms,
                row.queue_ms,
                row.runtime_ms,
                row.search_reason.as_ref(),
                row.search_results,
                row.search_ms,
                head.seq,
                head.hash,
            ];
            session.execute(&insert, &columns).expect("a row");
            if number <= folded {
                batch.add(&row);
            }
            if number == removed {
                let mark = "UPDATE chain SET anchor_seq = $1, anchor_hash = $2, kept_since = $3 + 1";
                session.execute(mark, &values![head.seq, head.hash, row.created]).expect("the anchor");
            }
        }
        let mut spans: BTreeMap<Place, SpanSums> = BTreeMap::new();
        for (place, sums) in batch.spans(now) {
            let is_kept = place.span != 3600 || place.start >= now - 10 * DAY;
            if is_kept {
                spans.entry(Place { key_name: String::new(), ..place }).or_default().add(&sums);
            }
        }
        for (Place { span, start, key_id, status, error_code, .. }, sums) in spans {
            let insert = "INSERT INTO usage_spans VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)";
            let columns = values![
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
                sums.own.to_bytes(),
            ];
            session.execute(insert, &columns).expect("a span");
        }
        connection
            .execute_batch(&format!(
                "INSERT INTO usage_daily SELECT created / 86400, key_id, key_name, coalesce(status, 0),
                    coalesce(error_code, ''), count(*), coalesce(sum(prompt_tokens), 0), coalesce(sum(completion_tokens), 0),
                    coalesce(sum(total_tokens), 0), count(*) FILTER (WHERE status = 200 AND total_tokens IS NULL)
                    FROM usage GROUP BY 1, 2, 3, 4, 5;
                 INSERT INTO usage_failures SELECT request_id, key_id, error_code FROM usage
                    WHERE error_code IS NOT NULL AND seq <= {folded};
                 UPDATE usage_folded SET seq = {folded};
                 INSERT INTO usage (request_id, key_id, key_name, created)
                    SELECT request_id || 'x', key_id, key_name, created FROM usage WHERE seq > {rows} - 3;
                 DELETE FROM usage WHERE seq <= {removed};
                 COMMIT;"
            ))
            .expect("the rest of it");
        path
    }

    fn old_row(number: i64, rows: i64, now: i64) -> LedgerRow {
        let created = now - 30 * DAY + number * 30 * DAY / rows;
        let (status, error_code) = match number % 17 {
            3 => (Some(502), Some("inference_error")),
            5 => (Some(400), Some("invalid_request")),
            7 if number % 5 == 0 => (None, Some("interrupted")),
            _ => (Some(200), None),
        };
        let measured = (status == Some(200) && number % 11 != 0).then_some(number);
        let searched = number % 4 == 0;
        LedgerRow {
            request_id: format!("{}{number:020}", RequestId::from(created)),
            key_id: format!("key_{}", number % 3),
            key_name: if number % 3 == 1 && number % 2 == 0 { "renamed".into() } else { "name".into() },
            created,
            status,
            error_code: error_code.map(String::from),
            tokens: Tokens { prompt_tokens: measured, completion_tokens: Some(2), total_tokens: measured },
            duration_ms: status.map(|_| number as f64 / 7.0),
            queue_ms: Some(0.25),
            runtime_ms: (status != Some(400)).then_some(number as f64 / 9.0),
            grounded: false,
            search_reason: searched.then(|| "always".into()),
            search_results: searched.then_some(3),
            search_ms: searched.then_some(0.5),
            seq: None,
        }
    }

    /// The console's figures as version 4 computed them: its spans, and the rows that were not in them yet.
    fn old_figures(connection: &Connection, span: Span, since: i64) -> Figures {
        let session: &dyn Session = &Statements(connection);
        let mut figures = Figures::new();
        let read = |mut row: Row| {
            Ok(((row.next()?, row.next()?, row.next()?, row.next()?), SpanSums::read(&mut row)?))
        };
        let spans = "SELECT start, key_id, status, error_code, requests, prompt_tokens, completion_tokens, total_tokens,
            unmeasured, runtime_times, own_times FROM usage_spans WHERE span = $1 AND start >= $2";
        figures.extend(session.rows(spans, &values![span.seconds(), since], read).expect("spans"));
        let tail = format!(
            "SELECT {COLUMNS} FROM usage WHERE seq > (SELECT seq FROM usage_folded) AND created >= $1"
        );
        let mut batch = Batch::default();
        let rows = session.rows(&tail, &values![since], |mut row| read_row(&mut row)).expect("rows");
        rows.iter().for_each(|row| batch.add(row));
        for (place, sums) in batch.spans(when::now()) {
            if place.span == span.seconds() {
                let at = (place.start, place.key_id, place.status, place.error_code);
                figures.entry(at).or_default().add(&sums);
            }
        }
        figures
    }

    fn new_figures(store: &Store, span: Span, since: i64) -> Figures {
        let mut figures = Figures::new();
        let take = |row: rollup::RollupRow| {
            let at = (row.start, row.key_id, row.status.unwrap_or(0), row.error_code.unwrap_or_default());
            figures.entry(at).or_default().add(&row.sums);
        };
        store.figures(span, Range { since, until: i64::MAX }, None, take).expect("figures");
        figures
    }

    /// `usage --by` as version 4 had it: requests, errors and tokens of each group.
    fn old_usage(connection: &Connection, group: &str) -> Vec<(String, [i64; 3])> {
        let statement = format!(
            "SELECT {group}, sum(requests), sum(errors), sum(tokens) FROM (
                SELECT day, key_id, key_name, nullif(status, 0) AS status, requests, requests * (status <> 200) AS errors,
                    total_tokens AS tokens FROM usage_daily
                UNION ALL SELECT created / 86400, key_id, key_name, NULL, 1, 0, 0 FROM usage WHERE seq IS NULL)
             GROUP BY 1 ORDER BY 1"
        );
        let read = |mut row: Row| Ok((row.next()?, [row.next()?, row.next()?, row.next()?]));
        let session: &dyn Session = &Statements(connection);
        session.rows(&statement, &[], read).expect("groups")
    }

    fn new_usage(store: &Store, by: Grouping) -> Vec<(String, [i64; 3])> {
        let mut found: BTreeMap<String, [i64; 3]> = BTreeMap::new();
        let take = |row: super::super::super::super::UsageRow| {
            let label = match &row.labels[by.labels()[0]] {
                serde_json::Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            let sums = found.entry(label).or_default();
            for (sum, more) in
                sums.iter_mut().zip([row.sums.requests, row.sums.errors, row.sums.total_tokens])
            {
                *sum += more;
            }
        };
        store.grouped(Range::ALL, by, take).expect("groups");
        found.into_iter().collect()
    }

    fn check_upgrade(rows: i64, removed: i64) {
        let temporary = Temporary::new();
        let now = when::now();
        let path = version_4(&temporary.folder, rows, removed, now);
        let old = Connection::open(&path).expect("the old database");
        let groups = [
            (Grouping::Day, "date(day * 86400, 'unixepoch')"),
            (Grouping::Month, "strftime('%Y-%m', day * 86400, 'unixepoch')"),
            (Grouping::Key, "key_id"),
            (Grouping::Status, "coalesce(CAST(status AS TEXT), 'null')"),
        ];
        let usage: Vec<_> = groups.iter().map(|(_, group)| old_usage(&old, group)).collect();
        let since = [(Span::Day, 0), (Span::Hour, now - 9 * DAY), (Span::Minute, now - 3600)];
        let since = since.map(|(span, since)| (span, span.start(since)));
        let figures: Vec<_> = since.iter().map(|&(span, since)| old_figures(&old, span, since)).collect();
        let last = old_row(rows, rows, now).request_id;
        let hash = |connection: &Connection| -> Vec<u8> {
            let hash = "SELECT hash FROM usage WHERE request_id = ?";
            connection.query_row(hash, [&last], |row| row.get(0)).expect("a hash")
        };
        let hash_before = hash(&old);
        drop(old);

        let store = Store::open(&path).expect("an upgrade");
        for ((by, _), expected) in groups.iter().zip(usage) {
            assert_eq!(new_usage(&store, *by), expected, "{by:?}");
        }
        for ((span, since), expected) in since.into_iter().zip(figures) {
            let found = new_figures(&store, span, since);
            assert!(found == expected, "{span:?}: {} and {} places", found.len(), expected.len());
            assert!(!found.is_empty());
        }
        let verified = store.verify().expect("a walk");
        assert_eq!((verified.rows as i64, verified.fault), (rows - removed, None));
        assert_eq!(verified.head, format!("{rows}:{}", hex::encode(&hash_before)));
        assert_eq!(store.close_interrupted().expect("a start"), 3, "the open rows are still open");
        store.seal_all(now);
        let verified = store.verify().expect("a walk");
        assert_eq!((verified.rows as i64, verified.fault), (rows - removed + 3, None), "the chain goes on");
    }

    #[test]
    fn a_hundred_thousand_rows_have_the_same_figures_before_and_after() {
        check_upgrade(100_000, 0);
    }

    #[test]
    fn rows_that_retention_removed_stay_in_the_figures() {
        check_upgrade(5_000, 1_234);
        check_upgrade(5_000, 4_600);
        check_upgrade(5_000, 4_700);
    }

    #[test]
    fn an_upgrade_that_breaks_off_leaves_version_4() {
        let temporary = Temporary::new();
        let path = version_4(&temporary.folder, 1_000, 0, when::now());
        let old = Connection::open(&path).expect("the old database");
        old.execute_batch("CREATE TABLE usage_failed (x)").expect("a table in the way of the last step");
        assert!(Store::open(&path).is_err());
        let count = |table: &str| -> i64 {
            old.query_row(&format!("SELECT count(*) FROM {table}"), [], |row| row.get(0)).expect("a count")
        };
        assert!(count("usage_daily") > 0 && count("usage_spans") > 0);
        assert_eq!(old.query_row("PRAGMA user_version", [], |row| row.get::<_, i64>(0)), Ok(4));
        old.execute_batch("DROP TABLE usage_failed").expect("out of the way");
        Store::open(&path).expect("the next start upgrades it");
    }
}
