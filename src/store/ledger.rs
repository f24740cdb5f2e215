//! The ledger's rows: made, completed, looked at.

use rusqlite::{Connection, OptionalExtension, Row, named_params};
use serde::Serialize;

use super::{Store, StoreError, chain};

/// A request as it is known when it begins.
#[derive(Clone, Debug)]
pub struct NewRow {
    pub request_id: String,
    pub key_id: String,
    /// The key's name at the time.
    pub key_name: String,
    pub created: i64,
    /// Whether this use of the key is to be noted with the key as well.
    pub note_use: bool,
}

/// What came of a request.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// What was sent; nothing where the service ended before it could.
    pub status: Option<u16>,
    pub error_code: Option<&'static str>,
    pub tokens: Tokens,
    pub duration_ms: Option<f64>,
    pub queue_ms: Option<f64>,
    pub runtime_ms: Option<f64>,
    pub grounded: bool,
    pub search: Option<Searched>,
}

/// What is kept of asking Search.
#[derive(Clone, Debug)]
pub struct Searched {
    /// `always`, `match` or `model`.
    pub reason: &'static str,
    /// How many passages were found; nothing where Search was unavailable.
    pub results: Option<i64>,
    pub time_ms: f64,
}

/// Token figures as the runtime measured them; what it did not measure stays unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tokens {
    pub prompt_tokens: Option<i64>,
    pub completion_tokens: Option<i64>,
    pub total_tokens: Option<i64>,
}

impl Tokens {
    /// The sums of two calls: of a figure that one of them lacks, the sum is not known.
    pub fn plus(self, other: Self) -> Self {
        let sum = |one: Option<i64>, another: Option<i64>| one?.checked_add(another?);
        Self {
            prompt_tokens: sum(self.prompt_tokens, other.prompt_tokens),
            completion_tokens: sum(self.completion_tokens, other.completion_tokens),
            total_tokens: sum(self.total_tokens, other.total_tokens),
        }
    }
}

/// A whole row, as it stands in the table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LedgerRow {
    pub request_id: String,
    pub key_id: String,
    pub key_name: String,
    pub created: i64,
    pub status: Option<i64>,
    pub error_code: Option<String>,
    #[serde(flatten)]
    pub tokens: Tokens,
    pub duration_ms: Option<f64>,
    pub queue_ms: Option<f64>,
    pub runtime_ms: Option<f64>,
    pub grounded: bool,
    pub search_reason: Option<String>,
    pub search_results: Option<i64>,
    pub search_ms: Option<f64>,
    pub seq: Option<i64>,
}

pub(super) const COLUMNS: &str = "request_id, key_id, key_name, created, status, error_code, prompt_tokens,
    completion_tokens, total_tokens, duration_ms, queue_ms, runtime_ms, grounded, search_reason,
    search_results, search_ms, seq";

/// What stands in the row of a request that was under way when the service ended.
const INTERRUPTED: Outcome = Outcome {
    status: None,
    error_code: Some("interrupted"),
    tokens: Tokens { prompt_tokens: None, completion_tokens: None, total_tokens: None },
    duration_ms: None,
    queue_ms: None,
    runtime_ms: None,
    grounded: false,
    search: None,
};

impl Store {
    /// Makes the row of a request that is about to cost an inference. That the file system takes it is
    /// enough: if the power fails now, nothing was acknowledged yet.
    pub fn open_row(&self, row: NewRow) -> Result<(), StoreError> {
        self.write(move |connection| insert(connection, &row))
    }

    /// Completes a row. When this returns, it is on the disk and synced.
    pub fn close_row(&self, row: NewRow, outcome: Outcome) -> Result<(), StoreError> {
        self.write_synced(move |connection| complete(connection, &row, &outcome))
    }

    /// Adds the row of a request that was refused before it cost anything.
    pub fn add_row(&self, row: NewRow, outcome: Outcome) -> Result<(), StoreError> {
        self.write(move |connection| {
            insert(connection, &row)?;
            complete(connection, &row, &outcome)
        })
    }

    /// Tells of the rows that a crash left without an outcome, and says how many they were. Only a service
    /// that starts may call it: no request is under way then.
    pub fn close_interrupted(&self) -> Result<usize, StoreError> {
        self.write_synced(|connection| {
            let open: Vec<LedgerRow> = connection
                .prepare(&format!("SELECT {COLUMNS} FROM usage WHERE seq IS NULL ORDER BY request_id"))?
                .query_map([], read_row)?
                .collect::<rusqlite::Result<_>>()?;
            for row in &open {
                let LedgerRow { request_id, key_id, key_name, created, .. } = row.clone();
                let row = NewRow { request_id, key_id, key_name, created, note_use: false };
                complete(connection, &row, &INTERRUPTED)?;
            }
            Ok(open.len())
        })
    }

