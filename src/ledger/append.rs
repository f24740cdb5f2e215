//! The ledger: one row for every request with a valid key, appended once, with its outcome. A row,
//! its place in the chain and its part of the sums are one transaction, which it shares with the rows
//! that wait at the same time.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::days::Batch;
use super::queue::{ROW_TIMEOUT, WaitingRow, WriteQueue};
use super::{COLUMNS, ChainLink, LedgerRow, SCHEMA};
use crate::database::{
    CHANGE_TIMEOUT, Database, Session, Statement, Work, WriteConnection, values,
};
use crate::error::{Problem, ProblemKind, Result};
use crate::id::RequestId;
use crate::locks::lock;
use crate::secret::SecretDigest;
use crate::when::Zone;

/// Any key, found as the look-up of a request finds it.
pub(super) const ANY_KEY: &str =
    "SELECT key_id FROM key_secrets JOIN keys ON keys.id = key_id ORDER BY digest LIMIT 1";

pub struct Ledger {
    pub(super) database: Arc<Database>,
    /// The name and the epoch under which this process writes rows. Both have a row in the table
    /// `gateways`.
    pub(super) gateway: String,
    pub(super) epoch: i64,
    pub zone: Zone,
    pub(super) queue: WriteQueue,
    pub(super) retention_trouble: Mutex<Option<String>>,
}

/// A group that was sent to the database: the head of the chain after it, and the result for each
/// row, some of which may be left out.
struct SentGroup {
    head: ChainLink,
    results: Vec<Result<()>>,
}

/// The heads that the chain in a file may have, as far as this process knows: it alone moves the
/// head. Two after a commit that failed, none before the first look.
#[derive(Default)]
pub(super) struct KnownHeads(RefCell<Vec<[u8; 32]>>);

impl KnownHeads {
    /// Returns false if the head of the chain is none of them. Else it is the only one from now on.
    fn accept(&self, head: [u8; 32]) -> bool {
        let mut heads = self.0.borrow_mut();
        let is_known = heads.is_empty() || heads.contains(&head);
        if is_known {
            *heads = vec![head];
        }
        is_known
    }

    fn add_sent(&self, head: [u8; 32]) {
        self.0.borrow_mut().push(head);
    }
}

/// When the key of a secret was revoked, and when the secret was replaced.
type EndTimes = BTreeMap<[u8; 32], (i64, i64)>;

impl Ledger {
    /// The ledger of a process that is not a gateway: it only reads, until it joins.
    pub fn new(database: Arc<Database>, zone: Zone) -> Self {
        Self {
            database,
            gateway: String::new(),
            epoch: 0,
            zone,
            queue: WriteQueue::default(),
            retention_trouble: Mutex::default(),
        }
    }

    /// Writes a row, with its place in the chain, and adds it to the sums. All of it is synced to
    /// disk when this returns: by PostgreSQL, or by the COMMIT in `SqliteSession::commit`. On
    /// PostgreSQL the key of the secret is read again.
    pub fn append(&self, mut row: LedgerRow, secret: Option<&SecretDigest>) -> Result<()> {
        row.gateway.clone_from(&self.gateway);
        row.day = self.zone.date(row.created).to_string();
        // On SQLite the look-up of the key has read the one database there is.
        let secret = secret.filter(|_| self.database.sqlite().is_none());
        match self.queue.append(WaitingRow::new(row, secret.copied())) {
            Ok(result) => result,
            // A process without a writer thread writes it by itself.
            Err(row) => self.database.with_writer(|connection| {
                let known = &KnownHeads::default();
                self.write_group(connection, known, &[row], |_| ())
                    .remove(0)
            }),
        }
    }

    /// The reason why a row could not be written now; `None` if that is not known without a try.
    pub fn outage(&self) -> Option<Problem> {
        self.queue.outage()
    }

    /// The same for a health probe, which has a test write made.
    pub fn probe(&self) -> Option<Problem> {
        self.queue.probe()
    }

