//! The threads that answer requests, and the queue through which their responses go back to the loop.

use std::mem;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use mio::Waker;
use threadpool::ThreadPool;

use super::connection::AfterResponse;
use super::lane::KnownLanes;
use super::limits::Limits;
use super::load::Load;
use super::queue::{FairQueue, Next, Queued, Room};
use super::{Destination, PendingRequest, Pulse, RequestIdentity, Service, Ticket};
use crate::client::Cancellation;
use crate::http::RequestHead;
use crate::http::response::{self, Pieces, Response, chunk};

/// The console has two threads of its own, so that no page delays a completion. More would only use more memory.
const CONSOLE_THREADS: usize = 2;

/// Console requests that may wait for a thread.
const CONSOLE_QUEUE: usize = 16;

/// The part of [`CONSOLE_QUEUE`] that strangers may fill.
const CONSOLE_STRANGERS: usize = 4;

/// While the API is busy, a console thread pauses after each job for this many times as long as the job took, a quarter of a
/// second at most. Without it, constant use of the console cost the API 30 % of its rate (`make bench-console`).
const CONSOLE_PAUSE: u32 = 19;
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

pub(super) struct Workers<S> {
    api: Arc<ThreadGroup<S>>,
    strangers: Arc<ThreadGroup<S>>,
    console: Arc<ThreadGroup<S>>,
    threads: Vec<ThreadPool>,
}

/// The state that a fixed number of threads share. Each takes the next request from the queue, answers it, and repeats that.
pub(super) struct ThreadGroup<S> {
    pub service: Arc<S>,
    pub queue: Arc<FairQueue<Job>>,
    pub completions: Arc<Completions>,
    pub known: Arc<KnownLanes>,
    is_for_console: bool,
}

/// A thread's work for one connection.
pub(super) struct Job {
    pub connection: usize,
    pub ticket: Ticket,
    /// Its lane is that of its credential.
    is_known: bool,
    since: Instant,
    pub work: Work,
}

pub(super) enum Work {
    /// Answers a complete request.
    Answer(PendingRequest, Weight),
    /// Makes the next piece of a long response.
    Piece(Box<dyn Pieces>, AfterResponse),
}

impl Queued for Job {
    fn ticket(&self) -> &Ticket {
        &self.ticket
    }

    fn since(&self) -> Instant {
        self.since
    }
}

impl Job {
    fn new(connection: usize, ticket: Ticket, work: Work) -> Self {
        Self { connection, ticket, is_known: false, since: Instant::now(), work }
    }

    pub fn call(&self) -> Option<&PendingRequest> {
        match &self.work {
            Work::Answer(call, _) => Some(call),
            Work::Piece(..) => None,
        }
    }

    /// Returns true if this is the request that `cancellation` cancels.
    pub fn is_cancelled_by(&self, cancellation: &Cancellation) -> bool {
        self.call().is_some_and(|call| call.cancellation.is(cancellation))
    }
}

/// The memory of a request, as long as it is counted.
pub(super) struct Weight {
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

/// The responses that the threads have finished, and the state that they share with the loop.
pub(super) struct Completions {
    queue: Mutex<Vec<Completed>>,
    waker: Arc<Waker>,
    pub pulse: Arc<Pulse>,
    pub load: Arc<Load>,
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
    pub after: AfterResponse,
}

impl Outgoing {
    pub fn new(bytes: Vec<u8>, after: AfterResponse) -> Self {
        Self { bytes, sent: 0, rest: None, after }
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
        let known = Arc::default();
        let group = |queue: &Arc<FairQueue<Job>>, is_for_console| {
            Arc::new(ThreadGroup {
                service: Arc::clone(&service),
                queue: Arc::clone(queue),
                completions: Arc::clone(&completions),
                known: Arc::clone(&known),
                is_for_console,
            })
        };
        let (api, strangers) = (group(&load.queue, false), group(&load.strangers, false));
        let console = group(
            &Arc::new(FairQueue::new(Room {
                threads: CONSOLE_THREADS,
                places: CONSOLE_QUEUE,
                strangers: CONSOLE_STRANGERS,
                has_limits: false,
            })),
            true,
        );
        let threads = vec![
            start_threads("worker", limits.workers, &api, ThreadGroup::work),
            start_threads("strangers", 1, &strangers, ThreadGroup::look_up_strangers),
            start_threads("console", CONSOLE_THREADS, &console, ThreadGroup::work),
        ];
        Self { api, strangers, console, threads }
    }

