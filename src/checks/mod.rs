//! Tests every part that a completion needs, and says what to do if one fails.

mod certificate;
mod keys;
mod runtime;

use std::fmt::Display;
use std::fs;
use std::net::{IpAddr, ToSocketAddrs};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Serialize;

pub use self::certificate::{is_ending, read_certificate, read_unexpired};

use crate::client::Cancellation;
use crate::config::{Config, GroundingMode, SearchPlace};
use crate::listener::{Address, TrustedProxy};
use crate::search::{self, Index};
use crate::store::{Access, CLOCK_SLACK as DATABASE_CLOCK_SLACK, Store, StoreError};
use crate::text::{count, grouped};
use crate::when;

/// The query that tests whether Search answers.
const TRIAL_QUERY: &str = "Adriatic Sea";

/// The free bytes that the database should have: some hundred thousand rows, and SQLite's own files.
const FREE_ENOUGH: u64 = 256 * 1024 * 1024;

/// An earlier time means that the clock was never set: the beginning of 2026.
const NOT_BEFORE: i64 = 1_767_225_600;

/// How far the newest row may be ahead of the clock.
const CLOCK_SLACK: i64 = 5;

/// The worst is the greatest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Ok,
    /// It works, but the operator should know about something.
    Warn,
    Fail,
}

/// The result of testing one part.
#[derive(Serialize)]
pub struct Finding {
    pub part: &'static str,
    pub status: Verdict,
    pub message: String,
    /// The address of the runtime that it is about.
    #[serde(skip)]
    pub runtime: Option<String>,
}

impl Finding {
    fn new(part: &'static str, status: Verdict, message: impl Into<String>) -> Self {
        Self { part, status, message: message.into(), runtime: None }
    }

    fn ok(part: &'static str, message: impl Into<String>) -> Self {
        Self::new(part, Verdict::Ok, message)
    }

    pub fn warn(part: &'static str, message: impl Into<String>) -> Self {
        Self::new(part, Verdict::Warn, message)
    }

    pub fn fail(part: &'static str, message: impl Into<String>) -> Self {
        Self::new(part, Verdict::Fail, message)
    }
}

/// Every check, of the whole database too.
pub fn all(config: &Config) -> Vec<Finding> {
    let store = Store::open(&config.database, Access::Existing);
    let found = match &store {
        Ok(store) => database(config, store.check()),
        Err(error) => Finding::fail("database", store_failed(config, error)),
    };
    parts(config, store.as_ref().ok(), found)
}

pub fn database_failed(config: &Config, error: &dyn Display) -> String {
    let name = config.database_name();
    let unread = config.unread_files.iter().find(|(setting, _)| *setting == "database_password_file");
    let unread = unread.map(|(_, reason)| format!(" {reason}.")).unwrap_or_default();
    format!("the database {name}: {error}.{unread} The setting is database (ADRIATICUM_DATABASE).")
}

/// The same for a database that may be missing: then the finding says what to do.
pub fn store_failed(config: &Config, error: &StoreError) -> String {
    match error {
        StoreError::Missing => format!(
            "there is no database at {}. If it is elsewhere, name its configuration (--config FILE) or the database itself \
             (ADRIATICUM_DATABASE). adriaticum serve, keys create, console password, restore and move create one.",
            config.database_name()
        ),
        error => database_failed(config, error),
    }
}

/// The checks of a running service, whose database may be too large to be read completely each time.
pub fn of_a_running_service(config: &Config, store: &Store) -> Vec<Finding> {
    parts(config, Some(store), database(config, store.try_request()))
}

fn parts(config: &Config, store: Option<&Store>, database: Finding) -> Vec<Finding> {
    let mut findings = vec![configuration(config), hosts(config)];
    findings.extend(reachable_address(config, store).map(|message| Finding::warn("listen", message)));
    findings.extend(config.tls.as_ref().map(certificate::check));
    findings.extend(exposed(config));
    findings.extend([clock(config, store), database]);
    findings.extend(store.map(keys::check).unwrap_or_default());
    findings.push(search(config));
    findings.extend(unused_index(config));
    findings.extend(runtime::check(config));
    findings
}

fn configuration(config: &Config) -> Finding {
    let read = match &config.file {
        Some(file) => format!("read from {}", file.display()),
        None => "no file: defaults and the environment".into(),
    };
    if config.unknown_variables.is_empty() {
        return Finding::ok("configuration", read);
    }
    let unknown = config.unknown_variables.join(", ");
    Finding::warn("configuration", format!("{read}; unknown variables: {unknown}. Correct or unset them"))
}

