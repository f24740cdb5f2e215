//! Runs the checks of the status page on a thread of its own: a runtime that is down takes its time
//! to say so.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use threadpool::ThreadPool;

use crate::checks::{self, Finding};
use crate::config::Config;
use crate::mutex::lock;
use crate::store::Store;
use crate::thread_pool;
use crate::when;

pub struct CheckRunner {
    thread: ThreadPool,
    latest: Arc<Mutex<Option<Arc<CheckRun>>>>,
}

pub struct CheckRun {
    pub findings: Vec<Finding>,
    /// The Unix time of the run.
    pub time: i64,
    pub at: Instant,
}

impl CheckRunner {
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            thread: thread_pool::start("checks", 1)?,
            latest: Arc::default(),
        })
    }

    pub fn latest(&self) -> Option<Arc<CheckRun>> {
        lock(&self.latest).clone()
    }

    /// Starts the checks if the results are older than `max_age`.
    pub fn start(&self, config: &Arc<Config>, store: &Arc<Store>, max_age: Duration) {
        let latest = lock(&self.latest);
        let is_fresh = latest
            .as_ref()
            .is_some_and(|run| run.at.elapsed() < max_age);
        if !is_fresh && !self.are_running() {
            // The thread holds the store only while the checks run: it must not be the last owner
            // when the service ends.
            let (config, store) = (Arc::clone(config), Arc::clone(store));
            let results = Arc::clone(&self.latest);
            self.thread.execute(move || {
                let findings = checks::check_running_service(&config, &store);
                *lock(&results) = Some(Arc::new(CheckRun {
                    findings,
                    time: when::now(),
                    at: Instant::now(),
                }));
            });
        }
    }

    pub fn are_running(&self) -> bool {
        self.thread.queued_count() + self.thread.active_count() > 0
    }
}
