//! A thread that stands beside the service: it takes the configuration anew on SIGHUP, and tells the service
//! manager that the service is ready, how it does, and that it is alive.
//!
//! Alive means that a restart would not help. The loop turns and a worker takes what it is given, or all of
//! them have work that is not overdue. The ledger answers a write in time, whatever it answers: a full disk or
//! another process that holds the database is told to the clients, and a restart would not make room, but it
//! would lose what is under way.

mod notify;

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::{flag, low_level::pipe};

pub use notify::Notify;

use crate::listener::Pulse;
use crate::store::Store;

/// How often the status text is brought up to date, where it has changed.
const STATUS_TIME: Duration = Duration::from_secs(5);

/// What the supervisor watches over, and what it does when it is asked to.
pub struct Watched {
    pub notify: Option<Notify>,
    pub pulse: Arc<Pulse>,
    pub store: Arc<Store>,
    /// The longest that a request may be with a worker.
    pub longest_work: Duration,
    /// How the service does, in a line for people.
    pub status: Box<dyn Fn() -> String + Send>,
    /// Takes the configuration anew.
    pub reload: Box<dyn FnMut() + Send>,
}

/// It ends when the value goes.
pub struct Supervisor {
    asked: Arc<Asked>,
    waker: UnixStream,
    thread: Option<JoinHandle<()>>,
}

/// What it is asked for; whoever asks wakes it.
#[derive(Default)]
struct Asked {
    ready: AtomicBool,
    reload: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
    end: AtomicBool,
}

impl Supervisor {
    pub fn start(watched: Watched) -> io::Result<Self> {
        let (wake, waker) = UnixStream::pair()?;
        let asked = Arc::new(Asked::default());
        let now = Instant::now();
        let rounds = Rounds {
            feed_time: watched.notify.as_ref().and_then(|notify| notify.watchdog).map(|time| time / 2),
            watched,
            wake,
            asked: Arc::clone(&asked),
            next_status: now + STATUS_TIME,
            next_feed: now,
            status: String::new(),
            trouble: None,
        };
        let thread = thread::Builder::new().name("supervisor".into()).spawn(|| rounds.run())?;
        Ok(Self { asked, waker, thread: Some(thread) })
    }

    /// The service manager is to be told that the service is ready.
    pub fn ready(&self) {
        self.ask(&self.asked.ready);
    }

    fn ask(&self, what: &AtomicBool) {
        what.store(true, Ordering::Release);
        let _ = (&self.waker).write_all(b"a");
    }

    /// From now on SIGHUP reloads, and the service manager is told when the service is about to stop.
    pub fn heed_signals(&self) -> io::Result<()> {
        let Asked { reload, stop, .. } = &*self.asked;
        for (signal, asked) in [(SIGHUP, reload), (SIGTERM, stop), (SIGINT, stop)] {
            // The order counts: whoever is woken has to find the flag.
            flag::register(signal, Arc::clone(asked))?;
            pipe::register(signal, self.waker.try_clone()?)?;
        }
        Ok(())
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.ask(&self.asked.end);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Rounds {
    watched: Watched,
    asked: Arc<Asked>,
    /// A byte comes whenever something is asked for.
    wake: UnixStream,
    /// How often the watchdog is fed: twice as often as it has to be.
    feed_time: Option<Duration>,
    next_feed: Instant,
    next_status: Instant,
    /// What was told last.
    status: String,
    /// Why the watchdog is not fed.
    trouble: Option<&'static str>,
}

impl Rounds {
    fn run(mut self) {
        loop {
            if self.asked.ready.swap(false, Ordering::AcqRel) {
                self.tell("READY=1");
            }
            if self.asked.reload.swap(false, Ordering::AcqRel) {
                self.reload();
            }
            if self.asked.stop.swap(false, Ordering::AcqRel) {
                self.tell("STOPPING=1");
            }
            // Last, because a short stop is over before it is told.
            if self.asked.end.load(Ordering::Acquire) {
                return;
            }
            let now = Instant::now();
            if self.feed_time.is_some() && now >= self.next_feed {
                self.feed(now);
            }
            if now >= self.next_status {
                self.next_status = now + STATUS_TIME;
                self.tell_status();
            }
            self.wait();
        }
    }

    /// Waits for a signal, the end, or the time when something is due.
    fn wait(&mut self) {
        let status = self.watched.notify.as_ref().map(|_| self.next_status);
        let feed = self.feed_time.map(|_| self.next_feed);
        let due = [status, feed].into_iter().flatten().min();
        // Zero would mean for ever.
        let time = due.map(|due| due.saturating_duration_since(Instant::now()).max(Duration::from_millis(1)));
        if let Err(error) = self.wake.set_read_timeout(time) {
            log::error!("the supervisor can't wait: {error}");
        }
        // What it came for is told by the flags.
        let _ = self.wake.read(&mut [0; 64]);
    }

    fn reload(&mut self) {
        if let Some(notify) = &self.watched.notify {
            notify.reloading();
        }
        (self.watched.reload)();
        self.tell("READY=1");
    }

    /// Tells the service manager that the service is alive, where it is, and asks it for the next sign of life.
    fn feed(&mut self, now: Instant) {
        self.next_feed = now + self.feed_time.unwrap_or_default();
        let trouble = self.trouble();
        if trouble.is_none() {
            self.tell("WATCHDOG=1");
        }
        if trouble != self.trouble {
            match trouble {
                Some(trouble) => log::error!("the watchdog is not fed: {trouble}"),
                None => log::info!("the watchdog is fed again"),
            }
            self.trouble = trouble;
        }
        if let Err(error) = self.watched.pulse.ask() {
            log::error!("the listener could not be woken: {error}");
        }
    }

    fn trouble(&self) -> Option<&'static str> {
        let Watched { pulse, store, longest_work, .. } = &self.watched;
        if !pulse.loop_answered() {
            Some("the listener does not turn to its sockets any more")
        } else if pulse.workers_stuck(*longest_work) {
            Some("every worker has been busy with one request for longer than a request may take")
        } else if store.is_stuck() {
            Some("a write to the ledger hangs")
        } else {
            None
        }
    }

    fn tell_status(&mut self) {
        let status = (self.watched.status)();
        if status != self.status {
            self.tell(&format!("STATUS={status}"));
            self.status = status;
        }
    }

    fn tell(&self, lines: &str) {
        if let Some(notify) = &self.watched.notify {
            notify.tell(lines);
        }
    }
}
