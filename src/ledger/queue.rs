//! What waits for the writer, and whether the ledger can be written: one state, which the writer
//! sets and everyone else reads.

use std::collections::VecDeque;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::LedgerRow;
use crate::database::{CHANGE_TIMEOUT, Job};
use crate::error::{Problem, ProblemKind, Result};
use crate::locks::lock;
use crate::secret::SecretDigest;

/// If a row or a step of the writer takes this long, the ledger is unavailable. It may go on.
const LONG_WAIT: Duration = Duration::from_secs(5);

/// The pause before a test write. It doubles if rows fail again right after a test that succeeded:
/// otherwise every worker would spend an inference each second on a row that fails.
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// The most rows of a group: what is due between groups has to have its turn.
const MAX_GROUP: usize = 256;

/// The time until a row has to be durable, with all attempts: an inference was spent on it.
pub(super) const ROW_TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Default)]
pub(super) struct WriteQueue {
    state: Mutex<QueueState>,
    /// Signalled when something waits, and for a stop.
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    /// There is a writer, which answers everything that waits.
    is_running: bool,
    is_stopping: bool,
    /// The writer waits for something to do. If it is busy, a signal would be a system call for
    /// each row that does nothing.
    is_idle: bool,
    waiting: VecDeque<Waiting>,
    /// The time when the oldest row of the present group came, or the present step began.
    busy_since: Option<Instant>,
    /// The reason why the ledger can't be written, and the time of the next test write.
    failure: Option<(Problem, Instant)>,
    /// The pause before a test write; none after a row that was written.
    pause: Duration,
    /// A health probe has asked since the last test write.
    is_probed: bool,
}

enum Waiting {
    Row(WaitingRow),
    Job(Job, Instant),
}

/// A row that waits for its group, and where its result goes.
pub(super) struct WaitingRow {
    pub row: Box<LedgerRow>,
    /// The digest of the secret that the request had; `None` if nothing is to be checked.
    pub secret: Option<SecretDigest>,
    pub since: Instant,
    answer: Option<SyncSender<Result<()>>>,
}

impl WaitingRow {
    pub fn new(row: LedgerRow, secret: Option<SecretDigest>) -> Self {
        Self {
            row: Box::new(row),
            secret,
            since: Instant::now(),
            answer: None,
        }
    }

    pub fn answer(&self, result: Result<()>) {
        if let Some(answer) = &self.answer {
            let _ = answer.send(result);
        }
    }
}

/// What the writer has to do next.
pub(super) enum WriterTask {
    Rows(Vec<WaitingRow>),
    Job(Job),
    /// Nothing waits.
    Idle,
    Stop,
}

impl WriteQueue {
    pub fn start(&self) {
        lock(&self.state).is_running = true;
    }

    /// Waits until the writer has answered. Returns the row if there is no writer.
    pub fn append(&self, mut row: WaitingRow) -> Result<Result<()>, WaitingRow> {
        let state = lock(&self.state);
        if !state.is_running {
            return Err(row);
        }
        let (sender, result): (_, Receiver<Result<()>>) = mpsc::sync_channel(1);
        row.answer = Some(sender);
        self.push(state, Waiting::Row(row));
        Ok(result.recv().unwrap_or_else(|_| Err(panicked())))
    }

    /// Refuses a job at once while the ledger is unavailable.
    pub fn submit(&self, job: Job) {
        let state = lock(&self.state);
        let stopping = || Problem::new(ProblemKind::Busy, "the service is stopping");
        let refusal = state.outage();
        if let Some(problem) = refusal.or_else(|| (!state.is_running).then(stopping)) {
            drop(state);
            return job(Err(problem));
        }
        self.push(state, Waiting::Job(job, Instant::now()));
    }

    fn push(&self, mut state: MutexGuard<QueueState>, waiting: Waiting) {
        state.waiting.push_back(waiting);
        let is_idle = std::mem::take(&mut state.is_idle);
        drop(state);
        if is_idle {
            self.changed.notify_one();
        }
    }

    /// Waits for something to do until a time.
    pub fn next(&self, until: Instant) -> WriterTask {
        let mut state = lock(&self.state);
        loop {
            if let Some(turn) = state.take() {
                return turn;
            }
            if state.is_stopping {
                state.is_running = false;
                return WriterTask::Stop;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return WriterTask::Idle;
            }
            state.is_idle = true;
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            state.is_idle = false;
        }
    }

    pub fn stop(&self) {
        lock(&self.state).is_stopping = true;
        self.changed.notify_one();
    }

    /// Notes that a step of the writer begins or has ended.
    pub fn note_step(&self, began: Option<Instant>) {
        lock(&self.state).busy_since = began;
    }

    /// The reason why a row could not be written now.
    pub fn outage(&self) -> Option<Problem> {
        lock(&self.state).outage()
    }

    /// The same for a health probe, which has a test write made.
    pub fn probe(&self) -> Option<Problem> {
        let mut state = lock(&self.state);
        state.is_probed = true;
        state.outage()
    }

