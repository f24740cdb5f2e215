//! Tasks beside the requests, each on a thread of its own: housekeeping, checkpoints, readiness, retention and presence. If
//! one fails, requests continue, and the next round tries again.

use std::mem;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::checks;
use crate::store::{ServeLock, SessionLock, Store, StoreError};
use crate::text::count;
use crate::when;

/// The pause between two rounds of housekeeping.
const HOUSEKEEPING_INTERVAL: Duration = Duration::from_secs(1);

/// The pause between two checks of the WAL's size. Requests are slower while a checkpoint syncs the database file, so it
/// has to be rare enough to affect fewer than one in a hundred of them.
const CHECKPOINT_INTERVAL: Duration = Duration::from_secs(1);

/// How often a test write to the ledger is made while health probes arrive or while writes fail.
const READINESS_INTERVAL: Duration = Duration::from_secs(1);

/// How often it is made otherwise: each one writes to the disk.
const UNPROBED_INTERVAL: Duration = Duration::from_secs(10);

/// If a test write takes longer than this, probes report that the gateway is not ready. A request waits as long for the
/// ledger: a disk that is slow for a second or two fails none.
const TRY_TIME: Duration = Duration::from_secs(5);

/// How often a gateway updates its heartbeat.
const PRESENCE_INTERVAL: Duration = Duration::from_secs(1);

/// The pause between two searches for old rows.
const RETENTION_INTERVAL: Duration = Duration::from_secs(3600);

/// How many rows a transaction removes at most: a write that waits for it is hardly delayed.
const REMOVED_AT_ONCE: i64 = 100;

/// After a batch of rows is removed, the task leaves the database to requests for this many times as long as the batch took.
const REMOVAL_PAUSE: u32 = 4;

/// The pause after a round that panicked.
const AFTER_PANIC: Duration = Duration::from_secs(5);

/// All tasks. Dropping it stops them, waits until housekeeping has written what it noted, and releases the lock last.
#[expect(dead_code, reason = "they are stopped when they are dropped")]
pub struct Background(Vec<Task>, Option<ServeLock>);

impl Background {
    /// Calls `replaced` if another process may serve in the place of this one, which keeps this one from writing.
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
            try_ledger(Arc::clone(readiness), Arc::clone(&replaced)),
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
        stop.repeat(HOUSEKEEPING_INTERVAL, steps);
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
        stop.repeat(PRESENCE_INTERVAL, [keep]);
    })
}

/// Whether the ledger would accept a request: the result of the last test. No probe waits for the database.
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

    /// Whether the ledger accepts writes, for a probe.
    pub fn accepts_writes(&self) -> bool {
        self.probed.store(true, Ordering::Relaxed);
        let is_late = self.trying().is_some_and(|began| began.elapsed() > TRY_TIME);
        self.accepts_writes.load(Ordering::Relaxed) && !is_late && self.store.lost().is_none()
    }

    fn trying(&self) -> MutexGuard<'_, Option<Instant>> {
        self.trying.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_ledger(&self) -> Result<(), StoreError> {
        *self.trying() = Some(Instant::now());
        let result = self.store.try_request();
        *self.trying() = None;
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

fn try_ledger(
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
            let removed = remove_all(stop, || store.remove_before(before, REMOVED_AT_ONCE))?;
            if removed > 0 {
                let (rows, days) = (count(removed as i64, "row"), count(days.into(), "day"));
                log::info!("removed {rows} older than {days} from the ledger");
            }
            Ok(())
        });
        let audit = TaskStep::new("retention of the audit", || match limit()? {
            (before, None) => {
                remove_all(stop, || store.remove_audit_before(before, REMOVED_AT_ONCE)).map(drop)
            }
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
            // Others have the database. The next round is an hour away, so this one goes on.
            Err(StoreError::Busy | StoreError::NoConnection) => {}
            Err(error) => return Err(error),
        }
        if stop.wait(began.elapsed() * REMOVAL_PAUSE) {
            return Ok(removed);
        }
    }
}

/// A thread that runs until the value is dropped. `None` only while it is dropped.
struct Task(Option<(Sender<()>, JoinHandle<()>)>);

impl Task {
    fn start(name: &str, run: impl FnOnce(&StopSignal) + Send + 'static) -> Self {
        let (stop, stopped) = mpsc::channel();
        let thread = thread::Builder::new().name(name.into()).spawn(move || run(&StopSignal(stopped)));
        Self(Some((stop, thread.expect("a thread should start"))))
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.0.take() {
            drop(stop);
            let _ = thread.join();
        }
    }
}

/// Says when a task has to stop.
struct StopSignal(Receiver<()>);

impl StopSignal {
    /// Waits, and returns true if the task has to stop. Nothing is ever sent: dropping the sender ends the wait.
    fn wait(&self, time: Duration) -> bool {
        self.0.recv_timeout(time) != Err(RecvTimeoutError::Timeout)
    }

    /// Runs all steps, whether or not one of them fails, until the task has to stop, with a pause after each round.
    fn repeat<const N: usize>(&self, pause: Duration, mut steps: [TaskStep; N]) {
        loop {
            let panicked = steps.iter_mut().map(TaskStep::run).filter(|did_return| !did_return).count();
            if self.wait(if panicked == 0 { pause } else { AFTER_PANIC }) {
                return;
            }
        }
    }
}

/// One step of a task's round.
struct TaskStep<'a> {
    /// As the log calls it.
    name: &'static str,
    work: Box<dyn FnMut() -> Result<(), StoreError> + 'a>,
    /// How often it failed since it last succeeded, and whether the log says so.
    failures: u32,
    is_logged: bool,
}

impl<'a> TaskStep<'a> {
    fn new(name: &'static str, work: impl FnMut() -> Result<(), StoreError> + 'a) -> Self {
        Self { name, work: Box::new(work), failures: 0, is_logged: false }
    }

    /// Logs the first of several failures, and the recovery. The engine already logs that the database is unavailable; one
    /// lost connection is not worth a line. Returns false after a panic.
    fn run(&mut self) -> bool {
        let name = self.name;
        let result = panic::catch_unwind(AssertUnwindSafe(&mut self.work));
        match &result {
            Ok(Ok(())) => {
                self.failures = 0;
                if mem::take(&mut self.is_logged) {
                    log::info!("{name} works again");
                }
            }
            Ok(Err(StoreError::Unavailable(_))) => {}
            Ok(Err(error)) => {
                self.failures += 1;
                let is_new = self.failures > 1 || !matches!(error, StoreError::Unknown(_));
                if is_new && !mem::replace(&mut self.is_logged, true) {
                    log::error!("{name} failed: {error}. Requests continue, and the next round tries again");
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
                Ok(())
            });
            stop.repeat(Duration::ZERO, [step]);
        });
        assert_eq!(rounds.recv(), Ok(1));
        assert_eq!(rounds.recv(), Ok(2));
        drop(task);
        assert!(rounds.iter().next().is_none(), "it waits after a panic, and the stop ends that wait");
    }

    #[test]
    fn a_step_that_fails_or_panics_does_not_prevent_the_others() {
        let (sender, rounds) = mpsc::channel();
        let task = Task::start("test", move |stop| {
            let steps = [
                TaskStep::new("panicking", || panic!("on purpose")),
                TaskStep::new("failing", || Err(StoreError::NoRow)),
                TaskStep::new("working", || {
                    sender.send(()).expect("the test listens");
                    Ok(())
                }),
            ];
            stop.repeat(Duration::ZERO, steps);
        });
        assert_eq!(rounds.recv(), Ok(()));
        drop(task);
    }
}
