//! The queue before a thread group: bounded, with a lane for each key, served round robin.
//!
//! The pool's own queue holds tokens, never requests: a token lets a thread take the next eligible request, or nothing.
//! There are at least as many tokens as eligible requests, so none of these waits while a thread is free.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::store::Digest;

/// How many accepted keys or sessions are remembered. It only decides which lane a request waits in.
const REMEMBERED: usize = 1024;

/// Whose request it is, once it was looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lane {
    /// A key's id.
    pub name: String,
    /// How many of its requests run at once.
    pub limit: Option<usize>,
}

/// What the head of a request decides about its place in the queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ticket {
    /// The digest of the key or session that it presents.
    pub credential: Option<Digest>,
    /// The lane of a request whose credential is not known; `None` is the lane that all strangers share.
    pub lane: Option<Arc<str>>,
    /// The address of a stranger. If there are too many strangers, the address that sent most loses a request.
    pub origin: Option<IpAddr>,
    /// One of these runs at a time, whatever its lane. The others wait without a thread.
    pub exclusive: bool,
}

/// What the queue holds for one key.
#[derive(Debug, PartialEq, Eq)]
pub struct LaneLoad {
    pub name: Arc<str>,
    pub waiting: usize,
    pub running: usize,
    pub limit: Option<usize>,
    /// Since the start.
    pub shed: u64,
    /// The age of the oldest request that waits.
    pub longest_wait: Option<Duration>,
}

pub(super) struct FairQueue<T> {
    threads: usize,
    places: usize,
    state: Mutex<State<T>>,
}

/// A lane's name; `None` is the lane that all strangers share.
type Name = Option<Arc<str>>;

struct State<T> {
    lanes: HashMap<Name, LaneState<T>>,
    /// The lanes with waiting requests, in the order of their turns.
    turns: VecDeque<Name>,
    waiting: usize,
    running: usize,
    exclusive_runs: bool,
    /// In the pool's queue, or with a thread that is about to take a request.
    tokens: usize,
    known: Known,
    /// How many requests each address of a stranger has sent.
    origins: HashMap<IpAddr, u64>,
}

struct LaneState<T> {
    waiting: VecDeque<Waiting<T>>,
    running: usize,
    limit: Option<usize>,
    shed: u64,
}

struct Waiting<T> {
    ticket: Ticket,
    since: Instant,
    item: T,
}

/// A request with a thread. It counts as running until [`FairQueue::finish`].
pub(super) struct Taken<T> {
    pub lane: Name,
    pub ticket: Ticket,
    since: Instant,
    pub item: T,
}

impl<T> FairQueue<T> {
    /// The queue of so many threads, with room for so many requests beside those that a free thread takes at once.
    pub fn new(threads: usize, places: usize) -> Self {
        let state = State {
            lanes: HashMap::new(),
            turns: VecDeque::new(),
            waiting: 0,
            running: 0,
            exclusive_runs: false,
            tokens: 0,
            known: Known::default(),
            origins: HashMap::new(),
        };
        Self { threads, places, state: Mutex::new(state) }
    }

    /// Queues a request, and returns those for which there is no room: the newest of the lane with the most waiting.
    /// Strangers have a quarter of the places.
    pub fn push(&self, ticket: Ticket, item: T) -> Vec<T> {
        let mut state = self.lock();
        let known = ticket.credential.and_then(|digest| state.known.find(&digest));
        let name = known.or_else(|| ticket.lane.clone());
        state.count_origin(ticket.origin.filter(|_| name.is_none()));
        state.lane(&name).waiting.push_back(Waiting { ticket, since: Instant::now(), item });
        state.note_waiting(&name);
        let mut shed = Vec::new();
        let free = self.threads.saturating_sub(state.running);
        if name.is_none() && state.lane(&None).waiting.len().saturating_sub(free) > (self.places / 4).max(1) {
            shed.extend(state.shed_stranger());
        }
        while state.waiting - state.eligible().min(free) > self.places {
            let longest =
                state.turns.iter().max_by_key(|&lane| (state.lanes[lane].waiting.len(), *lane == name));
            let longest = longest.expect("a full queue should have a lane").clone();
            shed.extend(state.shed_newest(&longest));
        }
        shed
    }

