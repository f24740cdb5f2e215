//! The handle with which another thread can cancel the calls of a request.

use std::cell::{Cell, RefCell};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex};

use crate::mutex::lock;
use crate::timed_stream::TimedStream;

// `ureq` passes no per-call data to the transport, but a call stays on its thread.
thread_local! {
    /// The handle that can shut down the socket of this thread's call.
    static CURRENT: RefCell<Option<Cancellation>> = const { RefCell::new(None) };
    static HAS_SENT: Cell<bool> = const { Cell::new(false) };
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
    /// Cancels the call in progress, if there is one: it fails at once, and so does every later
    /// one.
    pub fn cancel(&self) {
        // The lock is held: a detached socket may serve another call already.
        let mut state = lock(&self.0);
        state.is_cancelled = true;
        state.shut_down();
    }

    pub fn is_cancelled(&self) -> bool {
        lock(&self.0).is_cancelled
    }

    /// Returns true if both cancel the same request.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
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

/// Begins a call of this thread. It ends when the result is dropped.
pub(super) fn begin_call(cancellation: Cancellation) -> impl Drop {
    struct Guard;
    impl Drop for Guard {
        fn drop(&mut self) {
            set_socket(None);
            CURRENT.take();
        }
    }
    CURRENT.set(Some(cancellation));
    HAS_SENT.set(false);
    Guard
}

pub(super) fn note_sent() {
    HAS_SENT.set(true);
}

/// Returns true if any byte of this thread's call was sent; those of a TLS handshake don't count.
pub(super) fn has_sent() -> bool {
    HAS_SENT.get()
}

/// Sets the socket of this thread's call, which other threads may shut down; `None` before the
/// connection can serve another call. If the call was cancelled while it connected, it fails now.
pub(super) fn set_socket(stream: Option<&TimedStream>) {
    CURRENT.with_borrow(|handle| {
        if let Some(handle) = handle {
            let mut state = lock(&handle.0);
            state.socket = stream.map(|stream| Arc::clone(&stream.stream));
            if state.is_cancelled {
                state.shut_down();
            }
        }
    });
}
