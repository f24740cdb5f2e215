//! The locks and threads of group commit. tests/interleavings.rs puts those of a scheduler in their
//! place.

pub use std::sync::{Mutex, MutexGuard};
pub use std::thread;
