//! The event loop: accepts connections, reads requests, enforces the limits and sends responses, on
//! one thread.

mod accept;
mod eviction;
mod requests;
mod turns;

use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{io, mem};

use mio::event::Event;
use mio::{Events, Token};
use slab::Slab;
use threadpool::ThreadPool;

use super::connection::InboundConnection;
use super::limits::Limits;
use super::load::EventLog;
use super::origins::{Holding, Holdings, Origin, TurnQueue};
use super::service::Service;
use super::state::ListenerState;
use super::{FIRST_SOCKET, Listener, STOP, WAKE, Watchdog, workers};
use crate::client::Cancellation;
use crate::error::{Failure, FailureCause};
use crate::http::MAX_HEAD;
use crate::text::count;

pub struct EventLoop<S> {
    listener: Listener,
    state: Arc<ListenerState>,
    /// Some are shorter after a stop.
    limits: Limits,
    /// For each socket, whether a connection may wait. Events are edge-triggered, so this has to be
    /// remembered.
    accepting: Vec<bool>,
    /// Accepting pauses until then, because there was no file descriptor for a connection.
    accept_after: Instant,
    threads: Vec<ThreadPool>,
    service: Arc<S>,
    connections: Slab<ConnectionEntry>,
    /// The connections that have something to do, each once.
    ready: TurnQueue,
    /// The connections that wait for the next step of their TLS handshake. One step is taken per
    /// round, after the ready connections, because it costs milliseconds with an RSA key.
    handshakes: TurnQueue,
    /// The connections and bytes that each origin holds.
    holdings: Holdings,
    /// For the bytes of one read. What follows a request in it is kept, so it has no more bytes
    /// than a head.
    scratch: Vec<u8>,
    next_sweep: Instant,
    event_log: EventLog,
}

struct ConnectionEntry {
    connection: InboundConnection,
    /// It is in `ready` or in `handshakes`.
    is_scheduled: bool,
    origin: Origin,
    /// Its part of `holdings`.
    held: Holding,
    /// The request that a worker has or will get, and its memory. It is cancelled if the client
    /// goes away.
    in_flight: Option<(Cancellation, usize)>,
}

impl Listener {
    /// Starts the threads. Fails if the system does not allow all of them.
    pub fn start<S: Service>(self, service: Arc<S>) -> io::Result<EventLoop<S>> {
        let threads = workers::start(&self.state, &service)?;
        Ok(EventLoop::new(self, service, threads))
    }
}

impl<S: Service> EventLoop<S> {
    fn new(listener: Listener, service: Arc<S>, threads: Vec<ThreadPool>) -> Self {
        let now = Instant::now();
        Self {
            accepting: vec![false; listener.sockets.len()],
            accept_after: now,
            threads,
            state: Arc::clone(&listener.state),
            limits: listener.state.limits.clone(),
            listener,
            service,
            connections: Slab::new(),
            ready: TurnQueue::default(),
            handshakes: TurnQueue::default(),
            holdings: Holdings::default(),
            scratch: vec![0; MAX_HEAD],
            next_sweep: now,
            event_log: EventLog::new(),
        }
    }

    /// Serves until it is stopped and every running request is answered.
    pub fn run(mut self) -> io::Result<()> {
        let mut events = Events::with_capacity(1024);
        while !(self.state.is_stopping() && self.connections.is_empty()) {
            self.round(&mut events)?;
        }
        self.state.close();
        for pool in self.threads {
            pool.join();
        }
        self.event_log
            .finish(self.state.event_counts(), Instant::now());
        Ok(())
    }

