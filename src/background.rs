//! One thread for what is done beside the requests: it reloads the configuration on SIGHUP, and
//! runs each step of a list from time to time.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use signal_hook::consts::SIGHUP;
use signal_hook::low_level::pipe;

/// Something that is done at the start and again after each pause. No step may wait for another
/// host: it would delay a reload and the stop.
pub struct Step {
    pub every: Duration,
    /// For the log.
    pub name: &'static str,
    pub run: Box<dyn FnMut() + Send>,
}

/// The handle of the thread. Dropping it stops the thread, and waits for the step that runs.
pub struct Background {
    is_stopping: Arc<AtomicBool>,
    waker: UnixStream,
    thread: Option<JoinHandle<()>>,
}

impl Background {
    /// Starts the thread. `reload` is run after each SIGHUP, which sets `requested`; if that was
    /// set before, also at once.
    pub fn start(
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
        let background = Background::start(requested, || panic!("on purpose"), steps);
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
        let background = Background::start(Arc::new(AtomicBool::new(true)), reload, steps);
        assert_eq!(log.recv(), Ok("the reload"));
        assert_eq!(log.recv(), Ok("the step"));
        drop(background.expect("a thread"));
        assert!(log.recv().is_err(), "each was run once");
    }
}
