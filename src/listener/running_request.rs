//! A request, or the next piece of a response, while a thread works on it.

use std::panic::{self, AssertUnwindSafe};

use super::connection::Outgoing;
use super::queue::{FairQueue, Job, LaneName};
use super::state::ListenerState;
use crate::http::response::ConnectionHeader;

/// Dropping it, even after a panic, ends the job and then sends its response: the client's next
/// request must find capacity.
pub struct RunningRequest<'a> {
    state: &'a ListenerState,
    queue: &'a FairQueue,
    connection: usize,
    lane: LaneName,
    exclusive: bool,
    bytes: usize,
    /// At first without bytes, after which the connection closes; `None` if another thread answers.
    pub(super) response: Option<Outgoing>,
}

impl<'a> RunningRequest<'a> {
    pub(super) fn new(state: &'a ListenerState, queue: &'a FairQueue, job: &Job) -> Self {
        Self {
            state,
            queue,
            connection: job.connection,
            lane: job.lane.clone(),
            exclusive: job.is_exclusive(),
            bytes: job.bytes(),
            response: Some(Outgoing::new(Vec::new(), ConnectionHeader::Close)),
        }
    }

    /// Sets the limit on concurrent requests of its key, as soon as it is read.
    pub fn set_limit(&self, limit: Option<u32>) {
        self.queue.set_limit(&self.lane, limit);
    }
}

impl Drop for RunningRequest<'_> {
    fn drop(&mut self) {
        self.queue.finish(&self.lane, self.exclusive, self.bytes);
        if let Some(response) = self.response.take() {
            self.state.complete(self.connection, response);
        }
    }
}

/// A panic ends what a thread does for one connection, not the thread. Its message is in the log.
pub(super) fn contain_panic(work: impl FnOnce()) {
    let _ = panic::catch_unwind(AssertUnwindSafe(work));
}
