//! The ledger's rows: made, completed, looked at.

use std::sync::Arc;

use rusqlite::{Connection, OptionalExtension, Row, params};
use serde::Serialize;

use super::chain::{self, Link};
use super::{Store, StoreError};

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

/// Which rows have no outcome yet.
pub(super) const IS_OPEN: &str = "seq IS NULL AND request_id >= (SELECT closed_before FROM chain)";

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

const INSERT: &str = "INSERT INTO usage (request_id, key_id, key_name, created) VALUES (?1, ?2, ?3, ?4)";

/// Inserts nothing if the key was revoked, has expired or has lost its permission since it was looked up.
const INSERT_CHECKED: &str = "INSERT INTO usage (request_id, key_id, key_name, created)
    SELECT ?1, ?2, ?3, ?4 FROM keys WHERE id = ?2 AND revoked IS NULL AND (expires IS NULL OR expires > ?4)
    AND ',' || permissions || ',' LIKE '%,completions,%'";

/// Something to be written to the ledger.
pub enum Entry {
    /// The row of a request that is about to cost an inference, without an outcome yet. That the file system takes it
    /// is enough: if the power fails now, nothing was acknowledged yet.
    Open(Arc<NewRow>),
    /// The outcome of a row that is open. It is on the disk and synced before it is told.
    Close(Arc<NewRow>, Outcome),
    /// The row of a request that was refused before it cost anything.
    Add(Arc<NewRow>, Outcome),
}

impl Entry {
    pub(super) fn is_synced(&self) -> bool {
        matches!(self, Self::Close(..))
    }
}

impl Store {
    /// Inserts the open row of a request that is about to cost an inference.
    pub fn begin(&self, row: Arc<NewRow>) -> Result<(), StoreError> {
        self.enter_and_wait(Entry::Open(row))
    }

    /// Writes the outcome into an open row; it is durable when this returns.
    pub fn finish(&self, row: Arc<NewRow>, outcome: Outcome) -> Result<(), StoreError> {
        self.enter_and_wait(Entry::Close(row, outcome))
    }

    /// Writes the row of a request that was refused before it cost anything.
    pub fn record(&self, row: Arc<NewRow>, outcome: Outcome) -> Result<(), StoreError> {
        self.enter_and_wait(Entry::Add(row, outcome))
    }

    /// Writes to the ledger, and returns when it is written or could not be.
    pub fn enter_and_wait(&self, entry: Entry) -> Result<(), StoreError> {
        self.writer.enter_and_wait(entry)
    }

