//! The event loop: accepts connections, reads requests, enforces the limits and sends responses, on one thread.

mod accept;

use std::collections::VecDeque;
use std::io;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mio::event::Event;
use mio::{Events, Interest, Poll, Token};
use slab::Slab;

use super::connection::{Answered, Client, Connection, Expired, Outcome, Then, Turn};
use super::shed::ShedLog;
use super::workers::{Outgoing, Workers, connection_after};
use super::{Acceptor, Admitted, Destination, Limits, Listener, Load, Proxies, Pulse, Service, Socket};
use crate::error::Failure;
use crate::http::{Head, Request, response};

pub(super) const WAKE: Token = Token(usize::MAX);
const STOP: Token = Token(usize::MAX - 1);
/// Tokens from here on belong to the listening sockets.
const FIRST_SOCKET: usize = usize::MAX - 1024;

/// The bytes that a connection may read before the others have their turn.
const TURN: usize = 64 * 1024;

/// The time for the turns of one round. Then responses, new connections and deadlines are looked at, and the others continue.
const ROUND: Duration = Duration::from_millis(10);

const TOO_MUCH_BUFFERED: &str = "the bound on buffered bytes is reached";

pub(super) struct EventLoop<S> {
    poll: Poll,
    sockets: Vec<Socket>,
    /// Which sockets may have a connection to accept. Events are edge-triggered, so this has to be remembered.
    accepting: Vec<bool>,
    /// Accepting pauses until then, because there was no file descriptor for a connection.
    accept_after: Instant,
    workers: Workers<S>,
    pulse: Arc<Pulse>,
    load: Arc<Load>,
    acceptor: Option<Arc<Acceptor>>,
    proxies: Proxies,
    service: Arc<S>,
    connections: Slab<Entry>,
    /// The connections that have something to do, each once, in the order of their turns.
    ready: VecDeque<usize>,
    /// Those that wait for the next step of their TLS handshake. One step is taken in a round, after all who are ready: with
    /// an RSA key it costs milliseconds.
    handshakes: VecDeque<usize>,
    scratch: Vec<u8>,
    /// The memory of all connections together, without the requests that the workers have.
    buffered: usize,
    next_sweep: Instant,
    shed_log: ShedLog,
    stopping: bool,
    limits: Limits,
    /// Readable after a signal.
    _stop: mio::net::UnixStream,
}

struct Entry {
    connection: Connection,
    /// It is in `ready` or in `handshakes`.
    in_line: bool,
    /// What `buffered` counts for it.
    weight: usize,
}

impl<S: Service> EventLoop<S> {
    pub fn new(listener: Listener, service: Arc<S>) -> io::Result<Self> {
        let Listener { mut sockets, limits, poll, waker, pulse, load, acceptor, proxies, stop, .. } =
            listener;
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
            scratch: vec![0; TURN],
            buffered: 0,
            next_sweep: now,
            shed_log: ShedLog::default(),
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
        self.shed_log.finish(Instant::now());
        Ok(())
    }

