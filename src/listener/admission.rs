//! The admission of a request by its head, and the request on its way to its response.

use std::sync::Arc;
use std::time::Instant;

use crate::client::Cancellation;
use crate::http::Request;
use crate::network::ClientNetwork;
use crate::secret::SecretDigest;

/// The decision, from its head, to read a request and let a thread respond to it.
#[derive(Clone, Debug)]
pub struct Admission {
    pub destination: Destination,
    /// The lane in which the request waits as long as its key is not known: that of a browser, or
    /// `None`, which all unknown clients share.
    pub lane: Option<Arc<str>>,
    /// The network of an unknown client. If too many requests of unknown clients wait, the network
    /// that sent most loses one.
    pub client_network: Option<ClientNetwork>,
    /// One of these runs at a time, whatever its lane. The others wait without a thread.
    pub exclusive: bool,
}

impl Admission {
    pub fn new(destination: Destination) -> Self {
        Self {
            destination,
            lane: None,
            client_network: None,
            exclusive: false,
        }
    }
}

/// The threads that respond to a request, and the digest of the key or session that it presents.
#[derive(Clone, Copy, Debug)]
pub enum Destination {
    Api(SecretDigest),
    Console(Option<SecretDigest>),
}

impl Destination {
    pub(super) fn credential(self) -> Option<SecretDigest> {
        match self {
            Self::Api(digest) => Some(digest),
            Self::Console(digest) => digest,
        }
    }
}

/// A complete request on its way to its response.
pub struct PendingRequest {
    pub request: Request,
    pub admission: Admission,
    /// When it was complete.
    pub received: Instant,
    /// Cancelled when the client goes away.
    pub cancellation: Cancellation,
}

impl PendingRequest {
    pub(super) fn new(request: Request, admission: Admission) -> Self {
        Self {
            request,
            admission,
            received: Instant::now(),
            cancellation: Cancellation::default(),
        }
    }
}

/// The lane of a key, once it was looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lane {
    /// The id of a key, or the digest of a session of the console.
    pub name: String,
    /// The limit on its concurrent requests.
    pub limit: Option<u32>,
}
