//! The listener: one thread that accepts connections and reads requests without ever waiting for a
//! client, and a fixed pool of workers that respond to the complete ones.
//!
//! The loop owns the connections: sockets, buffers, deadlines, and who holds how much. The
//! dispatcher stands between it and the threads. A client costs a buffer, never a thread. Every
//! buffer, count and time has a limit: those that depend on the settings are in [`Limits`],
//! constants beside the code that they bound.

mod connection;
mod dispatcher;
mod event_loop;
mod eviction;
mod lanes;
mod load;
mod origins;
mod socket;
mod tls;
mod workers;

use std::io;
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::{Interest, Poll, Token, Waker};

pub use dispatcher::{Area, Dispatcher};
pub use event_loop::EventLoop;
pub use lanes::LaneLoad;
use lanes::LaneName;
pub use load::{Gauge, ListenerState, LoadEvent, Snapshot};
pub use origins::{Proxies, TrustedProxy};
pub use socket::{Address, ListeningSocket};
pub use tls::{Acceptor, Certificate, TlsError};
pub use workers::Watchdog;

use crate::client::Cancellation;
use crate::error::Failure;
use crate::http::{ClientInfo, ClientNetwork, Request, RequestHead, Response};
use crate::secret::SecretDigest;

const WAKE: Token = Token(usize::MAX);
const STOP: Token = Token(usize::MAX - 1);
/// Tokens from here on belong to the listening sockets.
const FIRST_SOCKET: usize = usize::MAX - 1024;

#[derive(Clone, Debug)]
pub struct Limits {
    /// Threads of the pool: requests processed at once.
    pub workers: usize,
    /// Complete requests that may wait for a worker.
    pub queue: usize,
    pub max_connections: usize,
    /// The bytes held for all connections together: heads, bodies, responses not yet sent.
    pub buffered_bytes: usize,
    /// The longest time that a worker may need for a request.
    pub longest_work: Duration,
    /// From the first byte of a request to its last.
    pub request_time: Duration,
    /// The longest wait of a connection between requests.
    pub idle_time: Duration,
    /// The longest time that a client may take to read a response, or 64 KiB of it.
    pub send_time: Duration,
    /// After a response that ends a connection, how long and how much is read and discarded, so
    /// that a client that is still sending sees the response and not a reset.
    pub drain_time: Duration,
    pub drain_bytes: usize,
    /// After a stop, the time limit for everything except running requests. A connection without a
    /// request has it too: one may be on its way, and its response says that it is the last.
    pub stop_time: Duration,
    /// The pause in accepting after there was no file descriptor for a connection.
    pub accept_pause: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            workers: 16,
            queue: 64,
            max_connections: 4096,
            buffered_bytes: 64 * 1024 * 1024,
            longest_work: Duration::from_secs(155),
            request_time: Duration::from_secs(20),
            idle_time: Duration::from_secs(60),
            send_time: Duration::from_secs(20),
            drain_time: Duration::from_secs(10),
            drain_bytes: 8 * 1024 * 1024,
            stop_time: Duration::from_secs(1),
            accept_pause: Duration::from_millis(100),
        }
    }
}

/// Responds to requests: the API or the console. The head of a request chooses one of them.
pub trait Service: Send + Sync {
    /// Returns true if a request with this head is for this service. The last service takes all
    /// others.
    fn serves(&self, client: &ClientInfo, head: &RequestHead) -> bool;

    /// Decides from its head whether the body of a request is read, or which response it gets at
    /// once. The loop calls this, so nothing is looked up.
    fn admit(&self, client: &ClientInfo, head: &RequestHead) -> Result<Admission, Response>;

    /// Looks up the key of a request of the API that the dispatcher does not know. Returns its lane,
    /// or the response if it is answered here: a refusal, or the list of models.
    fn look_up(&self, pending: &PendingRequest) -> Result<Lane, Response>;

    /// Responds to a complete request, on a worker. If the client goes away, the loop cancels what
    /// this waits for. Until it has authenticated the request, the others of its lane wait.
    fn respond(&self, pending: &PendingRequest, dispatcher: &Dispatcher) -> Response;

    /// Refuses a request that gets no worker: broken HTTP, one that is late or shed, or an outage.
    fn refuse(&self, peer: Option<IpAddr>, failure: Failure) -> Response;

    /// Returns the failure that every request would get now, if it is known. The loop calls this, so
    /// nothing is looked up.
    fn outage(&self) -> Option<Failure> {
        None
    }
}

/// The decision, from its head, to read a request and let a thread respond to it.
#[derive(Clone, Debug)]
pub struct Admission {
    /// The API's or the console's threads.
    pub area: Area,
    /// The digest of the key or session that it presents.
    pub credential: Option<SecretDigest>,
    /// The lane in which the request waits as long as its credential is not known: that of a
    /// browser, or `None`, which all unknown clients share.
    pub lane: Option<Arc<str>>,
    /// The network of an unknown client. If too many requests of unknown clients wait, the network
    /// that sent most loses one.
    pub network: Option<ClientNetwork>,
}

/// The lane of a key, once it was looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lane {
    /// The id of the key.
    pub name: String,
    /// The limit on its concurrent requests.
    pub limit: Option<u32>,
}

/// A complete request on its way to its response.
pub struct PendingRequest {
    pub request: Request,
    pub admission: Admission,
    /// When it was complete.
    pub received: Instant,
    /// Cancelled when the client goes away.
    pub cancellation: Cancellation,
    service: Arc<dyn Service>,
    connection: usize,
    area: Area,
    lane: LaneName,
}

impl PendingRequest {
    fn new(request: Request, admission: Admission, service: Arc<dyn Service>) -> Self {
        Self {
            request,
            area: admission.area,
            admission,
            received: Instant::now(),
            cancellation: Cancellation::default(),
            service,
            connection: 0,
            lane: None,
        }
    }

    /// The memory that it needs until it is answered.
    fn bytes(&self) -> usize {
        self.request.held_bytes()
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
    /// `None` if the service manager has none.
    pub watchdog: Option<Watchdog>,
    /// Called when the listener begins to stop; running requests are still completed.
    pub on_stop: Box<dyn Fn() + Send>,
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
            watchdog: None,
            on_stop: Box::new(|| {}),
            _stop: stop,
            stopper,
        })
    }

    /// The end of a pipe: a byte written to it, for example by a signal handler, stops the
    /// listener.
    pub fn stopper(&self) -> io::Result<UnixStream> {
        self.stopper.try_clone()
    }

    /// Starts the threads. A request is for the first of these services that serves its head; there
    /// is at least one. Fails if the system does not allow all threads.
    pub fn start(self, services: Vec<Arc<dyn Service>>) -> io::Result<EventLoop> {
        let threads = workers::start(&self.state)?;
        Ok(EventLoop::new(self, services, threads))
    }
}
