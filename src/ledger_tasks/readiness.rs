//! Readiness: whether the ledger accepts rows. While health probes arrive or the ledger is
//! unavailable, test writes find out; otherwise nothing is written.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::task::{OnReplaced, Task, TaskStep};
use crate::database::DatabaseError;
use crate::store::Store;
use crate::when;

/// The pause between two rounds.
const INTERVAL: Duration = Duration::from_secs(1);

/// The pause between two looks whether this process may still write to the database.
const LOOK_INTERVAL: Duration = Duration::from_secs(10);

/// The state of the ledger, for health probes. No probe waits for the database.
pub struct Readiness {
    store: Arc<Store>,
    /// A probe has arrived since the last test write.
    probed: AtomicBool,
}

impl Readiness {
    /// Makes one test write, so that the state is known from the start.
    pub fn new(store: &Arc<Store>) -> Self {
        store.ledger.test_write();
        Self {
            store: Arc::clone(store),
            probed: AtomicBool::new(false),
        }
    }

    /// Notes a probe, and returns the reason why a request could not be recorded now.
    pub fn probe(&self) -> Option<DatabaseError> {
        self.probed.store(true, Ordering::Relaxed);
        self.store.ledger.outage()
    }
}

/// Makes the test writes, and writes the failed sign-ins that are due.
pub(super) fn watch(readiness: Arc<Readiness>, replaced: OnReplaced) -> io::Result<Task> {
    Task::start("readiness", move |stop| {
        let store = &readiness.store;
        let mut looked = Instant::now();
        let look = TaskStep::new("readiness", || {
            if readiness.probed.swap(false, Ordering::Relaxed) || store.ledger.is_test_due() {
                store.ledger.test_write();
            } else if looked.elapsed() >= LOOK_INTERVAL {
                store.ledger.check_identity();
                looked = Instant::now();
            }
            store
                .ledger
                .outage()
                .filter(DatabaseError::is_replaced)
                .inspect(|error| replaced(error));
            Ok(true)
        });
        let sign_ins = TaskStep::new("writing failed sign-ins", || {
            store.audit.write_failed_sign_ins(when::now())
        });
        stop.repeat(INTERVAL, [look, sign_ins]);
        let _ = store.audit.write_failed_sign_ins(i64::MAX);
    })
}
