//! The queue of lines for the thread that writes them.

use std::mem;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The most bytes in the queue.
const LIMIT: usize = 256 * 1024;

/// The most bytes in the queue when a line about a single request is added. The other half is for errors and changes of
/// state, so that requests never displace them.
const REQUEST_LIMIT: usize = LIMIT / 2;

#[derive(Default)]
pub(super) struct LineBuffer {
    pending: Mutex<Pending>,
    changed: Condvar,
}

#[derive(Default)]
struct Pending {
    lines: Vec<u8>,
    /// Records that found no room since the last batch.
    dropped: u64,
    /// The last batch is not written yet.
    is_writing: bool,
}

/// Lines to write, and how many records were dropped after them.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct LogBatch {
    pub lines: Vec<u8>,
    pub dropped: u64,
}

impl LineBuffer {
    /// Adds the lines of one record, or counts them as dropped if there is no room. It never waits for the writer.
    pub fn push(&self, lines: &[u8], is_request: bool) {
        let limit = if is_request { REQUEST_LIMIT } else { LIMIT };
        let mut pending = self.lock();
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

    /// Waits for lines and takes all of them; the batch is empty if none come in time. The call means that the last batch is
    /// written.
    pub fn take(&self, until: Instant) -> LogBatch {
        let mut pending = self.lock();
        pending.is_writing = false;
        self.changed.notify_all();
        let time = until.saturating_duration_since(Instant::now());
        let waited = self.changed.wait_timeout_while(pending, time, |pending| pending.lines.is_empty());
        let (mut pending, _) = waited.unwrap_or_else(PoisonError::into_inner);
        pending.is_writing = !pending.lines.is_empty();
        LogBatch { lines: mem::take(&mut pending.lines), dropped: mem::take(&mut pending.dropped) }
    }

    /// Waits until all lines are written, but not longer than `time`.
    pub fn flush(&self, time: Duration) {
        let is_busy = |pending: &mut Pending| pending.is_writing || !pending.lines.is_empty();
        drop(self.changed.wait_timeout_while(self.lock(), time, is_busy));
    }

    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    #[test]
    fn requests_do_not_displace_errors() {
        let (buffer, now) = (LineBuffer::default(), Instant::now());
        let (request, error) = ([b'r'; 100], [b'e'; 100]);
        let half = LIMIT / 2 / 100;
        (0..3 * half).for_each(|_| buffer.push(&request, true));
        (0..half).for_each(|_| buffer.push(&error, false));
        let batch = buffer.take(now);
        assert_eq!(
            batch.lines,
            [request.repeat(half), error.repeat(half)].concat(),
            "every error found room"
        );
        assert_eq!(batch.dropped, 2 * half as u64);
        assert_eq!(buffer.take(now), LogBatch::default(), "the count is given once");
        buffer.push(&request, true);
        assert_eq!(buffer.take(now), LogBatch { lines: request.to_vec(), dropped: 0 }, "there is room again");
        (0..3 * half).for_each(|_| buffer.push(&error, false));
        assert!(buffer.take(now).lines.len() <= LIMIT, "errors have a limit too");
    }

    #[test]
    fn a_flush_waits_for_the_writer_but_not_forever() {
        let buffer = Arc::new(LineBuffer::default());
        buffer.flush(Duration::MAX);
        buffer.push(b"line\n", false);
        let began = Instant::now();
        buffer.flush(Duration::from_millis(20));
        assert!(began.elapsed() >= Duration::from_millis(20), "nothing writes");
        let writer = {
            let buffer = Arc::clone(&buffer);
            thread::spawn(move || {
                let batch = buffer.take(began);
                assert!(buffer.lock().is_writing);
                buffer.take(began);
                batch
            })
        };
        buffer.flush(Duration::MAX);
        assert!(!buffer.lock().is_writing);
        assert_eq!(writer.join().expect("the writer should end").lines, b"line\n");
    }
}
