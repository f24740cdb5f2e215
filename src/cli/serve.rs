//! `serve`: starts the parts of the service, runs it, and reloads its configuration.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use sd_notify::NotifyState;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::{flag, low_level::pipe};

use super::error::{CliError, failed};
use super::open_store::{check_time_zone, open_with};
use super::process_limits::{connections_that_fit, too_few_threads};
use super::sockets::{format_address, sockets};
use crate::api::Api;
use crate::api::rows::RowLimits;
use crate::audit::Actor;
use crate::background::{Background, Step};
use crate::checks;
use crate::config::{Config, GroundingMode, RuntimeConfig, SearchConfig, TlsFiles};
use crate::console::Console;
use crate::database::sqlite::lock::FileLock;
use crate::database::{Access, DatabaseLocation, Problem};
use crate::grounding::Grounding;
use crate::ledger::Writer;
use crate::listener::{Acceptor, Limits, Listener, ListeningSocket, Service, Watchdog};
use crate::logging;
use crate::metrics::Metrics;
use crate::monitoring::MonitoringEndpoints;
use crate::runtime::Runtimes;
use crate::store::Store;
use crate::when;

/// The longest time of a request that the database takes: 10 s to look up the key (on PostgreSQL,
/// if a connection is lost), and 20 s for the row.
const LEDGER_TIME: Duration = Duration::from_secs(30);

/// The pause between two probes of a failed runtime.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// The pause between two warnings about a certificate.
const CERTIFICATE_INTERVAL: Duration = Duration::from_secs(when::DAY as u64);