    /// Notes the results of a group. A row that fails alone does not count, and a key that was
    /// refused says nothing.
    pub fn note_group(&self, results: &[Result<()>]) {
        let says_nothing =
            |kind| matches!(kind, ProblemKind::KeyRevoked | ProblemKind::KeyReplaced);
        let mut failures = results.iter().filter_map(|result| result.as_ref().err());
        let mut state = lock(&self.state);
        if results.iter().any(Result::is_ok) {
            state.failure = None;
            state.pause = Duration::ZERO;
        } else if let Some(problem) = failures.find(|problem| !says_nothing(problem.kind)) {
            if state.failure.is_none() {
                state.pause = (state.pause * 2).clamp(SHORTEST_PAUSE, LONGEST_PAUSE);
            }
            state.fail(problem);
        }
    }

    /// Notes the result of a test write, or of a look at the database that found it unusable.
    pub fn note_test(&self, result: &Result<()>) {
        let mut state = lock(&self.state);
        match result {
            Ok(()) => state.failure = None,
            Err(problem) => state.fail(problem),
        }
    }

    /// Returns whether a test write is due: after a failure, or because a probe has asked.
    pub fn is_test_due(&self, now: Instant) -> bool {
        let mut state = lock(&self.state);
        let is_probed = std::mem::take(&mut state.is_probed);
        match state.failure {
            Some((_, next_test)) => now >= next_test,
            None => is_probed,
        }
    }
}

impl QueueState {
    /// Takes a job, or the rows before the next one. What has waited for too long is answered here,
    /// and is not written.
    fn take(&mut self) -> Option<WriterTask> {
        let late = || Problem::new(ProblemKind::Busy, "the write had no turn in time");
        let mut group = Vec::new();
        while group.len() < MAX_GROUP {
            match self.waiting.pop_front() {
                Some(Waiting::Row(row)) if row.since.elapsed() < ROW_TIMEOUT => group.push(row),
                Some(Waiting::Row(row)) => row.answer(Err(late())),
                Some(job) if !group.is_empty() => {
                    self.waiting.push_front(job);
                    break;
                }
                Some(Waiting::Job(job, since)) if since.elapsed() < CHANGE_TIMEOUT => {
                    return Some(WriterTask::Job(job));
                }
                Some(Waiting::Job(job, _)) => job(Err(late())),
                None => break,
            }
        }
        self.busy_since = Some(group.first()?.since);
        Some(WriterTask::Rows(group))
    }

    fn outage(&self) -> Option<Problem> {
        let late = || {
            Problem::new(
                ProblemKind::Busy,
                "a write to the ledger has waited for more than 5 seconds",
            )
        };
        let rows = self.waiting.iter().filter_map(|waiting| match waiting {
            Waiting::Row(row) => Some(row.since),
            Waiting::Job(..) => None,
        });
        let mut oldest = rows.take(1).chain(self.busy_since);
        let failure = self.failure.as_ref().map(|(problem, _)| problem.clone());
        failure.or_else(|| oldest.any(|since| since.elapsed() >= LONG_WAIT).then(late))
    }

    fn fail(&mut self, problem: &Problem) {
        let next_test = Instant::now() + self.pause.max(SHORTEST_PAUSE);
        self.failure = Some((problem.clone(), next_test));
    }
}

