//! The event loop: accepts connections, reads requests, enforces the limits and sends responses, on one thread.

mod accept;
mod eviction;
mod requests;
mod turns;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::event::Event;
use mio::{Events, Interest, Poll, Token};
use slab::Slab;

use super::connection::{Expired, InboundConnection};
use super::origins::{Holding, Holdings, Origin};
use super::pressure::PressureLog;
use super::workers::Workers;
use super::{Acceptor, Limits, Listener, ListeningSocket, Load, Proxies, Pulse, Service};
use crate::client::Cancellation;
use crate::error::{Failure, FailureCause};
use crate::text::count;

pub(super) const WAKE: Token = Token(usize::MAX);
const STOP: Token = Token(usize::MAX - 1);
/// Tokens from here on belong to the listening sockets.
const FIRST_SOCKET: usize = usize::MAX - 1024;

pub(super) struct EventLoop<S> {
    poll: Poll,
    sockets: Vec<ListeningSocket>,
    /// For each socket, whether a connection may wait. Events are edge-triggered, so this has to be remembered.
    accepting: Vec<bool>,
    /// Accepting pauses until then, because there was no file descriptor for a connection.
    accept_after: Instant,
    workers: Workers<S>,
    pulse: Arc<Pulse>,
    load: Arc<Load>,
    acceptor: Option<Arc<Acceptor>>,
    proxies: Proxies,
    service: Arc<S>,
    connections: Slab<ConnectionEntry>,
    /// The connections that have something to do, each once, in the order of their turns.
    ready: VecDeque<usize>,
    /// The connections that wait for the next step of their TLS handshake. One step is taken per round, after the ready
    /// connections, because it costs milliseconds with an RSA key.
    handshakes: VecDeque<usize>,
    /// The origin of the last handshake step.
    last_handshake: Option<Origin>,
    /// The connections and bytes that each origin holds.
    holdings: Holdings,
    scratch: Vec<u8>,
    /// The memory of all connections together, without the requests that the workers have.
    buffered: usize,
    next_sweep: Instant,
    pressure_log: PressureLog,
    stopping: bool,
    limits: Limits,
    /// Readable after a signal.
    _stop: mio::net::UnixStream,
}

struct ConnectionEntry {
    connection: InboundConnection,
    /// It is in `ready` or in `handshakes`.
    is_scheduled: bool,
    origin: Origin,
    /// The bytes that it adds to `buffered`.
    held_bytes: usize,
    is_idle: bool,
    is_unfinished: bool,
    /// The request that a worker has or will get. It is cancelled if the client goes away.
    call: Option<Cancellation>,
}

impl ConnectionEntry {
    /// Its part of `holdings`.
    fn holding(&self) -> Holding {
        let evictable = usize::from(self.is_evictable());
        Holding { connections: 1, evictable, evictable_bytes: evictable * self.held_bytes }
    }

    fn is_evictable(&self) -> bool {
        self.is_idle || self.is_unfinished
    }
}

impl<S: Service> EventLoop<S> {
    pub fn new(listener: Listener, service: Arc<S>) -> io::Result<Self> {
        let Listener {
            mut sockets,
            limits,
            poll,
            waker,
            pulse,
            load,
            acceptor,
            trusted_proxies: proxies,
            stop,
            ..
        } = listener;
        let mut stop = mio::net::UnixStream::from_std(stop);
        poll.registry().register(&mut stop, STOP, Interest::READABLE)?;
        for (index, socket) in sockets.iter_mut().enumerate() {
            socket.register(poll.registry(), Token(FIRST_SOCKET + index))?;
        }
        let now = Instant::now();
        Ok(Self {
            accepting: sockets.iter().map(|_| false).collect(),
            sockets,
            accept_after: now,
            workers: Workers::start(&limits, Arc::clone(&service), waker, &pulse, &load),
            load,
            acceptor,
            proxies,
            service,
            poll,
            pulse,
            connections: Slab::new(),
            ready: VecDeque::new(),
            handshakes: VecDeque::new(),
            last_handshake: None,
            holdings: Holdings::default(),
            scratch: vec![0; turns::TURN],
            buffered: 0,
            next_sweep: now,
            pressure_log: PressureLog::default(),
            stopping: false,
            limits,
            _stop: stop,
        })
    }

    pub fn run(mut self) -> io::Result<()> {
        let mut events = Events::with_capacity(1024);
        while !(self.stopping && self.connections.is_empty()) {
            self.round(&mut events)?;
        }
        self.workers.join();
        self.pressure_log.finish(&self.load, Instant::now());
        Ok(())
    }