pub(super) fn run(file: Option<PathBuf>) -> Result<(), CliError> {
    let (starting, reload_requested) = handle_start_signals().map_err(failed("the signals"))?;
    let config = Arc::new(Config::load(file.as_deref())?);
    logging::start(config.log_level).map_err(too_few_threads)?;
    log::info!(
        "adriaticum {}, database {}",
        env!("ADRIATICUM_VERSION"),
        config.database_name()
    );
    if let DatabaseLocation::Postgres(_) = &config.database {
        log::info!("gateway {}", config.gateway);
    }
    for name in &config.unknown_variables {
        log::warn!("unknown variable in the environment: {name}");
    }
    for (setting, reason) in &config.unread_files {
        log::warn!("{reason}. The setting is {setting}");
    }
    let acceptor = config.tls.as_ref().map(acceptor).transpose()?;
    check_time_zone(&config)?;
    // Before the sockets and the database, so that a second service ends here and has changed
    // nothing.
    let failed_database =
        |problem: Problem| CliError::failed(checks::database_failed(&config, &problem));
    let lock = config.database.file().map(FileLock::take).transpose();
    let lock = lock.map_err(failed_database)?;
    let sockets = sockets(&config)?;
    for url in &config.runtime.urls {
        let own = |socket: &ListeningSocket| checks::own_address(url, &socket.address);
        if let Some(message) = sockets.iter().find_map(own) {
            return Err(CliError::failed(format!("the runtime at {message}.")));
        }
    }
    let mut store = open_with(&config, Access::Serve)?;
    store.check_start(lock.as_ref())?;
    let scheme = if acceptor.is_some() { "https" } else { "http" };
    let urls: Vec<String> = sockets
        .iter()
        .map(|socket| format_address(&socket.address, scheme))
        .collect();
    let name = format!("the database {}", config.database_name());
    store
        .join(&config.gateway, &urls.join(" "))
        .map_err(failed(name))?;
    let store = Arc::new(store);
    let runtimes = Runtimes::new(&config.runtime, config.worker_share()).map(Arc::new);
    if runtimes.is_none() {
        log::warn!("no runtime is configured, so no completion can be run: set runtime.url");
    }
    let grounding = Grounding::new(&config.search, config.worker_share());
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
    for (socket, url) in sockets.iter().zip(urls) {
        log::info!("listening on {url}");
        if let Some(warning) = checks::reachable(&config, &socket.address) {
            log::warn!("{warning}");
        }
    }
    if let Some(host) = &config.console_host {
        // Both sockets of localhost have the same one.
        let mut ports: Vec<u16> = sockets.iter().filter_map(|it| it.address.port()).collect();
        ports.dedup();
        for port in ports {
            log::info!("console at {scheme}://{host}:{port}/");
        }
    }
    let mut listener = Listener::new(sockets, limits).map_err(failed("the listener"))?;
    listener.acceptor = acceptor.clone();
    listener.trusted_proxies = config.trusted_proxies.clone();
    listener.watchdog = watchdog();
    listener.on_stop = Box::new(|| notify(&[NotifyState::Stopping]));
    let fenced_because = Arc::new(OnceLock::new());
    let on_fenced = {
        let stopper = listener.stopper().map_err(failed("the listener"))?;
        let fenced_because = Arc::clone(&fenced_because);
        move |error: &Problem| {
            if fenced_because.set(error.clone()).is_ok() {
                log::error!("{error}: this process stops");
                let _ = (&stopper).write_all(&[1]);
            }
        }
    };
    let writer =
        Writer::start(&store.ledger, config.retention_days, on_fenced).map_err(too_few_threads)?;
    let metrics = Arc::new(Metrics::default());
    let reload = {
        let (running, store, acceptor) =
            (Arc::clone(&config), Arc::clone(&store), acceptor.clone());
        move || {
            let now = NotifyState::monotonic_usec_now();
            let now = now.expect("the system should have a monotonic clock");
            notify(&[NotifyState::Reloading, now]);
            reload(file.as_deref(), &running, acceptor.as_deref(), &store);
            notify(&[NotifyState::Ready]);
        }
    };
    let steps = background_steps(runtimes.clone(), acceptor.clone());
    let monitoring = MonitoringEndpoints {
        store: Arc::clone(&store),
        metrics: Arc::clone(&metrics),
        listener: Arc::clone(&listener.state),
        runtimes: runtimes.clone(),
        acceptor: acceptor.clone(),
    };
    let mut services: Vec<Arc<dyn Service>> = Vec::new();
    if let Some(host) = config.console_host.clone() {
        let console = Console::new(host, Arc::clone(&config), Arc::clone(&store), monitoring);
        services.push(Arc::new(console.map_err(too_few_threads)?));
    }
    services.push(Arc::new(Api {
        hosts: config.api_hosts.clone(),
        compatibility: config.compatibility,
        store,
        runtimes,
        grounding,
        metrics,
        row_limits: RowLimits::default(),
    }));
    stop_on_signals(&listener).map_err(failed("the signals"))?;
    let event_loop = listener.start(services).map_err(too_few_threads)?;
    starting.store(false, Ordering::Release);
    notify(&[NotifyState::Ready]);
    // After that message: a reload has others.
    let background = Background::start(reload_requested, reload, steps).map_err(too_few_threads)?;
    event_loop.run().map_err(failed("the listener"))?;
    drop(background);
    drop(writer);
    logging::log_refusal_summary();
    if let Some(problem) = fenced_because.get() {
        return Err(CliError::failed(match &config.database {
            DatabaseLocation::Postgres(_) => format!(
                "{problem}. Each gateway needs its own name: {} is this one's, set gateway (ADRIATICUM_GATEWAY).",
                config.gateway
            ),
            DatabaseLocation::Sqlite(_) => checks::database_failed(&config, problem),
        }));
    }
    log::info!("stopped");
    Ok(())
}

