//! `serve`: opens what the service needs, builds it, runs it until a signal, and stops it.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use listenfd::ListenFd;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::low_level::pipe;

use super::shared::{Account, about, check_time_zone, open_to_change};
use crate::api::Api;
use crate::api::record::RowLimits;
use crate::audit::Actor;
use crate::background::{Background, notify};
use crate::checks;
use crate::config::{Config, GroundingMode, RuntimeConfig, SearchConfig, SecretsNeeded};
use crate::console::Console;
use crate::database::sqlite::FileLock;
use crate::database::{Access, DatabaseLocation};
use crate::error::{Problem, ProblemKind, Result};
use crate::grounding::Grounding;
use crate::health::ServiceParts;
use crate::ledger::Writer;
use crate::listener::{Acceptor, Address, Limits, Listener, ListeningSocket, Service, Watchdog};
use crate::logging;
use crate::metrics::Metrics;
use crate::runtime::Runtimes;

/// The longest time of a request that the database takes: 10 s to look up the key (on PostgreSQL,
/// if a connection is lost), and 20 s for the row.
const LEDGER_TIME: Duration = Duration::from_secs(30);

/// The file descriptors of a worker, besides its client's: the connections to the runtime and to
/// Search.
const FILES_PER_WORKER: usize = 2;

/// The file descriptors of the process itself: the files of SQLite and of the index of a folder, the
/// connections to PostgreSQL, and some to spare.
const OWN_FILES: usize = 64;

/// The fewest connections, however few descriptors there are.
const FEWEST_CONNECTIONS: usize = 16;

/// The first of these stops the service, the second ends the process.
const STOP_SIGNALS: [i32; 2] = [SIGTERM, SIGINT];

pub(super) fn run(file: Option<&Path>, by: &Actor) -> Result<()> {
    let signals = Signals::handle().map_err(about("the signals"))?;
    let config = Arc::new(load(file)?);
    let (parts, listener) = open(&config, by)?;
    let (stopper, fenced) = (listener.stopper(), Arc::<OnceLock<Problem>>::default());
    let stopper = stopper.map_err(about("the listener"))?;
    let writer = start_writer(&parts, stopper, Arc::clone(&fenced)).map_err(too_few_threads)?;
    for signal in STOP_SIGNALS {
        let stopper = listener.stopper();
        let registered = stopper.and_then(|stopper| pipe::register(signal, stopper));
        registered.map_err(about("the signals"))?;
    }
    let event_loop = listener.start(services(&parts)).map_err(too_few_threads)?;
    if let Some(grounding) = &parts.grounding {
        grounding.refresh();
    }
    signals.starting.store(false, Ordering::Release);
    notify(&[NotifyState::Ready]);
    // After that message: a reload has others.
    let background = Background::start(parts, signals.reload_requested);
    let background = background.map_err(too_few_threads)?;
    event_loop.run().map_err(about("the listener"))?;
    drop(background);
    drop(writer);
    logging::log_refusal_summary();
    if let Some(problem) = fenced.get() {
        return Err(fenced_off(&config, problem.clone()));
    }
    log::info!("stopped");
    Ok(())
}

/// What the handlers of the signals read and set. They are registered at first, because a start may
/// take minutes, and before all others, so that none of those can swallow a signal.
struct Signals {
    /// Until it is cleared, a signal to stop ends the process at once, because no request was
    /// accepted yet.
    starting: Arc<AtomicBool>,
    /// Set by SIGHUP, which without a handler would end the process.
    reload_requested: Arc<AtomicBool>,
}

impl Signals {
    fn handle() -> io::Result<Self> {
        let starting = Arc::new(AtomicBool::new(true));
        let (reload_requested, stop_requested) = (Arc::default(), Arc::default());
        flag::register(SIGHUP, Arc::clone(&reload_requested))?;
        for signal in STOP_SIGNALS {
            // The order counts: a signal finds a flag as those before it have left it.
            flag::register_conditional_shutdown(signal, 0, Arc::clone(&starting))?;
            flag::register_conditional_shutdown(signal, 1, Arc::clone(&stop_requested))?;
            flag::register(signal, Arc::clone(&stop_requested))?;
        }
        Ok(Self {
            starting,
            reload_requested,
        })
    }
}

