//! One client's connection: the bytes of its next request, and the bytes still to be sent.

use std::io::{self, Read};
use std::mem;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use mio::net::TcpStream;

use super::tls::TlsSession;
use super::{Admission, Limits, PendingRequest, Service, socket};
use crate::error::{Failure, FailureCause};
use crate::http::{
    CONTINUE, ClientInfo, ConnectionHeader, Malformed, ReadStep, Reader, Request, RequestHead,
    Response,
};

/// The responses that only a head was needed for, after which a connection ends: a client that
/// pipelines such requests and reads nothing would fill the system's buffers with the responses.
const MAX_HEAD_RESPONSES: usize = 100;

/// The part of a response for which the client has the whole time again once it has taken it.
const RENEWAL: usize = 64 * 1024;

pub(super) struct InboundConnection {
    stream: TcpStream,
    tls: Option<Box<TlsSession>>,
    /// `None` on a Unix socket.
    pub peer: Option<IpAddr>,
    phase: Phase,
    /// When the phase ends. `None` while a worker has the request, which has a deadline of its own.
    pub deadline: Option<Instant>,
    reader: Reader,
    /// The decision from the head of the request whose body is being read.
    admitted: Option<Admitted>,
    /// The responses that only a head was needed for.
    head_responses: usize,
    /// The socket may hold bytes. Events are edge-triggered, so this has to be remembered.
    readable: bool,
    /// The client has shut its side, or the connection is broken. After a short read the end is
    /// still to be read.
    pub read_closed: bool,
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

/// A request that is to be read, with its service.
pub(super) struct Admitted {
    pub client: ClientInfo,
    pub service: Arc<dyn Service>,
    pub admission: Admission,
}

/// A response, and how much of it is sent.
pub(super) struct Outgoing {
    bytes: Vec<u8>,
    sent: usize,
    /// Held until it is sent.
    _permit: Option<Arc<()>>,
    pub header: ConnectionHeader,
}

impl Outgoing {
    /// Encodes the response to a request, and decides between keep-alive and close. If the body was
    /// not read, the beginning of the next request is unknown.
    pub fn encode(
        response: Response,
        head: &RequestHead,
        is_body_read: bool,
        is_last: bool,
    ) -> Self {
        let header = if is_last || !head.keep_alive || !is_body_read {
            ConnectionHeader::Close
        } else if head.needs_keep_alive_header {
            ConnectionHeader::KeepAlive
        } else {
            ConnectionHeader::Omitted
        };
        Self {
            bytes: response.encode(header, head.method() == "HEAD"),
            sent: 0,
            _permit: response.permit,
            header,
        }
    }

    /// Encodes a response after which the connection closes.
    pub fn last(response: &Response, without_body: bool) -> Self {
        Self {
            bytes: response.encode(ConnectionHeader::Close, without_body),
            ..Self::none()
        }
    }

    /// Closes the connection without a response.
    pub fn none() -> Self {
        Self {
            bytes: Vec::new(),
            sent: 0,
            _permit: None,
            header: ConnectionHeader::Close,
        }
    }
}

/// The limits of one turn, before the other connections have theirs.
pub(super) struct Turn<'a> {
    /// For the bytes of one read.
    pub scratch: &'a mut [u8],
    pub limits: &'a Limits,
    /// Bytes that may still be read.
    pub left: usize,
    /// The next step of a TLS handshake may be taken in this turn: it may cost milliseconds.
    pub handshake_allowed: bool,
    /// Responses close their connection.
    pub stopping: bool,
    pub admit: &'a dyn Fn(ClientInfo, &RequestHead) -> Result<Admitted, Response>,
}

/// The reason why a turn ended.
pub(super) enum TurnResult {
    /// The connection waits for its client.
    Waiting,
    /// It has more to do in its next turn.
    TurnOver,
    /// It waits for a turn in which it may take the next step of its handshake.
    Handshake,
    Request(Box<PendingRequest>),
    Malformed(Malformed),
    Gone,
}

/// A broken connection ends the turn.
impl From<io::Error> for TurnResult {
    fn from(_: io::Error) -> Self {
        Self::Gone
    }
}