    fn round(&mut self, events: &mut Events) -> io::Result<()> {
        match self.poll.poll(events, self.patience()) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
            result => result?,
        }
        // Responses first: sending them makes room for new requests.
        self.send_completed();
        for event in events.iter() {
            match event.token() {
                WAKE => {}
                STOP => self.stop(),
                Token(index) if index >= FIRST_SOCKET => self.note_connection(index - FIRST_SOCKET),
                Token(index) => self.note_ready(index, event),
            }
        }
        self.take_turns();
        self.accept();
        let now = Instant::now();
        if now >= self.next_sweep {
            self.next_sweep = now + self.limits.tick();
            self.sweep(now);
        }
        self.shed_log.write(now);
        self.pulse.answer();
        self.load.publish(self.connections.len(), self.buffered);
        Ok(())
    }

    /// Sends the responses that the workers have finished.
    fn send_completed(&mut self) {
        for completed in self.workers.take_completed() {
            if let Some(entry) = self.connections.get_mut(completed.connection) {
                let mut outgoing = completed.outgoing;
                if self.stopping {
                    outgoing.then = Then::Close;
                }
                entry.connection.send_response(outgoing, &self.limits);
                self.advance(completed.connection, false);
            }
        }
    }

    /// Gives each connection in line its turn, until the round is over.
    fn take_turns(&mut self) {
        let began = Instant::now();
        while let Some(index) = self.ready.pop_front() {
            self.take_turn(index, false);
            if began.elapsed() > ROUND {
                break;
            }
        }
        if let Some(index) = self.handshakes.pop_front() {
            self.take_turn(index, true);
        }
    }

    fn take_turn(&mut self, index: usize, may_shake_hands: bool) {
        // It may have been closed meanwhile.
        if let Some(entry) = self.connections.get_mut(index) {
            entry.in_line = false;
            self.advance(index, may_shake_hands);
        }
    }

    /// How long the loop can wait for events.
    fn patience(&self) -> Option<Duration> {
        if !(self.ready.is_empty() && self.handshakes.is_empty()) {
            return Some(Duration::ZERO);
        }
        let now = Instant::now();
        let sweep = (!self.connections.is_empty()).then_some(self.next_sweep);
        let accept = self.accepting.contains(&true).then_some(self.accept_after);
        let next = [sweep, accept, self.shed_log.due(now)].into_iter().flatten().min()?;
        Some(next.saturating_duration_since(now))
    }

    fn note_connection(&mut self, socket: usize) {
        if let Some(accepting) = self.accepting.get_mut(socket) {
            *accepting = true;
        }
    }

    fn note_ready(&mut self, index: usize, event: &Event) {
        let Some(entry) = self.connections.get_mut(index) else {
            return;
        };
        if event.is_readable() || event.is_read_closed() || event.is_error() {
            entry.connection.note_readable(event.is_read_closed() || event.is_error());
        }
        if !mem::replace(&mut entry.in_line, true) {
            self.ready.push_back(index);
        }
    }

    /// Closes the longest idle connection among those that `is_meant` accepts.
    fn close_longest_idle(&mut self, is_meant: impl Fn(&Entry) -> bool) -> bool {
        let longest = self
            .connections
            .iter()
            .filter(|(_, entry)| entry.connection.is_idle() && is_meant(entry))
            .min_by_key(|(_, entry)| entry.connection.deadline())
            .map(|(index, _)| index);
        if let Some(index) = longest {
            self.close(index);
            count(&self.load.made_way);
        }
        longest.is_some()
    }

    /// Whether there is room for so many more bytes. If not, idle TLS sessions are closed; an idle connection without TLS
    /// holds no buffer and stays.
    fn make_room(&mut self, wanted: usize) -> bool {
        while self.buffered + self.workers.weight() + wanted > self.limits.buffered_bytes {
            if !self.close_longest_idle(|entry| entry.weight > 0) {
                return false;
            }
        }
        true
    }

    /// Advances a connection as far as it can go in one turn without waiting.
    fn advance(&mut self, index: usize, may_shake_hands: bool) {
        let mut left = TURN;
        loop {
            let Some(entry) = self.connections.get_mut(index) else {
                return;
            };
            let (proxies, service) = (&self.proxies, &self.service);
            let admit = |client: &mut Client, head: &Head| {
                proxies.see_through(client, head);
                service.admit(client.peer, head)
            };
            let (scratch, limits) = (&mut self.scratch, &self.limits);
            let mut turn = Turn { scratch, limits, left, may_shake_hands, admit: &admit };
            let outcome = entry.connection.advance(&mut turn);
            left = turn.left;
            match outcome {
                Outcome::Waiting | Outcome::TurnOver | Outcome::Handshake => {
                    let line = match outcome {
                        Outcome::TurnOver => Some(&mut self.ready),
                        Outcome::Handshake => Some(&mut self.handshakes),
                        _ => None,
                    };
                    if let Some(line) = line.filter(|_| !mem::replace(&mut entry.in_line, true)) {
                        line.push_back(index);
                    }
                    self.weigh(index);
                    return self.bound(index);
                }
                Outcome::Gone => return self.close(index),
                Outcome::Malformed(malformed) => self.refuse(index, None, Failure::invalid(malformed.0)),
                // A stop does not wait for downloads: one may take hours.
                Outcome::Next(..) if self.stopping => return self.close(index),
                Outcome::Next(rest, then) => {
                    entry.connection.hand_over();
                    self.workers.make_next_piece(index, rest, then);
                }
                Outcome::Answered(answered) => {
                    // One answer a turn: a client that pipelines such requests gets no more of the loop than others.
                    left = 0;
                    self.answer(index, answered);
                }
                Outcome::Request(admitted) => self.hand_over(index, admitted),
            }
        }
    }

    /// Gives a complete request to the workers, or sheds it if there is no room.
    fn hand_over(&mut self, index: usize, admitted: Admitted) {
        self.connections[index].connection.hand_over();
        // Its memory counts as the workers' now.
        self.weigh(index);
        if !self.workers.have_room(admitted.destination) {
            count(match admitted.destination {
                Destination::Api(_) => &self.load.queue_full,
                Destination::Console(_) => &self.load.console_full,
            });
            let taken = "every worker and every place in the queue is taken";
            self.refuse(index, Some(&admitted.request), Failure::shed(taken));
        } else if !self.make_room(admitted.request.weight()) {
            count(&self.load.buffers_full);
            self.refuse(index, Some(&admitted.request), Failure::shed(TOO_MUCH_BUFFERED));
        } else {
            self.workers.answer(index, admitted);
        }
    }

    /// Sends the response to a request whose head was enough for it. The connection stays open if the body was skipped.
    fn answer(&mut self, index: usize, answered: Answered) {
        let Answered { response, head, is_body_skipped } = answered;
        let (header, then) = connection_after(&head, is_body_skipped, self.stopping);
        let bytes = response.encode(header, head.method() == "HEAD");
        self.connections[index].connection.send_response(Outgoing::new(bytes, then), &self.limits);
    }

    /// Answers without a worker, and closes the connection: a client that keeps sending such requests gets one response,
    /// not all of the loop's time.
    fn refuse(&mut self, index: usize, request: Option<&Request>, failure: Failure) {
        let connection = &mut self.connections[index].connection;
        let client = request.map_or(connection.peer(), |request| request.peer);
        let head = request.map(|request| &request.head);
        let without_body = head.is_some_and(|head| head.method() == "HEAD");
        if failure.is_shed {
            self.shed_log.add(failure.cause.as_deref());
        }
        let response = self.service.refuse(client, head, failure);
        let answer = response.encode(response::Connection::Close, without_body);
        connection.forget_request();
        connection.send_response(Outgoing::new(answer, Then::Close), &self.limits);
    }

    /// Sheds the request that has just grown past the limit on buffered bytes.
    fn bound(&mut self, index: usize) {
        if self.make_room(0) {
            return;
        }
        let Some(entry) = self.connections.get(index) else {
            return;
        };
        if entry.connection.is_half_shaken() {
            count(&self.load.buffers_full);
            self.close(index);
        } else if entry.connection.holds_half_a_request() {
            count(&self.load.buffers_full);
            self.refuse(index, None, Failure::shed(TOO_MUCH_BUFFERED));
            self.advance(index, false);
        }
    }

    fn weigh(&mut self, index: usize) {
        let entry = &mut self.connections[index];
        let weight = entry.connection.weight();
        self.buffered = self.buffered - entry.weight + weight;
        entry.weight = weight;
    }

    fn close(&mut self, index: usize) {
        let mut entry = self.connections.remove(index);
        entry.connection.leave();
        self.buffered -= entry.weight;
    }

    /// Closes the connections whose deadline has passed.
    fn sweep(&mut self, now: Instant) {
        for index in self.indices() {
            let expired = self.connections.get(index).and_then(|entry| entry.connection.expired(now));
            match expired {
                Some(Expired::Silence) => self.close(index),
                Some(Expired::Request) => {
                    self.refuse(index, None, Failure::invalid("The request was not complete in time."));
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
        self.workers.stop_keeping();
        self.sockets.clear();
        self.accepting.clear();
        self.limits.drain_time = self.limits.drain_time.min(self.limits.stop_time);
        self.limits.request_time = self.limits.request_time.min(self.limits.stop_time);
        let now = Instant::now();
        for index in self.indices() {
            let Some(entry) = self.connections.get_mut(index) else { continue };
            // What has arrived by now is still read: it may be a request.
            entry.connection.note_readable(false);
            self.advance(index, false);
            match self.connections.get_mut(index) {
                Some(entry) if entry.connection.is_idle() => {
                    entry.connection.hurry(now + self.limits.farewell_time);
                }
                Some(entry) => entry.connection.hurry(now + self.limits.stop_time),
                None => {}
            }
        }
    }
}

fn count(events: &AtomicU64) {
    events.fetch_add(1, Ordering::Relaxed);
}
