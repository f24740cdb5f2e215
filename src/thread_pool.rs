//! Starts the pools of threads.

use std::io;
use std::panic;

use threadpool::ThreadPool;

/// Fails if the system does not allow so many threads. The crate panics then, which is an error of
/// the start and not a line in the log: the hook is silent meanwhile.
pub fn start(name: &str, threads: usize) -> io::Result<ThreadPool> {
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| ()));
    let pool = panic::catch_unwind(|| ThreadPool::with_name(name.to_owned(), threads));
    panic::set_hook(hook);
    pool.map_err(|_| io::Error::other("the system does not allow so many"))
}
