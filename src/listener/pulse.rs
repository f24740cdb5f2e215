//! Whether the listener is alive, for the watchdog: the loop answers when it is woken, and the workers start new work
//! within a request's deadline.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mio::Waker;

use super::load::Load;

pub struct Pulse {
    waker: Arc<Waker>,
    load: Arc<Load>,
    started: Instant,
    /// The loop was asked and has not answered yet.
    asked: AtomicBool,
    /// When a worker last started a request: milliseconds since `started`.
    work_started: AtomicU64,
}

impl Pulse {
    pub(super) fn new(waker: Arc<Waker>, load: Arc<Load>) -> Self {
        Self {
            waker,
            load,
            started: Instant::now(),
            asked: AtomicBool::new(false),
            work_started: AtomicU64::new(0),
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

    /// Whether all workers are busy and none has started a request within `deadline`: then each of them has been with
    /// its request for longer than a request may take.
    pub fn workers_stuck(&self, deadline: Duration) -> bool {
        let work_started = Duration::from_millis(self.work_started.load(Ordering::Acquire));
        self.load.all_workers_busy() && self.started.elapsed().saturating_sub(work_started) > deadline
    }

    /// The loop calls this once per turn.
    pub(super) fn answer(&self) {
        self.asked.store(false, Ordering::Release);
    }

    pub(super) fn work_started(&self) {
        let elapsed = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.work_started.store(elapsed, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use mio::{Poll, Token};

    use super::super::workers::Job;
    use super::super::{Limits, Ticket};
    use super::*;

    #[test]
    fn stuck_and_busy_are_told_apart() {
        let poll = Poll::new().expect("a poll");
        let waker = Arc::new(Waker::new(poll.registry(), Token(0)).expect("a waker"));
        let load = Arc::new(Load::new(&Limits { workers: 2, ..Limits::default() }));
        let pulse = Pulse::new(waker, Arc::clone(&load));
        let (none, long) = (Duration::ZERO, Duration::from_secs(3600));
        assert!(pulse.loop_answered(), "nothing was asked");
        pulse.ask().expect("a wake-up");
        assert!(!pulse.loop_answered());
        pulse.answer();
        assert!(pulse.loop_answered());
        std::thread::sleep(Duration::from_millis(2));
        let start = || {
            load.queue.push(Ticket::default(), Job::of("GET / HTTP/1.1\r\nHost: h\r\n\r\n", &load));
            load.queue.claim_tokens();
            let taken = load.queue.take().expect("the request");
            load.queue.start(taken, None).expect("a stranger has no limit");
        };
        start();
        assert!(!pulse.workers_stuck(none), "one worker is free");
        start();
        assert!(pulse.workers_stuck(none) && !pulse.workers_stuck(long));
        pulse.work_started();
        assert!(!pulse.workers_stuck(Duration::from_millis(500)), "a worker has just started a request");
    }
}
