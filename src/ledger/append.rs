//! The ledger: one row for every request with a valid key, appended once, with its outcome.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use super::availability::Availability;
use super::chain::ChainLink;
use super::group_commit::{GroupCommit, NotWritten};
use super::rollup::Batch;
use super::row::{COLUMNS, INSERT, LedgerRow, read_row};
use crate::database::{
    Database, DatabaseError, Result, Session, Statement, TransactionMode, values,
};

/// Reads the head of a gateway's chain; `lock_chain` adds the row lock. Finds nothing if the epoch
/// has changed.
const READ_HEAD: &str = "SELECT head_seq, head_hash FROM gateways WHERE name = $1 AND epoch = $2";

const MOVE_HEAD: &str = "UPDATE gateways SET head_seq = $1, head_hash = $2 WHERE name = $3";

/// A key that is not revoked has the largest time.
const READ_KEY: &str = "SELECT id, coalesce(revoked, 9223372036854775807) FROM keys WHERE id = $1";

/// A group that was sent to the database: the head of the chain after it, and the result for each
/// row, some of which may be left out.
#[derive(Clone)]
struct SentGroup {
    head: ChainLink,
    results: Vec<Result<()>>,
}

/// The times when keys were revoked, by id.
type RevocationTimes = BTreeMap<String, i64>;

pub struct Ledger {
    pub(super) database: Arc<Database>,
    /// The name and the epoch under which this process writes rows. Both have a row in the table
    /// `gateways`.
    pub(super) gateway: String,
    pub(super) epoch: i64,
    /// Rows that wait for the leader of their group.
    appends: GroupCommit<LedgerRow, Result<()>>,
    pub(super) availability: Availability,
}

impl Ledger {
    /// The ledger of a process that is not a gateway: it only reads, until it joins.
    pub fn new(database: Arc<Database>) -> Self {
        Self {
            database,
            gateway: String::new(),
            epoch: 0,
            appends: GroupCommit::default(),
            availability: Availability::default(),
        }
    }

    /// Writes a row, with its place in the chain, and adds it to the sums. All of it is synced to
    /// disk when this returns: by PostgreSQL, or by the COMMIT in `SqliteTransaction::run_and_commit`.
    /// It shares its transaction with the rows that wait at the same time.
    pub fn append(&self, mut row: LedgerRow) -> Result<()> {
        row.gateway.clone_from(&self.gateway);
        let write = |group: &[&LedgerRow], deadline| self.write_group(group, deadline);
        let written = self
            .appends
            .submit(row, self.database.append_timeout(), write);
        self.database.checkpoint_if_due();
        written.unwrap_or_else(|reason| {
            let error = match reason {
                NotWritten::Late => DatabaseError::Busy,
                NotWritten::Panicked => DatabaseError::Panicked,
            };
            self.availability.note_group(&[Err(error.clone())]);
            Err(error)
        })
    }

    /// The reason why a row could not be written now; `None` if that is not known without a try.
    pub fn outage(&self) -> Option<DatabaseError> {
        self.database
            .lost()
            .or_else(|| self.availability.failure(self.appends.waiting_since()))
    }

    fn write_group(&self, group: &[&LedgerRow], deadline: Instant) -> Vec<Result<()>> {
        let results = match self.write_in_one_transaction(group, deadline) {
            Ok(results) => results,
            Err(error) if error.fails_every_row() || group.len() == 1 => {
                vec![Err(error); group.len()]
            }
            // Tries each row alone, to find the failing one.
            Err(_) => {
                let alone = |row| {
                    self.write_in_one_transaction(&[row], deadline)
                        .and_then(|mut one| one.remove(0))
                };
                group.iter().copied().map(alone).collect()
            }
        };
        self.availability.note_group(&results);
        results
    }

    /// Writes rows in one transaction: all of them but those whose key is refused, or none.
    fn write_in_one_transaction(
        &self,
        group: &[&LedgerRow],
        deadline: Instant,
    ) -> Result<Vec<Result<()>>> {
        let work =
            |session: &Session, sent: Option<&SentGroup>| self.statements(session, group, sent);
        let (sent, _) = self
            .database
            .commit_with_retries(TransactionMode::Append(deadline), work)?;
        Ok(sent.results)
    }