    /// One request's row.
    pub fn find_row(&self, request_id: &str) -> Result<Option<LedgerRow>, StoreError> {
        self.read(|connection| {
            connection
                .query_row(
                    &format!("SELECT {COLUMNS} FROM usage WHERE request_id = ?"),
                    [request_id],
                    read_row,
                )
                .optional()
        })
    }

    /// When the newest row was made.
    pub fn newest_row(&self) -> Result<Option<i64>, StoreError> {
        self.read(|connection| {
            let newest = "SELECT created FROM usage ORDER BY request_id DESC LIMIT 1";
            connection.query_row(newest, [], |row| row.get(0)).optional()
        })
    }
}

/// Inserts an open row and, where it is due, notes the use of its key.
fn insert(connection: &Connection, row: &NewRow) -> rusqlite::Result<()> {
    if row.note_use {
        connection
            .prepare_cached("UPDATE keys SET last_used = ?2 WHERE id = ?1")?
            .execute(rusqlite::params![row.key_id, row.created])?;
    }
    connection
        .prepare_cached(
            "INSERT INTO usage (request_id, key_id, key_name, created)
             VALUES (:request_id, :key_id, :key_name, :created)",
        )?
        .execute(named_params! {
            ":request_id": row.request_id, ":key_id": row.key_id, ":key_name": row.key_name,
            ":created": row.created,
        })?;
    Ok(())
}

/// Completes an open row, links it into the chain, and adds it to the sums of its day.
fn complete(connection: &Connection, row: &NewRow, outcome: &Outcome) -> rusqlite::Result<()> {
    let link = chain::next(connection, row, outcome)?;
    let search = outcome.search.as_ref();
    let changed = connection
        .prepare_cached(
            "UPDATE usage SET status = :status, error_code = :error_code, prompt_tokens = :prompt_tokens,
             completion_tokens = :completion_tokens, total_tokens = :total_tokens, duration_ms = :duration_ms,
             queue_ms = :queue_ms, runtime_ms = :runtime_ms, grounded = :grounded,
             search_reason = :search_reason, search_results = :search_results, search_ms = :search_ms,
             seq = :seq, hash = :hash
             WHERE request_id = :request_id AND seq IS NULL",
        )?
        .execute(named_params! {
            ":request_id": row.request_id, ":status": outcome.status, ":error_code": outcome.error_code,
            ":prompt_tokens": outcome.tokens.prompt_tokens,
            ":completion_tokens": outcome.tokens.completion_tokens,
            ":total_tokens": outcome.tokens.total_tokens, ":duration_ms": outcome.duration_ms,
            ":queue_ms": outcome.queue_ms, ":runtime_ms": outcome.runtime_ms, ":grounded": outcome.grounded,
            ":search_reason": search.map(|search| search.reason),
            ":search_results": search.and_then(|search| search.results),
            ":search_ms": search.map(|search| search.time_ms),
            ":seq": link.seq, ":hash": link.hash,
        })?;
    if changed != 1 {
        // Somebody has removed or completed it: what is to be acknowledged is not on the disk.
        return Err(rusqlite::Error::StatementChangedRows(changed));
    }
    add_to_day(connection, row, outcome)
}

fn add_to_day(connection: &Connection, row: &NewRow, outcome: &Outcome) -> rusqlite::Result<()> {
    let unmeasured = outcome.status == Some(200) && outcome.tokens.total_tokens.is_none();
    connection
        .prepare_cached(
            "INSERT INTO usage_daily VALUES (:day, :key_id, :key_name, :status, :error_code, 1, :prompt_tokens,
             :completion_tokens, :total_tokens, :unmeasured)
             ON CONFLICT DO UPDATE SET requests = requests + 1,
             prompt_tokens = prompt_tokens + excluded.prompt_tokens,
             completion_tokens = completion_tokens + excluded.completion_tokens,
             total_tokens = total_tokens + excluded.total_tokens, unmeasured = unmeasured + excluded.unmeasured",
        )?
        .execute(named_params! {
            ":day": row.created.div_euclid(super::DAY), ":key_id": row.key_id, ":key_name": row.key_name,
            ":status": outcome.status.unwrap_or(0), ":error_code": outcome.error_code.unwrap_or(""),
            ":prompt_tokens": outcome.tokens.prompt_tokens.unwrap_or(0),
            ":completion_tokens": outcome.tokens.completion_tokens.unwrap_or(0),
            ":total_tokens": outcome.tokens.total_tokens.unwrap_or(0), ":unmeasured": unmeasured,
        })?;
    Ok(())
}

