//! The lanes of a queue, without its lock: the request that runs next, and the one that is shed.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::listener::admission::PendingRequest;
use crate::network::ClientNetwork;

/// The lanes, networks and credentials that are kept without a request: unknown clients can't use
/// up the memory.
pub const MAX_CACHED: usize = 1024;

/// A lane's name; `None` is the lane that all unknown clients share.
pub type LaneName = Option<Arc<str>>;

/// The work of a thread for one connection.
pub struct Job {
    pub connection: usize,
    pub lane: LaneName,
    pub pending: Box<PendingRequest>,
}

impl Job {
    pub fn pending(&self) -> Option<&PendingRequest> {
        Some(&self.pending)
    }

    pub fn is_exclusive(&self) -> bool {
        self.pending()
            .is_some_and(|pending| pending.admission.exclusive)
    }

    pub fn client_network(&self) -> Option<ClientNetwork> {
        self.pending()?.admission.client_network
    }

    /// The memory of its request.
    pub fn bytes(&self) -> usize {
        self.pending()
            .map_or(0, |pending| pending.request.held_bytes())
    }
}

/// The limits of a queue.
#[derive(Clone, Copy)]
pub struct Capacity {
    pub threads: usize,
    /// Requests that may wait, beside those that a free thread takes at once.
    pub waiting: usize,
    /// Requests of unknown clients among these.
    pub unknown: usize,
    /// A key may have a limit.
    pub has_limits: bool,
}

pub struct QueueState {
    pub capacity: Capacity,
    pub lanes: HashMap<LaneName, LaneState>,
    /// The lanes with waiting requests, in the order of their turns.
    pub turns: VecDeque<LaneName>,
    pub waiting: usize,
    pub running: usize,
    exclusive_runs: bool,
    /// Threads that wait for a request.
    pub idle: usize,
    pub is_closed: bool,
    /// The number of requests that each unknown client has sent.
    pub sent: HashMap<ClientNetwork, u64>,
}

#[derive(Default)]
pub struct LaneState {
    pub waiting: VecDeque<Job>,
    pub running: usize,
    /// The memory of its requests, of those that run too.
    pub bytes: usize,
    pub limit: Option<u32>,
    /// The limit was read while the lane had requests. Until it is, one request runs alone: the
    /// limit may have been changed.
    pub is_limit_read: bool,
    pub shed: u64,
    /// It had a request since the keys in use were last taken.
    pub was_used: bool,
}

impl LaneState {
    pub fn has_no_requests(&self) -> bool {
        self.waiting.is_empty() && self.running == 0
    }

    pub fn can_shed(&self) -> bool {
        self.waiting
            .back()
            .is_some_and(|newest| newest.pending().is_some())
    }
}

impl QueueState {
    pub fn new(capacity: Capacity) -> Self {
        Self {
            capacity,
            lanes: HashMap::new(),
            turns: VecDeque::new(),
            waiting: 0,
            running: 0,
            exclusive_runs: false,
            idle: 0,
            is_closed: false,
            sent: HashMap::new(),
        }
    }

    /// A lane stays when it is not used, as long as there are not too many.
    pub fn lane(&mut self, name: &LaneName) -> &mut LaneState {
        if self.lanes.len() > MAX_CACHED && !self.lanes.contains_key(name) {
            self.lanes.retain(|_, lane| !lane.has_no_requests());
        }
        self.lanes.entry(name.clone()).or_default()
    }

    /// Adds a request. Under overload, if the queue is full, chooses one to be shed and returns it,
    /// for the caller to refuse. [`Self::shed`] has the choice within a lane, which
    /// `EventLoop::reserve_bytes` uses too, if memory is short.
    pub fn push(&mut self, job: Job) -> Option<Job> {
        let (name, is_request) = (job.lane.clone(), job.pending().is_some());
        if name.is_none()
            && let Some(network) = job.client_network()
        {
            self.count_request(network);
        }
        let lane = self.lane(&name);
        lane.bytes += job.bytes();
        lane.waiting.push_back(job);
        lane.was_used = true;
        let in_lane = lane.waiting.len();
        self.waiting += 1;
        if !self.turns.contains(&name) {
            self.turns.push_back(name.clone());
        }
        let free = self.capacity.threads.saturating_sub(self.running);
        if name.is_none() && in_lane > self.capacity.unknown + free {
            return self.shed(&name);
        }
        let is_full = self.waiting - self.eligible(true).min(free) > self.capacity.waiting;
        if is_full && is_request {
            self.longest_lane(&name)
                .and_then(|longest| self.shed(&longest))
        } else {
            None
        }
    }

