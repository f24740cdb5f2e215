//! Background tasks, each on its own thread: housekeeping, checkpoints, readiness, retention and the gateway's heartbeat. If
//! one fails, requests continue, and the next round tries again.

mod readiness;
mod task;

use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use self::readiness::Readiness;
use self::task::{StopSignal, Task, TaskStep};
use crate::checks;
use crate::store::{ServeLock, SessionLock, Store, StoreError};
use crate::text::count;
use crate::when;

/// The pause between two rounds of housekeeping, and between two heartbeats of a gateway.
const INTERVAL: Duration = Duration::from_secs(1);

/// The pause between two checks of the WAL's size. Requests are slower while a checkpoint syncs the database file, so it has
/// to be rare enough to affect fewer than one in a hundred of them.
const CHECKPOINT_INTERVAL: Duration = Duration::from_secs(1);

/// The pause between two searches for old rows.
const RETENTION_INTERVAL: Duration = Duration::from_secs(3600);

/// The most rows that one transaction removes: a write that waits for it is hardly delayed.
const REMOVAL_BATCH: i64 = 100;

/// The pause after the removal of a batch of rows, as a multiple of the time of that removal: requests come first.
const REMOVAL_PAUSE: u32 = 4;

/// All tasks. Dropping it stops them, waits until housekeeping has written what it noted, and releases the lock last.
#[expect(dead_code, reason = "they are stopped when they are dropped")]
pub struct Background(Vec<Task>, Option<ServeLock>);

impl Background {
    /// Starts the tasks. They call `replaced` if another process serves in the place of this one, which can't write then.
    pub fn start(
        store: &Arc<Store>,
        readiness: &Arc<Readiness>,
        retention_days: Option<u32>,
        lock: ServeLock,
        replaced: impl Fn(&StoreError) + Send + Sync + 'static,
    ) -> Self {
        let replaced = Arc::new(replaced);
        let mut tasks = vec![
            housekeeping(Arc::clone(store)),
            checkpoints(Arc::clone(store)),
            readiness::test_writes(Arc::clone(readiness), Arc::clone(&replaced)),
        ];
        tasks.extend(retention_days.map(|days| retention(Arc::clone(store), days)));
        match lock {
            ServeLock::Session(lock) => tasks.push(presence(Arc::clone(store), *lock, replaced)),
            ServeLock::File(_) => return Self(tasks, Some(lock)),
        }
        Self(tasks, None)
    }
}

/// Writes what requests have only noted: when keys were last used, which sign-ins failed, and outcomes that the database did
/// not take. Removes minutes and hours that are too old.
fn housekeeping(store: Arc<Store>) -> Task {
    Task::start("housekeeping", move |stop| {
        let mut minute = 0;
        let steps = [
            TaskStep::new("writing the last uses of keys", || store.write_uses()),
            TaskStep::new("writing failed sign-ins", || store.write_failed_sign_ins(when::now())),
            TaskStep::new("writing late outcomes", || store.settle()),
            TaskStep::new("removing old sums", || {
                let now = when::now();
                if mem::replace(&mut minute, now / 60) == now / 60 {
                    Ok(())
                } else {
                    store.remove_old_sums(now)
                }
            }),
        ];
        stop.repeat(INTERVAL, steps);
        let _ = store.write_uses();
        let _ = store.settle();
        let _ = store.write_failed_sign_ins(i64::MAX);
    })
}

/// Runs checkpoints, so that no request has to.
fn checkpoints(store: Arc<Store>) -> Task {
    Task::start("checkpoints", move |stop| {
        stop.repeat(CHECKPOINT_INTERVAL, [TaskStep::new("checkpoints", || store.checkpoint())]);
    })
}

/// Updates the gateway's heartbeat, and closes the rows that stopped gateways have left open.
fn presence(
    store: Arc<Store>,
    mut lock: SessionLock,
    replaced: Arc<impl Fn(&StoreError) + Send + Sync + 'static>,
) -> Task {
    Task::start("presence", move |stop| {
        let keep = TaskStep::new("presence", || match store.keep_presence(&mut lock) {
            Err(error) if error.is_replaced() => {
                replaced(&error);
                Ok(())
            }
            result => result,
        });
        stop.repeat(INTERVAL, [keep]);
    })
}

/// Removes old rows from the ledger and from the audit.
fn retention(store: Arc<Store>, days: u32) -> Task {
    Task::start("retention", move |stop| {
        // The clock is read first: if it jumps meanwhile, the jump is found.
        let limit = || -> Result<(i64, Option<i64>), StoreError> {
            Ok((store.clock()? - i64::from(days) * 86_400, store.clock_jump()?))
        };
        let mut was_distrusted = false;
        let ledger = TaskStep::new("retention", || {
            let (before, jump) = limit()?;
            if mem::replace(&mut was_distrusted, jump.is_some()) != jump.is_some() {
                match jump {
                    Some(last_seen) => log::warn!("the clock is {}", checks::clock_jumped(last_seen)),
                    None => log::info!("the clock is trusted again, so retention continues"),
                }
            }
            if jump.is_some() {
                return Ok(());
            }
            let removed = remove_all(stop, || store.remove_before(before, REMOVAL_BATCH))?;
            if removed > 0 {
                let (rows, days) = (count(removed as i64, "row"), count(days.into(), "day"));
                log::info!("removed {rows} older than {days} from the ledger");
            }
            Ok(())
        });
        let audit = TaskStep::new("retention of the audit", || match limit()? {
            (before, None) => remove_all(stop, || store.remove_audit_before(before, REMOVAL_BATCH)).map(drop),
            (_, Some(_)) => Ok(()),
        });
        stop.repeat(RETENTION_INTERVAL, [ledger, audit]);
    })
}

/// Calls `remove` until nothing is left to remove. Returns how many rows it removed.
fn remove_all(
    stop: &StopSignal,
    remove: impl Fn() -> Result<usize, StoreError>,
) -> Result<usize, StoreError> {
    let mut removed = 0;
    loop {
        let began = Instant::now();
        match remove() {
            Ok(0) => return Ok(removed),
            Ok(count) => removed += count,
            // Others use the database. The next round is an hour away, so this one continues.
            Err(StoreError::Busy | StoreError::NoConnection) => {}
            Err(error) => return Err(error),
        }
        if stop.wait(began.elapsed() * REMOVAL_PAUSE) {
            return Ok(removed);
        }
    }
}
