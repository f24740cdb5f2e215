//! The thread that looks up strangers: requests whose key the queue does not know. It answers those without a valid key at once
//! and moves the others to the lane of their key, so that neither waits for a worker to find out.

use std::time::{Duration, Instant};

use super::connection::Then;
use super::load::Cause;
use super::queue::StrangerTask;
use super::workers::{Assignment, Job, Outgoing, ThreadGroup, outlive_panic};
use super::{Identity, Service};
use crate::error::Failure;
use crate::http::response;

/// How often the limits of the keys whose requests wait or run are read.
const LIMITS_INTERVAL: Duration = Duration::from_secs(1);

impl<S: Service> ThreadGroup<S> {
    /// Looks up the keys of strangers, one at a time, and once a second the limits of those that have requests.
    pub fn look_up_strangers(&self) {
        let mut next_limits = Instant::now();
        loop {
            match self.queue.take_stranger(next_limits) {
                StrangerTask::LookUp(job) => {
                    let _busy = self.completions.pulse.start_look_up();
                    outlive_panic(|| self.look_up(job));
                }
                StrangerTask::Other => {
                    next_limits = Instant::now() + LIMITS_INTERVAL;
                    let _busy = self.completions.pulse.start_look_up();
                    outlive_panic(|| self.read_limits());
                }
                StrangerTask::End => return,
            }
        }
    }

    /// Moves a request to the lane of its key, or answers it.
    fn look_up(&self, job: Job) {
        let assignment = Assignment::new(&self.completions, job.connection);
        let Some(call) = job.call().filter(|call| !call.cancellation.is_cancelled()) else { return };
        match self.service.identify(call) {
            Identity::Known(lane) => {
                let cancellation = call.cancellation.clone();
                let shed = self.queue.admit(job, &lane);
                shed.iter().for_each(|job| self.shed(job));
                // The loop, which cancels before it searches the queue, may have found nothing there.
                let is_left = cancellation.is_cancelled()
                    && self.queue.remove(|job| job.is_cancelled_by(&cancellation)).is_some();
                if !is_left {
                    assignment.pass_on();
                }
            }
            Identity::Refused(response) => {
                let outgoing = self.respond(call, *response);
                drop(job);
                assignment.finish(Some(outgoing));
            }
            Identity::Unknown => {}
        }
    }

    /// Answers a request for which there is no room in the lane of its key.
    fn shed(&self, job: &Job) {
        let Some(call) = job.call() else { return };
        self.completions.load.count(Cause::QueueFull);
        let response = self.service.refuse(call.request.client.peer, Some(call), Failure::queue_full());
        let outgoing = Outgoing::new(response.encode(response::Connection::Close, false), Then::Close);
        Assignment::new(&self.completions, job.connection).finish(Some(outgoing));
    }

    fn read_limits(&self) {
        let used = self.queue.used_lanes();
        if let Some(found) = self.service.lanes(&used).filter(|_| !used.is_empty()) {
            self.queue.set_limits(&used, &found);
        }
    }
}