    fn round(&mut self, events: &mut Events) -> io::Result<()> {
        match self.poll.poll(events, self.poll_timeout()) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
            result => result?,
        }
        // Responses first: sending them makes room for new requests.
        self.send_completed();
        for event in events.iter() {
            match event.token() {
                WAKE => {}
                STOP => self.stop(),
                Token(index) if index >= FIRST_SOCKET => {
                    // After a stop there is no socket.
                    if let Some(accepting) = self.accepting.get_mut(index - FIRST_SOCKET) {
                        *accepting = true;
                    }
                }
                Token(index) => self.note_ready(index, event),
            }
        }
        self.take_turns();
        self.accept();
        let now = Instant::now();
        if now >= self.next_sweep {
            self.next_sweep = now + self.limits.tick();
            self.sweep(now);
            self.refuse_waiting();
        }
        self.pressure_log.write(&self.load, now);
        self.pulse.answer();
        self.load.publish(self.connections.len(), self.buffered);
        Ok(())
    }

    /// The time until the loop has something to do without an event; `None` if it has nothing.
    fn poll_timeout(&self) -> Option<Duration> {
        if !(self.ready.is_empty() && self.handshakes.is_empty()) {
            return Some(Duration::ZERO);
        }
        let now = Instant::now();
        let sweep = (!self.connections.is_empty()).then_some(self.next_sweep);
        let accept = self.accepting.contains(&true).then_some(self.accept_after);
        let next = [sweep, accept, self.pressure_log.due(&self.load, now)].into_iter().flatten().min()?;
        Some(next.saturating_duration_since(now))
    }

    fn note_ready(&mut self, index: usize, event: &Event) {
        let Some(entry) = self.connections.get_mut(index) else {
            return;
        };
        if event.is_readable() || event.is_read_closed() || event.is_error() {
            entry.connection.note_readable(event.is_read_closed() || event.is_error());
        }
        if !self.abandon_if_gone(index) {
            self.schedule(index);
        }
    }

    /// Counts what a connection holds now.
    fn account(&mut self, index: usize) {
        let entry = &mut self.connections[index];
        let (held, held_bytes) = (entry.holding(), entry.held_bytes);
        entry.held_bytes = entry.connection.held_bytes();
        entry.is_idle = entry.connection.is_idle();
        entry.is_unfinished = entry.connection.is_unfinished();
        self.buffered = self.buffered - held_bytes + entry.held_bytes;
        self.holdings.change(entry.origin, held, entry.holding());
    }

    fn close(&mut self, index: usize) {
        let mut entry = self.connections.remove(index);
        entry.connection.close_session();
        self.buffered -= entry.held_bytes;
        self.holdings.change(entry.origin, entry.holding(), Holding::default());
    }

    /// Closes the connections whose deadline has passed.
    fn sweep(&mut self, now: Instant) {
        for index in self.indices() {
            let expired = self.connections.get(index).and_then(|entry| entry.connection.expired(now));
            match expired {
                Some(Expired::Silence) => self.close(index),
                Some(Expired::Request) => {
                    let message = "The request was not complete in time.";
                    self.refuse(index, None, Failure::invalid(FailureCause::Incomplete, message));
                    self.advance(index, false);
                }
                None => {}
            }
        }
    }

    /// The connections at this moment. Work on one of them may evict another before its turn comes.
    fn indices(&self) -> Vec<usize> {
        self.connections.iter().map(|(index, _)| index).collect()
    }

    /// Accepts no new connection, and closes the others after their current request.
    fn stop(&mut self) {
        if self.stopping {
            return;
        }
        self.stopping = true;
        self.workers.completions().close_after_responses();
        self.sockets.clear();
        self.accepting.clear();
        self.limits.drain_time = self.limits.drain_time.min(self.limits.stop_time);
        self.limits.request_time = self.limits.request_time.min(self.limits.stop_time);
        // For a connection whose handshake ends after the stop.
        self.limits.idle_time = self.limits.idle_time.min(self.limits.idle_stop_time);
        let now = Instant::now();
        for index in self.indices() {
            let Some(entry) = self.connections.get_mut(index) else { continue };
            // What has arrived by now is still read: it may be a request.
            entry.connection.note_readable(false);
            self.advance(index, false);
            match self.connections.get_mut(index) {
                Some(entry) if entry.connection.is_idle() => {
                    entry.connection.shorten_deadline(now + self.limits.idle_stop_time);
                }
                Some(entry) => entry.connection.shorten_deadline(now + self.limits.stop_time),
                None => {}
            }
        }
        let left = self.connections.iter().filter(|(_, entry)| entry.call.is_some()).count();
        log::info!("stopping: no new connections; waits for {}", count(left as i64, "request"));
    }
}