/// Reads the configuration and starts the log.
fn load(file: Option<&Path>) -> Result<Config> {
    let config = Config::load(file, SecretsNeeded::All)?;
    if let Some(owner) = Account::of_database(&config.database) {
        return Err(Problem::new(
            ProblemKind::Setting,
            format!(
                "root does not serve a database in a folder of another user: start the service as {} (User= in the unit), or give \
                 the folder to root",
                owner.name
            ),
        ));
    }
    logging::start(config.log_level).map_err(too_few_threads)?;
    let (version, database) = (crate::VERSION, config.database_name());
    log::info!("adriaticum {version}, database {database}");
    if let DatabaseLocation::Postgres(_) = &config.database {
        log::info!("gateway {}", config.gateway);
    }
    for name in &config.unknown_variables {
        log::warn!("unknown variable in the environment: {name}");
    }
    Ok(config)
}

/// Opens the certificate, the database and the sockets.
fn open(config: &Arc<Config>, by: &Actor) -> Result<(Arc<ServiceParts>, Listener)> {
    let certificate = config.tls.as_ref().map(checks::read_certificate);
    let acceptor = certificate.transpose()?.map(Acceptor::new).transpose();
    let acceptor = acceptor.map_err(|error| Problem::other(format!("TLS: {error}")))?;
    check_time_zone(config)?;
    // Before the sockets and the database, so that a second service ends here and has changed
    // nothing.
    let lock = config.database.file().map(FileLock::take).transpose();
    let lock = lock.map_err(|problem| checks::database_failed(config, problem))?;
    let sockets = sockets(config)?;
    let mut store = open_to_change(config, Access::Serve, by)?;
    let database = config.database_name();
    if store.database.is_new {
        log::warn!(
            "{database} is a new, empty database: no key works yet. If it should not be, correct database \
             (ADRIATICUM_DATABASE); else create a key: adriaticum keys create NAME"
        );
    }
    store.check_start(lock.as_ref())?;
    let urls: Vec<String> = sockets
        .iter()
        .map(|socket| url(socket, acceptor.is_some()))
        .collect();
    let joined = store.join(&config.gateway, &urls.join(" "));
    joined.map_err(about(format!("the database {database}")))?;
    let (acceptor, share) = (acceptor.map(Arc::new), config.worker_share());
    let listener = listen(config, sockets, acceptor.clone()).map_err(about("the listener"))?;
    let parts = ServiceParts {
        config: Arc::clone(config),
        store: Arc::new(store),
        listener: Arc::clone(&listener.state),
        acceptor,
        runtimes: Runtimes::new(&config.runtime, share).map(Arc::new),
        grounding: Grounding::new(&config.search, share).map(Arc::new),
    };
    Ok((Arc::new(parts), listener))
}

/// Returns the sockets that systemd passes, else those of the configuration. Refuses a runtime that
/// is this service itself.
fn sockets(config: &Config) -> Result<Vec<ListeningSocket>> {
    let mut passed = ListenFd::from_env();
    let mut sockets = Vec::new();
    for index in 0..passed.len() {
        let socket = passed_socket(&mut passed, index);
        sockets.push(socket.map_err(about("a socket passed by systemd"))?);
    }
    if sockets.is_empty() {
        sockets = ListeningSocket::bind(&config.listen, config.socket_mode)
            .map_err(|(address, error)| cannot_listen(&config.listen, &address, &error))?;
    }
    for url in &config.runtime.urls {
        let own = |socket: &ListeningSocket| checks::own_address(url, &socket.address);
        if let Some(message) = sockets.iter().find_map(own) {
            return Err(Problem::other(format!("the runtime at {message}")));
        }
    }
    Ok(sockets)
}

fn passed_socket(passed: &mut ListenFd, index: usize) -> io::Result<ListeningSocket> {
    if let Ok(Some(listener)) = passed.take_tcp_listener(index) {
        ListeningSocket::inherited_tcp(listener)
    } else if let Ok(Some(listener)) = passed.take_unix_listener(index) {
        ListeningSocket::inherited_unix(listener)
    } else {
        Err(io::Error::other(
            "it is neither a TCP nor a Unix socket in the listening state",
        ))
    }
}

