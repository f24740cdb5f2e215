//! Tests every part that a completion needs, as another process than the service, and says what to do
//! if one fails.

mod runtime;

use std::collections::HashMap;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub use self::runtime::own_address;
use crate::client::Cancellation;
use crate::config::{Config, GroundingMode, SearchBackend, SearchConfig, TlsFiles};
use crate::database::{Access, Session};
use crate::error::{Problem, ProblemKind, Result};
use crate::health::{self, Finding, Verdict};
use crate::keys::{BudgetPeriod, Key, KeyState};
use crate::ledger::{
    CLOCK_SLACK as DATABASE_CLOCK_SLACK, Filter, RetentionState, Span, retention_held,
};
use crate::listener::{Address, Certificate, TlsError, TrustedProxy};
use crate::search::Search;
use crate::store::Store;
use crate::text::{count, escaped, grouped, shell_word};
use crate::time_zone;
use crate::when::{self, Zone};

/// The query that tests whether Search answers.
const TRIAL_QUERY: &str = "Adriatic Sea";

/// The free bytes that the database should have: some hundred thousand rows, and SQLite's own
/// files.
const MIN_FREE_BYTES: u64 = 256 * 1024 * 1024;

/// An earlier time means that the clock was never set: the beginning of 2026.
const NOT_BEFORE: i64 = 1_767_225_600;

/// The seconds that the newest row may be ahead of the clock.
const CLOCK_SLACK: i64 = 5;

/// The most keys or models that a finding names.
const MAX_NAMED: usize = 5;

/// The longest time for one part: a person waits for it.
const LONGEST: Duration = Duration::from_secs(15);

/// The time for the answer of a service that runs on this host.
const ANSWER_TIME: Duration = Duration::from_secs(2);

/// The most of that answer that is read.
const MAX_ANSWER: u64 = 4096;

/// Runs every check, with `all_pages` also of each page of the file, and calls `each` with every
/// finding as soon as it is known.
pub fn check_all(config: &Config, all_pages: bool, mut each: impl FnMut(Finding)) {
    each(configuration(config));
    config.tls.iter().map(certificate).for_each(&mut each);
    exposed_secrets(config).into_iter().for_each(&mut each);
    // A file that can't be written is one failed part; what it has can still be read. So can one
    // from which everything was moved, which the service refuses.
    let open = |access| Store::open(&config.database, access);
    let store = match open(Access::Existing) {
        Err(_) if config.database.file().is_some() => open(Access::Read),
        store => store,
    };
    let store = store.and_then(|store| store.refuse_if_moved(&config.database).map(|()| store));
    each(clock(store.as_ref().ok()));
    each(match &store {
        Ok(store) => database(config, store, all_pages),
        Err(problem) => Finding::fail("database", store_failed(config, problem.clone()).text),
    });
    let reachable = reachable_address(config, store.as_ref().ok());
    let listen = reachable.map(|message| Finding::warn("listen", message));
    listen.into_iter().for_each(&mut each);
    if let Ok(store) = &store {
        let findings = [time_zone(config, store), retention(config, store)];
        findings.into_iter().flatten().for_each(&mut each);
        // If the keys can't be read, the finding about the database says so.
        let keys = keys_and_budgets(store).unwrap_or_default();
        keys.into_iter().for_each(&mut each);
    }
    // A runtime and Search choose a part of their messages, which a terminal shows.
    let mut escape = |finding: Finding| {
        let message = escaped(&finding.message);
        each(Finding { message, ..finding });
    };
    escape(search(config));
    runtime::check(config, &mut escape);
    service(config).into_iter().for_each(each);
}

/// Adds the setting to a problem of the database. One with a setting names its own.
pub fn database_failed(config: &Config, problem: Problem) -> Problem {
    if problem.kind == ProblemKind::Setting {
        return problem;
    }
    let name = config.database_name();
    let text =
        format!("the database {name}: {problem}. The setting is database (ADRIATICUM_DATABASE)");
    Problem { text, ..problem }
}

/// The same for a database that may be missing: then the message says how to create it.
pub fn store_failed(config: &Config, problem: Problem) -> Problem {
    if problem.kind != ProblemKind::Missing {
        return database_failed(config, problem);
    }
    let text = format!(
        "there is no database at {}. If it is elsewhere, name its configuration (--config FILE) or the database itself \
         (ADRIATICUM_DATABASE). Create it with adriaticum serve, keys create, console password, restore or move",
        config.database_name()
    );
    Problem { text, ..problem }
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
    Finding::warn(
        "configuration",
        format!("{read}; unknown variables: {unknown}. Correct or unset them"),
    )
}