    fn round(&mut self, events: &mut Events) -> io::Result<()> {
        match self.listener.poll.poll(events, self.poll_timeout()) {
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
        self.event_log.write(self.state.event_counts(), now);
        if let Some(watchdog) = &mut self.listener.watchdog
            && now >= watchdog.due()
        {
            watchdog.run(now, self.state.are_workers_stuck(self.limits.longest_work));
        }
        self.state
            .publish(self.connections.len(), self.holdings.total.bytes);
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
        let line = self.event_log.due(self.state.event_counts(), now);
        let watchdog = self.listener.watchdog.as_ref().map(Watchdog::due);
        let next = [sweep, accept, line, watchdog]
            .into_iter()
            .flatten()
            .min()?;
        Some(next.saturating_duration_since(now))
    }

    fn note_ready(&mut self, index: usize, event: &Event) {
        let Some(entry) = self.connections.get_mut(index) else {
            return;
        };
        if event.is_readable() || event.is_read_closed() || event.is_error() {
            entry
                .connection
                .note_readable(event.is_read_closed() || event.is_error());
        }
        if entry.connection.has_left_handshake() {
            return self.close(index);
        }
        if !self.abandon_if_gone(index) {
            self.schedule(index, false);
        }
    }

    /// Counts what a connection holds now.
    fn account(&mut self, index: usize) {
        let ConnectionEntry {
            connection,
            origin,
            held,
            in_flight,
            ..
        } = &mut self.connections[index];
        let bytes = connection.held_bytes() + in_flight.as_ref().map_or(0, |(_, bytes)| *bytes);
        let evictable = usize::from(connection.is_idle() || connection.is_unfinished());
        let now = Holding {
            connections: 1,
            bytes,
            evictable,
            evictable_bytes: evictable * bytes,
        };
        self.holdings.change(*origin, mem::replace(held, now), now);
    }

    fn close(&mut self, index: usize) {
        let mut entry = self.connections.remove(index);
        entry.connection.close_session();
        self.holdings
            .change(entry.origin, entry.held, Holding::default());
    }

    /// Closes the connections whose deadline has passed.
    fn sweep(&mut self, now: Instant) {
        for index in self.indices() {
            let Some(ConnectionEntry { connection, .. }) = self.connections.get(index) else {
                continue;
            };
            if connection.deadline.is_none_or(|deadline| deadline > now) {
                continue;
            }
            if connection.has_partial_request() {
                let message = "The request was not complete in time.";
                self.refuse(
                    index,
                    None,
                    Failure::invalid(FailureCause::Incomplete, message),
                );
                self.advance(index, false);
            } else {
                self.close(index);
            }
        }
    }

    /// The connections at this moment. Work on one of them may evict another before its turn comes.
    fn indices(&self) -> Vec<usize> {
        self.connections.iter().map(|(index, _)| index).collect()
    }

    /// Accepts no new connection, and closes the others after their current request.
    fn stop(&mut self) {
        if self.state.stop() {
            return;
        }
        (self.listener.on_stop)();
        self.listener.sockets.clear();
        self.accepting.clear();
        let limits = &mut self.limits;
        limits.drain_time = limits.drain_time.min(limits.stop_time);
        limits.request_time = limits.request_time.min(limits.stop_time);
        // For a connection whose handshake ends after the stop.
        limits.idle_time = limits.idle_time.min(limits.idle_stop_time);
        let (stop_time, idle_stop_time) = (limits.stop_time, limits.idle_stop_time);
        let now = Instant::now();
        for index in self.indices() {
            let Some(entry) = self.connections.get_mut(index) else {
                continue;
            };
            // What has arrived by now is still read: it may be a request.
            entry.connection.note_readable(false);
            self.advance(index, false);
            if let Some(ConnectionEntry { connection, .. }) = self.connections.get_mut(index) {
                let time = if connection.is_idle() {
                    idle_stop_time
                } else {
                    stop_time
                };
                connection.shorten_deadline(now + time);
            }
        }
        let left = self
            .connections
            .iter()
            .filter(|(_, entry)| entry.in_flight.is_some())
            .count();
        log::info!(
            "stopping: no new connections; waits for {}",
            count(left as i64, "request")
        );
    }
}
