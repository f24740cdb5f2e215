//! A thread that does a chore again and again beside the requests, for as long as the service runs.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// The last place in the system's order: behind everyone who waits for an answer.
const NICE: i32 = 19;

/// It ends when the value goes.
pub struct Chore {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Chore {
    /// Does `round` until the end, with the rest after each that it asks for; it gives nothing where it was ended. The
    /// rests inside a round are taken with the function that it gets, which says whether to go on.
    pub fn start(
        name: &str,
        round: impl Fn(&dyn Fn(Duration) -> bool) -> Option<Duration> + Send + 'static,
    ) -> Self {
        let (stop, stopped) = mpsc::channel();
        let thread = thread::Builder::new()
            .name(name.into())
            .spawn(move || {
                // In Linux this is a thread's own. Where it is refused, it only shares the processor alike.
                let _ = rustix::process::setpriority_process(None, NICE);
                // Nothing is ever sent: the other end goes, and that ends the wait.
                let rest = |time| stopped.recv_timeout(time) == Err(RecvTimeoutError::Timeout);
                while round(&rest).is_some_and(rest) {}
            })
            .expect("a thread should start");
        Self { stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for Chore {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
