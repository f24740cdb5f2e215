//! A few threads at a time may do something that takes much memory; the others wait for their turn.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

pub struct Turns {
    free: Mutex<usize>,
    freed: Condvar,
}

/// Ends when it is dropped.
pub struct Turn<'a>(&'a Turns);

impl Turns {
    pub fn new(at_once: usize) -> Self {
        Self { free: Mutex::new(at_once), freed: Condvar::new() }
    }

    /// Waits for a turn. Returns `None` if there is none before the deadline.
    pub fn take(&self, deadline: Instant) -> Option<Turn<'_>> {
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self.freed.wait_timeout_while(self.lock(), left, |free| *free == 0);
        let (mut free, _) = waited.unwrap_or_else(PoisonError::into_inner);
        *free = free.checked_sub(1)?;
        Some(Turn(self))
    }

    fn lock(&self) -> MutexGuard<'_, usize> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.lock() += 1;
        self.0.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_turn_is_given_on_and_waited_for_in_vain_until_the_deadline() {
        let turns = Turns::new(2);
        let now = Instant::now();
        let first = turns.take(now).expect("a free one");
        let _second = turns.take(now).expect("a free one");
        assert!(turns.take(now + Duration::from_millis(10)).is_none(), "two have one");
        thread::scope(|scope| {
            let third = scope.spawn(|| turns.take(now + Duration::from_secs(60)).is_some());
            drop(first);
            assert!(third.join().expect("no panic"), "it waits for the first to end");
        });
        let third = turns.take(now + Duration::from_secs(60));
        assert!(third.is_some() && turns.take(now).is_none(), "the number stays the same");
    }
}
