//! Threads that repeat their steps until they are stopped.

use std::io;
use std::mem;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::database::DatabaseError;

/// The pause after a round that panicked.
const PANIC_PAUSE: Duration = Duration::from_secs(5);

/// Called if another process serves in the place of this one, which can't write then.
pub(super) type OnReplaced = Arc<dyn Fn(&DatabaseError) + Send + Sync>;

/// A thread that stops when the value is dropped.
pub(super) struct Task {
    /// Both are `None` only while it is dropped.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Task {
    pub fn start(name: &str, run: impl FnOnce(&StopSignal) + Send + 'static) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let thread = thread::Builder::new()
            .name(name.into())
            .spawn(move || run(&StopSignal(stopped)))?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The end of a task's channel: disconnected when the task has to stop.
pub(super) struct StopSignal(Receiver<()>);

impl StopSignal {
    /// Waits, and returns true if the task has to stop: dropping the sender ends the wait.
    pub fn wait(&self, time: Duration) -> bool {
        self.0.recv_timeout(time) != Err(RecvTimeoutError::Timeout)
    }

    /// Runs all steps until the task has to stop, with a pause after each round. A step that fails
    /// does not prevent others.
    pub fn repeat<const N: usize>(&self, pause: Duration, mut steps: [TaskStep; N]) {
        loop {
            let panicked = steps
                .iter_mut()
                .map(TaskStep::run)
                .filter(|did_return| !did_return)
                .count();
            if self.wait(if panicked == 0 { pause } else { PANIC_PAUSE }) {
                return;
            }
        }
    }
}

/// One step of a task's round.
pub(super) struct TaskStep<'a> {
    /// The name in the log.
    name: &'static str,
    /// Returns false if there was nothing to do.
    work: Box<dyn FnMut() -> Result<bool, DatabaseError> + 'a>,
    /// The failures since the last success, and whether one was logged.
    failures: u32,
    is_logged: bool,
}

impl<'a> TaskStep<'a> {
    pub fn new(name: &'static str, work: impl FnMut() -> Result<bool, DatabaseError> + 'a) -> Self {
        Self {
            name,
            work: Box::new(work),
            failures: 0,
            is_logged: false,
        }
    }

    /// Logs the first of several failures, and the next success. A round without work is no
    /// success. The engine already logs that the database is unavailable; one lost connection is
    /// not worth a line. Returns false after a panic.
    fn run(&mut self) -> bool {
        let name = self.name;
        let result = panic::catch_unwind(AssertUnwindSafe(&mut self.work));
        match &result {
            Ok(Ok(false)) | Ok(Err(DatabaseError::Unavailable(_))) => {}
            Ok(Ok(true)) => {
                self.failures = 0;
                if mem::take(&mut self.is_logged) {
                    log::info!("{name} works again");
                }
            }
            Ok(Err(error)) => {
                self.failures += 1;
                let is_new = self.failures > 1 || !matches!(error, DatabaseError::Unknown(_));
                if is_new && !mem::replace(&mut self.is_logged, true) {
                    log::error!(
                        "{name} failed: {error}. Requests continue, and the next round tries again"
                    );
                }
            }
            Err(_) => {
                self.is_logged = true;
                log::error!("{name}: a round panicked; the line before says where");
            }
        }
        result.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_stops_when_it_is_dropped_and_not_when_it_panics() {
        let (sender, rounds) = mpsc::channel();
        let task = Task::start("test", move |stop| {
            let mut number = 0;
            let step = TaskStep::new("test", || {
                number += 1;
                sender.send(number).expect("the test listens");
                assert_ne!(number, 2, "on purpose");
                Ok(true)
            });
            stop.repeat(Duration::ZERO, [step]);
        })
        .expect("a thread");
        assert_eq!(rounds.recv(), Ok(1));
        assert_eq!(rounds.recv(), Ok(2));
        drop(task);
        assert!(
            rounds.iter().next().is_none(),
            "it waits after a panic, and the stop ends that wait"
        );
    }

    #[test]
    fn a_step_that_fails_or_panics_does_not_prevent_the_others() {
        let (sender, rounds) = mpsc::channel();
        let task = Task::start("test", move |stop| {
            let steps = [
                TaskStep::new("panicking", || panic!("on purpose")),
                TaskStep::new("failing", || Err(DatabaseError::NoRow)),
                TaskStep::new("working", || {
                    sender.send(()).expect("the test listens");
                    Ok(true)
                }),
            ];
            stop.repeat(Duration::ZERO, steps);
        })
        .expect("a thread");
        assert_eq!(rounds.recv(), Ok(()));
        drop(task);
    }

    #[test]
    fn a_round_without_work_is_no_success() {
        let mut results = [Err(DatabaseError::NoRow), Ok(false), Ok(true)].into_iter();
        let mut step = TaskStep::new("test", || results.next().expect("a result"));
        let is_logged = [(); 3].map(|()| {
            assert!(step.run());
            step.is_logged
        });
        assert_eq!(is_logged, [true, true, false]);
    }
}
