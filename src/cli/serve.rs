//! `serve`: the service itself.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use listenfd::ListenFd;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::{flag, low_level::pipe};

use super::{Args, CliError, open_store};
use crate::api::grounding::Grounding;
use crate::config::Config;
use crate::console::{Console, Machines};
use crate::folding::Folding;
use crate::hosts::Hosts;
use crate::listener::{Limits, Listener, Socket};
use crate::logging;
use crate::metrics::Metrics;
use crate::pipeline::Pipeline;
use crate::retention::Retention;
use crate::runtime::Runtimes;

const HELP: &str = "\
Runs the service until SIGTERM or SIGINT. What is under way then is finished and answered; a second signal
ends it at once.

Usage: adriaticum serve
";

/// The file descriptors that a worker may need beside its client's: the database, its log, its index, the
/// connection to the runtime, and the three files of the embedded index or the connection to Search.
const FILES_PER_WORKER: usize = 7;

/// Those of the process itself, with some to spare.
const OWN_FILES: usize = 32;

/// However few there are, some clients are served.
const FEWEST_CONNECTIONS: usize = 16;

pub fn run(mut args: Args) -> Result<(), CliError> {
    if args.words(HELP, [], &mut [])?.is_none() {
        return Ok(());
    }
    let config = Arc::new(args.config()?);
    logging::start(config.log_level);
    for name in &config.unknown_variables {
        log::warn!("{name} in the environment is no setting that this version knows");
    }
    // The sockets come before the database: a second service that is started by mistake ends here, before
    // it takes the requests of the first for interrupted ones.
    let sockets = sockets(&config)?;
    let store = Arc::new(open_store(&config)?);
    match store.close_interrupted()? {
        0 => {}
        count => log::warn!("{count} requests were interrupted by the last end of the service"),
    }
    let runtimes = Runtimes::new(&config.runtime, config.workers);
    if runtimes.is_none() {
        log::warn!("no runtime is configured, so no completion can be run: set runtime.url");
    }
    let grounding = Grounding::new(&config.search, config.workers);
    let limits = Limits {
        workers: config.workers,
        queue: config.queue,
        max_connections: connections_that_fit(config.max_connections, config.workers),
        ..Limits::default()
    };
    for socket in &sockets {
        log::info!("listening on {}", socket.address().map_err(|error| failed("the socket", &error))?);
    }
    let listener = Listener::new(sockets, limits).map_err(|error| failed("the listener", &error))?;
    stop_on_signals(&listener).map_err(|error| failed("the signals", &error))?;
    let retention = config.retention_days.map(|days| Retention::start(Arc::clone(&store), days));
    let folding = Folding::start(Arc::clone(&store));
    let metrics = Arc::new(Metrics::default());
    let machines =
        Machines::new(Arc::clone(&store), Arc::clone(&metrics), listener.load(), runtimes.is_some());
    let console = |host| (host, Console::new(Arc::clone(&config), Arc::clone(&store), machines));
    let console = config.console_host.clone().map(console);
    let api = Pipeline {
        api_hosts: config.api_hosts.clone(),
        compatibility: config.compatibility,
        store,
        runtimes,
        grounding,
        metrics,
    };
    listener.run(Arc::new(Hosts { console, api })).map_err(|error| failed("the listener", &error))?;
    drop((retention, folding));
    log::info!("stopped");
    Ok(())
}

/// The sockets that systemd hands over, else the one of the configuration.
fn sockets(config: &Config) -> Result<Vec<Socket>, CliError> {
    let mut handed = ListenFd::from_env();
    let mut sockets = Vec::new();
    for index in 0..handed.len() {
        let socket = match handed.take_tcp_listener(index) {
            Ok(Some(listener)) => Socket::inherited_tcp(listener),
            _ => match handed.take_unix_listener(index) {
                Ok(Some(listener)) => Socket::inherited_unix(listener),
                _ => Err(io::Error::other("it is neither a TCP nor a Unix socket that listens")),
            },
        };
        sockets.push(socket.map_err(|error| failed("a socket handed over", &error))?);
    }
    if sockets.is_empty() {
        let socket = Socket::bind(&config.listen).map_err(|error| {
            CliError::Failed(format!(
                "it can't listen on {}: {error}. Is it running already? The setting is listen \
                 (ADRIATICUM_LISTEN).",
                config.listen
            ))
        })?;
        sockets.push(socket);
    }
    Ok(sockets)
}

/// The first signal stops the listener, the second ends the process.
fn stop_on_signals(listener: &Listener) -> io::Result<()> {
    let asked = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        // The order counts: a signal finds the flag as those before it have left it.
        flag::register_conditional_shutdown(signal, 1, Arc::clone(&asked))?;
        flag::register(signal, Arc::clone(&asked))?;
        pipe::register(signal, listener.stopper()?)?;
    }
    Ok(())
}

/// As many connections as there are file descriptors for, beside what the workers need: a flood of clients
/// must not keep a worker from opening its own.
fn connections_that_fit(wanted: usize, workers: usize) -> usize {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum {
        // The soft limit is a default for programs that can't count further; the hard one is the operator's.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    }
    let Some(most) = getrlimit(Resource::Nofile).current else {
        return wanted;
    };
    let reserved = workers * FILES_PER_WORKER + OWN_FILES;
    let room = usize::try_from(most).unwrap_or(usize::MAX).saturating_sub(reserved).max(FEWEST_CONNECTIONS);
    if room < wanted {
        log::warn!(
            "at most {room} connections instead of {wanted}: the process may open {most} files. \
             Raise the limit (LimitNOFILE= in the unit, ulimit -n in a shell) or lower max_connections."
        );
    }
    room.min(wanted)
}

fn failed(what: &str, error: &io::Error) -> CliError {
    CliError::Failed(format!("{what}: {error}."))
}
