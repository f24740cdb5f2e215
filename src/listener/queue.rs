//! The queue before a thread group: bounded, with a lane for each key, served round robin.
//!
//! Strangers, whose key or session is not known yet, share one lane. The API's workers never take from it: a thread of its own
//! looks them up and moves each to the lane of its key. The console's threads serve strangers themselves.

use std::collections::{HashMap, VecDeque};
use std::iter;
use std::net::IpAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::lane::{Known, Lane, LaneLoad, Name, REMEMBERED, Ticket};
use crate::store::Digest;

/// What can wait in the queue.
pub(super) trait Queued {
    fn ticket(&self) -> &Ticket;

    /// Since when it waits.
    fn since(&self) -> Instant;
}

pub(super) struct FairQueue<T> {
    threads: usize,
    places: usize,
    state: Mutex<State<T>>,
    /// There is a request that a thread may take.
    eligible: Condvar,
    /// There is a stranger to be looked up.
    stranger: Condvar,
}

struct State<T> {
    lanes: HashMap<Name, LaneState<T>>,
    /// The lanes with waiting requests that threads take, in the order of their turns.
    turns: VecDeque<Name>,
    /// The console's threads take the requests of strangers, and its lanes have no limits.
    is_for_console: bool,
    waiting: usize,
    running: usize,
    exclusive_runs: bool,
    /// Threads that wait for a request.
    idle: usize,
    is_closed: bool,
    known: Known,
    /// How many requests each address of a stranger has sent.
    origins: HashMap<IpAddr, u64>,
}

struct LaneState<T> {
    waiting: VecDeque<T>,
    running: usize,
    limit: Option<u32>,
    /// The limit was read while the lane had requests. Until it is, one request runs alone: the limit may have been changed.
    is_limit_read: bool,
    shed: u64,
    /// Since the last call of [`FairQueue::used_lanes`].
    is_used: bool,
}

/// A request with a thread. It counts as running until [`FairQueue::finish`].
pub(super) struct Taken<T> {
    pub lane: Name,
    /// Whether its lane is that of its credential.
    pub is_known: bool,
    pub item: T,
}

/// What there is to do for the thread that looks up strangers.
pub(super) enum StrangerTask<T> {
    LookUp(T),
    /// The time is over.
    Other,
    /// The queue is closed.
    End,
}

impl<T: Queued> FairQueue<T> {
    /// The queue of so many threads, with room for so many requests beside those that a free thread takes at once.
    pub fn new(threads: usize, places: usize, is_for_console: bool) -> Self {
        let state = State {
            lanes: HashMap::new(),
            turns: VecDeque::new(),
            is_for_console,
            waiting: 0,
            running: 0,
            exclusive_runs: false,
            idle: 0,
            is_closed: false,
            known: Known::default(),
            origins: HashMap::new(),
        };
        Self { threads, places, state: Mutex::new(state), eligible: Condvar::new(), stranger: Condvar::new() }
    }

    /// Queues a request. If there is no room, returns the newest of the lane with the most waiting. The API's strangers have
    /// places of their own, as many as there are for the others; those of the console have a quarter of the places.
    pub fn push(&self, item: T) -> Option<T> {
        let mut state = self.lock();
        let ticket = item.ticket();
        let known = ticket.credential.and_then(|digest| state.known.find(&digest));
        let (name, is_begun) = (known.or_else(|| ticket.lane.clone()), ticket.is_begun);
        state.count_origin(ticket.origin.filter(|_| name.is_none()));
        state.lane(&name).waiting.push_back(item);
        state.waiting += 1;
        state.take_turn(&name);
        let mut shed = None;
        if name.is_none() {
            let room = match state.is_for_console {
                true => (self.places / 4).max(1) + self.free(&state),
                false => self.places + self.threads,
            };
            shed = (state.lane(&None).waiting.len() > room).then(|| state.shed_stranger()).flatten();
        }
        if !is_begun && shed.is_none() {
            shed = self.shed_longest(&mut state, &name);
        }
        if name.is_none() && !state.is_for_console {
            self.stranger.notify_one();
        } else {
            self.wake(&state);
        }
        shed
    }

