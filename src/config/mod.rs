//! The configuration: every setting checked once, at start.

mod secrets;
mod sources;
pub mod table;
mod values;

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{env, fs, io, path};

use log::LevelFilter;
use regex_lite::Regex;
use rustls::pki_types::CertificateDer;
use serde_json::{Map, Value};

use secrets::Secrets;
pub use secrets::SecretsNeeded;
use sources::{Environment, Settings};
use table::SETTINGS;

use crate::database::DatabaseLocation;
use crate::error::Result;
use crate::listener::{Address, Proxies, TrustedProxy};
use crate::secret::Secret;
use crate::text::words;
use crate::time_zone;

/// The file that is read if none is named.
const DEFAULT_FILE: &str = "/etc/adriaticum/adriaticum.toml";

#[derive(Clone, Debug)]
pub struct Config {
    pub listen: Address,
    pub socket_mode: u32,
    pub api_hosts: Vec<String>,
    pub console_host: Option<String>,
    /// `console_host` is not set: the console is served to clients on this host only.
    pub console_is_local: bool,
    pub database: DatabaseLocation,
    /// The password in a file, if there is one and the command needs it.
    pub database_password: Option<Secret>,
    /// The zone that a new database takes, and that any other one has to have; `None` leaves it to
    /// the database.
    pub time_zone: Option<String>,
    /// The gateway's name in a shared database; empty if the database is a file.
    pub gateway: String,
    pub workers: usize,
    pub queue: usize,
    pub max_connections: usize,
    /// In bytes.
    pub buffer_limit: usize,
    pub compatibility: Compatibility,
    pub log_level: LevelFilter,
    /// The certificate and its key; `None` means plain HTTP.
    pub tls: Option<TlsFiles>,
    /// The proxies that are trusted to name a client's address.
    pub trusted_proxies: Proxies,
    pub runtime: RuntimeConfig,
    pub search: SearchConfig,
    /// The days after which a row of the ledger is removed; `None` keeps everything.
    pub retention_days: Option<u32>,
    /// The file it was read from, if any.
    pub file: Option<PathBuf>,
    /// Files with a secret: this one, if it has a key or a password, and those that were read.
    pub secret_files: Vec<PathBuf>,
    /// Variables with the prefix of settings that are unknown, each with the one that was probably
    /// meant.
    pub unknown_variables: Vec<String>,
    /// The settings as texts, and files by their content.
    texts: BTreeMap<&'static str, Secret>,
}

/// The PEM files of the certificate and its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    pub cert: PathBuf,
    pub key: PathBuf,
}

// The members of a request that are accepted.
words! {
    pub enum Compatibility {
        /// Only the members of the specification.
        Strict = "strict",
        /// Also members that OpenAI's clients add and that do not change the result.
        OpenAi = "openai",
    }
}

#[derive(Clone, Debug)]
pub struct RuntimeConfig {
    pub urls: Vec<String>,
    pub model: String,
    pub api_key: Option<Secret>,
    /// The CAs that are trusted for an `https://` runtime; `None` means those of the system.
    pub ca: Option<Vec<CertificateDer<'static>>>,
    /// For all runtime calls of one request together.
    pub timeout: Duration,
    /// Members that are added to every call.
    pub parameters: Map<String, Value>,
    /// How long after the runtimes stopped answering requests wait for one.
    pub wait: Duration,
}

#[derive(Clone, Debug)]
pub struct SearchConfig {
    pub backend: Option<SearchBackend>,
    /// The file of the index of a folder.
    pub index: PathBuf,
    pub grounding: GroundingMode,
    /// If one of these matches the user's words, the answer needs Search.
    pub patterns: Vec<Regex>,
    /// For the Search call of a request.
    pub timeout: Duration,
    pub results: usize,
}

/// What Search asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SearchBackend {
    /// The base address of an instance, without a slash at its end.
    SearXng(String),
    /// A folder of documents.
    Folder(PathBuf),
}

// The answers that have to be grounded in Search results.
words! {
    pub enum GroundingMode {
        Off = "off",
        Always = "always",
        /// If a pattern matches the user's words.
        Match = "match",
    }
}

