//! The event loop: accepts connections, reads requests in turns, enforces the limits, gives complete
//! requests to the dispatcher and sends responses, on one thread.

use std::io;
use std::mem;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::event::Event;
use mio::net::TcpStream;
use mio::{Events, Interest, Token};
use rustix::io::Errno;
use slab::Slab;
use threadpool::ThreadPool;

use super::connection::{
    Admitted, InboundConnection, Outgoing, Turn, TurnResult, send_unavailable,
};
use super::dispatcher::{Area, Outcome};
use super::load::{EventLog, ListenerState, LoadEvent};
use super::origins::{Holding, Holdings, Origin, Resource, TurnQueue};
use super::{FIRST_SOCKET, Limits, Listener, PendingRequest, STOP, Service, WAKE, Watchdog};
use crate::client::Cancellation;
use crate::error::{Failure, FailureCause};
use crate::http::{ClientInfo, ConnectionHeader, MAX_HEAD, RequestHead};
use crate::text::count;

/// The connections that a socket accepts in one round, before the established ones have their turn
/// again.
const ACCEPT_BATCH: usize = 64;

/// The bytes that a connection may read before the others have their turn.
const TURN: usize = 64 * 1024;

/// The time limit for the turns of one round. Then the loop sends responses, accepts connections
/// and checks deadlines.
const ROUND: Duration = Duration::from_millis(10);

/// The interval at which deadlines are checked.
const SWEEP_INTERVAL: Duration = Duration::from_millis(250);

pub struct EventLoop {
    listener: Listener,
    pub(super) state: Arc<ListenerState>,
    /// Some are shorter after a stop.
    pub(super) limits: Limits,
    /// For each socket, whether a connection may wait. Events are edge-triggered, so this has to be
    /// remembered.
    accepting: Vec<bool>,
    /// Accepting pauses until then, because there was no file descriptor for a connection.
    accept_after: Instant,
    threads: Vec<ThreadPool>,
    services: Vec<Arc<dyn Service>>,
    pub(super) connections: Slab<ConnectionEntry>,
    /// The connections that have something to do, each once.
    ready: TurnQueue,
    /// The connections that wait for the next step of their TLS handshake. One step is taken per
    /// round, after the ready connections, because it costs milliseconds with an RSA key.
    handshakes: TurnQueue,
    /// The connections and bytes that each origin holds.
    pub(super) holdings: Holdings,
    /// For the bytes of one read. What follows a request in it is kept, so it has no more bytes
    /// than a head.
    pub(super) scratch: Vec<u8>,
    next_sweep: Instant,
    event_log: EventLog,
}

pub(super) struct ConnectionEntry {
    pub connection: InboundConnection,
    /// It is in `ready` or in `handshakes`.
    is_scheduled: bool,
    pub origin: Origin,
    /// Its part of `holdings`.
    pub held: Holding,
    /// The request that waits or that a thread has, and its memory. It is cancelled if the client
    /// goes away.
    in_flight: Option<(Cancellation, usize)>,
}

