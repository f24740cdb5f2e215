//! The queue before a group of threads: bounded, with a lane for each key, served round robin.

mod lanes;

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

pub(super) use self::lanes::{Capacity, Job, LaneName, MAX_CACHED};

use self::lanes::{LaneState, QueueState};
use crate::mutex::lock;

/// The requests of one key in the queue.
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

pub(super) struct FairQueue {
    state: Mutex<QueueState>,
    /// There is a request that a thread may take.
    eligible: Condvar,
}

/// A lane from which a request can be shed if memory is short.
pub(super) struct HeavyLane<'a> {
    queue: &'a FairQueue,
    name: LaneName,
    /// The memory of its requests, and of those among them that wait.
    pub bytes: usize,
    pub waiting: usize,
}

impl HeavyLane<'_> {
    /// Sheds a request, unless a thread has just taken the last one.
    pub fn shed(&self) -> Option<Job> {
        lock(&self.queue.state).shed(&self.name)
    }
}

#[derive(Debug)]
pub(super) enum TakeError {
    Timeout,
    Closed,
}

impl FairQueue {
    pub fn new(capacity: Capacity) -> Self {
        Self {
            state: Mutex::new(QueueState::new(capacity)),
            eligible: Condvar::new(),
        }
    }

    /// Queues a request. If the queue is full, sheds one and returns it: the newest of the lane
    /// with the most waiting.
    pub fn push(&self, job: Job) -> Option<Job> {
        let mut state = lock(&self.state);
        let shed = state.push(job);
        self.wake(&state);
        shed
    }

    /// Waits for a request and takes it: the next of the lane whose turn it is. It counts as
    /// running until [`Self::finish`].
    pub fn take(&self, until: Option<Instant>) -> Result<Job, TakeError> {
        let mut state = lock(&self.state);
        loop {
            let left = until.map_or(Duration::MAX, |until| {
                until.saturating_duration_since(Instant::now())
            });
            if left.is_zero() {
                return Err(TakeError::Timeout);
            }
            if let Some(taken) = state.take_next() {
                return Ok(taken);
            }
            if state.is_closed {
                return Err(TakeError::Closed);
            }
            state.idle += 1;
            state = self
                .eligible
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            state.idle -= 1;
        }
    }

    /// The keys whose requests wait, run or have run since the last call.
    pub fn take_used_lanes(&self) -> Vec<Arc<str>> {
        let mut state = lock(&self.state);
        let used = |(name, lane): (&LaneName, &mut LaneState)| {
            let was_used = lane.was_used;
            lane.was_used = !lane.has_no_requests();
            name.clone().filter(|_| was_used)
        };
        state.lanes.iter_mut().filter_map(used).collect()
    }

    /// Sets the limit of a lane that has a request.
    pub fn set_limit(&self, name: &LaneName, limit: Option<u32>) {
        let mut state = lock(&self.state);
        let lane = state.lane(name);
        (lane.limit, lane.is_limit_read) = (limit, !lane.has_no_requests());
        self.wake(&state);
    }

    /// Counts a request of this many bytes as finished.
    pub fn finish(&self, name: &LaneName, is_exclusive: bool, bytes: usize) {
        let mut state = lock(&self.state);
        state.finish(name, is_exclusive, bytes);
        // This thread takes the next request, unless it pauses first.
        self.wake(&state);
    }

    /// Removes the first waiting job that matches.
    pub fn remove(&self, matches: impl Fn(&Job) -> bool) -> Option<Job> {
        let mut state = lock(&self.state);
        let find = |name: &LaneName| {
            let place = state.lanes[name].waiting.iter().position(&matches)?;
            Some((name.clone(), place))
        };
        let (name, place) = state.turns.iter().find_map(find)?;
        state.remove(&name, place)
    }

    /// The memory of a lane's requests.
    pub fn lane_bytes(&self, name: &LaneName) -> usize {
        lock(&self.state)
            .lanes
            .get(name)
            .map_or(0, |lane| lane.bytes)
    }

