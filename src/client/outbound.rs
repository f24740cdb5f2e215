//! A connection as `ureq` uses it. A head is held back until the body or the wait for the answer
//! follows, so that head and body are one write.

use std::fmt;
use std::io::{self, Read, Write};
use std::mem;
use std::time::{Duration, Instant};

use rustls::{ClientConnection, StreamOwned};
use ureq::Error;
use ureq::unversioned::transport::{Buffers, LazyBuffers, NextTimeout, Transport};

use super::cancellation;
use crate::timed_stream::TimedStream;

/// The size of each buffer. The default of 128 KiB is more than a worker needs.
const BUFFER: usize = 16 * 1024;

/// The most output that is held back: a head, and a short body.
const HELD: usize = 4 * 1024;

/// The most bytes of an answer with its heads, chunk sizes and trailers. `ureq` limits only one
/// head and the body, whose limit is less than half of this in every call.
const MAX_ANSWER: u64 = 16 * 1024 * 1024;

/// The longest timeout that a setting accepts.
const LONGEST: Duration = Duration::from_secs(86_400);

pub(super) struct OutboundConnection {
    stream: OutboundStream,
    buffers: LazyBuffers,
    /// Output that was not written yet.
    held: Vec<u8>,
    /// Bytes of the call's answer.
    received: u64,
}

pub(super) enum OutboundStream {
    Plain(TimedStream),
    Tls(Box<StreamOwned<ClientConnection, TimedStream>>),
}

impl OutboundConnection {
    pub fn new(stream: OutboundStream) -> Self {
        Self {
            stream,
            buffers: LazyBuffers::new(BUFFER, BUFFER),
            held: Vec::new(),
            received: 0,
        }
    }

    /// Runs I/O until the timeout of `ureq`.
    fn io<T>(
        &mut self,
        timeout: NextTimeout,
        run: impl FnOnce(&mut Self) -> io::Result<T>,
    ) -> Result<T, Error> {
        self.stream.timed().deadline = Instant::now() + (*timeout.after).min(LONGEST);
        let result = run(self);
        if mem::take(&mut self.stream.timed().has_sent) {
            cancellation::note_sent();
        }
        result.map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => Error::Timeout(timeout.reason),
            _ => Error::Io(error),
        })
    }

    fn write_held(&mut self) -> io::Result<()> {
        self.stream.write_all(&mem::take(&mut self.held))
    }
}

impl Transport for OutboundConnection {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        cancellation::set_socket(Some(self.stream.timed()));
        self.held
            .extend_from_slice(&self.buffers.output()[..amount]);
        if self.held.len() <= HELD {
            Ok(())
        } else {
            self.io(timeout, Self::write_held)
        }
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        let count = self.io(timeout, |connection| {
            connection.write_held()?;
            connection
                .stream
                .read(connection.buffers.input_append_buf())
        })?;
        self.buffers.input_appended(count);
        self.received += count as u64;
        if self.received > MAX_ANSWER {
            return Err(Error::BodyExceedsLimit(MAX_ANSWER));
        }
        Ok(count > 0)
    }

    /// `ureq` asks after a call, before it keeps the connection, and before the next one. Only then
    /// is the socket looked at: a server may close it at any time between the two.
    fn is_open(&mut self) -> bool {
        cancellation::set_socket(None);
        mem::take(&mut self.received) > 0 || self.stream.is_quiet()
    }

    fn is_tls(&self) -> bool {
        matches!(self.stream, OutboundStream::Tls(_))
    }
}

impl fmt::Debug for OutboundConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OutboundConnection(…)")
    }
}