/// Explains why an address of the setting can't be used, and what to do.
fn cannot_listen(setting: &Address, address: &Address, error: &io::Error) -> Problem {
    let cause = match error.kind() {
        io::ErrorKind::AddrInUse => {
            "another program uses this address, perhaps another adriaticum serve: stop it, or choose another one"
        }
        io::ErrorKind::PermissionDenied => {
            "permission denied: a port below 1024 needs root or CAP_NET_BIND_SERVICE, a Unix socket a folder that this user \
             may write to and in which no other user has a socket of this name"
        }
        io::ErrorKind::AddrNotAvailable => {
            "this host does not have this address: `ip address` lists its addresses"
        }
        _ => &error.to_string(),
    };
    let both = match setting {
        Address::Localhost(_) => {
            "; localhost is both 127.0.0.1 and [::1], because clients use either"
        }
        _ => "",
    };
    Problem::other(format!(
        "can't listen on {address}: {cause}. The setting is listen (ADRIATICUM_LISTEN){both}"
    ))
}

/// The address of a socket as a client would write it.
fn url(socket: &ListeningSocket, has_tls: bool) -> String {
    match &socket.address {
        Address::Tcp(address) => format!("{}://{address}", scheme(has_tls)),
        address => address.to_string(),
    }
}

fn scheme(has_tls: bool) -> &'static str {
    if has_tls { "https" } else { "http" }
}

/// Builds the listener, and logs where it listens.
fn listen(
    config: &Config,
    sockets: Vec<ListeningSocket>,
    acceptor: Option<Arc<Acceptor>>,
) -> io::Result<Listener> {
    let limits = Limits {
        workers: config.workers,
        queue: config.queue,
        max_connections: connections_that_fit(config.max_connections, config.workers),
        buffered_bytes: config.buffer_limit,
        longest_work: longest_work(&config.runtime, &config.search),
        ..Limits::default()
    };
    log::info!(
        "buffer_limit: at most {} bytes for all requests together",
        config.buffer_limit
    );
    let has_tls = acceptor.is_some();
    for socket in &sockets {
        log::info!("listening on {}", url(socket, has_tls));
        if let Some(warning) = checks::reachable(config, &socket.address) {
            log::warn!("{warning}");
        }
    }
    if let Some(host) = &config.console_host {
        // Both sockets of localhost have the same one.
        let mut ports: Vec<u16> = sockets.iter().filter_map(|it| it.address.port()).collect();
        ports.dedup();
        for port in ports {
            log::info!("console at {}://{host}:{port}/", scheme(has_tls));
        }
    }
    let mut listener = Listener::new(sockets, limits)?;
    listener.acceptor = acceptor;
    listener.trusted_proxies = config.trusted_proxies.clone();
    listener.watchdog = watchdog();
    listener.on_stop = Box::new(|| notify(&[NotifyState::Stopping]));
    Ok(listener)
}

/// The longest time that a worker may need for a request. If no worker has finished one for longer,
/// the watchdog is not fed; the unit's TimeoutStopSec follows from it too.
fn longest_work(runtime: &RuntimeConfig, search: &SearchConfig) -> Duration {
    let search = if search.grounding == GroundingMode::Off {
        Duration::ZERO
    } else {
        search.timeout
    };
    runtime.timeout + search + LEDGER_TIME
}

/// Lowers `wanted` to the connections that the limit on file descriptors allows, besides those of
/// the workers: a flood of clients must not keep a worker from opening its files.
fn connections_that_fit(wanted: usize, workers: usize) -> usize {
    // The soft limit is low for the sake of programs that use select(); the hard limit is the
    // operator's choice.
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let _ = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: maximum,
            maximum,
        },
    );
    let Some(most) = getrlimit(Resource::Nofile).current else {
        return wanted;
    };
    let reserved = workers * FILES_PER_WORKER + OWN_FILES;
    let capacity = usize::try_from(most)
        .unwrap_or(usize::MAX)
        .saturating_sub(reserved)
        .max(FEWEST_CONNECTIONS);
    if capacity < wanted {
        log::warn!(
            "at most {capacity} connections instead of {wanted}: the process may open {most} files. \
             Raise the limit (LimitNOFILE= in the unit, ulimit -n in a shell) or lower max_connections."
        );
    }
    capacity.min(wanted)
}

/// Starts the writer. If another process serves in the place of this one, the writer stops the
/// listener and sets `fenced` to the reason.
fn start_writer(
    parts: &ServiceParts,
    stopper: UnixStream,
    fenced: Arc<OnceLock<Problem>>,
) -> io::Result<Writer> {
    let on_fenced = move |problem: &Problem| {
        if fenced.set(problem.clone()).is_ok() {
            log::error!("{problem}: this process stops");
            let _ = (&stopper).write_all(&[1]);
        }
    };
    Writer::start(&parts.store.ledger, parts.config.retention_days, on_fenced)
}

