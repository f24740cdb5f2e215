//! The queue of lines for the thread that writes them.

use std::mem;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::mutex::lock;

/// The most bytes in the queue.
const LIMIT: usize = 256 * 1024;

/// The most bytes in the queue when a line about a single request is added. The other half is for
/// errors and changes of state, so that requests never displace them.
const REQUEST_LIMIT: usize = LIMIT / 2;

pub(super) struct LineBuffer {
    pending: Mutex<Pending>,
    changed: Condvar,
}

struct Pending {
    lines: Vec<u8>,
    /// Records that found no room since the last batch.
    dropped: u64,
    /// The last batch is not written yet.
    is_writing: bool,
}

impl LineBuffer {
    pub const fn new() -> Self {
        Self {
            pending: Mutex::new(Pending {
                lines: Vec::new(),
                dropped: 0,
                is_writing: false,
            }),
            changed: Condvar::new(),
        }
    }

    /// Adds the lines of one record, or counts them as dropped if there is no room. It never waits
    /// for the writer.
    pub fn push(&self, lines: &[u8], is_request: bool) {
        let limit = if is_request { REQUEST_LIMIT } else { LIMIT };
        let mut pending = lock(&self.pending);
        if pending.lines.len() + lines.len() > limit {
            pending.dropped += 1;
            return;
        }
        let was_empty = pending.lines.is_empty();
        pending.lines.extend_from_slice(lines);
        drop(pending);
        if was_empty {
            self.changed.notify_all();
        }
    }

    /// Waits for lines, and takes all of them and the number of records that were dropped after
    /// them. The batch is empty if no lines come in time. The caller has written the last batch.
    pub fn take(&self, until: Instant) -> (Vec<u8>, u64) {
        let mut pending = lock(&self.pending);
        pending.is_writing = false;
        self.changed.notify_all();
        let time = until.saturating_duration_since(Instant::now());
        let waited = self
            .changed
            .wait_timeout_while(pending, time, |pending| pending.lines.is_empty());
        let (mut pending, _) = waited.unwrap_or_else(PoisonError::into_inner);
        pending.is_writing = !pending.lines.is_empty();
        (
            mem::take(&mut pending.lines),
            mem::take(&mut pending.dropped),
        )
    }

    /// Waits until all lines are written, but not longer than `time`.
    pub fn flush(&self, time: Duration) {
        let is_busy = |pending: &mut Pending| pending.is_writing || !pending.lines.is_empty();
        drop(
            self.changed
                .wait_timeout_while(lock(&self.pending), time, is_busy),
        );
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    #[test]
    fn requests_do_not_displace_errors() {
        let (buffer, now) = (LineBuffer::new(), Instant::now());
        let (request, error) = ([b'r'; 100], [b'e'; 100]);
        let half = LIMIT / 2 / 100;
        (0..3 * half).for_each(|_| buffer.push(&request, true));
        (0..half).for_each(|_| buffer.push(&error, false));
        let (lines, dropped) = buffer.take(now);
        assert_eq!(
            lines,
            [request.repeat(half), error.repeat(half)].concat(),
            "every error found room"
        );
        assert_eq!(dropped, 2 * half as u64);
        assert_eq!(buffer.take(now), (Vec::new(), 0), "the count is given once");
        buffer.push(&request, true);
        assert_eq!(
            buffer.take(now),
            (request.to_vec(), 0),
            "there is room again"
        );
        (0..3 * half).for_each(|_| buffer.push(&error, false));
        assert!(buffer.take(now).0.len() <= LIMIT, "errors have a limit too");
    }

    #[test]
    fn a_flush_waits_for_the_writer_but_not_forever() {
        let buffer = Arc::new(LineBuffer::new());
        buffer.flush(Duration::MAX);
        buffer.push(b"line\n", false);
        let began = Instant::now();
        buffer.flush(Duration::from_millis(20));
        assert!(
            began.elapsed() >= Duration::from_millis(20),
            "nothing writes"
        );
        let writer = {
            let buffer = Arc::clone(&buffer);
            thread::spawn(move || {
                let batch = buffer.take(began);
                assert!(lock(&buffer.pending).is_writing);
                buffer.take(began);
                batch
            })
        };
        buffer.flush(Duration::MAX);
        assert!(!lock(&buffer.pending).is_writing);
        assert_eq!(writer.join().expect("the writer should end").0, b"line\n");
    }
}