/// Files with secrets that every user of this host can read, or that this user can't.
fn exposed(config: &Config) -> Option<Finding> {
    let of_service = [config.tls.as_ref().map(|files| files.key.as_path()), config.database.file()];
    let files = of_service.into_iter().flatten().chain(config.secret_files.iter().map(PathBuf::as_path));
    let is_readable =
        |path: &&Path| fs::metadata(path).is_ok_and(|file| file.is_file() && file.mode() & 0o004 != 0);
    let is_config = |path: &&Path| config.file.as_deref() == Some(path);
    let (configuration, others): (Vec<&Path>, Vec<&Path>) = files.filter(is_readable).partition(is_config);
    let mut message = Vec::new();
    if !others.is_empty() {
        let names: Vec<String> = others.iter().map(|path| path.display().to_string()).collect();
        let names = names.join(" ");
        message.push(format!("every user of this host can read {names}. Run: chmod o-rwx {names}"));
    }
    if let Some(path) = configuration.first() {
        message.push(format!(
            "every user of this host can read {}, which has a password or a key. Put it into a file of its own \
             (database_password_file, runtime.api_key_file; man adriaticum.toml)",
            path.display()
        ));
    }
    message.extend(config.unread_files.iter().map(|(_, reason)| reason.clone()));
    (!message.is_empty()).then(|| Finding::warn("secrets", message.join("; ")))
}

/// The warning about the address that the service listens on, or with a socket of systemd, has listened on when it last started.
fn reachable_address(config: &Config, store: Option<&Store>) -> Option<String> {
    let gateways = store.and_then(|store| store.gateways().ok()).unwrap_or_default();
    let own = gateways.iter().find(|gateway| gateway.name == config.gateway);
    let tcp = |address: &str| {
        address.split_once("://").and_then(|(_, address)| address.parse().ok()).map(Address::Tcp)
    };
    let last = own.into_iter().flat_map(|gateway| gateway.address.split(' ').filter_map(tcp));
    let mut addresses = [config.listen.clone()].into_iter().chain(last);
    addresses.find_map(|address| reachable(config, &address))
}

/// The warning about an address that other hosts can reach: they would get 404, or send their keys in the clear.
pub fn reachable(config: &Config, address: &Address) -> Option<String> {
    let address = match address {
        Address::Tcp(address) if !address.ip().is_loopback() => address,
        _ => return None,
    };
    let mut message = Vec::new();
    if config.api_hosts.iter().all(|host| is_local(host)) {
        message.push(format!(
            "clients of other hosts get 404, because api_hosts has only names of this host ({}). Add the name or address that \
             they use to api_hosts (ADRIATICUM_API_HOSTS)",
            config.api_hosts.join(", ")
        ));
    }
    if config.tls.is_none() && !config.trusted_proxies.0.iter().any(|proxy| *proxy != TrustedProxy::Unix) {
        message.push(
            "keys and prompts are sent without encryption. Set tls.cert and tls.key, or put a proxy with TLS in front and \
             name it in trusted_proxies"
                .into(),
        );
    }
    (!message.is_empty()).then(|| {
        format!("other hosts can reach {address} (listen, or adriaticum.socket): {}", message.join("; "))
    })
}

