//! The synchronization that group commit is made of. tests/interleavings.rs puts a scheduler's own
//! in its place.

pub use std::sync::{Mutex, MutexGuard};
pub use std::thread;
