//! The threads that answer requests, and the queue through which their responses go back to the loop.

use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use mio::Waker;
use threadpool::ThreadPool;

use super::connection::Then;
use super::limits::Limits;
use super::load::Load;
use super::queue::{FairQueue, Taken, Ticket};
use super::{Admitted, Destination, Pulse, Service};
use crate::client::Cancellation;
use crate::http::response::{self, Pieces, chunk};
use crate::http::{Head, Request};

/// The console has two threads of its own, so that no page delays a completion. More would only use more memory.
const CONSOLE_THREADS: usize = 2;

/// The name of these threads.
const CONSOLE: &str = "console";

/// Console requests that may wait for a thread.
const CONSOLE_QUEUE: usize = 16;

/// While the API is busy, a console thread pauses after each job for this many times as long as the job took, a quarter of a
/// second at most. Without it, constant use of the console cost the API 30 % of its rate (`make bench-console`).
const CONSOLE_PAUSE: u32 = 19;
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

pub(super) struct Workers<S> {
    api: Arc<ThreadGroup<S>>,
    console: Arc<ThreadGroup<S>>,
    completions: Arc<Completions>,
}

/// A fixed number of threads, and the requests that wait for them.
struct ThreadGroup<S> {
    service: Arc<S>,
    threads: ThreadPool,
    queue: Arc<FairQueue<Job>>,
    completions: Arc<Completions>,
    is_for_console: bool,
}

/// A complete request.
pub(super) struct Job {
    pub connection: usize,
    pub request: Request,
    received: Instant,
    cancellation: Cancellation,
    weight: Weight,
}

/// The memory of a request, as long as it is counted.
struct Weight {
    load: Arc<Load>,
    bytes: usize,
}

impl Weight {
    fn new(load: &Arc<Load>, bytes: usize) -> Self {
        load.weight.fetch_add(bytes, Ordering::AcqRel);
        Self { load: Arc::clone(load), bytes }
    }
}

