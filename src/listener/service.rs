//! The service that responds to the requests, as the listener calls it.

use std::net::IpAddr;
use std::sync::Arc;

use super::admission::{Admission, Destination, Lane, PendingRequest};
use super::connection::Outgoing;
use super::queue::{FairQueue, Job, LaneName};
use super::state::ListenerState;
use crate::error::Failure;
use crate::http::response::ConnectionHeader;
use crate::http::{ClientInfo, RequestHead, Response};

/// Responds to requests.
pub trait Service: Send + Sync + 'static {
    /// Decides from its head whether the body of a request is read, or which response it gets at
    /// once. The loop calls this, so nothing is looked up.
    fn admit(&self, client: ClientInfo, head: &RequestHead) -> Result<Admission, Response>;

    /// Returns the failure that every request of the API would get now, if it is known. The loop
    /// calls this, so nothing is looked up.
    fn outage(&self) -> Option<Failure> {
        None
    }

    /// Looks up the key or session of a request that the cache does not know. Returns its lane,
    /// `None` if it stays unknown, or the response if it is refused.
    fn identify(&self, pending: &PendingRequest) -> Result<Option<Lane>, Response>;

    /// Returns those of these lanes whose key is still valid, with their present limits; `None` if
    /// they can't be read.
    fn lanes(&self, names: &[Arc<str>]) -> Option<Vec<Lane>>;

    /// Responds to a complete request, on a worker. If the client goes away, the loop cancels what
    /// this waits for. Until it has set the limit of its lane, or is done, the other requests of
    /// the lane wait.
    fn respond(&self, pending: &PendingRequest, running: &RunningRequest) -> Response;

    /// Refuses a request that gets no worker: broken HTTP, which has no destination, or one that is
    /// shed.
    fn refuse(
        &self,
        peer: Option<IpAddr>,
        destination: Option<Destination>,
        failure: Failure,
    ) -> Response;
}

/// A request, or the next piece of a response, while a thread works on it. Dropping it, even after
/// a panic, ends the job and then sends its response: the client's next request must find capacity.
pub struct RunningRequest<'a> {
    state: &'a ListenerState,
    queue: &'a FairQueue,
    connection: usize,
    lane: LaneName,
    exclusive: bool,
    bytes: usize,
    /// Starts without bytes and with `Close`, so that an early return or a panic closes the
    /// connection; `None` if another thread responds.
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