    /// How many tokens the pool needs more. The caller has to submit them.
    pub fn claim_tokens(&self) -> usize {
        let mut state = self.lock();
        let missing = state.eligible().saturating_sub(state.tokens);
        state.tokens += missing;
        missing
    }

    /// Takes the request whose turn it is, for a token.
    pub fn take(&self) -> Option<Taken<T>> {
        let mut state = self.lock();
        state.tokens -= 1;
        let exclusive_runs = state.exclusive_runs;
        let turn = state.turns.iter().position(|name| state.lanes[name].eligible(exclusive_runs) > 0)?;
        let name = state.turns.remove(turn).expect("the position was just found");
        let lane = state.lane(&name);
        let Waiting { ticket, since, item } =
            lane.waiting.pop_front().expect("a lane with a turn has requests");
        lane.running += 1;
        if !lane.waiting.is_empty() {
            state.turns.push_back(name.clone());
        }
        state.waiting -= 1;
        state.running += 1;
        state.exclusive_runs |= ticket.exclusive;
        Some(Taken { lane: name, ticket, since, item })
    }

    /// Starts a request that was looked up meanwhile. If its lane is at its limit, the request goes back to wait there:
    /// then this returns `None`, and the thread has its token again.
    pub fn start(&self, taken: Taken<T>, found: Option<Lane>) -> Option<Taken<T>> {
        let mut state = self.lock();
        state.leave(&taken.lane);
        let known = found.as_ref().map(|lane| Arc::from(lane.name.as_str()));
        if let Some(digest) = taken.ticket.credential {
            state.identify(digest, &known);
        }
        let name = known.or_else(|| taken.ticket.lane.clone());
        let lane = state.lane(&name);
        lane.limit = found.and_then(|lane| lane.limit);
        if lane.limit.is_some_and(|limit| lane.running >= limit) {
            let Taken { ticket, since, item, .. } = taken;
            state.exclusive_runs &= !ticket.exclusive;
            state.lane(&name).waiting.push_front(Waiting { ticket, since, item });
            state.note_waiting(&name);
            state.tokens += 1;
            return None;
        }
        lane.running += 1;
        state.running += 1;
        Some(Taken { lane: name, ..taken })
    }

    /// Counts a request as finished.
    pub fn finish(&self, lane: &Name, exclusive: bool) {
        let mut state = self.lock();
        state.exclusive_runs &= !exclusive;
        state.leave(lane);
    }

    /// Removes a waiting request.
    pub fn remove(&self, is_meant: impl Fn(&T) -> bool) -> Option<T> {
        let mut state = self.lock();
        let find = |name: &Name| {
            let place = state.lanes[name].waiting.iter().position(|waiting| is_meant(&waiting.item))?;
            Some((name.clone(), place))
        };
        let (name, place) = state.turns.iter().find_map(find)?;
        state.remove(&name, place)
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
                name: name.clone()?,
                waiting: lane.waiting.len(),
                running: lane.running,
                limit: lane.limit,
                shed: lane.shed,
                longest_wait: lane.waiting.front().map(|waiting| waiting.since.elapsed()),
            })
        };
        state.lanes.iter().filter_map(report).collect()
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> LaneState<T> {
    /// How many of its waiting requests could run now, or more: of several exclusive ones only the first can.
    fn eligible(&self, exclusive_runs: bool) -> usize {
        if exclusive_runs && self.waiting.front().is_some_and(|first| first.ticket.exclusive) {
            return 0;
        }
        let left = self.limit.map_or(usize::MAX, |limit| limit.saturating_sub(self.running));
        self.waiting.len().min(left)
    }
}

impl<T> State<T> {
    fn lane(&mut self, name: &Name) -> &mut LaneState<T> {
        self.lanes.entry(name.clone()).or_insert_with(|| LaneState {
            waiting: VecDeque::new(),
            running: 0,
            limit: None,
            shed: 0,
        })
    }

    fn eligible(&self) -> usize {
        self.turns.iter().map(|name| self.lanes[name].eligible(self.exclusive_runs)).sum()
    }

    /// Counts a request that was just added to a lane.
    fn note_waiting(&mut self, name: &Name) {
        self.waiting += 1;
        if !self.turns.contains(name) {
            self.turns.push_back(name.clone());
        }
    }

