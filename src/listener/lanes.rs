//! The lanes of one area, without a lock: which request runs next, and which one is shed.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::PendingRequest;
use crate::http::ClientNetwork;

/// The lanes and networks that are kept without a request: unknown clients can't use up the memory.
const MAX_KEPT: usize = 1024;

/// The name of a lane: the id of a key, the digest of a session or browser. `None` is the lane that
/// all unknown clients share.
pub(super) type LaneName = Option<Arc<str>>;

/// The limits of an area.
#[derive(Clone, Copy)]
pub(super) struct Capacity {
    pub threads: usize,
    /// Requests that may wait, beside those that a free thread takes at once.
    pub waiting: usize,
    /// Requests of unknown clients among these.
    pub unknown: usize,
}

pub(super) struct Lanes {
    capacity: Capacity,
    lanes: HashMap<LaneName, LaneState>,
    /// The lanes with waiting requests, in the order of their turns.
    turns: VecDeque<LaneName>,
    waiting: usize,
    running: usize,
    /// When a thread last took a request.
    started: Instant,
    /// The number of requests that each unknown client has sent.
    sent: HashMap<ClientNetwork, u64>,
}

#[derive(Default)]
struct LaneState {
    waiting: VecDeque<Box<PendingRequest>>,
    running: usize,
    /// The memory of its requests, of those that run too.
    bytes: usize,
    limit: Option<u32>,
    /// A request of the lane was authenticated, and one has run ever since. Until then one request
    /// runs alone: the limit may have been changed.
    is_authenticated: bool,
    shed: u64,
}

/// The requests of one key.
#[derive(Debug, PartialEq, Eq)]
pub struct LaneLoad {
    pub name: Arc<str>,
    pub waiting: usize,
    pub running: usize,
    pub limit: Option<u32>,
    /// Requests shed since the start.
    pub shed: u64,
    /// The age of the oldest request that waits.
    pub longest_wait: Option<Duration>,
}

/// The memory of a lane with waiting requests.
pub(super) struct LaneWeight {
    pub name: LaneName,
    pub bytes: usize,
    /// That of each waiting request, the newest last.
    pub waiting: Vec<usize>,
}

impl LaneState {
    fn has_no_requests(&self) -> bool {
        self.waiting.is_empty() && self.running == 0
    }

    /// Returns how many of its requests could run now; if `soon`, as if the limit had just been
    /// read.
    fn eligible(&self, soon: bool) -> usize {
        let limit = if self.is_authenticated || soon {
            self.limit.map_or(usize::MAX, |limit| limit as usize)
        } else {
            1
        };
        self.waiting.len().min(limit.saturating_sub(self.running))
    }
}

impl Lanes {
    pub fn new(capacity: Capacity) -> Self {
        Self {
            capacity,
            lanes: HashMap::new(),
            turns: VecDeque::new(),
            waiting: 0,
            running: 0,
            started: Instant::now(),
            sent: HashMap::new(),
        }
    }

    /// Adds a request to its lane. If there are too many, returns the one that is shed: of the
    /// unknown clients', if these are too many, else of the lane with the most waiting.
    pub fn push(&mut self, pending: Box<PendingRequest>) -> Option<Box<PendingRequest>> {
        let name = pending.lane.clone();
        if let (None, Some(network)) = (&name, pending.admission.network) {
            self.count_request(network);
        }
        let lane = self.lane(&name);
        lane.bytes += pending.bytes();
        lane.waiting.push_back(pending);
        self.waiting += 1;
        if !self.turns.contains(&name) {
            self.turns.push_back(name.clone());
        }
        let lane = &self.lanes[&name];
        let taken_at_once = lane.eligible(false).min(self.free());
        if name.is_none() && lane.waiting.len() - taken_at_once > self.capacity.unknown {
            return self.shed(&name);
        }
        if self.queued() <= self.capacity.waiting {
            return None;
        }
        // Ties: that of the newcomer.
        let length = |lane: &&LaneName| (self.lanes[*lane].waiting.len(), **lane == name);
        let longest = self.turns.iter().max_by_key(length)?.clone();
        self.shed(&longest)
    }

