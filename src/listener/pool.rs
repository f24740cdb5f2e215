//! A fixed number of threads that take jobs in the order in which they came.
//!
//! The thread that went idle last is woken first: what it needs is still in the processor's cache, and the memory of
//! the others stays untouched for as long as they are not needed. One of those without a job lingers a moment before it
//! rests: a job that comes meanwhile is begun at once, where that thread has been, and nobody has to be woken.

use std::collections::VecDeque;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long a thread lingers: the next request of a client that is waiting for its answer comes sooner than that.
const LINGER: Duration = Duration::from_micros(50);
/// One who lingers looks far more often than this.
const GLANCE: Duration = Duration::from_micros(5);

type Job = Box<dyn FnOnce() + Send>;

pub struct Pool {
    state: Arc<Mutex<State>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// The threads that rest until there is a job.
    idle: Vec<Thread>,
    /// When the thread that lingers last looked for a job.
    lingering: Option<Instant>,
    /// A thread was woken and has not come to take a job yet. It wakes the next one, if that is still needed: those
    /// that are awake anyway may have done the jobs by then.
    waking: bool,
    /// No more jobs come.
    closed: bool,
}

impl State {
    /// The thread to be woken, if there is a job for one and none is on its way.
    fn next_to_wake(&mut self) -> Option<Thread> {
        let taken_care_of = usize::from(self.is_watched());
        if self.waking || self.jobs.len() <= taken_care_of {
            return None;
        }
        let thread = self.idle.pop()?;
        self.waking = true;
        Some(thread)
    }

    /// Whether there is nothing to do, and there may be later.
    fn is_quiet(&self) -> bool {
        self.jobs.is_empty() && !self.closed
    }

    /// Whether somebody is about to see that there is a job. One who lingers may have lost its processor to another
    /// program.
    fn is_watched(&self) -> bool {
        self.lingering.is_some_and(|looked| looked.elapsed() < GLANCE)
    }
}

impl Pool {
    /// Starts the threads; each does `first` before anything else.
    pub(super) fn new(name: &str, count: usize, first: fn()) -> Self {
        let state = Arc::new(Mutex::new(State::default()));
        let start = |_| {
            let state = Arc::clone(&state);
            let work = move || {
                first();
                take_jobs(&state);
            };
            thread::Builder::new().name(name.into()).spawn(work).expect("the system should give a thread")
        };
        let threads = Mutex::new((0..count).map(start).collect());
        Self { state, threads }
    }

    pub(super) fn execute(&self, job: impl FnOnce() + Send + 'static) {
        lock(&self.state).jobs.push_back(Box::new(job));
        self.wake();
    }

    /// Leaves a job to those who are awake. Nobody is woken for it before a second one comes, or [`Self::wake`] tells
    /// that there is none: whoever hands out several goes on undisturbed.
    pub(super) fn leave(&self, job: impl FnOnce() + Send + 'static) {
        let is_first = {
            let jobs = &mut lock(&self.state).jobs;
            jobs.push_back(Box::new(job));
            jobs.len() == 1
        };
        if !is_first {
            self.wake();
        }
    }

    /// Does a job before all that wait: it is the rest of one that was begun.
    pub fn execute_next(&self, job: impl FnOnce() + Send + 'static) {
        lock(&self.state).jobs.push_front(Box::new(job));
        self.wake();
    }

    /// Sees to it that what was left is done.
    pub(super) fn wake(&self) {
        let thread = lock(&self.state).next_to_wake();
        thread.inspect(Thread::unpark);
    }

    /// Waits until all jobs are done and the threads have ended.
    pub(super) fn join(&self) {
        let idle = {
            let mut state = lock(&self.state);
            state.closed = true;
            std::mem::take(&mut state.idle)
        };
        idle.iter().for_each(Thread::unpark);
        for thread in lock(&self.threads).drain(..) {
            // It has nothing to say: a job's panic is not its end.
            let _ = thread.join();
        }
    }
}

