//! The fixed pools, and the desk where its workers leave what they have done.

use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::time::Instant;

use mio::Waker;
use threadpool::ThreadPool;

use super::connection::Then;
use super::limits::Limits;
use super::load::Load;
use super::socket::Stream;
use super::{Pulse, Service};
use crate::http::Request;
use crate::http::response::{self, Pieces, chunk};

pub(super) struct Workers<S> {
    service: Arc<S>,
    pool: Pool,
    aside: Pool,
    desk: Arc<Desk>,
}

/// Threads, and how much may be with them.
struct Pool {
    threads: ThreadPool,
    /// How many requests may be with them, at work and waiting together.
    room: usize,
    under_way: Arc<AtomicUsize>,
}

impl Pool {
    fn new(name: &str, count: usize, queue: usize, under_way: Arc<AtomicUsize>) -> Self {
        let threads = threadpool::Builder::new().num_threads(count).thread_name(name.into()).build();
        Self { threads, room: count + queue, under_way }
    }

    fn has_room(&self) -> bool {
        self.under_way.load(Ordering::Acquire) < self.room
    }

    /// Puts every thread back in the system's order.
    fn stand_back(self) -> Self {
        let count = self.threads.max_count();
        let all = Arc::new(Barrier::new(count));
        for _ in 0..count {
            let all = Arc::clone(&all);
            self.threads.execute(move || {
                // In Linux this is a thread's own. Where it is refused, they only share the processor alike.
                let _ = rustix::process::setpriority_process(None, ASIDE_NICE);
                // No thread takes a second one of these while another has had none.
                all.wait();
            });
        }
        self
    }
}

/// What the workers and the loop share.
struct Desk {
    done: Mutex<Vec<Done>>,
    waker: Arc<Waker>,
    pulse: Arc<Pulse>,
    load: Arc<Load>,
    stopping: AtomicBool,
}

/// What a worker has done for a connection.
pub(super) struct Done {
    pub connection: usize,
    pub answer: Answer,
}

/// An answer, or a piece of one, as far as it was sent without waiting for the client.
pub(super) struct Answer {
    pub bytes: Vec<u8>,
    pub sent: usize,
    /// What has to be made and sent after it.
    pub rest: Option<Box<dyn Pieces>>,
    pub then: Then,
}

impl Answer {
    pub fn unsent(bytes: Vec<u8>, then: Then) -> Self {
        Self { bytes, sent: 0, rest: None, then }
    }
}

/// The pool for what must not delay the others: a few threads, which have the processor when nobody else wants
/// it. More would only hold more memory.
const ASIDE: usize = 2;

/// How many requests may wait for them.
const ASIDE_QUEUE: usize = 16;

/// Their place in the system's order, from -20 (first) to 19 (last).
const ASIDE_NICE: i32 = 19;

impl<S: Service> Workers<S> {
    pub fn start(
        limits: &Limits,
        service: Arc<S>,
        waker: Arc<Waker>,
        pulse: &Arc<Pulse>,
        load: &Arc<Load>,
    ) -> Self {
        let (pulse, load) = (Arc::clone(pulse), Arc::clone(load));
        Self {
            service,
            pool: Pool::new("worker", limits.workers, limits.queue, Arc::clone(&load.under_way)),
            aside: Pool::new("aside", ASIDE, ASIDE_QUEUE, Arc::default()).stand_back(),
            desk: Arc::new(Desk {
                done: Mutex::default(),
                waker,
                pulse,
                load,
                stopping: AtomicBool::new(false),
            }),
        }
    }

    /// Whether there is room for a request among those that it would be with.
    pub fn have_room(&self, request: &Request) -> bool {
        self.pool_for(request).has_room()
    }

    fn pool_for(&self, request: &Request) -> &Pool {
        if self.service.stands_back(&request.head) { &self.aside } else { &self.pool }
    }