/// Says what to do if another process serves in the place of this one.
fn fenced_off(config: &Config, problem: Problem) -> Problem {
    match &config.database {
        DatabaseLocation::Postgres(_) => Problem::other(format!(
            "{problem}. Each gateway needs its own name: {} is this one's, set gateway (ADRIATICUM_GATEWAY)",
            config.gateway
        )),
        DatabaseLocation::Sqlite(_) => checks::database_failed(config, problem),
    }
}

/// Builds the console and the API, which takes every request that is not the console's.
fn services(parts: &Arc<ServiceParts>) -> Vec<Arc<dyn Service>> {
    let (config, metrics) = (&parts.config, Arc::<Metrics>::default());
    let mut services: Vec<Arc<dyn Service>> = Vec::new();
    if let Some(host) = config.console_host.clone() {
        let console = Console::new(host, Arc::clone(parts), Arc::clone(&metrics));
        services.push(Arc::new(console));
    }
    services.push(Arc::new(Api {
        hosts: config.api_hosts.clone(),
        compatibility: config.compatibility,
        store: Arc::clone(&parts.store),
        runtimes: parts.runtimes.clone(),
        grounding: parts.grounding.clone(),
        metrics,
        row_limits: RowLimits::default(),
    }));
    services
}

fn watchdog() -> Option<Watchdog> {
    let interval = sd_notify::watchdog_enabled().filter(|interval| !interval.is_zero())?;
    let feed = || notify(&[NotifyState::Watchdog]);
    Some(Watchdog::new(interval, feed))
}

fn too_few_threads(error: io::Error) -> Problem {
    Problem::other(format!(
        "can't start all threads: {error}. Raise the limit on threads (TasksMax= in the unit, \
         ulimit -u in a shell, --pids-limit of a container) or on memory, or lower workers"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The settings, with everything else as it is by default.
    fn longest(settings: &str) -> Duration {
        let path = std::env::temp_dir().join(format!(
            "adriaticum-{}.toml",
            crate::secret::secret_hex::<8>()
        ));
        std::fs::write(&path, settings).expect("the folder for temporary files should take one");
        let config = Config::load(Some(&path), SecretsNeeded::All);
        std::fs::remove_file(&path).expect("it should go");
        let config = config.unwrap_or_else(|error| panic!("{error}"));
        longest_work(&config.runtime, &config.search)
    }

    /// Grounding that waits for a slow Search was taken for a worker that is stuck.
    #[test]
    fn the_longest_work_covers_search_if_answers_are_grounded() {
        let search = "[search]\nurl = 'folder:/srv/documents'\ntimeout = 60\nmatch = ['x']";
        let with = |mode: &str| {
            longest(&format!(
                "[runtime]\ntimeout = 35\n{search}\ngrounding = '{mode}'\n"
            ))
        };
        assert_eq!(with("off"), Duration::from_secs(35) + LEDGER_TIME);
        for mode in ["always", "match"] {
            assert_eq!(
                with(mode),
                Duration::from_secs(35 + 60) + LEDGER_TIME,
                "{mode}"
            );
        }
    }

    #[test]
    fn the_unit_gives_a_stop_the_time_of_a_request() {
        let unit = include_str!("../../systemd/adriaticum.service");
        let stop = unit
            .lines()
            .find_map(|line| line.strip_prefix("TimeoutStopSec=")?.strip_suffix('s'));
        let stop = Duration::from_secs(
            stop.and_then(|time| time.parse().ok())
                .expect("a number of seconds"),
        );
        let Limits {
            stop_time,
            send_time,
            ..
        } = Limits::default();
        // The rest of the request is read, the answer is sent, and the client's end is waited for.
        let longest = longest("search = { url = 'folder:/srv/documents', grounding = 'always' }");
        assert!(
            stop >= stop_time + longest + send_time + stop_time,
            "{stop:?} for {longest:?}"
        );
    }

    #[test]
    fn each_cause_has_its_own_advice() {
        for (kind, advice) in [
            (io::ErrorKind::AddrInUse, "choose another one"),
            (io::ErrorKind::PermissionDenied, "CAP_NET_BIND_SERVICE"),
            (
                io::ErrorKind::AddrNotAvailable,
                "does not have this address",
            ),
            (io::ErrorKind::NotFound, "not found"),
        ] {
            let address = Address::Localhost(80);
            let problem = cannot_listen(&address, &address, &kind.into());
            assert!(problem.text.contains(advice), "{problem}");
        }
    }
}