    fn remove(&mut self, name: &Name, place: usize) -> Option<T> {
        let removed = self.lane(name).waiting.remove(place)?;
        self.waiting -= 1;
        self.clear_lane(name);
        Some(removed.item)
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
        let sent = |waiting: &Waiting<T>| waiting.ticket.origin.and_then(|origin| self.origins.get(&origin));
        // Of several that sent most, the last.
        let (place, _) = strangers.waiting.iter().enumerate().max_by_key(|(_, waiting)| sent(waiting))?;
        self.remove(&None, place)
    }

    fn leave(&mut self, name: &Name) {
        self.lane(name).running -= 1;
        self.running -= 1;
        self.clear_lane(name);
    }

    /// Takes the turn of a lane without waiting requests. An unused lane stays for its count of shed requests, as long as
    /// there are not too many.
    fn clear_lane(&mut self, name: &Name) {
        let many = self.lanes.len() > REMEMBERED;
        let lane = self.lane(name);
        if lane.waiting.is_empty() {
            let is_unused = lane.running == 0 && (lane.shed == 0 || many);
            self.turns.retain(|other| other != name);
            if is_unused {
                self.lanes.remove(name);
            }
        }
    }

    /// Remembers or forgets whose digest it is. The requests with this digest that wait among the strangers move to the
    /// lane of their own.
    fn identify(&mut self, digest: Digest, name: &Name) {
        let Some(own) = name else {
            return self.known.forget(&digest);
        };
        self.known.remember(digest, Arc::clone(own));
        let Some(strangers) = self.lanes.get_mut(&None) else { return };
        let (own, others): (VecDeque<_>, VecDeque<_>) =
            strangers.waiting.drain(..).partition(|waiting| waiting.ticket.credential == Some(digest));
        strangers.waiting = others;
        if !own.is_empty() {
            self.lane(name).waiting.extend(own);
            if !self.turns.contains(name) {
                self.turns.push_back(name.clone());
            }
            self.clear_lane(&None);
        }
    }
}

/// The digests that were accepted lately, and their lanes.
#[derive(Default)]
struct Known {
    lanes: HashMap<Digest, (Arc<str>, u64)>,
    /// Counts the uses, to find the least recent.
    uses: u64,
}

impl Known {
    fn find(&self, digest: &Digest) -> Name {
        self.lanes.get(digest).map(|(name, _)| Arc::clone(name))
    }

    fn remember(&mut self, digest: Digest, name: Arc<str>) {
        self.uses += 1;
        self.lanes.insert(digest, (name, self.uses));
        if self.lanes.len() > REMEMBERED {
            let oldest = self.lanes.iter().min_by_key(|(_, (_, used))| *used).map(|(digest, _)| *digest);
            oldest.inspect(|digest| self.forget(digest));
        }
    }

