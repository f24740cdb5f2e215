//! A counting semaphore: only a few threads at a time may do something, the others wait.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Instant;

use crate::mutex::lock;

pub struct Semaphore {
    state: Mutex<SemaphoreState>,
    freed: Condvar,
}

struct SemaphoreState {
    free: usize,
    waiting: usize,
}

/// Dropping it releases it.
pub struct Permit<'a>(&'a Semaphore);

impl Semaphore {
    pub fn new(at_once: usize) -> Self {
        let state = SemaphoreState { free: at_once, waiting: 0 };
        Self { state: Mutex::new(state), freed: Condvar::new() }
    }

    /// Waits for a permit. Returns `None` if there is none before the deadline.
    pub fn acquire(&self, deadline: Instant) -> Option<Permit<'_>> {
        let mut state = lock(&self.state);
        if state.free == 0 {
            state.waiting += 1;
            let left = deadline.saturating_duration_since(Instant::now());
            let waited = self.freed.wait_timeout_while(state, left, |state| state.free == 0);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            state.waiting -= 1;
        }
        state.free = state.free.checked_sub(1)?;
        Some(Permit(self))
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.free += 1;
        // A notification is a system call, even if no thread waits.
        if state.waiting > 0 {
            self.0.freed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_released_permit_goes_to_the_next_and_a_wait_ends_at_the_deadline() {
        let semaphore = Semaphore::new(2);
        let now = Instant::now();
        let first = semaphore.acquire(now).expect("a free one");
        let _second = semaphore.acquire(now).expect("a free one");
        assert!(semaphore.acquire(now + Duration::from_millis(10)).is_none(), "both permits are taken");
        thread::scope(|scope| {
            let third = scope.spawn(|| semaphore.acquire(now + Duration::from_secs(60)).is_some());
            drop(first);
            assert!(third.join().expect("no panic"), "it waits for the first to end");
        });
        let third = semaphore.acquire(now + Duration::from_secs(60));
        assert!(third.is_some() && semaphore.acquire(now).is_none(), "the number stays the same");
    }
}