    /// The reason why retention removes nothing, though it should.
    pub fn retention_trouble(&self) -> Option<String> {
        lock(&self.retention_trouble).clone()
    }

    /// Writes rows in one transaction; if it fails because of one row, each in its own. `between`
    /// runs between two attempts.
    pub(super) fn write_group(
        &self,
        connection: &mut WriteConnection,
        known: &KnownHeads,
        group: &[WaitingRow],
        mut between: impl FnMut(&mut WriteConnection),
    ) -> Vec<Result<()>> {
        let mut write = |rows: &[WaitingRow]| {
            // The first one has waited longest.
            let deadline = rows[0].since + ROW_TIMEOUT;
            self.write_once(connection, known, rows, deadline, &mut between)
        };
        match write(group) {
            Ok(results) => results,
            Err(problem) if problem.kind != ProblemKind::Other || group.len() == 1 => {
                vec![Err(problem); group.len()]
            }
            // Tries each row alone, to find the failing one.
            Err(_) => {
                let rows = group.iter().map(std::slice::from_ref);
                rows.map(|row| write(row).and_then(|mut one| one.remove(0)))
                    .collect()
            }
        }
    }

    /// Writes rows in one transaction: all of them but those whose key is refused, or none.
    pub(super) fn write_once(
        &self,
        connection: &mut WriteConnection,
        known: &KnownHeads,
        group: &[WaitingRow],
        deadline: Instant,
        between: impl FnMut(&mut WriteConnection),
    ) -> Result<Vec<Result<()>>> {
        let is_file = connection.sqlite().is_some();
        let written = connection.commit(deadline, between, |session, before: Option<&SentGroup>| {
            let (head, ends) = self.lock_chain(session, self.epoch, group)?;
            if let Some(before) = before.filter(|before| before.head.hash == head.hash) {
                return Ok(Work::WasDone(vec![self.move_head(before.head)]));
            }
            if is_file && !known.accept(head.hash) {
                return Err(Problem::new(
                    ProblemKind::Unsafe,
                    "another program has changed the ledger under the running service, so nothing more is written: restore a \
                     backup, then restart",
                ));
            }
            let results: Vec<Result<()>> = group.iter().map(|row| check_key_still_valid(row, &ends)).collect();
            let accepted = group.iter().zip(&results).filter(|(_, result)| result.is_ok());
            let (head, mut statements) = self.append_after(head, accepted.map(|(row, _)| &*row.row));
            if group.is_empty() {
                // It waits for a lock on the table of the rows, as they would.
                let nothing = "INSERT INTO usage SELECT * FROM usage WHERE request_id = ''";
                statements.push(Statement::new(nothing, []));
            }
            known.add_sent(head.hash);
            Ok(Work::Done(SentGroup { head, results }, statements))
        });
        let SentGroup { head, results } = written?;
        known.accept(head.hash);
        Ok(results)
    }

