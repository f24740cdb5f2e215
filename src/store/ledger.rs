//! The ledger's rows: begun before an inference is spent, finished before its response is sent.

use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::engine::{Row, Session, Statement, Value, values};
use super::{Store, StoreError};
use crate::when;

/// How long an insert whose answer was lost may take to show up: a primary can wait that long for its standby.
const LATE_INSERT: Duration = Duration::from_secs(60);

/// A request, its outcome, and when that was noted.
pub(super) type UnsettledOutcome = (String, Outcome, Instant);

/// How many outcomes wait for the database at most. The rows of the others stay open until the next start.
const MOST_UNSETTLED: usize = 1000;

/// A request as it is known when it begins.
#[derive(Clone, Debug)]
pub struct NewRow {
    pub request_id: String,
    pub key_id: String,
    /// The key's name at the time.
    pub key_name: String,
    pub created: i64,
}

/// The outcome of a request.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The HTTP status that is sent; `None` if the client has gone.
    pub status: Option<u16>,
    pub error_code: Option<&'static str>,
    pub tokens: Tokens,
    pub duration_ms: f64,
    pub queue_ms: f64,
    pub runtime_ms: Option<f64>,
    pub grounded: bool,
    pub search: Option<Searched>,
}

/// What the ledger keeps of a call to Search.
#[derive(Clone, Debug)]
pub struct Searched {
    /// `always`, `match` or `model`.
    pub reason: &'static str,
    /// How many passages were found; `None` if Search was unavailable.
    pub results: Option<i64>,
    pub time_ms: f64,
}

/// Token figures as the runtime measured them; `None` if it did not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tokens {
    pub prompt_tokens: Option<i64>,
    pub completion_tokens: Option<i64>,
    pub total_tokens: Option<i64>,
}

impl Tokens {
    /// The sums of two calls. If one of them lacks a figure, its sum is unknown.
    pub fn plus(self, other: Self) -> Self {
        let sum = |one: Option<i64>, another: Option<i64>| one?.checked_add(another?);
        Self {
            prompt_tokens: sum(self.prompt_tokens, other.prompt_tokens),
            completion_tokens: sum(self.completion_tokens, other.completion_tokens),
            total_tokens: sum(self.total_tokens, other.total_tokens),
        }
    }
}

/// A row as it is in the table.
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
    pub gateway: String,
}

pub const COLUMNS: &str = "request_id, key_id, key_name, created, status, error_code, prompt_tokens,
    completion_tokens, total_tokens, duration_ms, queue_ms, runtime_ms, grounded, search_reason,
    search_results, search_ms, seq, gateway";

/// Inserts nothing if the key was revoked, has expired or has lost its permission since it was looked up, or if another
/// process has raised the gateway's epoch.
const BEGIN: &str = "INSERT INTO usage (request_id, key_id, key_name, created, gateway, epoch)
    SELECT $1, keys.id, keys.name, $2, gateways.name, gateways.epoch FROM keys, gateways
    WHERE keys.id = $3 AND revoked IS NULL AND (expires IS NULL OR expires > $4)
    AND ',' || permissions || ',' LIKE '%,completions,%' AND gateways.name = $5 AND gateways.epoch = $6";

const FINISH: &str =
    "UPDATE usage SET status = $2, error_code = $3, prompt_tokens = $4, completion_tokens = $5,
    total_tokens = $6, duration_ms = $7, queue_ms = $8, runtime_ms = $9, grounded = $10, search_reason = $11,
    search_results = $12, search_ms = $13
    WHERE request_id = $1 AND status IS NULL AND error_code IS NULL
    AND epoch = (SELECT epoch FROM gateways WHERE name = gateway)";

const RECORD: &str = "INSERT INTO usage (request_id, status, error_code, prompt_tokens, completion_tokens, total_tokens,
    duration_ms, queue_ms, runtime_ms, grounded, search_reason, search_results, search_ms, key_id, key_name, created,
    gateway, epoch)
    SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, name, epoch
    FROM gateways WHERE name = $17 AND epoch = $18";

/// Whether a row was inserted, and whether it has its outcome: asked if the answer to a write was lost.
const IS_BEGUN: &str = "SELECT 1 FROM usage WHERE request_id = $1";
const IS_FINISHED: &str = "SELECT 1 FROM usage WHERE request_id = $1 AND status IS NOT DISTINCT FROM $2
    AND error_code IS NOT DISTINCT FROM $3";

/// Whether this process may write rows.
const IS_PRESENT: &str = "SELECT count(*) FROM gateways WHERE name = $1 AND epoch = $2";

/// Marks the open rows of a gateway as interrupted, up to an epoch.
pub(super) const INTERRUPT: &str = "UPDATE usage SET error_code = 'interrupted'
    WHERE seq IS NULL AND gateway = $1 AND epoch <= $2 AND status IS NULL AND error_code IS NULL";

