//! The threads that answer requests: the API's workers, the thread that looks up strangers, and the console's. The loop gives
//! them complete requests and takes their responses.

use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{mem, thread};

use mio::Waker;
use threadpool::ThreadPool;

use super::connection::Outgoing;
use super::load::Load;
use super::queue::{FairQueue, HeavyLane, Job, Room, Work};
use super::strangers::KnownLanes;
use super::{Destination, Listener, PendingRequest, Pulse, RequestIdentity, Service, Ticket};
use crate::client::Cancellation;
use crate::http::Response;
use crate::http::response::{ConnectionHeader, Pieces, chunk};
use crate::mutex::lock;

/// The console has two threads of its own, so that no page delays a completion. More would only use more memory.
pub(super) const CONSOLE_ROOM: Room = Room {
    threads: 2,
    places: 16,
    strangers: 4,
    has_limits: false,
};

/// While the API is busy, a console thread pauses after each job for this many times as long as the job took, a quarter of a
/// second at most. Without it, constant use of the console cost the API 30 % of its rate (`make bench-console`).
const CONSOLE_PAUSE: u32 = 19;
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// What the loop and all threads share.
pub(super) struct Workers<S> {
    pub service: Arc<S>,
    pub load: Arc<Load>,
    pub pulse: Arc<Pulse>,
    pub completions: Completions,
    pub known: KnownLanes,
}

impl<S: Service> Workers<S> {
    pub fn start(listener: &Listener, service: Arc<S>) -> (Arc<Self>, Vec<ThreadPool>) {
        let workers = Arc::new(Self {
            service,
            load: Arc::clone(&listener.load),
            pulse: Arc::clone(&listener.pulse),
            completions: Completions::new(Arc::clone(&listener.waker)),
            known: KnownLanes::default(),
        });
        let start = |name: &str, count, run: fn(&Self)| {
            let threads = threadpool::Builder::new()
                .num_threads(count)
                .thread_name(name.into())
                .build();
            for _ in 0..count {
                let workers = Arc::clone(&workers);
                threads.execute(move || run(&workers));
            }
            threads
        };
        let threads = vec![
            start("worker", listener.limits.workers, Self::work_for_api),
            start("strangers", 1, Self::look_up_strangers),
            start("console", CONSOLE_ROOM.threads, Self::work_for_console),
        ];
        (workers, threads)
    }

    /// The queue and the lane of a complete request.
    pub fn place(&self, destination: Destination, ticket: Ticket) -> (&FairQueue, Ticket) {
        let known = ticket
            .credential
            .and_then(|digest| self.known.find(&digest));
        let queue = match destination {
            Destination::Api(_) if known.is_some() => &self.load.queue,
            Destination::Api(_) => &self.load.strangers,
            Destination::Console => &self.load.console,
        };
        (
            queue,
            Ticket {
                lane: known.or(ticket.lane),
                ..ticket
            },
        )
    }