    /// The memory that the running and waiting requests hold.
    pub fn weight(&self) -> usize {
        self.api.completions.load.weight.load(Ordering::Acquire)
    }

    /// Queues a complete request for a thread. Returns one for which there is no room; this may be the one.
    pub fn answer(&self, connection: usize, call: PendingRequest, ticket: Ticket) -> Option<Job> {
        let known = ticket.credential.and_then(|digest| self.api.known.find(&digest));
        let is_known = known.is_some();
        let queue = match call.destination {
            Destination::Api(_) if is_known => &self.api.queue,
            Destination::Api(_) => &self.strangers.queue,
            Destination::Console => &self.console.queue,
        };
        let ticket = Ticket { lane: known.or(ticket.lane), ..ticket };
        let weight = Weight::new(&self.api.completions.load, call.request.weight());
        queue.push(Job { is_known, ..Job::new(connection, ticket, Work::Answer(call, weight)) })
    }

    /// Removes a request if it waits. Returns whether it did.
    pub fn remove(&self, call: &Cancellation) -> bool {
        [&self.strangers, &self.api, &self.console]
            .iter()
            .any(|group| group.queue.remove(|job| job.is_cancelled_by(call)).is_some())
    }

    /// Removes a request from the queue before a worker takes it.
    pub fn take_waiting(&self) -> Option<Job> {
        self.strangers.queue.remove(|_| true).or_else(|| self.api.queue.remove(|_| true))
    }

    /// Makes the next piece of a long response. Each connection has at most one in the queue.
    pub fn make_next_piece(&self, connection: usize, rest: Box<dyn Pieces>, after: AfterResponse) {
        let ticket = Ticket { lane: Some("pieces".into()), is_begun: true, ..Ticket::default() };
        self.console.queue.push(Job::new(connection, ticket, Work::Piece(rest, after)));
    }