    fn forget(&mut self, digest: &Digest) {
        self.lanes.remove(digest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A queue with its pool: tokens that wait for a thread, and the requests that run.
    struct Pool {
        queue: FairQueue<u32>,
        tokens: usize,
        running: Vec<Taken<u32>>,
        /// What a look-up finds for the digest of a name.
        limits: HashMap<&'static str, Option<usize>>,
        names: HashMap<Digest, &'static str>,
        shed: Vec<u32>,
    }

    impl Pool {
        fn new(threads: usize, places: usize, keys: &[(&'static str, Option<usize>)]) -> Self {
            Self {
                queue: FairQueue::new(threads, places),
                tokens: 0,
                running: Vec::new(),
                limits: keys.iter().copied().collect(),
                names: keys.iter().map(|(name, _)| (Digest::of(name), *name)).collect(),
                shed: Vec::new(),
            }
        }

        fn push(&mut self, name: &str, number: u32) {
            self.push_ticket(Ticket { credential: Some(Digest::of(name)), ..Ticket::default() }, number);
        }

        fn push_ticket(&mut self, ticket: Ticket, number: u32) {
            self.shed.extend(self.queue.push(ticket, number));
            self.tokens += self.queue.claim_tokens();
        }

        /// Runs a token on a free thread, if there are both. Returns whether there were.
        fn run_token(&mut self) -> bool {
            if self.tokens == 0 || self.running.len() == self.queue.threads {
                return false;
            }
            self.tokens -= 1;
            while let Some(taken) = self.queue.take() {
                let name = taken.ticket.credential.and_then(|digest| self.names.get(&digest).copied());
                let lane = name.map(|name| Lane { name: name.into(), limit: self.limits[name] });
                let started = self.queue.start(taken, lane);
                self.tokens += self.queue.claim_tokens();
                if let Some(taken) = started {
                    self.running.push(taken);
                    break;
                }
            }
            true
        }

        /// Lets the pool do what it can.
        fn settle(&mut self) {
            while self.run_token() {}
        }

        fn finish(&mut self, place: usize) -> u32 {
            let taken = self.running.remove(place);
            self.queue.finish(&taken.lane, taken.ticket.exclusive);
            self.tokens += self.queue.claim_tokens();
            taken.item
        }

        fn remove(&mut self, number: u32) -> Option<u32> {
            let removed = self.queue.remove(|item| *item == number);
            self.tokens += self.queue.claim_tokens();
            removed
        }

        fn running_of(&self, name: &str) -> usize {
            self.running.iter().filter(|taken| taken.lane.as_deref() == Some(name)).count()
        }

        /// Serves everything with one request at a time, and returns the order.
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

    /// Makes a key known.
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
        for (name, numbers) in [("a", 1..=6), ("b", 11..=13), ("stranger", 21..=22), ("c", 31..=31)] {
            numbers.for_each(|number| pool.push(name, number));
        }
        assert_eq!(pool.order(), [1, 11, 21, 31, 2, 12, 22, 3, 13, 4, 5, 6]);
        assert_eq!((pool.queue.load(), pool.shed.len()), ((0, 0), 0));
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
        let shed =
            |name: &str| pool.queue.lanes().iter().find(|lane| &*lane.name == name).map(|lane| lane.shed);
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
    fn strangers_have_a_quarter_of_the_places() {
        for (places, most) in [(8, 2), (64, 16), (1, 1), (3, 1)] {
            let mut pool = Pool::new(1, places, &[("a", None)]);
            prime(&mut pool, &["a"]);
            pool.push("stranger", 1);
            pool.settle();
            (2..100).for_each(|number| pool.push("stranger", number));
            assert_eq!(pool.queue.load(), (1, most), "{places}");
            pool.push("a", 200);
            assert!(places == most || !pool.shed.contains(&200), "the others are for known keys");
        }
    }

    #[test]
    fn a_lane_that_needs_no_look_up_is_not_the_strangers() {
        let mut pool = Pool::new(1, 8, &[("a", None)]);
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
        pool.push_ticket(own("x"), 202);
        pool.push_ticket(own("a"), 203);
        let waiting = |name: &str| {
            pool.queue.lanes().iter().find(|lane| &*lane.name == name).map_or(0, |lane| lane.waiting)
        };
        assert_eq!((waiting("own"), waiting("a")), (1, 1), "a credential that is known comes first");
    }

    #[test]
    fn of_strangers_the_address_that_sent_most_loses_a_request() {
        let mut pool = Pool::new(1, 16, &[]);
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
        let mut pool = Pool::new(2, 64, &[("a", None)]);
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
        while let Some(place) = pool.running.iter().position(|taken| taken.ticket.exclusive) {
            order.push(pool.finish(place));
            pool.settle();
            assert!(pool.running.iter().filter(|taken| taken.ticket.exclusive).count() <= 1);
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
        assert!(pool.run_token());
        let lanes = pool.queue.lanes();
        assert_eq!((lanes.len(), lanes[0].running, lanes[0].waiting), (1, 1, 2));
        assert_eq!(pool.order(), [1, 11, 2, 12, 3]);
    }

    #[test]
    fn a_limit_holds_for_the_first_burst_and_when_it_changes() {
        let mut pool = Pool::new(8, 100, &[("a", Some(2)), ("b", None)]);
        prime(&mut pool, &["b"]);
        (1..=20).for_each(|number| pool.push("a", number));
        pool.settle();
        assert_eq!((pool.running_of("a"), pool.running.len()), (2, 2), "nothing is known of it before");
        (31..=40).for_each(|number| pool.push("b", number));
        pool.settle();
        assert_eq!((pool.running_of("a"), pool.running_of("b")), (2, 6), "the others use the other threads");
        pool.limits.insert("a", Some(5));
        let place = pool.running.iter().position(|taken| taken.item < 30).expect("one of a");
        pool.finish(place);
        while let Some(place) = pool.running.iter().position(|taken| taken.item > 30) {
            pool.finish(place);
            pool.settle();
        }
        assert_eq!(pool.running_of("a"), 5);
        pool.limits.insert("a", Some(1));
        for left in [4, 3, 2, 1, 1] {
            pool.finish(0);
            pool.settle();
            assert_eq!(pool.running_of("a"), left, "the rest waits until there is one");
        }
        pool.limits.insert("a", None);
        pool.finish(0);
        pool.settle();
        assert_eq!(pool.running_of("a"), 8);
    }

    #[test]
    fn a_removed_request_leaves_its_turn() {
        let mut pool = Pool::new(1, 64, &[("a", None), ("b", None)]);
        prime(&mut pool, &["a", "b"]);
        for (name, number) in [("a", 1), ("a", 2), ("b", 11), ("a", 3)] {
            pool.push(name, number);
        }
        assert_eq!((pool.remove(11), pool.remove(11), pool.remove(2)), (Some(11), None, Some(2)));
        assert_eq!(pool.queue.load(), (0, 2));
        assert_eq!(pool.order(), [1, 3]);
        // Its token serves the next request: the pool's queue does not grow.
        for number in 0..1000 {
            pool.push("a", number);
            pool.remove(number);
        }
        assert_eq!(pool.tokens, 1);
        pool.push("a", 1);
        assert_eq!((pool.tokens, pool.order()), (1, vec![1]));
    }

    #[test]
    fn a_thousand_digests_are_remembered() {
        let mut known = Known::default();
        let digest = |number: usize| Digest::of(&number.to_string());
        (0..REMEMBERED).for_each(|number| known.remember(digest(number), "a".into()));
        known.remember(digest(0), "a".into());
        known.remember(digest(REMEMBERED), "b".into());
        assert_eq!(known.lanes.len(), REMEMBERED);
        assert_eq!((known.find(&digest(1)), known.find(&digest(0)).as_deref()), (None, Some("a")));
        known.forget(&digest(REMEMBERED));
        assert_eq!(known.find(&digest(REMEMBERED)), None);
    }

    #[test]
    fn a_refused_key_is_a_stranger_again() {
        let mut pool = Pool::new(1, 64, &[("a", None)]);
        prime(&mut pool, &["a"]);
        pool.names.clear();
        pool.push("a", 1);
        pool.settle();
        assert_eq!(pool.running[0].lane, None);
        pool.push("a", 2);
        assert!(pool.queue.lanes().is_empty());
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
                match draw(8) {
                    0..=2 => {
                        let name = NAMES[draw(NAMES.len())];
                        waiting.push((number, name));
                        pool.push(name, number);
                    }
                    3 | 4 => _ = pool.run_token(),
                    5 | 6 if !pool.running.is_empty() => {
                        let place = draw(pool.running.len());
                        pool.finish(place);
                    }
                    7 if !waiting.is_empty() => {
                        let (number, _) = waiting.remove(draw(waiting.len()));
                        assert_eq!(pool.remove(number), Some(number));
                    }
                    _ => {}
                }
                let is_taken = |number: &u32| pool.running.iter().any(|taken| taken.item == *number);
                waiting.retain(|(number, _)| !is_taken(number) && !pool.shed.contains(number));
                assert_eq!(pool.queue.load(), (pool.running.len(), waiting.len()), "seed {seed}");
                for (name, limit) in &pool.limits {
                    assert!(limit.is_none_or(|limit| pool.running_of(name) <= limit), "seed {seed}");
                }
                let can_run = |&(_, name): &(u32, &str)| {
                    let limit = pool.limits.get(name).copied().flatten();
                    limit.is_none_or(|limit| pool.running_of(name) < limit)
                };
                if pool.tokens == 0 {
                    assert!(!waiting.iter().any(can_run), "seed {seed}, step {number}: {waiting:?}");
                }
                assert!(pool.tokens <= waiting.len() + 64, "seed {seed}: {} tokens", pool.tokens);
            }
            let (left, served) = (waiting.len() + pool.running.len(), pool.order().len());
            assert_eq!((left, pool.queue.load()), (served, (0, 0)), "seed {seed}");
        }
    }
}
