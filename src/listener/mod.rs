//! The listener: one thread that accepts connections and reads requests without ever waiting for a
//! client, and a fixed pool of workers that respond to the complete ones.
//!
//! A client costs a buffer, never a thread. Every buffer, count and time has a limit: those that
//! depend on the settings are in [`Limits`], constants beside the code that they bound.

mod admission;
mod connection;
mod credential_cache;
mod event_loop;
mod limits;
mod load;
mod origins;
mod proxies;
mod queue;
mod service;
mod socket;
mod state;
mod tls;
mod watchdog;
mod workers;

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use mio::{Interest, Poll, Token, Waker};

pub use admission::{Admission, Destination, Lane, PendingRequest};
pub use event_loop::EventLoop;
pub use limits::Limits;
pub use load::{Gauge, LoadEvent, Snapshot};
pub use proxies::{Proxies, TrustedProxy};
pub use queue::LaneLoad;
pub use service::{RunningRequest, Service};
pub use socket::{Address, ListeningSocket};
pub use state::ListenerState;
pub use tls::{Acceptor, Certificate, TlsError};
pub use watchdog::Watchdog;

const WAKE: Token = Token(usize::MAX);
const STOP: Token = Token(usize::MAX - 1);
/// Tokens from here on belong to the listening sockets.
const FIRST_SOCKET: usize = usize::MAX - 1024;

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
}