impl Config {
    /// Reads the file named on the command line, else that of `ADRIATICUM_CONFIG`, else the usual
    /// one if it exists. The environment overrides it.
    pub fn load(named: Option<&Path>, needed: SecretsNeeded) -> Result<Self> {
        let variable = env::var_os("ADRIATICUM_CONFIG").filter(|path| !path.is_empty());
        let usual = Path::new(DEFAULT_FILE);
        let file = named
            .map(Path::to_owned)
            .or(variable.map(PathBuf::from))
            .or_else(|| may_exist(usual).then(|| usual.to_owned()));
        Self::read(file.as_deref(), env::vars_os().collect(), needed)
    }

    fn read(file: Option<&Path>, environment: Environment, needed: SecretsNeeded) -> Result<Self> {
        let credentials = environment.get(OsStr::new("CREDENTIALS_DIRECTORY"));
        let mut secrets = Secrets {
            needed,
            folder: credentials.map_or_else(|| Some(file?.parent()?.into()), |it| Some(it.into())),
            files: Vec::new(),
        };
        let mut settings = Settings::read(file, environment)?;
        let (database, database_password) = secrets.database(&mut settings);
        let (has_zone, has_console) = (
            settings.is_set("time_zone"),
            settings.is_set("console_host"),
        );
        let api_hosts = settings.list("api_hosts", values::host);
        let console_host = settings.value("console_host", |text| {
            let is_free = |host: &String| !has_console || !api_hosts.contains(host);
            match text {
                "" => Some(None),
                text => values::host(text).filter(is_free).map(Some),
            }
        });
        let config = Self {
            listen: settings.value("listen", values::listen),
            socket_mode: settings.value("socket_mode", values::socket_mode),
            api_hosts,
            console_host,
            console_is_local: !has_console,
            time_zone: settings
                .optional("time_zone", |name| {
                    time_zone::is_name(name).then(|| name.to_owned())
                })
                .filter(|_| has_zone),
            gateway: gateway(&mut settings, &database),
            workers: settings.count("workers"),
            queue: settings.count("queue"),
            max_connections: settings.count("max_connections"),
            buffer_limit: settings
                .number("buffer_limit")
                .unwrap_or_else(values::buffer_limit) as usize,
            compatibility: settings.value("compatibility", Compatibility::parse),
            log_level: settings.value("log_level", |word| word.parse().ok()),
            tls: tls(&mut settings),
            trusted_proxies: Proxies(settings.list("trusted_proxies", TrustedProxy::parse)),
            runtime: runtime(&mut settings, &mut secrets),
            search: search(&mut settings, &database),
            database,
            database_password,
            retention_days: settings
                .number("usage.retention_days")
                .filter(|days| *days > 0)
                .map(|days| days as u32),
            file: file.map(Path::to_owned),
            secret_files: secrets.files,
            unknown_variables: Vec::new(),
            texts: BTreeMap::new(),
        };
        let Settings {
            texts,
            unknown_variables,
            ..
        } = settings.finish()?;
        Ok(Self {
            texts,
            unknown_variables,
            ..config
        })
    }

    /// The bytes of `buffer_limit` that each worker has for the answers of the runtime and of
    /// Search.
    pub fn worker_share(&self) -> usize {
        self.buffer_limit / self.workers
    }

    /// The name of this gateway for people: that of the host if no other gateway can share the
    /// database.
    pub fn gateway_name(&self) -> String {
        if self.gateway.is_empty() {
            values::host_name()
        } else {
            self.gateway.clone()
        }
    }

    /// The database as messages name it: a file with its whole path, a URI without its password.
    pub fn database_name(&self) -> String {
        match &self.database {
            DatabaseLocation::Sqlite(path) => absolute(path),
            DatabaseLocation::Postgres(uri) => uri.to_string(),
        }
    }