/// Whether a name of the API means this host to every host.
fn is_local(host: &str) -> bool {
    let is_name = host == "localhost" || host.ends_with(".localhost");
    is_name || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

/// The names of the API, and whether this host can resolve them.
fn hosts(config: &Config) -> Finding {
    let port = match config.listen {
        Address::Tcp(address) => address.port(),
        Address::Unix(_) => 0,
    };
    let unknown: Vec<&str> = config
        .api_hosts
        .iter()
        .filter(|host| (host.as_str(), port).to_socket_addrs().is_err())
        .map(String::as_str)
        .collect();
    let names = config.api_hosts.join(", ");
    if unknown.is_empty() {
        return Finding::ok("hosts", format!("the API is served as {names}, on {}", config.listen));
    }
    let message = format!(
        "the API is served as {names}, but {} can't be resolved on this host. Check DNS, or correct api_hosts",
        unknown.join(", ")
    );
    Finding::warn("hosts", message)
}

fn clock(config: &Config, store: Option<&Store>) -> Finding {
    let now = when::now();
    if now < NOT_BEFORE {
        let message = format!("the time is {}. Set it, or keys do not expire", when::format_utc(now));
        return Finding::fail("clock", message);
    }
    if let Some(told) = store.and_then(|store| store.clock_difference().ok()).and_then(clock_is_off) {
        return Finding::warn("clock", format!("the time is {}, {told}", when::format_utc(now)));
    }
    let jump = config.retention_days.and_then(|_| store?.clock_jump().ok().flatten());
    if let Some(last_seen) = jump {
        return Finding::warn(
            "clock",
            format!("the time is {}, {}", when::format_utc(now), clock_jumped(last_seen)),
        );
    }
    match store.and_then(|store| store.newest_row().ok().flatten()) {
        Some(newest) if newest > now + CLOCK_SLACK => {
            let message = format!(
                "the time is {}, but the newest row of the ledger is of {}. Was the clock set back?",
                when::format_utc(now),
                when::format_utc(newest)
            );
            Finding::warn("clock", message)
        }
        _ => Finding::ok("clock", format!("the time is {}", when::format_utc(now))),
    }
}

/// The warning about a clock that retention does not trust.
pub fn clock_jumped(last_seen: i64) -> String {
    format!(
        "more than a day after the service was last seen ({}). Until it has run for 24 hours, retention removes nothing. If \
         the clock is wrong, set it",
        when::format_utc(last_seen)
    )
}

/// The warning about a clock that is this many seconds ahead of the database's; `None` if they agree.
pub fn clock_is_off(ahead: f64) -> Option<String> {
    let side = if ahead > 0.0 { "ahead of" } else { "behind" };
    let told = format!(
        "{:.1} s {side} the database's clock. Synchronize both with NTP: the times of rows and the expiry of keys use it",
        ahead.abs()
    );
    (ahead.abs() > DATABASE_CLOCK_SLACK).then_some(told)
}

fn database(config: &Config, checked: Result<(), StoreError>) -> Finding {
    let name = config.database_name();
    match (checked, config.database.file()) {
        (Err(error), _) => Finding::fail("database", format!("{name}: {error}")),
        (Ok(()), Some(path)) => with_room(path, format!("{name}: sound and writable")),
        (Ok(()), None) => Finding::ok("database", format!("{name}: writable")),
    }
}

fn with_room(path: &Path, message: String) -> Finding {
    let Some(free) = bytes_free(path) else {
        return Finding::ok("database", message);
    };
    let message = format!("{message}, {} MiB free", grouped((free / 1024 / 1024) as i64));
    if free >= FREE_ENOUGH {
        Finding::ok("database", message)
    } else {
        Finding::warn("database", message + ". Free some space: on a full disk no completion is run")
    }
}

/// The free bytes of the disk that a file is on.
pub fn bytes_free(path: &Path) -> Option<u64> {
    rustix::fs::statvfs(path).ok().map(|disk| disk.f_bavail * disk.f_frsize)
}

/// An index with documents that no completion is grounded in.
fn unused_index(config: &Config) -> Option<Finding> {
    let unused = config.search.how_to_use_index()?;
    let index = Index::new(&config.search);
    let documents = index.path().exists().then(|| index.list().ok())??.len();
    (documents > 0).then(|| {
        let (path, documents) = (index.path().display(), count(documents as i64, "document"));
        Finding::warn(
            "search",
            format!("the index {path} has {documents}, but no completion uses it. {unused}"),
        )
    })
}

/// Sends a real query to Search; what it finds does not matter.
fn search(config: &Config) -> Finding {
    let search = match search::configured(&config.search, 1, config.worker_share()) {
        Some(search) if config.search.grounding != GroundingMode::Off => search,
        _ => return Finding::ok("search", "off: answers are not grounded"),
    };
    let place = match &config.search.place {
        Some(SearchPlace::SearXng(url)) => url.clone(),
        _ => config.search.index.display().to_string(),
    };
    let asked = Instant::now();
    match search.find(TRIAL_QUERY, &Cancellation::default()) {
        Ok(found) => {
            let time = asked.elapsed().as_millis();
            let message = match found.len() {
                // An index of other documents, or an instance with engines for other things.
                0 => format!("nothing found for the trial query \"{TRIAL_QUERY}\", and no error reported"),
                count => format!("{count} found for the trial query \"{TRIAL_QUERY}\""),
            };
            Finding::ok("search", format!("{place}: answers in {time} ms, {message}"))
        }
        Err(error) => Finding::fail(
            "search",
            format!(
                "{error}. Completions that need Search get 503 until it works. The setting is search.url"
            ),
        ),
    }
}