    /// Locks the chain and returns the statements that add a group to it. If the answer to an
    /// earlier COMMIT was lost, the head of the chain says whether that group is part of it.
    fn statements(
        &self,
        session: &Session,
        group: &[&LedgerRow],
        sent: Option<&SentGroup>,
    ) -> Result<(SentGroup, Vec<Statement>)> {
        let (head, revoked) = self.lock_chain(session, self.epoch, group)?;
        if let Some(sent) = sent.filter(|sent| sent.head.hash == head.hash) {
            // It counts only with a commit of its own: the server may be a primary that was
            // replaced.
            return Ok((sent.clone(), vec![self.move_head(head)]));
        }
        // On PostgreSQL, once more: `api::key::authenticate` has checked the key of every request.
        let check_revocation = |row: &&LedgerRow| match &revoked {
            Some(keys)
                if keys
                    .get(&row.key_id)
                    .is_none_or(|time| *time <= row.created) =>
            {
                Err(DatabaseError::KeyRevoked)
            }
            _ => Ok(()),
        };
        let results: Vec<Result<()>> = group.iter().map(check_revocation).collect();
        let accepted = group
            .iter()
            .zip(&results)
            .filter(|(_, result)| result.is_ok())
            .map(|(row, _)| *row);
        let (head, statements) = self.append_after(head, accepted);
        Ok((SentGroup { head, results }, statements))
    }

    /// The statements that append rows to the chain after its head, and the new head.
    pub(super) fn append_after<'a>(
        &self,
        head: ChainLink,
        rows: impl IntoIterator<Item = &'a LedgerRow>,
    ) -> (ChainLink, Vec<Statement>) {
        let (mut head, mut sums, mut statements) = (head, Batch::default(), Vec::new());
        for row in rows {
            head = head.following(row);
            statements.push(Statement::new(INSERT, row.values(head.seq, head.hash)));
            sums.add(row);
        }
        if !statements.is_empty() {
            statements.extend(sums.upserts());
            statements.push(self.move_head(head));
        }
        (head, statements)
    }

    /// Keeps every other process from writing rows of this gateway until the transaction ends.
    /// Returns the head of its chain and, on PostgreSQL, when the keys of a group were revoked: the
    /// look-up of a key may have been answered by a primary that was replaced.
    pub(super) fn lock_chain(
        &self,
        session: &Session,
        epoch: i64,
        group: &[&LedgerRow],
    ) -> Result<(ChainLink, Option<RevocationTimes>)> {
        let mut statements = vec![Statement::new(
            format!(
                "{READ_HEAD} {}",
                self.database.row_lock("FOR NO KEY UPDATE")
            ),
            values![&self.gateway, epoch],
        )];
        let mut revoked = None;
        if self.database.sqlite().is_none() {
            revoked = Some(RevocationTimes::new());
            let keys: BTreeSet<&str> = group.iter().map(|row| row.key_id.as_str()).collect();
            let read_key = |key| Statement::new(READ_KEY, values![key]);
            statements.extend(keys.into_iter().map(read_key));
        }
        let mut head = None;
        session.run(&statements, &mut |number, mut row| {
            if number == 0 {
                head = Some(ChainLink::read(row)?);
            } else if let Some(revoked) = &mut revoked {
                revoked.insert(row.column()?, row.column()?);
            }
            Ok(())
        })?;
        match head {
            Some(head) => Ok((head, revoked)),
            // Another process has raised the epoch, or the gateway's row is gone.
            None => Err(self
                .identify(session)
                .err()
                .unwrap_or(DatabaseError::Fenced)),
        }
    }

    pub(super) fn move_head(&self, ChainLink { seq, hash }: ChainLink) -> Statement {
        Statement::new(MOVE_HEAD, values![seq, hash, &self.gateway])
    }

    pub fn find_row(&self, request_id: &str) -> Result<Option<LedgerRow>> {
        let statement = format!("SELECT {COLUMNS} FROM usage WHERE request_id = $1");
        self.database
            .look_up(&statement, &values![request_id], read_row)
    }

    /// The time when the newest row was created.
    pub fn newest_row(&self) -> Result<Option<i64>> {
        let newest = "SELECT created FROM usage ORDER BY request_id DESC LIMIT 1";
        self.database.look_up(newest, &[], |mut row| row.column())
    }
}

#[cfg(test)]
pub mod tests {
    use std::sync::{Mutex, mpsc};
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::id::RequestId;
    use crate::ledger::{Filter, Tokens, verify};
    use crate::store::Store;
    use crate::store::tests::{Temporary, while_writing};
    use crate::when::{self, Range};

    /// The id of a row that was created at a second, with an end of its own.
    pub fn id(end: &str, created: i64) -> String {
        RequestId::from(created) + end
    }

    /// The row of a completion.
    pub fn row(end: &str, key_id: &str, created: i64) -> LedgerRow {
        LedgerRow {
            request_id: id(end, created),
            key_id: key_id.into(),
            key_name: format!("name of {key_id}"),
            created,
            status: Some(200),
            tokens: Tokens {
                prompt_tokens: None,
                completion_tokens: Some(1),
                total_tokens: None,
            },
            duration_ms: Some(2.5),
            queue_ms: Some(0.5),
            runtime_ms: Some(1.0),
            ..LedgerRow::default()
        }
    }

