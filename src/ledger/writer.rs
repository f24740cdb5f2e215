//! The writer: one thread with the connection that writes. It takes the rows that wait, writes them
//! in one transaction and answers each; then it does what is due. Whether the ledger can be written
//! is its state.

use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::append::{ANY_KEY, KnownHeads, Ledger};
use super::queue::{WaitingRow, WriterTask, panicked};
use super::retention::{RetentionState, retention_held};
use crate::database::{CHANGE_TIMEOUT, Session, WriteConnection};
use crate::error::{Problem, ProblemKind, Result};
use crate::locks::lock;
use crate::text::count;

/// The pause between two heartbeats of a gateway; a commit counts as one. Also the longest wait of
/// the thread.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// The time that a heartbeat or a test write may take.
const STEP_TIMEOUT: Duration = Duration::from_secs(3);

/// The pause between two looks whether this process may still write to the database.
const IDENTITY_PAUSE: Duration = Duration::from_secs(10);

/// The pause between two searches for old rows, and between two batches that are removed: requests
/// come first.
const RETENTION_PAUSE: Duration = Duration::from_secs(3600);
const REMOVAL_PAUSE: Duration = Duration::from_secs(1);

/// The most rows that one transaction removes: a row that waits for it is hardly delayed.
const REMOVAL_BATCH: i64 = 500;

