//! Mutexes without poisoning.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, even after a panic of the thread that held it: no lock of this program guards
/// data that a panic leaves half changed.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
