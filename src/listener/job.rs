//! A job: the work of a thread for one connection, and the memory that counts for it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::connection::AfterResponse;
use super::load::Load;
use super::{PendingRequest, Ticket};
use crate::client::Cancellation;
use crate::http::response::Pieces;

pub(super) struct Job {
    pub connection: usize,
    pub ticket: Ticket,
    /// Its lane is that of its credential.
    pub is_known: bool,
    pub work: Work,
}

pub(super) enum Work {
    /// Answers a complete request.
    Answer(PendingRequest, RequestBytes),
    /// Makes the next piece of a long response.
    Piece(Box<dyn Pieces>, AfterResponse),
}

impl Job {
    pub fn call(&self) -> Option<&PendingRequest> {
        match &self.work {
            Work::Answer(call, _) => Some(call),
            Work::Piece(..) => None,
        }
    }

    /// Returns true if this is the request that `cancellation` cancels.
    pub fn is_cancelled_by(&self, cancellation: &Cancellation) -> bool {
        self.call().is_some_and(|call| call.cancellation.is(cancellation))
    }
}

/// Counts the memory of a request as long as it exists.
pub(super) struct RequestBytes {
    load: Arc<Load>,
    bytes: usize,
}

impl RequestBytes {
    pub fn new(load: &Arc<Load>, bytes: usize) -> Self {
        load.request_bytes.fetch_add(bytes, Ordering::AcqRel);
        Self { load: Arc::clone(load), bytes }
    }
}

impl Drop for RequestBytes {
    fn drop(&mut self) {
        self.load.request_bytes.fetch_sub(self.bytes, Ordering::AcqRel);
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
        let work = Work::Piece(Box::new(NoPieces), AfterResponse::Close);
        Self { connection, ticket, is_known: false, work }
    }
}
