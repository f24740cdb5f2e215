//! Completed responses on their way from the threads back to the loop.

use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use mio::Waker;

use super::PendingRequest;
use crate::http::RequestHead;
use crate::http::response::{ConnectionHeader, Pieces, Response};
use crate::mutex::lock;

/// The responses that the threads have finished, each with the number of its connection.
pub(super) struct Completions {
    queue: Mutex<Vec<(usize, Outgoing)>>,
    waker: Arc<Waker>,
    stopping: AtomicBool,
}

impl Completions {
    pub fn new(waker: Arc<Waker>) -> Self {
        Self { queue: Mutex::default(), waker, stopping: AtomicBool::new(false) }
    }

    pub fn take(&self) -> Vec<(usize, Outgoing)> {
        mem::take(&mut *lock(&self.queue))
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

    pub fn push(&self, connection: usize, outgoing: Outgoing) {
        let mut queue = lock(&self.queue);
        queue.push((connection, outgoing));
        // The loop takes all of them at once, and the first one wakes it.
        let is_first = queue.len() == 1;
        drop(queue);
        if is_first && let Err(error) = self.waker.wake() {
            log::error!("could not wake the listener: {error}");
        }
    }
}

/// A response, or a piece of one, and how much of it is sent.
pub(super) struct Outgoing {
    pub bytes: Vec<u8>,
    pub sent: usize,
    /// Makes the next piece once this one is sent.
    pub rest: Option<Box<dyn Pieces>>,
    pub header: ConnectionHeader,
}

impl Outgoing {
    pub fn new(bytes: Vec<u8>, header: ConnectionHeader) -> Self {
        Self { bytes, sent: 0, rest: None, header }
    }

    /// Encodes the response to a request, and decides between keep-alive and close. If the body was not read, the beginning
    /// of the next request is unknown.
    pub fn of(response: Response, head: &RequestHead, is_body_read: bool, stopping: bool) -> Self {
        let header = if stopping || !head.keep_alive || !is_body_read {
            ConnectionHeader::Close
        } else if head.needs_keep_alive_header {
            ConnectionHeader::KeepAlive
        } else {
            ConnectionHeader::Omitted
        };
        let is_head = head.method() == "HEAD";
        let bytes = response.encode(header, is_head);
        Self { rest: response.rest.filter(|_| !is_head), ..Self::new(bytes, header) }
    }

    /// Encodes a response after which the connection closes.
    pub fn last(response: &Response, without_body: bool) -> Self {
        Self::new(response.encode(ConnectionHeader::Close, without_body), ConnectionHeader::Close)
    }
}

/// The right to answer on one connection. Dropping it sends the response, after a panic too.
pub(super) struct Assignment<'a> {
    completions: &'a Completions,
    connection: usize,
    /// At first nothing, after which the connection closes; `None` if another thread answers.
    pub outgoing: Option<Outgoing>,
}

impl<'a> Assignment<'a> {
    pub fn new(completions: &'a Completions, connection: usize) -> Self {
        let outgoing = Some(Outgoing::new(Vec::new(), ConnectionHeader::Close));
        Self { completions, connection, outgoing }
    }
}

impl Drop for Assignment<'_> {
    fn drop(&mut self) {
        if let Some(outgoing) = self.outgoing.take() {
            self.completions.push(self.connection, outgoing);
        }
    }
}
