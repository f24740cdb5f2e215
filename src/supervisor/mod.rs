//! A thread that reloads the configuration on SIGHUP, notifies systemd when the service is ready,
//! reloads or stops, and feeds the watchdog.
//!
//! The watchdog is not fed if a restart would help: the event loop does not answer, every worker is
//! overdue, or a write to the database hangs. On a full disk or a locked database, writes fail in
//! time; a restart would only lose running requests.

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

use crate::listener::ListenerState;
use crate::store::Store;

/// The pause between two updates of the status text.
const STATUS_INTERVAL: Duration = Duration::from_secs(5);

/// The parts that the supervisor monitors, and its callbacks.
pub struct Monitored {
    pub notify: Option<Notify>,
    pub listener: Arc<ListenerState>,
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
    /// `reload` is the flag that SIGHUP sets, also before this: that reload follows the start.
    pub fn start(monitored: Monitored, reload: Arc<AtomicBool>) -> io::Result<Self> {
        let (wake, waker) = UnixStream::pair()?;
        let requested = Arc::new(Signals {
            reload,
            ..Signals::default()
        });
        let signals = Arc::clone(&requested);
        let thread = thread::Builder::new()
            .name("supervisor".into())
            .spawn(move || monitored.run(&signals, wake))?;
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

    fn request(&self, what: &AtomicBool) {
        what.store(true, Ordering::Release);
        let _ = (&self.waker).write_all(b"a");
    }

    /// From now on SIGHUP reloads, and SIGTERM and SIGINT notify systemd of the stop.
    pub fn handle_signals(&self) -> io::Result<()> {
        // The flags first: they have to be set when the thread wakes up.
        for signal in [SIGTERM, SIGINT] {
            flag::register(signal, Arc::clone(&self.requested.stop))?;
        }
        for signal in [SIGHUP, SIGTERM, SIGINT] {
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

impl Monitored {
    /// Serves the requests to the thread, each of which comes with a byte in `wake`, and feeds the
    /// watchdog twice per interval.
    fn run(mut self, requested: &Signals, mut wake: UnixStream) {
        let watchdog = self.notify.as_ref().and_then(|notify| notify.watchdog);
        let feed_time = watchdog.map(|interval| interval / 2);
        let mut next_feed = Instant::now();
        let mut next_status = next_feed + STATUS_INTERVAL;
        let (mut last_status, mut last_trouble) = (String::new(), None);
        let mut is_ready = false;
        loop {
            if requested.ready.swap(false, Ordering::AcqRel) {
                self.send("READY=1");
                is_ready = true;
            }
            if is_ready && requested.reload.swap(false, Ordering::AcqRel) {
                self.notify.as_ref().inspect(|notify| notify.reloading());
                (self.reload)();
                self.send("READY=1");
            }
            if requested.stop.swap(false, Ordering::AcqRel) {
                self.send("STOPPING=1");
            }
            // Last, so that a short stop is reported too.
            if requested.end.load(Ordering::Acquire) {
                return;
            }
            let now = Instant::now();
            if let Some(feed_time) = feed_time
                && now >= next_feed
            {
                next_feed = now + feed_time;
                self.feed(&mut last_trouble);
            }
            if now >= next_status {
                next_status = now + STATUS_INTERVAL;
                let status = (self.status)();
                if status != last_status {
                    self.send(&format!("STATUS={status}"));
                    last_status = status;
                }
            }
            let feed = feed_time.map(|_| next_feed);
            let status = self.notify.as_ref().map(|_| next_status);
            wait(&mut wake, [feed, status].into_iter().flatten().min());
        }
    }

    /// Feeds the watchdog if the service is alive, and asks the event loop for its next answer.
    fn feed(&self, last_trouble: &mut Option<&'static str>) {
        let trouble = self.trouble();
        if trouble.is_none() {
            self.send("WATCHDOG=1");
        }
        if trouble != *last_trouble {
            match trouble {
                Some(trouble) => log::error!("the watchdog is not fed: {trouble}"),
                None => log::info!("the watchdog is fed again"),
            }
            *last_trouble = trouble;
        }
        if let Err(error) = self.listener.ask_loop() {
            log::error!("could not wake the listener: {error}");
        }
    }

    /// Returns the reason why the watchdog is not fed.
    fn trouble(&self) -> Option<&'static str> {
        if !self.listener.has_loop_answered() {
            Some("the event loop does not answer")
        } else if self.listener.are_workers_stuck(self.longest_work) {
            Some("every worker has been busy with one request for longer than a request may take")
        } else if self.store.database.is_stuck() {
            Some("a write to the ledger hangs")
        } else {
            None
        }
    }

    fn send(&self, lines: &str) {
        if let Some(notify) = &self.notify {
            notify.send(lines);
        }
    }
}

/// Waits for a request to the thread, or for this time.
fn wait(wake: &mut UnixStream, until: Option<Instant>) {
    // Zero would mean no timeout.
    let time = until.map(|until| {
        until
            .saturating_duration_since(Instant::now())
            .max(Duration::from_millis(1))
    });
    if let Err(error) = wake.set_read_timeout(time) {
        log::error!("supervisor: waiting failed: {error}");
    }
    let _ = wake.read(&mut [0; 64]);
}