fn take_jobs(state: &Mutex<State>) {
    let this = thread::current();
    while let Some(job) = next_job(state, &this) {
        // The panic was told where it happened; the job's own remains tell whoever waits for it.
        let _ = panic::catch_unwind(AssertUnwindSafe(job));
    }
}

/// Waits for a job; none at the end.
fn next_job(state: &Mutex<State>, this: &Thread) -> Option<Job> {
    let mut held = lock(state);
    if let Some(job) = held.jobs.pop_front() {
        return Some(job);
    }
    while held.is_quiet() {
        if held.lingering.is_none() {
            held = linger(state, held);
        }
        if held.is_quiet() {
            held = rest(state, held, this);
        }
    }
    let job = held.jobs.pop_front();
    let next = held.next_to_wake();
    drop(held);
    next.inspect(Thread::unpark);
    job
}

/// Looks for a job for a while, and lets every other thread go first.
fn linger<'a>(state: &'a Mutex<State>, mut held: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
    let began = Instant::now();
    let mut looked = began;
    while held.is_quiet() && looked - began < LINGER {
        held.lingering = Some(looked);
        drop(held);
        thread::yield_now();
        held = lock(state);
        looked = Instant::now();
    }
    held.lingering = None;
    held
}

/// Sleeps until it is woken.
fn rest<'a>(
    state: &'a Mutex<State>,
    mut held: MutexGuard<'a, State>,
    this: &Thread,
) -> MutexGuard<'a, State> {
    held.idle.push(this.clone());
    drop(held);
    thread::park();
    let mut held = lock(state);
    // Whoever has woken it has struck it off; a thread may also wake up for no reason.
    match held.idle.iter().position(|other| other.id() == this.id()) {
        Some(place) => drop(held.idle.remove(place)),
        None => held.waking = false,
    }
    held
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_panic_costs_no_thread_and_no_job() {
        let pool = Pool::new("test", 2, || {});
        let (sender, receiver) = mpsc::channel();
        for number in 0..100 {
            let sender = sender.clone();
            pool.execute(move || {
                assert!(number % 3 != 0, "on purpose");
                sender.send(number).expect("the test listens");
            });
        }
        drop(sender);
        pool.join();
        let mut done: Vec<i32> = receiver.iter().collect();
        done.sort_unstable();
        assert_eq!(done, (0..100).filter(|number| number % 3 != 0).collect::<Vec<_>>());
    }

    /// Whether one lingers or all rest: no job is left lying.
    #[test]
    fn what_was_left_is_done_when_it_is_told() {
        let pool = Pool::new("test", 2, || {});
        let (sender, receiver) = mpsc::channel();
        for number in 0..200 {
            if number % 2 == 0 {
                while lock(&pool.state).idle.len() < 2 {
                    thread::yield_now();
                }
            }
            let sender = sender.clone();
            pool.leave(move || sender.send(number).expect("the test listens"));
            pool.wake();
            assert_eq!(receiver.recv(), Ok(number));
        }
        pool.join();
    }

    #[test]
    fn one_who_lost_its_processor_is_not_waited_for() {
        let long_ago = Instant::now() - 2 * GLANCE;
        let state =
            |lingering| State { jobs: [Box::new(|| {}) as Job].into(), lingering, ..State::default() };
        assert!(!state(None).is_watched() && !state(Some(long_ago)).is_watched());
        let later = Instant::now() + Duration::from_secs(60);
        assert!(state(Some(later)).is_watched());
    }

    #[test]
    fn all_threads_work_at_once() {
        let pool = Pool::new("test", 4, || {});
        let together = Arc::new(std::sync::Barrier::new(4));
        for _ in 0..3 {
            for _ in 0..4 {
                let together = Arc::clone(&together);
                pool.execute(move || {
                    together.wait();
                });
            }
        }
        pool.join();
    }
}