impl InboundConnection {
    pub fn new(
        stream: TcpStream,
        tls: Option<TlsSession>,
        peer: Option<IpAddr>,
        limits: &Limits,
    ) -> Self {
        Self {
            stream,
            tls: tls.map(Box::new),
            peer,
            phase: Phase::Reading,
            deadline: Some(Instant::now() + limits.idle_time),
            reader: Reader::default(),
            admitted: None,
            head_responses: 0,
            readable: false,
            read_closed: false,
        }
    }

    pub fn note_readable(&mut self, read_closed: bool) {
        self.readable = true;
        self.read_closed |= read_closed;
    }

    /// Sends and reads until there is a complete request, nothing to do but wait, or the turn is
    /// over.
    pub fn run_turn(&mut self, turn: &mut Turn) -> TurnResult {
        loop {
            let result = match self.phase {
                Phase::Working => return TurnResult::Waiting,
                Phase::Draining { .. } => return self.drain(turn),
                Phase::Reading => self.receive(turn),
                Phase::Sending(_) => self.send(turn.limits),
            };
            if let Err(end) = result {
                return end;
            }
        }
    }

    /// The request went to a worker: `send_response` comes next.
    pub fn begin_working(&mut self) {
        self.phase = Phase::Working;
        self.deadline = None;
    }

    /// Takes a response; `run_turn` sends it.
    pub fn send_response(&mut self, outgoing: Outgoing, limits: &Limits) {
        self.phase = Phase::Sending(outgoing);
        self.deadline = Some(Instant::now() + limits.send_time);
    }

    /// Drops the bytes of a request that is refused before it is complete.
    pub fn forget_request(&mut self) {
        self.reader = Reader::default();
    }

    pub fn is_idle(&self) -> bool {
        matches!(self.phase, Phase::Reading)
            && self.reader.is_between_requests()
            && !self.is_handshaking()
    }

    /// In the middle of a handshake: no response can be sent yet.
    fn is_handshaking(&self) -> bool {
        self.tls
            .as_ref()
            .is_some_and(|session| session.is_handshaking())
    }

    /// Returns true if the client has gone before its session was established: the next step of the
    /// handshake would be for nothing.
    pub fn has_left_handshake(&self) -> bool {
        self.read_closed
            && self
                .tls
                .as_ref()
                .is_some_and(|session| !session.is_established())
    }

    /// Returns true if it can be evicted although it is not idle: in the middle of a request, a
    /// response or a handshake, or after its last response.
    pub fn is_unfinished(&self) -> bool {
        !matches!(self.phase, Phase::Working) && !self.is_idle()
    }

    /// The socket, unless what is sent on it has to be encrypted.
    pub fn plain_stream(&self) -> Option<&TcpStream> {
        self.tls.is_none().then_some(&self.stream)
    }

    pub fn has_partial_request(&self) -> bool {
        matches!(self.phase, Phase::Reading) && !self.is_idle() && !self.is_handshaking()
    }

    /// Makes `latest` the deadline if that is earlier. While a worker has the request there is no
    /// deadline.
    pub fn shorten_deadline(&mut self, latest: Instant) {
        self.deadline = self.deadline.map(|deadline| deadline.min(latest));
    }

    /// The memory that it holds beyond itself.
    pub fn held_bytes(&self) -> usize {
        let response = match &self.phase {
            Phase::Sending(outgoing) => outgoing.bytes.capacity(),
            Phase::Reading | Phase::Working | Phase::Draining { .. } => 0,
        };
        let tls = self.tls.as_ref().map_or(0, |session| session.held_bytes());
        self.reader.held_bytes() + response + tls
    }

    /// Ends the TLS session of an idle connection, which is about to be closed.
    pub fn close_session(&mut self) {
        if let (Phase::Reading, Some(session)) = (&self.phase, &mut self.tls)
            && session.is_established()
        {
            session.finish(&self.stream);
        }
    }