    pub fn take_completed(&self) -> Vec<Completed> {
        mem::take(&mut *self.api.completions.queue.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// From now on every response closes its connection.
    pub fn close_after_responses(&self) {
        self.api.completions.stopping.store(true, Ordering::Release);
    }

    /// Ends the threads, after the last request.
    pub fn join(&self) {
        [&self.strangers, &self.api, &self.console].iter().for_each(|group| group.queue.close());
        self.threads.iter().for_each(ThreadPool::join);
    }
}

fn start_threads<S: Service>(
    name: &str,
    count: usize,
    group: &Arc<ThreadGroup<S>>,
    run: fn(&ThreadGroup<S>),
) -> ThreadPool {
    let threads = threadpool::Builder::new().num_threads(count).thread_name(name.into()).build();
    for _ in 0..count {
        let group = Arc::clone(group);
        threads.execute(move || run(&group));
    }
    threads
}

impl<S: Service> ThreadGroup<S> {
    fn work(&self) {
        while let Next::Take(job) = self.queue.take(None) {
            let started = Instant::now();
            if !self.is_for_console {
                self.completions.pulse.work_started();
            }
            contain_panic(|| self.serve(job));
            if self.is_for_console {
                self.completions.throttle(started);
            }
        }
    }

    fn serve(&self, job: Job) {
        let Job { connection, ticket, is_known, work, .. } = job;
        // Its response goes out last, after a panic too: the client's next request must find room.
        let assignment = Assignment::new(&self.completions, connection);
        let running = RunningCall { queue: &self.queue, ticket };
        let outgoing = match work {
            Work::Answer(call, _weight) => {
                if call.cancellation.is_cancelled() {
                    return;
                }
                if self.is_for_console
                    && !is_known
                    && let RequestIdentity::Known(lane) = self.service.identify(&call)
                    && let Some(digest) = running.ticket.credential
                {
                    self.known.remember(digest, lane.name.into());
                }
                Some(self.respond(&call, self.service.answer(&call, &running)))
            }
            Work::Piece(mut rest, after) => match rest.next() {
                Ok(Some(piece)) => {
                    // An empty chunk would end the response.
                    let bytes = if piece.is_empty() { piece } else { chunk(&piece) };
                    Some(Outgoing { rest: Some(rest), ..Outgoing::new(bytes, after) })
                }
                Ok(None) => Some(Outgoing::new(chunk(b""), after)),
                // Without a response the connection is closed, so the client sees that this one is incomplete.
                Err(_) => None,
            },
        };
        drop(running);
        assignment.finish(outgoing);
    }

    pub fn respond(&self, call: &PendingRequest, response: Response) -> Outgoing {
        let stopping = self.completions.stopping.load(Ordering::Acquire);
        let head = &call.request.head;
        let (header, after) = connection_after(head, call.request.body.is_some(), stopping);
        let is_head = head.method() == "HEAD";
        let bytes = response.encode(header, is_head);
        Outgoing { rest: response.rest.filter(|_| !is_head), ..Outgoing::new(bytes, after) }
    }
}

/// A panic ends what a thread does for one connection, not the thread. Its message is in the log.
pub(super) fn contain_panic(work: impl FnOnce()) {
    let _ = panic::catch_unwind(AssertUnwindSafe(work));
}

/// Counts a request as running until it is dropped, by a panic too.
pub struct RunningCall<'a> {
    pub(super) queue: &'a FairQueue<Job>,
    pub(super) ticket: Ticket,
}

impl RunningCall<'_> {
    /// Sets the limit on concurrent requests of its key, as soon as it is read.
    pub fn set_limit(&self, limit: Option<u32>) {
        self.queue.set_limit(&self.ticket.lane, limit);
    }
}

impl Drop for RunningCall<'_> {
    fn drop(&mut self) {
        self.queue.finish(&self.ticket);
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

/// Decides between keep-alive and close, and the header that says so. If the body was not read, the beginning of the next
/// request is unknown.
pub(super) fn connection_after(
    head: &RequestHead,
    is_body_read: bool,
    stopping: bool,
) -> (response::ConnectionHeader, AfterResponse) {
    if stopping || !head.keep_alive || !is_body_read {
        (response::ConnectionHeader::Close, AfterResponse::Close)
    } else if head.needs_keep_alive_header {
        (response::ConnectionHeader::KeepAlive, AfterResponse::Keep)
    } else {
        (response::ConnectionHeader::Omitted, AfterResponse::Keep)
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
        let completed = Completed { connection: self.connection, outgoing };
        let mut queue = self.completions.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.push(completed);
        // The loop takes all of them at once, and the first one wakes it.
        let is_first = queue.len() == 1;
        drop(queue);
        if is_first && let Err(error) = self.completions.waker.wake() {
            log::error!("could not wake the listener: {error}");
        }
    }
}

#[cfg(test)]
impl Job {
    pub fn of(request: &str, load: &Arc<Load>) -> Self {
        let head = crate::http::RequestHead::parse(request.as_bytes()).expect("a good head");
        let request = crate::http::Request { head, body: None, client: crate::http::ClientInfo::default() };
        let call = PendingRequest::new(request, Destination::Console);
        let ticket = Ticket { lane: Some("key_1".into()), ..Ticket::default() };
        Self::new(0, ticket, Work::Answer(call, Weight::new(load, 0)))
    }
}