/// Handles the signals of a start, which may take minutes: before all other handlers, so that none
/// of those can swallow a signal. Until the first flag is cleared, SIGTERM and SIGINT end the
/// process at once, because no request was accepted yet. SIGHUP, which without a handler would end
/// the process, sets the second.
fn handle_start_signals() -> io::Result<(Arc<AtomicBool>, Arc<AtomicBool>)> {
    let starting = Arc::new(AtomicBool::new(true));
    let reload_requested = Arc::default();
    flag::register(SIGHUP, Arc::clone(&reload_requested))?;
    for signal in [SIGTERM, SIGINT] {
        flag::register_conditional_shutdown(signal, 0, Arc::clone(&starting))?;
    }
    Ok((starting, reload_requested))
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

/// Notifies the service manager, if there is one.
fn notify(states: &[NotifyState]) {
    if let Err(error) = sd_notify::notify(states) {
        log::warn!("could not notify the service manager of {states:?}: {error}");
    }
}

fn watchdog() -> Option<Watchdog> {
    let interval = sd_notify::watchdog_enabled().filter(|interval| !interval.is_zero())?;
    let feed = || notify(&[NotifyState::Watchdog]);
    Some(Watchdog::new(interval, feed))
}

/// Probes failed runtimes, and warns about the certificate.
fn background_steps(runtimes: Option<Arc<Runtimes>>, acceptor: Option<Arc<Acceptor>>) -> Vec<Step> {
    let probes = runtimes.map(|runtimes| Step {
        every: PROBE_INTERVAL,
        name: "probing failed runtimes",
        run: Box::new(move || runtimes.probe_failed()),
    });
    let certificate = acceptor.map(|acceptor| Step {
        every: CERTIFICATE_INTERVAL,
        name: "looking at the certificate",
        run: Box::new(move || warn_about_certificate(&acceptor)),
    });
    probes.into_iter().chain(certificate).collect()
}

fn warn_about_certificate(acceptor: &Acceptor) {
    if let Some(warning) = checks::certificate_warning(&acceptor.certificate()) {
        log::warn!("{warning}");
    }
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

fn acceptor(files: &TlsFiles) -> Result<Arc<Acceptor>, CliError> {
    let certificate = checks::read_certificate(files).map_err(CliError::config)?;
    Acceptor::new(certificate)
        .map(Arc::new)
        .map_err(|error| CliError::failed(format!("TLS: {error}.")))
}

/// Reloads the settings that can change while the service runs. An invalid configuration changes
/// nothing.
fn reload(file: Option<&Path>, running: &Config, acceptor: Option<&Acceptor>, store: &Store) {
    let config = match Config::load(file) {
        Ok(config) => config,
        Err(error) => return log::error!("configuration not reloaded: {error}"),
    };
    let mut applied = Vec::new();
    if let (Some(files), Some(acceptor)) = (&config.tls, acceptor) {
        let certificate = match checks::read_certificate(files) {
            Ok(certificate) => certificate,
            Err(error) => return log::error!("configuration not reloaded: {error}"),
        };
        if acceptor.replace_certificate(certificate) {
            applied.push(format!(
                "certificate (expires at {})",
                when::Zone::utc().format_minute(acceptor.expires())
            ));
        }
    }
    let level = log::max_level();
    if level != config.log_level {
        applied.push(format!(
            "log_level = {}",
            config.log_level.to_string().to_lowercase()
        ));
    }
    // The line can be seen if either level includes it.
    log::set_max_level(level.max(config.log_level));
    if applied.is_empty() {
        applied.push("nothing changed".into());
    }
    let mut details = applied.join(", ");
    log::info!("configuration reloaded: {details}");
    acceptor.inspect(|acceptor| warn_about_certificate(acceptor));
    log::set_max_level(config.log_level);
    let differences = running.differences(&config);
    if !differences.is_empty() {
        let waiting = format!(
            "changed, but applied only after a restart: {}",
            differences.join(", ")
        );
        log::warn!("{waiting}");
        details += &format!("; {waiting}");
    }
    if let Err(error) = store.audit.note_reload(&Actor::signal("SIGHUP"), details) {
        log::error!("the reload could not be recorded in the audit: {error}");
    }
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
        let config = Config::load(Some(&path));
        std::fs::remove_file(&path).expect("it should go");
        let config = config.unwrap_or_else(|error| panic!("{error}"));
        longest_work(&config.runtime, &config.search)
    }

    /// Grounding that waits for a slow Search was taken for a worker that is stuck.
    #[test]
    fn the_longest_work_covers_search_if_answers_are_grounded() {
        let search = "[search]\nurl = 'index:'\ntimeout = 60\nmatch = ['x']";
        let with = |mode: &str| {
            longest(&format!(
                "[runtime]\ntimeout = 35\n{search}\ngrounding = '{mode}'\n"
            ))
        };
        assert_eq!(with("off"), Duration::from_secs(35) + LEDGER_TIME);
        for mode in ["always", "match", "auto"] {
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
        let longest = longest("search = { url = 'index:', grounding = 'always' }");
        assert!(
            stop >= stop_time + longest + send_time + stop_time,
            "{stop:?} for {longest:?}"
        );
    }
}
