//! One client's connection: the bytes of its next request, and the bytes still to be sent.

mod receiving;

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use super::admission::{Admission, PendingRequest};
use super::limits::Limits;
use super::socket::InboundStream;
use super::tls::TlsSession;
use crate::http::response::{ConnectionHeader, Response};
use crate::http::{ClientInfo, Malformed, Reader, RequestHead};

pub(super) struct InboundConnection {
    stream: InboundStream,
    tls: Option<Box<TlsSession>>,
    /// `None` on a Unix socket.
    pub peer: Option<IpAddr>,
    phase: Phase,
    /// When the phase ends. `None` while a worker has the request, which has a deadline of its own.
    pub deadline: Option<Instant>,
    reader: Reader,
    /// The decision from the head of the request whose body is being read.
    admitted: Option<(ClientInfo, Admission)>,
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

/// A response, and how much of it is sent.
pub(super) struct Outgoing {
    pub bytes: Vec<u8>,
    pub sent: usize,
    /// Dropped once the response is sent.
    pub _permit: Option<Arc<()>>,
    pub header: ConnectionHeader,
}

impl Outgoing {
    pub fn new(bytes: Vec<u8>, header: ConnectionHeader) -> Self {
        Self {
            bytes,
            sent: 0,
            _permit: None,
            header,
        }
    }

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
        let is_head = head.method() == "HEAD";
        let bytes = response.encode(header, is_head);
        Self {
            _permit: response.permit,
            ..Self::new(bytes, header)
        }
    }

    /// Encodes a response after which the connection closes.
    pub fn last(response: &Response, without_body: bool) -> Self {
        Self::new(
            response.encode(ConnectionHeader::Close, without_body),
            ConnectionHeader::Close,
        )
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
    pub admit: &'a dyn Fn(&mut ClientInfo, &RequestHead) -> Result<Admission, Response>,
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
    /// The head was enough for a response.
    Response(Outgoing),
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
        stream: InboundStream,
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
            match self.phase {
                Phase::Working => return TurnResult::Waiting,
                Phase::Reading => return self.receive(turn),
                Phase::Sending(_) => {
                    if let Err(end) = self.send(turn.limits) {
                        return end;
                    }
                }
                Phase::Draining { .. } => return self.drain(turn),
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
    pub fn is_handshaking(&self) -> bool {
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
    pub fn plain_stream(&self) -> Option<&InboundStream> {
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

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.tls {
            Some(session) => session.write(&self.stream, bytes),
            None => self.stream.write_available(bytes),
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
            None => (self.stream.write_available(rest)?, true),
        };
        outgoing.sent += taken;
        if outgoing.sent < outgoing.bytes.len() || !is_flushed {
            return Err(TurnResult::Waiting);
        }
        match outgoing.header {
            ConnectionHeader::Omitted | ConnectionHeader::KeepAlive => {
                self.phase = Phase::Reading;
                let time = match self.reader.is_between_requests() {
                    true => limits.idle_time,
                    false => limits.request_time,
                };
                self.deadline = Some(Instant::now() + time);
            }
            ConnectionHeader::Close => {
                // What still comes is not decrypted.
                if let Some(mut session) = self.tls.take() {
                    session.finish(&self.stream);
                }
                self.stream.finish();
                self.forget_request();
                self.phase = Phase::Draining {
                    left: limits.drain_bytes,
                };
                self.deadline = Some(Instant::now() + limits.drain_time);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::OwnedFd;

    use mio::net::UnixStream;

    use super::*;
    use crate::listener::Destination;

    const TURN: usize = 10_000;

    /// Takes a turn, and returns what came of it and how much was not read.
    fn take_turn(connection: &mut InboundConnection, limits: &Limits) -> (TurnResult, usize) {
        let admit =
            |_: &mut ClientInfo, _: &RequestHead| Ok(Admission::new(Destination::Console(None)));
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
        let stream = mio::net::TcpStream::from(OwnedFd::from(stream)).into();
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
        connection.send_response(
            Outgoing::new(b"bye".to_vec(), ConnectionHeader::Close),
            &limits,
        );
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
