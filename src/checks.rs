//! Tests every part that a completion needs, and says what to do if one fails.

mod certificate;

use std::borrow::Cow;
use std::fmt::Display;
use std::fs;
use std::net::ToSocketAddrs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;

pub use self::certificate::read_certificate;

use crate::client::Cancellation;
use crate::config::{Config, GroundingMode, RuntimeConfig, SearchPlace};
use crate::listener::Address;
use crate::runtime::{Chat, Message, Role, Runtimes, Spent, probe};
use crate::search;
use crate::store::{CLOCK_SLACK as DATABASE_CLOCK_SLACK, IfMissing, Store, StoreError, Unsealed};
use crate::text::count;
use crate::when;

/// Where runtimes listen by default.
const USUAL: [(&str, u16); 4] =
    [("llama-server", 8080), ("Ollama", 11434), ("vLLM", 8000), ("LM Studio", 1234)];

/// The query that tests whether Search answers.
const TRIAL_QUERY: &str = "Adriatic Sea";

/// The timeout for what a runtime says about itself.
const PROBE_TIME: Duration = Duration::from_secs(2);

/// The free bytes that the database should have: some hundred thousand rows, and SQLite's own files.
const FREE_ENOUGH: u64 = 256 * 1024 * 1024;

/// An earlier time means that the clock was never set: the beginning of 2026.
const NOT_BEFORE: i64 = 1_767_225_600;

/// How long a row may wait for its seal, in seconds: it is created before its inference.
const SEALING_SLACK: i64 = 300;

/// How far the newest row may be ahead of the clock.
const CLOCK_SLACK: i64 = 5;

#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
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
}

impl Finding {
    fn ok(part: &'static str, message: impl Into<String>) -> Self {
        Self { part, status: Verdict::Ok, message: message.into() }
    }

    pub fn warn(part: &'static str, message: impl Into<String>) -> Self {
        Self { part, status: Verdict::Warn, message: message.into() }
    }

    pub fn fail(part: &'static str, message: impl Into<String>) -> Self {
        Self { part, status: Verdict::Fail, message: message.into() }
    }
}

/// Every check, of the whole database too.
pub fn all(config: &Config) -> Vec<Finding> {
    let store = Store::open(&config.database, config.workers, IfMissing::Fail);
    let found = match &store {
        Ok(store) => database(config, store.check()),
        Err(error) => Finding::fail("database", store_failed(config, error)),
    };
    parts(config, store.as_ref().ok(), found)
}

pub fn database_failed(config: &Config, error: &dyn Display) -> String {
    let name = config.database_name();
    format!("the database {name}: {error}. The setting is database (ADRIATICUM_DATABASE).")
}

/// The same for a database that may be missing: then the finding says what to do.
pub fn store_failed(config: &Config, error: &StoreError) -> String {
    match error {
        StoreError::Missing => format!(
            "there is no database at {}. If it is elsewhere, name its configuration (--config FILE) or the database itself \
             (ADRIATICUM_DATABASE). adriaticum serve, keys create, console password and move create one.",
            config.database_name()
        ),
        error => database_failed(config, error),
    }
}

/// The checks of a running service, whose database may be too large to be read completely each time.
pub fn of_a_running_service(config: &Config, store: &Store) -> Vec<Finding> {
    parts(config, Some(store), database(config, store.try_write()))
}

fn parts(config: &Config, store: Option<&Store>, database: Finding) -> Vec<Finding> {
    let mut findings = vec![configuration(config), hosts(config)];
    findings.extend(config.tls.as_ref().map(certificate::check));
    findings.extend(exposed(config));
    findings.extend([clock(store), database]);
    findings.extend(store.map(sealing));
    findings.push(search(config));
    findings.extend(runtimes(config));
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

/// Files with secrets that every user of this host can read.
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
             (ADRIATICUM_DATABASE_PASSWORD_FILE, ADRIATICUM_RUNTIME_API_KEY_FILE; man adriaticum.toml)",
            path.display()
        ));
    }
    (!message.is_empty()).then(|| Finding::warn("secrets", message.join("; ")))
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