pub(super) fn read_row(row: &Row) -> rusqlite::Result<LedgerRow> {
    Ok(LedgerRow {
        request_id: row.get("request_id")?,
        key_id: row.get("key_id")?,
        key_name: row.get("key_name")?,
        created: row.get("created")?,
        status: row.get("status")?,
        error_code: row.get("error_code")?,
        tokens: Tokens {
            prompt_tokens: row.get("prompt_tokens")?,
            completion_tokens: row.get("completion_tokens")?,
            total_tokens: row.get("total_tokens")?,
        },
        duration_ms: row.get("duration_ms")?,
        queue_ms: row.get("queue_ms")?,
        runtime_ms: row.get("runtime_ms")?,
        grounded: row.get("grounded")?,
        search_reason: row.get("search_reason")?,
        search_results: row.get("search_results")?,
        search_ms: row.get("search_ms")?,
        seq: row.get("seq")?,
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::tests::Temporary;
    use super::*;
    use crate::id::RequestId;

    /// The id of a row that was made at a second, with an end of its own.
    pub fn id(end: &str, created: i64) -> String {
        RequestId::from(created) + end
    }

    pub fn row(end: &str, key_id: &str, created: i64) -> NewRow {
        NewRow {
            request_id: id(end, created),
            key_id: key_id.into(),
            key_name: format!("name of {key_id}"),
            created,
            note_use: true,
        }
    }

    pub fn outcome(status: u16, total_tokens: Option<i64>) -> Outcome {
        Outcome {
            status: Some(status),
            error_code: (status != 200).then_some("inference_error"),
            tokens: Tokens { prompt_tokens: None, completion_tokens: Some(1), total_tokens },
            duration_ms: Some(2.5),
            queue_ms: Some(0.5),
            runtime_ms: Some(1.0),
            grounded: false,
            search: None,
        }
    }

    /// Makes and completes a row.
    pub fn write(store: &Store, id: &str, key: &str, created: i64, status: u16, total: Option<i64>) {
        let row = row(id, key, created);
        store.open_row(row.clone()).expect("a new row");
        store.close_row(row, outcome(status, total)).expect("its outcome");
    }

    #[test]
    fn a_row_from_its_making_to_its_completion() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        store.open_row(row("a", "key_1", 7)).expect("a new row");
        let found = store.find_row(&id("a", 7)).expect("a look-up").expect("the row");
        assert_eq!((found.status, found.seq, found.created), (None, None, 7));
        store.close_row(row("a", "key_1", 7), outcome(200, Some(5))).expect("its outcome");
        let found = store.find_row(&id("a", 7)).expect("a look-up").expect("the row");
        assert_eq!((found.status, found.seq, found.tokens.total_tokens), (Some(200), Some(1), Some(5)));
        assert_eq!((found.duration_ms, found.key_name.as_str()), (Some(2.5), "name of key_1"));
        assert!(store.close_row(row("a", "key_1", 7), outcome(200, None)).is_err(), "once only");
        assert!(store.open_row(row("a", "key_1", 7)).is_err(), "a request has one row");
        assert!(store.find_row("b").expect("a look-up").is_none());
    }

    #[test]
    fn a_row_that_is_gone_is_not_acknowledged() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        store.open_row(row("a", "key_1", 1)).expect("a new row");
        store.write(|connection| connection.execute("DELETE FROM usage", [])).expect("a deletion");
        assert!(store.close_row(row("a", "key_1", 1), outcome(200, None)).is_err());
    }

    #[test]
    fn what_a_crash_left_open_is_told_once() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        store.open_row(row("a", "key_1", 1)).expect("a new row");
        store.add_row(row("b", "key_1", 1), outcome(400, None)).expect("a refused one");
        store.open_row(row("c", "key_1", 1)).expect("a new row");
        assert_eq!(store.close_interrupted().expect("a start"), 2);
        assert_eq!(store.close_interrupted().expect("a start"), 0);
        let found = store.find_row(&id("c", 1)).expect("a look-up").expect("the row");
        assert_eq!(
            (found.status, found.error_code.as_deref(), found.seq),
            (None, Some("interrupted"), Some(3))
        );
    }
}
