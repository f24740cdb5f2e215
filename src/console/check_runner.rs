//! Runs the checks of the status page on a thread of its own: a runtime that is down takes its time
//! to say so.

use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::Console;
use crate::checks::{self, Finding};
use crate::config::Config;
use crate::mutex::lock;
use crate::store::Store;
use crate::when;

pub struct CheckRunner {
    /// The thread holds the store only while the checks run: it must not be the last owner when the
    /// service ends.
    runs: SyncSender<(Arc<Config>, Arc<Store>)>,
    state: Arc<Mutex<CheckState>>,
}

#[derive(Default)]
struct CheckState {
    latest: Option<Arc<CheckRun>>,
    is_running: bool,
}

pub struct CheckRun {
    pub findings: Vec<Finding>,
    /// The Unix time of the run.
    pub time: i64,
    pub at: Instant,
}

impl CheckRunner {
    pub fn new() -> io::Result<Self> {
        let (runs, requested) = mpsc::sync_channel::<(Arc<Config>, Arc<Store>)>(1);
        let state = Arc::new(Mutex::new(CheckState::default()));
        let results = Arc::clone(&state);
        thread::Builder::new()
            .name("checks".into())
            .spawn(move || {
                for (config, store) in requested {
                    let check = || checks::check_running_service(&config, &store);
                    let findings = panic::catch_unwind(AssertUnwindSafe(check));
                    let mut state = lock(&results);
                    state.is_running = false;
                    if let Ok(findings) = findings {
                        state.latest = Some(Arc::new(CheckRun {
                            findings,
                            time: when::now(),
                            at: Instant::now(),
                        }));
                    }
                }
            })?;
        Ok(Self { runs, state })
    }

    pub fn latest(&self) -> Option<Arc<CheckRun>> {
        lock(&self.state).latest.clone()
    }

    /// Starts the checks if the results are older than `max_age`.
    pub fn start(&self, console: &Console, max_age: Duration) {
        let mut state = lock(&self.state);
        let latest = state.latest.as_ref();
        if state.is_running || latest.is_some_and(|run| run.at.elapsed() < max_age) {
            return;
        }
        let parts = (Arc::clone(&console.config), Arc::clone(&console.store));
        state.is_running = self.runs.try_send(parts).is_ok();
    }

    pub fn are_running(&self) -> bool {
        lock(&self.state).is_running
    }
}