impl Store {
    /// Inserts the open row of a request that is about to cost an inference. The file system has it when this returns;
    /// nothing is acknowledged yet, so it is not synced.
    pub fn begin(&self, row: &NewRow) -> Result<(), StoreError> {
        let mut parameters = values![&row.request_id, row.created, &row.key_id, when::now()].to_vec();
        parameters.extend(self.identity());
        let begin = Statement::new(BEGIN, parameters).settled_by(IS_BEGUN, values![&row.request_id]);
        if self.write(begin)? > 0 {
            return Ok(());
        }
        self.check_fence()?;
        Err(StoreError::KeyRefused)
    }

    /// Fails if another process has raised the gateway's epoch.
    fn check_fence(&self) -> Result<(), StoreError> {
        let read = |session: &dyn Session| session.value(IS_PRESENT, &self.identity());
        if self.engine.read(read)? { Ok(()) } else { Err(StoreError::Fenced) }
    }

    /// The name and the epoch that every write of a row carries.
    fn identity(&self) -> [Value; 2] {
        values![&self.gateway, self.epoch]
    }

    /// Writes the outcome into an open row. It is durable when this returns.
    pub fn finish(&self, request_id: &str, outcome: &Outcome) -> Result<(), StoreError> {
        let finish = Statement::new(FINISH, outcome.values(request_id));
        let changed = self.write_durable(
            finish.settled_by(IS_FINISHED, values![request_id, outcome.status, outcome.error_code]),
        )?;
        if changed != 1 {
            return Err(StoreError::NoRow);
        }
        self.backlog.add(1);
        Ok(())
    }

    /// Writes the row of a request that was refused before it cost anything. It does not check the key again.
    pub fn record(&self, row: &NewRow, outcome: &Outcome) -> Result<(), StoreError> {
        let mut parameters = outcome.values(&row.request_id);
        parameters.extend(values![&row.key_id, &row.key_name, row.created]);
        parameters.extend(self.identity());
        let record = Statement::new(RECORD, parameters);
        if self.write(record.settled_by(IS_BEGUN, values![&row.request_id]))? == 0 {
            return Err(StoreError::Fenced);
        }
        self.backlog.add(1);
        Ok(())
    }

    /// Keeps the outcome of a request that could not be written, for `settle`.
    pub fn settle_later(&self, request_id: String, outcome: Outcome) {
        let mut unsettled = self.unsettled();
        if unsettled.len() < MOST_UNSETTLED {
            unsettled.push((request_id, outcome, Instant::now()));
        }
    }

    /// Writes the outcomes that could not be written earlier, if their rows are still open.
    pub fn settle(&self) -> Result<(), StoreError> {
        let noted = self.unsettled().clone();
        for (id, outcome, since) in noted {
            match self.finish(&id, &outcome) {
                Err(StoreError::NoRow) => match self.find_row(&id)? {
                    None if since.elapsed() < LATE_INSERT => continue,
                    Some(row) if row.status == Some(200) => log::warn!(
                        "{id} the ledger says 200, but the client got 503: the database's answer was lost"
                    ),
                    _ => {}
                },
                result => result?,
            }
            self.unsettled().retain(|(other, ..)| *other != id);
        }
        Ok(())
    }

    fn unsettled(&self) -> MutexGuard<'_, Vec<UnsettledOutcome>> {
        self.unsettled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn find_row(&self, request_id: &str) -> Result<Option<LedgerRow>, StoreError> {
        let statement = format!("SELECT {COLUMNS} FROM usage WHERE request_id = $1");
        self.engine.read(|session| session.first(&statement, &values![request_id], read_row))
    }

    /// When the newest row was created.
    pub fn newest_row(&self) -> Result<Option<i64>, StoreError> {
        let newest = "SELECT created FROM usage ORDER BY request_id DESC LIMIT 1";
        self.engine.read(|session| session.first(newest, &[], |mut row| row.next()))
    }
}

impl Outcome {
    fn values(&self, request_id: &str) -> Vec<Value> {
        let search = self.search.as_ref();
        values![
            request_id,
            self.status,
            self.error_code,
            self.tokens.prompt_tokens,
            self.tokens.completion_tokens,
            self.tokens.total_tokens,
            self.duration_ms,
            self.queue_ms,
            self.runtime_ms,
            self.grounded,
            search.map(|search| search.reason),
            search.and_then(|search| search.results),
            search.map(|search| search.time_ms),
        ]
        .into()
    }
}

