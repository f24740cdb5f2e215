//! The threads that respond to requests: the API's workers, the thread that looks up unknown keys,
//! and the console's; and the watchdog that notices when they hang.

use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use threadpool::ThreadPool;

use super::connection::Outgoing;
use super::dispatcher::{Area, Completed, Outcome};
use super::{ListenerState, PendingRequest};
use crate::http::Response;
use crate::locks::lock;

/// How much the console's threads give way to others, as nice(2) counts it. Without it, constant use
/// of the console costs the API a third of its rate (`make bench-console`).
const CONSOLE_NICE: i32 = 10;

/// Starts the threads of all areas. They end when the dispatcher is closed.
pub(super) fn start(state: &Arc<ListenerState>) -> io::Result<Vec<ThreadPool>> {
    let start = |area| {
        let (name, run): (_, fn(&ListenerState)) = match area {
            Area::Api => ("worker", |state| respond(state, Area::Api)),
            Area::LookUp => ("look-up", look_up),
            Area::Console => ("console", |state| {
                // If the system does not allow it, pages cost the API more.
                let _ = rustix::process::nice(CONSOLE_NICE);
                respond(state, Area::Console);
            }),
        };
        let threads = state.dispatcher.threads(area);
        let pool = start_pool(name, threads)?;
        for _ in 0..threads {
            let state = Arc::clone(state);
            pool.execute(move || run(&state));
        }
        Ok(pool)
    };
    let pools: io::Result<_> = Area::ALL.into_iter().map(start).collect();
    pools.inspect_err(|_| state.dispatcher.close())
}

/// Starts the threads of an area. Fails if the system does not allow so many: the crate would panic,
/// so as many threads of our own are started first, all at once, and end again.
fn start_pool(name: &str, count: usize) -> io::Result<ThreadPool> {
    let gate = Mutex::new(());
    thread::scope(|scope| {
        let closed = lock(&gate);
        let start = |_| thread::Builder::new().spawn_scoped(scope, || drop(lock(&gate)));
        let threads: io::Result<Vec<_>> = (0..count).map(start).collect();
        drop(closed);
        for thread in threads? {
            // The scope alone would not wait until the system has removed the thread.
            let _ = thread.join();
        }
        Ok::<_, io::Error>(())
    })?;
    Ok(ThreadPool::with_name(name.to_owned(), count))
}

/// Takes request after request from its first step to its response.
fn respond(state: &ListenerState, area: Area) {
    while let Some(pending) = state.dispatcher.next(area) {
        let response = contain_panic(|| {
            let is_gone = pending.cancellation.is_cancelled();
            (!is_gone).then(|| pending.service.respond(&pending, &state.dispatcher))
        });
        let response = encode(state, &pending, response.flatten());
        // Before the response is sent: the client's next request must find room.
        state.dispatcher.finish(&pending);
        state.dispatcher.complete(Completed {
            connection: pending.connection,
            area,
            outcome: Outcome::Response(response),
        });
    }
}

/// Looks up the keys of requests, one at a time. A request whose key is valid goes back to the loop,
/// which knows its lane then, unless the look-up answers it.
fn look_up(state: &ListenerState) {
    while let Some(pending) = state.dispatcher.next(Area::LookUp) {
        let found = contain_panic(|| pending.service.look_up(&pending));
        state.dispatcher.finish(&pending);
        let connection = pending.connection;
        let outcome = match found {
            Some(Ok(lane)) => {
                state
                    .dispatcher
                    .note_accepted(&pending, &lane.name, lane.limit);
                Outcome::LookedUp(pending)
            }
            answered => {
                let response = answered.and_then(Result::err);
                Outcome::Response(encode(state, &pending, response))
            }
        };
        state.dispatcher.complete(Completed {
            connection,
            area: Area::LookUp,
            outcome,
        });
    }
}

/// Encodes a response. Without one, after a panic, the connection closes.
fn encode(state: &ListenerState, pending: &PendingRequest, response: Option<Response>) -> Outgoing {
    let is_body_read = pending.request.body.is_some();
    response.map_or_else(Outgoing::none, |response| {
        Outgoing::encode(
            response,
            &pending.request.head,
            is_body_read,
            state.is_stopping(),
        )
    })
}

/// A panic ends what a thread does for one request, not the thread. Its message is in the log.
fn contain_panic<T>(work: impl FnOnce() -> T) -> Option<T> {
    panic::catch_unwind(AssertUnwindSafe(work)).ok()
}

/// Feeds systemd's watchdog from the event loop, also while no event comes.
///
/// The watchdog is not fed if a restart would help: the event loop hangs, or every worker is
/// overdue, as it is if a write to the database hangs. On a full disk or a locked database, writes
/// fail in time; a restart would only lose running requests.
pub struct Watchdog {
    /// Half of systemd's interval.
    pause: Duration,
    next: Instant,
    /// The last logged reason why it is not fed.
    trouble: Option<&'static str>,
    feed: Box<dyn Fn() + Send>,
}

impl Watchdog {
    /// `interval` is the time after which systemd ends a service that does not feed it.
    pub fn new(interval: Duration, feed: impl Fn() + Send + 'static) -> Self {
        Self {
            pause: interval / 2,
            next: Instant::now(),
            trouble: None,
            feed: Box::new(feed),
        }
    }

    /// Returns when it has to run next.
    pub fn due(&self) -> Instant {
        self.next
    }

    pub fn run(&mut self, now: Instant, are_workers_stuck: bool) {
        self.next = now + self.pause;
        let trouble = if are_workers_stuck {
            Some("every worker has been busy with one request for longer than a request may take")
        } else {
            (self.feed)();
            None
        };
        if trouble != self.trouble {
            match trouble {
                Some(trouble) => log::error!("the watchdog is not fed: {trouble}"),
                None => log::info!("the watchdog is fed again"),
            }
            self.trouble = trouble;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn it_is_fed_twice_an_interval_unless_a_restart_would_help() {
        let fed = Arc::new(AtomicU32::new(0));
        let feeds = Arc::clone(&fed);
        let feed = move || _ = feeds.fetch_add(1, Ordering::Relaxed);
        let mut watchdog = Watchdog::new(Duration::from_secs(30), feed);
        let mut now = watchdog.due();
        for (are_workers_stuck, expected) in [(false, 1), (true, 1), (false, 2)] {
            watchdog.run(now, are_workers_stuck);
            assert_eq!(fed.load(Ordering::Relaxed), expected);
            now += Duration::from_secs(15);
            assert_eq!(watchdog.due(), now);
        }
    }
}
