//! A job: the work of a thread for one connection.

use super::{PendingRequest, Ticket};
use crate::client::Cancellation;
use crate::http::response::{ConnectionHeader, Pieces};

pub(super) struct Job {
    pub connection: usize,
    pub ticket: Ticket,
    pub work: Work,
}

pub(super) enum Work {
    /// Answers a complete request.
    Answer(PendingRequest),
    /// Makes the next piece of a long response.
    Piece(Box<dyn Pieces>, ConnectionHeader),
}

impl Job {
    pub fn call(&self) -> Option<&PendingRequest> {
        match &self.work {
            Work::Answer(call) => Some(call),
            Work::Piece(..) => None,
        }
    }

    /// Returns true if this is the request that `cancellation` cancels.
    pub fn is_cancelled_by(&self, cancellation: &Cancellation) -> bool {
        self.call().is_some_and(|call| call.cancellation.is(cancellation))
    }
}

#[cfg(test)]
impl Job {
    /// A job that is known by its number.
    pub fn numbered(connection: usize, ticket: Ticket) -> Self {
        struct NoPieces;
        impl Pieces for NoPieces {
            fn next(&mut self) -> Result<Option<Vec<u8>>, crate::http::response::Broken> {
                Ok(None)
            }
        }
        let work = Work::Piece(Box::new(NoPieces), ConnectionHeader::Close);
        Self { connection, ticket, work }
    }
}
