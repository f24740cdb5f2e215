//! The ledger's rows: begun before an inference is spent, finished before its response is sent.

use std::time::Instant;

use super::chain::ChainLink;
use super::engine::{Row, SqlSession, SqlValue, Statement, bound, values};
use super::keys::{BY_DIGEST, with_budget};
use super::ledger_row::{BegunRow, COLUMNS, LedgerOutcome, LedgerRow, NewRow, read_row};
use super::rollup::Batch;
use super::stored_key::{Permission, read_key};
use super::{Result, Store, StoreError};
use crate::secret::SecretDigest;
use crate::when;

/// A write that a group shares with others.
pub(super) enum LedgerWrite {
    /// An open row, if its key is valid.
    Begin(RowRequest),
    /// The outcome of an open row.
    Finish(LedgerRow),
    /// A row with its outcome.
    Record(LedgerRow),
}

impl LedgerWrite {
    /// Returns whether it has to be on the disk before it is acknowledged.
    pub fn is_durable(&self) -> bool {
        matches!(self, Self::Finish(_))
    }

    /// The row, if it has its outcome.
    fn finished(&self) -> Option<&LedgerRow> {
        match self {
            Self::Begin(_) => None,
            Self::Finish(row) | Self::Record(row) => Some(row),
        }
    }
}

#[derive(Clone)]
struct GroupWritten {
    each: Vec<Option<BegunRow>>,
    /// A row that it has written, with its hash if it has one: all of the group is written, or nothing.
    proof: Option<(String, Option<[u8; 32]>)>,
}

/// A request that asks for an open row.
pub(super) struct RowRequest {
    pub request_id: String,
    pub created: i64,
    /// The digest of its key's secret.
    pub digest: SecretDigest,
}

/// Inserts an open row. SQLite would make a table of its own for what a RETURNING returns, at every use.
const INSERT: &str = "INSERT INTO usage (request_id, key_id, key_name, created, gateway, epoch)
    VALUES ($1, $2, $3, $4, $5, $6)";

/// Asked before an outcome is written: it takes no place in the chain if its row is not open.
const FIND: &str = "SELECT seq, gateway, epoch FROM usage WHERE request_id = $1";

/// Writes the outcome into an open row. As INSERT … ON CONFLICT, SQLite would copy each page that it changes, to be able to
/// undo that statement alone.
const FINISH: &str =
    "UPDATE usage SET status = $1, error_code = $2, prompt_tokens = $3, completion_tokens = $4,
    total_tokens = $5, duration_ms = $6, queue_ms = $7, runtime_ms = $8, grounded = $9, search_reason = $10,
    search_results = $11, search_ms = $12, seq = $13, cause = $14, hash = $15 WHERE request_id = $16";

pub(super) const MOVE_HEAD: &str = "UPDATE gateways SET head_seq = $1, head_hash = $2 WHERE name = $3";

/// Queries for the end of a chain, which lock its gateway, and which find nothing if the epoch has changed. Rows that begin
/// share the lock: they only keep others from raising the epoch.
const LOCK_TO_BEGIN: &str =
    "SELECT head_seq, head_hash FROM gateways WHERE name = $1 AND epoch = $2 FOR KEY SHARE";
const LOCK_TO_FINISH: &str =
    "SELECT head_seq, head_hash FROM gateways WHERE name = $1 AND epoch = $2 FOR NO KEY UPDATE";
const LOCK: &str = "SELECT head_seq, head_hash FROM gateways WHERE name = $1 AND epoch = $2 FOR UPDATE";

/// A query for the open rows of a gateway, up to an epoch.
pub(super) fn select_open_rows() -> String {
    format!(
        "SELECT {COLUMNS} FROM usage WHERE seq IS NULL AND gateway = $1 AND epoch <= $2
         ORDER BY gateway, request_id LIMIT {INTERRUPTED_AT_ONCE}"
    )
}

/// The maximum number of rows that one transaction marks as interrupted.
const INTERRUPTED_AT_ONCE: usize = 100;

