//! Tries every part that a completion needs, and says what to do about those that fail.

use std::borrow::Cow;
use std::fmt::Display;
use std::fs;
use std::net::ToSocketAddrs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::client::Cancellation;
use crate::config::{Config, GroundingMode, RuntimeConfig, SearchPlace, TlsFiles};
use crate::listener::{Address, Certificate, TlsError};
use crate::runtime::{Chat, Message, Role, Runtimes, Spent, probe};
use crate::search;
use crate::store::{Database, IfMissing, Store, StoreError, Unsealed};
use crate::when;

/// Where runtimes listen by default.
const USUAL: [(&str, u16); 4] =
    [("llama-server", 8080), ("Ollama", 11434), ("vLLM", 8000), ("LM Studio", 1234)];

/// What Search is asked to see whether it answers.
const TRIAL_QUERY: &str = "Adriatic Sea";

/// How long a runtime on this host may take to tell of itself.
const PROBE_TIME: Duration = Duration::from_secs(2);

/// The bytes that should be free beside the database: some hundred thousand rows, and SQLite's own files.
const FREE_ENOUGH: u64 = 256 * 1024 * 1024;

/// A clock that says less was never set: the beginning of 2026.
const NOT_BEFORE: i64 = 1_767_225_600;

/// How long a row may wait for its seal, in seconds: it is created before its inference.
const SEALING_SLACK: i64 = 300;

/// How far the newest row may be ahead of the clock.
const CLOCK_SLACK: i64 = 5;

#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Ok,
    /// It works, and somebody should know.
    Warn,
    Fail,
}

/// What came of trying one part.
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

    fn warn(part: &'static str, message: impl Into<String>) -> Self {
        Self { part, status: Verdict::Warn, message: message.into() }
    }

    pub fn fail(part: &'static str, message: impl Into<String>) -> Self {
        Self { part, status: Verdict::Fail, message: message.into() }
    }
}

/// All of it, the whole database included.
pub fn all(config: &Config) -> Vec<Finding> {
    let is_there = config.database.file().is_none_or(Path::exists);
    let store = is_there.then(|| Store::open(&config.database, config.workers, IfMissing::Fail));
    let found = match &store {
        Some(Ok(store)) => database(&config.database, store.check()),
        Some(Err(error)) => Finding::fail("database", database_failed(config, error)),
        None => no_database(config.database.file().unwrap_or(Path::new("."))),
    };
    parts(config, store.as_ref().and_then(|store| store.as_ref().ok()), found)
}

pub fn database_failed(config: &Config, error: &dyn Display) -> String {
    format!("the database {}: {error}. The setting is database (ADRIATICUM_DATABASE).", config.database)
}

/// The same of a service that runs, whose database is too much to be read whole each time.
pub fn of_a_running_service(config: &Config, store: &Store) -> Vec<Finding> {
    parts(config, Some(store), database(&config.database, store.try_write()))
}

fn parts(config: &Config, store: Option<&Store>, database: Finding) -> Vec<Finding> {
    let mut findings = vec![configuration(config), hosts(config)];
    findings.extend(config.tls.as_ref().map(certificate));
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
        None => "there is no file: defaults and the environment".into(),
    };
    if config.unknown_variables.is_empty() {
        return Finding::ok("configuration", read);
    }
    let unknown = config.unknown_variables.join(", ");
    Finding::warn("configuration", format!("{read}; no such settings: {unknown}. Correct or unset them"))
}

/// Files with secrets that every user of this host can read.
fn exposed(config: &Config) -> Option<Finding> {
    let of_service = [config.tls.as_ref().map(|files| files.key.as_path()), config.database.file()];
    let files = of_service.into_iter().flatten().chain(config.secret_files.iter().map(PathBuf::as_path));
    let is_readable =
        |path: &&Path| fs::metadata(path).is_ok_and(|file| file.is_file() && file.mode() & 0o004 != 0);
    let is_config = |path: &&Path| config.file.as_deref() == Some(path);
    let (configuration, others): (Vec<&Path>, Vec<&Path>) = files.filter(is_readable).partition(is_config);
    let mut told = Vec::new();
    if !others.is_empty() {
        let names: Vec<String> = others.iter().map(|path| path.display().to_string()).collect();
        let names = names.join(" ");
        told.push(format!("every user of this host can read {names}. Run: chmod o-rwx {names}"));
    }
    if let Some(path) = configuration.first() {
        told.push(format!(
            "every user of this host can read {}, which has a password or a key. Put it into a file of its own \
             (ADRIATICUM_DATABASE_PASSWORD_FILE, ADRIATICUM_RUNTIME_API_KEY_FILE; man adriaticum.toml)",
            path.display()
        ));
    }
    (!told.is_empty()).then(|| Finding::warn("secrets", told.join("; ")))
}

fn certificate(files: &TlsFiles) -> Finding {
    match read_certificate(files) {
        Ok(_) => Finding::ok("tls", "the certificate and its key go together"),
        Err(told) => Finding::fail("tls", told),
    }
}

pub fn read_certificate(files: &TlsFiles) -> Result<Certificate, String> {
    Certificate::read(&files.cert, &files.key).map_err(|error| {
        let (setting, path, cause) = match error {
            TlsError::Certificate(cause) => ("tls.cert", &files.cert, cause),
            TlsError::Key(cause) => ("tls.key", &files.key, cause),
        };
        format!("{setting} names {}, which can't be used: {cause}. It takes a file in PEM.", path.display())
    })
}

/// Which names the API answers to, and whether this host knows them.
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
        return Finding::ok("hosts", format!("the API answers to {names}, on {}", config.listen));
    }
    let told = format!(
        "the API answers to {names}, but {} has no address here. See to the name service, or correct api_hosts",
        unknown.join(", ")
    );
    Finding::warn("hosts", told)
}

