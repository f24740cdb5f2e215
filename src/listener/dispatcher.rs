//! What stands between the loop and the threads: the complete requests that wait, and in whose
//! turn.
//!
//! Each key has a lane, and the lanes of an area are served round robin. The loop can't query the
//! database: it knows the lane if the digest of the request's key was accepted lately. Other
//! requests wait for a look-up, which returns them to the loop. The digests decide in which lane a
//! request waits, never whether its key is valid.

use std::collections::HashMap;
use std::mem;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mio::Waker;

use super::connection::Outgoing;
use super::lanes::{Capacity, LaneLoad, LaneName, LaneWeight, Lanes};
use super::{Limits, PendingRequest};
use crate::locks::lock;
use crate::secret::SecretDigest;

/// The accepted digests that are kept are at most twice as many.
const GENERATION: usize = 8 * 1024;

/// The memory of a refusal, which takes the place of a request that is shed.
const REFUSAL_BYTES: usize = 1024;

/// The console has two threads of its own, so that no page delays a completion. More would only use
/// more memory.
const CONSOLE: Capacity = Capacity {
    threads: 2,
    waiting: 16,
    unknown: 4,
};

/// The threads that requests wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Area {
    /// The workers.
    Api,
    /// The thread that looks up the keys of the API's requests that are not known yet.
    LookUp,
    Console,
}

impl Area {
    pub(super) const ALL: [Self; 3] = [Self::Api, Self::LookUp, Self::Console];
}

pub struct Dispatcher {
    state: Mutex<State>,
    /// In the order of [`Area::ALL`]: there is a request that a thread may take.
    available: [Condvar; Area::ALL.len()],
    completed: Mutex<Vec<Completed>>,
    waker: Waker,
}

struct State {
    areas: [AreaState; Area::ALL.len()],
    accepted: AcceptedDigests,
    is_closed: bool,
}

struct AreaState {
    lanes: Lanes,
    /// Threads that wait for a request, and those among them that were woken and do not run yet.
    idle: usize,
    woken: usize,
}

/// What a thread has made of a request, for the loop.
pub(super) struct Completed {
    pub connection: usize,
    pub area: Area,
    pub outcome: Outcome,
}

pub(super) enum Outcome {
    Response(Outgoing),
    /// The key of the request was looked up, and its lane is known now.
    LookedUp(Box<PendingRequest>),
}

impl Dispatcher {
    pub(super) fn new(limits: &Limits, waker: Waker) -> Self {
        let area = |capacity| AreaState {
            lanes: Lanes::new(capacity),
            idle: 0,
            woken: 0,
        };
        // As many as there is room for if all of them have valid keys.
        let all = limits.workers + limits.queue;
        let state = State {
            areas: [
                area(Capacity {
                    threads: limits.workers,
                    waiting: limits.queue,
                    unknown: 0,
                }),
                area(Capacity {
                    threads: 1,
                    waiting: all,
                    unknown: all,
                }),
                area(CONSOLE),
            ],
            accepted: AcceptedDigests::default(),
            is_closed: false,
        };
        Self {
            state: Mutex::new(state),
            available: Default::default(),
            completed: Mutex::default(),
            waker,
        }
    }

    pub(super) fn threads(&self, area: Area) -> usize {
        self.state().areas[area as usize].lanes.threads()
    }

    /// Chooses the area and the lane of a request, and returns the memory of the lane's requests.
    pub(super) fn place(&self, pending: &mut PendingRequest) -> usize {
        let mut state = self.state();
        let credential = pending.admission.credential;
        let known = credential.and_then(|digest| state.accepted.lane_of(&digest));
        pending.area = match pending.admission.area {
            Area::Api if known.is_none() => Area::LookUp,
            area => area,
        };
        pending.lane = known.or_else(|| pending.admission.lane.clone());
        state.areas[pending.area as usize]
            .lanes
            .bytes_of(&pending.lane)
    }

    /// Queues a request in its place. If there are too many, sheds one and returns it: the newest of
    /// the lane with the most waiting.
    pub(super) fn push(&self, pending: Box<PendingRequest>) -> Option<Box<PendingRequest>> {
        let (mut state, area) = (self.state(), pending.area);
        let shed = state.areas[area as usize].lanes.push(pending);
        self.wake(&mut state, area);
        shed
    }

