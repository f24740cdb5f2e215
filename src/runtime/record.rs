//! The record of a runtime: its running calls, its last answers, and whether it answers at all.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::error::RuntimeError;
use super::wire::Generated;
use crate::client::CallError;
use crate::when;

/// The calls and probes in a row that have to end without an answer before a runtime is failing:
/// one alone is no verdict.
const FAILURES_TO_FAIL: u32 = 3;

/// The pause between two probes of a runtime.
const PROBE_INTERVAL: Duration = Duration::from_secs(10);

/// The number of answers whose time is kept.
const KEPT_TIMES: usize = 20;

/// A call that its client cancelled sooner says nothing about the runtime.
const MIN_PATIENCE: Duration = Duration::from_secs(5);

/// The status of a runtime: a fact of the service's health.
#[derive(Clone, Debug, Default)]
pub struct RuntimeStatus {
    pub url: String,
    pub running: usize,
    /// When the first of its last calls and probes in a row failed, in Unix seconds; `None` if the last
    /// was answered.
    pub failed_since: Option<i64>,
    /// Several calls or probes in a row ended without an answer, and no probe was answered since.
    pub is_failing: bool,
    /// It has answered a call or a probe since the start.
    pub has_answered: bool,
    /// The calls and probes that have failed since the start.
    pub failures: u64,
    /// When one last failed since the start, in Unix seconds, and why.
    pub last_error: Option<(i64, String)>,
}

#[derive(Default)]
pub(super) struct RuntimeRecord {
    pub status: RuntimeStatus,
    /// The calls and probes in a row that ended without an answer.
    unanswered: u32,
    /// When the first of the last such row ended. It stays when the runtime answers again.
    pub last_stopped: Option<Instant>,
    answer_times: VecDeque<Duration>,
    /// `None` if it was never probed and has not failed.
    next_probe: Option<Instant>,
    is_probed: bool,
}

impl RuntimeRecord {
    pub fn new(url: &str) -> Self {
        let status = RuntimeStatus {
            url: url.to_owned(),
            ..RuntimeStatus::default()
        };
        Self {
            status,
            ..Self::default()
        }
    }

    /// The sort key of the choice between runtimes: first those that work, then those whose last
    /// call failed, then the failing ones; among these the least busy. A failing runtime that has
    /// answered a probe works if it has no call: it gets one at a time.
    pub fn rank(&self) -> (u8, usize) {
        let group = match self.unanswered {
            0 => 0,
            1..FAILURES_TO_FAIL => 1,
            _ if !self.status.is_failing && self.status.running == 0 => 0,
            _ => 2,
        };
        (group, self.status.running)
    }

    /// Notes the result of a call that took this time. A refused conversation, or a client that has
    /// gone, says nothing about the runtime, unless the client has waited very long.
    pub fn note_call(
        &mut self,
        now: Instant,
        took: Duration,
        result: &Result<Generated, RuntimeError>,
    ) {
        match result {
            Ok(_) | Err(RuntimeError::NoText(_)) => {
                self.answer_times.truncate(KEPT_TIMES - 1);
                self.answer_times.push_front(took);
                self.note_answer();
            }
            Err(RuntimeError::Call(CallError::Cancelled)) if took > self.patience() => {
                self.note_failure(now, &RuntimeError::Call(CallError::TimedOut(took)));
            }
            Err(error) if error.is_about_request() => {}
            Err(error) => self.note_failure(now, error),
        }
    }

    /// Twice the time of the slowest recent answer.
    fn patience(&self) -> Duration {
        let slowest = self.answer_times.iter().max();
        slowest.map_or(MIN_PATIENCE, |time| (*time * 2).max(MIN_PATIENCE))
    }

    /// Begins a probe if one is due.
    pub fn begin_due_probe(&mut self, now: Instant) -> bool {
        let is_due = self.next_probe.is_some_and(|time| now >= time);
        let begins = self.unanswered > 0 && is_due && !self.is_probed;
        if begins {
            self.is_probed = true;
            self.next_probe = Some(now + PROBE_INTERVAL);
        }
        begins
    }

