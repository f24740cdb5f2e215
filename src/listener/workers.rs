//! The threads that answer requests: the API's workers, the thread that looks up strangers, and the console's.

use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use mio::Waker;
use threadpool::ThreadPool;

use super::completions::{Assignment, Completions, Outgoing};
use super::connection::AfterResponse;
use super::job::{Job, RequestBytes, Work};
use super::lane::KnownLanes;
use super::limits::Limits;
use super::load::Load;
use super::queue::{FairQueue, Room};
use super::{Destination, PendingRequest, Pulse, RequestIdentity, Service, Ticket};
use crate::client::Cancellation;
use crate::http::response::{Pieces, chunk};

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
    pub queue: Arc<FairQueue>,
    pub completions: Arc<Completions>,
    pub known: Arc<KnownLanes>,
    is_for_console: bool,
}

impl<S: Service> Workers<S> {
    pub fn start(
        limits: &Limits,
        service: Arc<S>,
        waker: Arc<Waker>,
        pulse: &Arc<Pulse>,
        load: &Arc<Load>,
    ) -> Self {
        let completions = Completions::new(waker, pulse, load);
        let known = Arc::default();
        let group = |queue: &Arc<FairQueue>, is_for_console| {
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
        let bytes = RequestBytes::new(&self.api.completions.load, call.request.held_bytes());
        queue.push(Job { connection, ticket, is_known, work: Work::Answer(call, bytes) })
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
        self.console.queue.push(Job { connection, ticket, is_known: false, work: Work::Piece(rest, after) });
    }

    pub fn completions(&self) -> &Completions {
        &self.api.completions
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
        while let Ok(job) = self.queue.take(None) {
            let started = Instant::now();
            if !self.is_for_console {
                self.completions.pulse.work_started();
            }
            contain_panic(|| self.serve(job));
            if self.is_for_console && self.completions.load.queue.load() != (0, 0) {
                thread::sleep((started.elapsed() * CONSOLE_PAUSE).min(LONGEST_PAUSE));
            }
        }
    }

    fn serve(&self, job: Job) {
        let Job { connection, ticket, is_known, work, .. } = job;
        // Its response goes out last, after a panic too: the client's next request must find room.
        let assignment = Assignment::new(&self.completions, connection);
        let running = RunningCall { queue: &self.queue, ticket };
        let outgoing = match work {
            Work::Answer(call, _bytes) => {
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
                Some(self.completions.outgoing(&call, self.service.answer(&call, &running)))
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
