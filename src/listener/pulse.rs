//! Tests for the watchdog whether the listener is alive: the loop answers when it is woken, and the workers start new work
//! within a request's deadline.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mio::Waker;

use super::load::Load;
use crate::mutex::lock;

pub struct Pulse {
    waker: Arc<Waker>,
    load: Arc<Load>,
    /// The loop was asked and has not answered yet.
    asked: AtomicBool,
    /// When a worker last started a request.
    work_started: Mutex<Instant>,
    /// When the look-up of a stranger began, if one runs.
    look_up: Mutex<Option<Instant>>,
}

impl Pulse {
    pub(super) fn new(waker: Arc<Waker>, load: Arc<Load>) -> Self {
        Self {
            waker,
            load,
            asked: AtomicBool::new(false),
            work_started: Mutex::new(Instant::now()),
            look_up: Mutex::default(),
        }
    }

    /// Wakes the loop; [`Self::loop_answered`] says later whether it came.
    pub fn ask(&self) -> io::Result<()> {
        self.asked.store(true, Ordering::Release);
        self.waker.wake()
    }

    pub fn loop_answered(&self) -> bool {
        !self.asked.load(Ordering::Acquire)
    }

    /// Returns true if all workers are busy and none has started a request within `deadline`: then each of them has been with
    /// its request for longer than a request may take. The same for the thread that looks up strangers.
    pub fn workers_stuck(&self, deadline: Duration) -> bool {
        let is_overdue = |began: Instant| began.elapsed() > deadline;
        (self.load.all_workers_busy() && is_overdue(*lock(&self.work_started)))
            || lock(&self.look_up).is_some_and(is_overdue)
    }

    /// The loop calls this once per turn.
    pub(super) fn answer(&self) {
        self.asked.store(false, Ordering::Release);
    }

    pub(super) fn work_started(&self) {
        *lock(&self.work_started) = Instant::now();
    }

    /// A look-up runs until the result is dropped.
    pub(super) fn start_look_up(&self) -> impl Drop {
        struct LookUp<'a>(&'a Pulse);
        impl Drop for LookUp<'_> {
            fn drop(&mut self) {
                *lock(&self.0.look_up) = None;
            }
        }
        *lock(&self.look_up) = Some(Instant::now());
        LookUp(self)
    }
}

#[cfg(test)]
mod tests {
    use mio::{Poll, Token};

    use super::*;
    use crate::listener::Limits;
    use crate::listener::queue::{Job, Ticket};

    #[test]
    fn stuck_is_not_busy() {
        let poll = Poll::new().expect("a poll");
        let waker = Arc::new(Waker::new(poll.registry(), Token(0)).expect("a waker"));
        let load = Arc::new(Load::new(&Limits {
            workers: 2,
            ..Limits::default()
        }));
        let pulse = Pulse::new(waker, Arc::clone(&load));
        let (none, long) = (Duration::ZERO, Duration::from_secs(3600));
        assert!(pulse.loop_answered(), "nothing was asked");
        pulse.ask().expect("a wake-up");
        assert!(!pulse.loop_answered());
        pulse.answer();
        assert!(pulse.loop_answered());
        std::thread::sleep(Duration::from_millis(2));
        let start = || {
            load.queue.push(Job::numbered(
                0,
                Ticket {
                    lane: Some("key_1".into()),
                    ..Ticket::default()
                },
            ));
            let Ok(job) = load.queue.take(None) else {
                panic!("no request")
            };
            load.queue.set_limit(&job.ticket.lane, None);
        };
        start();
        assert!(!pulse.workers_stuck(none), "one worker is free");
        start();
        assert!(pulse.workers_stuck(none) && !pulse.workers_stuck(long));
        pulse.work_started();
        assert!(
            !pulse.workers_stuck(Duration::from_millis(500)),
            "a worker has just started a request"
        );
    }
}
