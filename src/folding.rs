//! A thread that folds the ledger's new rows into the console's sums, for as long as the service runs.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::store::{Store, StoreError};
use crate::when;

/// How many rows are folded at once: few enough that a request that waits for them does not notice.
const STEP: i64 = 500;

/// How many times as long as a step took the others have the ledger for themselves.
const REST: u32 = 4;

/// How often it is looked for new rows. What is newer, a page reads from the rows.
const ROUND: Duration = Duration::from_secs(2);

/// Behind everyone who waits for an answer.
const NICE: i32 = 10;

/// It ends when the value goes.
pub struct Folding {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Folding {
    pub fn start(store: Arc<Store>) -> Self {
        let (stop, stopped) = mpsc::channel();
        // Nothing is ever sent: the other end goes, and that ends the wait.
        let rest = move |time| stopped.recv_timeout(time) == Err(RecvTimeoutError::Timeout);
        let thread = thread::Builder::new()
            .name("folding".into())
            .spawn(move || {
                // In Linux this is a thread's own. Where it is refused, it only shares the processor alike.
                let _ = rustix::process::setpriority_process(None, NICE);
                while round(&store, &rest) && rest(ROUND) {}
            })
            .expect("a thread should start");
        Self { stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for Folding {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Folds all that is there now; whether to go on after it.
fn round(store: &Store, rest: &impl Fn(Duration) -> bool) -> bool {
    loop {
        let began = Instant::now();
        match store.fold(STEP, when::now()) {
            Ok(count) if count < STEP as usize => return true,
            // Others have the database; there will be another step.
            Ok(_) | Err(StoreError::Busy) => {}
            Err(error) => {
                log::error!("new rows could not be added to the console's sums: {error}");
                return true;
            }
        }
        if !rest(began.elapsed() * REST) {
            return false;
        }
    }
}
