//! What threads share: mutexes without poisoning, and pools.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Locks a mutex, even after a panic of the thread that held it: no lock of this program guards
/// data that a panic leaves half changed.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A fixed number of things, such as connections, each of which one thread has at a time.
pub struct Pool<T> {
    state: Mutex<PoolState<T>>,
    /// Signalled when one was given back.
    is_free: Condvar,
}

struct PoolState<T> {
    free: VecDeque<T>,
    /// The number of threads that wait for one. A signal to none would be a system call for each
    /// request that does nothing.
    waiting: usize,
}

/// Dropping it gives it back.
pub struct Pooled<'a, T> {
    pool: &'a Pool<T>,
    /// `None` only while it is dropped.
    item: Option<T>,
}

impl<T> Pool<T> {
    pub fn new(items: impl IntoIterator<Item = T>) -> Self {
        Self {
            state: Mutex::new(PoolState {
                free: items.into_iter().collect(),
                waiting: 0,
            }),
            is_free: Condvar::new(),
        }
    }

    /// Waits for one: of several that are preferred, or if none is, the one that was free for the
    /// longest time. Returns `None` if there is none before the deadline.
    pub fn take(
        &self,
        deadline: Instant,
        is_preferred: impl Fn(&T) -> bool,
    ) -> Option<Pooled<'_, T>> {
        let mut state = lock(&self.state);
        loop {
            let free = &mut state.free;
            let place = free.iter().position(&is_preferred).unwrap_or(0);
            if let Some(item) = free.remove(place) {
                return Some(Pooled {
                    pool: self,
                    item: Some(item),
                });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            state.waiting += 1;
            let waited = self.is_free.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            state.waiting -= 1;
        }
    }

    /// Changes those that are free.
    pub fn with_free(&self, change: impl FnOnce(&mut VecDeque<T>)) {
        change(&mut lock(&self.state).free);
    }
}

impl<T> Deref for Pooled<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.item.as_ref().expect("only a drop takes it")
    }
}

impl<T> DerefMut for Pooled<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.item.as_mut().expect("only a drop takes it")
    }
}

impl<T> Drop for Pooled<'_, T> {
    fn drop(&mut self) {
        let mut state = lock(&self.pool.state);
        state.free.extend(self.item.take());
        let is_awaited = state.waiting > 0;
        drop(state);
        if is_awaited {
            self.pool.is_free.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn each_is_had_by_one_at_a_time_and_they_take_turns() {
        let pool = Pool::new([1, 2, 3]);
        let (now, minute) = (Instant::now(), Duration::from_secs(60));
        let any = |deadline| pool.take(deadline, |_| true);
        let [one, two, three] = [(); 3].map(|()| any(now).expect("a free one"));
        assert_eq!([*one, *two, *three], [1, 2, 3]);
        assert!(any(now + Duration::from_millis(10)).is_none());
        thread::scope(|scope| {
            let waiting = scope.spawn(|| any(now + minute).map(|item| *item));
            drop(two);
            assert_eq!(waiting.join().expect("no panic"), Some(2));
        });
        drop((one, three));
        assert_eq!(
            any(now).map(|item| *item),
            Some(2),
            "free for the longest time"
        );
        let preferred = pool.take(now, |item| *item == 3);
        assert_eq!(preferred.map(|item| *item), Some(3));
        let panicked = thread::scope(|scope| {
            let work = || {
                let _item = any(now).expect("a free one");
                panic!("on purpose")
            };
            scope.spawn(work).join().is_err()
        });
        assert!(panicked);
        let all = [(); 3].map(|()| any(now));
        assert!(all.iter().all(Option::is_some), "the panic gave it back");
    }
}