    /// The lanes that hold more than `own` bytes and have a request that can be shed.
    pub fn heavier_lanes(&self, own: usize) -> Vec<HeavyLane<'_>> {
        let state = lock(&self.state);
        let measure = |name: &LaneName| {
            let lane = &state.lanes[name];
            (lane.bytes > own && lane.can_shed()).then(|| HeavyLane {
                queue: self,
                name: name.clone(),
                bytes: lane.bytes,
                waiting: lane.waiting.iter().map(Job::bytes).sum(),
            })
        };
        state.turns.iter().filter_map(measure).collect()
    }

    /// Ends the threads. No request may wait or come any more.
    pub fn close(&self) {
        lock(&self.state).is_closed = true;
        self.eligible.notify_all();
    }

    /// Returns how many requests run, and how many wait.
    pub fn load(&self) -> (usize, usize) {
        let state = lock(&self.state);
        (state.running, state.waiting)
    }

    /// The keys that have a request here, or have had one shed.
    pub fn lanes(&self) -> Vec<LaneLoad> {
        let state = lock(&self.state);
        let report = |(name, lane): (&LaneName, &LaneState)| {
            if lane.has_no_requests() && lane.shed == 0 {
                return None;
            }
            let oldest = lane.waiting.front().and_then(Job::pending);
            Some(LaneLoad {
                name: name.clone()?,
                waiting: lane.waiting.len(),
                running: lane.running,
                limit: lane.limit,
                shed: lane.shed,
                longest_wait: oldest.map(|pending| pending.received.elapsed()),
            })
        };
        state.lanes.iter().filter_map(report).collect()
    }

    /// Wakes the threads that have something to do now: waking none costs a system call too.
    fn wake(&self, state: &QueueState) {
        for _ in 0..state.idle.min(state.eligible(false)) {
            self.eligible.notify_one();
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::HashMap;
    use std::net::IpAddr;
    use std::thread;

    use super::*;
    use crate::http::{ClientInfo, Request, RequestHead};
    use crate::listener::{Admission, Destination, PendingRequest};

    /// A request that is known by the number of its connection.
    pub fn job(connection: usize, admission: Admission) -> Job {
        let head = RequestHead::parse(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n").expect("a good head");
        let request = Request {
            head,
            body: Some(Vec::new()),
            client: ClientInfo::default(),
        };
        Job {
            connection,
            lane: admission.lane.clone(),
            pending: Box::new(PendingRequest::new(request, admission)),
        }
    }

    pub fn in_lane(name: &str) -> Admission {
        Admission {
            lane: Some(name.into()),
            ..unknown()
        }
    }

    fn number(job: &Job) -> u32 {
        job.connection as u32
    }

    /// A queue, its threads, and the limits of the keys.
    struct TestPool {
        queue: FairQueue,
        running: Vec<Job>,
        limits: HashMap<&'static str, Option<u32>>,
        shed: Vec<u32>,
    }

    /// A request of an unknown client.
    fn unknown() -> Admission {
        Admission::new(Destination::Console(None))
    }

    impl TestPool {
        fn new(threads: usize, waiting: usize) -> Self {
            Self::with(Capacity {
                threads,
                waiting,
                unknown: 0,
                has_limits: true,
            })
        }

        fn for_console(threads: usize, waiting: usize) -> Self {
            Self::with(Capacity {
                threads,
                waiting,
                unknown: (waiting / 4).max(1),
                has_limits: false,
            })
        }

        fn with(capacity: Capacity) -> Self {
            let queue = FairQueue::new(capacity);
            Self {
                queue,
                running: Vec::new(),
                limits: HashMap::new(),
                shed: Vec::new(),
            }
        }

        fn push(&mut self, admission: Admission, number: u32) {
            self.push_job(job(number as usize, admission));
        }

        fn push_job(&mut self, job: Job) {
            self.shed
                .extend(self.queue.push(job).as_ref().map(self::number));
        }

        /// Lets a free thread take a request, if there are both.
        fn run_next(&mut self) -> bool {
            let is_free = self.running.len() < lock(&self.queue.state).capacity.threads;
            let taken = is_free
                .then(|| lock(&self.queue.state).take_next())
                .flatten();
            let is_taken = taken.is_some();
            self.running.extend(taken);
            is_taken
        }

        /// Reads the limit of a request that runs.
        fn read_limit(&mut self, place: usize) {
            let lane = &self.running[place].lane;
            let limit = lane
                .as_deref()
                .and_then(|name| self.limits.get(name).copied().flatten());
            self.queue.set_limit(lane, limit);
        }

        /// Lets all threads do what they can.
        fn settle(&mut self) {
            while self.run_next() {
                (0..self.running.len()).for_each(|place| self.read_limit(place));
            }
        }

        fn finish(&mut self, place: usize) -> u32 {
            let job = self.running.remove(place);
            self.queue
                .finish(&job.lane, job.is_exclusive(), job.bytes());
            number(&job)
        }

        fn remove(&mut self, number: u32) -> Option<u32> {
            self.queue
                .remove(|job| job.connection == number as usize)
                .as_ref()
                .map(self::number)
        }

        fn running_of(&self, name: &str) -> usize {
            self.running
                .iter()
                .filter(|job| job.lane.as_deref() == Some(name))
                .count()
        }

        /// Serves everything, and returns the order.
        fn order(&mut self) -> Vec<u32> {
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
        let mut pool = TestPool::for_console(1, 100);
        for (admission, numbers) in [
            (in_lane("a"), 1..=6),
            (in_lane("b"), 11..=13),
            (unknown(), 21..=22),
            (in_lane("c"), 31..=31),
        ] {
            numbers.for_each(|number| pool.push(admission.clone(), number));
        }
        assert_eq!(pool.order(), [1, 11, 21, 31, 2, 12, 22, 3, 13, 4, 5, 6]);
        assert_eq!((pool.queue.load(), pool.shed.len()), ((0, 0), 0));
        assert!(
            pool.queue.lanes().is_empty(),
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
            pool.queue
                .lanes()
                .iter()
                .find(|lane| &*lane.name == name)
                .map(|lane| lane.shed)
        };
        assert_eq!((shed("a"), shed("b")), (Some(3), Some(1)));
        assert_eq!(pool.order(), [1, 2, 11, 3, 12]);
        assert_eq!(pool.queue.lanes().len(), 2, "the counts stay");
    }

    #[test]
    fn free_threads_are_places_too() {
        let mut pool = TestPool::new(3, 2);
        (1..=6).for_each(|number| pool.push(in_lane("a"), number));
        assert_eq!(pool.shed, [6], "three are about to run, and two wait");
    }

    #[test]
    fn of_unknown_clients_the_address_that_sent_most_loses_a_request() {
        let mut pool = TestPool::for_console(1, 16);
        let network = |number: u32| IpAddr::from(number.to_be_bytes()).into();
        let from = |number: u32| Admission {
            client_network: Some(network(number)),
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
        pool.push(in_lane("a"), 31);
        assert_eq!(
            pool.order(),
            [21, 31, 22, 23, 24, 25],
            "the others have places of their own"
        );
        (0..MAX_CACHED as u32 + 1).for_each(|number| pool.push(from(number), number));
        assert!(lock(&pool.queue.state).sent.len() <= MAX_CACHED);
    }

    #[test]
    fn exclusive_requests_run_one_at_a_time_and_no_thread_waits_for_them() {
        let mut pool = TestPool::for_console(2, 64);
        for (lane, number) in [("x", 1), ("x", 2), ("x", 3), ("y", 11), ("z", 21)] {
            pool.push(
                Admission {
                    exclusive: true,
                    ..in_lane(lane)
                },
                number,
            );
        }
        pool.settle();
        assert_eq!(pool.running.len(), 1);
        pool.push(in_lane("a"), 31);
        pool.settle();
        assert_eq!(
            pool.running.len(),
            2,
            "another request has the other thread"
        );
        let mut order = Vec::new();
        while let Some(place) = pool.running.iter().position(|job| job.is_exclusive()) {
            order.push(pool.finish(place));
            pool.settle();
            assert!(pool.running.iter().filter(|job| job.is_exclusive()).count() <= 1);
        }
        assert_eq!(order, [1, 11, 21, 2, 3], "the lanes take turns");
        assert_eq!((pool.finish(0), pool.queue.load()), (31, (0, 0)));
    }

    #[test]
    fn a_lane_begins_with_one_request_until_its_limit_is_read() {
        let mut pool = TestPool::new(8, 100);
        pool.limits.insert("a", Some(3));
        (1..=9).for_each(|number| pool.push(in_lane("a"), number));
        assert!(
            pool.run_next() && !pool.run_next(),
            "it may have a limit by now"
        );
        pool.read_limit(0);
        assert!(pool.run_next() && pool.run_next() && !pool.run_next());
        (0..3).for_each(|_| _ = pool.finish(0));
        assert!(
            pool.run_next() && !pool.run_next(),
            "nothing ran, so it is read again"
        );
        pool.finish(0);
        assert!(
            pool.run_next(),
            "although the one before it did not read it"
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
        while let Some(place) = pool.running.iter().position(|job| job.connection > 30) {
            pool.finish(place);
        }
        for (limit, runs) in [(Some(5), 5), (None, 8)] {
            pool.limits.insert("a", limit);
            pool.read_limit(0);
            pool.settle();
            assert_eq!(pool.running_of("a"), runs, "without the end of a request");
        }
        pool.limits.insert("a", Some(1));
        pool.read_limit(0);
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
        assert_eq!(
            (pool.remove(11), pool.remove(11), pool.remove(2)),
            (Some(11), None, Some(2))
        );
        assert_eq!(pool.queue.load(), (0, 2));
        assert_eq!(pool.order(), [1, 3]);
    }

    #[test]
    fn a_lane_that_is_not_used_is_looked_up_once_more_and_kept_for_a_while() {
        let mut pool = TestPool::new(1, 4);
        pool.push(in_lane("a"), 1);
        assert_eq!(pool.order(), [1]);
        assert_eq!(pool.queue.take_used_lanes(), ["a".into()]);
        assert!(pool.queue.take_used_lanes().is_empty());
        for number in 0..3 * MAX_CACHED as u32 {
            pool.push(in_lane(&number.to_string()), number);
            pool.order();
            assert!(lock(&pool.queue.state).lanes.len() <= MAX_CACHED + 1);
        }
    }

    /// A thread that is not woken would hang this test.
    #[test]
    fn threads_are_woken_for_what_they_may_take_and_when_the_queue_is_closed() {
        let pool = TestPool::new(3, 64);
        let queue = &pool.queue;
        let until = |condition: &dyn Fn() -> bool| {
            let end = Instant::now() + Duration::from_secs(60);
            while !condition() {
                assert!(Instant::now() < end);
                thread::yield_now();
            }
        };
        thread::scope(|scope| {
            let take = || queue.take(None).ok().as_ref().map(number);
            let threads = [(); 3].map(|()| scope.spawn(take));
            until(&|| lock(&queue.state).idle == 3);
            queue.push(job(1, in_lane("a")));
            until(&|| queue.load() == (1, 0));
            queue.push(job(2, in_lane("a")));
            queue.set_limit(&Some("a".into()), Some(1));
            assert_eq!(queue.load(), (1, 1), "it is at its limit");
            queue.set_limit(&Some("a".into()), Some(2));
            until(&|| queue.load() == (2, 0));
            queue.close();
            let mut taken = threads.map(|thread| thread.join().expect("no panic"));
            taken.sort();
            assert_eq!(taken, [None, Some(1), Some(2)]);
        });
        assert!(matches!(
            queue.take(Some(Instant::now())),
            Err(TakeError::Timeout)
        ));
        assert!(matches!(queue.take(None), Err(TakeError::Closed)));
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
            let mut waiting: Vec<(u32, &str)> = Vec::new();
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
                        assert_eq!(pool.remove(number), Some(number));
                    }
                    8 if !pool.running.is_empty() => pool.read_limit(draw(pool.running.len())),
                    _ => {}
                }
                let is_over = |number: &u32| {
                    pool.running
                        .iter()
                        .any(|job| job.connection == *number as usize)
                        || pool.shed.contains(number)
                };
                waiting.retain(|(number, _)| !is_over(number));
                assert_eq!(
                    pool.queue.load(),
                    (pool.running.len(), waiting.len()),
                    "seed {seed}"
                );
                for (name, limit) in &pool.limits {
                    let most = limit.map_or(usize::MAX, |limit| limit as usize);
                    assert!(pool.running_of(name) <= most, "seed {seed}");
                }
                let can_run = |&(_, name): &(u32, &str)| {
                    let is_read = lock(&pool.queue.state)
                        .lane(&Some(name.into()))
                        .is_limit_read;
                    let limit = if is_read { pool.limits[name] } else { Some(1) };
                    limit.is_none_or(|limit| pool.running_of(name) < limit as usize)
                };
                let (can_run, has_room) = (
                    waiting.iter().any(can_run),
                    pool.running.len() < lock(&pool.queue.state).capacity.threads,
                );
                let eligible = lock(&pool.queue.state).eligible(false);
                assert_eq!(
                    eligible > 0,
                    can_run,
                    "seed {seed}, step {number}: {waiting:?}"
                );
                assert!(
                    !(can_run && has_room) || pool.run_next(),
                    "seed {seed}, step {number}"
                );
                let taken = pool.running.last().map(self::number);
                waiting.retain(|(number, _)| Some(*number) != taken);
            }
            let (left, served) = (waiting.len() + pool.running.len(), pool.order().len());
            assert_eq!((left, pool.queue.load()), (served, (0, 0)), "seed {seed}");
        }
    }
}
