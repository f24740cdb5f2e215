//! A counting semaphore: only a few threads at a time may do something, the others wait. Keys take
//! turns: each key's oldest waiting thread is next, then that of the next key.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::thread::{self, Thread};
use std::time::Instant;

use crate::mutex::lock;

pub struct Semaphore {
    state: Mutex<SemaphoreState>,
}

struct SemaphoreState {
    free: usize,
    /// The waiting threads of each key that has any, the oldest first. The next key is the first.
    waiting: VecDeque<(String, VecDeque<Thread>)>,
    /// The key that took the last permit.
    last_key: String,
}

/// Dropping it releases it.
pub struct Permit<'a>(&'a Semaphore);

impl Semaphore {
    pub fn new(at_once: usize) -> Self {
        let state = SemaphoreState {
            free: at_once,
            waiting: VecDeque::new(),
            last_key: String::new(),
        };
        Self {
            state: Mutex::new(state),
        }
    }

    /// Waits for a permit. Returns `None` if there is none before the deadline.
    pub fn acquire(&self, deadline: Instant) -> Option<Permit<'_>> {
        self.acquire_in_turn("", deadline)
    }

    /// Waits for a permit, in turn with the threads of other keys. Returns `None` if there is none
    /// before the deadline.
    pub fn acquire_in_turn(&self, key: &str, deadline: Instant) -> Option<Permit<'_>> {
        let mut state = lock(&self.state);
        // A free permit is not reserved for the thread that was woken for it: the processors would
        // have nothing to do until that thread runs.
        if state.free == 0 {
            state.add_waiting(key);
            while state.free == 0 {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                drop(state);
                thread::park_timeout(left);
                state = lock(&self.state);
            }
            state.remove_waiting(key);
        }
        state.free = state.free.checked_sub(1)?;
        key.clone_into(&mut state.last_key);
        // Several permits may have been released before a woken thread took one.
        state.wake_next();
        Some(Permit(self))
    }
}

impl SemaphoreState {
    /// Adds the current thread to the waiting ones.
    fn add_waiting(&mut self, key: &str) {
        match self.waiting.iter_mut().find(|(known, _)| known == key) {
            Some((_, threads)) => threads.push_back(thread::current()),
            None => self
                .waiting
                .push_back((key.to_owned(), [thread::current()].into())),
        }
    }

    /// Removes the current thread from the waiting ones.
    fn remove_waiting(&mut self, key: &str) {
        let current = thread::current().id();
        for (_, threads) in self.waiting.iter_mut().filter(|(known, _)| known == key) {
            threads.retain(|thread| thread.id() != current);
        }
        self.waiting.retain(|(_, threads)| !threads.is_empty());
    }

    /// Wakes the thread whose turn it is, if there is a permit for it.
    fn wake_next(&mut self) {
        if self.free == 0 {
            return;
        }
        if self
            .waiting
            .front()
            .is_some_and(|(key, _)| *key == self.last_key)
        {
            self.waiting.rotate_left(1);
        }
        if let Some((_, threads)) = self.waiting.front() {
            threads[0].unpark();
        }
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.free += 1;
        state.wake_next();
    }
}

#[cfg(test)]
mod tests {
    use std::mem;
    use std::sync::Barrier;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_released_permit_goes_to_the_next_and_a_wait_ends_at_the_deadline() {
        let semaphore = Semaphore::new(2);
        let now = Instant::now();
        let first = semaphore.acquire(now).expect("a free one");
        let _second = semaphore.acquire(now).expect("a free one");
        assert!(
            semaphore.acquire(now + Duration::from_millis(10)).is_none(),
            "both permits are taken"
        );
        thread::scope(|scope| {
            let third = scope.spawn(|| semaphore.acquire(now + Duration::from_secs(60)).is_some());
            drop(first);
            assert!(
                third.join().expect("no panic"),
                "it waits for the first to end"
            );
        });
        let third = semaphore.acquire(now + Duration::from_secs(60));
        assert!(
            third.is_some() && semaphore.acquire(now).is_none(),
            "the number stays the same"
        );
    }

    /// Runs a thread for each of these keys, in this order, once the one before waits; all of them
    /// wait for `held`. Returns the keys in the order of their turns.
    fn turns(semaphore: &Semaphore, held: Permit<'_>, keys: &[&'static str]) -> Vec<&'static str> {
        let turns = Mutex::new(Vec::new());
        let deadline = Instant::now() + Duration::from_secs(60);
        thread::scope(|scope| {
            for (before, key) in keys.iter().enumerate() {
                scope.spawn(|| {
                    let permit = semaphore.acquire_in_turn(key, deadline);
                    lock(&turns).push(*key);
                    drop(permit);
                });
                until_waiting(semaphore, before + 1);
            }
            drop(held);
        });
        turns.into_inner().expect("no panic")
    }

    fn until_waiting(semaphore: &Semaphore, count: usize) {
        let waiting = || {
            lock(&semaphore.state)
                .waiting
                .iter()
                .map(|(_, threads)| threads.len())
                .sum::<usize>()
        };
        while waiting() != count {
            thread::yield_now();
        }
    }

    #[test]
    fn keys_take_turns() {
        let semaphore = Semaphore::new(1);
        let later = Instant::now() + Duration::from_secs(60);
        let hold = || semaphore.acquire_in_turn("one", later).expect("a free one");
        let mut keys = vec!["one"; 14];
        keys.extend(["other", "third", "other"]);
        let turns = turns(&semaphore, hold(), &keys);
        assert_eq!(
            turns[..7],
            ["other", "third", "one", "other", "one", "one", "one"]
        );
        assert_eq!(turns.len(), keys.len());
        assert_eq!(
            self::turns(&semaphore, hold(), &["one", "other", "one"]),
            ["other", "one", "one"]
        );
    }

    #[test]
    fn a_thread_that_gives_up_leaves_its_turn_to_the_next() {
        let semaphore = Semaphore::new(1);
        let held = semaphore
            .acquire_in_turn("one", Instant::now())
            .expect("a free one");
        let soon = Instant::now() + Duration::from_millis(10);
        thread::scope(|scope| {
            let late = ["one", "other"]
                .map(|key| scope.spawn(|| semaphore.acquire_in_turn(key, soon).is_none()));
            assert!(
                late.map(|thread| thread.join().expect("no panic")) == [true; 2],
                "the permit is taken"
            );
        });
        assert!(
            lock(&semaphore.state).waiting.is_empty(),
            "none of them waits"
        );
        assert_eq!(
            turns(&semaphore, held, &["one", "one", "third"]),
            ["third", "one", "one"]
        );
    }

    /// A release wakes one thread, and a thread that was woken the next, if there are more permits.
    #[test]
    fn permits_that_are_released_at_once_are_all_used() {
        let semaphore = Semaphore::new(2);
        let later = Instant::now() + Duration::from_secs(60);
        let held = [(); 2].map(|()| semaphore.acquire(later).expect("a free one"));
        let both = Barrier::new(2);
        thread::scope(|scope| {
            for key in ["one", "other"] {
                let both = &both;
                let semaphore = &semaphore;
                scope.spawn(move || {
                    let _permit = semaphore.acquire_in_turn(key, later).expect("in time");
                    both.wait();
                });
            }
            until_waiting(&semaphore, 2);
            let mut state = lock(&semaphore.state);
            held.into_iter().for_each(mem::forget);
            state.free += 2;
            state.wake_next();
        });
    }
}