    /// Waits for a request and takes it: the next of the lane whose turn it is. Returns `None` once the queue is closed.
    pub fn take(&self) -> Option<Taken<T>> {
        let mut state = self.lock();
        loop {
            if let Some(taken) = state.take_next() {
                return Some(taken);
            }
            if state.is_closed {
                return None;
            }
            state.idle += 1;
            state = self.eligible.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
    }

    /// Waits until there is a stranger to be looked up, or until the time is over.
    pub fn take_stranger(&self, until: Instant) -> StrangerTask<T> {
        let mut state = self.lock();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return StrangerTask::Other;
            }
            if let Some(first) = state.lane(&None).waiting.pop_front() {
                state.waiting -= 1;
                return StrangerTask::LookUp(first);
            }
            if state.is_closed {
                return StrangerTask::End;
            }
            state = self.stranger.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Queues the request of a stranger that was looked up, in its own lane. Returns those for which there is no room.
    pub fn admit(&self, stranger: T, lane: &Lane) -> Vec<T> {
        let mut state = self.lock();
        let credential = stranger.ticket().credential;
        state.waiting += 1;
        state.lane(&None).waiting.push_front(stranger);
        state.identify(credential, lane);
        let newcomer = Some(lane.name.as_str().into());
        let shed = iter::from_fn(|| self.shed_longest(&mut state, &newcomer)).collect();
        self.wake(&state);
        shed
    }

    /// Remembers whose credential it is. The requests with it that wait among the strangers move to its lane.
    pub fn identify(&self, credential: Option<Digest>, lane: &Lane) {
        let mut state = self.lock();
        state.identify(credential, lane);
        self.wake(&state);
    }

    /// The keys whose requests wait, run or have run since the last call.
    pub fn used_lanes(&self) -> Vec<Arc<str>> {
        let mut state = self.lock();
        let used = |(name, lane): (&Name, &mut LaneState<T>)| {
            let is_used = lane.is_used;
            lane.is_used = !lane.is_unused();
            name.clone().filter(|_| is_used)
        };
        state.lanes.iter_mut().filter_map(used).collect()
    }

    /// Sets the limits of lanes that were used. The key of one that was not found is a stranger's again.
    pub fn set_limits(&self, used: &[Arc<str>], found: &[Lane]) {
        let mut state = self.lock();
        for name in used {
            let own = Some(Arc::clone(name));
            match found.iter().find(|lane| *lane.name == **name) {
                Some(lane) => state.set_limit(&own, lane.limit),
                None => state.known.forget(&own),
            }
        }
        self.wake(&state);
    }

    /// Sets the limit of a lane that has a request.
    pub fn set_limit(&self, lane: &Name, limit: Option<u32>) {
        let mut state = self.lock();
        state.set_limit(lane, limit);
        self.wake(&state);
    }

    /// Counts a request as finished.
    pub fn finish(&self, lane: &Name, exclusive: bool) {
        let mut state = self.lock();
        state.exclusive_runs &= !exclusive;
        state.running -= 1;
        state.lane(lane).running -= 1;
        state.settle_lane(lane);
        // This thread takes the next request, unless it pauses first.
        self.wake(&state);
    }

    /// Removes a waiting request.
    pub fn remove(&self, is_meant: impl Fn(&T) -> bool) -> Option<T> {
        let mut state = self.lock();
        let find = |name: &Name| {
            let place = state.lanes[name].waiting.iter().position(&is_meant)?;
            Some((name.clone(), place))
        };
        let strangers = (!state.is_for_console && state.lanes.contains_key(&None)).then_some(&None);
        let (name, place) = state.turns.iter().chain(strangers).find_map(find)?;
        state.remove(&name, place)
    }

    /// Ends the threads. No request may wait or come any more.
    pub fn close(&self) {
        self.lock().is_closed = true;
        self.eligible.notify_all();
        self.stranger.notify_all();
    }

    /// How many requests run, and how many wait.
    pub fn load(&self) -> (usize, usize) {
        let state = self.lock();
        (state.running, state.waiting)
    }

    /// The keys that have a request here, or have had one shed.
    pub fn lanes(&self) -> Vec<LaneLoad> {
        let state = self.lock();
        let report = |(name, lane): (&Name, &LaneState<T>)| {
            Some(LaneLoad {
                name: name.clone().filter(|_| !lane.is_unused() || lane.shed > 0)?,
                waiting: lane.waiting.len(),
                running: lane.running,
                limit: lane.limit,
                shed: lane.shed,
                longest_wait: lane.waiting.front().map(|first| first.since().elapsed()),
            })
        };
        state.lanes.iter().filter_map(report).collect()
    }

    fn free(&self, state: &State<T>) -> usize {
        self.threads.saturating_sub(state.running)
    }

    /// Sheds a request if there are more than there is room for, beside those that free threads are about to take.
    fn shed_longest(&self, state: &mut State<T>, newcomer: &Name) -> Option<T> {
        let waiting: usize = state.turns.iter().map(|name| state.lanes[name].waiting.len()).sum();
        let about_to_run = state.eligible(true).min(self.free(state));
        let longest =
            (waiting - about_to_run > self.places).then(|| state.longest_lane(newcomer)).flatten()?;
        state.shed_newest(&longest)
    }

    /// Wakes the threads that have something to do now: waking none costs a system call too.
    fn wake(&self, state: &State<T>) {
        for _ in 0..state.idle.min(state.eligible(false)) {
            self.eligible.notify_one();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Queued> LaneState<T> {
    /// How many of its waiting requests could run now, or more: of several exclusive ones only the first can. If `soon`, as
    /// if its limit had just been read.
    fn eligible(&self, exclusive_runs: bool, soon: bool) -> usize {
        if exclusive_runs && self.waiting.front().is_some_and(|first| first.ticket().exclusive) {
            return 0;
        }
        let limit = if soon || self.is_limit_read { self.limit } else { Some(1) };
        let left = limit.map_or(usize::MAX, |limit| (limit as usize).saturating_sub(self.running));
        self.waiting.len().min(left)
    }

    fn is_unused(&self) -> bool {
        self.waiting.is_empty() && self.running == 0
    }
}

impl<T: Queued> State<T> {
    /// A lane stays when it is not used, as long as there are not too many.
    fn lane(&mut self, name: &Name) -> &mut LaneState<T> {
        if self.lanes.len() > REMEMBERED && !self.lanes.contains_key(name) {
            self.lanes.retain(|_, lane| !lane.is_unused());
        }
        let is_for_console = self.is_for_console;
        self.lanes.entry(name.clone()).or_insert_with(|| LaneState {
            waiting: VecDeque::new(),
            running: 0,
            limit: None,
            is_limit_read: is_for_console,
            shed: 0,
            is_used: false,
        })
    }

    fn eligible(&self, soon: bool) -> usize {
        self.turns.iter().map(|name| self.lanes[name].eligible(self.exclusive_runs, soon)).sum()
    }

    /// The lane with the most waiting, of those whose newest request can be shed: of several, that of the newcomer.
    fn longest_lane(&self, newcomer: &Name) -> Option<Name> {
        let can_be_shed =
            |name: &&Name| self.lanes[*name].waiting.back().is_some_and(|newest| !newest.ticket().is_begun);
        let length = |name: &&Name| (self.lanes[*name].waiting.len(), *name == newcomer);
        self.turns.iter().filter(can_be_shed).max_by_key(length).cloned()
    }

    /// Gives a lane with waiting requests a turn, if it has none.
    fn take_turn(&mut self, name: &Name) {
        let lane = self.lane(name);
        lane.is_used = true;
        let is_served = !lane.waiting.is_empty() && (name.is_some() || self.is_for_console);
        if is_served && !self.turns.contains(name) {
            self.turns.push_back(name.clone());
        }
    }

    fn take_next(&mut self) -> Option<Taken<T>> {
        let turn =
            self.turns.iter().position(|name| self.lanes[name].eligible(self.exclusive_runs, false) > 0)?;
        let name = self.turns.remove(turn).expect("the position was just found");
        let lane = self.lane(&name);
        let item = lane.waiting.pop_front().expect("a lane with a turn has requests");
        lane.running += 1;
        let has_more = !lane.waiting.is_empty();
        let Ticket { credential, exclusive, .. } = *item.ticket();
        self.waiting -= 1;
        self.running += 1;
        self.exclusive_runs |= exclusive;
        let is_known = name.is_some() && credential.and_then(|digest| self.known.find(&digest)) == name;
        if has_more {
            self.turns.push_back(name.clone());
        }
        Some(Taken { lane: name, is_known, item })
    }

    fn remove(&mut self, name: &Name, place: usize) -> Option<T> {
        let removed = self.lane(name).waiting.remove(place)?;
        self.waiting -= 1;
        self.settle_lane(name);
        Some(removed)
    }

    fn shed_newest(&mut self, name: &Name) -> Option<T> {
        let lane = self.lane(name);
        lane.shed += 1;
        let newest = lane.waiting.len().checked_sub(1)?;
        self.remove(name, newest)
    }

    fn count_origin(&mut self, origin: Option<IpAddr>) {
        let Some(origin) = origin else { return };
        if self.origins.len() >= REMEMBERED && !self.origins.contains_key(&origin) {
            // An address that floods is soon ahead of the others again.
            self.origins.clear();
        }
        *self.origins.entry(origin).or_default() += 1;
    }

    /// Sheds the newest request of the stranger that sent most.
    fn shed_stranger(&mut self) -> Option<T> {
        let strangers = self.lanes.get_mut(&None)?;
        strangers.shed += 1;
        let sent = |item: &T| item.ticket().origin.and_then(|origin| self.origins.get(&origin));
        // Of several that sent most, the last.
        let (place, _) = strangers.waiting.iter().enumerate().max_by_key(|(_, item)| sent(item))?;
        self.remove(&None, place)
    }

    /// Takes the turn of a lane if nothing waits in it. If nothing runs, its limit has to be read again.
    fn settle_lane(&mut self, name: &Name) {
        let is_for_console = self.is_for_console;
        let lane = self.lane(name);
        lane.is_limit_read &= is_for_console || lane.running > 0;
        if lane.waiting.is_empty() {
            self.turns.retain(|other| other != name);
        }
    }

    fn set_limit(&mut self, name: &Name, limit: Option<u32>) {
        let is_for_console = self.is_for_console;
        let lane = self.lane(name);
        (lane.limit, lane.is_limit_read) = (limit, is_for_console || !lane.is_unused());
    }

    fn identify(&mut self, credential: Option<Digest>, lane: &Lane) {
        let Some(digest) = credential else { return };
        let name = Some(Arc::from(lane.name.as_str()));
        self.known.remember(digest, name.clone());
        let strangers = self.lane(&None);
        let (own, others): (VecDeque<_>, VecDeque<_>) =
            strangers.waiting.drain(..).partition(|item| item.ticket().credential == Some(digest));
        strangers.waiting = others;
        self.settle_lane(&None);
        self.lane(&name).waiting.extend(own);
        self.set_limit(&name, lane.limit);
        self.take_turn(&name);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

    struct Item(Ticket, u32);

    impl Queued for Item {
        fn ticket(&self) -> &Ticket {
            &self.0
        }

        fn since(&self) -> Instant {
            Instant::now()
        }
    }

    /// A queue with its threads, and what a look-up finds.
    struct Pool {
        queue: FairQueue<Item>,
        running: Vec<Taken<Item>>,
        limits: HashMap<&'static str, Option<u32>>,
        shed: Vec<u32>,
        refused: Vec<u32>,
    }

    impl Pool {
        /// Of the API.
        fn new(threads: usize, places: usize, keys: &[(&'static str, Option<u32>)]) -> Self {
            Self::with(FairQueue::new(threads, places, false), keys)
        }

        /// Of the console, whose threads serve strangers.
        fn of_console(threads: usize, places: usize) -> Self {
            Self::with(FairQueue::new(threads, places, true), &[])
        }

        fn with(queue: FairQueue<Item>, keys: &[(&'static str, Option<u32>)]) -> Self {
            let limits = keys.iter().copied().collect();
            Self { queue, running: Vec::new(), limits, shed: Vec::new(), refused: Vec::new() }
        }

        fn push(&mut self, name: &str, number: u32) {
            self.push_ticket(Ticket { credential: Some(Digest::of(name)), ..Ticket::default() }, number);
        }

        fn push_ticket(&mut self, ticket: Ticket, number: u32) {
            self.shed.extend(self.queue.push(Item(ticket, number)).map(|Item(_, number)| number));
        }

        fn find(&self, item: &Item) -> Option<Lane> {
            let (name, limit) =
                self.limits.iter().find(|(name, _)| item.0.credential == Some(Digest::of(name)))?;
            Some(Lane { name: (*name).into(), limit: *limit })
        }

        /// Looks up a stranger, if there is one.
        fn look_up(&mut self) -> bool {
            if self.queue.lock().lane(&None).waiting.is_empty() {
                return false;
            }
            let StrangerTask::LookUp(item) = self.queue.take_stranger(Instant::now() + LONG) else {
                panic!("there is a stranger, and time");
            };
            match self.find(&item) {
                Some(lane) => {
                    self.shed.extend(self.queue.admit(item, &lane).into_iter().map(|Item(_, number)| number));
                }
                None => self.refused.push(item.1),
            }
            true
        }

        /// Lets a free thread take a request, if there are both.
        fn run_next(&mut self) -> bool {
            let is_free = self.running.len() < self.queue.threads;
            let taken = is_free.then(|| self.queue.lock().take_next()).flatten();
            let is_taken = taken.is_some();
            self.running.extend(taken);
            is_taken
        }

        /// Reads the limit of a request that runs.
        fn read_limit(&mut self, place: usize) {
            let taken = &self.running[place];
            let limit = taken.lane.as_deref().and_then(|name| self.limits.get(name).copied().flatten());
            self.queue.set_limit(&taken.lane, limit);
        }

        /// Lets all threads do what they can.
        fn settle(&mut self) {
            while (!self.queue.lock().is_for_console && self.look_up()) || self.run_next() {
                (0..self.running.len()).for_each(|place| self.read_limit(place));
            }
        }

        fn read_limits(&mut self) {
            let used = self.queue.used_lanes();
            let found = |name: &Arc<str>| {
                self.limits.get(&**name).map(|limit| Lane { name: (**name).into(), limit: *limit })
            };
            self.queue.set_limits(&used, &used.iter().filter_map(found).collect::<Vec<_>>());
        }

        fn finish(&mut self, place: usize) -> u32 {
            let taken = self.running.remove(place);
            self.queue.finish(&taken.lane, taken.item.0.exclusive);
            taken.item.1
        }

        fn remove(&mut self, number: u32) -> Option<u32> {
            self.queue.remove(|item| item.1 == number).map(|item| item.1)
        }

        fn lane(&self, name: &str) -> Option<LaneLoad> {
            self.queue.lanes().into_iter().find(|lane| &*lane.name == name)
        }

        fn running_of(&self, name: &str) -> usize {
            self.running.iter().filter(|taken| taken.lane.as_deref() == Some(name)).count()
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

    const LONG: Duration = Duration::from_secs(600);

    /// Makes keys known.
    fn prime(pool: &mut Pool, names: &[&'static str]) {
        for name in names {
            pool.push(name, 0);
            pool.order();
        }
    }

    #[test]
    fn lanes_take_turns() {
        let mut pool = Pool::new(1, 100, &[("a", None), ("b", None), ("c", None)]);
        prime(&mut pool, &["a", "b", "c"]);
        for (name, numbers) in [("a", 1..=6), ("b", 11..=13), ("c", 31..=31)] {
            numbers.for_each(|number| pool.push(name, number));
        }
        assert_eq!(pool.order(), [1, 11, 31, 2, 12, 3, 13, 4, 5, 6]);
        assert_eq!((pool.queue.load(), pool.shed.len()), ((0, 0), 0));
        assert!(pool.queue.lanes().is_empty(), "a lane that is not used is not reported");
    }

    #[test]
    fn the_newest_of_the_longest_lane_is_shed() {
        let mut pool = Pool::new(1, 4, &[("a", None), ("b", None)]);
        prime(&mut pool, &["a", "b"]);
        pool.push("a", 1);
        pool.settle();
        (2..=5).for_each(|number| pool.push("a", number));
        assert!(pool.shed.is_empty(), "one runs, and four wait");
        pool.push("a", 6);
        assert_eq!(pool.shed, [6], "of one lane it is the newcomer");
        pool.push("b", 11);
        assert_eq!(pool.shed, [6, 5]);
        pool.push("b", 12);
        assert_eq!(pool.shed, [6, 5, 4]);
        pool.push("b", 13);
        assert_eq!(pool.shed, [6, 5, 4, 13], "no lane loses one to a lane as long");
        let shed = |name: &str| pool.lane(name).map(|lane| lane.shed);
        assert_eq!((shed("a"), shed("b")), (Some(3), Some(1)));
        assert_eq!(pool.order(), [1, 2, 11, 3, 12]);
        assert_eq!(pool.queue.lanes().len(), 2, "the counts stay");
    }

    #[test]
    fn free_threads_are_places_too() {
        let mut pool = Pool::new(3, 2, &[("a", None)]);
        prime(&mut pool, &["a"]);
        (1..=6).for_each(|number| pool.push("a", number));
        assert_eq!(pool.shed, [6], "three are about to run, and two wait");
    }

    #[test]
    fn strangers_have_places_of_their_own_and_no_worker() {
        for (places, most) in [(8, 9), (64, 65), (0, 1)] {
            let mut pool = Pool::new(1, places, &[("a", None)]);
            prime(&mut pool, &["a"]);
            (1..100).for_each(|number| pool.push("stranger", number));
            assert_eq!((pool.run_next(), pool.queue.load()), (false, (0, most)), "{places}");
            pool.push("a", 200);
            assert!(!pool.shed.contains(&200), "known keys have places of their own");
            pool.settle();
            assert_eq!((pool.refused.len(), pool.queue.load()), (most, (1, 0)));
        }
    }

    #[test]
    fn the_console_is_for_console_and_others_in_their_own_lanes() {
        let mut pool = Pool::of_console(1, 8);
        pool.push("stranger", 1);
        pool.settle();
        (2..100).for_each(|number| pool.push("stranger", number));
        let own = |name: &str| Ticket {
            credential: Some(Digest::of(name)),
            lane: Some("own".into()),
            ..Ticket::default()
        };
        pool.shed.clear();
        pool.push_ticket(own("x"), 200);
        pool.push_ticket(own("a"), 201);
        assert_eq!((pool.shed.len(), pool.order()), (0, vec![1, 2, 200, 3, 201]));
        pool.queue.identify(Some(Digest::of("a")), &Lane { name: "a".into(), limit: None });
        pool.push_ticket(own("x"), 202);
        pool.push_ticket(own("a"), 203);
        let waiting = |name: &str| pool.lane(name).map_or(0, |lane| lane.waiting);
        assert_eq!((waiting("own"), waiting("a")), (1, 1), "a credential that is known comes first");
        pool.settle();
        assert_eq!((pool.running[0].is_known, pool.finish(0)), (false, 202));
        pool.settle();
        assert_eq!((pool.running[0].is_known, pool.finish(0)), (true, 203));
    }

    #[test]
    fn what_has_begun_is_not_shed_and_sheds_nothing() {
        let mut pool = Pool::of_console(1, 4);
        let piece = || Ticket { lane: Some("pieces".into()), is_begun: true, ..Ticket::default() };
        pool.push_ticket(piece(), 0);
        pool.settle();
        let page = |name: &str| Ticket { lane: Some(name.into()), ..Ticket::default() };
        (1..=4).for_each(|number| pool.push_ticket(page("x"), number));
        (11..=16).for_each(|number| pool.push_ticket(piece(), number));
        assert!(pool.shed.is_empty());
        pool.push_ticket(page("y"), 21);
        assert_eq!(pool.shed, [4], "one makes room for another");
        assert_eq!(pool.order(), [0, 1, 11, 21, 2, 12, 3, 13, 14, 15, 16]);
    }

    #[test]
    fn of_strangers_the_address_that_sent_most_loses_a_request() {
        let mut pool = Pool::of_console(1, 16);
        let from = |number: u32| Ticket { origin: Some(number.to_be_bytes().into()), ..Ticket::default() };
        (1..=20).for_each(|number| pool.push_ticket(from(1), number));
        assert_eq!(pool.shed, (6..=20).collect::<Vec<_>>(), "one is about to run, and four wait");
        pool.shed.clear();
        (21..=23).for_each(|number| pool.push_ticket(from(number), number));
        assert_eq!(pool.shed, [5, 4, 3]);
        (24..=26).for_each(|number| pool.push_ticket(from(number), number));
        assert_eq!(pool.shed, [5, 4, 3, 2, 1, 26], "the newest of several");
        assert_eq!(pool.order(), [21, 22, 23, 24, 25]);
        (0..REMEMBERED as u32 + 1).for_each(|number| pool.push_ticket(from(number), number));
        assert!(pool.queue.lock().origins.len() <= REMEMBERED);
    }

    #[test]
    fn exclusive_requests_run_one_at_a_time_and_no_thread_waits_for_them() {
        let mut pool = Pool::of_console(2, 64);
        let sign_in = |lane: &str| Ticket { lane: Some(lane.into()), exclusive: true, ..Ticket::default() };
        for (lane, number) in [("x", 1), ("x", 2), ("x", 3), ("y", 11), ("z", 21)] {
            pool.push_ticket(sign_in(lane), number);
        }
        pool.settle();
        assert_eq!(pool.running.len(), 1);
        pool.push("a", 31);
        pool.settle();
        assert_eq!(pool.running.len(), 2, "another request has the other thread");
        let mut order = Vec::new();
        while let Some(place) = pool.running.iter().position(|taken| taken.item.0.exclusive) {
            order.push(pool.finish(place));
            pool.settle();
            assert!(pool.running.iter().filter(|taken| taken.item.0.exclusive).count() <= 1);
        }
        assert_eq!(order, [1, 11, 21, 2, 3], "the lanes take turns");
        assert_eq!((pool.finish(0), pool.queue.load()), (31, (0, 0)));
    }

    #[test]
    fn a_stranger_that_is_identified_takes_its_requests_along() {
        let mut pool = Pool::new(1, 64, &[("a", None)]);
        for (name, number) in [("a", 1), ("x", 11), ("a", 2), ("y", 12), ("a", 3)] {
            pool.push(name, number);
        }
        assert!(pool.look_up());
        assert_eq!(pool.lane("a").map(|lane| lane.waiting), Some(3));
        assert_eq!(pool.order(), [1, 2, 3]);
        assert_eq!(pool.refused, [11, 12]);
        let mut pool = Pool::new(1, 4, &[("a", None), ("b", None)]);
        prime(&mut pool, &["b"]);
        (0..=4).for_each(|number| pool.push("b", number));
        pool.push("a", 11);
        assert!(pool.shed.is_empty(), "one is about to run");
        assert!(pool.look_up());
        assert_eq!(pool.shed, [4]);
        assert_eq!(pool.order(), [0, 11, 1, 2, 3]);
    }

    #[test]
    fn a_limit_holds_for_the_first_burst_and_when_it_changes() {
        let mut pool = Pool::new(8, 100, &[("a", Some(2)), ("b", None)]);
        prime(&mut pool, &["b"]);
        (1..=20).for_each(|number| pool.push("a", number));
        pool.settle();
        assert_eq!((pool.running_of("a"), pool.running.len()), (2, 2), "nothing is known of it before");
        (31..=36).for_each(|number| pool.push("b", number));
        pool.settle();
        assert_eq!((pool.running_of("a"), pool.running_of("b")), (2, 6), "the others use the other threads");
        (0..6).for_each(|_| _ = pool.finish(2));
        pool.limits.insert("a", Some(5));
        pool.read_limits();
        pool.settle();
        assert_eq!(pool.running_of("a"), 5, "without the end of a request");
        pool.limits.insert("a", Some(1));
        pool.read_limit(0);
        for left in [4, 3, 2, 1, 1] {
            pool.finish(0);
            pool.settle();
            assert_eq!(pool.running_of("a"), left, "the rest waits until there is one");
        }
        pool.limits.insert("a", None);
        pool.read_limits();
        pool.settle();
        assert_eq!(pool.running_of("a"), 8);
    }

    #[test]
    fn a_lane_begins_with_one_request_until_its_limit_is_read() {
        let mut pool = Pool::new(8, 100, &[("a", None)]);
        prime(&mut pool, &["a"]);
        pool.limits.insert("a", Some(3));
        (1..=9).for_each(|number| pool.push("a", number));
        assert!(pool.run_next() && !pool.run_next(), "it may have a limit by now");
        pool.read_limit(0);
        assert!(pool.run_next() && pool.run_next() && !pool.run_next());
        (0..3).for_each(|_| _ = pool.finish(0));
        assert!(pool.run_next() && !pool.run_next(), "nothing ran, so it is read again");
        pool.finish(0);
        assert!(pool.run_next(), "although the one before it did not read it");
    }

    #[test]
    fn a_removed_request_leaves_its_turn() {
        let mut pool = Pool::new(1, 64, &[("a", None), ("b", None)]);
        prime(&mut pool, &["a", "b"]);
        for (name, number) in [("a", 1), ("a", 2), ("b", 11), ("a", 3), ("x", 21)] {
            pool.push(name, number);
        }
        assert_eq!((pool.remove(11), pool.remove(11), pool.remove(2)), (Some(11), None, Some(2)));
        assert_eq!(pool.remove(21), Some(21), "a stranger");
        assert_eq!(pool.queue.load(), (0, 2));
        assert_eq!(pool.order(), [1, 3]);
    }

    #[test]
    fn a_thousand_digests_and_lanes_are_remembered() {
        let mut known = Known::default();
        let digest = |number: usize| Digest::of(&number.to_string());
        (0..REMEMBERED).for_each(|number| known.remember(digest(number), Some("a".into())));
        assert!(known.find(&digest(0)).is_some(), "this use counts");
        known.remember(digest(REMEMBERED), Some("b".into()));
        assert_eq!((known.find(&digest(1)), known.find(&digest(0)).as_deref()), (None, Some("a")));
        known.forget(&Some("a".into()));
        assert_eq!((known.find(&digest(0)), known.find(&digest(REMEMBERED)).as_deref()), (None, Some("b")));
        let mut pool = Pool::of_console(1, 4);
        for number in 0..3 * REMEMBERED {
            pool.push_ticket(Ticket { lane: Some(number.to_string().into()), ..Ticket::default() }, 0);
            pool.order();
            assert!(pool.queue.lock().lanes.len() <= REMEMBERED + 1);
        }
    }

    #[test]
    fn a_revoked_key_is_a_stranger_again() {
        let mut pool = Pool::new(1, 64, &[("a", None)]);
        prime(&mut pool, &["a"]);
        pool.limits.clear();
        pool.read_limits();
        pool.push("a", 1);
        pool.settle();
        assert_eq!((pool.refused, pool.running.len()), (vec![1], 0));
        pool.queue.used_lanes();
        assert!(pool.queue.used_lanes().is_empty(), "it is not looked up for ever");
    }

    /// A thread that nobody wakes would hang this test.
    #[test]
    fn threads_are_woken_for_what_they_may_take_and_when_the_queue_is_closed() {
        let pool = Pool::new(3, 64, &[]);
        let (queue, key) = (&pool.queue, Lane { name: "a".into(), limit: Some(1) });
        let until = |condition: &dyn Fn() -> bool| {
            let end = Instant::now() + LONG;
            while !condition() {
                assert!(Instant::now() < end);
                thread::yield_now();
            }
        };
        thread::scope(|scope| {
            let workers = [(); 3].map(|()| scope.spawn(|| queue.take().map(|taken| taken.item.1)));
            until(&|| queue.lock().idle == 3);
            let strangers = scope.spawn(|| queue.take_stranger(Instant::now() + LONG));
            let ticket = || Ticket { credential: Some(Digest::of("a")), ..Ticket::default() };
            queue.push(Item(ticket(), 1));
            let StrangerTask::LookUp(item) = strangers.join().expect("no panic") else {
                panic!("a stranger")
            };
            queue.admit(item, &key);
            until(&|| queue.load() == (1, 0));
            queue.push(Item(ticket(), 2));
            queue.set_limit(&Some("a".into()), Some(1));
            assert_eq!(queue.load(), (1, 1), "it is at its limit");
            queue.set_limits(&queue.used_lanes(), &[Lane { limit: Some(2), ..key }]);
            until(&|| queue.load() == (2, 0));
            let strangers = scope.spawn(|| queue.take_stranger(Instant::now() + LONG));
            queue.close();
            assert!(matches!(strangers.join().expect("no panic"), StrangerTask::End));
            let mut taken = workers.map(|worker| worker.join().expect("no panic"));
            taken.sort();
            assert_eq!(taken, [None, Some(1), Some(2)]);
        });
        assert!(matches!(queue.take_stranger(Instant::now()), StrangerTask::Other), "the time is over");
    }

    /// Random sequences, against what a plain count of the requests says: no limit is exceeded, no request is lost, and none
    /// that could run waits while a thread is free.
    #[test]
    fn no_request_that_could_run_waits_for_a_free_thread() {
        const NAMES: [&str; 5] = ["a", "b", "c", "x", "y"];
        for seed in 1..=40_u64 {
            let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
            let mut draw = |below: usize| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                (random >> 33) as usize % below
            };
            let threads = 1 + draw(6);
            let mut pool = Pool::new(threads, draw(30), &[("a", Some(1)), ("b", Some(3)), ("c", None)]);
            let mut waiting: Vec<(u32, &str)> = Vec::new();
            for number in 0..3000 {
                match draw(11) {
                    0..=2 => {
                        let name = NAMES[draw(NAMES.len())];
                        waiting.push((number, name));
                        pool.push(name, number);
                    }
                    3 | 4 => _ = pool.run_next(),
                    9 if !pool.running.is_empty() => pool.read_limit(draw(pool.running.len())),
                    5 | 6 if !pool.running.is_empty() => {
                        let place = draw(pool.running.len());
                        pool.finish(place);
                    }
                    7 if !waiting.is_empty() => {
                        let (number, _) = waiting.remove(draw(waiting.len()));
                        assert_eq!(pool.remove(number), Some(number));
                    }
                    8 => _ = pool.look_up(),
                    _ => {}
                }
                let is_over = |number: &u32| {
                    pool.running.iter().any(|taken| taken.item.1 == *number)
                        || pool.shed.contains(number)
                        || pool.refused.contains(number)
                };
                waiting.retain(|(number, _)| !is_over(number));
                assert_eq!(pool.queue.load(), (pool.running.len(), waiting.len()), "seed {seed}");
                for (name, limit) in &pool.limits {
                    let most = limit.map_or(usize::MAX, |limit| limit as usize);
                    assert!(pool.running_of(name) <= most, "seed {seed}");
                }
                let can_run = |&(_, name): &(u32, &str)| {
                    let limit = pool.limits.get(name).copied().flatten();
                    let is_known = pool.queue.lock().known.find(&Digest::of(name)).is_some();
                    let is_read = pool.queue.lock().lane(&Some(name.into())).is_limit_read;
                    let limit = if is_read { limit } else { Some(1) };
                    is_known && limit.is_none_or(|limit| pool.running_of(name) < limit as usize)
                };
                if !waiting.iter().any(can_run) {
                    assert!(!pool.run_next(), "seed {seed}, step {number}");
                } else if pool.running.len() < threads {
                    assert!(pool.queue.lock().eligible(false) > 0, "seed {seed}, step {number}: {waiting:?}");
                }
            }
            let (left, refused) = (waiting.len() + pool.running.len(), pool.refused.len());
            let served = pool.order().len() + pool.refused.len() - refused;
            assert_eq!((left, pool.queue.load()), (served, (0, 0)), "seed {seed}");
        }
    }
}