    /// The memory that the requests under way hold.
    pub fn weight(&self) -> usize {
        self.desk.load.weight.load(Ordering::Acquire)
    }

    pub fn answer(&self, connection: usize, request: Request, stream: Option<Arc<Stream>>) {
        let pool = self.pool_for(&request);
        let mut turn = self.turn(pool, connection, stream, request.weight());
        let service = Arc::clone(&self.service);
        let received = Instant::now();
        let stands_back = ptr::eq(pool, &self.aside);
        pool.threads.execute(move || {
            if !stands_back {
                turn.desk.pulse.take();
            }
            let response = service.answer(&request, received);
            let closes = turn.desk.stopping.load(Ordering::Acquire);
            let (told, then) = fate(&request, closes);
            let is_head = request.head.method() == "HEAD";
            let bytes = response.encode(told, is_head);
            let rest = response.rest.filter(|_| !is_head);
            drop(request);
            turn.finish(Answer { bytes, sent: 0, rest, then });
        });
    }

    /// Has a worker tell that it is there.
    pub fn ask(&self) {
        let desk = Arc::clone(&self.desk);
        self.pool.threads.execute(move || desk.pulse.answer());
    }

    /// Makes the next piece of an answer. There is one at a time for a connection, so it needs no bound of its own.
    pub fn go_on(
        &self,
        connection: usize,
        mut rest: Box<dyn Pieces>,
        then: Then,
        stream: Option<Arc<Stream>>,
    ) {
        let mut turn = self.turn(&self.aside, connection, stream, 0);
        self.aside.threads.execute(move || match rest.next() {
            Ok(Some(piece)) => {
                turn.finish(Answer { rest: Some(rest), ..Answer::unsent(chunk(&piece), then) });
            }
            Ok(None) => turn.finish(Answer::unsent(chunk(b""), then)),
            // The turn ends without an answer, and the connection with it.
            Err(_) => {}
        });
    }

    fn turn(&self, pool: &Pool, connection: usize, stream: Option<Arc<Stream>>, weight: usize) -> Turn {
        pool.under_way.fetch_add(1, Ordering::AcqRel);
        self.desk.load.weight.fetch_add(weight, Ordering::AcqRel);
        Turn {
            desk: Arc::clone(&self.desk),
            connection,
            stream,
            is_open: true,
            counted: Some((weight, Arc::clone(&pool.under_way))),
        }
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
        self.pool.threads.join();
        self.aside.threads.join();
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
    /// Where the answer can be written at once; else it is the loop's to send.
    stream: Option<Arc<Stream>>,
    /// The connection was not given back yet.
    is_open: bool,
    /// The weight with which it is counted as under way, and where, until it is not any more.
    counted: Option<(usize, Arc<AtomicUsize>)>,
}

impl Turn {
    fn finish(&mut self, mut answer: Answer) {
        // The room is free before the client can know of the answer, so that its next request finds it.
        self.give_room_back();
        // The loop must be the last to hold the socket, or a close would wait for this thread.
        let sent = self.stream.take().map_or(Ok(0), |stream| stream.write(&answer.bytes));
        match sent {
            Ok(sent) => {
                answer.sent = sent;
                self.report(answer);
            }
            Err(_) => self.report(Answer::unsent(Vec::new(), Then::Close)),
        }
    }

    fn report(&mut self, answer: Answer) {
        self.is_open = false;
        let done = Done { connection: self.connection, answer };
        self.desk.done.lock().unwrap_or_else(PoisonError::into_inner).push(done);
        if let Err(error) = self.desk.waker.wake() {
            log::error!("the listener could not be woken: {error}");
        }
    }

    fn give_room_back(&mut self) {
        if let Some((weight, under_way)) = self.counted.take() {
            self.desk.load.weight.fetch_sub(weight, Ordering::AcqRel);
            under_way.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.give_room_back();
        if self.is_open {
            self.stream = None;
            self.report(Answer::unsent(Vec::new(), Then::Close));
        }
    }
}