impl EventLoop {
    pub(super) fn new(
        listener: Listener,
        services: Vec<Arc<dyn Service>>,
        threads: Vec<ThreadPool>,
    ) -> Self {
        let now = Instant::now();
        Self {
            accepting: vec![false; listener.sockets.len()],
            accept_after: now,
            threads,
            state: Arc::clone(&listener.state),
            limits: listener.state.limits.clone(),
            listener,
            services,
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
        self.state.dispatcher.close();
        for pool in self.threads {
            pool.join();
        }
        let counts = self.state.event_counts();
        self.event_log.write(counts, Instant::now(), true);
        Ok(())
    }

    fn round(&mut self, events: &mut Events) -> io::Result<()> {
        match self.listener.poll.poll(events, self.poll_timeout()) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
            result => result?,
        }
        // Responses first: sending them makes room for new requests.
        self.take_completed();
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
            self.next_sweep = now + SWEEP_INTERVAL;
            self.sweep(now);
            self.refuse_waiting();
        }
        self.event_log.write(self.state.event_counts(), now, false);
        if let Some(watchdog) = &mut self.listener.watchdog
            && now >= watchdog.due()
        {
            let is_overdue = self.state.dispatcher.is_overdue(self.limits.longest_work);
            watchdog.run(now, is_overdue);
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
        let next = [sweep, accept, line, watchdog].into_iter().flatten();
        let next = next.min()?;
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

    fn accept(&mut self) {
        let mut has_accepted = false;
        for index in 0..self.listener.sockets.len() {
            for _ in 0..ACCEPT_BATCH {
                if !self.accepting[index] || Instant::now() < self.accept_after {
                    break;
                }
                match self.listener.sockets[index].accept() {
                    Ok((stream, peer)) => {
                        self.add_connection(stream, peer);
                        has_accepted = true;
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        self.accepting[index] = false
                    }
                    // An error of the one connection: its client gave up before it was its turn, or
                    // a filter forbids it.
                    Err(error) if !is_shortage(&error) => {}
                    // The connections that have just come take their turns first: evicted now, they
                    // would have had no time to send anything.
                    Err(_) if has_accepted => return,
                    // If there is none to evict, accepting pauses until some connection ends.
                    Err(error) => {
                        if !self.evict_from_largest(Resource::Connections) {
                            log::warn!("can't accept connections at the moment: {error}");
                            self.accept_after = Instant::now() + self.limits.accept_pause;
                        }
                    }
                }
            }
        }
    }

    /// Adds a new connection, or rejects it if no other can be evicted for it. Its bytes come with its
    /// first event (`note_ready`).
    fn add_connection(&mut self, mut stream: TcpStream, peer: Option<IpAddr>) {
        let origin = Origin::new(peer, &self.listener.trusted_proxies);
        let acceptor = self.listener.acceptor.clone().filter(|_| peer.is_some());
        if !self.reserve_connection(origin) {
            self.state.count(LoadEvent::Rejected);
            if acceptor.is_none() {
                let service = Arc::clone(self.default_service());
                send_unavailable(&*service, &stream, peer, &mut self.scratch);
            }
            return;
        }
        let tls = match acceptor.map(|acceptor| acceptor.accept()).transpose() {
            Ok(session) => session,
            Err(error) => return log::error!("could not start a TLS session: {error}"),
        };
        self.state.count_accepted();
        let vacant = self.connections.vacant_entry();
        let index = vacant.key();
        let registry = self.listener.poll.registry();
        let interest = Interest::READABLE | Interest::WRITABLE;
        if let Err(error) = registry.register(&mut stream, Token(index), interest) {
            return log::warn!("could not register a connection: {error}");
        }
        vacant.insert(ConnectionEntry {
            connection: InboundConnection::new(stream, tls, peer, &self.limits),
            is_scheduled: false,
            origin,
            held: Holding::default(),
            in_flight: None,
        });
        self.account(index);
        self.evict_excess_bytes();
    }

    /// Gives each ready connection its turn, until the round is over.
    fn take_turns(&mut self) {
        let began = Instant::now();
        while let Some(index) = self.ready.pop() {
            self.take_turn(index, false);
            if began.elapsed() > ROUND {
                break;
            }
        }
        if let Some(index) = self.handshakes.pop() {
            self.take_turn(index, true);
        }
    }

    fn take_turn(&mut self, index: usize, handshake_allowed: bool) {
        self.connections[index].is_scheduled = false;
        self.advance(index, handshake_allowed);
    }

    /// Schedules a turn for a connection, after those of the others, if it has none yet.
    pub(super) fn schedule(&mut self, index: usize, for_handshake: bool) {
        let entry = &mut self.connections[index];
        if !mem::replace(&mut entry.is_scheduled, true) {
            let queue = match for_handshake {
                true => &mut self.handshakes,
                false => &mut self.ready,
            };
            queue.push(entry.origin, index);
        }
    }

    /// Advances a connection as far as it can go in one turn without waiting.
    fn advance(&mut self, index: usize, handshake_allowed: bool) {
        let mut left = TURN;
        loop {
            let Some(entry) = self.connections.get_mut(index) else {
                return;
            };
            let admit = |mut client: ClientInfo, head: &RequestHead| {
                let proxies = &self.listener.trusted_proxies;
                proxies.apply_forwarding_headers(&mut client, head);
                let serves = |service: &&Arc<dyn Service>| service.serves(&client, head);
                let service = self.services.iter().find(serves);
                let service = service.or(self.services.last());
                let service = Arc::clone(service.expect("there should be a service"));
                let admission = service.admit(&client, head)?;
                Ok(Admitted {
                    client,
                    service,
                    admission,
                })
            };
            let mut turn = Turn {
                scratch: &mut self.scratch,
                limits: &self.limits,
                left,
                handshake_allowed,
                stopping: self.state.is_stopping(),
                admit: &admit,
            };
            let result = entry.connection.run_turn(&mut turn);
            left = turn.left;
            match result {
                TurnResult::Waiting => break,
                TurnResult::TurnOver => {
                    self.schedule(index, false);
                    break;
                }
                TurnResult::Handshake => {
                    self.schedule(index, true);
                    break;
                }
                TurnResult::Gone => return self.close(index),
                TurnResult::Malformed(malformed) => {
                    let failure = Failure::invalid(FailureCause::Http, malformed.0);
                    self.refuse(index, None, failure);
                }
                TurnResult::Request(mut pending) => {
                    pending.connection = index;
                    self.hand_over(pending);
                }
            }
        }
        self.account(index);
        // The evicted connection may be this one.
        self.evict_excess_bytes();
    }

    /// Gives a complete request to the dispatcher. If there is no room, one is shed: this one, or
    /// one that waits.
    fn hand_over(&mut self, mut pending: Box<PendingRequest>) {
        let index = pending.connection;
        self.connections[index].connection.begin_working();
        // Without the bytes of its reader, which count below as the request's.
        self.account(index);
        // The end came with the request.
        if self.connections[index].connection.read_closed {
            self.state.count(LoadEvent::AbandonedWaiting);
            return self.close(index);
        }
        let own = self.state.dispatcher.place(&mut pending);
        let bytes = pending.bytes();
        if !self.make_room(bytes, own, pending.lane.is_some()) {
            return self.refuse_shed(&pending, FailureCause::BuffersFull);
        }
        self.connections[index].in_flight = Some((pending.cancellation.clone(), bytes));
        self.account(index);
        if let Some(shed) = self.state.dispatcher.push(pending) {
            self.refuse_shed(&shed, FailureCause::QueueFull);
        }
    }

    /// Takes what the threads have made of requests: sends the responses, and queues a request whose
    /// key was looked up in the lane of its key.
    fn take_completed(&mut self) {
        for completed in self.state.dispatcher.take_completed() {
            let index = completed.connection;
            let entry = &mut self.connections[index];
            let in_flight = entry.in_flight.take();
            if in_flight.is_some_and(|(cancellation, _)| cancellation.is_cancelled()) {
                self.state.count(match completed.area {
                    Area::LookUp => LoadEvent::AbandonedWaiting,
                    Area::Api | Area::Console => LoadEvent::AbandonedRunning,
                });
                self.close(index);
                continue;
            }
            match completed.outcome {
                Outcome::LookedUp(pending) => self.hand_over(pending),
                Outcome::Response(mut outgoing) => {
                    if self.state.is_stopping() {
                        outgoing.header = ConnectionHeader::Close;
                    }
                    entry.connection.send_response(outgoing, &self.limits);
                    self.advance(index, false);
                }
            }
        }
    }

    /// Answers a complete request for which there is no room, in the queue or in the buffers: the only
    /// place where one is shed.
    pub(super) fn refuse_shed(&mut self, pending: &PendingRequest, cause: FailureCause) {
        self.state.count(match (cause, pending.admission.area) {
            (FailureCause::BuffersFull, _) => LoadEvent::BuffersFull,
            (_, Area::Console) => LoadEvent::ConsoleFull,
            _ => LoadEvent::QueueFull,
        });
        let index = pending.connection;
        self.refuse(index, Some(pending), Failure::overloaded(cause));
        self.account(index);
        self.schedule(index, false);
    }

    /// Refuses a broken or shed request without a worker, and closes the connection.
    pub(super) fn refuse(
        &mut self,
        index: usize,
        pending: Option<&PendingRequest>,
        failure: Failure,
    ) {
        let response = match pending {
            Some(pending) => {
                let peer = pending.request.client.peer;
                let response = pending.service.refuse(peer, failure);
                Outgoing::last(&response, pending.request.head.method() == "HEAD")
            }
            None => {
                let peer = self.connections[index].connection.peer;
                Outgoing::last(&self.default_service().refuse(peer, failure), false)
            }
        };
        let entry = &mut self.connections[index];
        entry.in_flight = None;
        entry.connection.forget_request();
        entry.connection.send_response(response, &self.limits);
    }

    /// Refuses the API's requests that wait while the ledger is unavailable: every worker may itself
    /// be waiting for the database, to write the row of a completion.
    fn refuse_waiting(&mut self) {
        while let Some(failure) = self.default_service().outage()
            && let Some(pending) = self.state.dispatcher.remove_any()
        {
            self.refuse(pending.connection, Some(&pending), failure);
            self.advance(pending.connection, false);
        }
    }

    /// The service of requests whose head is broken, or that no other service serves.
    pub(super) fn default_service(&self) -> &Arc<dyn Service> {
        self.services.last().expect("there should be a service")
    }

    /// Drops the request of a client that has gone, or cancels it. A thread that has it gives the
    /// connection back soon; until then its number is not used again.
    fn abandon_if_gone(&mut self, index: usize) -> bool {
        let ConnectionEntry {
            connection,
            in_flight: Some((cancellation, _)),
            ..
        } = &self.connections[index]
        else {
            return false;
        };
        if !connection.read_closed || cancellation.is_cancelled() {
            return cancellation.is_cancelled();
        }
        cancellation.cancel();
        if self.state.dispatcher.remove(index) {
            self.state.count(LoadEvent::AbandonedWaiting);
            self.close(index);
        }
        true
    }

    /// Counts what a connection holds now.
    pub(super) fn account(&mut self, index: usize) {
        let Some(entry) = self.connections.get_mut(index) else {
            return;
        };
        let ConnectionEntry {
            connection,
            origin,
            held,
            in_flight,
            ..
        } = entry;
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

    pub(super) fn close(&mut self, index: usize) {
        let mut entry = self.connections.remove(index);
        if entry.is_scheduled {
            // The next connection may have the same number.
            self.ready.remove(entry.origin, index);
            self.handshakes.remove(entry.origin, index);
        }
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
                let failure = Failure::invalid(FailureCause::Incomplete, message);
                self.refuse(index, None, failure);
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
        // Also for what begins after the stop.
        for time in [
            &mut limits.drain_time,
            &mut limits.request_time,
            &mut limits.idle_time,
        ] {
            *time = limits.stop_time.min(*time);
        }
        let latest = Instant::now() + limits.stop_time;
        for index in self.indices() {
            let Some(entry) = self.connections.get_mut(index) else {
                continue;
            };
            // What has arrived by now is still read: it may be a request.
            entry.connection.note_readable(false);
            self.advance(index, false);
            if let Some(entry) = self.connections.get_mut(index) {
                entry.connection.shorten_deadline(latest);
            }
        }
        let is_in_flight = |(_, entry): &(usize, &ConnectionEntry)| entry.in_flight.is_some();
        let left = self.connections.iter().filter(is_in_flight).count();
        log::info!(
            "stopping: no new connections; waits for {}",
            count(left as i64, "request")
        );
    }
}

/// Returns true if there is no file descriptor or no memory for a connection, which another one can
/// give back.
fn is_shortage(error: &io::Error) -> bool {
    let shortages = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    Errno::from_io_error(error).is_some_and(|errno| shortages.contains(&errno))
}
