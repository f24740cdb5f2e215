//! The ledger: a row for every request that a key made.

use rusqlite::{Connection, Row, named_params};
use serde::Serialize;

use super::{Store, StoreError};

/// A request as it is known when it begins.
pub struct NewRow<'a> {
    pub request_id: &'a str,
    pub key_id: &'a str,
    pub created: i64,
    /// Whether this use of the key is to be noted with the key as well.
    pub note_use: bool,
}

/// What came of a request.
pub struct Outcome {
    pub status: u16,
    pub error_code: Option<&'static str>,
    pub tokens: Tokens,
    pub duration_ms: f64,
    pub queue_ms: f64,
    pub runtime_ms: Option<f64>,
    pub grounded: bool,
}

/// Token figures as the runtime measured them; what it did not measure stays unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tokens {
    pub prompt_tokens: Option<i64>,
    pub completion_tokens: Option<i64>,
    pub total_tokens: Option<i64>,
}

/// A row that waits for its outcome.
#[derive(Clone, Copy, Debug)]
pub struct RowId(i64);

/// What the `usage` command groups by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grouping {
    Day,
    Key,
}

/// Figures over some rows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sums {
    pub requests: i64,
    /// Those that did not end in 200.
    pub errors: i64,
    pub prompt_tokens: i64,
    pub completion_tokens: i64,
    pub total_tokens: i64,
    /// Completions whose total the runtime did not measure: the sums are short by theirs.
    pub unmeasured: i64,
}

/// One group and its figures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UsageRow {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub day: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(flatten)]
    pub sums: Sums,
}

const SUMS: &str = "count(*) AS requests,
    count(*) FILTER (WHERE status <> 200 OR error_code IS NOT NULL) AS errors,
    coalesce(sum(prompt_tokens), 0) AS prompt_tokens,
    coalesce(sum(completion_tokens), 0) AS completion_tokens,
    coalesce(sum(total_tokens), 0) AS total_tokens,
    count(*) FILTER (WHERE status = 200 AND total_tokens IS NULL) AS unmeasured";

impl Store {
    /// Makes the row of a request that is about to cost an inference. That the file system takes it is
    /// enough: if the power fails now, nothing was acknowledged yet.
    pub fn open_row(&self, row: &NewRow) -> Result<RowId, StoreError> {
        self.write(|connection| {
            insert(connection, row, |connection| {
                connection
                    .prepare_cached(
                        "INSERT INTO usage (request_id, key_id, created) VALUES (:request_id, :key_id, :created)",
                    )?
                    .execute(named_params! {
                        ":request_id": row.request_id, ":key_id": row.key_id, ":created": row.created,
                    })
            })?;
            Ok(RowId(connection.last_insert_rowid()))
        })
    }

    /// Completes a row. When this returns, it is on the disk and synced.
    pub fn close_row(&self, row: RowId, outcome: &Outcome) -> Result<(), StoreError> {
        let changed = self.write_synced(|connection| {
            connection
                .prepare_cached(
                    "UPDATE usage SET status = :status, error_code = :error_code, prompt_tokens = :prompt_tokens,
                     completion_tokens = :completion_tokens, total_tokens = :total_tokens,
                     duration_ms = :duration_ms, queue_ms = :queue_ms, runtime_ms = :runtime_ms,
                     grounded = :grounded WHERE id = :id",
                )?
                .execute(named_params! {
                    ":id": row.0, ":status": outcome.status, ":error_code": outcome.error_code,
                    ":prompt_tokens": outcome.tokens.prompt_tokens,
                    ":completion_tokens": outcome.tokens.completion_tokens,
                    ":total_tokens": outcome.tokens.total_tokens, ":duration_ms": outcome.duration_ms,
                    ":queue_ms": outcome.queue_ms, ":runtime_ms": outcome.runtime_ms,
                    ":grounded": outcome.grounded,
                })
        })?;
        match changed {
            1 => Ok(()),
            // Somebody has removed it: what is to be acknowledged is not on the disk.
            _ => Err(StoreError::Sqlite(rusqlite::Error::StatementChangedRows(changed))),
        }
    }

    /// Adds the row of a request that was refused before it cost anything.
    pub fn add_row(&self, row: &NewRow, outcome: &Outcome) -> Result<(), StoreError> {
        self.write(|connection| {
            insert(connection, row, |connection| {
                connection
                    .prepare_cached(
                        "INSERT INTO usage (request_id, key_id, created, status, error_code, duration_ms, queue_ms)
                         VALUES (:request_id, :key_id, :created, :status, :error_code, :duration_ms, :queue_ms)",
                    )?
                    .execute(named_params! {
                        ":request_id": row.request_id, ":key_id": row.key_id, ":created": row.created,
                        ":status": outcome.status, ":error_code": outcome.error_code,
                        ":duration_ms": outcome.duration_ms, ":queue_ms": outcome.queue_ms,
                    })
            })
        })
    }

    /// Tells of the rows that a crash left without an outcome, and says how many they were. Only a service
    /// that starts may call it: no request is under way then.
    pub fn close_interrupted(&self) -> Result<usize, StoreError> {
        self.write_synced(|connection| {
            connection.execute(
                "UPDATE usage SET error_code = 'interrupted' WHERE status IS NULL AND error_code IS NULL",
                [],
            )
        })
    }

    /// When the newest row was made.
    pub fn newest_row(&self) -> Result<Option<i64>, StoreError> {
        self.read(|connection| connection.query_row("SELECT max(created) FROM usage", [], |row| row.get(0)))
    }

