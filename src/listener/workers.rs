//! The fixed pools, and the desk where its workers leave what they have done.

use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use mio::Waker;

use super::connection::Then;
use super::limits::Limits;
use super::load::Load;
use super::pool::Pool;
use super::socket::Stream;
use super::{Pulse, Service};
use crate::http::response::{self, Pieces, chunk};
use crate::http::{Request, Response};

pub(super) struct Workers<S> {
    service: Arc<S>,
    pool: Crew,
    aside: Crew,
    desk: Arc<Desk>,
}

/// Threads, and how much may be with them.
struct Crew {
    threads: Arc<Pool>,
    /// How many requests may be with them, at work and waiting together.
    room: usize,
    under_way: Arc<AtomicUsize>,
}

impl Crew {
    fn has_room(&self) -> bool {
        self.under_way.load(Ordering::Acquire) < self.room
    }
}

/// What the workers and the loop share.
struct Desk {
    tray: Mutex<Tray>,
    waker: Arc<Waker>,
    pulse: Arc<Pulse>,
    load: Arc<Load>,
    stopping: AtomicBool,
}

#[derive(Default)]
struct Tray {
    done: Vec<Done>,
    /// The connections whose next bytes wait for an answer before them.
    wanted: Vec<usize>,
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

/// While the others are at work, each of them rests after a job for so many times as long as the job took, but not
/// longer than this: a person who waits for a page does not notice, and many pages in a row do not add up.
const ASIDE_REST: u32 = 19;
const ASIDE_LONGEST_REST: Duration = Duration::from_millis(250);

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
            pool: Crew {
                threads: Arc::new(Pool::new("worker", limits.workers, || {})),
                room: limits.workers + limits.queue,
                under_way: Arc::clone(&load.under_way),
            },
            aside: Crew {
                threads: Arc::new(Pool::new("aside", ASIDE, stand_back)),
                room: ASIDE + ASIDE_QUEUE,
                under_way: Arc::default(),
            },
            desk: Arc::new(Desk {
                tray: Mutex::default(),
                waker,
                pulse,
                load,
                stopping: AtomicBool::new(false),
            }),
        }
    }

    /// Whether there is room for a request among those that it would be with.
    pub fn have_room(&self, request: &Request) -> bool {
        self.crew_for(request).has_room()
    }

    fn crew_for(&self, request: &Request) -> &Crew {
        if self.service.stands_back(&request.head) { &self.aside } else { &self.pool }
    }

    /// The memory that the requests under way hold.
    pub fn weight(&self) -> usize {
        self.desk.load.weight.load(Ordering::Acquire)
    }

    pub fn answer(&self, connection: usize, request: Request, stream: Option<Arc<Stream>>) {
        let crew = self.crew_for(&request);
        let reply = Reply {
            turn: self.turn(crew, connection, stream, request.weight()),
            form: Form::of(&request),
            workers: Arc::clone(&crew.threads),
        };
        let service = Arc::clone(&self.service);
        let received = Instant::now();
        if ptr::eq(crew, &self.aside) {
            let load = Arc::clone(&self.desk.load);
            crew.threads.execute(move || considerate(&load, || service.answer(request, received, reply)));
        } else {
            crew.threads.leave(move || {
                reply.turn.desk.pulse.take();
                service.answer(request, received, reply);
            });
        }
    }

    /// Sees to it that the requests of this turn are answered.
    pub fn wake(&self) {
        self.pool.threads.wake();
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
        let load = Arc::clone(&self.desk.load);
        let make = move || match rest.next() {
            Ok(Some(piece)) => {
                turn.finish(Answer { rest: Some(rest), ..Answer::unsent(chunk(&piece), then) });
            }
            Ok(None) => turn.finish(Answer::unsent(chunk(b""), then)),
            // The turn ends without an answer, and the connection with it.
            Err(_) => {}
        };
        self.aside.threads.execute(move || considerate(&load, make));
    }

    fn turn(&self, crew: &Crew, connection: usize, stream: Option<Arc<Stream>>, weight: usize) -> Turn {
        crew.under_way.fetch_add(1, Ordering::AcqRel);
        self.desk.load.weight.fetch_add(weight, Ordering::AcqRel);
        Turn {
            desk: Arc::clone(&self.desk),
            connection,
            stream,
            is_open: true,
            counted: Some((weight, Arc::clone(&crew.under_way))),
        }
    }

    /// What has been answered since the last call.
    pub fn take_done(&self) -> Vec<Done> {
        mem::take(&mut self.desk.tray().done)
    }

    /// Has the loop woken when this connection is answered, because there is more to do for it. Whether it is answered
    /// already.
    pub fn want(&self, connection: usize) -> bool {
        let mut tray = self.desk.tray();
        let is_done = tray.done.iter().any(|done| done.connection == connection);
        if !is_done && !tray.wanted.contains(&connection) {
            tray.wanted.push(connection);
        }
        is_done
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

impl Desk {
    fn tray(&self) -> MutexGuard<'_, Tray> {
        self.tray.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place of the answer to one request. It may be given from any thread; if it never is, the connection closes.
pub struct Reply {
    turn: Turn,
    form: Form,
    workers: Arc<Pool>,
}

impl Reply {
    /// Those who can go on with the request.
    pub fn workers(&self) -> Arc<Pool> {
        Arc::clone(&self.workers)
    }

    pub fn send(mut self, response: Response) {
        let closes = self.turn.desk.stopping.load(Ordering::Acquire);
        let (told, then) = self.form.fate(closes);
        let bytes = response.encode(told, self.form.is_head);
        let rest = response.rest.filter(|_| !self.form.is_head);
        self.turn.finish(Answer { bytes, sent: 0, rest, then });
    }
}

/// What of a request says how its answer has to look.
#[derive(Clone, Copy)]
struct Form {
    is_head: bool,
    keeps: bool,
    tells_keep_alive: bool,
}

impl Form {
    /// Where the body was not read, nobody knows where the next request begins.
    fn of(request: &Request) -> Self {
        Self {
            is_head: request.head.method() == "HEAD",
            keeps: request.head.keep_alive && request.body.is_some(),
            tells_keep_alive: request.head.tells_keep_alive,
        }
    }

    /// What becomes of the connection after the answer, and how the answer tells it.
    fn fate(self, closes: bool) -> (response::Connection, Then) {
        if closes || !self.keeps {
            (response::Connection::Close, Then::Close)
        } else if self.tells_keep_alive {
            (response::Connection::KeepTold, Then::Keep)
        } else {
            (response::Connection::Keep, Then::Keep)
        }
    }
}

/// Does a job of the aside pool, and leaves the processor to the others for a while, if they are at work.
fn considerate(load: &Load, job: impl FnOnce()) {
    let began = Instant::now();
    job();
    if load.under_way.load(Ordering::Acquire) > 0 {
        thread::sleep((began.elapsed() * ASIDE_REST).min(ASIDE_LONGEST_REST));
    }
}

/// The threads of the aside pool put themselves back in the system's order.
fn stand_back() {
    // In Linux this is a thread's own. Where it is refused, they only share the processor alike.
    let _ = rustix::process::setpriority_process(None, ASIDE_NICE);
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

    /// Gives the connection back. The loop is woken where there is more to do for it; else it learns of it when the
    /// client's next request wakes it, or at its next look at the clock.
    fn report(&mut self, answer: Answer) {
        self.is_open = false;
        let connection = self.connection;
        let is_all = answer.sent == answer.bytes.len() && answer.rest.is_none() && answer.then == Then::Keep;
        let is_wanted = {
            let mut tray = self.desk.tray();
            tray.done.push(Done { connection, answer });
            let place = tray.wanted.iter().position(|&wanted| wanted == connection);
            place.map(|place| tray.wanted.swap_remove(place)).is_some()
        };
        if (is_wanted || !is_all || self.desk.stopping.load(Ordering::Acquire))
            && let Err(error) = self.desk.waker.wake()
        {
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
