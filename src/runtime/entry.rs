//! A configured runtime: its health, its running calls, and its last answers.

use std::collections::VecDeque;
use std::mem;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ureq::http::Uri;

use super::chat::Generated;
use super::error::RuntimeError;
use crate::client::CallError;
use crate::mutex::lock;
use crate::when;

/// The number of answers in the median.
const KEPT: usize = 100;

/// The least time between two logged failures of a runtime. If it fails again sooner, it was not
/// back: a probe succeeds, but calls fail. So it is not probed before this time is over either, and
/// fails at most one request a minute.
const FAILURE_INTERVAL: Duration = Duration::from_secs(60);

/// The calls and probes in a row that have to fail before a runtime is failing: one failure alone
/// is no verdict.
const SEVERAL: u32 = 3;

/// The time for which failed calls count although a probe has succeeded since: a probe does not
/// prove that calls do.
const RECENT: Duration = Duration::from_secs(300);

pub(super) struct RuntimeEntry {
    pub url: String,
    /// The URL of its completions, parsed once.
    pub uri: Uri,
    running: AtomicUsize,
    state: Mutex<RuntimeState>,
}

#[derive(Default)]
struct RuntimeState {
    /// `None` if it is healthy.
    failed_since: Option<Instant>,
    failures: u64,
    /// The calls that have failed since its last answer, and the probes since the last that
    /// succeeded.
    failed_calls: u32,
    failed_probes: u32,
    last_answer: Option<Instant>,
    last_failure: Option<Instant>,
    last_error: Option<(i64, String)>,
    /// It has failed, and is probed.
    is_probed: bool,
    /// When probes last began.
    last_outage: Option<Instant>,
    /// The log's last line about this runtime says that it has failed.
    is_logged: bool,
    answer_times: VecDeque<Duration>,
}

/// The status of a runtime, for the status page and the metrics.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RuntimeStatus {
    pub url: String,
    pub running: usize,
    /// When it failed, in Unix seconds; `None` if it is healthy.
    pub failed_since: Option<i64>,
    /// Several calls or probes in a row have failed.
    pub is_failing: bool,
    /// When calls last succeeded and failed.
    pub last_answer: Option<Instant>,
    pub last_failure: Option<Instant>,
    /// The failed calls since the start.
    pub failures: u64,
    /// The median of its last answers, at most 100 of them; `None` if there were none since the
    /// start.
    pub median: Option<Duration>,
    /// When a call last failed since the start, in Unix seconds, and why.
    pub last_error: Option<(i64, String)>,
}

impl RuntimeEntry {
    pub fn new(url: &str) -> Self {
        Self {
            url: url.to_owned(),
            uri: format!("{url}/chat/completions")
                .parse()
                .expect("the configuration has checked the address"),
            running: AtomicUsize::new(0),
            state: Mutex::default(),
        }
    }

    /// The sort key: healthy runtimes come first, and among these the least busy.
    pub fn rank(&self) -> (bool, usize) {
        (
            lock(&self.state).failed_since.is_some(),
            self.running.load(Ordering::Relaxed),
        )
    }