    /// The statements that append rows to the chain after its head, and the new head.
    fn append_after<'a>(
        &self,
        head: ChainLink,
        rows: impl IntoIterator<Item = &'a LedgerRow>,
    ) -> (ChainLink, Vec<Statement>) {
        let insert = format!(
            "INSERT INTO usage ({COLUMNS}) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17,
                 $18, $19, $20, $21)"
        );
        let (mut head, mut sums, mut statements) = (head, Batch::default(), Vec::new());
        for row in rows {
            let (values, link) = head.append(row);
            head = link;
            statements.push(Statement::new(insert.clone(), values));
            sums.add(row);
        }
        statements.extend(sums.upserts());
        statements.push(self.move_head(head));
        (head, statements)
    }

    /// Keeps every other process from writing rows of this gateway until the transaction ends.
    /// Returns the head of its chain, and the end times of the secrets of a group: the look-up of a
    /// key may have been answered by a primary that was replaced.
    fn lock_chain(
        &self,
        session: &Session,
        epoch: i64,
        group: &[WaitingRow],
    ) -> Result<(ChainLink, EndTimes)> {
        let head = format!(
            "SELECT head_seq, head_hash FROM gateways WHERE name = $1 AND epoch = $2 {}",
            self.database.row_lock("FOR NO KEY UPDATE")
        );
        // A key that is not revoked, and a secret that is not replaced, have the largest time.
        let ends = "SELECT s.digest, coalesce(k.revoked, 9223372036854775807), coalesce(s.ends, 9223372036854775807)
             FROM key_secrets AS s JOIN keys AS k ON k.id = s.key_id WHERE s.digest = $1";
        let digests = group.iter().filter_map(|row| row.secret.as_ref());
        let digests: BTreeSet<[u8; 32]> = digests.map(|digest| digest.0).collect();
        let mut statements = vec![Statement::new(head, values![&self.gateway, epoch])];
        statements.extend(
            digests
                .iter()
                .map(|digest| Statement::new(ends, values![digest])),
        );
        let (mut head, mut ends) = (None, EndTimes::new());
        session.run(&statements, &mut |number, mut row| {
            match number {
                0 => head = Some(ChainLink::read(row)?),
                _ => drop(ends.insert(row.column()?, (row.column()?, row.column()?))),
            }
            Ok(())
        })?;
        match head {
            Some(head) => Ok((head, ends)),
            // Another process has raised the epoch, or the gateway's row is gone.
            None => Err(self.identify(session).err().unwrap_or_else(fenced)),
        }
    }

    /// Moves the head of the chain, which is a heartbeat too. SQLite would write nothing if no value
    /// changed, and a test write would not notice a full disk.
    fn move_head(&self, ChainLink { seq, hash }: ChainLink) -> Statement {
        let clock = self.database.clock();
        Statement::new(
            format!(
                "UPDATE gateways SET head_seq = $1, head_hash = $2, last_seen = {clock} WHERE name = $3"
            ),
            values![seq, hash, &self.gateway],
        )
    }

    /// Tests all that a request does to the database, in a process without a writer thread.
    pub fn try_request(&self) -> Result<()> {
        let deadline = Instant::now() + CHANGE_TIMEOUT;
        self.database
            .with_writer(|connection| self.try_row(connection, deadline))
    }

    /// Appends a row and removes it again, and commits that. The row has an existing key, if there
    /// is one: the operator may have added a foreign key.
    pub(super) fn try_row(
        &self,
        connection: &mut WriteConnection,
        deadline: Instant,
    ) -> Result<()> {
        let key_id = self
            .database
            .look_up(ANY_KEY, &[], |mut row| row.column::<String>())?
            .unwrap_or_default();
        let id = RequestId::now();
        let row = LedgerRow {
            request_id: id.to_string(),
            key_id,
            created: id.created(),
            day: self.zone.date(id.created()).to_string(),
            status: Some(200),
            // Its sums are not those of any request.
            error_code: Some(id.to_string()),
            gateway: self.gateway.clone(),
            ..LedgerRow::default()
        };
        let try_row = |session: &Session| {
            let epoch = self.identify(session)?;
            let (head, _) = self.lock_chain(session, epoch, &[])?;
            let (_, mut statements) = self.append_after(head, [&row]);
            statements.extend([
                Statement::new(
                    "DELETE FROM usage WHERE request_id = $1",
                    values![&row.request_id],
                ),
                Statement::new(
                    "DELETE FROM usage_days WHERE key_id = $1 AND day = $2 AND error_code = $3",
                    values![&row.key_id, &row.day, &row.error_code],
                ),
                self.move_head(head),
            ]);
            let changed = session.run(&statements, &mut |_, _| Ok(()))?;
            if changed.contains(&0) {
                Err(Problem::other("a row that was written is not there"))
            } else {
                Ok(())
            }
        };
        connection.transaction(deadline, None, try_row)
    }

    /// Returns the epoch of this gateway. Fails if another process has changed it, or the schema.
    pub(super) fn identify(&self, session: &Session) -> Result<i64> {
        SCHEMA.check_version(session)?;
        let epoch = "SELECT epoch FROM gateways WHERE name = $1";
        let epoch: Option<i64> =
            session.first(epoch, &values![&self.gateway], |mut row| row.column())?;
        match epoch {
            // A command that is not a gateway has no epoch of its own.
            Some(epoch) if self.epoch == 0 || epoch == self.epoch => Ok(epoch),
            Some(_) => Err(fenced()),
            None => Err(Problem::other(
                "the row of this gateway is missing in the table gateways: restore a backup, or restart the service, which \
                 inserts a new one",
            )),
        }
    }

    pub fn find_row(&self, request_id: &str) -> Result<Option<LedgerRow>> {
        let statement = format!("SELECT {COLUMNS} FROM usage WHERE request_id = $1");
        self.database
            .look_up(&statement, &values![request_id], LedgerRow::read)
    }

    /// The time when the newest row was created.
    pub fn newest_row(&self) -> Result<Option<i64>> {
        let newest = "SELECT created FROM usage ORDER BY request_id DESC LIMIT 1";
        self.database.look_up(newest, &[], |mut row| row.column())
    }

    /// The time by the database's clock.
    pub fn clock(&self) -> Result<i64> {
        let clock = format!("SELECT {}", self.database.clock());
        self.database.read(|session| session.value(&clock, &[]))
    }
}

