//! The listener: one thread that accepts connections and reads requests without ever waiting for a
//! client, and a fixed pool of workers that respond to the complete ones.
//!
//! A client costs a buffer, never a thread. Every buffer, count and time has a limit: those that
//! depend on the settings are in [`Limits`], constants beside the code that they bound.

mod connection;
mod credential_cache;
mod event_loop;
mod limits;
mod load;
mod origins;
mod proxies;
mod queue;
mod socket;
mod state;
mod tls;
mod workers;

use std::io;
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use mio::{Interest, Poll, Token, Waker};

pub use event_loop::EventLoop;
pub use limits::Limits;
pub use load::{Gauge, LoadEvent, Snapshot};
pub use proxies::{Proxies, TrustedProxy};
pub use queue::{Lane, LaneLoad};
pub use socket::{Address, ListeningSocket};
pub use state::ListenerState;
pub use tls::{Acceptor, Certificate, TlsError};
pub use workers::RunningRequest;

use self::event_loop::{FIRST_SOCKET, STOP, WAKE};
use crate::client::Cancellation;
use crate::error::Failure;
use crate::http::{ClientInfo, Request, RequestHead, Response};
use crate::network::ClientNetwork;
use crate::secret::SecretDigest;

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
    fn credential(self) -> Option<SecretDigest> {
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
    fn new(request: Request, admission: Admission) -> Self {
        Self {
            request,
            admission,
            received: Instant::now(),
            cancellation: Cancellation::default(),
        }
    }
}

/// The listener: its sockets, its limits, and what other threads share with its loop.
pub struct Listener {
    sockets: Vec<ListeningSocket>,
    poll: Poll,
    pub state: Arc<ListenerState>,
    /// For TLS on the TCP sockets. The clients of a Unix socket are on the same host.
    pub acceptor: Option<Arc<Acceptor>>,
    /// The proxies whose forwarding headers are trusted.
    pub trusted_proxies: Proxies,
    /// Readable when the listener has to stop.
    _stop: mio::net::UnixStream,
    stopper: UnixStream,
}

impl Listener {
    pub fn new(mut sockets: Vec<ListeningSocket>, limits: Limits) -> io::Result<Self> {
        let poll = Poll::new()?;
        let (stop, stopper) = UnixStream::pair()?;
        stop.set_nonblocking(true)?;
        let mut stop = mio::net::UnixStream::from_std(stop);
        poll.registry()
            .register(&mut stop, STOP, Interest::READABLE)?;
        for (index, socket) in sockets.iter_mut().enumerate() {
            socket.register(poll.registry(), Token(FIRST_SOCKET + index))?;
        }
        let waker = Waker::new(poll.registry(), WAKE)?;
        Ok(Self {
            sockets,
            state: Arc::new(ListenerState::new(limits, waker)),
            poll,
            acceptor: None,
            trusted_proxies: Proxies::default(),
            _stop: stop,
            stopper,
        })
    }

    /// The end of a pipe: a byte written to it, for example by a signal handler, stops the
    /// listener.
    pub fn stopper(&self) -> io::Result<UnixStream> {
        self.stopper.try_clone()
    }

    /// Starts the threads. Fails if the system does not allow all of them.
    pub fn start<S: Service>(self, service: Arc<S>) -> io::Result<EventLoop<S>> {
        let threads = workers::start(&self.state, &service)?;
        Ok(EventLoop::new(self, service, threads))
    }
}