    /// Ends a probe; `None` if it has no result. Its answer counts as a call's, except that it does
    /// not prove for a failing runtime that calls succeed.
    pub fn end_probe(&mut self, now: Instant, result: Option<&Result<Generated, RuntimeError>>) {
        self.is_probed = false;
        match result {
            Some(Ok(_) | Err(RuntimeError::NoText(_))) if self.unanswered >= FAILURES_TO_FAIL => {
                self.status.is_failing = false;
                self.status.failed_since = None;
                self.status.has_answered = true;
            }
            Some(Ok(_) | Err(RuntimeError::NoText(_))) => self.note_answer(),
            Some(Err(error)) if !error.is_about_request() => self.note_failure(now, error),
            Some(Err(_)) | None => {}
        }
    }

    fn note_answer(&mut self) {
        self.unanswered = 0;
        self.status.is_failing = false;
        self.status.failed_since = None;
        self.status.has_answered = true;
    }

    fn note_failure(&mut self, now: Instant, error: &RuntimeError) {
        if self.unanswered == 0 {
            self.last_stopped = Some(now);
            self.next_probe = Some(now + PROBE_INTERVAL);
        }
        self.unanswered = self.unanswered.saturating_add(1);
        let status = &mut self.status;
        status.is_failing = self.unanswered >= FAILURES_TO_FAIL;
        status.failed_since.get_or_insert_with(when::now);
        status.failures += 1;
        status.last_error = Some((when::now(), error.diagnosis()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Tokens;

    const SECOND: Duration = Duration::from_secs(1);

    /// A runtime, and a clock that stands still until a test moves it.
    struct Trial {
        record: RuntimeRecord,
        now: Instant,
    }

    impl Trial {
        fn new() -> Self {
            Self {
                record: RuntimeRecord::new("http://a/v1"),
                now: Instant::now(),
            }
        }

        fn call(&mut self, seconds: u32, result: Result<Generated, RuntimeError>) {
            self.record.note_call(self.now, seconds * SECOND, &result);
        }

        fn fail(&mut self) {
            self.call(1, Err(RuntimeError::Status(500)));
        }

        /// Probes it after this time. Returns whether a probe was due.
        fn probe(&mut self, seconds: u32, result: Result<Generated, RuntimeError>) -> bool {
            self.now += seconds * SECOND;
            let begins = self.record.begin_due_probe(self.now);
            if begins {
                assert!(
                    !self.record.begin_due_probe(self.now + 100 * SECOND),
                    "one at a time"
                );
                self.record.end_probe(self.now, Some(&result));
            }
            begins
        }

        /// The group of its rank, whether it is failing, and whether it is down in the metrics.
        fn state(&self) -> (u8, bool, bool) {
            let status = &self.record.status;
            (
                self.record.rank().0,
                status.is_failing,
                status.failed_since.is_some(),
            )
        }
    }

    const WELL: (u8, bool, bool) = (0, false, false);
    const DOUBTED: (u8, bool, bool) = (1, false, true);
    const FAILING: (u8, bool, bool) = (2, true, true);

    fn answer() -> Result<Generated, RuntimeError> {
        Ok(Generated {
            content: "x".into(),
            finish_reason: None,
            tokens: Tokens::default(),
        })
    }

    fn cancelled() -> Result<Generated, RuntimeError> {
        Err(RuntimeError::Call(CallError::Cancelled))
    }

    #[test]
    fn results_of_calls() {
        let call = |error| Err(RuntimeError::Call(error));
        #[track_caller]
        fn check(result: Result<Generated, RuntimeError>, counts: bool) {
            let mut trial = Trial::new();
            let name = format!("{result:?}");
            trial.call(1, result);
            assert_eq!(trial.state(), if counts { DOUBTED } else { WELL }, "{name}");
            assert_eq!(trial.record.status.failures, u64::from(counts), "{name}");
        }
        check(answer(), false);
        check(Err(RuntimeError::NoText(Tokens::default())), false);
        check(Err(RuntimeError::ContextExceeded(None)), false);
        for status in [400, 413, 422] {
            check(Err(RuntimeError::Status(status)), false);
            check(Err(RuntimeError::UnknownModel(status)), true);
        }
        for status in [301, 401, 403, 404, 418, 429, 500, 502, 503] {
            check(Err(RuntimeError::Status(status)), true);
        }
        check(Err(RuntimeError::NotJson), true);
        check(
            call(CallError::Unreachable(std::io::ErrorKind::Other.into())),
            true,
        );
        check(call(CallError::TimedOut(SECOND)), true);
        check(call(CallError::TooLarge), true);
        check(call(CallError::Broken(String::new())), true);
        check(cancelled(), false);
    }

    #[test]
    fn three_failures_in_a_row_make_it_failing_and_an_answer_makes_it_well() {
        let mut trial = Trial::new();
        for expected in [DOUBTED, DOUBTED, FAILING, FAILING] {
            trial.fail();
            assert_eq!(trial.state(), expected);
        }
        // A conversation that it refuses changes nothing.
        trial.call(1, Err(RuntimeError::Status(400)));
        assert_eq!(trial.state(), FAILING);
        trial.call(1, answer());
        assert_eq!(trial.state(), WELL);
        let (_, error) = trial
            .record
            .status
            .last_error
            .as_ref()
            .expect("it stays to be seen");
        assert_eq!(error, "it answered with HTTP status 500. Read its log");
        for _ in 0..10 {
            trial.fail();
            trial.call(1, answer());
        }
        assert_eq!(trial.state(), WELL);
        // Text is missing, but it has answered.
        trial.fail();
        trial.call(1, Err(RuntimeError::NoText(Tokens::default())));
        assert_eq!(trial.state(), WELL);
    }

    /// A runtime that hung behind clients with less patience than `runtime.timeout` counted as well
    /// for ever.
    #[test]
    fn clients_that_give_up_after_a_long_time_count() {
        let mut trial = Trial::new();
        trial.call(2, answer());
        for (seconds, expected) in [(5, WELL), (6, DOUBTED), (60, DOUBTED), (6, FAILING)] {
            trial.call(seconds, cancelled());
            assert_eq!(trial.state(), expected, "{seconds}");
        }
        let (_, error) = trial.record.status.last_error.as_ref().expect("an error");
        assert!(error.contains("no complete answer in 6.0 s"), "{error}");
    }

    #[test]
    fn clients_that_stop_a_slow_and_healthy_model_do_not_count() {
        let mut trial = Trial::new();
        trial.call(40, answer());
        for _ in 0..10 {
            trial.call(79, cancelled());
        }
        assert_eq!(trial.state(), WELL);
        trial.call(81, cancelled());
        assert_eq!(trial.state(), DOUBTED);
        // Its recent answers are what counts.
        (0..KEPT_TIMES).for_each(|_| trial.call(1, answer()));
        trial.call(6, cancelled());
        assert_eq!(trial.state(), DOUBTED);
    }

    #[test]
    fn a_probe_every_ten_seconds_while_it_does_not_answer() {
        let mut trial = Trial::new();
        assert!(
            !trial.probe(100, answer()),
            "a healthy runtime is not probed"
        );
        trial.fail();
        assert!(!trial.probe(9, answer()));
        assert!(trial.probe(1, answer()));
        assert_eq!(trial.state(), WELL, "it has failed once, and answers again");
        assert!(!trial.probe(100, answer()));
        trial.fail();
        assert!(trial.probe(10, Err(RuntimeError::Status(503))));
        assert_eq!(trial.state(), DOUBTED);
        assert!(!trial.probe(9, answer()));
        assert!(trial.probe(1, Err(RuntimeError::Status(400))));
        assert_eq!(trial.state(), DOUBTED);
        assert!(trial.probe(10, Err(RuntimeError::Status(503))));
        assert_eq!(trial.state(), FAILING, "a failed probe counts as a call");
        // One without a result, such as one whose thread could not be started, is tried again.
        trial.now += 10 * SECOND;
        assert!(trial.record.begin_due_probe(trial.now));
        trial.record.end_probe(trial.now, None);
        assert!(trial.probe(10, answer()));
    }

    #[test]
    fn a_failing_runtime_that_answers_a_probe_gets_one_call_at_a_time() {
        let mut trial = Trial::new();
        (0..3).for_each(|_| trial.fail());
        assert!(trial.probe(10, answer()));
        assert_eq!(trial.state(), WELL, "it works, and has no call");
        trial.record.status.running = 1;
        assert_eq!(trial.state(), (2, false, false));
        trial.fail();
        trial.record.status.running = 0;
        assert_eq!(trial.state(), FAILING, "its call failed");
        assert!(trial.probe(10, answer()));
        trial.call(1, answer());
        trial.record.status.running = 1;
        assert_eq!(trial.state(), WELL, "its call was answered");
    }
}