/// Warns about files with secrets that every user of this host can read.
fn exposed_secrets(config: &Config) -> Option<Finding> {
    let service_files = [
        config.tls.as_ref().map(|files| files.key.as_path()),
        config.database.file(),
    ];
    let files = service_files
        .into_iter()
        .flatten()
        .chain(config.secret_files.iter().map(PathBuf::as_path));
    let is_readable = |path: &&Path| {
        fs::metadata(path).is_ok_and(|file| file.is_file() && file.mode() & 0o004 != 0)
    };
    let is_config = |path: &&Path| config.file.as_deref() == Some(path);
    let (configuration, others): (Vec<&Path>, Vec<&Path>) =
        files.filter(is_readable).partition(is_config);
    let mut message = Vec::new();
    if !others.is_empty() {
        let names: Vec<String> = others
            .iter()
            .map(|path| shell_word(&path.to_string_lossy()))
            .collect();
        let names = names.join(" ");
        message.push(format!(
            "every user of this host can read {names}. Run: chmod o-rwx {names}"
        ));
    }
    if let Some(path) = configuration.first() {
        message.push(format!(
            "every user of this host can read {}, which has a password or a key. Put it into a file of its own \
             (database_password_file, runtime.api_key_file; man adriaticum.toml)",
            path.display()
        ));
    }
    (!message.is_empty()).then(|| Finding::warn("secrets", message.join("; ")))
}

fn clock(store: Option<&Store>) -> Finding {
    let now = when::now();
    let zone = store.map_or(Zone::utc(), |store| store.zone.clone());
    let time = format!("the time is {}", zone.format_local(now));
    if now < NOT_BEFORE {
        return Finding::fail("clock", time + ". Set the clock, or keys do not expire");
    }
    let is_off = store.and_then(|store| clock_is_off(store.ledger.clock_difference().ok()?));
    let is_set_back = || {
        let newest = store.and_then(|store| store.ledger.newest_row().ok()?);
        let ahead = newest.filter(|newest| *newest > now + CLOCK_SLACK)?;
        let ahead = zone.format_local(ahead);
        Some(format!(
            "but the newest row of the ledger is of {ahead}. Was the clock set back?"
        ))
    };
    match is_off.or_else(is_set_back) {
        Some(warning) => Finding::warn("clock", format!("{time}, {warning}")),
        None => Finding::ok("clock", time),
    }
}

/// Warns about a setting with which the service will not start again.
fn time_zone(config: &Config, store: &Store) -> Option<Finding> {
    let setting = config.time_zone.as_deref();
    let check = |session: &Session| time_zone::check_setting(session, setting);
    let problem = store.database.read(check).err()?;
    (problem.kind == ProblemKind::Setting).then(|| Finding::warn("time_zone", problem.text))
}

/// Warns if retention removes nothing.
fn retention(config: &Config, store: &Store) -> Option<Finding> {
    let now = store.ledger.clock().ok()?;
    match store.ledger.retention(config.retention_days?, now).ok()? {
        RetentionState::Held { before } => Some(Finding::warn(
            "retention",
            retention_held(before, &store.ledger.zone),
        )),
        RetentionState::Idle | RetentionState::Due { .. } => None,
    }
}

/// Warns about a clock that is this many seconds ahead of the database's. Returns `None` if they
/// agree.
fn clock_is_off(ahead: f64) -> Option<String> {
    let side = if ahead > 0.0 { "ahead of" } else { "behind" };
    (ahead.abs() > DATABASE_CLOCK_SLACK).then(|| {
        format!(
            "{:.1} s {side} the database's clock. Synchronize both with NTP: the times of rows and the expiry of keys use it",
            ahead.abs()
        )
    })
}

fn database(config: &Config, store: &Store, all_pages: bool) -> Finding {
    let name = config.database_name();
    if let Err(problem) = store.check(false) {
        return health::ledger_finding(&name, &problem);
    }
    // A row can be written all the same.
    if all_pages && let Err(problem) = store.check(true) {
        return Finding::fail("database", format!("{name}: {problem}"));
    }
    let sound = if all_pages { "sound and " } else { "" };
    match config.database.file() {
        Some(path) => with_free_space(path, format!("{name}: {sound}writable")),
        None => Finding::ok("database", format!("{name}: writable")),
    }
}

fn with_free_space(path: &Path, message: String) -> Finding {
    let Ok(disk) = rustix::fs::statvfs(path) else {
        return Finding::ok("database", message);
    };
    let free = disk.f_bavail * disk.f_frsize;
    let message = format!(
        "{message}, {} MiB free",
        grouped((free / 1024 / 1024) as i64)
    );
    if free >= MIN_FREE_BYTES {
        Finding::ok("database", message)
    } else {
        Finding::warn(
            "database",
            message + ". Free some space: on a full disk no completion is run",
        )
    }
}