impl Store {
    /// Looks up the key of a request that is about to cost an inference, and inserts the open row: one transaction does both.
    /// The file system has the row when this returns; nothing is acknowledged yet, so it is not synced.
    pub fn begin(&self, request_id: &str, created: i64, digest: &SecretDigest) -> Result<BegunRow> {
        let request = RowRequest { request_id: request_id.into(), created, digest: *digest };
        self.write_shared(LedgerWrite::Begin(request))?.ok_or(StoreError::KeyRefused)
    }

    /// Writes the outcome into an open row, seals it and adds it to the sums. All of it is durable when this returns.
    pub fn finish(&self, row: &NewRow, outcome: &LedgerOutcome) -> Result<()> {
        self.write_shared(LedgerWrite::Finish(LedgerRow::new(row, outcome, &self.gateway)))?;
        self.note_use(&row.key_id, row.created);
        Ok(())
    }

    /// Writes the row of a request that was refused before it cost anything. It does not check the key again.
    pub fn record(&self, row: &NewRow, outcome: &LedgerOutcome) -> Result<()> {
        self.write_shared(LedgerWrite::Record(LedgerRow::new(row, outcome, &self.gateway)))?;
        self.note_use(&row.key_id, row.created);
        Ok(())
    }

    /// Writes a group in one transaction: all of it, or nothing.
    pub(super) fn write_together(
        &self,
        group: &[&LedgerWrite],
        deadline: Instant,
        waits_if_lost: bool,
    ) -> Result<Vec<Option<BegunRow>>> {
        let written = self.engine.group(deadline, waits_if_lost, |session, before: Option<&GroupWritten>| {
            if let Some(before) = before {
                // The lock waits for a process of the server that may still be committing it.
                self.lock_gateway(session, &self.gateway, self.epoch)?;
                if before.is_done(session)? {
                    return Ok((before.clone(), Vec::new()));
                }
            }
            self.write_in(session, group)
        });
        written.map(|(written, _)| written.each)
    }

    /// Reads what a group depends on. Returns what comes of it, and the statements that write it.
    fn write_in(
        &self,
        session: &dyn SqlSession,
        group: &[&LedgerWrite],
    ) -> Result<(GroupWritten, Vec<Statement>)> {
        let finished: Vec<&LedgerRow> = group.iter().filter_map(|write| write.finished()).collect();
        let mut sums = Batch::default();
        finished.iter().for_each(|row| sums.add(row));
        let lock = self.engine.locking(if finished.is_empty() { LOCK_TO_BEGIN } else { LOCK_TO_FINISH });
        let of_members = group.iter().map(|write| match write {
            LedgerWrite::Begin(row) => {
                Statement::new(self.select(BY_DIGEST), with_budget(row.created, row.digest.0.into()))
            }
            LedgerWrite::Finish(row) | LedgerWrite::Record(row) => {
                Statement::new(FIND, values![&row.request_id])
            }
        });
        let statements: Vec<Statement> = of_members.chain(sums.reads()).collect();
        let identity = self.identity();
        let mut all = vec![(lock, identity.as_slice())];
        all.extend(bound(&statements));
        let (mut head, mut found) = (None, Vec::new());
        found.resize_with(group.len(), || None);
        session.run(&all, &mut |number, row| match number.checked_sub(1) {
            None => ChainLink::read(row).map(|link| head = Some(link)),
            Some(member) if member < group.len() => {
                found[member] = Some(row);
                Ok(())
            }
            Some(number) => sums.add_known(number - group.len(), row),
        })?;
        let head = head.ok_or(StoreError::Fenced)?;
        let result = |(write, found): (&&LedgerWrite, Option<Row>)| match (write, found) {
            (LedgerWrite::Begin(request), Some(row)) => request.read(row),
            (LedgerWrite::Begin(_) | LedgerWrite::Record(_), None) => Ok(None),
            (LedgerWrite::Finish(_), Some(mut row)) => {
                let open = (None::<i64>, self.gateway.clone(), self.epoch);
                let is_open = (row.next()?, row.next()?, row.next()?) == open;
                if is_open { Ok(None) } else { Err(StoreError::NoRow) }
            }
            // The group fails, and the others are written without it.
            (LedgerWrite::Finish(_), None) | (LedgerWrite::Record(_), Some(_)) => Err(StoreError::NoRow),
        };
        let each = group.iter().zip(found).map(result).collect::<Result<Vec<_>>>()?;
        let links = head.links(&finished);
        let proof = match links.first() {
            Some(first) => Some((finished[0].request_id.clone(), Some(first.hash))),
            None => each.iter().flatten().next().map(|begun| (begun.row.request_id.clone(), None)),
        };
        let new_row = |(write, begun): (&&LedgerWrite, &Option<BegunRow>)| match (write, begun) {
            (LedgerWrite::Begin(_), Some(begun)) => Some(self.insert(&begun.row)),
            (LedgerWrite::Record(row), _) => Some(self.insert(&row.as_new())),
            _ => None,
        };
        let mut writes: Vec<Statement> = group.iter().zip(&each).filter_map(new_row).collect();
        writes.extend(chained(&self.gateway, &finished, &links));
        writes.extend(sums.writes());
        Ok((GroupWritten { each, proof }, writes))
    }