    /// The lanes that hold more than `own` bytes and have a request that can be shed.
    pub fn heavier_lanes(&self, own: usize) -> impl Iterator<Item = HeavyLane<'_>> {
        self.queues()
            .into_iter()
            .flat_map(move |queue| queue.heavier_lanes(own))
    }

    /// Removes a request if it waits. Returns whether it did.
    pub fn remove(&self, call: &Cancellation) -> bool {
        self.queues()
            .iter()
            .any(|queue| queue.remove(|job| job.is_cancelled_by(call)).is_some())
    }

    /// Removes a request from the queue before a worker takes it.
    pub fn take_waiting(&self) -> Option<Job> {
        let Load {
            strangers, queue, ..
        } = &*self.load;
        strangers
            .remove(|_| true)
            .or_else(|| queue.remove(|_| true))
    }

    /// Makes the next piece of a long response. Each connection has at most one in the queue.
    pub fn make_next_piece(
        &self,
        connection: usize,
        rest: Box<dyn Pieces>,
        header: ConnectionHeader,
    ) {
        let ticket = Ticket {
            lane: Some("pieces".into()),
            is_begun: true,
            ..Ticket::default()
        };
        self.load.console.push(Job {
            connection,
            ticket,
            work: Work::Piece(rest, header),
        });
    }

    /// Ends the threads, after the last request.
    pub fn close(&self) {
        self.queues().iter().for_each(|queue| queue.close());
    }

    fn queues(&self) -> [&FairQueue; 3] {
        let Load {
            strangers,
            queue,
            console,
            ..
        } = &*self.load;
        [strangers, queue, console]
    }

    fn work_for_api(&self) {
        while let Ok(job) = self.load.queue.take(None) {
            self.pulse.work_started();
            contain_panic(|| self.serve(job, &self.load.queue));
        }
    }

    fn work_for_console(&self) {
        while let Ok(job) = self.load.console.take(None) {
            let started = Instant::now();
            contain_panic(|| self.serve(job, &self.load.console));
            if self.load.queue.load() != (0, 0) {
                thread::sleep((started.elapsed() * CONSOLE_PAUSE).min(LONGEST_PAUSE));
            }
        }
    }

    fn serve(&self, job: Job, queue: &FairQueue) {
        // It is dropped last, after a panic too: when the response goes out, the client's next request must find room.
        let mut assignment = Assignment::new(&self.completions, job.connection);
        let running = RunningRequest::new(queue, &job);
        let outgoing = match job.work {
            Work::Answer(call) => {
                if call.cancellation.is_cancelled() {
                    return;
                }
                let credential = running.ticket.credential;
                if call.destination == Destination::Console
                    && credential.is_none_or(|digest| self.known.find(&digest).is_none())
                    && let RequestIdentity::Known(lane) = self.service.identify(&call)
                    && let Some(digest) = credential
                {
                    self.known.remember(digest, lane.name.into());
                }
                self.completions
                    .outgoing(&call, self.service.answer(&call, &running))
            }
            Work::Piece(mut rest, header) => match rest.next() {
                Ok(Some(piece)) => {
                    // An empty chunk would end the response.
                    let bytes = if piece.is_empty() {
                        piece
                    } else {
                        chunk(&piece)
                    };
                    Outgoing {
                        rest: Some(rest),
                        ..Outgoing::new(bytes, header)
                    }
                }
                Ok(None) => Outgoing::new(chunk(b""), header),
                // The connection is closed, so the client sees that this response is incomplete.
                Err(_) => return,
            },
        };
        assignment.outgoing = Some(outgoing);
    }
}

/// A panic ends what a thread does for one connection, not the thread. Its message is in the log.
pub(super) fn contain_panic(work: impl FnOnce()) {
    let _ = panic::catch_unwind(AssertUnwindSafe(work));
}

/// Counts a request as running until it is dropped, by a panic too.
pub struct RunningRequest<'a> {
    queue: &'a FairQueue,
    ticket: Ticket,
    bytes: usize,
}

impl<'a> RunningRequest<'a> {
    pub(super) fn new(queue: &'a FairQueue, job: &Job) -> Self {
        Self {
            queue,
            ticket: job.ticket.clone(),
            bytes: job.bytes(),
        }
    }

    /// Sets the limit on concurrent requests of its key, as soon as it is read.
    pub fn set_limit(&self, limit: Option<u32>) {
        self.queue.set_limit(&self.ticket.lane, limit);
    }
}

impl Drop for RunningRequest<'_> {
    fn drop(&mut self) {
        self.queue.finish(&self.ticket, self.bytes);
    }
}

/// The responses that the threads have finished, each with the number of its connection.
pub(super) struct Completions {
    queue: Mutex<Vec<(usize, Outgoing)>>,
    waker: Arc<Waker>,
    stopping: AtomicBool,
}

impl Completions {
    pub fn new(waker: Arc<Waker>) -> Self {
        Self {
            queue: Mutex::default(),
            waker,
            stopping: AtomicBool::new(false),
        }
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
        Outgoing::of(
            response,
            &call.request.head,
            is_body_read,
            self.stopping.load(Ordering::Acquire),
        )
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
        Self {
            completions,
            connection,
            outgoing,
        }
    }
}

impl Drop for Assignment<'_> {
    fn drop(&mut self) {
        if let Some(outgoing) = self.outgoing.take() {
            self.completions.push(self.connection, outgoing);
        }
    }
}
