//! Requests: given to the workers, responded to, refused, or abandoned by clients that go away.

use std::sync::Arc;

use super::{ConnectionEntry, EventLoop};
use crate::error::{Failure, FailureCause};
use crate::http::response::ConnectionHeader;
use crate::listener::admission::{Destination, PendingRequest};
use crate::listener::connection::Outgoing;
use crate::listener::load::LoadEvent;
use crate::listener::queue::Job;
use crate::listener::service::Service;

impl<S: Service> EventLoop<S> {
    /// Sends the responses that the workers have finished.
    pub(super) fn send_completed(&mut self) {
        for (index, mut outgoing) in self.state.take_completed() {
            if let Some(entry) = self.connections.get_mut(index) {
                if entry
                    .in_flight
                    .take()
                    .is_some_and(|(cancellation, _)| cancellation.is_cancelled())
                {
                    self.close(index);
                    continue;
                }
                if self.state.is_stopping() {
                    outgoing.header = ConnectionHeader::Close;
                }
                entry.connection.send_response(outgoing, &self.limits);
                self.advance(index, false);
            }
        }
    }

    /// Gives a complete request to the workers. If they have no capacity, one is shed: this one, or
    /// one that waits.
    pub(super) fn hand_over(&mut self, index: usize, pending: Box<PendingRequest>) {
        self.connections[index].connection.begin_working();
        // Without the bytes of its reader, which count below as the request's.
        self.account(index);
        // The end came with the request.
        if self.connections[index].connection.read_closed {
            return self.drop_abandoned(index);
        }
        let full = match pending.admission.destination {
            Destination::Api(_) => LoadEvent::QueueFull,
            Destination::Console(_) => LoadEvent::ConsoleFull,
        };
        let state = Arc::clone(&self.state);
        let (queue, lane) = state.select_queue(&pending.admission);
        let cancellation = pending.cancellation.clone();
        let job = Job {
            connection: index,
            lane,
            pending,
        };
        let bytes = job.bytes();
        let own = queue.lane_bytes(&job.lane) + bytes;
        if !self.reserve_bytes(bytes, own, job.lane.is_some()) {
            return self.refuse_shed(&job, LoadEvent::BuffersFull);
        }
        self.connections[index].in_flight = Some((cancellation, bytes));
        self.account(index);
        if let Some(job) = queue.push(job) {
            self.refuse_shed(&job, full);
        }
    }

    /// Refuses a complete request that is shed: under overload there is no capacity for it.
    pub(super) fn refuse_shed(&mut self, job: &Job, event: LoadEvent) {
        self.state.count(event);
        let cause = if event == LoadEvent::BuffersFull {
            FailureCause::BuffersFull
        } else {
            FailureCause::QueueFull
        };
        self.refuse(job.connection, job.pending(), Failure::overloaded(cause));
        self.account(job.connection);
        self.schedule(job.connection, false);
    }

    /// Refuses a broken or shed request without a worker, and closes the connection.
    pub(super) fn refuse(
        &mut self,
        index: usize,
        pending: Option<&PendingRequest>,
        failure: Failure,
    ) {
        self.connections[index].in_flight = None;
        let connection = &mut self.connections[index].connection;
        let peer = pending.map_or(connection.peer, |pending| pending.request.client.peer);
        let without_body = pending.is_some_and(|pending| pending.request.head.method() == "HEAD");
        let destination = pending.map(|pending| pending.admission.destination);
        let response = self.service.refuse(peer, destination, failure);
        connection.forget_request();
        connection.send_response(Outgoing::last(&response, without_body), &self.limits);
    }

    /// Refuses the requests that wait for a worker while the ledger is unavailable: every worker
    /// may itself be waiting for the database, to write the row of a completion.
    pub(super) fn refuse_waiting(&mut self) {
        while let Some(failure) = self.service.outage()
            && let Some(job) = self.state.take_waiting()
        {
            self.refuse(job.connection, job.pending(), failure);
            self.advance(job.connection, false);
        }
    }

    /// Drops the request of a client that has gone, or cancels it. A worker that has it gives the
    /// connection back soon; until then its number is not used again.
    pub(super) fn abandon_if_gone(&mut self, index: usize) -> bool {
        let ConnectionEntry {
            connection,
            in_flight: Some((cancellation, _)),
            ..
        } = &self.connections[index]
        else {
            return false;
        };
        if !connection.read_closed || cancellation.is_cancelled() {
            return cancellation.is_cancelled();
        }
        // Before the queues are searched: the thread that moves a request from one to another
        // removes it if it is cancelled.
        cancellation.cancel();
        if self.state.remove(cancellation) {
            self.drop_abandoned(index);
        } else {
            self.state.count(LoadEvent::AbandonedRunning);
        }
        true
    }

    /// Closes the connection of a client that went away while its request waited.
    fn drop_abandoned(&mut self, index: usize) {
        self.state.count(LoadEvent::AbandonedWaiting);
        self.close(index);
    }
}