    /// The figures since a time, all in all and by group.
    pub fn usage(&self, since: i64, by: Option<Grouping>) -> Result<(Sums, Vec<UsageRow>), StoreError> {
        self.read(|connection| {
            let all = connection.query_row(
                &format!("SELECT {SUMS} FROM usage WHERE created >= ?"),
                [since],
                read_sums,
            )?;
            let rows = match by {
                None => Vec::new(),
                Some(Grouping::Day) => connection
                    .prepare(&format!(
                        "SELECT date(created, 'unixepoch') AS day, NULL AS key_id, NULL AS name, {SUMS}
                         FROM usage WHERE created >= ? GROUP BY day ORDER BY day"
                    ))?
                    .query_map([since], read_usage_row)?
                    .collect::<rusqlite::Result<_>>()?,
                Some(Grouping::Key) => connection
                    .prepare(&format!(
                        "SELECT NULL AS day, key_id, (SELECT name FROM keys WHERE keys.id = key_id) AS name, {SUMS}
                         FROM usage WHERE created >= ? GROUP BY key_id ORDER BY requests DESC, key_id"
                    ))?
                    .query_map([since], read_usage_row)?
                    .collect::<rusqlite::Result<_>>()?,
            };
            Ok((all, rows))
        })
    }
}

/// Inserts a row and, where it is due, notes the use of its key: both or neither.
fn insert(
    connection: &mut Connection,
    row: &NewRow,
    statement: impl FnOnce(&Connection) -> rusqlite::Result<usize>,
) -> rusqlite::Result<()> {
    if !row.note_use {
        statement(connection)?;
        return Ok(());
    }
    let transaction = connection.transaction()?;
    // The key comes first, so that the row is the last that was inserted.
    transaction
        .prepare_cached("UPDATE keys SET last_used = ?2 WHERE id = ?1")?
        .execute(rusqlite::params![row.key_id, row.created])?;
    statement(&transaction)?;
    transaction.commit()
}

fn read_sums(row: &Row) -> rusqlite::Result<Sums> {
    Ok(Sums {
        requests: row.get("requests")?,
        errors: row.get("errors")?,
        prompt_tokens: row.get("prompt_tokens")?,
        completion_tokens: row.get("completion_tokens")?,
        total_tokens: row.get("total_tokens")?,
        unmeasured: row.get("unmeasured")?,
    })
}

fn read_usage_row(row: &Row) -> rusqlite::Result<UsageRow> {
    Ok(UsageRow {
        day: row.get("day")?,
        key_id: row.get("key_id")?,
        name: row.get("name")?,
        sums: read_sums(row)?,
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::Temporary;
    use super::*;

    const DAY: i64 = 86_400;

    fn row(request_id: &'static str, key_id: &'static str, created: i64) -> NewRow<'static> {
        NewRow { request_id, key_id, created, note_use: true }
    }

    fn outcome(status: u16, total_tokens: Option<i64>) -> Outcome {
        Outcome {
            status,
            error_code: (status != 200).then_some("inference_error"),
            tokens: Tokens { prompt_tokens: None, completion_tokens: Some(1), total_tokens },
            duration_ms: 2.5,
            queue_ms: 0.5,
            runtime_ms: Some(1.0),
            grounded: false,
        }
    }

    #[test]
    fn sums_and_groups() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        for (id, key, created, status, total) in [
            ("a", "key_1", 10, 200, Some(5)),
            ("b", "key_1", DAY + 1, 200, None),
            ("c", "key_2", DAY + 2, 502, None),
        ] {
            let open = store.open_row(&row(id, key, created)).expect("a new row");
            store.close_row(open, &outcome(status, total)).expect("its outcome");
        }
        store.add_row(&row("d", "key_1", DAY + 3), &outcome(400, None)).expect("a refused one");
        store.open_row(&row("e", "key_1", DAY + 4)).expect("one under way");

        let (all, rows) = store.usage(0, None).expect("the figures");
        assert_eq!((all.requests, all.errors, all.total_tokens, all.unmeasured), (5, 2, 5, 1));
        assert_eq!((all.prompt_tokens, all.completion_tokens), (0, 3));
        assert!(rows.is_empty());
        assert_eq!(store.usage(DAY, None).expect("the figures").0.requests, 4);
        let (_, days) = store.usage(0, Some(Grouping::Day)).expect("the figures");
        let told: Vec<_> = days.iter().map(|r| (r.day.as_deref(), r.sums.requests)).collect();
        assert_eq!(told, [(Some("1970-01-01"), 1), (Some("1970-01-02"), 4)]);
        let (_, keys) = store.usage(0, Some(Grouping::Key)).expect("the figures");
        let told: Vec<_> = keys.iter().map(|r| (r.key_id.as_deref(), r.sums.requests)).collect();
        assert_eq!(told, [(Some("key_1"), 4), (Some("key_2"), 1)]);

        assert_eq!(store.close_interrupted().expect("a start"), 1);
        assert_eq!(store.close_interrupted().expect("a start"), 0);
        assert_eq!(store.usage(0, None).expect("the figures").0.errors, 3);
    }

    #[test]
    fn a_row_that_is_gone_is_not_acknowledged() {
        let temporary = Temporary::new();
        let open = temporary.store.open_row(&row("a", "key_1", 1)).expect("a new row");
        temporary.store.write(|connection| connection.execute("DELETE FROM usage", [])).expect("a deletion");
        assert!(temporary.store.close_row(open, &outcome(200, None)).is_err());
    }

    #[test]
    fn a_request_has_one_row() {
        let temporary = Temporary::new();
        temporary.store.open_row(&row("a", "key_1", 1)).expect("a new row");
        assert!(temporary.store.open_row(&row("a", "key_1", 1)).is_err());
    }
}
