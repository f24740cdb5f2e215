//! One client's connection: the bytes of its next request, and the bytes still to be sent.

use std::io;
use std::mem;
use std::net::IpAddr;
use std::time::Instant;

use super::limits::Limits;
use super::socket::Stream;
use super::tls::{Received, Session};
use super::workers::Outgoing;
use crate::http::response::{CONTINUE, Pieces};
use crate::http::{Malformed, Reader, Request};

pub(super) struct Connection {
    stream: Stream,
    tls: Option<Box<Session>>,
    /// `None` on a Unix socket.
    peer: Option<IpAddr>,
    phase: Phase,
    /// When the phase ends. `None` while a worker has the request, which has a deadline of its own.
    deadline: Option<Instant>,
    reader: Reader,
    /// Bytes after a complete request: the beginning of the next.
    unread: Vec<u8>,
    /// The socket may hold bytes. Events are edge-triggered, so this has to be remembered.
    readable: bool,
    /// The client has shut its side: after a short read the end is still to be read.
    read_closed: bool,
}

enum Phase {
    /// Waiting for a request or in the middle of one.
    Reading,
    /// A worker has the request; nothing is read meanwhile.
    Working,
    /// The response is not sent completely.
    Sending(Outgoing),
    /// The last response is sent; this much of what the client still sends is discarded.
    Draining { left: usize },
}

/// What happens to a connection after a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Then {
    Keep,
    Close,
}

/// Where a connection stopped.
pub(super) enum Outcome {
    Waiting,
    Request(Request),
    /// A piece of a long response is sent; the next one has to be made.
    Next(Box<dyn Pieces>, Then),
    Malformed(Malformed),
    Gone,
}

/// How far a response was sent.
enum Progress {
    Blocked,
    Next(Box<dyn Pieces>, Then),
    Done,
}

/// What a connection was doing when its deadline passed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Expired {
    /// Half a request: the client gets a response.
    Request,
    /// Anything else: it is closed.
    Silence,
}

impl Connection {
    pub fn new(
        stream: Stream,
        tls: Option<Session>,
        peer: Option<IpAddr>,
        now: Instant,
        limits: &Limits,
    ) -> Self {
        Self {
            stream,
            tls: tls.map(Box::new),
            peer,
            phase: Phase::Reading,
            deadline: Some(now + limits.idle_time),
            reader: Reader::default(),
            unread: Vec::new(),
            readable: false,
            read_closed: false,
        }
    }

    pub fn note_readable(&mut self, read_closed: bool) {
        self.readable = true;
        self.read_closed |= read_closed;
    }

    /// Sends and reads until there is a request to answer or nothing to do but wait.
    pub fn advance(&mut self, scratch: &mut [u8], limits: &Limits) -> Outcome {
        loop {
            let blocked = match self.phase {
                Phase::Working => return Outcome::Waiting,
                Phase::Reading => return self.receive(scratch, limits),
                Phase::Sending(_) => match self.send(limits) {
                    Ok(Progress::Next(rest, then)) => return Outcome::Next(rest, then),
                    Ok(Progress::Blocked) => Ok(true),
                    Ok(Progress::Done) => Ok(false),
                    Err(error) => Err(error),
                },
                Phase::Draining { .. } => self.drain(scratch),
            };
            match blocked {
                Ok(true) => return Outcome::Waiting,
                Ok(false) => {}
                Err(_) => return Outcome::Gone,
            }
        }
    }

    pub fn peer(&self) -> Option<IpAddr> {
        self.peer
    }

    /// The request went to a worker: `send_response` comes next.
    pub fn hand_over(&mut self) {
        self.phase = Phase::Working;
        self.deadline = None;
    }

    /// Takes a response; `advance` sends it.
    pub fn send_response(&mut self, outgoing: Outgoing, limits: &Limits) {
        self.phase = Phase::Sending(outgoing);
        self.deadline = Some(Instant::now() + limits.send_time);
    }

    /// Drops the bytes of a request that is refused before it is complete.
    pub fn forget_request(&mut self) {
        self.reader = Reader::default();
        self.unread = Vec::new();
    }

    pub fn is_idle(&self) -> bool {
        matches!(self.phase, Phase::Reading)
            && self.unread.is_empty()
            && self.reader.is_between_requests()
            && !self.is_half_shaken()
    }

    /// In the middle of a handshake: no response can be sent yet.
    pub fn is_half_shaken(&self) -> bool {
        self.tls.as_ref().is_some_and(|session| session.is_half_shaken())
    }

