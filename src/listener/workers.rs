//! The threads that answer requests: the API's workers, the thread that looks up strangers, and the console's.

use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use threadpool::ThreadPool;

use super::completions::{Assignment, Completions, Outgoing};
use super::job::{Job, Work};
use super::lane::KnownLanes;
use super::load::Load;
use super::queue::{FairQueue, Room};
use super::{Destination, Listener, PendingRequest, Pulse, RequestIdentity, Service, Ticket};
use crate::client::Cancellation;
use crate::http::response::{ConnectionHeader, Pieces, chunk};

/// The console has two threads of its own, so that no page delays a completion. More would only use more memory.
pub(super) const CONSOLE_ROOM: Room = Room { threads: 2, places: 16, strangers: 4, has_limits: false };

/// While the API is busy, a console thread pauses after each job for this many times as long as the job took, a quarter of a
/// second at most. Without it, constant use of the console cost the API 30 % of its rate (`make bench-console`).
const CONSOLE_PAUSE: u32 = 19;
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

pub(super) struct Workers<S> {
    shared: Arc<WorkerState<S>>,
    threads: Vec<ThreadPool>,
}

/// The state that all threads share.
pub(super) struct WorkerState<S> {
    pub service: Arc<S>,
    pub load: Arc<Load>,
    pub pulse: Arc<Pulse>,
    pub completions: Completions,
    pub known: KnownLanes,
}

impl<S: Service> Workers<S> {
    pub fn start(listener: &Listener, service: Arc<S>) -> Self {
        let shared = Arc::new(WorkerState {
            service,
            load: Arc::clone(&listener.load),
            pulse: Arc::clone(&listener.pulse),
            completions: Completions::new(Arc::clone(&listener.waker)),
            known: KnownLanes::default(),
        });
        let start = |name: &str, count, run: fn(&WorkerState<S>)| {
            let threads = threadpool::Builder::new().num_threads(count).thread_name(name.into()).build();
            for _ in 0..count {
                let shared = Arc::clone(&shared);
                threads.execute(move || run(&shared));
            }
            threads
        };
        let threads = vec![
            start("worker", listener.limits.workers, WorkerState::work_for_api),
            start("strangers", 1, WorkerState::look_up_strangers),
            start("console", CONSOLE_ROOM.threads, WorkerState::work_for_console),
        ];
        Self { shared, threads }
    }

    /// Queues a complete request for a thread. Returns one for which there is no room; this may be the one.
    pub fn answer(&self, connection: usize, call: PendingRequest, ticket: Ticket) -> Option<Job> {
        let WorkerState { load, known, .. } = &*self.shared;
        let known = ticket.credential.and_then(|digest| known.find(&digest));
        let queue = match call.destination {
            Destination::Api(_) if known.is_some() => &load.queue,
            Destination::Api(_) => &load.strangers,
            Destination::Console => &load.console,
        };
        let ticket = Ticket { lane: known.or(ticket.lane), ..ticket };
        queue.push(Job { connection, ticket, work: Work::Answer(call) })
    }

    /// Removes a request if it waits. Returns whether it did.
    pub fn remove(&self, call: &Cancellation) -> bool {
        self.queues().iter().any(|queue| queue.remove(|job| job.is_cancelled_by(call)).is_some())
    }

    /// Removes a request from the queue before a worker takes it.
    pub fn take_waiting(&self) -> Option<Job> {
        let Load { strangers, queue, .. } = &*self.shared.load;
        strangers.remove(|_| true).or_else(|| queue.remove(|_| true))
    }

    /// Makes the next piece of a long response. Each connection has at most one in the queue.
    pub fn make_next_piece(&self, connection: usize, rest: Box<dyn Pieces>, header: ConnectionHeader) {
        let ticket = Ticket { lane: Some("pieces".into()), is_begun: true, ..Ticket::default() };
        self.shared.load.console.push(Job { connection, ticket, work: Work::Piece(rest, header) });
    }

    pub fn completions(&self) -> &Completions {
        &self.shared.completions
    }

    /// Ends the threads, after the last request.
    pub fn join(&self) {
        self.queues().iter().for_each(|queue| queue.close());
        self.threads.iter().for_each(ThreadPool::join);
    }

    fn queues(&self) -> [&FairQueue; 3] {
        let Load { strangers, queue, console, .. } = &*self.shared.load;
        [strangers, queue, console]
    }
}

impl<S: Service> WorkerState<S> {
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
        let Job { connection, ticket, work } = job;
        // It is dropped last, after a panic too: when the response goes out, the client's next request must find room.
        let mut assignment = Assignment::new(&self.completions, connection);
        let running = RunningCall { queue, ticket };
        let outgoing = match work {
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
                self.completions.outgoing(&call, self.service.answer(&call, &running))
            }
            Work::Piece(mut rest, header) => match rest.next() {
                Ok(Some(piece)) => {
                    // An empty chunk would end the response.
                    let bytes = if piece.is_empty() { piece } else { chunk(&piece) };
                    Outgoing { rest: Some(rest), ..Outgoing::new(bytes, header) }
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
pub struct RunningCall<'a> {
    pub(super) queue: &'a FairQueue,
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
