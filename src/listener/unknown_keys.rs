//! The thread that looks up unknown keys. It answers requests without a valid key at once and moves
//! the others to the lane of their key, so that neither waits for a worker to find out.

use std::time::{Duration, Instant};

use super::connection::Outgoing;
use super::load::LoadEvent;
use super::queue::{Job, TakeError};
use super::running_request::{RunningRequest, contain_panic};
use super::state::ListenerState;
use super::{Lane, Service};
use crate::error::{Failure, FailureCause};

/// The interval at which the limits of the keys whose requests wait or run are read.
const LIMITS_INTERVAL: Duration = Duration::from_secs(1);

/// Looks up unknown keys, one at a time, and once a second the limits of those that have requests.
pub(super) fn run<S: Service>(state: &ListenerState, service: &S) {
    let mut next_limits = Instant::now();
    loop {
        let taken = state.unknown_keys.take(Some(next_limits));
        state.note_look_up(true);
        match taken {
            Ok(job) => contain_panic(|| look_up(state, service, job)),
            Err(TakeError::Timeout) => {
                next_limits = Instant::now() + LIMITS_INTERVAL;
                contain_panic(|| read_limits(state, service));
            }
            Err(TakeError::Closed) => return,
        }
        state.note_look_up(false);
    }
}

/// Moves a request to the lane of its key, or answers it.
fn look_up(state: &ListenerState, service: &impl Service, job: Job) {
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
                // The worker that takes it from the queue answers.
                running.response = None;
            }
        }
        Err(response) => running.response = Some(state.encode(pending, response)),
        Ok(None) => {}
    }
}

/// Moves a request to the lane of its key. If that is full, answers the one that is shed.
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
            Failure::shed(FailureCause::QueueFull),
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