    /// Takes the next request of the lane whose turn it is. It counts as running until
    /// [`Self::finish`].
    pub fn take_next(&mut self) -> Option<Box<PendingRequest>> {
        let is_eligible = |name: &LaneName| self.lanes[name].eligible(false) > 0;
        let turn = self.turns.iter().position(is_eligible)?;
        let name = self.turns.remove(turn)?;
        let lane = self.lane(&name);
        let pending = lane.waiting.pop_front()?;
        lane.running += 1;
        if !lane.waiting.is_empty() {
            self.turns.push_back(name);
        }
        self.waiting -= 1;
        self.running += 1;
        self.started = Instant::now();
        Some(pending)
    }

    pub fn finish(&mut self, pending: &PendingRequest) {
        self.running -= 1;
        let lane = self.lane(&pending.lane);
        lane.running -= 1;
        lane.bytes -= pending.bytes();
        self.settle(&pending.lane);
    }

    /// Sets the limit of a lane whose key is valid, and lets as many of its requests run.
    pub fn set_limit(&mut self, name: &LaneName, limit: Option<u32>) {
        let lane = self.lane(name);
        lane.limit = limit;
        lane.is_authenticated = lane.running > 0;
    }

    /// Removes the waiting request of a connection.
    pub fn remove(&mut self, connection: usize) -> Option<Box<PendingRequest>> {
        let (name, place) = self.turns.iter().find_map(|name| {
            let mut waiting = self.lanes[name].waiting.iter();
            let place = waiting.position(|pending| pending.connection == connection)?;
            Some((name.clone(), place))
        })?;
        self.remove_at(&name, place)
    }

    /// Removes any waiting request.
    pub fn remove_any(&mut self) -> Option<Box<PendingRequest>> {
        let name = self.turns.front()?.clone();
        self.remove_at(&name, 0)
    }

    /// The memory of a lane's requests.
    pub fn bytes_of(&self, name: &LaneName) -> usize {
        self.lanes.get(name).map_or(0, |lane| lane.bytes)
    }

    /// The lanes from which requests can be shed.
    pub fn weights(&self) -> impl Iterator<Item = LaneWeight> {
        self.turns.iter().map(|name| {
            let lane = &self.lanes[name];
            LaneWeight {
                name: name.clone(),
                bytes: lane.bytes,
                waiting: lane.waiting.iter().map(|pending| pending.bytes()).collect(),
            }
        })
    }

    /// Removes the newest request of a lane and counts it as shed. The caller answers it.
    pub fn shed_newest(&mut self, name: &LaneName) -> Option<Box<PendingRequest>> {
        let lane = self.lane(name);
        lane.shed += 1;
        let newest = lane.waiting.len().checked_sub(1)?;
        self.remove_at(name, newest)
    }

    pub fn threads(&self) -> usize {
        self.capacity.threads
    }

    /// Returns how many requests run, and how many wait longer than until a free thread takes them.
    pub fn load(&self) -> (usize, usize) {
        (self.running, self.queued())
    }

    /// Returns how many waiting requests a thread may take now.
    pub fn eligible(&self) -> usize {
        let eligible = |name| self.lanes[name].eligible(false);
        self.turns.iter().map(eligible).sum()
    }

    /// Returns true if all threads are busy and none has taken a request since then: each of them
    /// has been with its request for longer.
    pub fn are_threads_busy_since(&self, time: Instant) -> bool {
        self.running >= self.capacity.threads && self.started < time
    }

    /// The keys that have a request here, or have had one shed.
    pub fn report(&self) -> Vec<LaneLoad> {
        let report = |(name, lane): (&LaneName, &LaneState)| {
            if lane.has_no_requests() && lane.shed == 0 {
                return None;
            }
            let oldest = lane.waiting.front();
            Some(LaneLoad {
                name: name.clone()?,
                waiting: lane.waiting.len(),
                running: lane.running,
                limit: lane.limit,
                shed: lane.shed,
                longest_wait: oldest.map(|pending| pending.received.elapsed()),
            })
        };
        self.lanes.iter().filter_map(report).collect()
    }