    /// Sends the response, and then reads the next request or drains. Ends the turn if the response
    /// is not complete.
    fn send(&mut self, limits: &Limits) -> Result<(), TurnResult> {
        let Phase::Sending(outgoing) = &mut self.phase else {
            unreachable!("only a response is sent");
        };
        let rest = &outgoing.bytes[outgoing.sent..];
        let (taken, is_flushed) = match &mut self.tls {
            Some(session) => (session.write(&self.stream, rest)?, session.is_flushed()),
            None => (socket::write_available(&self.stream, rest)?, true),
        };
        let before = outgoing.sent;
        outgoing.sent += taken;
        if outgoing.sent < outgoing.bytes.len() || !is_flushed {
            if outgoing.sent / RENEWAL > before / RENEWAL {
                self.deadline = Some(Instant::now() + limits.send_time);
            }
            return Err(TurnResult::Waiting);
        }
        if outgoing.header != ConnectionHeader::Close {
            self.phase = Phase::Reading;
            // The next request may have come with the last one.
            let time = if self.reader.is_between_requests() {
                limits.idle_time
            } else {
                limits.request_time
            };
            self.deadline = Some(Instant::now() + time);
            return Ok(());
        }
        // What still comes is not decrypted.
        if let Some(mut session) = self.tls.take() {
            session.finish(&self.stream);
        }
        socket::finish(&self.stream);
        self.forget_request();
        self.phase = Phase::Draining {
            left: limits.drain_bytes,
        };
        self.deadline = Some(Instant::now() + limits.drain_time);
        Ok(())
    }

    /// Reads until a request is complete, which ends the turn, or its head was enough for a response.
    fn receive(&mut self, turn: &mut Turn) -> Result<(), TurnResult> {
        if turn.left == 0 {
            return Err(TurnResult::TurnOver);
        }
        let mut was_between = false;
        loop {
            match self.reader.step() {
                Err(malformed) => return Err(TurnResult::Malformed(malformed)),
                Ok(ReadStep::Head) => {
                    let client = ClientInfo {
                        peer: self.peer,
                        proxied: false,
                        secure: self.tls.is_some(),
                    };
                    match (turn.admit)(client, self.reader.head()) {
                        Ok(admitted) => self.admitted = Some(admitted),
                        Err(response) => {
                            self.refuse_head(response, turn);
                            return Ok(());
                        }
                    }
                }
                Ok(ReadStep::Request(request)) => {
                    let Admitted {
                        client,
                        service,
                        admission,
                    } = self
                        .admitted
                        .take()
                        .expect("the head comes before the request");
                    let request = Request { client, ..request };
                    let pending = PendingRequest::new(request, admission, service);
                    return Err(TurnResult::Request(Box::new(pending)));
                }
                Ok(ReadStep::More) => {
                    if was_between && !self.reader.is_between_requests() {
                        self.deadline = Some(Instant::now() + turn.limits.request_time);
                    }
                    if self.reader.take_continue() {
                        // Best effort: a client that can't take it now will send its body anyway.
                        let _ = match &mut self.tls {
                            Some(session) => session.write(&self.stream, CONTINUE),
                            None => socket::write_available(&self.stream, CONTINUE),
                        };
                    }
                    was_between = self.reader.is_between_requests();
                    let count = self.fill(turn)?;
                    self.reader.append(&turn.scratch[..count]);
                }
            }
        }
    }

    /// Ends a request for which the head was enough. If the body has not come whole, the beginning
    /// of the next request is unknown. One response a turn: a client that pipelines such requests
    /// gets no more of the loop than others.
    fn refuse_head(&mut self, response: Response, turn: &mut Turn) {
        let (head, is_body_skipped) = self.reader.refuse();
        self.head_responses += 1;
        let is_last = turn.stopping || self.head_responses >= MAX_HEAD_RESPONSES;
        let outgoing = Outgoing::encode(response, &head, is_body_skipped, is_last);
        self.send_response(outgoing, turn.limits);
        turn.left = 0;
    }

    /// Discards what the client still sends, until it ends or the limit is reached.
    fn drain(&mut self, turn: &mut Turn) -> TurnResult {
        loop {
            let count = match self.fill_raw(turn) {
                Ok(count) => count,
                Err(end) => return end,
            };
            let Phase::Draining { left } = &mut self.phase else {
                unreachable!("only after the last response is there anything to drain");
            };
            *left = left.saturating_sub(count);
            if *left == 0 {
                return TurnResult::Gone;
            }
        }
    }