impl OutboundStream {
    fn timed(&mut self) -> &mut TimedStream {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(session) => &mut session.sock,
        }
    }

    fn is_quiet(&mut self) -> bool {
        if let Self::Tls(session) = self {
            // Bytes that are already decrypted, or the server's close_notify.
            let waiting = session.conn.reader().read(&mut [0; 1]);
            if !waiting.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
                return false;
            }
        }
        self.timed().is_quiet()
    }

    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.read(into),
            Self::Tls(session) => session.read(into),
        }
    }

    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Plain(socket) => socket.write_all(bytes),
            Self::Tls(session) => session.write_all(bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use rustix::net::sockopt::set_socket_linger;
    use ureq::Timeout;

    use super::*;
    use crate::client::Cancellation;

    fn pair() -> (OutboundConnection, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
        let stream =
            TcpStream::connect(listener.local_addr().expect("it listens")).expect("a connection");
        let (peer, _) = listener.accept().expect("its other end");
        let stream = OutboundStream::Plain(TimedStream::new(stream, Instant::now()));
        (OutboundConnection::new(stream), peer)
    }

    fn timeout() -> NextTimeout {
        NextTimeout {
            after: LONGEST.into(),
            reason: Timeout::Global,
            ..NextTimeout::default()
        }
    }

    fn put(connection: &mut OutboundConnection, bytes: &[u8]) -> Result<(), Error> {
        connection.buffers().output()[..bytes.len()].copy_from_slice(bytes);
        connection.transmit_output(bytes.len(), timeout())
    }

    #[test]
    fn head_and_body_are_one_write() {
        let (mut connection, mut peer) = pair();
        peer.set_nonblocking(true).expect("an option of the socket");
        let mut heard = [0; 2 * BUFFER];
        for part in ["head", "body"] {
            put(&mut connection, part.as_bytes()).expect("it is held back");
            assert!(peer.read(&mut heard).is_err(), "nothing was written yet");
        }
        peer.write_all(b"answer").expect("it should be sent");
        assert!(connection.await_input(timeout()).expect("an answer"));
        assert_eq!(connection.buffers().input(), b"answer");
        assert_eq!(peer.read(&mut heard).expect("what was sent"), 8);
        assert_eq!(&heard[..8], b"headbody");
        // More than a short body is written at once.
        put(&mut connection, &[b'x'; HELD]).expect("it is held back");
        assert!(peer.read(&mut heard).is_err());
        put(&mut connection, b"y").expect("it is written");
        assert_eq!(peer.read(&mut heard).expect("what was sent"), HELD + 1);
    }

    #[test]
    fn a_connection_that_ends_before_the_write_has_sent_nothing() {
        for after_a_call in [false, true] {
            let (mut connection, mut peer) = pair();
            if after_a_call {
                put(&mut connection, b"a call").expect("it is held back");
                peer.write_all(b"answer").expect("it should be sent");
                connection.await_input(timeout()).expect("an answer");
                assert_eq!(peer.read(&mut [0; 64]).expect("the call"), 6);
                assert!(connection.is_open());
                assert!(connection.is_open());
            }
            let _call = cancellation::begin_call(Cancellation::default());
            // The peer resets the connection after it was found open.
            set_socket_linger(&peer, Some(Duration::ZERO)).expect("an option of the socket");
            drop(peer);
            put(&mut connection, b"another call").expect("it is held back");
            let error = connection.await_input(timeout()).expect_err("no answer");
            assert!(
                matches!(error, Error::Io(_)) && !cancellation::has_sent(),
                "{error:?}"
            );
        }
    }

    #[test]
    fn a_connection_that_ends_after_the_write_has_sent_something() {
        let (mut connection, peer) = pair();
        let _call = cancellation::begin_call(Cancellation::default());
        put(&mut connection, b"a call").expect("it is held back");
        let reader = std::thread::spawn(move || {
            let mut peer = peer;
            assert_eq!(peer.read(&mut [0; 64]).expect("the call"), 6);
            set_socket_linger(&peer, Some(Duration::ZERO)).expect("an option of the socket");
        });
        let error = connection.await_input(timeout()).expect_err("no answer");
        assert!(
            matches!(error, Error::Io(_)) && cancellation::has_sent(),
            "{error:?}"
        );
        reader.join().expect("no panic");
    }
}