    /// Waits for the next request of the lane whose turn it is. Returns `None` at the end.
    pub(super) fn next(&self, area: Area) -> Option<Box<PendingRequest>> {
        let mut state = self.state();
        loop {
            let next = state.areas[area as usize].lanes.take_next();
            if next.is_some() || state.is_closed {
                return next;
            }
            state.areas[area as usize].idle += 1;
            state = self.available[area as usize]
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
            let waiting = &mut state.areas[area as usize];
            waiting.idle -= 1;
            waiting.woken = waiting.woken.saturating_sub(1);
        }
    }

    /// Lets the requests of a key run up to its limit, and remembers the lane of its digest: a
    /// thread has found that the key, or the session, of a request is valid.
    pub fn note_accepted(&self, pending: &PendingRequest, lane: &str, limit: Option<u32>) {
        let own = pending.lane.clone().filter(|own| **own == *lane);
        let (mut state, lane) = (self.state(), own.unwrap_or_else(|| lane.into()));
        if let Some(digest) = pending.admission.credential {
            state.accepted.insert(digest, Arc::clone(&lane));
        }
        let area = pending.admission.area;
        state.areas[area as usize]
            .lanes
            .set_limit(&Some(lane), limit);
        self.wake(&mut state, area);
    }

    /// Forgets the digest of a key or session that was refused.
    pub fn forget(&self, pending: &PendingRequest) {
        if let Some(digest) = pending.admission.credential {
            self.state().accepted.remove(&digest);
        }
    }

    /// Counts a request as finished. The thread takes the next one, so none is woken for it.
    pub(super) fn finish(&self, pending: &PendingRequest) {
        self.state().areas[pending.area as usize]
            .lanes
            .finish(pending);
    }

    /// Removes the request of a connection if it waits. Returns whether it did.
    pub(super) fn remove(&self, connection: usize) -> bool {
        let mut state = self.state();
        let mut areas = state.areas.iter_mut();
        areas.any(|area| area.lanes.remove(connection).is_some())
    }

    /// Removes a request of the API before a worker takes it.
    pub(super) fn remove_any(&self) -> Option<Box<PendingRequest>> {
        let mut state = self.state();
        [Area::LookUp, Area::Api]
            .into_iter()
            .find_map(|area| state.areas[area as usize].lanes.remove_any())
    }

    /// Sheds waiting requests that hold at least `needed` bytes, of lanes that hold more than `own`,
    /// always the newest of the heaviest. Sheds none if that is not enough.
    pub(super) fn shed_bytes(&self, needed: usize, own: usize) -> Option<Vec<PendingRequest>> {
        let mut state = self.state();
        let mut lanes: Vec<(Area, LaneWeight)> = Vec::new();
        for area in Area::ALL {
            lanes.extend(
                state.areas[area as usize]
                    .lanes
                    .weights()
                    .map(|lane| (area, lane)),
            );
        }
        let (mut freed, mut victims) = (0, Vec::new());
        while freed < needed {
            let (area, lane) = lanes
                .iter_mut()
                .filter(|(_, lane)| lane.bytes > own && !lane.waiting.is_empty())
                .max_by_key(|(_, lane)| lane.bytes)?;
            let newest = lane.waiting.pop()?;
            lane.bytes -= newest;
            freed += newest.saturating_sub(REFUSAL_BYTES);
            victims.push((*area, lane.name.clone()));
        }
        let shed = |(area, name): (Area, LaneName)| {
            let lanes = &mut state.areas[area as usize].lanes;
            lanes.shed_newest(&name).map(|pending| *pending)
        };
        victims.into_iter().map(shed).collect()
    }

    /// Passes what a thread has made of a request to the loop.
    pub(super) fn complete(&self, completed: Completed) {
        let mut all = lock(&self.completed);
        all.push(completed);
        // The loop takes all of them at once, and the first one wakes it.
        let is_first = all.len() == 1;
        drop(all);
        if is_first && let Err(error) = self.waker.wake() {
            log::error!("could not wake the listener: {error}");
        }
    }

    pub(super) fn take_completed(&self) -> Vec<Completed> {
        mem::take(&mut *lock(&self.completed))
    }

    /// Ends the threads, after the last request.
    pub(super) fn close(&self) {
        self.state().is_closed = true;
        self.available.iter().for_each(Condvar::notify_all);
    }

