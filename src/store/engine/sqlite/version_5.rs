//! The step from version 4 to 5: one rollup in place of `usage_daily` and `usage_spans`, and partial indexes in place of
//! `usage_failures` and `closed_before`.
//!
//! The sums of days come from `usage_daily`. Their histograms, and the hours and minutes, come from the rows; for days of
//! which retention has removed rows, from `usage_spans`. Rows, their places and their hashes are not touched.

use std::mem;
use std::time::{Duration, Instant};

use rusqlite::Connection;

use super::super::super::ledger::{COLUMNS, read_row};
use super::super::super::rollup::{Batch, Span};
use super::super::super::{DAY, StoreError, chain};
use super::super::{Session, values};
use super::Statements;
use crate::when;

/// How often the log says how far the upgrade is.
const PROGRESS_TIME: Duration = Duration::from_secs(5);

/// With the column `gateway` of version 7, because `Batch` writes it.
pub(super) const CREATE: &str = "
    CREATE TABLE usage_rollup (
        span              INTEGER NOT NULL,
        start             INTEGER NOT NULL,
        key_id            TEXT    NOT NULL,
        key_name          TEXT    NOT NULL,
        status            INTEGER NOT NULL,
        error_code        TEXT    NOT NULL,
        gateway           TEXT    NOT NULL,
        requests          INTEGER NOT NULL,
        prompt_tokens     INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL,
        total_tokens      INTEGER NOT NULL,
        unmeasured        INTEGER NOT NULL,
        runtime_times     BLOB    NOT NULL,
        own_times         BLOB    NOT NULL,
        PRIMARY KEY (span, start, key_id, key_name, status, error_code, gateway)
    ) STRICT, WITHOUT ROWID;";

/// The spans of days whose rows are not all there. Version 4 did not keep a key's name with them: the hours of a key that
/// was renamed on such a day get the first of its names, and so does the day's histogram.
const COPY_SPANS: &str = "INSERT INTO usage_rollup
    SELECT s.span, s.start, s.key_id, min(d.key_name), s.status, s.error_code, '', s.requests, s.prompt_tokens,
        s.completion_tokens, s.total_tokens, s.unmeasured, s.runtime_times, s.own_times
    FROM usage_spans s JOIN usage_daily d ON d.day = s.start / 86400 AND d.key_id = s.key_id AND d.status = s.status
        AND d.error_code = s.error_code
    WHERE s.start < $1 GROUP BY s.span, s.start, s.key_id, s.status, s.error_code";

const COPY_DAYS: &str = "INSERT INTO usage_rollup
    SELECT 86400, day * 86400, key_id, key_name, status, error_code, '', requests, prompt_tokens,
        completion_tokens, total_tokens, unmeasured, x'', x'' FROM usage_daily WHERE true
    ON CONFLICT DO UPDATE SET requests = excluded.requests, prompt_tokens = excluded.prompt_tokens,
        completion_tokens = excluded.completion_tokens, total_tokens = excluded.total_tokens,
        unmeasured = excluded.unmeasured";

const FINISH: &str = "
    DROP TABLE usage_daily;
    DROP TABLE usage_spans;
    DROP TABLE usage_failures;
    DROP TABLE usage_folded;
    ALTER TABLE chain DROP COLUMN closed_before;
    CREATE INDEX usage_unsealed ON usage (seq, request_id) WHERE seq IS NULL;
    CREATE INDEX usage_failed ON usage (request_id, key_id, error_code) WHERE error_code IS NOT NULL;";

pub(super) fn upgrade(connection: &Connection) -> Result<(), StoreError> {
    let session: &dyn Session = &Statements(connection);
    connection.execute_batch(CREATE)?;
    let kept_since = session.value("SELECT kept_since FROM chain", &[])?;
    let whole_since = chain::first_whole_day(kept_since).saturating_mul(DAY);
    session.execute(COPY_SPANS, &values![whole_since])?;
    add_rows(session, whole_since, when::now())?;
    // Last, because they replace the counts that the steps before have added up for days.
    session.execute(COPY_DAYS, &[])?;
    connection.execute_batch(FINISH)?;
    Ok(())
}

/// Adds the rows that `COPY_SPANS` does not cover.
fn add_rows(session: &dyn Session, whole_since: i64, now: i64) -> Result<(), StoreError> {
    let folded: i64 = session.value("SELECT seq FROM usage_folded", &[])?;
    let total: i64 = session.value(
        "SELECT coalesce((SELECT max(seq) FROM usage WHERE seq IS NOT NULL), anchor_seq) - anchor_seq FROM chain",
        &[],
    )?;
    let (mut done, mut reported) = (0_i64, Instant::now());
    // The table gets this column in version 7.
    let columns = COLUMNS.replace("gateway", "''");
    let (mut batch, mut hour) = (Batch::default(), i64::MIN);
    session.query(
        &format!("SELECT {columns} FROM usage WHERE seq IS NOT NULL AND (seq > $1 OR created >= $2) ORDER BY request_id"),
        &values![folded, whole_since],
        &mut |row| {
            done += 1;
            if reported.elapsed() > PROGRESS_TIME {
                reported = Instant::now();
                log::info!("upgrading the database: {done} of {total} rows");
            }
            let row = read_row(row)?;
            // Rows are in the order of time, so an hour's sums are written once and do not add up in memory.
            if Span::Hour.start(row.created) != hour {
                hour = Span::Hour.start(row.created);
                mem::take(&mut batch).write(session)?;
            }
            batch.add(&row, now);
            Ok(())
        },
    )?;
    batch.write(session)
}