    /// Keeps every other process from writing rows of a gateway until the transaction ends. Returns the end of its chain.
    pub(super) fn lock_gateway(
        &self,
        session: &dyn SqlSession,
        gateway: &str,
        epoch: i64,
    ) -> Result<ChainLink> {
        session
            .first(self.engine.locking(LOCK), &values![gateway, epoch], ChainLink::read)?
            .ok_or(StoreError::Fenced)
    }

    fn insert(&self, row: &NewRow) -> Statement {
        let mut parameters = values![&row.request_id, &row.key_id, &row.key_name, row.created].to_vec();
        parameters.extend(self.identity());
        Statement::new(INSERT, parameters)
    }

    /// The name and the epoch that every write of a row carries.
    fn identity(&self) -> [SqlValue; 2] {
        values![&self.gateway, self.epoch]
    }

    pub fn find_row(&self, request_id: &str) -> Result<Option<LedgerRow>> {
        let statement = format!("SELECT {COLUMNS} FROM usage WHERE request_id = $1");
        self.engine.read(|session| session.first(&statement, &values![request_id], read_row))
    }

    /// The time when the newest row was created.
    pub fn newest_row(&self) -> Result<Option<i64>> {
        let newest = "SELECT created FROM usage ORDER BY request_id DESC LIMIT 1";
        self.engine.read(|session| session.first(newest, &[], |mut row| row.next()))
    }
}

impl RowRequest {
    /// Reads its key, with the budget of the period in which its tokens count: that of `created`. Returns `None` if the key
    /// was revoked, has expired, lacks the permission or has used the budget.
    fn read(&self, row: Row) -> Result<Option<BegunRow>> {
        let key = read_key(row)?;
        let is_accepted = key.is_valid(when::now())
            && key.permissions.contains(&Permission::Completions)
            && !key.budget.is_some_and(|budget| budget.is_used_up());
        let (request_id, created) = (self.request_id.clone(), self.created);
        let row = NewRow { request_id, key_id: key.id, key_name: key.name, created };
        Ok(is_accepted.then_some(BegunRow { row, concurrent: key.concurrent }))
    }
}

impl GroupWritten {
    /// Returns whether the group was committed although the answer was lost.
    fn is_done(&self, session: &dyn SqlSession) -> Result<bool> {
        let Some((request_id, hash)) = &self.proof else {
            return Ok(true);
        };
        let find = "SELECT hash FROM usage WHERE request_id = $1";
        let found = session.first(find, &values![request_id], |mut row| row.next::<Option<[u8; 32]>>())?;
        Ok(found.is_some_and(|found| hash.is_none() || found == *hash))
    }
}

/// Statements that finish open rows of a gateway in their places of its chain, and write its new head.
fn chained(gateway: &str, rows: &[&LedgerRow], links: &[ChainLink]) -> Vec<Statement> {
    let finish = |(row, link): (&&LedgerRow, &ChainLink)| Statement::new(FINISH, row.values(*link));
    let mut statements: Vec<Statement> = rows.iter().zip(links).map(finish).collect();
    statements
        .extend(links.last().map(|head| Statement::new(MOVE_HEAD, values![head.seq, head.hash, gateway])));
    statements
}

