//! One thread for what is done beside the requests: it reloads the configuration on SIGHUP, and
//! runs each step of a list from time to time. It probes failed runtimes, and warns about the
//! certificate.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use sd_notify::NotifyState;
use signal_hook::consts::SIGHUP;
use signal_hook::low_level::pipe;

use crate::audit::Actor;
use crate::checks;
use crate::config::{Config, SecretsNeeded};
use crate::database::Result;
use crate::listener::Acceptor;
use crate::runtime::Runtimes;
use crate::store::Store;
use crate::when;

/// The pause between two probes of a failed runtime.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// The pause between two warnings about a certificate.
const CERTIFICATE_INTERVAL: Duration = Duration::from_secs(when::DAY as u64);

/// The parts of a service, which the API and the console use too.
pub struct ServiceParts {
    pub config: Arc<Config>,
    pub acceptor: Option<Arc<Acceptor>>,
    pub store: Arc<Store>,
    pub runtimes: Option<Arc<Runtimes>>,
}

/// Something that is done at the start and again after each pause. No step may wait for another
/// host: it would delay a reload and the stop.
struct Step {
    every: Duration,
    /// For the log.
    name: &'static str,
    run: Box<dyn FnMut() + Send>,
}

/// The handle of the thread. Dropping it stops the thread, and waits for the step that runs.
pub struct Background {
    is_stopping: Arc<AtomicBool>,
    waker: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl Background {
    /// Starts the thread. It reloads the configuration after each SIGHUP, which sets `requested`; if
    /// that was set before, also at once.
    pub fn start(parts: ServiceParts, requested: Arc<AtomicBool>) -> io::Result<Self> {
        let probes = parts.runtimes.clone().map(|runtimes| Step {
            every: PROBE_INTERVAL,
            name: "probing failed runtimes",
            run: Box::new(move || runtimes.probe_failed()),
        });
        let certificate = parts.acceptor.clone().map(|acceptor| Step {
            every: CERTIFICATE_INTERVAL,
            name: "looking at the certificate",
            run: Box::new(move || warn_about_certificate(&acceptor)),
        });
        let steps = probes.into_iter().chain(certificate).collect();
        Self::start_steps(requested, move || parts.reload(), steps)
    }

    fn start_steps(
        requested: Arc<AtomicBool>,
        reload: impl FnMut() + Send + 'static,
        steps: Vec<Step>,
    ) -> io::Result<Self> {
        let (wake, waker) = UnixStream::pair()?;
        pipe::register(SIGHUP, waker.try_clone()?)?;
        let is_stopping = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&is_stopping);
        let thread = thread::Builder::new()
            .name("background".into())
            .spawn(move || run(wake, &stop, &requested, reload, steps))?;
        Ok(Self {
            is_stopping,
            waker,
            thread: Some(thread),
        })
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.is_stopping.store(true, Ordering::Release);
        let _ = (&self.waker).write_all(b"x");
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Runs what is due, and waits for the next step or a byte in `wake`, which follows each request.
fn run(
    mut wake: UnixStream,
    is_stopping: &AtomicBool,
    requested: &AtomicBool,
    mut reload: impl FnMut(),
    steps: Vec<Step>,
) {
    let start = Instant::now();
    let mut steps: Vec<(Instant, Step)> = steps.into_iter().map(|step| (start, step)).collect();
    while !is_stopping.load(Ordering::Acquire) {
        if requested.swap(false, Ordering::AcqRel) {
            contain_panic("the reload", &mut reload);
        }
        for (due, step) in &mut steps {
            if *due <= Instant::now() {
                contain_panic(step.name, &mut step.run);
                *due = Instant::now() + step.every;
            }
        }
        wait(&mut wake, steps.iter().map(|(due, _)| *due).min());
    }
}

/// A panic ends a step, not the thread.
fn contain_panic(name: &str, step: impl FnMut()) {
    if panic::catch_unwind(AssertUnwindSafe(step)).is_err() {
        log::error!("{name} panicked; the line before says where");
    }
}

fn wait(wake: &mut UnixStream, until: Option<Instant>) {
    // Zero would mean no timeout.
    let time = until.map(|until| {
        until
            .saturating_duration_since(Instant::now())
            .max(Duration::from_millis(1))
    });
    let is_set = wake.set_read_timeout(time);
    debug_assert!(is_set.is_ok(), "only a timeout of zero fails");
    let _ = wake.read(&mut [0; 64]);
}

fn warn_about_certificate(acceptor: &Acceptor) {
    if let Some(warning) = checks::certificate_warning(&acceptor.certificate()) {
        log::warn!("{warning}");
    }
}

impl ServiceParts {
    /// Reloads the settings that can change while the service runs. An invalid configuration
    /// changes nothing.
    fn reload(&self) {
        let now = NotifyState::monotonic_usec_now();
        let now = now.expect("the system should have a monotonic clock");
        notify(&[NotifyState::Reloading, now]);
        let reloaded = Config::load(self.config.file.as_deref(), SecretsNeeded::All)
            .and_then(|config| self.apply(&config));
        if let Err(problem) = reloaded {
            log::error!("configuration not reloaded: {problem}");
        }
        notify(&[NotifyState::Ready]);
    }

    fn apply(&self, config: &Config) -> Result<()> {
        let mut applied = Vec::new();
        let acceptor = self.acceptor.as_ref();
        if let Some((acceptor, files)) = acceptor.zip(config.tls.as_ref())
            && acceptor.replace_certificate(checks::read_certificate(files)?)
        {
            let expires = when::Zone::utc().format_minute(acceptor.expires());
            applied.push(format!("certificate (expires at {expires})"));
        }
        let level = log::max_level();
        if level != config.log_level {
            applied.push(format!("log_level = {}", config.log_level).to_lowercase());
        }
        if applied.is_empty() {
            applied.push("nothing changed".into());
        }
        let mut details = applied.join(", ");
        // The lines can be seen if either level includes them.
        log::set_max_level(level.max(config.log_level));
        log::info!("configuration reloaded: {details}");
        acceptor.inspect(|acceptor| warn_about_certificate(acceptor));
        log::set_max_level(config.log_level);
        let differences = self.config.differences(config).join(", ");
        if !differences.is_empty() {
            let waiting = format!("changed, but applied only after a restart: {differences}");
            log::warn!("{waiting}");
            details += &format!("; {waiting}");
        }
        let noted = self
            .store
            .audit
            .note_reload(&Actor::signal("SIGHUP"), details);
        noted.unwrap_or_else(|error| {
            log::error!("the reload could not be recorded in the audit: {error}")
        });
        Ok(())
    }
}

/// Notifies the service manager, if there is one.
pub fn notify(states: &[NotifyState]) {
    if let Err(error) = sd_notify::notify(states) {
        log::warn!("could not notify the service manager of {states:?}: {error}");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn step(every: Duration, run: impl FnMut() + Send + 'static) -> Step {
        Step {
            every,
            name: "a step of a test",
            run: Box::new(run),
        }
    }

    #[test]
    fn a_step_that_panics_does_not_prevent_the_others() {
        let (sender, rounds) = mpsc::channel();
        let steps = vec![
            step(Duration::ZERO, || panic!("on purpose")),
            step(Duration::ZERO, move || _ = sender.send(())),
        ];
        let requested = Arc::new(AtomicBool::new(true));
        let background = Background::start_steps(requested, || panic!("on purpose"), steps);
        for _ in 0..3 {
            assert_eq!(rounds.recv(), Ok(()));
        }
        drop(background.expect("a thread"));
        // This ends, because the thread has ended and with it the step that sends.
        rounds.iter().for_each(drop);
    }

    #[test]
    fn a_stop_ends_the_wait_and_a_reload_that_was_requested_before_the_start_comes_first() {
        let (sender, log) = mpsc::channel();
        let also = sender.clone();
        let steps = vec![step(Duration::from_secs(3600), move || {
            _ = also.send("the step")
        })];
        let reload = move || _ = sender.send("the reload");
        let background = Background::start_steps(Arc::new(AtomicBool::new(true)), reload, steps);
        assert_eq!(log.recv(), Ok("the reload"));
        assert_eq!(log.recv(), Ok("the step"));
        drop(background.expect("a thread"));
        assert!(log.recv().is_err(), "each was run once");
    }
}