pub(super) fn panicked() -> Problem {
    Problem::new(ProblemKind::Panicked, "a write panicked")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::append::tests::row;

    fn problem(kind: ProblemKind) -> Problem {
        Problem::new(kind, "on purpose")
    }

    fn failure(queue: &WriteQueue) -> Option<ProblemKind> {
        queue.outage().map(|problem| problem.kind)
    }

    /// A row that came some time ago, and where its result arrives.
    fn waiting(age: Duration) -> (WaitingRow, Receiver<Result<()>>) {
        let (sender, result) = mpsc::sync_channel(1);
        let mut row = WaitingRow::new(row("x", "key_1", 1), None);
        row.since = Instant::now().checked_sub(age).expect("some time ago");
        row.answer = Some(sender);
        (row, result)
    }

    #[test]
    fn a_test_or_a_row_ends_an_outage_and_a_row_that_fails_alone_begins_none() {
        let queue = WriteQueue::default();
        queue.note_group(&[Err(problem(ProblemKind::Other)), Ok(())]);
        queue.note_group(&[Err(problem(ProblemKind::KeyRevoked))]);
        queue.note_group(&[Err(problem(ProblemKind::KeyReplaced))]);
        assert_eq!(failure(&queue), None);
        assert!(!queue.is_test_due(Instant::now() + LONGEST_PAUSE));
        let ends: [&dyn Fn(); 2] = [&|| queue.note_group(&[Ok(())]), &|| {
            queue.note_test(&Ok(()))
        }];
        for end in ends {
            let kinds = [ProblemKind::KeyRevoked, ProblemKind::Full];
            queue.note_group(&kinds.map(|kind| Err(problem(kind))));
            assert_eq!(failure(&queue), Some(ProblemKind::Full));
            assert!(!queue.is_test_due(Instant::now()));
            assert!(queue.is_test_due(Instant::now() + SHORTEST_PAUSE));
            queue.note_test(&Err(problem(ProblemKind::Other)));
            assert_eq!(failure(&queue), Some(ProblemKind::Other), "the last one");
            end();
            assert_eq!(failure(&queue), None);
        }
    }

    #[test]
    fn a_test_that_succeeds_while_rows_fail_comes_less_and_less_often() {
        let queue = WriteQueue::default();
        let fail = || queue.note_group(&[Err(problem(ProblemKind::Other))]);
        let mut pauses = Vec::new();
        for _ in 0..9 {
            fail();
            pauses.push(lock(&queue.state).pause.as_secs());
            queue.note_test(&Ok(()));
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        queue.note_group(&[Ok(())]);
        fail();
        let pause = lock(&queue.state).pause;
        assert_eq!(pause, SHORTEST_PAUSE, "a row was written meanwhile");
    }

    #[test]
    fn a_probe_has_a_test_made_once() {
        let queue = WriteQueue::default();
        assert!(!queue.is_test_due(Instant::now()));
        assert!(queue.probe().is_none());
        assert!(queue.is_test_due(Instant::now()));
        assert!(!queue.is_test_due(Instant::now()));
    }

    #[test]
    fn what_waits_for_long_makes_the_ledger_unavailable() {
        let queue = WriteQueue::default();
        for (age, expected) in [(LONG_WAIT / 2, None), (LONG_WAIT, Some(ProblemKind::Busy))] {
            lock(&queue.state)
                .waiting
                .push_back(Waiting::Row(waiting(age).0));
            assert_eq!(failure(&queue), expected, "a row that waits");
            let group = queue.next(Instant::now());
            assert!(matches!(group, WriterTask::Rows(_)));
            assert_eq!(failure(&queue), expected, "a row that is written");
            queue.note_step(None);
            assert_eq!(failure(&queue), None);
        }
        queue.note_step(Instant::now().checked_sub(LONG_WAIT));
        assert!(failure(&queue).is_some(), "a step that hangs");
    }

    #[test]
    fn what_is_late_is_answered_and_not_written() {
        let queue = WriteQueue::default();
        let (late, answer) = waiting(ROW_TIMEOUT);
        let (row, _result) = waiting(Duration::ZERO);
        lock(&queue.state)
            .waiting
            .extend([late, row].map(Waiting::Row));
        let WriterTask::Rows(group) = queue.next(Instant::now()) else {
            panic!("a row waits");
        };
        assert_eq!(group.len(), 1);
        let refused = answer.try_recv().expect("an answer");
        assert_eq!(refused.expect_err("late").kind, ProblemKind::Busy);
        let (sender, answer) = mpsc::channel();
        let job: Job = Box::new(move |connection| {
            sender.send(connection.err()).expect("the test waits");
        });
        let since = Instant::now().checked_sub(CHANGE_TIMEOUT);
        let since = since.expect("some time ago");
        lock(&queue.state)
            .waiting
            .push_back(Waiting::Job(job, since));
        assert!(matches!(queue.next(Instant::now()), WriterTask::Idle));
        let refused = answer.try_recv().expect("an answer").expect("a problem");
        assert_eq!(refused.kind, ProblemKind::Busy);
    }

    #[test]
    fn jobs_are_refused_at_once_while_the_ledger_is_unavailable() {
        let queue = WriteQueue::default();
        queue.start();
        let submit = || {
            let (sender, answer) = mpsc::channel();
            queue.submit(Box::new(move |connection| {
                sender.send(connection.err()).expect("the test waits");
            }));
            answer.try_recv().ok().flatten()
        };
        assert!(submit().is_none(), "it waits");
        queue.note_test(&Err(problem(ProblemKind::Full)));
        assert_eq!(
            submit().map(|refusal| refusal.kind),
            Some(ProblemKind::Full)
        );
    }

    /// Jobs have their turn even if rows come all the time.
    #[test]
    fn rows_and_jobs_have_their_turn_in_the_order_in_which_they_came() {
        let queue = WriteQueue::default();
        let row = || Waiting::Row(waiting(Duration::ZERO).0);
        let job = || Waiting::Job(Box::new(|_| ()), Instant::now());
        let waiting = [row(), row(), job(), job(), row()];
        lock(&queue.state).waiting.extend(waiting);
        let turns = std::iter::repeat_with(|| match queue.next(Instant::now()) {
            WriterTask::Rows(rows) => rows.len(),
            WriterTask::Job(_) => 0,
            WriterTask::Idle | WriterTask::Stop => 9,
        });
        assert_eq!(turns.take(5).collect::<Vec<_>>(), [2, 0, 0, 1, 9]);
    }

    #[test]
    fn a_stop_comes_after_what_waits() {
        let queue = WriteQueue::default();
        queue.start();
        let first = Waiting::Row(waiting(Duration::ZERO).0);
        lock(&queue.state).waiting.push_back(first);
        queue.stop();
        assert!(matches!(queue.next(Instant::now()), WriterTask::Rows(_)));
        assert!(matches!(queue.next(Instant::now()), WriterTask::Stop));
        let row = WaitingRow::new(row("x", "key_1", 1), None);
        assert!(queue.append(row).is_err(), "there is no writer any more");
    }
}
