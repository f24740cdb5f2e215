//! A thread that reloads the configuration on SIGHUP, notifies systemd when the service is ready, reloads or stops, and feeds
//! the watchdog.
//!
//! The watchdog is not fed if a restart would help: the event loop does not answer, every worker is overdue, or a write to
//! the database hangs. On a full disk or a locked database, writes fail in time; a restart would only lose running requests.

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

/// The pause between two updates of the status text.
const STATUS_INTERVAL: Duration = Duration::from_secs(5);

/// The parts that the supervisor monitors, and its callbacks.
pub struct Monitored {
    pub notify: Option<Notify>,
    pub pulse: Arc<Pulse>,
    pub store: Arc<Store>,
    /// The longest time that a worker may need for a request.
    pub longest_work: Duration,
    /// Returns the line for `systemctl status`.
    pub status: Box<dyn Fn() -> String + Send>,
    pub reload: Box<dyn FnMut() + Send>,
}

/// The handle of the thread. Dropping it stops the thread.
pub struct Supervisor {
    requested: Arc<Signals>,
    waker: UnixStream,
    thread: Option<JoinHandle<()>>,
}

/// Requests to the thread. Each is followed by a byte that wakes it.
#[derive(Default)]
struct Signals {
    ready: AtomicBool,
    reload: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
    end: AtomicBool,
}

impl Supervisor {
    pub fn start(monitored: Monitored) -> io::Result<Self> {
        let (wake, waker) = UnixStream::pair()?;
        let requested = Arc::new(Signals::default());
        let now = Instant::now();
        let state = SupervisorThread {
            feed_time: monitored
                .notify
                .as_ref()
                .and_then(|notify| notify.watchdog)
                .map(|time| time / 2),
            monitored,
            wake,
            requested: Arc::clone(&requested),
            next_status: now + STATUS_INTERVAL,
            next_feed: now,
            status: String::new(),
            trouble: None,
        };
        let thread = thread::Builder::new()
            .name("supervisor".into())
            .spawn(|| state.run())?;
        Ok(Self {
            requested,
            waker,
            thread: Some(thread),
        })
    }

    /// Notifies systemd that the service is ready.
    pub fn ready(&self) {
        self.request(&self.requested.ready);
    }

    /// Reloads, as SIGHUP does.
    pub fn reload(&self) {
        self.request(&self.requested.reload);
    }

    fn request(&self, what: &AtomicBool) {
        what.store(true, Ordering::Release);
        let _ = (&self.waker).write_all(b"a");
    }

    /// From now on SIGHUP reloads, and SIGTERM and SIGINT notify systemd of the stop.
    pub fn handle_signals(&self) -> io::Result<()> {
        let Signals { reload, stop, .. } = &*self.requested;
        for (signal, requested) in [(SIGHUP, reload), (SIGTERM, stop), (SIGINT, stop)] {
            // In this order: the flag has to be set when the thread wakes up.
            flag::register(signal, Arc::clone(requested))?;
            pipe::register(signal, self.waker.try_clone()?)?;
        }
        Ok(())
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.request(&self.requested.end);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The thread's own state.
struct SupervisorThread {
    monitored: Monitored,
    requested: Arc<Signals>,
    /// Receives a byte with every request.
    wake: UnixStream,
    /// Half of the watchdog interval.
    feed_time: Option<Duration>,
    next_feed: Instant,
    next_status: Instant,
    /// The status that was sent last.
    status: String,
    /// The reason why the watchdog is not fed.
    trouble: Option<&'static str>,
}

impl SupervisorThread {
    fn run(mut self) {
        loop {
            if self.requested.ready.swap(false, Ordering::AcqRel) {
                self.send("READY=1");
            }
            if self.requested.reload.swap(false, Ordering::AcqRel) {
                self.monitored
                    .notify
                    .as_ref()
                    .inspect(|notify| notify.reloading());
                (self.monitored.reload)();
                self.send("READY=1");
            }
            if self.requested.stop.swap(false, Ordering::AcqRel) {
                self.send("STOPPING=1");
            }
            // Last, so that a short stop is reported too.
            if self.requested.end.load(Ordering::Acquire) {
                return;
            }
            let now = Instant::now();
            if self.feed_time.is_some() && now >= self.next_feed {
                self.feed(now);
            }
            if now >= self.next_status {
                self.next_status = now + STATUS_INTERVAL;
                let status = (self.monitored.status)();
                if status != self.status {
                    self.send(&format!("STATUS={status}"));
                    self.status = status;
                }
            }
            self.wait();
        }
    }

    /// Waits for a request, or until the status or the watchdog is due.
    fn wait(&mut self) {
        let status = self.monitored.notify.as_ref().map(|_| self.next_status);
        let feed = self.feed_time.map(|_| self.next_feed);
        let due = [status, feed].into_iter().flatten().min();
        // Zero would mean no timeout.
        let time = due.map(|due| {
            due.saturating_duration_since(Instant::now())
                .max(Duration::from_millis(1))
        });
        if let Err(error) = self.wake.set_read_timeout(time) {
            log::error!("supervisor: waiting failed: {error}");
        }
        let _ = self.wake.read(&mut [0; 64]);
    }

    /// Feeds the watchdog if the service is alive, and asks the event loop for its next answer.
    fn feed(&mut self, now: Instant) {
        self.next_feed = now + self.feed_time.unwrap_or_default();
        let trouble = self.trouble();
        if trouble.is_none() {
            self.send("WATCHDOG=1");
        }
        if trouble != self.trouble {
            match trouble {
                Some(trouble) => log::error!("the watchdog is not fed: {trouble}"),
                None => log::info!("the watchdog is fed again"),
            }
            self.trouble = trouble;
        }
        if let Err(error) = self.monitored.pulse.ask() {
            log::error!("could not wake the listener: {error}");
        }
    }

    fn trouble(&self) -> Option<&'static str> {
        let Monitored {
            pulse,
            store,
            longest_work,
            ..
        } = &self.monitored;
        if !pulse.loop_answered() {
            Some("the event loop does not answer")
        } else if pulse.workers_stuck(*longest_work) {
            Some("every worker has been busy with one request for longer than a request may take")
        } else if store.is_stuck() {
            Some("a write to the ledger hangs")
        } else {
            None
        }
    }

    fn send(&self, lines: &str) {
        if let Some(notify) = &self.monitored.notify {
            notify.send(lines);
        }
    }
}