fn clock(store: Option<&Store>) -> Finding {
    let now = when::now();
    if now < NOT_BEFORE {
        let message = format!("it says {}. Set it, or keys do not expire", when::shown(Some(now)));
        return Finding::fail("clock", message);
    }
    if let Some(told) = store.and_then(|store| store.clock_difference().ok()).and_then(clock_is_off) {
        return Finding::warn("clock", format!("it says {}, {told}", when::shown(Some(now))));
    }
    match store.and_then(|store| store.newest_row().ok().flatten()) {
        Some(newest) if newest > now + CLOCK_SLACK => {
            let message = format!(
                "it says {}, but the newest row of the ledger is of {}. Was the clock set back?",
                when::shown(Some(now)),
                when::shown(Some(newest))
            );
            Finding::warn("clock", message)
        }
        _ => Finding::ok("clock", format!("it says {}", when::shown(Some(now)))),
    }
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

/// How far sealing is behind. Requests do not wait for it.
fn sealing(store: &Store) -> Finding {
    match store.unsealed() {
        Err(error) => Finding::fail("sealing", error.to_string()),
        Ok(Unsealed { rows: 0, .. }) => Finding::ok("sealing", "every finished row is sealed"),
        Ok(Unsealed { rows, oldest }) => {
            let behind = oldest.map_or(0, |oldest| when::now() - oldest);
            let message = format!("{} not sealed yet, the oldest for {behind} s", count(rows, "row"));
            if behind <= SEALING_SLACK {
                return Finding::ok("sealing", message);
            }
            let next = "The running service seals them; if it does not, its log says why";
            Finding::warn("sealing", format!("{message}. {next}"))
        }
    }
}

fn with_room(path: &Path, message: String) -> Finding {
    let Some(free) = bytes_free(path) else {
        return Finding::ok("database", message);
    };
    let message = format!("{message}, {} MiB free", free / 1024 / 1024);
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

/// Sends a real query to Search; what it finds does not matter.
fn search(config: &Config) -> Finding {
    let search = match search::configured(&config.search, 1) {
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

fn runtimes(config: &Config) -> Vec<Finding> {
    let mut findings: Vec<Finding> =
        config.runtime.urls.iter().filter_map(|url| try_one(url, config)).collect();
    if findings.is_empty() {
        let message =
            "no runtime is configured. Set runtime.url (ADRIATICUM_RUNTIME_URL) to its base address";
        findings.push(Finding::fail("runtime", message));
    }
    if findings.iter().any(|finding| finding.status == Verdict::Fail) {
        findings.extend(found_here(config));
    }
    findings
}

/// Asks for one token.
fn try_one(url: &str, config: &Config) -> Option<Finding> {
    let runtime = Runtimes::new(&RuntimeConfig { urls: vec![url.to_owned()], ..config.runtime.clone() }, 1)?;
    let about = probe(url, &config.runtime, PROBE_TIME).unwrap_or_default();
    let chat = Chat {
        messages: vec![Message { role: Role::User, content: Cow::Borrowed("Say yes.") }],
        temperature: 0.0,
        max_tokens: 1,
    };
    let asked = Instant::now();
    Some(match runtime.complete(&chat, None, &mut Spent::default()) {
        Ok(generated) => {
            let mut message = format!("{url}: answers in {} ms", asked.elapsed().as_millis());
            if let Some(context) = about.context {
                message += &format!(", has a context of {context} tokens");
            }
            match generated.tokens.total_tokens {
                Some(_) => Finding::ok("runtime", message + ", reports usage"),
                None => {
                    Finding::warn("runtime", message + ", reports no usage: the token figures will be null")
                }
            }
        }
        Err((_, error)) => {
            let mut message = format!("{url}: {error}. ");
            if about.models.is_empty() && url.starts_with("https://") {
                message += "Is it running, is this its base address (runtime.url), and is its certificate signed by a CA \
                         of runtime.ca, or without that setting, of the system?";
            } else if about.models.is_empty() {
                message += "Is it running, and is this its base address? The setting is runtime.url";
            } else if !about.models.contains(&config.runtime.model) {
                message += &format!("It knows {}: set runtime.model", about.models.join(", "));
            } else {
                message += "It lists its models, so its own log should say why it returns no completion";
            }
            Finding::fail("runtime", message)
        }
    })
}

/// Runtimes that listen on this host's usual ports and are not used.
fn found_here(config: &Config) -> Vec<Finding> {
    let mut findings = Vec::new();
    // The key is for the runtimes of the configuration only.
    let without_key = RuntimeConfig { api_key: None, ..config.runtime.clone() };
    for (name, port) in USUAL {
        let url = format!("http://127.0.0.1:{port}/v1");
        if config.runtime.urls.contains(&url) || is_own(port, &config.listen) {
            continue;
        }
        if let Some(about) = probe(&url, &without_key, PROBE_TIME) {
            let model = match about.models.first() {
                Some(model) => format!(" and runtime.model = \"{model}\""),
                None => String::new(),
            };
            let message = format!(
                "a runtime answers at {url}, where {name} usually listens. To use it: runtime.url = \"{url}\"{model}"
            );
            findings.push(Finding::warn("runtime", message));
        }
    }
    findings
}

/// Whether this service itself listens on a port of this host: it would answer 404, and log that.
fn is_own(port: u16, listen: &Address) -> bool {
    match listen {
        Address::Tcp(address) => {
            address.port() == port && (address.ip().is_loopback() || address.ip().is_unspecified())
        }
        Address::Unix(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_service_does_not_take_itself_for_a_runtime() {
        for (listen, expected) in [
            ("127.0.0.1:8080", true),
            ("[::]:8080", true),
            ("127.0.0.1:8081", false),
            ("192.0.2.1:8080", false),
        ] {
            let address = Address::Tcp(listen.parse().expect("an address"));
            assert_eq!(is_own(8080, &address), expected, "{listen}");
        }
        assert!(!is_own(8080, &Address::Unix("/run/x.sock".into())));
    }
}