/// Reads [`COLUMNS`].
pub(super) fn read_row(mut row: Row) -> Result<LedgerRow, StoreError> {
    Ok(LedgerRow {
        request_id: row.next()?,
        key_id: row.next()?,
        key_name: row.next()?,
        created: row.next()?,
        status: row.next()?,
        error_code: row.next()?,
        tokens: Tokens {
            prompt_tokens: row.next()?,
            completion_tokens: row.next()?,
            total_tokens: row.next()?,
        },
        duration_ms: row.next()?,
        queue_ms: row.next()?,
        runtime_ms: row.next()?,
        grounded: row.next()?,
        search_reason: row.next()?,
        search_results: row.next()?,
        search_ms: row.next()?,
        seq: row.next()?,
        gateway: row.next()?,
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::tests::Temporary;
    use super::*;
    use crate::id::RequestId;

    /// The id of a row that was created at a second, with an end of its own.
    pub fn id(end: &str, created: i64) -> String {
        RequestId::from(created) + end
    }

    pub fn row(end: &str, key_id: &str, created: i64) -> NewRow {
        NewRow {
            request_id: id(end, created),
            key_id: key_id.into(),
            key_name: format!("name of {key_id}"),
            created,
        }
    }

    pub fn outcome(status: u16, total_tokens: Option<i64>) -> Outcome {
        Outcome {
            status: Some(status),
            error_code: (status != 200).then_some("inference_error"),
            tokens: Tokens { prompt_tokens: None, completion_tokens: Some(1), total_tokens },
            duration_ms: 2.5,
            queue_ms: 0.5,
            runtime_ms: Some(1.0),
            grounded: false,
            search: None,
        }
    }

    /// Begins and finishes a row.
    pub fn write(store: &Store, end: &str, key: &str, created: i64, status: u16, total: Option<i64>) {
        store.begin(&row(end, key, created)).expect("a new row");
        store.finish(&id(end, created), &outcome(status, total)).expect("its outcome");
    }

    #[test]
    fn a_row_from_its_beginning_to_its_seal() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let find = || store.find_row(&id("a", 7)).expect("a look-up").expect("the row");
        store.begin(&row("a", "key_1", 7)).expect("a new row");
        assert_eq!((find().status, find().seq, find().created), (None, None, 7));
        store.finish(&id("a", 7), &outcome(200, Some(5))).expect("its outcome");
        assert_eq!((find().status, find().seq, find().tokens.total_tokens), (Some(200), None, Some(5)));
        assert_eq!((find().duration_ms, find().key_name.as_str()), (Some(2.5), "name of key_1"));
        assert!(store.finish(&id("a", 7), &outcome(200, None)).is_err(), "once only");
        assert!(store.begin(&row("a", "key_1", 7)).is_err(), "a request has one row");
        assert!(store.find_row("b").expect("a look-up").is_none());
        assert_eq!(store.newest_row().expect("a look-up"), Some(7));
        store.seal_all(8);
        assert_eq!(find().seq, Some(1));
    }

    #[test]
    fn a_row_that_is_gone_is_not_acknowledged() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        store.begin(&row("a", "key_1", 1)).expect("a new row");
        store.tamper("DELETE FROM usage");
        assert!(matches!(store.finish(&id("a", 1), &outcome(200, None)), Err(StoreError::NoRow)));
    }

    #[test]
    fn an_outcome_that_was_not_written_is_written_later_if_the_row_is_open() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let find = |end| store.find_row(&id(end, 1)).expect("a look-up").expect("the row");
        store.begin(&row("a", "key_1", 1)).expect("a new row");
        write(store, "b", "key_1", 1, 200, Some(5));
        for end in ["a", "b", "c"] {
            store.settle_later(id(end, 1), outcome(503, Some(7)));
        }
        store.settle().expect("the database is back");
        assert_eq!(store.unsettled().len(), 1, "an insert whose answer was lost may still be on its way");
        store.begin(&row("c", "key_1", 1)).expect("the late insert");
        store.settle().expect("the next round");
        assert_eq!(find("c").status, Some(503));
        assert_eq!((find("a").status, find("a").tokens.total_tokens), (Some(503), Some(7)));
        assert_eq!(find("b").status, Some(200), "the update was done, and only its answer lost");
        assert!(store.unsettled().is_empty());
        (0..MOST_UNSETTLED + 9).for_each(|_| store.settle_later(String::new(), outcome(503, None)));
        assert_eq!(store.unsettled().len(), MOST_UNSETTLED);
    }

    #[test]
    fn what_a_crash_left_open_is_interrupted_once() {
        let mut temporary = Temporary::new();
        let store = &mut temporary.store;
        store.begin(&row("a", "key_1", 1)).expect("a new row");
        store.record(&row("b", "key_1", 1), &outcome(400, None)).expect("a refused one");
        store.begin(&row("c", "key_1", 1)).expect("a new row");
        assert_eq!(store.join("", "").expect("a start"), 2);
        assert_eq!(store.join("", "").expect("a start"), 0);
        store.seal_all(2);
        let found = store.find_row(&id("c", 1)).expect("a look-up").expect("the row");
        assert_eq!(
            (found.status, found.error_code.as_deref(), found.seq),
            (None, Some("interrupted"), Some(3))
        );
    }
}
