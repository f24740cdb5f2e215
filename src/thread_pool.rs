//! Starts thread pools.

use std::io;
use std::panic;

use threadpool::ThreadPool;

/// Fails if the system does not allow so many threads: the crate panics then.
pub fn start(name: &str, threads: usize) -> io::Result<ThreadPool> {
    let build = || ThreadPool::with_name(name.to_owned(), threads);
    panic::catch_unwind(build).map_err(|_| io::Error::from(io::ErrorKind::WouldBlock))
}