    fn free(&self) -> usize {
        self.capacity.threads.saturating_sub(self.running)
    }

    /// Returns how many requests wait, beside those that free threads take as soon as the limits of
    /// their lanes are read.
    fn queued(&self) -> usize {
        let soon = |name: &LaneName| self.lanes[name].eligible(name.is_some());
        self.waiting - self.turns.iter().map(soon).sum::<usize>().min(self.free())
    }

    /// A lane stays when it is not used, as long as there are not too many.
    fn lane(&mut self, name: &LaneName) -> &mut LaneState {
        if self.lanes.len() > MAX_KEPT && !self.lanes.contains_key(name) {
            self.lanes.retain(|_, lane| !lane.has_no_requests());
        }
        self.lanes.entry(name.clone()).or_default()
    }

    /// Sheds the newest request of a lane; in the lane of unknown clients, the newest of the client
    /// that has sent most. Ties: the newest.
    fn shed(&mut self, name: &LaneName) -> Option<Box<PendingRequest>> {
        if name.is_some() {
            return self.shed_newest(name);
        }
        let lane = self.lanes.get_mut(name)?;
        lane.shed += 1;
        let sent = |pending: &PendingRequest| self.sent.get(&pending.admission.network?);
        let waiting = lane.waiting.iter().enumerate();
        let (place, _) = waiting.max_by_key(|(_, pending)| sent(pending))?;
        self.remove_at(name, place)
    }

    fn remove_at(&mut self, name: &LaneName, place: usize) -> Option<Box<PendingRequest>> {
        let lane = self.lane(name);
        let removed = lane.waiting.remove(place)?;
        lane.bytes -= removed.bytes();
        self.waiting -= 1;
        self.settle(name);
        Some(removed)
    }

    fn count_request(&mut self, network: ClientNetwork) {
        if self.sent.len() >= MAX_KEPT && !self.sent.contains_key(&network) {
            // A client that floods is soon ahead of the others again.
            self.sent.clear();
        }
        *self.sent.entry(network).or_default() += 1;
    }

