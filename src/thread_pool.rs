//! Starts the pools of threads.

use std::io;
use std::sync::Mutex;
use std::thread;

use threadpool::ThreadPool;

use crate::mutex::lock;

/// Fails if the system does not allow so many threads. The crate would panic then, so as many
/// threads of our own are started first, all at once, and end again.
pub fn start(name: &str, count: usize) -> io::Result<ThreadPool> {
    let gate = Mutex::new(());
    thread::scope(|scope| {
        let closed = lock(&gate);
        let start = |_| thread::Builder::new().spawn_scoped(scope, || drop(lock(&gate)));
        let threads: io::Result<Vec<_>> = (0..count).map(start).collect();
        drop(closed);
        for thread in threads? {
            // The scope alone would not wait until the system has removed the thread.
            let _ = thread.join();
        }
        Ok::<_, io::Error>(())
    })?;
    Ok(ThreadPool::with_name(name.to_owned(), count))
}