    /// A command for this service's database, as a page displays it. A path is sent only to a client
    /// of this host. If the console has a public name, a local client may be a proxy that forwards
    /// requests of anyone.
    pub fn command(&self, arguments: &str, is_local: bool) -> String {
        let command = format!("adriaticum {arguments}");
        let is_usual = env::var_os("ADRIATICUM_DATABASE").is_none()
            && self.file.as_deref() == Some(Path::new(DEFAULT_FILE));
        match (&self.database, &self.file) {
            _ if is_usual || !is_local || !self.console_is_local => command,
            (DatabaseLocation::Sqlite(path), _) => {
                format!("ADRIATICUM_DATABASE='{}' {command}", absolute(path))
            }
            (DatabaseLocation::Postgres(_), Some(file)) => {
                format!("adriaticum --config '{}' {arguments}", absolute(file))
            }
            (DatabaseLocation::Postgres(_), None) => command,
        }
    }

    /// Returns the settings that differ in `new` and that only a restart applies. A reload applies
    /// new values of some, but does not turn them on or off.
    pub fn differences(&self, new: &Self) -> Vec<&'static str> {
        let differing = SETTINGS.iter().filter(|setting| {
            let (old, new) = (self.texts.get(setting.name), new.texts.get(setting.name));
            match setting.is_reloaded {
                true => old.is_some() != new.is_some(),
                false => old != new,
            }
        });
        differing.map(|setting| setting.name).collect()
    }
}

