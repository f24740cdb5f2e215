//! The threads that respond to requests: the API's workers, the thread that looks up unknown keys,
//! and the console's.

use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use threadpool::ThreadPool;

use super::admission::{Destination, Lane, PendingRequest};
use super::connection::Outgoing;
use super::load::LoadEvent;
use super::queue::{FairQueue, Job, TakeError};
use super::service::{RunningRequest, Service};
use super::state::{CONSOLE_CAPACITY, ListenerState};
use crate::error::{Failure, FailureCause};
use crate::http::Response;
use crate::thread_pool;

/// While the API is busy, a console thread pauses after each job for this many times as long as the
/// job took, a quarter of a second at most. Without it, constant use of the console cost the API
/// 30 % of its rate (`make bench-console`).
const CONSOLE_PAUSE: u32 = 19;
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// The interval at which the limits of the keys whose requests wait or run are read.
const LIMITS_INTERVAL: Duration = Duration::from_secs(1);

type ThreadMain<S> = fn(&ListenerState, &S);

/// Starts the threads of all queues. They end when the queues are closed.
pub(super) fn start<S: Service>(
    state: &Arc<ListenerState>,
    service: &Arc<S>,
) -> io::Result<Vec<ThreadPool>> {
    let groups: [(&str, usize, ThreadMain<S>); 3] = [
        ("worker", state.limits.workers, work_for_api),
        ("unknown-keys", 1, look_up_unknown_keys),
        ("console", CONSOLE_CAPACITY.threads, work_for_console),
    ];
    let start = |(name, count, run): (&str, usize, ThreadMain<S>)| {
        let pool = thread_pool::start(name, count)?;
        for _ in 0..count {
            let (state, service) = (Arc::clone(state), Arc::clone(service));
            pool.execute(move || run(&state, &service));
        }
        Ok(pool)
    };
    groups
        .into_iter()
        .map(start)
        .collect::<io::Result<_>>()
        .inspect_err(|_| state.close())
}

fn work_for_api<S: Service>(state: &ListenerState, service: &S) {
    while let Ok(job) = state.api.take(None) {
        state.note_work();
        contain_panic(|| serve(state, service, &state.api, job));
    }
}

fn work_for_console<S: Service>(state: &ListenerState, service: &S) {
    while let Ok(job) = state.console.take(None) {
        let started = Instant::now();
        contain_panic(|| serve(state, service, &state.console, job));
        if state.api.load() != (0, 0) {
            thread::sleep((started.elapsed() * CONSOLE_PAUSE).min(LONGEST_PAUSE));
        }
    }
}

/// Takes a request from its first step to its response. After an early return the connection
/// closes.
fn serve(state: &ListenerState, service: &impl Service, queue: &FairQueue, job: Job) {
    let mut running = RunningRequest::new(state, queue, &job);
    let pending = job.pending;
    if pending.cancellation.is_cancelled() {
        return;
    }
    if let Destination::Console(session) = pending.admission.destination
        && session.is_none_or(|digest| state.credentials.use_lane(&digest).is_none())
        && let Ok(Some(lane)) = service.identify(&pending)
        && let Some(digest) = session
    {
        state.credentials.insert(digest, lane.name.into());
    }
    running.response = Some(encode(state, &pending, service.respond(&pending, &running)));
}

fn encode(state: &ListenerState, pending: &PendingRequest, response: Response) -> Outgoing {
    let is_body_read = pending.request.body.is_some();
    Outgoing::encode(
        response,
        &pending.request.head,
        is_body_read,
        state.is_stopping(),
    )
}

/// Looks up unknown keys, one at a time, and once a second the limits of those that have requests.
fn look_up_unknown_keys<S: Service>(state: &ListenerState, service: &S) {
    let mut next_limits = Instant::now();
    loop {
        let taken = state.unknown_keys.take(Some(next_limits));
        state.note_look_up(true);
        match taken {
            Ok(job) => contain_panic(|| look_up_key(state, service, job)),
            Err(TakeError::Timeout) => {
                next_limits = Instant::now() + LIMITS_INTERVAL;
                contain_panic(|| read_limits(state, service));
            }
            Err(TakeError::Closed) => return,
        }
        state.note_look_up(false);
    }
}

/// Moves a request to the lane of its key, or refuses it.
fn look_up_key(state: &ListenerState, service: &impl Service, job: Job) {
    let mut running = RunningRequest::new(state, &state.unknown_keys, &job);
    let Some(pending) = job
        .pending()
        .filter(|pending| !pending.cancellation.is_cancelled())
    else {
        return;
    };
    match service.identify(pending) {
        Ok(Some(lane)) => {
            let cancellation = pending.cancellation.clone();
            if let Some(digest) = pending.admission.destination.credential() {
                state.credentials.insert(digest, lane.name.as_str().into());
            }
            move_to_lane(state, service, job, lane);
            // The loop, which cancels before it searches the queues, may have found nothing there.
            let is_removed = cancellation.is_cancelled() && state.remove(&cancellation);
            if !is_removed {
                // The worker that takes it from the queue responds.
                running.response = None;
            }
        }
        Err(response) => running.response = Some(encode(state, pending, response)),
        Ok(None) => {}
    }
}

/// Moves a request to the lane of its key. If the queue is full, refuses the one that is shed, as
/// `refuse_shed` does on the event loop.
fn move_to_lane(state: &ListenerState, service: &impl Service, job: Job, lane: Lane) {
    let name = Some(lane.name.into());
    let shed = state.api.push(Job {
        lane: Option::clone(&name),
        ..job
    });
    state.api.set_limit(&name, lane.limit);
    if let Some(job) = &shed
        && let Some(pending) = job.pending()
    {
        state.count(LoadEvent::QueueFull);
        let response = service.refuse(
            pending.request.client.peer,
            Some(pending.admission.destination),
            Failure::overloaded(FailureCause::QueueFull),
        );
        state.complete(job.connection, Outgoing::last(&response, false));
    }
}

/// Reads the limits of the keys that have requests. A key that is no longer valid is unknown again.
fn read_limits(state: &ListenerState, service: &impl Service) {
    let used = state.api.take_used_lanes();
    if used.is_empty() {
        return;
    }
    let Some(found) = service.lanes(&used) else {
        return;
    };
    for name in used {
        match found.iter().find(|lane| *lane.name == *name) {
            Some(lane) => state.api.set_limit(&Some(name), lane.limit),
            None => state.credentials.remove_lane(&name),
        }
    }
}

/// A panic ends what a thread does for one connection, not the thread. Its message is in the log.
fn contain_panic(work: impl FnOnce()) {
    let _ = panic::catch_unwind(AssertUnwindSafe(work));
}