    /// Returns how many requests of an area run, and how many wait.
    pub(super) fn load(&self, area: Area) -> (usize, usize) {
        self.state().areas[area as usize].lanes.load()
    }

    /// The API's requests by key.
    pub fn lanes(&self) -> Vec<LaneLoad> {
        self.state().areas[Area::Api as usize].lanes.report()
    }

    /// Returns true if every worker, or the thread for look-ups, has been with one request for longer
    /// than this.
    pub(super) fn is_overdue(&self, time: Duration) -> bool {
        let Some(then) = Instant::now().checked_sub(time) else {
            return false;
        };
        let state = self.state();
        [Area::Api, Area::LookUp].iter().any(|area| {
            state.areas[*area as usize]
                .lanes
                .are_threads_busy_since(then)
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Wakes as many threads as may take a request now: waking one costs a system call.
    fn wake(&self, state: &mut State, area: Area) {
        let waiting = &mut state.areas[area as usize];
        while waiting.woken < waiting.idle.min(waiting.lanes.eligible()) {
            waiting.woken += 1;
            self.available[area as usize].notify_one();
        }
    }
}

/// The digests of keys and sessions that were accepted lately, with their lanes, in two generations:
/// when the younger one is full, the older one goes.
#[derive(Default)]
struct AcceptedDigests {
    young: HashMap<SecretDigest, Arc<str>>,
    old: HashMap<SecretDigest, Arc<str>>,
}

impl AcceptedDigests {
    fn lane_of(&mut self, digest: &SecretDigest) -> LaneName {
        if let Some(lane) = self.young.get(digest) {
            return Some(Arc::clone(lane));
        }
        let lane = self.old.remove(digest)?;
        self.insert(*digest, Arc::clone(&lane));
        Some(lane)
    }

    fn insert(&mut self, digest: SecretDigest, lane: Arc<str>) {
        if self.young.len() >= GENERATION && !self.young.contains_key(&digest) {
            self.old = mem::take(&mut self.young);
        }
        self.young.insert(digest, lane);
    }

    fn remove(&mut self, digest: &SecretDigest) {
        self.young.remove(digest);
        self.old.remove(digest);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use mio::{Poll, Token};

    use super::*;
    use crate::listener::Admission;
    use crate::listener::lanes::tests::{request, unknown};

    fn dispatcher(workers: usize) -> Dispatcher {
        let poll = Poll::new().expect("a poll");
        let waker = Waker::new(poll.registry(), Token(0)).expect("a waker");
        let limits = Limits {
            workers,
            ..Limits::default()
        };
        Dispatcher::new(&limits, waker)
    }

    fn of_key(number: u32) -> Admission {
        Admission {
            area: Area::Api,
            credential: Some(SecretDigest::of(&number.to_string())),
            ..unknown()
        }
    }

    /// Queues a request of this key, and returns the area in which it waits.
    fn push(dispatcher: &Dispatcher, connection: usize, key: u32) -> Area {
        let mut pending = request(connection, of_key(key));
        dispatcher.place(&mut pending);
        let area = pending.area;
        assert!(dispatcher.push(pending).is_none());
        area
    }

    /// Lets the key of a request be known.
    fn accept(dispatcher: &Dispatcher, key: u32, limit: Option<u32>) {
        dispatcher.note_accepted(&request(0, of_key(key)), &format!("key_{key}"), limit);
    }

    #[test]
    fn a_request_waits_for_a_look_up_until_its_key_was_accepted() {
        let dispatcher = dispatcher(2);
        assert_eq!(push(&dispatcher, 1, 7), Area::LookUp);
        let pending = dispatcher.next(Area::LookUp).expect("a request");
        dispatcher.finish(&pending);
        dispatcher.note_accepted(&pending, "key_7", None);
        assert_eq!(push(&dispatcher, 1, 7), Area::Api);
        let pending = dispatcher.next(Area::Api).expect("a request");
        assert_eq!(pending.lane.as_deref(), Some("key_7"));
        assert_eq!(dispatcher.load(Area::Api), (1, 0));
        dispatcher.forget(&pending);
        dispatcher.finish(&pending);
        assert_eq!(push(&dispatcher, 2, 7), Area::LookUp, "it was refused");
        assert!(dispatcher.remove(2) && !dispatcher.remove(2));
    }

    /// With more than 1,024 active keys, every request once took the look-up thread.
    #[test]
    fn thousands_of_active_keys_stay_known() {
        let dispatcher = dispatcher(2);
        for round in 0..3 {
            for key in 0..GENERATION as u32 {
                let mut pending = request(0, of_key(key));
                dispatcher.place(&mut pending);
                assert_eq!(pending.area == Area::Api, round > 0, "{key}");
                accept(&dispatcher, key, None);
            }
        }
        for key in 0..10 * GENERATION as u32 {
            accept(&dispatcher, key, None);
        }
        let state = dispatcher.state();
        let kept = state.accepted.young.len() + state.accepted.old.len();
        assert!((GENERATION..=2 * GENERATION).contains(&kept), "{kept}");
    }

    /// Both the victim and the newcomer once got a 503: more was counted than could be shed.
    #[test]
    fn memory_is_shed_if_it_is_enough_and_of_the_heaviest_lanes() {
        let dispatcher = dispatcher(1);
        for key in [1, 2, 3] {
            accept(&dispatcher, key, None);
        }
        for (connection, key) in [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 3)] {
            push(&dispatcher, connection, key);
        }
        let one = request(0, unknown()).bytes();
        let shed = |needed, own| {
            let shed = dispatcher.shed_bytes(needed, own)?;
            Some(shed.iter().map(|one| one.connection).collect::<Vec<_>>())
        };
        assert_eq!(shed(3 * one, one), None, "three lanes of one would remain");
        assert_eq!(dispatcher.load(Area::Api).1, 5, "and one is about to run");
        assert_eq!(shed(2 * (one - REFUSAL_BYTES), one), Some(vec![3, 5]));
        assert_eq!(shed(one, 2 * one), None);
        assert_eq!(shed(1, one), Some(vec![2]));
    }

    /// A thread that is not woken would hang this test.
    #[test]
    fn threads_are_woken_for_what_they_may_take_and_at_the_end() {
        let dispatcher = dispatcher(3);
        let until = |condition: &dyn Fn() -> bool| {
            let end = Instant::now() + Duration::from_secs(60);
            while !condition() {
                assert!(Instant::now() < end);
                thread::yield_now();
            }
        };
        accept(&dispatcher, 1, None);
        thread::scope(|scope| {
            let next = || dispatcher.next(Area::Api).map(|one| one.connection);
            let threads = [(); 3].map(|()| scope.spawn(next));
            until(&|| dispatcher.state().areas[Area::Api as usize].idle == 3);
            push(&dispatcher, 1, 1);
            until(&|| dispatcher.load(Area::Api) == (1, 0));
            push(&dispatcher, 2, 1);
            assert_eq!(dispatcher.load(Area::Api).0, 1, "it is not authenticated");
            accept(&dispatcher, 1, Some(1));
            assert_eq!(dispatcher.load(Area::Api), (1, 1), "it is at its limit");
            accept(&dispatcher, 1, Some(2));
            until(&|| dispatcher.load(Area::Api) == (2, 0));
            dispatcher.close();
            let mut taken = threads.map(|thread| thread.join().expect("no panic"));
            taken.sort();
            assert_eq!(taken, [None, Some(1), Some(2)]);
        });
        assert!(dispatcher.next(Area::Api).is_none());
    }

    #[test]
    fn overdue_is_not_busy() {
        let dispatcher = dispatcher(2);
        let (short, long) = (Duration::from_millis(5), Duration::from_secs(3600));
        accept(&dispatcher, 1, None);
        accept(&dispatcher, 2, None);
        push(&dispatcher, 1, 1);
        push(&dispatcher, 2, 2);
        let _first = dispatcher.next(Area::Api).expect("a request");
        thread::sleep(2 * short);
        assert!(!dispatcher.is_overdue(short), "one worker is free");
        let second = dispatcher.next(Area::Api).expect("a request");
        assert!(!dispatcher.is_overdue(long), "it has just begun");
        thread::sleep(2 * short);
        assert!(dispatcher.is_overdue(short) && !dispatcher.is_overdue(long));
        dispatcher.finish(&second);
        assert!(!dispatcher.is_overdue(short));
        push(&dispatcher, 3, 3);
        let _third = dispatcher.next(Area::LookUp).expect("a request");
        thread::sleep(2 * short);
        assert!(dispatcher.is_overdue(short), "the look-up takes too long");
    }
}