    /// Counts a call as running until the result is dropped.
    pub fn begin_call(&self) -> impl Drop {
        struct CallGuard<'a>(&'a AtomicUsize);
        impl Drop for CallGuard<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::Relaxed);
            }
        }
        self.running.fetch_add(1, Ordering::Relaxed);
        CallGuard(&self.running)
    }

    /// Notes the result of a call. A prompt that is too long, or a client that has gone, says
    /// nothing about the runtime. Nor does the success of a call that was sent before the runtime
    /// failed.
    pub fn note(&self, sent: Instant, result: &Result<Generated, RuntimeError>) {
        let mut state = lock(&self.state);
        match result {
            Ok(_) => {
                state.answer_times.truncate(KEPT - 1);
                state.answer_times.push_front(sent.elapsed());
                state.failed_since.take_if(|since| sent >= *since);
                if state.failed_since.is_none() {
                    (state.failed_calls, state.failed_probes) = (0, 0);
                    state.last_answer = Some(Instant::now());
                    // A probe that succeeds does not prove that calls do.
                    if mem::take(&mut state.is_logged) {
                        log::info!("runtime {} is back", self.url);
                    }
                }
            }
            Err(RuntimeError::Call(CallError::Cancelled) | RuntimeError::ContextExceeded(_)) => {}
            Err(error) => {
                state.failures += 1;
                state.failed_calls = state.failed_calls.saturating_add(1);
                state.last_failure = Some(Instant::now());
                state.last_error = Some((when::now(), error.diagnosis()));
                state.failed_since.get_or_insert_with(Instant::now);
            }
        }
        state.note_outage(&self.url);
    }

    /// Begins the probes of a runtime that has failed, if they are due. Returns the number of its
    /// failures so far while it is probed.
    pub fn begin_due_probe(&self) -> Option<u64> {
        let mut state = lock(&self.state);
        state.note_outage(&self.url);
        state.is_probed.then_some(state.failures)
    }

    /// Notes that a probe succeeded, so that calls are tried again, unless one has failed since
    /// `failures` was read.
    pub fn recover(&self, failures: u64) {
        let mut state = lock(&self.state);
        if state.failures == failures {
            (state.failed_since, state.failed_probes) = (None, 0);
            state.note_outage(&self.url);
        }
    }

    pub fn note_failed_probe(&self) {
        let mut state = lock(&self.state);
        if state.failed_since.is_some() {
            state.failed_probes = state.failed_probes.saturating_add(1);
        }
    }

    pub fn status(&self) -> RuntimeStatus {
        let state = lock(&self.state);
        let mut times: Vec<Duration> = state.answer_times.iter().copied().collect();
        times.sort();
        RuntimeStatus {
            url: self.url.clone(),
            running: self.running.load(Ordering::Relaxed),
            failed_since: state
                .failed_since
                .map(|since| when::now() - since.elapsed().as_secs() as i64),
            is_failing: state.is_failing(),
            last_answer: state.last_answer,
            last_failure: state.last_failure,
            failures: state.failures,
            median: times.get(times.len() / 2).copied(),
            last_error: state.last_error.clone(),
        }
    }
}

impl RuntimeState {
    fn is_failing(&self) -> bool {
        let is_recent = || {
            self.last_failure
                .is_some_and(|time| time.elapsed() < RECENT)
        };
        self.failed_calls.saturating_add(self.failed_probes) >= SEVERAL
            && (self.failed_since.is_some() || is_recent())
    }

