//! The work that waits in a queue.

use std::sync::Arc;

use crate::http::response::{BodyStream, ConnectionHeader};
use crate::listener::PendingRequest;
use crate::network::ClientNetwork;

/// A lane's name; `None` is the lane that all unknown clients share.
pub type LaneName = Option<Arc<str>>;

/// The work of a thread for one connection.
pub struct Job {
    pub connection: usize,
    pub lane: LaneName,
    pub work: Work,
}

pub enum Work {
    /// Answers a complete request.
    Answer(Box<PendingRequest>),
    /// Makes the next piece of a long response.
    Piece(Box<dyn BodyStream>, ConnectionHeader),
}

impl Job {
    /// Its request. A piece of a response that has begun has none: it is never shed, and nothing is
    /// shed for it.
    pub fn pending(&self) -> Option<&PendingRequest> {
        match &self.work {
            Work::Answer(pending) => Some(pending),
            Work::Piece(..) => None,
        }
    }

    pub fn is_exclusive(&self) -> bool {
        self.pending()
            .is_some_and(|pending| pending.admission.exclusive)
    }

    pub fn client_network(&self) -> Option<ClientNetwork> {
        self.pending()?.admission.client_network
    }

    /// The memory of its request.
    pub fn bytes(&self) -> usize {
        self.pending()
            .map_or(0, |pending| pending.request.held_bytes())
    }
}
