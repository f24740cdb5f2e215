//! The thread that looks up strangers: requests whose key the queue does not know. It answers those without a valid key
//! at once and moves the others to the lane of their key, so that neither waits for a worker to find out.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::connection::Outgoing;
use super::load::LoadEvent;
use super::queue::{Job, Name, NoJob, REMEMBERED};
use super::workers::{Assignment, RunningRequest, Workers, contain_panic};
use super::{Lane, RequestIdentity, Service};
use crate::error::{Failure, FailureCause};
use crate::mutex::lock;
use crate::secret::SecretDigest;

/// The interval at which the limits of the keys whose requests wait or run are read.
const LIMITS_INTERVAL: Duration = Duration::from_secs(1);

impl<S: Service> Workers<S> {
    /// Looks up the keys of strangers, one at a time, and once a second the limits of those that have requests.
    pub fn look_up_strangers(&self) {
        let mut next_limits = Instant::now();
        loop {
            match self.load.strangers.take(Some(next_limits)) {
                Ok(job) => {
                    let _busy = self.pulse.start_look_up();
                    contain_panic(|| self.look_up(job));
                }
                Err(NoJob::Late) => {
                    next_limits = Instant::now() + LIMITS_INTERVAL;
                    let _busy = self.pulse.start_look_up();
                    contain_panic(|| self.read_limits());
                }
                Err(NoJob::Closed) => return,
            }
        }
    }

    /// Moves a request to the lane of its key, or answers it.
    fn look_up(&self, job: Job) {
        let mut assignment = Assignment::new(&self.completions, job.connection);
        let _running = RunningRequest::new(&self.load.strangers, &job);
        let Some(call) = job.call().filter(|call| !call.cancellation.is_cancelled()) else {
            return;
        };
        match self.service.identify(call) {
            RequestIdentity::Known(lane) => {
                let cancellation = call.cancellation.clone();
                self.admit(job, &lane);
                // The loop, which cancels before it searches the queues, may have found nothing there.
                let is_left = cancellation.is_cancelled()
                    && self
                        .load
                        .queue
                        .remove(|job| job.is_cancelled_by(&cancellation))
                        .is_some();
                if !is_left {
                    // The worker that takes it from the queue answers.
                    assignment.outgoing = None;
                }
            }
            RequestIdentity::Refused(response) => {
                assignment.outgoing = Some(self.completions.outgoing(call, *response));
            }
            RequestIdentity::Unknown => {}
        }
    }

    fn admit(&self, mut job: Job, lane: &Lane) {
        let name: Arc<str> = lane.name.as_str().into();
        if let Some(digest) = job.ticket.credential {
            self.known.remember(digest, Arc::clone(&name));
        }
        job.ticket.lane = Some(name);
        let of_key = job.ticket.lane.clone();
        if let Some(job) = self.load.queue.push(job) {
            self.shed(&job);
        }
        self.load.queue.set_limit(&of_key, lane.limit);
    }

    /// Answers a request for which there is no room in the lane of its key.
    fn shed(&self, job: &Job) {
        let Some(call) = job.call() else { return };
        self.load.count(LoadEvent::QueueFull);
        let failure = Failure::shed(FailureCause::QueueFull);
        let response = self
            .service
            .refuse(call.request.client.peer, Some(call), failure);
        self.completions
            .push(job.connection, Outgoing::last(&response, false));
    }

    /// Reads the limits of the keys that have requests. A key that is no longer valid is a stranger again.
    fn read_limits(&self) {
        let used = self.load.queue.used_lanes();
        let found = (!used.is_empty())
            .then(|| self.service.lanes(&used))
            .flatten();
        for name in used.iter().filter(|_| found.is_some()) {
            match found.iter().flatten().find(|lane| *lane.name == **name) {
                Some(lane) => self
                    .load
                    .queue
                    .set_limit(&Some(Arc::clone(name)), lane.limit),
                None => self.known.forget(name),
            }
        }
    }
}

/// The digests of keys and sessions that were accepted lately, with their lanes and when they were last used.
#[derive(Default)]
pub(super) struct KnownLanes(Mutex<HashMap<SecretDigest, (Arc<str>, Instant)>>);

impl KnownLanes {
    pub fn find(&self, digest: &SecretDigest) -> Name {
        let mut lanes = lock(&self.0);
        let (name, used) = lanes.get_mut(digest)?;
        *used = Instant::now();
        Some(Arc::clone(name))
    }

    pub fn remember(&self, digest: SecretDigest, name: Arc<str>) {
        let mut lanes = lock(&self.0);
        lanes.insert(digest, (name, Instant::now()));
        if lanes.len() > REMEMBERED {
            let oldest = lanes
                .iter()
                .min_by_key(|(_, (_, used))| *used)
                .map(|(digest, _)| *digest);
            oldest.and_then(|digest| lanes.remove(&digest));
        }
    }

    pub fn forget(&self, name: &str) {
        lock(&self.0).retain(|_, (other, _)| **other != *name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thousand_digests_are_remembered() {
        let known = KnownLanes::default();
        let digest = |number: usize| SecretDigest::of(&number.to_string());
        (0..REMEMBERED).for_each(|number| known.remember(digest(number), "a".into()));
        assert!(known.find(&digest(0)).is_some(), "this use counts");
        known.remember(digest(REMEMBERED), "b".into());
        assert_eq!(
            (known.find(&digest(1)), known.find(&digest(0)).as_deref()),
            (None, Some("a"))
        );
        known.forget("a");
        assert_eq!(
            (
                known.find(&digest(0)),
                known.find(&digest(REMEMBERED)).as_deref()
            ),
            (None, Some("b"))
        );
    }
}
