//! Tasks beside the requests, each on a thread of its own: sealing, checkpoints and retention. If one fails, requests go
//! on, and the next round tries again.

mod checkpoints;
mod retention;
mod sealing;

use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::store::Store;

/// The pause after a round that panicked.
const AFTER_PANIC: Duration = Duration::from_secs(5);

/// All tasks. Dropping it stops them, and waits until sealing has sealed every row.
pub struct Background(#[expect(dead_code, reason = "they are stopped when they are dropped")] Vec<Task>);

impl Background {
    pub fn start(store: &Arc<Store>, retention_days: Option<u32>) -> Self {
        let mut tasks = vec![sealing::start(Arc::clone(store)), checkpoints::start(Arc::clone(store))];
        tasks.extend(retention_days.map(|days| retention::start(Arc::clone(store), days)));
        Self(tasks)
    }
}

struct Task {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Task {
    fn start(name: &str, run: impl FnOnce(Stop) + Send + 'static) -> Self {
        let (stop, stopped) = mpsc::channel();
        let thread = thread::Builder::new()
            .name(name.into())
            .spawn(move || run(Stop(stopped)))
            .expect("a thread should start");
        Self { stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Says when a task has to stop.
struct Stop(Receiver<()>);

impl Stop {
    /// Waits, and returns true if the task has to stop. Nothing is ever sent: dropping the sender ends the wait.
    fn wait(&self, time: Duration) -> bool {
        self.0.recv_timeout(time) != Err(RecvTimeoutError::Timeout)
    }

    /// Runs `round` until the task has to stop, with the pause that it returns after each.
    fn repeat(&self, mut round: impl FnMut() -> Duration) {
        loop {
            let pause = panic::catch_unwind(AssertUnwindSafe(&mut round)).unwrap_or_else(|_| {
                let name = thread::current().name().unwrap_or_default().to_owned();
                log::error!("{name}: a round panicked; the line before says where");
                AFTER_PANIC
            });
            if self.wait(pause) {
                return;
            }
        }
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
            stop.repeat(|| {
                number += 1;
                sender.send(number).expect("the test listens");
                assert_ne!(number, 2, "on purpose");
                Duration::ZERO
            });
        });
        assert_eq!(rounds.recv(), Ok(1));
        assert_eq!(rounds.recv(), Ok(2));
        drop(task);
        assert!(rounds.iter().next().is_none(), "it waits after a panic, and the stop ends that wait");
    }
}