fn clock(store: Option<&Store>) -> Finding {
    let now = when::now();
    if now < NOT_BEFORE {
        let told = format!("it says {}. Set it: keys would not expire", when::shown(Some(now)));
        return Finding::fail("clock", told);
    }
    match store.and_then(|store| store.newest_row().ok().flatten()) {
        Some(newest) if newest > now + CLOCK_SLACK => {
            let told = format!(
                "it says {}, and the newest row of the ledger {}. Was it set back?",
                when::shown(Some(now)),
                when::shown(Some(newest))
            );
            Finding::warn("clock", told)
        }
        _ => Finding::ok("clock", format!("it says {}", when::shown(Some(now)))),
    }
}

fn database(database: &Database, checked: Result<(), StoreError>) -> Finding {
    match (checked, database.file()) {
        (Err(error), _) => Finding::fail("database", format!("{database}: {error}")),
        (Ok(()), Some(path)) => with_room(path, format!("{database}: sound, takes a write")),
        (Ok(()), None) => Finding::ok("database", format!("{database}: takes a write")),
    }
}

/// How far the seals are behind. Nothing else waits for them.
fn sealing(store: &Store) -> Finding {
    match store.unsealed() {
        Err(error) => Finding::fail("sealing", error.to_string()),
        Ok(Unsealed { rows: 0, .. }) => Finding::ok("sealing", "every finished row has its seal"),
        Ok(Unsealed { rows, oldest }) => {
            let behind = oldest.map_or(0, |oldest| when::now() - oldest);
            let told = format!("{rows} rows wait for their seal, the oldest for {behind} s");
            if behind <= SEALING_SLACK {
                return Finding::ok("sealing", told);
            }
            let next = "The running service seals them; if it does not, its log says why";
            Finding::warn("sealing", format!("{told}. {next}"))
        }
    }
}

/// It is left to the service to make it: made here, it might belong to the wrong user.
fn no_database(path: &Path) -> Finding {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !folder.is_dir() {
        let told = format!("{}: its folder does not exist. Make it, or change database", path.display());
        return Finding::fail("database", told);
    }
    with_room(folder, format!("{}: not there yet, the first start makes it", path.display()))
}

fn with_room(path: &Path, told: String) -> Finding {
    let Some(free) = bytes_free(path) else {
        return Finding::ok("database", told);
    };
    let told = format!("{told}, {} MiB free", free / 1024 / 1024);
    if free >= FREE_ENOUGH {
        Finding::ok("database", told)
    } else {
        Finding::warn("database", told + ". Make room: on a full disk no completion is run")
    }
}

/// What is left on the disk that a file is on.
pub fn bytes_free(path: &Path) -> Option<u64> {
    rustix::fs::statvfs(path).ok().map(|disk| disk.f_bavail * disk.f_frsize)
}

/// Asks Search a real question; what it finds does not matter.
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
            let told = format!("{place}: answers in {time} ms, {} found for a trial query", found.len());
            Finding::ok("search", told)
        }
        Err(error) => Finding::fail(
            "search",
            format!("{error}. Answers that need Search are 503 until it is back. The setting is search.url"),
        ),
    }
}

fn runtimes(config: &Config) -> Vec<Finding> {
    let mut findings: Vec<Finding> =
        config.runtime.urls.iter().filter_map(|url| try_one(url, config)).collect();
    if findings.is_empty() {
        let told = "none is configured. Set runtime.url (ADRIATICUM_RUNTIME_URL) to the base address of one";
        findings.push(Finding::fail("runtime", told));
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
            let mut told = format!("{url}: answers in {} ms", asked.elapsed().as_millis());
            if let Some(context) = about.context {
                told += &format!(", has a context of {context} tokens");
            }
            match generated.tokens.total_tokens {
                Some(_) => Finding::ok("runtime", told + ", reports usage"),
                None => {
                    Finding::warn("runtime", told + ", reports no usage: the ledger's figures will be null")
                }
            }
        }
        Err((_, error)) => {
            let mut told = format!("{url}: {error}. ");
            if about.models.is_empty() && url.starts_with("https://") {
                told += "Is it running, is this its base address (runtime.url), and is its certificate signed by a CA \
                         of runtime.ca, or without that setting, of the system?";
            } else if about.models.is_empty() {
                told += "Is it running, and is this its base address? The setting is runtime.url";
            } else if !about.models.contains(&config.runtime.model) {
                told += &format!("It knows {}: set runtime.model", about.models.join(", "));
            } else {
                told += "It lists its models, so its own log should tell why it gives no completion";
            }
            Finding::fail("runtime", told)
        }
    })
}

/// Runtimes that listen on this host's usual ports and are not used.
fn found_here(config: &Config) -> Vec<Finding> {
    let mut findings = Vec::new();
    // The key is for the runtimes of the configuration only.
    let nobodys = RuntimeConfig { api_key: None, ..config.runtime.clone() };
    for (name, port) in USUAL {
        let url = format!("http://127.0.0.1:{port}/v1");
        if config.runtime.urls.contains(&url) {
            continue;
        }
        if let Some(about) = probe(&url, &nobodys, PROBE_TIME) {
            let model = match about.models.first() {
                Some(model) => format!(" and runtime.model = \"{model}\""),
                None => String::new(),
            };
            let told = format!(
                "a runtime answers at {url}, where {name} usually listens. To use it: runtime.url = \"{url}\"{model}"
            );
            findings.push(Finding::warn("runtime", told));
        }
    }
    findings
}
