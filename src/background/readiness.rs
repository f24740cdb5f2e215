//! Readiness: whether the ledger accepts writes, by a test write every now and then.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::task::{Task, TaskStep};
use crate::mutex::lock;
use crate::store::{Store, StoreError};

/// The pause between two test writes to the ledger while health probes arrive or while writes fail.
const READINESS_INTERVAL: Duration = Duration::from_secs(1);

/// The pause otherwise: each test writes to the disk.
const UNPROBED_INTERVAL: Duration = Duration::from_secs(10);

/// If a test write takes longer than this, probes report that the gateway is not ready. A request waits as long for the
/// ledger: a disk that is slow for a second or two fails none.
const TEST_WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// The result of the last test write, for health probes. No probe waits for the database.
pub struct Readiness {
    store: Arc<Store>,
    accepts_writes: AtomicBool,
    /// When the test write in progress began.
    trying: Mutex<Option<Instant>>,
    /// A probe has arrived since the last test write.
    probed: AtomicBool,
}

impl Readiness {
    /// Makes one test write, so that the state is known from the start.
    pub fn new(store: &Arc<Store>) -> Self {
        let readiness = Self {
            store: Arc::clone(store),
            accepts_writes: AtomicBool::new(true),
            trying: Mutex::default(),
            probed: AtomicBool::new(false),
        };
        let _ = readiness.try_ledger();
        readiness
    }

    /// Returns false if a request could not be recorded now.
    pub fn accepts_writes(&self) -> bool {
        self.probed.store(true, Ordering::Relaxed);
        let is_late = lock(&self.trying).is_some_and(|began| began.elapsed() > TEST_WRITE_TIMEOUT);
        self.accepts_writes.load(Ordering::Relaxed) && !is_late && self.store.lost().is_none()
    }

    fn try_ledger(&self) -> Result<(), StoreError> {
        *lock(&self.trying) = Some(Instant::now());
        let result = self.store.try_request();
        *lock(&self.trying) = None;
        let did_accept = self.accepts_writes.swap(result.is_ok(), Ordering::Relaxed);
        match &result {
            Err(error @ StoreError::Unavailable(_)) => log::debug!("not ready: {error}"),
            Err(error) if did_accept => log::error!("not ready: the ledger can't be written: {error}"),
            Ok(()) if !did_accept => log::info!("ready again: the ledger can be written"),
            Ok(()) | Err(_) => {}
        }
        result
    }
}

/// Repeats the test write. Calls `replaced` if another process serves in the place of this one.
pub(super) fn test_writes(
    readiness: Arc<Readiness>,
    replaced: Arc<impl Fn(&StoreError) + Send + Sync + 'static>,
) -> Task {
    Task::start("readiness", move |stop| {
        let mut tried = Instant::now();
        let try_again = TaskStep::new("readiness", || {
            let is_urgent = readiness.probed.swap(false, Ordering::Relaxed)
                || !readiness.accepts_writes.load(Ordering::Relaxed);
            if is_urgent || tried.elapsed() >= UNPROBED_INTERVAL {
                if let Err(error) = readiness.try_ledger()
                    && error.is_replaced()
                {
                    replaced(&error);
                }
                tried = Instant::now();
            }
            Ok(())
        });
        stop.repeat(READINESS_INTERVAL, [try_again]);
    })
}
