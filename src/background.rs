//! One thread for what is done beside the requests: it reloads the configuration on SIGHUP, and
//! runs each step of a list from time to time. It probes failed runtimes, and has the log say what is
//! wrong.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use sd_notify::NotifyState;
use signal_hook::consts::SIGHUP;
use signal_hook::low_level::pipe;

use crate::audit::Actor;
use crate::checks;
use crate::config::{Config, SecretsNeeded};
use crate::error::Result;
use crate::health::{HealthLog, ServiceParts};
use crate::locks::lock;
use crate::when;

/// The pause between two looks at the service's health, and whether a probe is due.
const INTERVAL: Duration = Duration::from_secs(1);

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
    pub fn start(parts: Arc<ServiceParts>, requested: Arc<AtomicBool>) -> io::Result<Self> {
        let probes = parts.runtimes.clone().map(|runtimes| Step {
            every: INTERVAL,
            name: "probing failed runtimes",
            run: Box::new(move || runtimes.probe_failed()),
        });
        let said = Arc::<Mutex<HealthLog>>::default();
        let (service, also_said) = (Arc::clone(&parts), Arc::clone(&said));
        let health = Step {
            every: INTERVAL,
            name: "looking at the health",
            run: Box::new(move || lock(&also_said).note(&service.health().findings())),
        };
        let steps = probes.into_iter().chain([health]).collect();
        Self::start_steps(requested, move || reload(&parts, &said), steps)
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

/// Reloads the settings that can change while the service runs. An invalid configuration changes
/// nothing. The log says again what is wrong, because the person who reloads reads it.
fn reload(parts: &ServiceParts, said: &Mutex<HealthLog>) {
    let now = NotifyState::monotonic_usec_now();
    let now = now.expect("the system should have a monotonic clock");
    notify(&[NotifyState::Reloading, now]);
    let reloaded = Config::load(parts.config.file.as_deref(), SecretsNeeded::All)
        .and_then(|config| apply(parts, &config));
    if let Err(problem) = reloaded {
        // A line for each of its problems.
        for line in problem.text.lines() {
            log::error!("configuration not reloaded: {line}");
        }
    }
    if let Some(grounding) = &parts.grounding {
        grounding.refresh();
    }
    *lock(said) = HealthLog::default();
    notify(&[NotifyState::Ready]);
}

fn apply(parts: &ServiceParts, config: &Config) -> Result<()> {
    let mut applied = Vec::new();
    if let Some((acceptor, files)) = parts.acceptor.as_ref().zip(config.tls.as_ref())
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
    // The line can be seen if either level includes it.
    log::set_max_level(level.max(config.log_level));
    log::info!("configuration reloaded: {details}");
    log::set_max_level(config.log_level);
    let differences = parts.config.differences(config).join(", ");
    if !differences.is_empty() {
        let waiting = format!("changed, but applied only after a restart: {differences}");
        log::warn!("{waiting}");
        details += &format!("; {waiting}");
    }
    let audit = &parts.store.audit;
    let noted = audit.note_reload(&Actor::signal("SIGHUP"), details);
    noted.unwrap_or_else(|error| {
        log::error!("the reload could not be recorded in the audit: {error}")
    });
    Ok(())
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