/// Another gateway may have changed the key since its look-up. Fails if it was revoked, or its secret
/// replaced, before the request arrived. On SQLite no row comes with a secret.
fn check_key_still_valid(row: &WaitingRow, ends: &EndTimes) -> Result<()> {
    let Some(secret) = &row.secret else {
        return Ok(());
    };
    let created = row.row.created;
    let (kind, text) = match ends.get(&secret.0) {
        Some((revoked, replaced)) if *revoked > created && *replaced > created => return Ok(()),
        Some((revoked, _)) if *revoked > created => {
            (ProblemKind::KeyReplaced, "the secret was replaced")
        }
        _ => (ProblemKind::KeyRevoked, "the key was revoked"),
    };
    Err(Problem::new(kind, text))
}

pub(super) fn fenced() -> Problem {
    Problem::new(
        ProblemKind::Fenced,
        "another process serves under the name of this gateway",
    )
}

#[cfg(test)]
pub mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;
    use crate::id::RequestId;
    use crate::ledger::{Tokens, verify};
    use crate::store::Store;
    use crate::store::tests::Temporary;
    use crate::when;

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
            day: Zone::utc().date(created).to_string(),
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
            .append(with_outcome(row(end, key, created), status, total), None)
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
            store.ledger.append(row.clone(), None).expect("a row");
            let found = store.ledger.find_row(&row.request_id).expect("a look-up");
            assert_eq!(
                found,
                Some(LedgerRow {
                    seq: Some(seq),
                    day: "1970-01-01".into(),
                    ..row
                })
            );
        }
        assert!(
            store.ledger.append(row("a", "key_1", 7), None).is_err(),
            "a request has one row"
        );
        assert!(store.ledger.find_row("c").expect("a look-up").is_none());
        assert_eq!(store.ledger.newest_row().expect("a look-up"), Some(8));
        assert_eq!(store.ledger.verify().expect("a walk").fault, None);
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
        let counted = "SELECT day, key_id, coalesce(status, 0), coalesce(error_code, ''), count(*),
            coalesce(sum(prompt_tokens), 0), coalesce(sum(completion_tokens), 0), coalesce(sum(total_tokens), 0)
            FROM usage GROUP BY 1, 2, 3, 4";
        let kept = "SELECT day, key_id, status, error_code, requests, prompt_tokens, completion_tokens, total_tokens
            FROM usage_days";
        let differing = format!(
            "SELECT (SELECT count(*) FROM ({counted} EXCEPT {kept}) AS a) + (SELECT count(*) FROM ({kept} EXCEPT {counted}) AS b)"
        );
        let gaps = "SELECT coalesce(max(seq), 0) - count(seq) FROM usage";
        let found: (i64, i64) = (session.value(&differing, &[])?, session.value(gaps, &[])?);
        let fault = verify(session, &crate::progress::Progress::hidden())?.fault;
        if found == (0, 0) && fault.is_none() {
            return Ok(());
        }
        Err(Problem::other(format!(
            "{} sums differ, {} numbers are missing, {fault:?}",
            found.0, found.1
        )))
    }

    /// On SQLite, the look-up of the key has seen every revocation.
    #[test]
    #[cfg(feature = "test-postgres")]
    fn a_completion_of_a_refused_secret_is_not_written() {
        let temporary = Temporary::postgres();
        let store = &temporary.store;
        store.tamper("UPDATE keys SET revoked = 100 WHERE id = 'key_1'");
        store.tamper("UPDATE key_secrets SET ends = 100 WHERE key_id = 'key_2'");
        let append = |end: &str, key: &str, created: i64| {
            let secret = SecretDigest::of(key);
            store.ledger.append(row(end, key, created), Some(&secret))
        };
        for (key, kind) in [
            ("key_1", ProblemKind::KeyRevoked),
            ("key_2", ProblemKind::KeyReplaced),
            ("key_0", ProblemKind::KeyRevoked),
        ] {
            let refused = append("a", key, 100).expect_err(key);
            assert_eq!(refused.kind, kind, "{key}");
        }
        assert!(store.ledger.outage().is_none(), "the ledger is fine");
        append("b", "key_1", 99).expect("it was valid when the request arrived");
        append("c", "key_2", 99).expect("so was this one");
        let group = [("d", "key_1", 200), ("e", "key_1", 98), ("f", "key_2", 98)].map(
            |(end, key, created)| {
                WaitingRow::new(row(end, key, created), Some(SecretDigest::of(key)))
            },
        );
        let known = &KnownHeads::default();
        let write = |connection: &mut WriteConnection| {
            Ok(store.ledger.write_group(connection, known, &group, |_| ()))
        };
        let results = store.database.with_writer(write).expect("a connection");
        let written: Vec<bool> = results.iter().map(Result::is_ok).collect();
        assert_eq!(written, [false, true, true], "{results:?}");
        let found = store.ledger.verify().expect("a walk");
        assert_eq!((found.rows, found.fault), (4, None));
    }

    /// The head of the chain decides, and a commit of its own proves it.
    #[test]
    #[cfg(feature = "test-postgres")]
    fn a_group_whose_answer_is_lost_is_written_once() {
        use std::sync::atomic::Ordering;

        use crate::database::postgres::tests::*;
        use crate::database::{Access, DatabaseLocation};
        use crate::ledger::Filter;
        use crate::when::Range;

        let (proxies, uri) = proxies(1);
        let store = Store::open(&DatabaseLocation::Postgres(uri), Access::Create);
        let (store, proxy) = (store.expect("a new database"), &proxies[0]);
        let losses = [
            PASS,
            LOSE_REQUEST,
            LOSE_ANSWER,
            LOSE_COMMIT,
            LOSE_COMMIT_ANSWER,
        ];
        for (second, loss) in (1..).zip(losses) {
            let group = [("a", None), ("b", Some("unknown")), ("c", None)].map(|(end, secret)| {
                WaitingRow::new(row(end, "key_1", second), secret.map(SecretDigest::of))
            });
            let known = &KnownHeads::default();
            let write = |connection: &mut WriteConnection| {
                Ok(store.ledger.write_group(connection, known, &group, |_| ()))
            };
            proxy.set(loss);
            let results = store.database.with_writer(write).expect("a connection");
            let written: Vec<bool> = results.iter().map(Result::is_ok).collect();
            assert_eq!(written, [true, false, true], "{loss}: {results:?}");
            let mode = proxy.mode.load(Ordering::SeqCst);
            assert_eq!(mode, PASS, "something was lost");
            let with_head = format!(
                "SELECT count(*) FROM usage JOIN gateways ON name = gateway
                 WHERE created = {second} AND usage.xmin = gateways.xmin"
            );
            let expected = if loss == LOSE_COMMIT_ANSWER { 0 } else { 2 };
            assert_eq!(store.value::<i64>(&with_head), expected, "{loss}");
        }
        proxy.set(LOSE_ANSWER);
        let duplicate = store.ledger.append(row("a", "key_1", 1), None);
        assert!(duplicate.is_err(), "it is not taken for the row of that id");
        let found = store.ledger.verify().expect("a walk");
        assert_eq!((found.rows, found.fault), (10, None));
        let sums = store.ledger.sums(Range::ALL, Filter::ALL);
        assert_eq!(sums.expect("the sums").requests, 10);
    }

    #[test]
    fn after_a_failed_commit_a_file_may_have_either_head_and_no_other() {
        for (is_committed, is_other) in [(false, false), (true, false), (true, true)] {
            let temporary = Temporary::sqlite();
            let (store, known) = (&temporary.store, &KnownHeads::default());
            let append = |store: &Store, known: &KnownHeads, end: &str| {
                let group = [WaitingRow::new(row(end, "key_1", 1), None)];
                store.database.with_writer(|connection| {
                    let written = store.ledger.write_group(connection, known, &group, |_| ());
                    Ok(written.into_iter().collect::<Result<Vec<()>>>())
                })
            };
            let append = |store: &Store, known: &KnownHeads, end: &str| {
                append(store, known, end).expect("a connection").map(drop)
            };
            append(store, known, "a").expect("a row");
            fail_on(store, "UPDATE ON gateways");
            append(store, known, "b").expect_err("on purpose");
            store.tamper("DROP TRIGGER fail");
            if is_committed {
                let end = if is_other { "c" } else { "b" };
                let other = temporary.open_again();
                append(&other, &KnownHeads::default(), end).expect("the same head");
            }
            let next = append(store, known, "d");
            let kind = next.err().map(|problem| problem.kind);
            assert_eq!(kind, is_other.then_some(ProblemKind::Unsafe));
        }
    }

    /// It needs no row to find out that none could be written.
    #[test]
    #[cfg(feature = "test-postgres")]
    fn a_test_write_waits_for_the_table_of_the_rows() {
        let temporary = Temporary::postgres();
        let other = temporary.open_again();
        let store = &temporary.store;
        let test = || {
            let deadline = Instant::now() + std::time::Duration::from_millis(300);
            let test = |connection: &mut WriteConnection| {
                let known = &KnownHeads::default();
                store
                    .ledger
                    .write_once(connection, known, &[], deadline, |_| ())
                    .map(drop)
            };
            store.database.with_writer(test)
        };
        test().expect("the table is free");
        let lock = other.database.change(move |session| {
            session.run_script("LOCK TABLE usage IN SHARE MODE")?;
            Ok(test().expect_err("it is locked").kind)
        });
        assert_eq!(lock, Ok(ProblemKind::Busy));
        assert_eq!(store.value::<i64>("SELECT count(*) FROM usage"), 0);
    }

    #[test]
    fn a_trial_leaves_nothing() {
        let mut temporary = Temporary::new();
        let store = &mut temporary.store;
        store.ledger.try_request().expect("a command may try it");
        store.join("a", "").expect("a start");
        write(store, "1", "key_1", 1, 200, Some(1));
        (0..3).for_each(|_| store.ledger.try_request().expect("it should be accepted"));
        write(store, "2", "key_1", 2, 200, Some(1));
        assert_eq!(store.value::<i64>("SELECT count(*) FROM usage"), 2);
        let newest: i64 = store.value("SELECT max(seq) FROM usage");
        assert_eq!(newest, 2, "no gap");
        let requests = "SELECT CAST(sum(requests) AS BIGINT) FROM usage_days";
        assert_eq!(store.value::<i64>(requests), 2, "of the rows");
        assert_eq!(store.ledger.verify().expect("a walk").fault, None);
        store.tamper("DELETE FROM key_secrets");
        store
            .ledger
            .try_request()
            .expect("a database without keys is ready too");
    }

    #[test]
    fn a_gateway_that_was_replaced_and_one_without_its_row_are_not_ready() {
        let mut temporary = Temporary::new();
        let mut next = temporary.open_again();
        temporary.store.join("a", "").expect("a start");
        temporary
            .store
            .tamper("UPDATE gateways SET last_seen = NULL");
        next.join("a", "").expect("another start");
        let fenced = temporary.store.ledger.try_request();
        assert_eq!(fenced.expect_err("fenced").kind, ProblemKind::Fenced);
        next.ledger.try_request().expect("it has the epoch");
        next.tamper("DELETE FROM gateways WHERE name = 'a'");
        let missing = next.ledger.try_request().expect_err("there is no row");
        assert!(missing.text.contains("is missing in the table gateways"));
        assert_eq!(missing.kind, ProblemKind::Other, "no process replaced it");
    }

    #[test]
    fn whatever_fails_a_request_fails_the_trial() {
        let temporary = Temporary::sqlite();
        let store = &temporary.store;
        for what in [
            "INSERT ON usage",
            "INSERT ON usage_days",
            "UPDATE ON gateways",
        ] {
            fail_on(store, what);
            let error = store.ledger.try_request().expect_err(what).to_string();
            assert!(error.contains("on purpose"), "{error}");
            store.tamper("DROP TRIGGER fail");
            store.ledger.try_request().expect("it would succeed again");
        }
    }

    /// Makes a change of a table fail.
    pub fn fail_on(store: &Store, what: &str) {
        // `tamper` ends a statement at its semicolon.
        let trigger = format!(
            "CREATE TRIGGER fail BEFORE {what} BEGIN SELECT RAISE(ABORT, 'on purpose'); END"
        );
        let create = |session: &Session| session.execute(&trigger, &[]);
        store.database.change(create).expect("a trigger");
    }

    #[test]
    fn a_changed_schema_is_noticed() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let change = |version: &str| match store.database.sqlite() {
            Some(_) => store.tamper(&format!("PRAGMA user_version = {version}")),
            None => store.tamper(&format!("UPDATE schema_version SET version = {version}")),
        };
        change("12");
        let error = store.ledger.try_request().expect_err("it is not known");
        assert_eq!(error.kind, ProblemKind::Fenced);
        assert!(error.text.contains("now has version 12"), "{error}");
        change("11");
        store.ledger.try_request().expect("it is as before");
    }

    #[test]
    #[cfg(feature = "test-postgres")]
    fn on_postgres_the_clock_of_the_database_counts() {
        let temporary = Temporary::postgres();
        let name: String = temporary
            .store
            .value("SELECT CAST(current_database() AS TEXT)");
        // A function of ours is found before the system's.
        temporary.store.tamper(&format!(
            "ALTER DATABASE {name} SET search_path = public, pg_catalog"
        ));
        temporary.store.tamper(
            "CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql
             AS 'SELECT pg_catalog.clock_timestamp() - interval ''100 days'''",
        );
        let clock = temporary.open_again().ledger.clock().expect("a time");
        assert!(
            (crate::when::now() - 100 * crate::when::DAY - clock).abs() < crate::when::DAY,
            "{clock}"
        );
    }
}