    /// Takes the turn of a lane if nothing waits in it. If nothing runs, its limit has to be read
    /// again.
    fn settle(&mut self, name: &LaneName) {
        let lane = self.lane(name);
        lane.is_authenticated &= lane.running > 0;
        if lane.waiting.is_empty() {
            self.turns.retain(|other| other != name);
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::net::IpAddr;

    use super::*;
    use crate::error::Failure;
    use crate::http::{ClientInfo, Request, RequestHead, Response};
    use crate::listener::{Admission, Area, Dispatcher, Lane, Service};

    pub struct NoService;

    impl Service for NoService {
        fn serves(&self, _: &ClientInfo, _: &RequestHead) -> bool {
            true
        }

        fn admit(&self, _: &ClientInfo, _: &RequestHead) -> Result<Admission, Response> {
            Ok(unknown())
        }

        fn look_up(&self, _: &PendingRequest) -> Result<Lane, Response> {
            unreachable!("no test asks for this")
        }

        fn respond(&self, _: &PendingRequest, _: &Dispatcher) -> Response {
            unreachable!("no test asks for this")
        }

        fn refuse(&self, _: Option<IpAddr>, _: Failure) -> Response {
            unreachable!("no test asks for this")
        }
    }

    /// The admission of a request of an unknown client.
    pub fn unknown() -> Admission {
        Admission {
            area: Area::Console,
            credential: None,
            lane: None,
            network: None,
        }
    }

    /// A request that is known by the number of its connection.
    pub fn request(connection: usize, admission: Admission) -> Box<PendingRequest> {
        let head = "GET / HTTP/1.1\r\nHost: h\r\n\r\n";
        let request = Request {
            head: RequestHead::parse(head.as_bytes()).expect("a good head"),
            body: Some(Vec::new()),
            client: ClientInfo::default(),
        };
        let lane = admission.lane.clone();
        Box::new(PendingRequest {
            connection,
            lane,
            ..PendingRequest::new(request, admission, Arc::new(NoService))
        })
    }

    pub fn in_lane(name: &str) -> Admission {
        Admission {
            lane: Some(name.into()),
            ..unknown()
        }
    }

    /// The lanes of an area, its threads, and the limits of the keys.
    struct TestPool {
        lanes: Lanes,
        running: Vec<PendingRequest>,
        limits: HashMap<&'static str, Option<u32>>,
        shed: Vec<usize>,
    }

    impl TestPool {
        fn new(threads: usize, waiting: usize) -> Self {
            Self {
                lanes: Lanes::new(Capacity {
                    threads,
                    waiting,
                    unknown: waiting / 4,
                }),
                running: Vec::new(),
                limits: HashMap::new(),
                shed: Vec::new(),
            }
        }

        fn push(&mut self, admission: Admission, number: usize) {
            let shed = self.lanes.push(request(number, admission));
            self.shed.extend(shed.map(|shed| shed.connection));
        }

        /// Lets a free thread take a request, if there are both.
        fn run_next(&mut self) -> bool {
            let is_free = self.running.len() < self.lanes.threads();
            let taken = is_free.then(|| self.lanes.take_next()).flatten();
            let is_taken = taken.is_some();
            self.running.extend(taken.map(|taken| *taken));
            is_taken
        }

        /// Authenticates a request that runs.
        fn authenticate(&mut self, place: usize) {
            let lane = self.running[place].lane.clone();
            if let Some(name) = &lane {
                let limit = self.limits.get(&**name).copied().flatten();
                self.lanes.set_limit(&lane, limit);
            }
        }

        /// Lets all threads do what they can.
        fn settle(&mut self) {
            while self.run_next() {
                (0..self.running.len()).for_each(|place| self.authenticate(place));
            }
        }

        fn finish(&mut self, place: usize) -> usize {
            let pending = self.running.remove(place);
            self.lanes.finish(&pending);
            pending.connection
        }

        fn remove(&mut self, number: usize) -> bool {
            self.lanes.remove(number).is_some()
        }

        fn running_of(&self, name: &str) -> usize {
            let is_of = |pending: &&PendingRequest| pending.lane.as_deref() == Some(name);
            self.running.iter().filter(is_of).count()
        }

        /// Serves everything, and returns the order.
        fn order(&mut self) -> Vec<usize> {
            let mut order = Vec::new();
            self.settle();
            while !self.running.is_empty() {
                order.push(self.finish(0));
                self.settle();
            }
            order
        }
    }

    #[test]
    fn lanes_take_turns() {
        let mut pool = TestPool::new(1, 100);
        for (admission, numbers) in [
            (in_lane("a"), 1..=6),
            (in_lane("b"), 11..=13),
            (unknown(), 21..=22),
            (in_lane("c"), 31..=31),
        ] {
            numbers.for_each(|number| pool.push(admission.clone(), number));
        }
        assert_eq!(pool.order(), [1, 11, 21, 31, 2, 12, 22, 3, 13, 4, 5, 6]);
        assert_eq!((pool.lanes.load(), pool.shed.len()), ((0, 0), 0));
        assert!(
            pool.lanes.report().is_empty(),
            "a lane that is not used is not reported"
        );
    }

    #[test]
    fn the_newest_of_the_longest_lane_is_shed() {
        let mut pool = TestPool::new(1, 4);
        pool.push(in_lane("a"), 1);
        pool.settle();
        (2..=5).for_each(|number| pool.push(in_lane("a"), number));
        assert!(pool.shed.is_empty(), "one runs, and four wait");
        pool.push(in_lane("a"), 6);
        assert_eq!(pool.shed, [6], "of one lane it is the newcomer");
        (11..=13).for_each(|number| pool.push(in_lane("b"), number));
        assert_eq!(
            pool.shed,
            [6, 5, 4, 13],
            "no lane loses one to a lane as long"
        );
        let shed = |name: &str| {
            let lanes = pool.lanes.report();
            lanes
                .iter()
                .find(|lane| &*lane.name == name)
                .map(|lane| lane.shed)
        };
        assert_eq!((shed("a"), shed("b")), (Some(3), Some(1)));
        assert_eq!(pool.order(), [1, 2, 11, 3, 12]);
        assert_eq!(pool.lanes.report().len(), 2, "the counts stay");
    }

    /// The gauge of the queue once said "144 of 64".
    #[test]
    fn free_threads_are_places_too_and_do_not_count_as_waiting() {
        let mut pool = TestPool::new(3, 2);
        (1..=6).for_each(|number| pool.push(in_lane("a"), number));
        assert_eq!(pool.shed, [6], "three are about to run, and two wait");
        assert_eq!(pool.lanes.load(), (0, 2));
        pool.settle();
        assert_eq!(pool.lanes.load(), (3, 2));
    }

    #[test]
    fn unknown_clients_have_one_thread_and_few_places_and_the_one_that_sent_most_loses() {
        let mut pool = TestPool::new(2, 16);
        let from = |number: usize| Admission {
            network: Some(IpAddr::from((number as u32).to_be_bytes()).into()),
            ..unknown()
        };
        (1..=20).for_each(|number| pool.push(from(1), number));
        assert_eq!(
            pool.shed,
            (6..=20).collect::<Vec<_>>(),
            "one is about to run, and four wait"
        );
        pool.shed.clear();
        (21..=23).for_each(|number| pool.push(from(number), number));
        assert_eq!(pool.shed, [5, 4, 3]);
        (24..=26).for_each(|number| pool.push(from(number), number));
        assert_eq!(pool.shed, [5, 4, 3, 2, 1, 26], "the newest of several");
        pool.settle();
        assert_eq!(pool.running.len(), 1, "they have one thread");
        pool.push(in_lane("a"), 31);
        assert_eq!(
            pool.order(),
            [21, 31, 22, 23, 24, 25],
            "the others have places of their own"
        );
        (0..MAX_KEPT + 1).for_each(|number| pool.push(from(number), number));
        assert!(pool.lanes.sent.len() <= MAX_KEPT);
    }

    #[test]
    fn a_lane_begins_with_one_request_until_it_is_authenticated() {
        let mut pool = TestPool::new(8, 100);
        pool.limits.insert("a", Some(3));
        (1..=9).for_each(|number| pool.push(in_lane("a"), number));
        assert!(
            pool.run_next() && !pool.run_next(),
            "it may have a limit by now"
        );
        pool.authenticate(0);
        assert!(pool.run_next() && pool.run_next() && !pool.run_next());
        (0..3).for_each(|_| _ = pool.finish(0));
        assert!(
            pool.run_next() && !pool.run_next(),
            "nothing ran, so it is read again"
        );
        pool.finish(0);
        assert!(
            pool.run_next(),
            "although the one before it was not authenticated"
        );
    }

    #[test]
    fn a_limit_that_changes_holds() {
        let mut pool = TestPool::new(8, 100);
        pool.limits.insert("a", Some(2));
        (1..=20).for_each(|number| pool.push(in_lane("a"), number));
        (31..=36).for_each(|number| pool.push(in_lane("b"), number));
        pool.settle();
        assert_eq!(
            (pool.running_of("a"), pool.running_of("b")),
            (2, 6),
            "the others use the other threads"
        );
        while let Some(place) = pool.running.iter().position(|one| one.connection > 30) {
            pool.finish(place);
        }
        for (limit, runs) in [(Some(5), 5), (None, 8)] {
            pool.limits.insert("a", limit);
            pool.authenticate(0);
            pool.settle();
            assert_eq!(pool.running_of("a"), runs, "without the end of a request");
        }
        pool.limits.insert("a", Some(1));
        pool.authenticate(0);
        for left in [7, 6, 5, 4, 3, 2, 1, 1] {
            pool.finish(0);
            pool.settle();
            assert_eq!(
                pool.running_of("a"),
                left,
                "the rest waits until there is one"
            );
        }
    }

    #[test]
    fn a_removed_request_leaves_its_turn() {
        let mut pool = TestPool::new(1, 64);
        for (name, number) in [("a", 1), ("a", 2), ("b", 11), ("a", 3)] {
            pool.push(in_lane(name), number);
        }
        assert!(pool.remove(11) && !pool.remove(11) && pool.remove(2));
        assert_eq!(pool.order(), [1, 3]);
        pool.push(in_lane("a"), 1);
        assert!(pool.lanes.remove_any().is_some() && pool.lanes.remove_any().is_none());
    }

    #[test]
    fn lanes_that_are_not_used_are_kept_up_to_a_bound() {
        let mut pool = TestPool::new(1, 4);
        for number in 0..3 * MAX_KEPT {
            pool.push(in_lane(&number.to_string()), number);
            pool.order();
            assert!(pool.lanes.lanes.len() <= MAX_KEPT + 1);
        }
    }

    /// Random sequences, against what a plain count of the requests says: no limit is exceeded, no
    /// request is lost, and none that could run waits while a thread is free.
    #[test]
    fn no_request_that_could_run_waits_for_a_free_thread() {
        const NAMES: [&str; 3] = ["a", "b", "c"];
        for seed in 1..=40_u64 {
            let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
            let mut draw = |below: usize| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                (random >> 33) as usize % below
            };
            let mut pool = TestPool::new(1 + draw(6), draw(30));
            pool.limits = [("a", Some(1)), ("b", Some(3)), ("c", None)].into();
            let mut waiting: Vec<(usize, &str)> = Vec::new();
            for number in 0..3000 {
                match draw(9) {
                    0..=2 => {
                        let name = NAMES[draw(NAMES.len())];
                        waiting.push((number, name));
                        pool.push(in_lane(name), number);
                    }
                    3 | 4 => _ = pool.run_next(),
                    5 | 6 if !pool.running.is_empty() => {
                        let place = draw(pool.running.len());
                        pool.finish(place);
                    }
                    7 if !waiting.is_empty() => {
                        let (number, _) = waiting.remove(draw(waiting.len()));
                        assert!(pool.remove(number));
                    }
                    8 if !pool.running.is_empty() => {
                        pool.authenticate(draw(pool.running.len()));
                    }
                    _ => {}
                }
                let runs = |number| pool.running.iter().any(|one| one.connection == number);
                waiting.retain(|&(number, _)| !runs(number) && !pool.shed.contains(&number));
                assert_eq!(
                    (pool.lanes.running, pool.lanes.waiting),
                    (pool.running.len(), waiting.len()),
                    "seed {seed}"
                );
                for (name, limit) in &pool.limits {
                    let most = limit.map_or(usize::MAX, |limit| limit as usize);
                    assert!(pool.running_of(name) <= most, "seed {seed}");
                }
                let can_run = |&(_, name): &(usize, &str)| {
                    let lane = &pool.lanes.lanes[&Some(Arc::from(name))];
                    let limit = if lane.is_authenticated {
                        pool.limits[name]
                    } else {
                        Some(1)
                    };
                    limit.is_none_or(|limit| pool.running_of(name) < limit as usize)
                };
                let can_run = waiting.iter().any(can_run);
                let is_free = pool.running.len() < pool.lanes.threads();
                assert_eq!(
                    pool.lanes.eligible() > 0,
                    can_run,
                    "seed {seed}, step {number}: {waiting:?}"
                );
                assert!(
                    !(can_run && is_free) || pool.run_next(),
                    "seed {seed}, step {number}"
                );
                let taken = pool.running.last().map(|one| one.connection);
                waiting.retain(|(number, _)| Some(*number) != taken);
            }
            let (left, served) = (waiting.len() + pool.running.len(), pool.order().len());
            assert_eq!((left, pool.lanes.load()), (served, (0, 0)), "seed {seed}");
        }
    }
}