    /// The longest idle connection has the earliest.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    pub fn expired(&self, now: Instant) -> Option<Expired> {
        self.deadline.filter(|&deadline| deadline <= now)?;
        Some(if self.holds_half_a_request() { Expired::Request } else { Expired::Silence })
    }

    pub fn holds_half_a_request(&self) -> bool {
        matches!(self.phase, Phase::Reading) && !self.is_idle() && !self.is_half_shaken()
    }

    /// Moves the deadline forward to `latest`, unless a worker has the request.
    pub fn hurry(&mut self, latest: Instant) {
        self.deadline = self.deadline.map(|deadline| deadline.min(latest));
    }

    /// The memory that it holds beyond itself.
    pub fn weight(&self) -> usize {
        let answer = match &self.phase {
            Phase::Sending(answer) => answer.bytes.capacity(),
            Phase::Reading | Phase::Working | Phase::Draining { .. } => 0,
        };
        let tls = self.tls.as_ref().map_or(0, |session| session.weight());
        self.reader.weight() + self.unread.capacity() + answer + tls
    }

    /// Ends the TLS session of an idle connection.
    pub fn leave(&mut self) {
        if let (Phase::Reading, Some(session)) = (&self.phase, &mut self.tls)
            && !session.is_handshaking()
        {
            session.finish(&self.stream);
        }
    }

    fn receive(&mut self, scratch: &mut [u8], limits: &Limits) -> Outcome {
        loop {
            let earlier = mem::take(&mut self.unread);
            let mut input = if earlier.is_empty() {
                match self.fill(scratch, limits) {
                    Ok(Some(0)) | Err(_) => return Outcome::Gone,
                    Ok(Some(count)) => &scratch[..count],
                    Ok(None) => return Outcome::Waiting,
                }
            } else {
                &earlier[..]
            };
            let was_between = self.reader.is_between_requests();
            match self.reader.push(&mut input) {
                Err(malformed) => return Outcome::Malformed(malformed),
                Ok(Some(request)) => {
                    self.unread = input.to_vec();
                    return Outcome::Request(Request {
                        peer: self.peer,
                        secure: self.tls.is_some(),
                        ..request
                    });
                }
                Ok(None) => {
                    if was_between && !self.reader.is_between_requests() {
                        self.deadline = Some(Instant::now() + limits.request_time);
                    }
                    if self.reader.take_continue() {
                        // It is a courtesy: a client that can't take it now will send its body anyway.
                        let _ = self.write(CONTINUE);
                    }
                }
            }
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.tls {
            Some(session) => session.write(&self.stream, bytes),
            None => self.stream.write(bytes),
        }
    }

    fn send(&mut self, limits: &Limits) -> io::Result<Progress> {
        let Phase::Sending(answer) = &mut self.phase else {
            unreachable!("only an answer is sent");
        };
        let rest = &answer.bytes[answer.sent..];
        let (taken, is_flushed) = match &mut self.tls {
            Some(session) => (session.write(&self.stream, rest)?, session.is_flushed()),
            None => (self.stream.write(rest)?, true),
        };
        answer.sent += taken;
        if answer.sent < answer.bytes.len() || !is_flushed {
            return Ok(Progress::Blocked);
        }
        if let Some(rest) = answer.rest.take() {
            return Ok(Progress::Next(rest, answer.then));
        }
        match answer.then {
            Then::Keep => {
                self.phase = Phase::Reading;
                self.deadline = Some(Instant::now() + limits.idle_time);
            }
            Then::Close => {
                if let Some(session) = &mut self.tls {
                    session.finish(&self.stream);
                }
                self.stream.finish();
                self.forget_request();
                self.phase = Phase::Draining { left: limits.drain_bytes };
                self.deadline = Some(Instant::now() + limits.drain_time);
            }
        }
        Ok(Progress::Done)
    }

    /// Whether it has to wait for the client; an error once there is nothing more to wait for.
    fn drain(&mut self, scratch: &mut [u8]) -> io::Result<bool> {
        // It is discarded, so it is not decrypted.
        let Some(count) = self.fill_raw(scratch)? else {
            return Ok(true);
        };
        let Phase::Draining { left } = &mut self.phase else {
            unreachable!("only after the last answer is there anything to drain");
        };
        *left = left.saturating_sub(count);
        if count == 0 || *left == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(false)
    }

    /// Reads decrypted bytes. `None` if there are none yet, 0 at the end.
    fn fill(&mut self, scratch: &mut [u8], limits: &Limits) -> io::Result<Option<usize>> {
        let Some(session) = &mut self.tls else {
            return self.fill_raw(scratch);
        };
        session.flush(&self.stream)?;
        loop {
            if let Some(count) = session.read(scratch)? {
                return Ok(Some(count));
            }
            if !self.readable {
                session.rest();
                return Ok(None);
            }
            let (was_begun, was_handshaking) = (session.is_half_shaken(), session.is_handshaking());
            match session.receive(&self.stream) {
                Ok(Received::End) => return Ok(Some(0)),
                Ok(Received::Some { is_all }) => self.readable = !is_all || self.read_closed,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable = false,
                Err(error) => return Err(error),
            }
            // A handshake has the time of a request, from its first byte on.
            if session.is_half_shaken() && !was_begun {
                self.deadline = Some(Instant::now() + limits.request_time);
            } else if was_handshaking && !session.is_handshaking() {
                self.deadline = Some(Instant::now() + limits.idle_time);
            }
        }
    }

    /// Reads bytes as they are on the wire.
    fn fill_raw(&mut self, scratch: &mut [u8]) -> io::Result<Option<usize>> {
        if !self.readable {
            return Ok(None);
        }
        match self.stream.read(scratch) {
            Ok(count) => {
                // A short read has emptied the socket.
                self.readable = count == scratch.len() || self.read_closed;
                Ok(Some(count))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.readable = false;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}
