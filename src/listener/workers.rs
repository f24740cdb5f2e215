//! The threads that answer requests, and the queue through which their responses go back to the loop.

use std::mem;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use mio::Waker;
use threadpool::ThreadPool;

use super::connection::Then;
use super::limits::Limits;
use super::load::Load;
use super::{Admitted, Destination, Pulse, Service};
use crate::http::Head;
use crate::http::response::{self, Pieces, chunk};

/// The console has two threads of its own, so that no page delays a completion. More would only use more memory.
const CONSOLE_THREADS: usize = 2;

/// Console requests that may wait for a thread.
const CONSOLE_QUEUE: usize = 16;

/// While the API is busy, a console thread pauses after each job for this many times as long as the job took, a quarter of a
/// second at most. Without it, constant use of the console cost the API 30 % of its rate (`make bench-console`).
const CONSOLE_PAUSE: u32 = 19;
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

pub(super) struct Workers<S> {
    service: Arc<S>,
    api: ThreadGroup,
    console: ThreadGroup,
    completions: Arc<Completions>,
}

/// A fixed number of threads with a bounded number of requests.
struct ThreadGroup {
    threads: ThreadPool,
    /// How many requests it accepts, running and waiting together.
    limit: usize,
    requests: Arc<AtomicUsize>,
}

impl ThreadGroup {
    fn new(name: &str, threads: usize, queue: usize, requests: Arc<AtomicUsize>) -> Self {
        let limit = threads + queue;
        let threads = threadpool::Builder::new().num_threads(threads).thread_name(name.into()).build();
        Self { threads, limit, requests }
    }

    fn has_room(&self) -> bool {
        self.requests.load(Ordering::Acquire) < self.limit
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
        let (pulse, load) = (Arc::clone(pulse), Arc::clone(load));
        Self {
            service,
            api: ThreadGroup::new("worker", limits.workers, limits.queue, Arc::clone(&load.requests)),
            console: ThreadGroup::new("console", CONSOLE_THREADS, CONSOLE_QUEUE, Arc::default()),
            completions: Arc::new(Completions {
                queue: Mutex::default(),
                waker,
                pulse,
                load,
                stopping: AtomicBool::new(false),
            }),
        }
    }

    pub fn have_room(&self, destination: Destination) -> bool {
        match destination {
            Destination::Api(_) => self.api.has_room(),
            Destination::Console(_) => self.console.has_room(),
        }
    }

    /// The memory that the running and waiting requests hold.
    pub fn weight(&self) -> usize {
        self.completions.load.weight.load(Ordering::Acquire)
    }

    /// Queues a complete request for a thread.
    pub fn answer(&self, connection: usize, admitted: Admitted) {
        let Admitted { request, destination } = admitted;
        let is_for_console = matches!(destination, Destination::Console(_));
        let group = if is_for_console { &self.console } else { &self.api };
        let assignment = self.assign(group, connection, request.weight());
        let service = Arc::clone(&self.service);
        let received = Instant::now();
        group.threads.execute(move || {
            let completions = Arc::clone(&assignment.completions);
            let started = Instant::now();
            if !is_for_console {
                completions.pulse.work_started();
            }
            let response = service.answer(&request, received);
            let stopping = completions.stopping.load(Ordering::Acquire);
            let (header, then) = connection_after(&request.head, request.body.is_some(), stopping);
            let is_head = request.head.method() == "HEAD";
            let bytes = response.encode(header, is_head);
            let rest = response.rest.filter(|_| !is_head);
            drop(request);
            assignment.finish(Outgoing { rest, ..Outgoing::new(bytes, then) });
            if is_for_console {
                completions.throttle(started);
            }
        });
    }

    /// Makes the next piece of a long response. Each connection has at most one in the queue.
    pub fn make_next_piece(&self, connection: usize, mut rest: Box<dyn Pieces>, then: Then) {
        let assignment = self.assign(&self.console, connection, 0);
        self.console.threads.execute(move || {
            let (completions, started) = (Arc::clone(&assignment.completions), Instant::now());
            match rest.next() {
                Ok(Some(piece)) => {
                    assignment.finish(Outgoing { rest: Some(rest), ..Outgoing::new(chunk(&piece), then) });
                }
                Ok(None) => assignment.finish(Outgoing::new(chunk(b""), then)),
                // Without a response the connection is closed, so the client sees that this one is incomplete.
                Err(_) => drop(assignment),
            }
            completions.throttle(started);
        });
    }

    fn assign(&self, group: &ThreadGroup, connection: usize, weight: usize) -> Assignment {
        group.requests.fetch_add(1, Ordering::AcqRel);
        self.completions.load.weight.fetch_add(weight, Ordering::AcqRel);
        Assignment {
            completions: Arc::clone(&self.completions),
            connection,
            weight,
            requests: Arc::clone(&group.requests),
            outgoing: None,
        }
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

impl Completions {
    /// Pauses after a console job that has begun at `started`, if the API is busy.
    fn throttle(&self, started: Instant) {
        if self.load.requests.load(Ordering::Acquire) > 0 {
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

/// One request with a thread. Dropping it gives the connection back, after a panic too: without a response it closes.
struct Assignment {
    completions: Arc<Completions>,
    connection: usize,
    weight: usize,
    requests: Arc<AtomicUsize>,
    outgoing: Option<Outgoing>,
}

impl Assignment {
    fn finish(mut self, outgoing: Outgoing) {
        self.outgoing = Some(outgoing);
    }
}

impl Drop for Assignment {
    fn drop(&mut self) {
        // Before the client can see the response: its next request must find room.
        self.completions.load.weight.fetch_sub(self.weight, Ordering::AcqRel);
        self.requests.fetch_sub(1, Ordering::AcqRel);
        let outgoing = self.outgoing.take().unwrap_or_else(|| Outgoing::new(Vec::new(), Then::Close));
        let completed = Completed { connection: self.connection, outgoing };
        self.completions.queue.lock().unwrap_or_else(PoisonError::into_inner).push(completed);
        if let Err(error) = self.completions.waker.wake() {
            log::error!("could not wake the listener: {error}");
        }
    }
}
