//! A fixed number of threads that take jobs in the order in which they came.
//!
//! The thread that went idle last is woken first: what it needs is still in the processor's cache, and the memory of
//! the others stays untouched for as long as they are not needed.

use std::collections::VecDeque;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, Thread};

type Job = Box<dyn FnOnce() + Send>;

pub struct Pool {
    state: Arc<Mutex<State>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// The threads that wait for a job.
    idle: Vec<Thread>,
    /// A thread was woken and has not come to take a job yet. It wakes the next one, if that is still needed: those
    /// that are awake anyway may have done the jobs by then.
    waking: bool,
    /// No more jobs come.
    closed: bool,
}

impl State {
    /// The thread to be woken, if there is a job for one and none is on its way.
    fn next_to_wake(&mut self) -> Option<Thread> {
        let thread = if self.waking || self.jobs.is_empty() { None } else { self.idle.pop() };
        self.waking |= thread.is_some();
        thread
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
        self.put(|jobs| jobs.push_back(Box::new(job)));
    }

    /// Does a job before all that wait: it is the rest of one that was begun.
    pub fn execute_next(&self, job: impl FnOnce() + Send + 'static) {
        self.put(|jobs| jobs.push_front(Box::new(job)));
    }

    fn put(&self, put: impl FnOnce(&mut VecDeque<Job>)) {
        let idle = {
            let mut state = lock(&self.state);
            put(&mut state.jobs);
            state.next_to_wake()
        };
        idle.inspect(Thread::unpark);
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
    loop {
        let mut held = lock(state);
        if let Some(job) = held.jobs.pop_front() {
            return Some(job);
        }
        if held.closed {
            return None;
        }
        held.idle.push(this.clone());
        drop(held);
        thread::park();
        let mut held = lock(state);
        // Whoever has woken it has struck it off; a thread may also wake up for no reason.
        match held.idle.iter().position(|other| other.id() == this.id()) {
            Some(place) => drop(held.idle.remove(place)),
            None => held.waking = false,
        }
        if let Some(job) = held.jobs.pop_front() {
            let next = held.next_to_wake();
            drop(held);
            next.inspect(Thread::unpark);
            return Some(job);
        }
    }
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