/// The handle of the thread. Dropping it stops the thread after it has answered everything that
/// waits.
pub struct Writer {
    ledger: Arc<Ledger>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    /// Makes one test write, so that the state is known from the start, and starts the thread.
    /// `on_fenced` is called if another process serves in the place of this one.
    pub fn start(
        ledger: &Arc<Ledger>,
        retention_days: Option<u32>,
        on_fenced: impl FnMut(&Problem) + Send + 'static,
    ) -> io::Result<Self> {
        let queue = Arc::clone(ledger);
        let submit = Box::new(move |job| queue.queue.submit(job));
        let connection = ledger.database.take_writer(submit);
        let now = Instant::now();
        let mut thread = WriterThread {
            ledger: Arc::clone(ledger),
            connection: connection.expect("serve opens a database that can be written"),
            known: KnownHeads::default(),
            heartbeat_at: now,
            identity_at: now + IDENTITY_PAUSE,
            retention: retention_days.map(|days| Retention {
                days,
                next: now,
                removed: 0,
            }),
            on_fenced: Box::new(on_fenced),
        };
        thread.test();
        ledger.queue.start();
        Ok(Self {
            ledger: Arc::clone(ledger),
            thread: Some(
                thread::Builder::new()
                    .name("writer".into())
                    .spawn(move || thread.run())?,
            ),
        })
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.ledger.queue.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct WriterThread {
    ledger: Arc<Ledger>,
    connection: WriteConnection,
    known: KnownHeads,
    heartbeat_at: Instant,
    identity_at: Instant,
    retention: Option<Retention>,
    on_fenced: Box<dyn FnMut(&Problem) + Send>,
}

struct Retention {
    days: u32,
    /// The time of the next batch or search.
    next: Instant,
    /// The rows that were removed since the last line in the log.
    removed: usize,
}

impl WriterThread {
    fn run(mut self) {
        loop {
            match self.ledger.queue.next(Instant::now() + HEARTBEAT) {
                WriterTask::Rows(group) => self.write(&group),
                WriterTask::Job(job) => self.step(|this| job(Ok(&mut this.connection))),
                WriterTask::Idle => {}
                WriterTask::Stop => break,
            }
            self.do_what_is_due();
        }
        self.step(Self::leave);
        self.ledger.database.close_readers();
    }

    fn write(&mut self, group: &[WaitingRow]) {
        let results = panic::catch_unwind(AssertUnwindSafe(|| {
            let (ledger, heartbeat_at) = (&self.ledger, &mut self.heartbeat_at);
            let between = |connection: &mut WriteConnection| {
                let _ = keep_presence(ledger, connection, heartbeat_at);
            };
            ledger.write_group(&mut self.connection, &self.known, group, between)
        }));
        let results = results.unwrap_or_else(|_| vec![Err(panicked()); group.len()]);
        self.ledger.queue.note_group(&results);
        if results.iter().any(Result::is_ok) {
            self.heartbeat_at = Instant::now() + HEARTBEAT;
        }
        for (row, result) in group.iter().zip(results) {
            self.stop_if_fenced(&result);
            row.answer(result);
        }
        // Under load the others bring their rows meanwhile, and share one sync.
        thread::yield_now();
    }

    fn do_what_is_due(&mut self) {
        self.step(|this| {
            let connection = &mut this.connection;
            let kept = keep_presence(&this.ledger, connection, &mut this.heartbeat_at);
            if kept.is_err() {
                this.note(kept);
            }
        });
        let now = Instant::now();
        if self.ledger.queue.is_test_due(now) {
            self.step(Self::test);
        } else if now >= self.identity_at {
            self.step(Self::check_identity);
        }
        self.step(Self::remove_old_rows);
        self.step(|this| {
            if let Some(sqlite) = this.connection.sqlite()
                && let Err(problem) = sqlite.checkpoint_if_due()
            {
                log::error!("the checkpoint failed: {problem}");
            }
        });
    }

    /// Runs a part of the work, whose time counts by itself: one that hangs makes the ledger
    /// unavailable. A panic ends the part, not the thread.
    fn step(&mut self, work: impl FnOnce(&mut Self)) {
        self.ledger.queue.note_step(Some(Instant::now()));
        if panic::catch_unwind(AssertUnwindSafe(|| work(self))).is_err() {
            log::error!("a step of the writer panicked; the line before says where");
        }
        self.ledger.queue.note_step(None);
    }

    /// Tests whether a row could be written, with a commit that moves no head: a transaction that
    /// is rolled back does not reach the WAL, and does not notice a full disk. After a failure, it
    /// tries a row: there may be space for the head alone.
    fn test(&mut self) {
        // The connection that writes has its pages in its cache, so it would not notice that the
        // file is damaged.
        let read = self.ledger.database.look_up(ANY_KEY, &[], |_| Ok(()));
        let deadline = Instant::now() + STEP_TIMEOUT;
        let (ledger, connection) = (&self.ledger, &mut self.connection);
        let tested = read.and_then(|_| match ledger.outage() {
            Some(_) => ledger.try_row(connection, deadline),
            None => ledger
                .write_once(connection, &self.known, &[], deadline, |_| ())
                .map(drop),
        });
        if tested.is_ok() {
            self.heartbeat_at = Instant::now() + HEARTBEAT;
        }
        self.note(tested);
    }

    /// Notes the result of a test write, or of a step that found that nothing can be written.
    fn note(&mut self, result: Result<()>) {
        self.stop_if_fenced(&result);
        self.ledger.queue.note_test(&result);
    }

    /// Reads whether this process may still write to the database, without writing anything.
    fn check_identity(&mut self) {
        self.identity_at = Instant::now() + IDENTITY_PAUSE;
        let files = match self.connection.sqlite() {
            Some(sqlite) => sqlite.check_files(),
            None => Ok(()),
        };
        let ledger = &self.ledger;
        let identify = || ledger.database.read(|session| ledger.identify(session));
        // Any other error may be one of this look only. A row that can't be written says so.
        if let Err(problem) = files.and_then(|()| identify())
            && [ProblemKind::Fenced, ProblemKind::Unsafe].contains(&problem.kind)
        {
            self.note(Err(problem));
        }
    }

    fn stop_if_fenced(&mut self, result: &Result<()>) {
        if let Err(problem) = result
            && problem.kind == ProblemKind::Fenced
        {
            (self.on_fenced)(problem);
        }
    }

    /// Removes a batch of old rows, if there are some. The next one follows after a pause.
    fn remove_old_rows(&mut self) {
        let Some(retention) = &mut self.retention else {
            return;
        };
        if Instant::now() < retention.next {
            return;
        }
        let days = retention.days;
        let (removed, pause, trouble) = match remove_batch(&self.ledger, &mut self.connection, days)
        {
            Ok((0, held)) => (0, RETENTION_PAUSE, held),
            Ok((removed, _)) => (removed, REMOVAL_PAUSE, None),
            // Others use the database, or it is lost: the next batch finds out.
            Err(problem) => {
                let text = format!(
                    "retention failed: {problem}. Requests continue, and the next round tries again"
                );
                (0, IDENTITY_PAUSE, Some(text))
            }
        };
        retention.removed += removed;
        retention.next = Instant::now() + pause;
        if removed == 0 && retention.removed > 0 {
            let (rows, days) = (retention.removed as i64, retention.days.into());
            let (rows, days) = (count(rows, "row"), count(days, "day"));
            log::info!("removed {rows} older than {days} from the ledger");
            retention.removed = 0;
        }
        *lock(&self.ledger.retention_trouble) = trouble;
    }

    /// Lets the next start take the name of this gateway at once.
    fn leave(&mut self) {
        if self.connection.sqlite().is_some() {
            return;
        }
        let (ledger, deadline) = (&self.ledger, Instant::now() + CHANGE_TIMEOUT);
        let leave = |session: &Session| ledger.leave(session);
        if let Err(problem) = self.connection.transaction(deadline, None, leave) {
            log::warn!(
                "the heartbeat could not be cleared: {problem}. The next start waits for 5 s"
            );
        }
    }
}

/// Updates the heartbeat if it is due; the lock of a file needs none. Fails if another process has
/// the name.
fn keep_presence(
    ledger: &Ledger,
    connection: &mut WriteConnection,
    heartbeat_at: &mut Instant,
) -> Result<()> {
    if connection.sqlite().is_some() || Instant::now() < *heartbeat_at {
        return Ok(());
    }
    let deadline = Instant::now() + STEP_TIMEOUT;
    let beat = connection.transaction(deadline, None, |session| ledger.beat(session));
    *heartbeat_at = Instant::now() + HEARTBEAT;
    beat
}

/// Returns how many rows were removed, and why none may be.
fn remove_batch(
    ledger: &Ledger,
    connection: &mut WriteConnection,
    days: u32,
) -> Result<(usize, Option<String>)> {
    let now = ledger.clock()?;
    match ledger.retention(days, now)? {
        RetentionState::Idle => Ok((0, None)),
        RetentionState::Held { before } => Ok((0, Some(retention_held(before, &ledger.zone)))),
        RetentionState::Due { before } => {
            let deadline = Instant::now() + CHANGE_TIMEOUT;
            let remove =
                |session: &Session| ledger.remove_batch(session, before, now, REMOVAL_BATCH);
            Ok((connection.transaction(deadline, None, remove)?, None))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use rusqlite::Connection;

    use super::*;
    use crate::ledger::LedgerRow;
    use crate::ledger::append::tests::{fail_on, row, write};
    use crate::store::tests::Temporary;

    fn start(temporary: &Temporary) -> (Writer, mpsc::Receiver<ProblemKind>) {
        let (sender, fenced) = mpsc::channel();
        let on_fenced = move |problem: &Problem| {
            let _ = sender.send(problem.kind);
        };
        let writer = Writer::start(&temporary.store.ledger, None, on_fenced);
        (writer.expect("a thread"), fenced)
    }

    /// Waits until something is so.
    #[track_caller]
    fn wait_until(is_so: impl Fn() -> bool) {
        let began = Instant::now();
        while !is_so() {
            assert!(began.elapsed() < Duration::from_secs(60), "it never is");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Appends rows from threads of their own while another process has the database, so that they
    /// wait together.
    fn append_together(temporary: &Temporary, rows: Vec<LedgerRow>) -> Vec<Result<()>> {
        let other = Connection::open(temporary.folder.join("test.db")).expect("the database");
        other.execute_batch("BEGIN IMMEDIATE").expect("a lock");
        let ledger = &temporary.store.ledger;
        thread::scope(|scope| {
            let writers: Vec<_> = rows
                .into_iter()
                .map(|row| scope.spawn(move || ledger.append(row, None)))
                .collect();
            thread::sleep(Duration::from_millis(50));
            other.execute_batch("COMMIT").expect("the end of the lock");
            let results = writers.into_iter().map(|writer| writer.join());
            results.map(|result| result.expect("no panic")).collect()
        })
    }

    #[test]
    fn each_row_of_a_group_has_its_own_result() {
        let temporary = Temporary::sqlite();
        let store = &temporary.store;
        write(store, "x", "key_1", 4, 200, None);
        let (_writer, _fenced) = start(&temporary);
        let rows = (1..=6).map(|created| row("x", "key_1", created)).collect();
        let results = append_together(&temporary, rows);
        for (created, result) in (1..).zip(&results) {
            assert_eq!(result.is_ok(), created != 4, "{result:?}");
        }
        assert!(store.ledger.outage().is_none(), "the others were written");
        let found = store.ledger.verify().expect("a walk");
        let expected = (6, None);
        assert_eq!((found.rows, found.fault), expected, "it took no number");
    }

    #[test]
    fn what_every_row_meets_makes_the_ledger_unavailable_until_a_test_succeeds() {
        let temporary = Temporary::sqlite();
        let store = &temporary.store;
        fail_on(store, "UPDATE ON gateways");
        let (_writer, _fenced) = start(&temporary);
        let outage = store.ledger.outage().expect("the first test fails");
        assert!(outage.text.contains("on purpose"), "{outage}");
        let change = || {
            let same = "UPDATE gateways SET head_seq = head_seq";
            let run = move |session: &Session| session.execute(same, &[]);
            store.database.transaction(None, run)
        };
        let job = change().expect_err("no job is tried");
        assert!(job.text.contains("on purpose"), "{job}");
        let other = Connection::open(temporary.folder.join("test.db")).expect("the database");
        other
            .busy_timeout(Duration::from_secs(60))
            .expect("a setting");
        other.execute_batch("DROP TRIGGER fail").expect("the cause");
        wait_until(|| store.ledger.outage().is_none());
        change().expect("a job");
        store
            .ledger
            .append(row("a", "key_1", 1), None)
            .expect("a row");
    }

    #[test]
    fn a_panic_fails_its_job_and_not_the_thread() {
        let temporary = Temporary::sqlite();
        let store = &temporary.store;
        let (_writer, _fenced) = start(&temporary);
        let panics = |_: &Session| -> Result<()> { panic!("on purpose") };
        let panicked = store.database.transaction(None, panics);
        assert_eq!(panicked.expect_err("a panic").kind, ProblemKind::Panicked);
        store
            .ledger
            .append(row("a", "key_1", 1), None)
            .expect("a row");
    }

    /// The number of a row that does not fit panics, unless overflows are not checked.
    #[test]
    #[cfg(debug_assertions)]
    fn a_panic_fails_its_group_and_the_next_one_is_written() {
        let temporary = Temporary::sqlite();
        let ledger = &temporary.store.ledger;
        let (_writer, _fenced) = start(&temporary);
        ledger.append(row("a", "key_1", 1), None).expect("a row");
        let set_head = |seq: i64| {
            let other = Connection::open(temporary.folder.join("test.db")).expect("the database");
            let set = format!("UPDATE gateways SET head_seq = {seq}");
            let is_set = || other.execute_batch(&set).is_ok();
            wait_until(is_set);
        };
        set_head(i64::MAX);
        let rows = ["b", "c", "d"].map(|end| row(end, "key_1", 2));
        for result in append_together(&temporary, rows.into()) {
            assert_eq!(result.expect_err("a panic").kind, ProblemKind::Panicked);
        }
        set_head(1);
        let rows = ["e", "f"].map(|end| row(end, "key_1", 3));
        for result in append_together(&temporary, rows.into()) {
            result.expect("the next group");
        }
        assert!(ledger.outage().is_none());
        let found = ledger.verify().expect("a walk");
        assert_eq!((found.rows, found.fault), (3, None));
    }

    #[test]
    fn a_test_write_reaches_the_disk() {
        let temporary = Temporary::sqlite();
        let (_writer, _fenced) = start(&temporary);
        let written = || {
            let wal = temporary.folder.join("test.db-wal").metadata();
            wal.and_then(|wal| wal.modified()).expect("the WAL")
        };
        let before = written();
        wait_until(|| {
            assert!(temporary.store.ledger.probe().is_none());
            written() != before
        });
    }

    #[test]
    fn what_waits_is_answered_before_the_stop() {
        let temporary = Temporary::sqlite();
        let (writer, _fenced) = start(&temporary);
        let ledger = &temporary.store.ledger;
        thread::scope(|scope| {
            let rows: Vec<_> = (1..9)
                .map(|number| scope.spawn(move || ledger.append(row("x", "key_1", number), None)))
                .collect();
            for row in rows {
                row.join().expect("no panic").expect("it was written");
            }
        });
        drop(writer);
        let refused = ledger.append(row("y", "key_1", 1), None);
        assert!(refused.is_err(), "there is no writer any more");
        let store = temporary.open_again();
        assert_eq!(store.value::<i64>("SELECT count(*) FROM usage"), 8);
    }

    #[test]
    fn a_process_that_was_replaced_stops_and_writes_no_row() {
        let temporary = Temporary::sqlite();
        let (_writer, fenced) = start(&temporary);
        let other = Connection::open(temporary.folder.join("test.db")).expect("the database");
        other
            .execute_batch("UPDATE gateways SET epoch = epoch + 1")
            .expect("another start");
        let ledger = &temporary.store.ledger;
        let refused = ledger.append(row("a", "key_1", 1), None);
        assert_eq!(refused.expect_err("fenced").kind, ProblemKind::Fenced);
        assert_eq!(fenced.recv().expect("a call"), ProblemKind::Fenced);
        assert!(ledger.outage().is_some());
    }

    #[test]
    fn rows_that_another_program_took_away_end_writing_for_good() {
        let temporary = Temporary::sqlite();
        let (_writer, _fenced) = start(&temporary);
        let ledger = &temporary.store.ledger;
        ledger.append(row("a", "key_1", 1), None).expect("a row");
        let before = Connection::open(temporary.folder.join("test.db")).expect("the database");
        before
            .execute_batch(
                "BEGIN; DELETE FROM usage; DELETE FROM usage_days;
                 UPDATE gateways SET head_seq = 0, head_hash = zeroblob(32); COMMIT",
            )
            .expect("an earlier state");
        for end in ["b", "c"] {
            let refused = ledger.append(row(end, "key_1", 2), None);
            let refused = refused.expect_err("it is another ledger");
            assert_eq!(refused.kind, ProblemKind::Unsafe, "{refused}");
        }
    }

    #[cfg(feature = "test-postgres")]
    mod on_postgres {
        use super::*;
        use crate::ledger::gateways::WATCH_TIME;
        use crate::store::Store;
        use crate::store::tests::while_writing;

        /// A gateway that serves, and another process.
        fn serve() -> (Temporary, Writer, Store) {
            let mut temporary = Temporary::postgres();
            temporary.store.join("a", "").expect("a start");
            let (writer, _fenced) = start(&temporary);
            let other = temporary.open_again();
            (temporary, writer, other)
        }

        #[test]
        fn a_clean_stop_clears_the_heartbeat_of_its_own_epoch_only() {
            for newer_starts in [0, 1] {
                let (_temporary, writer, other) = serve();
                other.tamper(&format!(
                    "UPDATE gateways SET epoch = epoch + {newer_starts} WHERE name = 'a'"
                ));
                drop(writer);
                let kept = "SELECT count(last_seen) FROM gateways WHERE name = 'a'";
                assert_eq!(other.value::<i64>(kept), newer_starts);
            }
        }

        /// Else a start that watches it would take the name.
        #[test]
        fn rows_that_wait_for_a_locked_table_do_not_stop_the_heartbeat() {
            let (temporary, _writer, other) = serve();
            let ledger = &temporary.store.ledger;
            let lock = |session: &Session| {
                let lock = "LOCK TABLE usage IN SHARE MODE";
                session.execute(lock, &[]).map(drop)
            };
            let seen = || other.value::<i64>("SELECT last_seen FROM gateways WHERE name = 'a'");
            let waiting = "SELECT count(*) FROM pg_locks JOIN pg_database AS d ON d.oid = database
                WHERE datname = current_database() AND NOT granted";
            thread::scope(|scope| {
                let mut appended = None;
                while_writing(&other.database, lock, || {
                    appended = Some(scope.spawn(|| ledger.append(row("a", "key_1", 1), None)));
                    wait_until(|| other.value::<i64>(waiting) == 1);
                    let (before, began) = (seen(), Instant::now());
                    wait_until(|| seen() != before);
                    assert!(began.elapsed() < WATCH_TIME, "{:?}", began.elapsed());
                });
                let appended = appended.expect("a thread").join();
                appended.expect("no panic").expect("its turn");
            });
        }
    }
}