/// Returns false only if there is no such file. One in a folder that may not be entered is there for
/// the service, so that a command without it would use another database.
fn may_exist(path: &Path) -> bool {
    !fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Reads the name of this gateway, by default the host's; empty if no other gateway can share the
/// database.
fn gateway(settings: &mut Settings, database: &DatabaseLocation) -> String {
    let name = settings.optional("gateway", values::gateway);
    if database.file().is_some() {
        return String::new();
    }
    let host = || values::gateway(&values::host_name());
    name.or_else(host).unwrap_or_else(|| "gateway".into())
}

fn tls(settings: &mut Settings) -> Option<TlsFiles> {
    for (one, other) in [("tls.cert", "tls.key"), ("tls.key", "tls.cert")] {
        if settings.is_set(one) && !settings.is_set(other) {
            let raw = settings.take(one)?;
            return settings.accept(Err(raw.refuse_for(&format!("{other} to be set too"))));
        }
    }
    let [cert, key] =
        ["tls.cert", "tls.key"].map(|name| settings.optional(name, |path| Some(path.into())));
    Some(TlsFiles {
        cert: cert?,
        key: key?,
    })
}

fn runtime(settings: &mut Settings, secrets: &mut Secrets) -> RuntimeConfig {
    let mut config = RuntimeConfig {
        urls: settings.list("runtime.url", values::runtime_url),
        model: settings.value("runtime.model", |name| Some(name.to_owned())),
        api_key: secrets.runtime_key(settings),
        ca: settings.read_with("runtime.ca", values::certificates),
        timeout: settings.seconds("runtime.timeout"),
        parameters: settings
            .optional("runtime.parameters", values::parameters)
            .unwrap_or_default(),
        wait: settings.seconds("runtime.wait"),
    };
    let ca = config
        .ca
        .as_ref()
        .map(|certificates| format!("{certificates:?}"));
    settings.note_content("runtime.ca", ca.as_deref());
    // A request is sent to each at most once, and each has one series in the metrics.
    let mut known = HashSet::new();
    config.urls.retain(|url| known.insert(url.clone()));
    config
}

fn search(settings: &mut Settings, database: &DatabaseLocation) -> SearchConfig {
    let (has_backend, has_patterns) = (
        settings.is_set("search.url"),
        settings.is_set("search.match"),
    );
    // A service that could not ask Search would refuse every request.
    let grounding = settings.read_with("search.grounding", |raw| {
        match GroundingMode::parse(raw.text()) {
            None => Err(raw.refuse()),
            Some(mode) if mode != GroundingMode::Off && !has_backend => Err(raw.refuse_for(
                "off, because search.url is not set: set it to the address of a SearXNG instance, or to folder:PATH",
            )),
            Some(GroundingMode::Match) if !has_patterns => {
                Err(raw.refuse_for("regular expressions in search.match for this mode"))
            }
            Some(mode) => Ok(mode),
        }
    });
    SearchConfig {
        backend: settings.optional("search.url", values::search_backend),
        // Each gateway has an index of its own.
        index: index_beside(database.file().unwrap_or(Path::new("adriaticum.db"))),
        grounding: grounding.unwrap_or(GroundingMode::Off),
        patterns: settings
            .read_with("search.match", values::patterns)
            .unwrap_or_default(),
        timeout: settings.seconds("search.timeout"),
        results: settings.count("search.results"),
    }
}

/// Returns the path of the index: beside the database, with `-search` after its name.
fn index_beside(database: &Path) -> PathBuf {
    let mut name = database.file_stem().unwrap_or_default().to_owned();
    name.push("-search");
    if let Some(ending) = database.extension() {
        name.push(".");
        name.push(ending);
    }
    database.with_file_name(name)
}

/// The whole path of a file, for messages.
fn absolute(path: &Path) -> String {
    path::absolute(path)
        .unwrap_or_else(|_| path.to_owned())
        .display()
        .to_string()
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::PermissionsExt;
    use std::thread;
    use std::time::Duration;

    use rustix::process::{Uid, geteuid};
    use rustix::thread::set_thread_res_uid;

    use super::*;
    use crate::error::ProblemKind;
    use crate::secret::Secret;

    fn environment(variables: &[(&str, &str)]) -> Result<Config> {
        let owned = variables
            .iter()
            .map(|(name, value)| (name.into(), value.into()));
        Config::read(None, owned.collect(), SecretsNeeded::All)
    }

    /// Errors are returned without the file's name.
    fn file(text: &str) -> Result<Config, String> {
        let path = env::temp_dir().join(format!(
            "adriaticum-{}.toml",
            crate::secret::secret_hex::<8>()
        ));
        fs::write(&path, text).expect("the folder for temporary files should take one");
        let config = Config::read(Some(&path), Environment::new(), SecretsNeeded::All);
        fs::remove_file(&path).expect("the file should still be there");
        config.map_err(|error| {
            error
                .to_string()
                .replace(&format!("{}:", path.display()), "")
        })
    }

    #[test]
    fn defaults() {
        let config = environment(&[]).expect("all defaults should be good");
        assert_eq!(config.listen, Address::Localhost(8080));
        assert_eq!(config.socket_mode, 0o660);
        assert_eq!(config.api_hosts, ["localhost", "127.0.0.1", "::1"]);
        assert_eq!(config.console_host.as_deref(), Some("console.localhost"));
        assert_eq!(
            (config.workers, config.queue, config.max_connections),
            (16, 64, 4096)
        );
        assert_eq!(config.runtime.timeout, Duration::from_secs(120));
        assert!(config.runtime.urls.is_empty() && config.runtime.api_key.is_none());
    }

    #[test]
    fn both_ways_of_writing() {
        let written = file(
            "listen = 'unix:/run/a.sock'\nsocket_mode = '0600'\napi_hosts = ['API.test', '[::1]']\nconsole_host = ''\nworkers = 3\n\
             compatibility = 'openai'\ntrusted_proxies = ['unix', '10.0.0.0/8']\n\
             tls = { cert = 'a', key = 'b' }\n[runtime]\nurl = ['http://a/v1/', 'http://b:1/v1']\ntimeout = 9\n",
        )
        .expect("the file should be good");
        let set = environment(&[
            ("ADRIATICUM_LISTEN", "unix:/run/a.sock"),
            ("ADRIATICUM_SOCKET_MODE", "0600"),
            ("ADRIATICUM_API_HOSTS", "API.test, [::1]"),
            ("ADRIATICUM_CONSOLE_HOST", ""),
            ("ADRIATICUM_WORKERS", "3"),
            ("ADRIATICUM_COMPATIBILITY", "openai"),
            ("ADRIATICUM_TRUSTED_PROXIES", "unix, 10.0.0.0/8"),
            ("ADRIATICUM_TLS_CERT", "a"),
            ("ADRIATICUM_TLS_KEY", "b"),
            (
                "ADRIATICUM_RUNTIME_URL",
                "http://a/v1/,http://b:1/v1,http://a/v1",
            ),
            ("ADRIATICUM_RUNTIME_TIMEOUT", "9"),
        ])
        .expect("the environment should be good");
        let debug = |config| {
            format!(
                "{:?}",
                Config {
                    file: None,
                    ..config
                }
            )
        };
        assert_eq!(debug(written), debug(set.clone()));
        assert_eq!(set.runtime.urls, ["http://a/v1", "http://b:1/v1"]);
        assert_eq!(set.api_hosts, ["api.test", "::1"]);
        assert_eq!(set.console_host, None);
        assert_eq!(set.socket_mode, 0o600);
    }

    #[test]
    fn the_database_is_a_file_or_a_uri_and_its_password_may_be_in_a_file() {
        let path = env::temp_dir().join(format!("adriaticum-{}", crate::secret::secret_hex::<8>()));
        fs::write(&path, "sesame \n").expect("the folder for temporary files should take one");
        let database = |uri: &str| {
            let file = path.display().to_string();
            environment(&[
                ("ADRIATICUM_DATABASE", uri),
                ("ADRIATICUM_DATABASE_PASSWORD_FILE", &file),
            ])
        };
        let config = database("postgresql://user@db.test/").expect("a good URI");
        let DatabaseLocation::Postgres(uri) = &config.database else {
            panic!("it is a URI");
        };
        assert_eq!(
            uri.password.as_ref().map(Secret::expose),
            Some("sesame "),
            "without the line's end"
        );
        assert!(
            !format!("{config:?}").contains("sesame")
                && !config.database.to_string().contains("sesame")
        );
        let config = database("some.db").expect("the packaged service always names a file");
        assert_eq!(config.database, DatabaseLocation::Sqlite("some.db".into()));
        fs::remove_file(&path).expect("the file should still be there");
    }

    /// Each case is a configuration, with variables after the lines of the file, and its whole
    /// message after `> `.
    #[test]
    fn wrong_configurations_and_their_messages() {
        let folder =
            env::temp_dir().join(format!("adriaticum-{}", crate::secret::secret_hex::<8>()));
        fs::create_dir(&folder).expect("the folder for temporary files should take one");
        let path = folder.join("FILE");
        let mut wrong = Vec::new();
        let cases: Vec<&str> = include_str!("wrong_configurations.txt")
            .trim_end()
            .split("\n\n")
            .collect();
        for case in &cases {
            let (expected, given): (Vec<&str>, Vec<&str>) =
                case.lines().partition(|line| line.starts_with("> "));
            let (set, file): (Vec<&str>, Vec<&str>) = given
                .iter()
                .partition(|line| line.starts_with("ADRIATICUM_"));
            fs::write(&path, file.join("\n")).expect("a file");
            let set = set.iter().filter_map(|line| line.split_once('='));
            let set = set.map(|(name, value)| (name.into(), value.replace("\\n", "\n").into()));
            let message = Config::read(Some(&path), set.collect(), SecretsNeeded::All)
                .map_or_else(|error| error.to_string(), |_| "accepted".into());
            let message = message.replace(&path.display().to_string(), "FILE");
            let message: Vec<String> = message.lines().map(|line| format!("> {line}")).collect();
            if message != expected {
                wrong.push(format!("{}\n{}\n", given.join("\n"), message.join("\n")));
            }
            assert!(!message.concat().contains("sesame"), "{message:?}");
        }
        fs::remove_dir_all(&folder).expect("it should go");
        let long = format!("http://a/{}/v1", "v".repeat(2_000));
        assert!(environment(&[("ADRIATICUM_RUNTIME_URL", &long)]).is_err());
        assert!(
            wrong.is_empty() && cases.len() >= 35,
            "other messages:\n{}",
            wrong.join("\n")
        );
    }

    #[test]
    fn settings_of_search() {
        let config = environment(&[
            ("ADRIATICUM_DATABASE", "/var/lib/a/ledger.v2.db"),
            ("ADRIATICUM_SEARCH_URL", "http://127.0.0.1:8888/"),
            ("ADRIATICUM_SEARCH_GROUNDING", "match"),
            ("ADRIATICUM_SEARCH_MATCH", "(?i)price\n\nhow (much|many)"),
        ]);
        let search = config.expect("they are good").search;
        assert_eq!(
            search.backend,
            Some(SearchBackend::SearXng("http://127.0.0.1:8888".into()))
        );
        assert_eq!(search.index, Path::new("/var/lib/a/ledger.v2-search.db"));
        assert_eq!(
            (
                search.patterns.len(),
                search.timeout.as_secs(),
                search.results
            ),
            (2, 5, 4)
        );
        let written = file(
            "[search]\nurl = 'folder:/a b'\ngrounding = 'always'\nmatch = ['a', 'b']\nresults = 1",
        );
        let search = written.expect("they are good").search;
        assert_eq!(
            (search.backend, search.grounding),
            (
                Some(SearchBackend::Folder("/a b".into())),
                GroundingMode::Always
            )
        );
        let off = environment(&[("ADRIATICUM_SEARCH_URL", "folder:x")])
            .expect("off needs nothing")
            .search;
        assert_eq!(off.grounding, GroundingMode::Off);
    }

    /// It was dropped: a database of such a name became adriaticum.db.
    #[test]
    fn a_variable_that_is_not_text_is_a_problem() {
        let path = OsStr::from_bytes(b"/var/lib/a\xff.db").to_owned();
        let read = |name: &str| {
            Config::read(
                None,
                [(name.into(), path.clone())].into(),
                SecretsNeeded::All,
            )
        };
        let refused = read("ADRIATICUM_WORKERS").map(drop);
        assert_eq!(
            refused.map_err(|problem| problem.to_string()),
            Err("ADRIATICUM_WORKERS=\"/var/lib/a\u{fffd}.db\": expected UTF-8.".into())
        );
        let refused = read("ADRIATICUM_DATABASE").map(drop);
        assert_eq!(
            refused.map_err(|problem| (problem.to_string(), problem.kind)),
            Err((
                "ADRIATICUM_DATABASE: expected UTF-8.".into(),
                ProblemKind::Setting
            ))
        );
        for other in ["ADRIATICUM_CONFIG", "ADRIATICUM_WORKER", "OTHER"] {
            assert!(read(other).is_ok(), "{other} is no setting");
        }
    }

    /// `keys create` made a new database in the current folder.
    #[test]
    fn a_configuration_that_can_not_be_reached_is_not_missing() {
        let folder =
            env::temp_dir().join(format!("adriaticum-{}", crate::secret::secret_hex::<8>()));
        fs::create_dir(&folder).expect("the folder for temporary files should take one");
        let path = folder.join("adriaticum.toml");
        assert!(!may_exist(&path) && !may_exist(&path.join("x")));
        fs::write(&path, "").expect("a file");
        assert!(may_exist(&path) && may_exist(&path.join("x")));
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o000)).expect("it is ours");
        // Root may enter every folder, so another user looks there: this thread alone.
        let read = || {
            if geteuid().is_root() {
                let nobody = Uid::from_raw(65_534);
                set_thread_res_uid(nobody, nobody, nobody).expect("root may");
            }
            let message = Config::read(Some(&path), Environment::new(), SecretsNeeded::All)
                .map_err(|it| it.to_string());
            (may_exist(&path), message.map(drop))
        };
        let (exists, message) = thread::scope(|scope| scope.spawn(read).join()).expect("no panic");
        let expected = format!(
            "{}: it can't be read: Permission denied (os error 13).",
            path.display()
        );
        assert_eq!((exists, message), (true, Err(expected)));
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).expect("it is ours");
        fs::remove_dir_all(&folder).expect("it should go");
    }

    #[test]
    fn an_unknown_variable_is_named() {
        let config = environment(&[
            ("ADRIATICUM_WORKER", "3"),
            ("ADRIATICUM_CONFIG", "x"),
            ("OTHER", "y"),
        ]);
        let unknown = config.expect("a warning is no error").unknown_variables;
        assert_eq!(
            unknown,
            ["ADRIATICUM_WORKER (did you mean ADRIATICUM_WORKERS?)"]
        );
    }

    #[test]
    fn settings_that_need_a_restart_are_named() {
        let with = |set: &[(&str, &str)]| environment(set).expect("good settings");
        let default = with(&[
            ("ADRIATICUM_WORKERS", "16"),
            ("ADRIATICUM_RUNTIME_MODEL", "adriaticum"),
        ]);
        assert!(
            with(&[]).differences(&default).is_empty(),
            "a default that is written down is no change"
        );
        let tls = |cert| with(&[("ADRIATICUM_TLS_CERT", cert), ("ADRIATICUM_TLS_KEY", "k")]);
        assert!(
            tls("a").differences(&tls("b")).is_empty(),
            "a reload reads the new file"
        );
        let key = |key| with(&[("ADRIATICUM_RUNTIME_API_KEY", key)]);
        assert_eq!(key("a").differences(&key("b")), ["runtime.api_key"]);
        let changed = file(
            "database = 'postgresql://u@db.test/'\ndatabase_password_file = '/proc/self/comm'\ntime_zone = 'Europe/Zagreb'\ngateway = 'g'\nlisten = 'unix:a'\n\
             socket_mode = '0600'\napi_hosts = 'a.test'\nconsole_host = ''\ntrusted_proxies = 'unix'\nworkers = 1\nqueue = 1\n\
             max_connections = 1\nbuffer_limit = 1048576\ncompatibility = 'openai'\nlog_level = 'debug'\ntls.cert = 'c'\n\
             tls.key = 'k'\n[runtime]\nurl = 'http://a/v1'\nmodel = 'm'\napi_key = 'k'\ntimeout = 1\nwait = 1\n[runtime.parameters]\na = 1\n[search]\nurl = 'folder:x'\n\
             grounding = 'match'\nmatch = 'a'\ntimeout = 1\nresults = 1\n[usage]\nretention_days = 1",
        );
        // The content of these files counts: there is none of a CA here, and the key is in the setting.
        let not_named = ["log_level", "runtime.ca", "runtime.api_key_file"];
        let changed = changed.expect("good settings");
        let names = table::SETTINGS
            .iter()
            .map(|setting| setting.name)
            .filter(|name| !not_named.contains(name));
        assert_eq!(with(&[]).differences(&changed), names.collect::<Vec<_>>());
    }

    /// The content of a file may change in the same place.
    #[test]
    fn a_secret_that_changes_in_its_file_needs_a_restart() {
        let path = env::temp_dir().join(format!("adriaticum-{}", crate::secret::secret_hex::<8>()));
        let file = path.display().to_string();
        let read = |database: &str, secret: &str| {
            fs::write(&path, secret).expect("the folder for temporary files should take one");
            let set = [
                ("ADRIATICUM_DATABASE", database),
                ("ADRIATICUM_DATABASE_PASSWORD_FILE", &file),
                ("ADRIATICUM_RUNTIME_API_KEY_FILE", &file),
            ];
            environment(&set).expect("good settings")
        };
        let uri = "postgresql://user@db.test/";
        let before = read(uri, "a");
        assert!(before.differences(&read(uri, "a\n")).is_empty());
        let changed = ["database_password_file", "runtime.api_key_file"];
        assert_eq!(before.differences(&read(uri, "b")), changed);
        fs::remove_file(&path).expect("the file should still be there");
    }

    #[test]
    fn a_value_means_the_same_in_the_file_and_in_a_variable() {
        let written = file(
            "workers = '8'\nqueue = 0x10\napi_hosts = 'a.test, b.test'\nsearch.match = \"a\\nb\"\ntrusted_proxies = ['', ' unix ']",
        );
        let written = written.expect("good settings");
        let set = environment(&[
            ("ADRIATICUM_WORKERS", "8"),
            ("ADRIATICUM_QUEUE", "16"),
            ("ADRIATICUM_API_HOSTS", "a.test,b.test"),
            ("ADRIATICUM_SEARCH_MATCH", "a\nb"),
            ("ADRIATICUM_TRUSTED_PROXIES", ",unix"),
        ]);
        assert!(written.differences(&set.expect("good settings")).is_empty());
        assert_eq!((written.workers, written.queue), (8, 16));
        assert_eq!(written.api_hosts, ["a.test", "b.test"]);
        assert_eq!(written.search.patterns.len(), 2);
        assert_eq!(written.trusted_proxies.0, [TrustedProxy::Unix]);
    }

    #[test]
    fn a_secret_is_redacted() {
        let config =
            environment(&[("ADRIATICUM_RUNTIME_API_KEY", " sesame\n")]).expect("a good key");
        assert_eq!(
            config.runtime.api_key.as_ref().map(Secret::expose),
            Some("sesame")
        );
        assert!(!format!("{config:?}").contains("sesame"));
    }
}