    /// Begins or ends the probes, and logs that the runtime has failed, once until a call succeeds.
    fn note_outage(&mut self, url: &str) {
        let is_failed = self.failed_since.is_some();
        let is_too_soon = || {
            self.last_outage
                .is_some_and(|last| last.elapsed() < FAILURE_INTERVAL)
        };
        if is_failed == self.is_probed || (is_failed && is_too_soon()) {
            return;
        }
        self.is_probed = is_failed;
        if is_failed {
            self.last_outage = Some(Instant::now());
            if !mem::replace(&mut self.is_logged, true) {
                let error = self.last_error.as_ref().map_or("", |(_, error)| error);
                log::warn!(
                    "runtime {url} has failed: {error}. Until it is back, it is called after all others"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Tokens;

    fn answer() -> Result<Generated, RuntimeError> {
        Ok(Generated {
            content: "x".into(),
            finish_reason: None,
            tokens: Tokens::default(),
        })
    }

    fn is_failed(entry: &RuntimeEntry) -> bool {
        entry.status().failed_since.is_some()
    }

    #[test]
    fn the_median_of_the_last_answers_and_the_last_error() {
        let entry = RuntimeEntry::new("http://a/v1");
        assert_eq!(
            entry.status(),
            RuntimeStatus {
                url: "http://a/v1".into(),
                ..RuntimeStatus::default()
            }
        );
        for number in 0..300 {
            entry.note(
                Instant::now() - Duration::from_millis(1000 * number),
                &answer(),
            );
        }
        assert_eq!(
            entry.status().median.map(|median| median.as_secs()),
            Some(250)
        );
        entry.note(Instant::now(), &Err(RuntimeError::Status(500)));
        for no_fault in [
            RuntimeError::Call(CallError::Cancelled),
            RuntimeError::ContextExceeded(None),
        ] {
            entry.note(Instant::now(), &Err(no_fault));
        }
        let status = entry.status();
        assert!(
            is_failed(&entry) && status.failures == 1 && status.median.is_some(),
            "{status:?}"
        );
        assert_eq!(
            status.last_error.expect("an error").1,
            "it answered with HTTP status 500. Read its log"
        );
        entry.note(Instant::now(), &answer());
        assert!(
            !is_failed(&entry) && entry.status().last_error.is_some(),
            "the error stays to be seen"
        );
    }

    #[test]
    fn a_call_sent_before_the_failure_does_not_end_it() {
        let entry = RuntimeEntry::new("http://a/v1");
        let sent = Instant::now();
        entry.note(Instant::now(), &Err(RuntimeError::Status(503)));
        entry.note(sent, &answer());
        assert!(is_failed(&entry));
        entry.note(Instant::now(), &answer());
        assert!(!is_failed(&entry));
    }

    #[test]
    fn a_probe_counts_unless_a_call_has_failed_since() {
        let entry = RuntimeEntry::new("http://a/v1");
        assert_eq!(
            entry.begin_due_probe(),
            None,
            "a healthy runtime is not probed"
        );
        entry.note(Instant::now(), &Err(RuntimeError::Status(503)));
        assert_eq!(entry.begin_due_probe(), Some(1));
        entry.note(Instant::now(), &Err(RuntimeError::Status(503)));
        entry.recover(1);
        assert!(is_failed(&entry));
        entry.recover(2);
        assert!(!is_failed(&entry));
    }

    /// A runtime that answers probes and fails every call had two log lines, and one failed
    /// request, every two seconds.
    #[test]
    fn a_runtime_that_fails_again_is_logged_and_probed_after_a_minute() {
        let entry = RuntimeEntry::new("http://a/v1");
        let fail = || entry.note(Instant::now(), &Err(RuntimeError::Status(500)));
        let logged = || lock(&entry.state).is_logged;
        fail();
        assert!(logged());
        entry.recover(1);
        assert!(
            !is_failed(&entry) && logged(),
            "only a call that succeeds proves that it is back"
        );
        fail();
        assert_eq!(
            (entry.begin_due_probe(), logged(), is_failed(&entry)),
            (None, true, true)
        );
        lock(&entry.state).last_outage = Instant::now().checked_sub(FAILURE_INTERVAL);
        assert_eq!((entry.begin_due_probe(), logged()), (Some(2), true));
        entry.note(Instant::now(), &answer());
        assert!(!logged());
        fail();
        assert_eq!(
            (entry.begin_due_probe(), logged()),
            (None, false),
            "once a minute at most"
        );
    }

    #[test]
    fn several_failures_in_a_row_and_not_one_make_it_failing() {
        let entry = RuntimeEntry::new("http://a/v1");
        let fail = || entry.note(Instant::now(), &Err(RuntimeError::Status(500)));
        let is_failing = || entry.status().is_failing;
        for failures in 1..=SEVERAL {
            assert!(!is_failing());
            fail();
            entry.recover(failures.into());
        }
        assert!(is_failing(), "a probe does not prove that calls succeed");
        lock(&entry.state).last_failure = Instant::now().checked_sub(RECENT);
        assert!(!is_failing(), "but after some minutes the probe counts");
        fail();
        assert!(is_failing());
        entry.note(Instant::now(), &answer());
        assert!(!is_failing());
        fail();
        entry.note_failed_probe();
        assert!(!is_failing());
        entry.note_failed_probe();
        assert!(
            is_failing(),
            "a runtime that requests avoid fails its probes"
        );
        entry.recover(entry.status().failures);
        assert!(!is_failing());
    }

    #[test]
    fn running_calls_are_counted() {
        let entry = RuntimeEntry::new("http://a/v1");
        let calls = [entry.begin_call(), entry.begin_call()];
        assert_eq!(entry.status().running, 2);
        drop(calls);
        assert_eq!(entry.status().running, 0);
    }
}
