//! Clients that go away before their answer.

use super::{ConnectionEntry, EventLoop};
use crate::listener::Service;
use crate::listener::load::Cause;

impl<S: Service> EventLoop<S> {
    /// Drops the request of a client that has gone, or cancels it. A worker that has it gives the connection back soon;
    /// until then its number is not used again.
    pub(super) fn abandon_if_gone(&mut self, index: usize) -> bool {
        let ConnectionEntry { connection, call: Some(call), .. } = &self.connections[index] else {
            return false;
        };
        if !connection.is_read_closed() || call.is_cancelled() {
            return call.is_cancelled();
        }
        // Before the queue is searched: the thread that has looked up a stranger cancels what is not found here.
        call.cancel();
        if self.workers.remove(call) {
            self.drop_abandoned(index);
        } else {
            self.load.count(Cause::AbandonedRunning);
        }
        true
    }

    /// Closes the connection of a client that went away while its request waited.
    pub(super) fn drop_abandoned(&mut self, index: usize) {
        self.load.count(Cause::AbandonedWaiting);
        self.close(index);
    }
}