/// Sends a real query to Search. An empty result is fine.
fn search(config: &Config) -> Finding {
    let limited = SearchConfig {
        timeout: config.search.timeout.min(LONGEST),
        ..config.search.clone()
    };
    let search = match Search::new(&limited, config.worker_share()) {
        Some(search) if config.search.grounding != GroundingMode::Off => search,
        _ => return Finding::ok("search", "off: answers are not grounded"),
    };
    let place = match &config.search.backend {
        Some(SearchBackend::SearXng(url)) => url.clone(),
        Some(SearchBackend::Folder(path)) => path.display().to_string(),
        None => String::new(),
    };
    let asked = Instant::now();
    match search.find(TRIAL_QUERY, &Cancellation::default()) {
        Ok(found) => {
            let time = asked.elapsed().as_millis();
            let message = match found.len() {
                // An index of other documents, or an instance with engines for other things.
                0 => format!(
                    "nothing found for the trial query \"{TRIAL_QUERY}\", and no error reported"
                ),
                count => format!("{count} found for the trial query \"{TRIAL_QUERY}\""),
            };
            Finding::ok(
                "search",
                format!("{place}: answers in {time} ms, {message}"),
            )
        }
        Err(error) => health::search_finding(&error.to_string()),
    }
}

fn certificate(files: &TlsFiles) -> Finding {
    match read_certificate(files) {
        Err(problem) => Finding::fail("tls", problem.text),
        Ok(certificate) => match certificate.validity() {
            Some(dates) => health::certificate_finding(dates, when::now()),
            None => Finding::ok("tls", "the certificate and its key match"),
        },
    }
}

pub fn read_certificate(files: &TlsFiles) -> Result<Certificate> {
    Certificate::read(&files.cert, &files.key).map_err(|error| {
        let (setting, path, cause) = match error {
            TlsError::Certificate(cause) => ("tls.cert", &files.cert, cause),
            TlsError::Key(cause) => ("tls.key", &files.key, cause),
        };
        let text = format!("{setting} = {path:?}: {cause}. Expected a PEM file");
        Problem::new(ProblemKind::Setting, text)
    })
}

/// Joins the first names of a list.
fn named<T>(all: &[T], name: impl Fn(&T) -> String) -> String {
    let mut names: Vec<String> = all.iter().take(MAX_NAMED).map(name).collect();
    if all.len() > MAX_NAMED {
        names.push(format!("{} more", all.len() - MAX_NAMED));
    }
    names.join(", ")
}

/// The verdict that the service has of itself, if one runs with this configuration. Behind TLS it
/// can't be asked.
fn service(config: &Config) -> Option<Finding> {
    let host = config
        .console_host
        .as_ref()
        .filter(|_| config.tls.is_none())?;
    let answer = ask_for_readiness(config, host).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let verdict = body.trim_end();
    let message = format!("it runs, and says of itself: {verdict}");
    Some(match head.split(' ').nth(1)? {
        "200" if verdict == Verdict::Works.word() => Finding::ok("service", message),
        "200" => Finding::warn("service", message),
        _ => Finding::fail("service", message),
    })
}

fn ask_for_readiness(config: &Config, host: &str) -> io::Result<String> {
    let request = format!("GET /readyz HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    let address = match &config.listen {
        Address::Unix(path) => {
            let stream = UnixStream::connect(path)?;
            stream.set_read_timeout(Some(ANSWER_TIME))?;
            return ask(stream, &request);
        }
        Address::Localhost(port) => (Ipv4Addr::LOCALHOST, *port).into(),
        Address::Tcp(address) if address.ip().is_unspecified() => {
            (Ipv4Addr::LOCALHOST, address.port()).into()
        }
        Address::Tcp(address) => *address,
    };
    let stream = TcpStream::connect_timeout(&address, ANSWER_TIME)?;
    stream.set_read_timeout(Some(ANSWER_TIME))?;
    ask(stream, &request)
}

fn ask(mut stream: impl Read + Write, request: &str) -> io::Result<String> {
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.take(MAX_ANSWER).read_to_string(&mut answer)?;
    Ok(answer)
}

/// Warns about the address that the service listens on. With a socket of systemd, it is the one of
/// the last start.
fn reachable_address(config: &Config, store: Option<&Store>) -> Option<String> {
    let gateways = store
        .and_then(|store| store.ledger.gateways().ok())
        .unwrap_or_default();
    let own = gateways
        .iter()
        .find(|gateway| gateway.name == config.gateway);
    let tcp = |address: &str| {
        address
            .split_once("://")
            .and_then(|(_, address)| address.parse().ok())
            .map(Address::Tcp)
    };
    let last = own
        .into_iter()
        .flat_map(|gateway| gateway.address.split(' ').filter_map(tcp));
    let mut addresses = [config.listen.clone()].into_iter().chain(last);
    addresses.find_map(|address| reachable(config, &address))
}