    /// Reads decrypted bytes into `turn.scratch`, and returns how many. Without any, the turn ends.
    fn fill(&mut self, turn: &mut Turn) -> Result<usize, TurnResult> {
        let Some(session) = &mut self.tls else {
            return self.fill_raw(turn);
        };
        session.flush(&self.stream)?;
        loop {
            match session.read(turn.scratch)? {
                Some(0) => return Err(TurnResult::Gone),
                Some(count) => return Ok(count),
                None => {}
            }
            if !self.readable {
                session.shrink_buffer();
                return Err(TurnResult::Waiting);
            }
            if turn.left == 0 {
                return Err(TurnResult::TurnOver);
            }
            let (was_handshaking, was_established) =
                (session.is_handshaking(), session.is_established());
            if !was_established && !mem::take(&mut turn.handshake_allowed) {
                return Err(TurnResult::Handshake);
            }
            match session.receive(&self.stream) {
                Ok(0) => return Err(TurnResult::Gone),
                Ok(count) => {
                    turn.left = turn.left.saturating_sub(count);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable = false,
                Err(_) => return Err(TurnResult::Gone),
            }
            // A handshake has the same deadline as a request, from its first byte on.
            if session.is_handshaking() && !was_handshaking {
                self.deadline = Some(Instant::now() + turn.limits.request_time);
            } else if !was_established && session.is_established() {
                self.deadline = Some(Instant::now() + turn.limits.idle_time);
            }
        }
    }

    /// Reads bytes as they are on the wire.
    fn fill_raw(&mut self, turn: &mut Turn) -> Result<usize, TurnResult> {
        if !self.readable {
            return Err(TurnResult::Waiting);
        }
        let most = turn.left.min(turn.scratch.len());
        if most == 0 {
            return Err(TurnResult::TurnOver);
        }
        match (&self.stream).read(&mut turn.scratch[..most]) {
            Ok(0) => Err(TurnResult::Gone),
            Ok(count) => {
                turn.left -= count;
                // A short read took all that there was.
                self.readable = count == most || self.read_closed;
                Ok(count)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.readable = false;
                Err(TurnResult::Waiting)
            }
            Err(_) => Err(TurnResult::Gone),
        }
    }
}

/// Sends 503 as far as that is possible at once. What has come is read first: closing a socket with
/// unread bytes would reset it and destroy the response.
pub(super) fn send_unavailable(
    service: &dyn Service,
    mut stream: &TcpStream,
    peer: Option<IpAddr>,
    scratch: &mut [u8],
) {
    let response = service.refuse(peer, Failure::overloaded(FailureCause::ConnectionsFull));
    let _: io::Result<usize> = stream.read(scratch);
    let _ = socket::write_available(stream, &response.encode(ConnectionHeader::Close, false));
    socket::finish(stream);
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::OwnedFd;

    use mio::net::UnixStream;

    use super::*;
    use crate::listener::lanes::tests::{NoService, unknown};

    const TURN: usize = 10_000;

    /// Takes a turn, and returns what came of it and how much was not read.
    fn take_turn(connection: &mut InboundConnection, limits: &Limits) -> (TurnResult, usize) {
        let admit = |client: ClientInfo, _: &RequestHead| {
            Ok(Admitted {
                client,
                service: Arc::new(NoService),
                admission: unknown(),
            })
        };
        let mut turn = Turn {
            scratch: &mut [0; 4096],
            limits,
            left: TURN,
            handshake_allowed: false,
            stopping: false,
            admit: &admit,
        };
        let outcome = connection.run_turn(&mut turn);
        (outcome, turn.left)
    }

    #[test]
    fn a_turn_ends_although_more_has_come() {
        let limits = Limits::default();
        let (stream, mut client) = UnixStream::pair().expect("two sockets");
        let stream = TcpStream::from(OwnedFd::from(stream));
        let mut connection = InboundConnection::new(stream, None, None, &limits);
        client
            .write_all(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 100000\r\n\r\n")
            .expect("it should be taken");
        client
            .write_all(&[b'x'; 3 * TURN])
            .expect("it should be taken");
        connection.note_readable(false);
        for _ in 0..3 {
            assert!(matches!(
                take_turn(&mut connection, &limits),
                (TurnResult::TurnOver, 0)
            ));
        }
        assert!(matches!(
            take_turn(&mut connection, &limits),
            (TurnResult::Waiting, 1..)
        ));
        // What is discarded after the last response costs turns too.
        let bye = Response::new(200, "text/plain", b"bye".to_vec());
        connection.send_response(Outgoing::last(&bye, false), &limits);
        client
            .write_all(&[b'x'; TURN + 1])
            .expect("it should be taken");
        connection.note_readable(false);
        assert!(matches!(
            take_turn(&mut connection, &limits),
            (TurnResult::TurnOver, 0)
        ));
        assert!(matches!(
            take_turn(&mut connection, &limits),
            (TurnResult::Waiting, 1..)
        ));
    }
}