impl Drop for Weight {
    fn drop(&mut self) {
        self.load.weight.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

/// What the threads and the loop share.
struct Completions {
    queue: Mutex<Vec<Completed>>,
    waker: Arc<Waker>,
    pulse: Arc<Pulse>,
    load: Arc<Load>,
    stopping: AtomicBool,
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
    pub then: Then,
}

impl Outgoing {
    pub fn new(bytes: Vec<u8>, then: Then) -> Self {
        Self { bytes, sent: 0, rest: None, then }
    }
}

impl<S: Service> Workers<S> {
    pub fn start(
        limits: &Limits,
        service: Arc<S>,
        waker: Arc<Waker>,
        pulse: &Arc<Pulse>,
        load: &Arc<Load>,
    ) -> Self {
        let completions = Arc::new(Completions {
            queue: Mutex::default(),
            waker,
            pulse: Arc::clone(pulse),
            load: Arc::clone(load),
            stopping: AtomicBool::new(false),
        });
        let group = |name: &str, threads: usize, queue: Arc<FairQueue<Job>>| {
            Arc::new(ThreadGroup {
                service: Arc::clone(&service),
                threads: threadpool::Builder::new().num_threads(threads).thread_name(name.into()).build(),
                queue,
                completions: Arc::clone(&completions),
                is_for_console: name == CONSOLE,
            })
        };
        let console = Arc::new(FairQueue::new(CONSOLE_THREADS, CONSOLE_QUEUE));
        Self {
            api: group("worker", limits.workers, Arc::clone(&load.queue)),
            console: group(CONSOLE, CONSOLE_THREADS, console),
            completions,
        }
    }

    /// The memory that the running and waiting requests hold.
    pub fn weight(&self) -> usize {
        self.completions.load.weight.load(Ordering::Acquire)
    }

    /// Queues a complete request for a thread. Returns those for which there is no room; this may be one of them.
    pub fn answer(&self, connection: usize, admitted: Admitted, cancellation: Cancellation) -> Vec<Job> {
        let Admitted { request, destination } = admitted;
        let (group, ticket) = match destination {
            Destination::Api(digest) => (&self.api, Ticket { credential: Some(digest), ..Ticket::default() }),
            Destination::Console(ticket) => (&self.console, ticket),
        };
        let weight = Weight::new(&self.completions.load, request.weight());
        let job = Job { connection, request, received: Instant::now(), cancellation, weight };
        let shed = group.queue.push(ticket, job);
        group.submit_tokens();
        shed
    }

    /// Removes the request of a connection if it waits. Returns whether it did.
    pub fn remove(&self, connection: usize) -> bool {
        [&self.api, &self.console].iter().any(|group| group.remove(connection))
    }

    /// Removes a request from the queue before a worker takes it.
    pub fn take_waiting(&self) -> Option<Job> {
        self.api.queue.remove(|_| true)
    }

    /// Makes the next piece of a long response. Each connection has at most one in the pool.
    pub fn make_next_piece(&self, connection: usize, mut rest: Box<dyn Pieces>, then: Then) {
        let assignment = Assignment::new(&self.completions, connection);
        self.console.threads.execute(move || {
            let (completions, started) = (Arc::clone(&assignment.completions), Instant::now());
            match rest.next() {
                Ok(Some(piece)) => {
                    // An empty chunk would end the response.
                    let bytes = if piece.is_empty() { piece } else { chunk(&piece) };
                    assignment.finish(Outgoing { rest: Some(rest), ..Outgoing::new(bytes, then) });
                }
                Ok(None) => assignment.finish(Outgoing::new(chunk(b""), then)),
                // Without a response the connection is closed, so the client sees that this one is incomplete.
                Err(_) => drop(assignment),
            }
            completions.throttle(started);
        });
    }

    pub fn take_completed(&self) -> Vec<Completed> {
        mem::take(&mut *self.completions.queue.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// From now on every response closes its connection.
    pub fn stop_keeping(&self) {
        self.completions.stopping.store(true, Ordering::Release);
    }

    /// Waits until all queued requests are answered.
    pub fn join(&self) {
        self.api.threads.join();
        self.console.threads.join();
    }
}

impl<S: Service> ThreadGroup<S> {
    /// Submits the tokens that the pool lacks. Call it after every change of the queue.
    fn submit_tokens(self: &Arc<Self>) {
        for _ in 0..self.queue.claim_tokens() {
            let group = Arc::clone(self);
            self.threads.execute(move || group.serve_next());
        }
    }

    /// Serves the request whose turn it is, if there is one.
    fn serve_next(self: &Arc<Self>) {
        while let Some(taken) = self.queue.take() {
            let (connection, cancellation) = (taken.item.connection, taken.item.cancellation.clone());
            let (caller, lane) = self.service.identify(&taken.item.request);
            let started = self.queue.start(taken, lane);
            self.submit_tokens();
            if let Some(taken) = started {
                return self.serve(taken, caller);
            }
            // While this thread had it, the loop could not find it. Without a response, the loop closes the connection.
            if cancellation.is_cancelled() && self.remove(connection) {
                drop(Assignment::new(&self.completions, connection));
            }
        }
    }

    fn remove(&self, connection: usize) -> bool {
        self.queue.remove(|job| job.connection == connection).is_some()
    }

    fn serve(self: &Arc<Self>, taken: Taken<Job>, caller: S::Caller) {
        // Its response goes out last, after a panic too: the client's next request must find room.
        let assignment = Assignment::new(&self.completions, taken.item.connection);
        let exclusive = taken.ticket.exclusive;
        let running = Running { group: Arc::clone(self), lane: taken.lane, exclusive };
        let Job { request, received, cancellation, weight, .. } = taken.item;
        if cancellation.is_cancelled() {
            return;
        }
        let started = Instant::now();
        if !self.is_for_console {
            self.completions.pulse.work_started();
        }
        let response = self.service.answer(&request, caller, received, &cancellation);
        let stopping = self.completions.stopping.load(Ordering::Acquire);
        let (header, then) = connection_after(&request.head, request.body.is_some(), stopping);
        let is_head = request.head.method() == "HEAD";
        let bytes = response.encode(header, is_head);
        let rest = response.rest.filter(|_| !is_head);
        drop((request, weight, running));
        assignment.finish(Outgoing { rest, ..Outgoing::new(bytes, then) });
        if self.is_for_console {
            self.completions.throttle(started);
        }
    }
}

/// Counts a request as running until it is dropped, by a panic too.
struct Running<S: Service> {
    group: Arc<ThreadGroup<S>>,
    lane: Option<Arc<str>>,
    exclusive: bool,
}

impl<S: Service> Drop for Running<S> {
    fn drop(&mut self) {
        self.group.queue.finish(&self.lane, self.exclusive);
        self.group.submit_tokens();
    }
}

impl Completions {
    /// Pauses after a console job that has begun at `started`, if the API is busy.
    fn throttle(&self, started: Instant) {
        if self.load.queue.load() != (0, 0) {
            thread::sleep((started.elapsed() * CONSOLE_PAUSE).min(LONGEST_PAUSE));
        }
    }
}

/// Whether the connection stays open after the response, and the header that says so. If the body was not read, the
/// beginning of the next request is unknown.
pub(super) fn connection_after(
    head: &Head,
    is_body_read: bool,
    stopping: bool,
) -> (response::Connection, Then) {
    if stopping || !head.keep_alive || !is_body_read {
        (response::Connection::Close, Then::Close)
    } else if head.tells_keep_alive {
        (response::Connection::KeepTold, Then::Keep)
    } else {
        (response::Connection::Keep, Then::Keep)
    }
}

/// What a thread does for one connection. Dropping it gives the connection back, after a panic too: without a response it
/// closes.
struct Assignment {
    completions: Arc<Completions>,
    connection: usize,
    outgoing: Option<Outgoing>,
}

impl Assignment {
    fn new(completions: &Arc<Completions>, connection: usize) -> Self {
        Self { completions: Arc::clone(completions), connection, outgoing: None }
    }

    fn finish(mut self, outgoing: Outgoing) {
        self.outgoing = Some(outgoing);
    }
}

impl Drop for Assignment {
    fn drop(&mut self) {
        let outgoing = self.outgoing.take().unwrap_or_else(|| Outgoing::new(Vec::new(), Then::Close));
        let completed = Completed { connection: self.connection, outgoing };
        self.completions.queue.lock().unwrap_or_else(PoisonError::into_inner).push(completed);
        if let Err(error) = self.completions.waker.wake() {
            log::error!("could not wake the listener: {error}");
        }
    }
}

#[cfg(test)]
impl Job {
    pub fn of(request: &str, load: &Arc<Load>) -> Self {
        let head = crate::http::Head::parse(request.as_bytes()).expect("a good head");
        let request = Request { head, body: None, client: crate::http::Client::default() };
        Self {
            connection: 0,
            request,
            received: Instant::now(),
            cancellation: Cancellation::default(),
            weight: Weight::new(load, 0),
        }
    }
}