/// Closes open rows of a gateway that is locked, up to an epoch: marks them as interrupted, seals them after `head` and
/// adds them to the sums. Returns how many they were; if there are more, they are left.
pub(super) fn interrupt(
    session: &dyn SqlSession,
    gateway: &str,
    epoch: i64,
    head: ChainLink,
) -> Result<usize> {
    let mut rows = session.rows(&select_open_rows(), &values![gateway, epoch], read_row)?;
    rows.iter_mut().for_each(|row| row.error_code = Some("interrupted".into()));
    let rows: Vec<&LedgerRow> = rows.iter().collect();
    let statements = chained(gateway, &rows, &head.links(&rows));
    session.run(&bound(&statements), &mut |_, _| Ok(()))?;
    let mut sums = Batch::default();
    rows.iter().for_each(|row| sums.add(row));
    sums.write(session)?;
    Ok(rows.len())
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::{Mutex, mpsc};
    use std::thread;

    use super::*;
    use crate::error::FailureCause;
    use crate::id::RequestId;
    use crate::store::tests::Temporary;
    use crate::store::{Tokens, chain};

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

    pub fn outcome(status: u16, total_tokens: Option<i64>) -> LedgerOutcome {
        LedgerOutcome {
            status: Some(status),
            error_code: (status != 200).then_some("inference_error"),
            cause: (status != 200).then_some(FailureCause::Timeout),
            tokens: Tokens { prompt_tokens: None, completion_tokens: Some(1), total_tokens },
            duration_ms: 2.5,
            queue_ms: 0.5,
            runtime_ms: Some(1.0),
            grounded: false,
            search: None,
        }
    }

    impl Store {
        /// Begins a row of a key whose secret is its id, as `Temporary` makes them.
        pub fn begin_row(&self, row: &NewRow) -> Result<NewRow> {
            let digest = SecretDigest::of(&row.key_id);
            self.begin(&row.request_id, row.created, &digest).map(|begun| begun.row)
        }
    }

    /// Begins and finishes a row.
    pub fn write(store: &Store, end: &str, key: &str, created: i64, status: u16, total: Option<i64>) {
        store.begin_row(&row(end, key, created)).expect("a new row");
        store.finish(&row(end, key, created), &outcome(status, total)).expect("its outcome");
    }

    #[test]
    fn a_row_from_its_beginning_to_its_outcome() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let find = || store.find_row(&id("a", 7)).expect("a look-up").expect("the row");
        store.begin_row(&row("a", "key_1", 7)).expect("a new row");
        assert_eq!((find().status, find().seq, find().created), (None, None, 7));
        store.finish(&row("a", "key_1", 7), &outcome(200, Some(5))).expect("its outcome");
        assert_eq!((find().status, find().seq, find().tokens.total_tokens), (Some(200), Some(1), Some(5)));
        assert_eq!((find().duration_ms, find().key_name.as_str()), (Some(2.5), "name of key_1"));
        assert!(store.finish(&row("a", "key_1", 7), &outcome(200, None)).is_err(), "once only");
        assert!(store.begin_row(&row("a", "key_1", 7)).is_err(), "a request has one row");
        assert!(store.find_row("b").expect("a look-up").is_none());
        assert_eq!(store.newest_row().expect("a look-up"), Some(7));
    }

    #[test]
    fn a_row_that_is_gone_is_not_acknowledged() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        store.begin_row(&row("a", "key_1", 1)).expect("a new row");
        store.tamper("DELETE FROM usage");
        assert!(matches!(store.finish(&row("a", "key_1", 1), &outcome(200, None)), Err(StoreError::NoRow)));
    }

    #[test]
    fn what_a_crash_left_open_is_interrupted_once() {
        let mut temporary = Temporary::new();
        let store = &mut temporary.store;
        store.begin_row(&row("a", "key_1", 1)).expect("a new row");
        store.record(&row("b", "key_1", 1), &outcome(400, None)).expect("a refused one");
        store.begin_row(&row("c", "key_1", 1)).expect("a new row");
        assert_eq!(store.join("", "").expect("a start"), 2);
        assert_eq!(store.join("", "").expect("a start"), 0);
        let found = store.find_row(&id("c", 1)).expect("a look-up").expect("the row");
        assert_eq!(
            (found.status, found.error_code.as_deref(), found.seq),
            (None, Some("interrupted"), Some(3))
        );
    }

    /// The key's name in the table counts, not the one that was looked up before.
    #[test]
    fn a_row_has_the_name_that_its_key_has_when_it_begins() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        store.tamper("UPDATE keys SET name = 'renamed'");
        let begun = store.begin_row(&row("a", "key_1", 1)).expect("a new row");
        store.finish(&begun, &outcome(200, None)).expect("its outcome");
        let found = store.find_row(&id("a", 1)).expect("a look-up").expect("the row");
        assert_eq!((begun.key_name.as_str(), found.key_name.as_str()), ("renamed", "renamed"));
        assert_eq!(store.verify().expect("a walk").fault, None);
    }

    #[test]
    fn the_last_use_is_noted_and_never_goes_back() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let last_used = || {
            store.write_uses().expect("a write");
            store.key("key_1").expect("a look-up").expect("the key").last_used
        };
        assert_eq!(last_used(), None);
        write(store, "a", "key_1", 50, 200, None);
        store.record(&row("b", "key_1", 70), &outcome(400, None)).expect("a refused one");
        write(store, "c", "key_1", 60, 200, None);
        assert_eq!(last_used(), Some(70));
        write(store, "d", "key_1", 65, 200, None);
        assert_eq!(last_used(), Some(70));
    }

    const SNAPSHOTS: i64 = 2_000;

    /// Everything that there is to know about finished rows is in one transaction: whenever one looks, it is all there.
    #[test]
    fn in_every_snapshot_the_sums_equal_the_rows() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        // One row for so many snapshots: each of them reads all rows.
        let (more, wanted) = mpsc::sync_channel::<i64>(1);
        let wanted = Mutex::new(wanted);
        // Minutes are kept for two hours.
        let first = when::now() - 3000;
        let write_rows = || {
            while let Ok(number) = { wanted.lock().expect("no panic").recv() } {
                let (end, created) = (number.to_string(), first + number * 10);
                match number % 4 {
                    3 => store.record(&row(&end, "key_2", created), &outcome(400, None)).expect("a row"),
                    _ => write(store, &end, "key_1", created, 200, Some(number)),
                }
            }
        };
        thread::scope(|scope| {
            (0..4).for_each(|_| drop(scope.spawn(write_rows)));
            // The writers end with the scope's last look, or with its panic.
            let more = more;
            for number in 0..SNAPSHOTS {
                if number % 10 == 0 {
                    more.send(number / 10).expect("a writer");
                }
                store.engine.read(ensure_consistent).unwrap_or_else(|error| panic!("{error}"));
            }
        });
        assert_eq!(store.value::<i64>("SELECT count(seq) FROM usage"), SNAPSHOTS / 10);
    }

    /// Fails if the sums are not those of the finished rows, if a number is missing in the chain, or if it does not verify.
    fn ensure_consistent(session: &dyn SqlSession) -> Result<()> {
        let counted = "SELECT span, created / span * span, key_id, coalesce(status, 0), coalesce(error_code, ''), count(*),
            coalesce(sum(prompt_tokens), 0), coalesce(sum(completion_tokens), 0), coalesce(sum(total_tokens), 0)
            FROM usage, (SELECT 60 AS span UNION SELECT 3600 UNION SELECT 86400) AS spans
            WHERE seq IS NOT NULL GROUP BY 1, 2, 3, 4, 5";
        let kept = "SELECT span, start, key_id, status, error_code, requests, prompt_tokens, completion_tokens, total_tokens
            FROM usage_rollup";
        let differing = format!(
            "SELECT (SELECT count(*) FROM ({counted} EXCEPT {kept}) AS a) + (SELECT count(*) FROM ({kept} EXCEPT {counted}) AS b)"
        );
        let gaps = "SELECT coalesce(max(seq), 0) - count(seq) FROM usage";
        let found: (i64, i64) = (session.value(&differing, &[])?, session.value(gaps, &[])?);
        let fault = chain::verify(session, when::now())?.fault;
        if found == (0, 0) && fault.is_none() {
            return Ok(());
        }
        Err(StoreError::Other(format!("{} sums differ, {} numbers are missing, {fault:?}", found.0, found.1)))
    }
}
