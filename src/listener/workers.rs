//! The fixed pool, and the desk where its workers leave what they have done.

use std::mem;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use mio::Waker;
use threadpool::ThreadPool;

use super::connection::Then;
use super::socket::Stream;
use super::{Limits, Pulse, Service};
use crate::http::{Request, response};

pub(super) struct Workers<S> {
    service: Arc<S>,
    pool: ThreadPool,
    desk: Arc<Desk>,
    /// How many requests may be with the pool, at work and waiting together.
    room: usize,
}

/// What the workers and the loop share.
struct Desk {
    done: Mutex<Vec<Done>>,
    waker: Arc<Waker>,
    pulse: Arc<Pulse>,
    under_way: AtomicUsize,
    /// The memory that the requests under way hold.
    weight: AtomicUsize,
    stopping: AtomicBool,
}

/// An answer, as far as the worker could send it without waiting for the client.
pub(super) struct Done {
    pub connection: usize,
    pub answer: Vec<u8>,
    pub sent: usize,
    pub then: Then,
}

impl<S: Service> Workers<S> {
    pub fn start(limits: &Limits, service: Arc<S>, waker: Arc<Waker>, pulse: Arc<Pulse>) -> Self {
        Self {
            service,
            pool: threadpool::Builder::new().num_threads(limits.workers).thread_name("worker".into()).build(),
            desk: Arc::new(Desk {
                done: Mutex::default(),
                waker,
                pulse,
                under_way: AtomicUsize::new(0),
                weight: AtomicUsize::new(0),
                stopping: AtomicBool::new(false),
            }),
            room: limits.workers + limits.queue,
        }
    }

    /// Whether one more request may be given to the pool.
    pub fn have_room(&self) -> bool {
        self.desk.under_way.load(Ordering::Acquire) < self.room
    }

    /// The memory that the requests under way hold.
    pub fn weight(&self) -> usize {
        self.desk.weight.load(Ordering::Acquire)
    }

    pub fn answer(&self, connection: usize, request: Request, stream: Arc<Stream>) {
        let weight = request.weight();
        self.desk.under_way.fetch_add(1, Ordering::AcqRel);
        self.desk.weight.fetch_add(weight, Ordering::AcqRel);
        let service = Arc::clone(&self.service);
        let mut turn =
            Turn { desk: Arc::clone(&self.desk), connection, stream: Some(stream), counted: Some(weight) };
        let received = Instant::now();
        self.pool.execute(move || {
            turn.desk.pulse.take();
            let response = service.answer(&request, received);
            let closes = turn.desk.stopping.load(Ordering::Acquire);
            let (told, then) = fate(&request, closes);
            let answer = response.encode(told, request.head.method() == "HEAD");
            drop(request);
            turn.finish(answer, then);
        });
    }

    /// Has a worker tell that it is there.
    pub fn ask(&self) {
        let desk = Arc::clone(&self.desk);
        self.pool.execute(move || desk.pulse.answer());
    }

    /// What has been answered since the last call.
    pub fn take_done(&self) -> Vec<Done> {
        mem::take(&mut *self.desk.done.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// From now on every answer is the last of its connection.
    pub fn stop_keeping(&self) {
        self.desk.stopping.store(true, Ordering::Release);
    }

    pub fn join(&self) {
        self.pool.join();
    }
}

/// What becomes of a connection after the answer to a request, and how the answer tells it. Where the body
/// was not read, nobody knows where the next request begins.
fn fate(request: &Request, closes: bool) -> (response::Connection, Then) {
    if closes || !request.head.keep_alive || request.body.is_none() {
        (response::Connection::Close, Then::Close)
    } else if request.head.tells_keep_alive {
        (response::Connection::KeepTold, Then::Keep)
    } else {
        (response::Connection::Keep, Then::Keep)
    }
}

/// One request's turn with a worker. If the worker panics, the connection is given back all the same.
struct Turn {
    desk: Arc<Desk>,
    connection: usize,
    stream: Option<Arc<Stream>>,
    /// The weight with which it is counted as under way, until it is not any more.
    counted: Option<usize>,
}

impl Turn {
    fn finish(&mut self, answer: Vec<u8>, then: Then) {
        // The room is free before the client can know of the answer, so that its next request finds it.
        self.give_room_back();
        let stream = self.stream.take().expect("a turn should end once");
        let sent = stream.write(&answer);
        // The loop must be the last to hold the socket, or a close would wait for this thread.
        drop(stream);
        match sent {
            Ok(sent) => self.report(answer, sent, then),
            Err(_) => self.report(Vec::new(), 0, Then::Close),
        }
    }

    fn report(&self, answer: Vec<u8>, sent: usize, then: Then) {
        let done = Done { connection: self.connection, answer, sent, then };
        self.desk.done.lock().unwrap_or_else(PoisonError::into_inner).push(done);
        if let Err(error) = self.desk.waker.wake() {
            log::error!("the listener could not be woken: {error}");
        }
    }

    fn give_room_back(&mut self) {
        if let Some(weight) = self.counted.take() {
            self.desk.weight.fetch_sub(weight, Ordering::AcqRel);
            self.desk.under_way.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.give_room_back();
        if self.stream.take().is_some() {
            self.report(Vec::new(), 0, Then::Close);
        }
    }
}