/// Warns about an address that other hosts can reach: they would get 404, or send their keys
/// without encryption.
pub fn reachable(config: &Config, address: &Address) -> Option<String> {
    let Address::Tcp(address) = address else {
        return None;
    };
    if address.ip().is_loopback() {
        return None;
    }
    let mut message = Vec::new();
    if config.api_hosts.iter().all(|host| is_local(host)) {
        message.push(format!(
            "clients of other hosts get 404, because api_hosts has only names of this host ({}). Add the name or address that \
             they use to api_hosts (ADRIATICUM_API_HOSTS)",
            config.api_hosts.join(", ")
        ));
    }
    let proxies = &config.trusted_proxies.0;
    if config.tls.is_none() && proxies.iter().all(|proxy| *proxy == TrustedProxy::Unix) {
        message.push(
            "keys and prompts are sent without encryption. Set tls.cert and tls.key, or put a proxy with TLS in front and \
             name it in trusted_proxies"
                .into(),
        );
    }
    (!message.is_empty()).then(|| {
        format!(
            "other hosts can reach {address} (listen, or adriaticum.socket): {}",
            message.join("; ")
        )
    })
}

/// Returns true for a name or address that means this host on every host.
pub fn is_local(host: &str) -> bool {
    let is_name = host == "localhost" || host.ends_with(".localhost");
    is_name
        || host
            .parse()
            .is_ok_and(|address: IpAddr| address.is_loopback())
}

/// Keys that an operator should know about: expired or expiring ones, and budgets that do not count
/// everything.
fn keys_and_budgets(store: &Store) -> Result<Vec<Finding>> {
    let now = when::now();
    let keys = store.keys.list()?;
    let date = |key: &&Key| {
        format!(
            "{} ({:?}, {})",
            key.id,
            key.name,
            store.zone.format_minute(key.terms.expires)
        )
    };
    let mut findings = Vec::new();
    for (state, verb, advice) in [
        (
            KeyState::Expired,
            "expired",
            "Revoke what is not needed: adriaticum keys revoke ID; or give it another date: adriaticum keys set ID --expires WHEN",
        ),
        (
            KeyState::Expiring,
            "will expire within ten days",
            "To give one another date: adriaticum keys set ID --expires WHEN",
        ),
    ] {
        let keys: Vec<&Key> = keys.iter().filter(|key| key.state(now) == state).collect();
        if !keys.is_empty() {
            let message = format!(
                "{} {verb}: {}. {advice}",
                count(keys.len() as i64, "key"),
                named(&keys, date)
            );
            findings.push(Finding::warn("keys", message));
        }
    }
    let unmeasured = unmeasured(store, &keys, now)?;
    if !unmeasured.is_empty() {
        let names = named(&unmeasured, |(key, number)| {
            let per = key.terms.budget.map_or("", |budget| budget.per.as_str());
            format!(
                "{} ({:?}, {} this {per})",
                key.id,
                key.name,
                count(*number, "completion")
            )
        });
        let message = format!(
            "completions without total_tokens do not count: {names}. Configure the runtime to report usage"
        );
        findings.push(Finding::warn("budgets", message));
    }
    Ok(findings)
}

/// Returns the keys with a budget and, in its period, completions without a total of the runtime,
/// and how many.
fn unmeasured<'a>(store: &Store, keys: &'a [Key], now: i64) -> Result<Vec<(&'a Key, i64)>> {
    let since = |key: &'a Key| {
        Some((
            key.id.as_str(),
            key.terms.budget?.per.containing(now, &store.zone).since,
        ))
    };
    let periods: HashMap<&str, i64> = keys
        .iter()
        .filter(|key| key.is_valid(now))
        .filter_map(since)
        .collect();
    if periods.is_empty() {
        return Ok(Vec::new());
    }
    let mut numbers: HashMap<String, i64> = HashMap::new();
    let month = BudgetPeriod::Month.containing(now, &store.zone);
    store.ledger.figures(Span::Day, month, Filter::ALL, |row| {
        if row.sums.unmeasured > 0
            && periods
                .get(row.key_id.as_str())
                .is_some_and(|since| row.start >= *since)
        {
            *numbers.entry(row.key_id).or_default() += row.sums.unmeasured;
        }
    })?;
    Ok(keys
        .iter()
        .filter_map(|key| Some((key, *numbers.get(&key.id)?)))
        .collect())
}