    /// Tells of the rows that a crash left without an outcome, and says how many they were. Only a service
    /// that starts may call it: no request is under way then.
    pub fn close_interrupted(&self) -> Result<usize, StoreError> {
        let open: Vec<LedgerRow> = self.read(|connection| {
            let query = format!("SELECT {COLUMNS} FROM usage WHERE {IS_OPEN} ORDER BY request_id");
            connection.prepare(&query)?.query_map([], read_row)?.collect()
        })?;
        for row in &open {
            let LedgerRow { request_id, key_id, key_name, created, .. } = row.clone();
            let row = NewRow { request_id, key_id, key_name, created, note_use: false };
            self.enter_and_wait(Entry::Close(row.into(), INTERRUPTED))?;
        }
        Ok(open.len())
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

    /// When the first row of the chain was made.
    pub fn oldest_row(&self) -> Result<Option<i64>, StoreError> {
        self.read(|connection| {
            let oldest = "SELECT created FROM usage WHERE seq IS NOT NULL ORDER BY seq LIMIT 1";
            connection.query_row(oldest, [], |row| row.get(0)).optional()
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

/// After so many new rows, `chain.closed_before` is brought up to date.
const ROWS_BETWEEN_MARKS: u32 = 1000;

/// What the one who writes remembers of the ledger from one transaction to the next, so as not to read it again,
/// and what it has gathered in this one.
#[derive(Default)]
pub(super) struct Book {
    known: Option<Known>,
    sums: Vec<DaySums>,
}

struct Known {
    /// The chain's newest link.
    head: Link,
    closed_before: String,
    rows_since_mark: u32,
}

/// What a transaction adds to the sums of one day, key and outcome.
struct DaySums {
    row: Arc<NewRow>,
    status: u16,
    error_code: &'static str,
    requests: i64,
    tokens: [i64; 3],
    unmeasured: i64,
}

impl Book {
    pub fn enter(&mut self, connection: &Connection, entry: &Entry) -> Result<(), StoreError> {
        match entry {
            Entry::Open(row) => {
                if self.open(connection, row, INSERT_CHECKED)? == 0 {
                    return Err(StoreError::KeyRefused);
                }
            }
            Entry::Close(row, outcome) => self.close(connection, row, outcome)?,
            Entry::Add(row, outcome) => {
                self.open(connection, row, INSERT)?;
                self.close(connection, row, outcome)?;
            }
        }
        Ok(())
    }

    /// Writes what was gathered: it belongs to the end of the transaction.
    pub fn finish(&mut self, connection: &Connection) -> rusqlite::Result<()> {
        for sums in self.sums.drain(..) {
            sums.add_to_day(connection)?;
        }
        if let Some(known) = self.known.as_mut().filter(|known| known.rows_since_mark >= ROWS_BETWEEN_MARKS) {
            known.closed_before = mark_closed(connection)?;
            known.rows_since_mark = 0;
        }
        Ok(())
    }

    /// Inserts an open row and, where it is due, notes the use of its key.
    fn open(&mut self, connection: &Connection, row: &NewRow, insert: &str) -> rusqlite::Result<usize> {
        let known = self.known(connection)?;
        known.rows_since_mark += 1;
        if row.request_id < known.closed_before {
            // The clock was set back, or the request was slow to come here.
            connection.execute("UPDATE chain SET closed_before = ?", [&row.request_id])?;
            known.closed_before.clone_from(&row.request_id);
        }
        if row.note_use {
            connection
                .prepare_cached("UPDATE keys SET last_used = ?2 WHERE id = ?1")?
                .execute(params![row.key_id, row.created])?;
        }
        connection.prepare_cached(insert)?.execute(params![
            row.request_id,
            row.key_id,
            row.key_name,
            row.created
        ])
    }

    /// Completes an open row, links it into the chain, and counts it for the sums of its day.
    fn close(
        &mut self,
        connection: &Connection,
        row: &Arc<NewRow>,
        outcome: &Outcome,
    ) -> rusqlite::Result<()> {
        let head = &mut self.known(connection)?.head;
        *head = head.next(row, outcome);
        let Tokens { prompt_tokens, completion_tokens, total_tokens } = outcome.tokens;
        let search = outcome.search.as_ref();
        let changed = connection
            .prepare_cached(
                "UPDATE usage SET status = ?, error_code = ?, prompt_tokens = ?, completion_tokens = ?,
                 total_tokens = ?, duration_ms = ?, queue_ms = ?, runtime_ms = ?, grounded = ?, search_reason = ?,
                 search_results = ?, search_ms = ?, seq = ?, hash = ?
                 WHERE request_id = ? AND seq IS NULL",
            )?
            .execute(params![
                outcome.status,
                outcome.error_code,
                prompt_tokens,
                completion_tokens,
                total_tokens,
                outcome.duration_ms,
                outcome.queue_ms,
                outcome.runtime_ms,
                outcome.grounded,
                search.map(|search| search.reason),
                search.and_then(|search| search.results),
                search.map(|search| search.time_ms),
                head.seq,
                head.hash,
                row.request_id,
            ])?;
        if changed != 1 {
            // Somebody has removed or completed it: what is to be acknowledged is not on the disk.
            return Err(rusqlite::Error::StatementChangedRows(changed));
        }
        self.count(row, outcome);
        Ok(())
    }

    fn known(&mut self, connection: &Connection) -> rusqlite::Result<&mut Known> {
        match &mut self.known {
            Some(known) => Ok(known),
            empty => {
                let closed_before =
                    connection.query_row("SELECT closed_before FROM chain", [], |row| row.get(0))?;
                let head = chain::head(connection)?;
                // The rows of an earlier run are not counted: as many again may come before the next mark.
                Ok(empty.insert(Known { head, closed_before, rows_since_mark: 0 }))
            }
        }
    }

    fn count(&mut self, row: &Arc<NewRow>, outcome: &Outcome) {
        let new = DaySums::of(row, outcome);
        match self.sums.iter_mut().find(|sums| sums.is_like(&new)) {
            Some(sums) => sums.add(&new),
            None => self.sums.push(new),
        }
    }
}

impl DaySums {
    fn of(row: &Arc<NewRow>, outcome: &Outcome) -> Self {
        let Tokens { prompt_tokens, completion_tokens, total_tokens } = outcome.tokens;
        Self {
            row: Arc::clone(row),
            status: outcome.status.unwrap_or(0),
            error_code: outcome.error_code.unwrap_or(""),
            requests: 1,
            tokens: [prompt_tokens, completion_tokens, total_tokens].map(Option::unwrap_or_default),
            unmeasured: (outcome.status == Some(200) && total_tokens.is_none()).into(),
        }
    }

    fn day(&self) -> i64 {
        self.row.created.div_euclid(super::DAY)
    }

    fn is_like(&self, other: &Self) -> bool {
        (self.day(), self.status, self.error_code) == (other.day(), other.status, other.error_code)
            && self.row.key_id == other.row.key_id
            && self.row.key_name == other.row.key_name
    }

    fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        for (sum, more) in self.tokens.iter_mut().zip(other.tokens) {
            *sum += more;
        }
        self.unmeasured += other.unmeasured;
    }

    fn add_to_day(&self, connection: &Connection) -> rusqlite::Result<()> {
        let [prompt_tokens, completion_tokens, total_tokens] = self.tokens;
        connection
            .prepare_cached(
                "INSERT INTO usage_daily VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
                 ON CONFLICT DO UPDATE SET requests = requests + excluded.requests,
                 prompt_tokens = prompt_tokens + excluded.prompt_tokens,
                 completion_tokens = completion_tokens + excluded.completion_tokens,
                 total_tokens = total_tokens + excluded.total_tokens, unmeasured = unmeasured + excluded.unmeasured",
            )?
            .execute(params![
                self.day(),
                self.row.key_id,
                self.row.key_name,
                self.status,
                self.error_code,
                self.requests,
                prompt_tokens,
                completion_tokens,
                total_tokens,
                self.unmeasured,
            ])?;
        Ok(())
    }
}

/// Moves the mark before which every row is closed as far as it goes, so that whoever looks for open rows has few to
/// look at: an index of them would cost every request two changes.
fn mark_closed(connection: &Connection) -> rusqlite::Result<String> {
    let oldest_open = format!("SELECT min(request_id) FROM usage WHERE {IS_OPEN}");
    let newest = "SELECT max(request_id) FROM usage";
    connection.query_row(
        &format!(
            "UPDATE chain SET closed_before = coalesce(({oldest_open}), ({newest})) RETURNING closed_before"
        ),
        [],
        |row| row.get(0),
    )
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

    pub fn row(end: &str, key_id: &str, created: i64) -> Arc<NewRow> {
        Arc::new(NewRow {
            request_id: id(end, created),
            key_id: key_id.into(),
            key_name: format!("name of {key_id}"),
            created,
            note_use: true,
        })
    }

    impl Store {
        pub fn open_row(&self, row: Arc<NewRow>) -> Result<(), StoreError> {
            self.enter_and_wait(Entry::Open(row))
        }

        pub fn close_row(&self, row: Arc<NewRow>, outcome: Outcome) -> Result<(), StoreError> {
            self.enter_and_wait(Entry::Close(row, outcome))
        }

        pub fn add_row(&self, row: Arc<NewRow>, outcome: Outcome) -> Result<(), StoreError> {
            self.enter_and_wait(Entry::Add(row, outcome))
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
        store.open_row(Arc::clone(&row)).expect("a new row");
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

    #[test]
    fn open_rows_are_found_however_many_follow_them() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let closed_before = || -> String {
            let query = "SELECT closed_before FROM chain";
            store.read(|c| c.query_row(query, [], |row| row.get(0))).expect("the mark")
        };
        let many = |from: i64| {
            for number in 0..i64::from(ROWS_BETWEEN_MARKS) {
                store
                    .add_row(row(&format!("{number:09}"), "key_1", from), outcome(400, None))
                    .expect("a row");
            }
        };
        store.open_row(row("a", "key_1", 50)).expect("a new row");
        many(100);
        assert_eq!(closed_before(), id("a", 50), "the mark stops at what is open");
        store.close_row(row("a", "key_1", 50), outcome(200, None)).expect("its outcome");
        many(200);
        assert!(closed_before() > id("", 200), "{}", closed_before());
        store.open_row(row("b", "key_1", 7)).expect("one from before the mark: the clock was set back");
        assert_eq!(closed_before(), id("b", 7));
        assert_eq!(store.close_interrupted().expect("a start"), 1);
    }
}
