//! Requests: given to the workers, answered, refused, or abandoned by clients that go away.

use std::sync::Arc;

use super::{ConnectionEntry, EventLoop};
use crate::error::{Failure, FailureCause};
use crate::http::response::ConnectionHeader;
use crate::listener::connection::Outgoing;
use crate::listener::load::LoadEvent;
use crate::listener::queue::{Job, Work};
use crate::listener::{Destination, PendingRequest, Service, Ticket};

impl<S: Service> EventLoop<S> {
    /// Sends the responses that the workers have finished.
    pub(super) fn send_completed(&mut self) {
        for (index, mut outgoing) in self.workers.completions.take() {
            if let Some(entry) = self.connections.get_mut(index) {
                if entry
                    .call
                    .take()
                    .is_some_and(|(call, _)| call.is_cancelled())
                {
                    self.close(index);
                    continue;
                }
                if self.stopping {
                    outgoing.header = ConnectionHeader::Close;
                }
                entry
                    .connection
                    .send_response(outgoing, &self.listener.limits);
                self.advance(index, false);
            }
        }
    }

    /// Gives a complete request to the workers. If there is no room, one is shed: this one, or one that waits.
    pub(super) fn hand_over(&mut self, index: usize, call: PendingRequest, ticket: Ticket) {
        self.connections[index].connection.hand_over();
        // Without the bytes of its reader, which count below as the request's.
        self.account(index);
        // The end came with the request.
        if self.connections[index].connection.read_closed {
            return self.drop_abandoned(index);
        }
        let full = match call.destination {
            Destination::Api(_) => LoadEvent::QueueFull,
            Destination::Console => LoadEvent::ConsoleFull,
        };
        let workers = Arc::clone(&self.workers);
        let (queue, ticket) = workers.place(call.destination, ticket);
        let cancellation = call.cancellation.clone();
        let job = Job {
            connection: index,
            ticket,
            work: Work::Answer(call),
        };
        let bytes = job.bytes();
        let own = queue.lane_bytes(&job.ticket.lane) + bytes;
        if !self.make_room_for_request(bytes, own, job.ticket.lane.is_some()) {
            return self.shed(&job, LoadEvent::BuffersFull);
        }
        self.connections[index].call = Some((cancellation, bytes));
        self.account(index);
        if let Some(job) = queue.push(job) {
            self.shed(&job, full);
        }
    }

    /// Answers a complete request for which there is no room.
    pub(super) fn shed(&mut self, job: &Job, cause: LoadEvent) {
        self.listener.load.count(cause);
        let cause = if cause == LoadEvent::BuffersFull {
            FailureCause::BuffersFull
        } else {
            FailureCause::QueueFull
        };
        self.refuse(job.connection, job.call(), Failure::shed(cause));
        self.account(job.connection);
        self.schedule(job.connection);
    }

    /// Answers a broken or shed request without a worker, and closes the connection.
    pub(super) fn refuse(&mut self, index: usize, call: Option<&PendingRequest>, failure: Failure) {
        self.connections[index].call = None;
        let connection = &mut self.connections[index].connection;
        let peer = call.map_or(connection.peer, |call| call.request.client.peer);
        let without_body = call.is_some_and(|call| call.request.head.method() == "HEAD");
        let response = self.service.refuse(peer, call, failure);
        connection.forget_request();
        connection.send_response(
            Outgoing::last(&response, without_body),
            &self.listener.limits,
        );
    }

    /// Answers the requests that wait for a worker while the ledger is unavailable: every worker may itself be waiting for
    /// the database, to write the row of a completion.
    pub(super) fn refuse_waiting(&mut self) {
        while let Some(failure) = self.service.outage()
            && let Some(job) = self.workers.take_waiting()
        {
            self.refuse(job.connection, job.call(), failure);
            self.advance(job.connection, false);
        }
    }

    /// Drops the request of a client that has gone, or cancels it. A worker that has it gives the connection back soon;
    /// until then its number is not used again.
    pub(super) fn abandon_if_gone(&mut self, index: usize) -> bool {
        let ConnectionEntry {
            connection,
            call: Some((call, _)),
            ..
        } = &self.connections[index]
        else {
            return false;
        };
        if !connection.read_closed || call.is_cancelled() {
            return call.is_cancelled();
        }
        // Before the queue is searched: the thread that has looked up a stranger cancels what is not found here.
        call.cancel();
        if self.workers.remove(call) {
            self.drop_abandoned(index);
        } else {
            self.listener.load.count(LoadEvent::AbandonedRunning);
        }
        true
    }

    /// Closes the connection of a client that went away while its request waited.
    fn drop_abandoned(&mut self, index: usize) {
        self.listener.load.count(LoadEvent::AbandonedWaiting);
        self.close(index);
    }
}