    /// The same with an outcome; any other status than 200 is that of a timeout.
    pub fn with_outcome(row: LedgerRow, status: i64, total_tokens: Option<i64>) -> LedgerRow {
        let is_error = status != 200;
        LedgerRow {
            status: Some(status),
            error_code: is_error.then(|| "inference_error".into()),
            cause: is_error.then(|| "timeout".into()),
            tokens: Tokens {
                total_tokens,
                ..row.tokens
            },
            ..row
        }
    }

    pub fn write(
        store: &Store,
        end: &str,
        key: &str,
        created: i64,
        status: i64,
        total: Option<i64>,
    ) {
        store
            .ledger
            .append(with_outcome(row(end, key, created), status, total))
            .expect("a row");
    }

    #[test]
    fn a_row_comes_back_as_it_was_written() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let full = LedgerRow {
            status: Some(502),
            error_code: Some("inference_error".into()),
            tokens: Tokens {
                prompt_tokens: Some(1),
                completion_tokens: Some(2),
                total_tokens: Some(3),
            },
            grounded: true,
            search_reason: Some("match".into()),
            search_results: Some(4),
            search_ms: Some(0.25),
            cause: Some("timeout".into()),
            ..row("a", "key_1", 7)
        };
        let bare = LedgerRow {
            status: None,
            duration_ms: None,
            runtime_ms: None,
            ..row("b", "key_2", 8)
        };
        for (seq, row) in [(1, full), (2, bare)] {
            store.ledger.append(row.clone()).expect("a row");
            let found = store.ledger.find_row(&row.request_id).expect("a look-up");
            assert_eq!(
                found,
                Some(LedgerRow {
                    seq: Some(seq),
                    ..row
                })
            );
        }
        assert!(
            store.ledger.append(row("a", "key_1", 7)).is_err(),
            "a request has one row"
        );
        assert!(store.ledger.find_row("c").expect("a look-up").is_none());
        assert_eq!(store.ledger.newest_row().expect("a look-up"), Some(8));
        assert_eq!(store.ledger.verify().expect("a walk").fault, None);
    }

    #[test]
    fn rows_that_wait_share_a_transaction_and_a_failing_one_fails_alone() {
        let mut temporary = Temporary::new();
        temporary.reopen(Duration::from_secs(60));
        let store = &temporary.store;
        write(store, "x", "key_1", 4, 200, None);
        let lock = |session: &Session| {
            store
                .ledger
                .lock_chain(session, store.ledger.epoch, &[])
                .map(drop)
        };
        let results = thread::scope(|scope| {
            let mut writers = Vec::new();
            while_writing(&store.database, lock, || {
                for created in 1..=6 {
                    writers
                        .push(scope.spawn(move || store.ledger.append(row("x", "key_1", created))));
                    // The first one leads, and waits for the lock. The others gather.
                    while store.ledger.appends.waiting() != (true, created as usize - 1) {
                        thread::yield_now();
                    }
                }
            });
            writers
                .into_iter()
                .map(|writer| writer.join().expect("no panic"))
                .collect::<Vec<_>>()
        });
        for (created, result) in (1..).zip(&results) {
            assert_eq!(result.is_ok(), created != 4, "{result:?}");
        }
        assert!(store.ledger.outage().is_none(), "the others were written");
        let found = store.ledger.verify().expect("a walk");
        assert_eq!(
            (found.rows, found.fault),
            (6, None),
            "the failed one has taken no number"
        );
        assert_eq!(
            store
                .ledger
                .sums(Range::ALL, Filter::ALL)
                .expect("the figures")
                .requests,
            6
        );
    }

    #[test]
    fn a_row_whose_time_is_over_is_not_written_and_the_ledger_is_unavailable() {
        let mut temporary = Temporary::sqlite();
        temporary.reopen(Duration::from_millis(30));
        let store = &temporary.store;
        while_writing(
            &store.database,
            |_| Ok(()),
            || {
                thread::scope(|scope| {
                    let writers = [1, 2, 3].map(|created| {
                        scope.spawn(move || store.ledger.append(row("x", "key_1", created)))
                    });
                    for writer in writers {
                        assert!(matches!(
                            writer.join().expect("no panic"),
                            Err(DatabaseError::Busy)
                        ));
                    }
                });
                assert!(matches!(store.ledger.outage(), Some(DatabaseError::Busy)));
            },
        );
        temporary.reopen(Duration::from_secs(60));
        let store = &temporary.store;
        write(store, "y", "key_1", 4, 200, None);
        assert!(store.ledger.outage().is_none(), "a row was written");
        assert_eq!(store.ledger.verify().expect("a walk").rows, 1);
    }

    #[test]
    fn what_every_row_would_meet_makes_the_ledger_unavailable_until_a_test_succeeds() {
        let temporary = Temporary::sqlite();
        let store = &temporary.store;
        let trigger = "CREATE TRIGGER fail BEFORE INSERT ON usage BEGIN SELECT RAISE(ABORT, 'on purpose'); END";
        store
            .database
            .transaction(|session| session.execute(trigger, &[]))
            .expect("a trigger");
        store
            .ledger
            .append(row("x", "key_1", 1))
            .expect_err("it fails");
        assert!(
            store
                .ledger
                .outage()
                .is_some_and(|error| error.to_string().contains("on purpose"))
        );
        store.ledger.test_write();
        assert!(store.ledger.outage().is_some(), "the test fails too");
        store.tamper("DROP TRIGGER fail");
        assert!(
            store.ledger.outage().is_some(),
            "until something is written"
        );
        store.ledger.test_write();
        assert!(store.ledger.outage().is_none());
        assert_eq!(store.value::<i64>("SELECT count(*) FROM usage"), 0);
        assert_eq!(store.value::<i64>("SELECT count(*) FROM usage_rollup"), 0);
    }

    const SNAPSHOTS: i64 = 2_000;

    /// Everything that there is to know about a row is in one transaction: whenever one looks, it
    /// is all there.
    #[test]
    fn in_every_snapshot_the_sums_equal_the_rows() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        // One row for so many snapshots: each of them reads all rows.
        let (more, wanted) = mpsc::sync_channel::<i64>(1);
        let wanted = Mutex::new(wanted);
        let first = when::now() - 3000;
        let write_rows = || {
            while let Ok(number) = { wanted.lock().expect("no panic").recv() } {
                let (end, created) = (number.to_string(), first + number * 10);
                match number % 4 {
                    3 => write(store, &end, "key_2", created, 400, None),
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
                store
                    .database
                    .read(ensure_consistent)
                    .unwrap_or_else(|error| panic!("{error}"));
            }
        });
        assert_eq!(
            store.value::<i64>("SELECT count(seq) FROM usage"),
            SNAPSHOTS / 10
        );
    }

    /// Fails if the sums are not those of the rows, if a number is missing in the chain, or if it
    /// does not verify.
    fn ensure_consistent(session: &Session) -> Result<()> {
        let counted = "SELECT span, created / span * span, key_id, coalesce(status, 0), coalesce(error_code, ''), count(*),
            coalesce(sum(prompt_tokens), 0), coalesce(sum(completion_tokens), 0), coalesce(sum(total_tokens), 0)
            FROM usage, (SELECT 3600 AS span UNION SELECT 86400) AS spans GROUP BY 1, 2, 3, 4, 5";
        let kept = "SELECT span, start, key_id, status, error_code, requests, prompt_tokens, completion_tokens, total_tokens
            FROM usage_rollup";
        let differing = format!(
            "SELECT (SELECT count(*) FROM ({counted} EXCEPT {kept}) AS a) + (SELECT count(*) FROM ({kept} EXCEPT {counted}) AS b)"
        );
        let gaps = "SELECT coalesce(max(seq), 0) - count(seq) FROM usage";
        let found: (i64, i64) = (session.value(&differing, &[])?, session.value(gaps, &[])?);
        let fault = verify(session, &crate::progress::Progress::hidden())?.fault;
        if found == (0, 0) && fault.is_none() {
            return Ok(());
        }
        Err(DatabaseError::Other(format!(
            "{} sums differ, {} numbers are missing, {fault:?}",
            found.0, found.1
        )))
    }

    /// On SQLite, the look-up of the key has seen every revocation.
    #[test]
    #[cfg(feature = "test-postgres")]
    fn a_completion_of_a_key_that_was_revoked_before_the_request_is_not_written() {
        let temporary = Temporary::postgres();
        let store = &temporary.store;
        store.tamper("UPDATE keys SET revoked = 100 WHERE id = 'key_1'");
        assert!(matches!(
            store.ledger.append(row("a", "key_1", 100)),
            Err(DatabaseError::KeyRevoked)
        ));
        assert!(
            matches!(
                store.ledger.append(row("a", "key_0", 100)),
                Err(DatabaseError::KeyRevoked)
            ),
            "no such key"
        );
        assert!(store.ledger.outage().is_none(), "the ledger is fine");
        store
            .ledger
            .append(row("b", "key_1", 99))
            .expect("it was valid when the request arrived");
        let rows = [
            row("c", "key_1", 200),
            row("d", "key_2", 200),
            row("e", "key_1", 99),
        ];
        let results = store
            .ledger
            .write_in_one_transaction(&rows.each_ref(), Instant::now() + Duration::from_secs(60))
            .expect("a transaction");
        assert!(
            matches!(
                results[..],
                [Err(DatabaseError::KeyRevoked), Ok(()), Ok(())]
            ),
            "{results:?}"
        );
        let found = store.ledger.verify().expect("a walk");
        assert_eq!((found.rows, found.fault), (3, None));
    }
}
