//! The tasks of the ledger, each on its own thread: readiness, retention and the gateway's
//! heartbeat. If one fails, requests continue, and the next round tries again.

mod readiness;
mod task;

use std::io;
use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use self::readiness::Readiness;
use self::task::{OnReplaced, StopSignal, Task, TaskStep};
use crate::checks;
use crate::database::DatabaseError;
use crate::database::postgres::session_lock::SessionLock;
use crate::ledger::{RetentionState, ServeLock};
use crate::store::Store;
use crate::text::count;

/// The pause between two heartbeats of a gateway.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// The pause between two searches for old rows.
const RETENTION_INTERVAL: Duration = Duration::from_secs(3600);

/// The most rows that one transaction removes: its sync takes less time than the removal, and a row
/// that waits for both is hardly delayed.
const REMOVAL_BATCH: i64 = 1000;

/// The pause after the removal of a batch of rows, as a multiple of the time of that removal:
/// requests come first.
const REMOVAL_PAUSE: u32 = 4;

/// All tasks. Dropping it stops them, and waits until failed sign-ins are written.
#[expect(dead_code, reason = "they are stopped when they are dropped")]
pub struct LedgerTasks(Vec<Task>);

impl LedgerTasks {
    /// Starts the tasks; fails if the system does not allow another thread.
    pub fn start(
        store: &Arc<Store>,
        readiness: &Arc<Readiness>,
        retention_days: Option<u32>,
        lock: ServeLock,
        replaced: impl Fn(&DatabaseError) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let replaced: OnReplaced = Arc::new(replaced);
        let mut tasks = vec![readiness::watch(
            Arc::clone(readiness),
            Arc::clone(&replaced),
        )?];
        if let Some(days) = retention_days {
            tasks.push(retention(Arc::clone(store), days)?);
        }
        if let ServeLock::Session(lock) = lock {
            tasks.push(presence(Arc::clone(store), *lock, replaced)?);
        }
        Ok(Self(tasks))
    }
}

/// Updates the gateway's heartbeat.
fn presence(store: Arc<Store>, mut lock: SessionLock, replaced: OnReplaced) -> io::Result<Task> {
    Task::start("presence", move |stop| {
        let keep = TaskStep::new("presence", || match store.ledger.keep_presence(&mut lock) {
            Err(error) if error.is_replaced() => {
                replaced(&error);
                Ok(false)
            }
            result => result.map(|()| true),
        });
        stop.repeat(HEARTBEAT_INTERVAL, [keep]);
    })
}

/// Removes old rows from the ledger.
fn retention(store: Arc<Store>, days: u32) -> io::Result<Task> {
    Task::start("retention", move |stop| {
        let mut was_held = false;
        let remove = TaskStep::new("retention", || {
            let now = store.ledger.clock()?;
            let state = store.ledger.retention(days, now)?;
            let is_held = matches!(state, RetentionState::Held { .. });
            if mem::replace(&mut was_held, is_held) != is_held {
                match state {
                    RetentionState::Held { before } => {
                        log::warn!("{}", checks::retention_held(before))
                    }
                    _ => log::info!("retention continues"),
                }
            }
            let RetentionState::Due { before } = state else {
                return Ok(false);
            };
            let removed = remove_all(stop, || {
                store.ledger.remove_before(before, now, REMOVAL_BATCH)
            })?;
            if removed > 0 {
                let (rows, days) = (count(removed as i64, "row"), count(days.into(), "day"));
                log::info!("removed {rows} older than {days} from the ledger");
            }
            Ok(removed > 0)
        });
        stop.repeat(RETENTION_INTERVAL, [remove]);
    })
}

/// Calls `remove` until nothing is left to remove. Returns how many rows it removed.
fn remove_all(
    stop: &StopSignal,
    remove: impl Fn() -> Result<usize, DatabaseError>,
) -> Result<usize, DatabaseError> {
    let mut removed = 0;
    loop {
        let began = Instant::now();
        match remove() {
            Ok(0) => return Ok(removed),
            Ok(count) => removed += count,
            // Others use the database. The next round is an hour away, so this one continues.
            Err(DatabaseError::Busy | DatabaseError::NoConnection) => {}
            Err(error) => return Err(error),
        }
        if stop.wait(began.elapsed() * REMOVAL_PAUSE) {
            return Ok(removed);
        }
    }
}
