//! Signs of life, for whoever watches over the service: that the loop turns and that workers take what they are
//! given. A question goes the way of a request: it wakes the loop, and the loop gives it to a worker.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mio::Waker;

pub struct Pulse {
    waker: Arc<Waker>,
    started: Instant,
    /// The loop has not heard the question yet.
    asked: AtomicBool,
    /// No worker has heard it yet.
    waiting: AtomicBool,
    /// When a worker last took something, a question or a request: milliseconds from the start.
    taken: AtomicU64,
}

impl Pulse {
    pub(super) fn new(waker: Arc<Waker>) -> Self {
        Self {
            waker,
            started: Instant::now(),
            asked: AtomicBool::new(false),
            waiting: AtomicBool::new(false),
            taken: AtomicU64::new(0),
        }
    }

    pub fn ask(&self) -> io::Result<()> {
        self.asked.store(true, Ordering::Release);
        self.waker.wake()
    }

    /// Whether the loop has heard what it was asked.
    pub fn loop_turns(&self) -> bool {
        !self.asked.load(Ordering::Acquire)
    }

    /// Whether a worker has heard it too. Where all of them are at work, the question waits as a request does:
    /// then it is enough that one of them took its work no longer ago than `longest`.
    pub fn workers_take(&self, longest: Duration) -> bool {
        let taken = Duration::from_millis(self.taken.load(Ordering::Acquire));
        !self.waiting.load(Ordering::Acquire) || self.started.elapsed().saturating_sub(taken) <= longest
    }

    /// The loop turns. Whether there is a question to be given to a worker; there is one at a time.
    pub(super) fn turn(&self) -> bool {
        self.asked.load(Ordering::Relaxed)
            && self.asked.swap(false, Ordering::AcqRel)
            && !self.waiting.swap(true, Ordering::AcqRel)
    }

    /// A worker has taken a request.
    pub(super) fn take(&self) {
        let elapsed = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.taken.store(elapsed, Ordering::Release);
    }

    /// A worker has taken the question.
    pub(super) fn answer(&self) {
        self.take();
        self.waiting.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use mio::{Poll, Token};

    use super::*;

    #[test]
    fn who_counts_as_alive() {
        let poll = Poll::new().expect("a poll");
        let pulse = Pulse::new(Arc::new(Waker::new(poll.registry(), Token(0)).expect("a waker")));
        let (never, long) = (Duration::ZERO, Duration::from_secs(3600));
        assert!(pulse.loop_turns() && pulse.workers_take(never), "nobody was asked anything");
        std::thread::sleep(Duration::from_millis(2));
        pulse.ask().expect("it can be asked");
        assert!(!pulse.loop_turns() && pulse.workers_take(never), "the loop has to hear it first");
        assert!(pulse.turn(), "a worker is to hear it");
        assert!(pulse.loop_turns());
        assert!(!pulse.workers_take(never), "the question waits");
        assert!(pulse.workers_take(long), "all may be at work");
        pulse.ask().expect("it can be asked");
        assert!(!pulse.turn(), "one question is enough to wait");
        pulse.answer();
        assert!(pulse.workers_take(never));
    }
}
