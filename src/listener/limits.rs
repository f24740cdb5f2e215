//! The listener's limits.

use std::time::Duration;

#[derive(Clone, Debug)]
pub struct Limits {
    /// Threads of the pool: requests processed at once.
    pub workers: usize,
    /// Complete requests that may wait for a worker.
    pub queue: usize,
    pub max_connections: usize,
    /// The bytes held for all connections together: heads, bodies, responses not yet sent.
    pub buffered_bytes: usize,
    /// The longest time that a worker may need for a request.
    pub longest_work: Duration,
    /// From the first byte of a request to its last.
    pub request_time: Duration,
    /// The longest wait of a connection between requests.
    pub idle_time: Duration,
    /// The longest time that a client may take to read a response.
    pub send_time: Duration,
    /// After a response that ends a connection, how long and how much is read and discarded, so
    /// that a client that is still sending sees the response and not a reset.
    pub drain_time: Duration,
    pub drain_bytes: usize,
    /// After a stop, the time limit for everything except running requests.
    pub stop_time: Duration,
    /// After a stop, the time limit for a connection without a request: one may be on its way, and
    /// its response says that it is the last.
    pub idle_stop_time: Duration,
    /// The pause in accepting after there was no file descriptor for a connection.
    pub accept_pause: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            workers: 16,
            queue: 64,
            max_connections: 4096,
            buffered_bytes: 64 * 1024 * 1024,
            longest_work: Duration::from_secs(155),
            request_time: Duration::from_secs(20),
            idle_time: Duration::from_secs(60),
            send_time: Duration::from_secs(20),
            drain_time: Duration::from_secs(10),
            drain_bytes: 8 * 1024 * 1024,
            stop_time: Duration::from_secs(2),
            idle_stop_time: Duration::from_millis(500),
            accept_pause: Duration::from_millis(100),
        }
    }
}

impl Limits {
    /// The interval at which deadlines are checked: short enough for the shortest, at least every
    /// second.
    pub(super) fn tick(&self) -> Duration {
        let shortest = [
            self.request_time,
            self.idle_time,
            self.send_time,
            self.drain_time,
            self.stop_time,
        ]
        .into_iter()
        .min()
        .expect("the list should not be empty");
        (shortest / 8).clamp(Duration::from_millis(10), Duration::from_secs(1))
    }
}
