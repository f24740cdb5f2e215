//! Completed responses on their way from the threads back to the loop.

use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use mio::Waker;

use super::connection::AfterResponse;
use super::load::Load;
use super::{PendingRequest, Pulse};
use crate::http::RequestHead;
use crate::http::response::{ConnectionHeader, Pieces, Response};

/// The responses that the threads have finished, and the state that they share with the loop.
pub(super) struct Completions {
    queue: Mutex<Vec<Completed>>,
    waker: Arc<Waker>,
    pub pulse: Arc<Pulse>,
    pub load: Arc<Load>,
    stopping: AtomicBool,
}

impl Completions {
    pub fn new(waker: Arc<Waker>, pulse: &Arc<Pulse>, load: &Arc<Load>) -> Arc<Self> {
        Arc::new(Self {
            queue: Mutex::default(),
            waker,
            pulse: Arc::clone(pulse),
            load: Arc::clone(load),
            stopping: AtomicBool::new(false),
        })
    }

    pub fn take(&self) -> Vec<Completed> {
        mem::take(&mut *self.queue.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// From now on every response closes its connection.
    pub fn close_after_responses(&self) {
        self.stopping.store(true, Ordering::Release);
    }

    /// Encodes the response to a request.
    pub fn outgoing(&self, call: &PendingRequest, response: Response) -> Outgoing {
        let is_body_read = call.request.body.is_some();
        Outgoing::of(response, &call.request.head, is_body_read, self.stopping.load(Ordering::Acquire))
    }

    fn push(&self, completed: Completed) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.push(completed);
        // The loop takes all of them at once, and the first one wakes it.
        let is_first = queue.len() == 1;
        drop(queue);
        if is_first && let Err(error) = self.waker.wake() {
            log::error!("could not wake the listener: {error}");
        }
    }
}

/// The response for one connection.
pub(super) struct Completed {
    pub connection: usize,
    pub outgoing: Outgoing,
}

/// A response, or a piece of one, and how much of it is sent.
pub(super) struct Outgoing {
    pub bytes: Vec<u8>,
    pub sent: usize,
    /// Makes the next piece once this one is sent.
    pub rest: Option<Box<dyn Pieces>>,
    pub after: AfterResponse,
}

impl Outgoing {
    pub fn new(bytes: Vec<u8>, after: AfterResponse) -> Self {
        Self { bytes, sent: 0, rest: None, after }
    }

    /// Encodes the response to a request, and decides between keep-alive and close. If the body was not read, the beginning
    /// of the next request is unknown.
    pub fn of(response: Response, head: &RequestHead, is_body_read: bool, stopping: bool) -> Self {
        let (header, after) = if stopping || !head.keep_alive || !is_body_read {
            (ConnectionHeader::Close, AfterResponse::Close)
        } else if head.needs_keep_alive_header {
            (ConnectionHeader::KeepAlive, AfterResponse::Keep)
        } else {
            (ConnectionHeader::Omitted, AfterResponse::Keep)
        };
        let is_head = head.method() == "HEAD";
        let bytes = response.encode(header, is_head);
        Self { rest: response.rest.filter(|_| !is_head), ..Self::new(bytes, after) }
    }

    /// Encodes a response after which the connection closes.
    pub fn last(response: &Response, without_body: bool) -> Self {
        Self::new(response.encode(ConnectionHeader::Close, without_body), AfterResponse::Close)
    }
}

/// The right to answer on one connection. Dropping it gives the connection back, after a panic too: without a response it
/// closes.
pub(super) struct Assignment {
    completions: Arc<Completions>,
    connection: usize,
    outgoing: Option<Outgoing>,
    /// Another thread answers.
    is_over: bool,
}

impl Assignment {
    pub fn new(completions: &Arc<Completions>, connection: usize) -> Self {
        Self { completions: Arc::clone(completions), connection, outgoing: None, is_over: false }
    }

    pub fn finish(mut self, outgoing: Option<Outgoing>) {
        self.outgoing = outgoing;
    }

    /// Leaves the connection to the thread that takes the request from the queue.
    pub fn pass_on(mut self) {
        self.is_over = true;
    }
}

impl Drop for Assignment {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let outgoing =
            self.outgoing.take().unwrap_or_else(|| Outgoing::new(Vec::new(), AfterResponse::Close));
        self.completions.push(Completed { connection: self.connection, outgoing });
    }
}
