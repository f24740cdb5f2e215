//! The socket of a connection: whether a call was sent, and the handle with which another thread can cancel the calls of a
//! request.

use std::cell::RefCell;
use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::timed_stream::TimedStream;

thread_local! {
    /// Where the current call of this thread exposes its socket. `ureq` passes no per-call data to the transport, but
    /// a call stays on its thread.
    static EXPOSED_AS: RefCell<Option<Cancellation>> = const { RefCell::new(None) };
}

/// Cancels the calls of a request from another thread.
#[derive(Clone, Debug, Default)]
pub struct Cancellation(Arc<Mutex<CallState>>);

#[derive(Debug, Default)]
struct CallState {
    is_cancelled: bool,
    /// The socket of the call in progress. `None` before and after a call, and while it connects.
    socket: Option<Arc<TcpStream>>,
}

impl Cancellation {
    /// Cancels the call in progress, if there is one: it fails at once, and so does every later one.
    pub fn cancel(&self) {
        // The lock is held: a socket that was cleared may serve another call already.
        let mut state = self.lock();
        state.is_cancelled = true;
        state.shut_down();
    }

    pub fn is_cancelled(&self) -> bool {
        self.lock().is_cancelled
    }

    /// Whether both cancel the same request.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    fn lock(&self) -> MutexGuard<'_, CallState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CallState {
    fn shut_down(&self) {
        if let Some(stream) = &self.socket {
            // An error means that the connection has ended by itself.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// Makes the calls of this thread expose their socket until the result is dropped.
pub(super) fn expose_as(handle: &Cancellation) -> impl Drop {
    struct Guard;
    impl Drop for Guard {
        fn drop(&mut self) {
            EXPOSED_AS.take();
        }
    }
    EXPOSED_AS.set(Some(handle.clone()));
    Guard
}

#[derive(Debug)]
pub(super) struct Socket {
    pub stream: TimedStream,
    /// Whether any byte of the call was sent.
    has_sent: bool,
    exposed_as: Option<Cancellation>,
}

impl Socket {
    pub fn new(stream: TimedStream) -> Self {
        Self { stream, has_sent: false, exposed_as: None }
    }

    /// Exposes the socket for this thread's call. If the call was cancelled while it connected, it fails now.
    pub fn expose(&mut self) {
        if self.exposed_as.is_none() {
            self.exposed_as = EXPOSED_AS.with_borrow(Clone::clone);
            if let Some(handle) = &self.exposed_as {
                let mut state = handle.lock();
                state.socket = Some(Arc::clone(&self.stream.stream));
                if state.is_cancelled {
                    state.shut_down();
                }
            }
        }
    }

    /// Ends the call: the next bytes belong to another one.
    pub fn clear(&mut self) {
        self.forget_sent();
        if let Some(handle) = self.exposed_as.take() {
            handle.lock().socket = None;
        }
    }

    pub fn has_sent(&self) -> bool {
        self.has_sent
    }

    pub fn forget_sent(&mut self) {
        self.has_sent = false;
    }

    fn note_sent(&mut self, count: usize) -> usize {
        self.has_sent |= count > 0;
        count
    }
}

impl Read for Socket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.stream.read(into)
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes).map(|count| self.note_sent(count))
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.stream.write_vectored(parts).map(|count| self.note_sent(count))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.clear();
    }
}
