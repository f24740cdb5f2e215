//! The listener: one thread that accepts connections and reads requests without ever waiting for a client,
//! and a fixed pool of workers that answer the complete ones.
//!
//! A client costs a buffer, never a thread. Every buffer, count and time has its limit in [`Limits`].

mod connection;
mod event_loop;
mod limits;
mod load;
mod origins;
mod proxies;
mod pulse;
mod queue;
mod socket;
mod strangers;
mod tls;
mod workers;

use std::io;
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use mio::{Interest, Poll, Token, Waker};

pub use limits::Limits;
pub use load::{Gauge, Load, LoadEvent, Snapshot};
pub use proxies::{Proxies, TrustedProxy};
pub use pulse::Pulse;
pub use queue::{Lane, LaneLoad, Ticket};
pub use socket::{Address, ListeningSocket};
pub use tls::{Acceptor, Certificate, TlsError};
pub use workers::RunningRequest;

use self::event_loop::{EventLoop, FIRST_SOCKET, STOP, WAKE};
use crate::client::Cancellation;
use crate::error::Failure;
use crate::http::{ClientInfo, Request, RequestHead, Response};
use crate::secret::SecretDigest;

/// Answers requests.
pub trait Service: Send + Sync + 'static {
    /// Decides from its head what happens to a request. The loop calls this, so nothing is looked up.
    fn admit(&self, client: ClientInfo, head: &RequestHead) -> Admission;

    /// Returns the failure that every request of the API would get now, if it is known. The loop calls this, so nothing
    /// is looked up.
    fn outage(&self) -> Option<Failure> {
        None
    }

    /// Looks up the sender of a request whose key or session the queue does not know.
    fn identify(&self, call: &PendingRequest) -> RequestIdentity;

    /// Returns those of these lanes whose key is still valid, with their present limits; `None` if they can't be read.
    fn lanes(&self, names: &[Arc<str>]) -> Option<Vec<Lane>>;

    /// Answers a complete request, on a worker. If the client goes away, the loop cancels the calls that this makes. Until it
    /// has set the limit of its lane, or is done, the other requests of the lane wait.
    fn answer(&self, call: &PendingRequest, running: &RunningRequest) -> Response;

    /// Answers a request that gets no worker: broken HTTP, or one that is shed.
    fn refuse(
        &self,
        peer: Option<IpAddr>,
        call: Option<&PendingRequest>,
        failure: Failure,
    ) -> Response;
}

/// The decision from the head of a request.
pub enum Admission {
    /// The response: none of the body is needed for it.
    Answer(Response),
    /// The body is read, and then a thread answers the request.
    Read(Destination, Ticket),
}

/// The threads that answer a request. [`Service::admit`] decides it, once for each request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// The digest of the key that it presents.
    Api(SecretDigest),
    Console,
}

/// A complete request on its way to its answer.
pub struct PendingRequest {
    pub request: Request,
    pub destination: Destination,
    /// When it was complete.
    pub received: Instant,
    /// Cancelled when the client goes away.
    pub cancellation: Cancellation,
}

impl PendingRequest {
    fn new(request: Request, destination: Destination) -> Self {
        Self {
            request,
            destination,
            received: Instant::now(),
            cancellation: Cancellation::default(),
        }
    }
}

/// The sender of a request, as [`Service::identify`] finds it.
pub enum RequestIdentity {
    Known(Lane),
    /// The sender is not known; the console answers such requests all the same.
    Unknown,
    Refused(Box<Response>),
}

/// The listener: its sockets, its limits, and what other threads share with its loop.
pub struct Listener {
    sockets: Vec<ListeningSocket>,
    limits: Limits,
    poll: Poll,
    waker: Arc<Waker>,
    pub pulse: Arc<Pulse>,
    pub load: Arc<Load>,
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
        let waker = Arc::new(Waker::new(poll.registry(), WAKE)?);
        let load = Arc::new(Load::new(&limits));
        let pulse = Arc::new(Pulse::new(Arc::clone(&waker), Arc::clone(&load)));
        let (acceptor, trusted_proxies) = (None, Proxies::default());
        Ok(Self {
            sockets,
            limits,
            poll,
            waker,
            pulse,
            load,
            acceptor,
            trusted_proxies,
            _stop: stop,
            stopper,
        })
    }

    /// The end of a pipe: a byte written to it, for example by a signal handler, stops the listener.
    pub fn stopper(&self) -> io::Result<UnixStream> {
        self.stopper.try_clone()
    }

    /// Serves until it is stopped and every running request is answered.
    pub fn run(self, service: Arc<impl Service>) -> io::Result<()> {
        EventLoop::new(self, service).run()
    }
}