    /// Takes the next request of the lane whose turn it is.
    pub fn take_next(&mut self) -> Option<Job> {
        let turn = self
            .turns
            .iter()
            .position(|name| self.eligible_in_lane(name, false) > 0)?;
        let name = self.turns.remove(turn)?;
        let lane = self.lane(&name);
        let job = lane.waiting.pop_front()?;
        lane.running += 1;
        if !lane.waiting.is_empty() {
            self.turns.push_back(name);
        }
        self.waiting -= 1;
        self.running += 1;
        self.exclusive_runs |= job.is_exclusive();
        Some(job)
    }

    /// Counts a request of this many bytes as finished.
    pub fn finish(&mut self, name: &LaneName, is_exclusive: bool, bytes: usize) {
        self.exclusive_runs &= !is_exclusive;
        self.running -= 1;
        let lane = self.lane(name);
        lane.running -= 1;
        lane.bytes -= bytes;
        self.settle_lane(name);
    }

    /// Removes a waiting request from its place in a lane.
    pub fn remove(&mut self, name: &LaneName, place: usize) -> Option<Job> {
        let lane = self.lane(name);
        let removed = lane.waiting.remove(place)?;
        lane.bytes -= removed.bytes();
        self.waiting -= 1;
        self.settle_lane(name);
        Some(removed)
    }

    /// Sheds the newest request of a lane; in the lane of unknown clients, the newest of the client
    /// that has sent most. If several clients have sent the same number, their newest request.
    pub fn shed(&mut self, name: &LaneName) -> Option<Job> {
        let lane = self.lanes.get_mut(name)?;
        lane.shed += 1;
        let sent = |job: &Job| {
            let network = job.client_network().filter(|_| name.is_none())?;
            self.sent.get(&network)
        };
        let waiting = lane.waiting.iter().enumerate();
        let (place, _) = waiting.max_by_key(|(_, job)| sent(job))?;
        self.remove(name, place)
    }

    /// Returns how many requests could run now; if `soon`, as if all limits had just been read.
    pub fn eligible(&self, soon: bool) -> usize {
        let eligible = |name| self.eligible_in_lane(name, soon);
        self.turns.iter().map(eligible).sum()
    }

    /// Returns how many requests of a lane could run now. It may be fewer: of several exclusive
    /// requests only one can.
    fn eligible_in_lane(&self, name: &LaneName, soon: bool) -> usize {
        let lane = &self.lanes[name];
        if self.exclusive_runs && lane.waiting.front().is_some_and(Job::is_exclusive) {
            return 0;
        }
        let is_limit_good = soon || lane.is_limit_read || !self.capacity.has_limits;
        let limit = if is_limit_good { lane.limit } else { Some(1) };
        let left = limit.map_or(usize::MAX, |limit| {
            (limit as usize).saturating_sub(lane.running)
        });
        lane.waiting.len().min(left)
    }

    /// The lane with the most waiting, of those whose newest request can be shed: of several, that
    /// of the newcomer.
    fn longest_lane(&self, newcomer: &LaneName) -> Option<LaneName> {
        let length = |name: &&LaneName| (self.lanes[*name].waiting.len(), *name == newcomer);
        self.turns
            .iter()
            .filter(|name| self.lanes[*name].can_shed())
            .max_by_key(length)
            .cloned()
    }

    fn count_request(&mut self, network: ClientNetwork) {
        if self.sent.len() >= MAX_CACHED && !self.sent.contains_key(&network) {
            // A client that floods is soon ahead of the others again.
            self.sent.clear();
        }
        *self.sent.entry(network).or_default() += 1;
    }

    /// Takes the turn of a lane if nothing waits in it. If nothing runs, its limit has to be read
    /// again.
    fn settle_lane(&mut self, name: &LaneName) {
        let lane = self.lane(name);
        lane.is_limit_read &= lane.running > 0;
        if lane.waiting.is_empty() {
            self.turns.retain(|other| other != name);
        }
    }
}
