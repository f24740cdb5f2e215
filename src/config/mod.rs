//! The configuration: every setting checked once, at start.

mod database;
mod memory;
mod raw_setting;
mod runtime;
mod search;
mod settings;

use std::path::{Path, PathBuf};
use std::{env, mem, path, str};

use log::LevelFilter;

pub use database::password_in;
use raw_setting::{Problem, RawSetting};
pub use runtime::RuntimeConfig;
pub use search::{GroundingMode, SearchBackend, SearchConfig};
pub use settings::{ConfigError, Digests};
use settings::{Environment, Settings};

use crate::listener::{Address, Proxies};
use crate::store::Database;

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
    pub database: Database,
    /// The file with its password, if there is one.
    pub database_password_file: Option<PathBuf>,
    /// Its name in a shared database; empty if the database is a file.
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
    /// Files with a secret: this one, if it has a key or a password, and those that settings name.
    pub secret_files: Vec<PathBuf>,
    /// Files of the service with a secret that this user can't read, by their settings, and the reason.
    pub unread_files: Vec<(&'static str, String)>,
    /// Variables with the prefix of settings that are unknown, each with the one that was probably meant.
    pub unknown_variables: Vec<String>,
    /// A reload compares these to find the changed settings.
    pub digests: Digests,
}

/// The PEM files of the certificate and its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    pub cert: PathBuf,
    pub key: PathBuf,
}

/// The members of a request that are accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compatibility {
    /// Only the members of the specification.
    Strict,
    /// Also members that OpenAI's clients add and that do not change the result.
    OpenAi,
}

impl Config {
    /// Reads the file named on the command line, else that of `ADRIATICUM_CONFIG`, else the usual one if
    /// it exists. The environment overrides it.
    pub fn load(named: Option<&Path>) -> Result<Self, ConfigError> {
        let variable = env::var_os("ADRIATICUM_CONFIG").filter(|path| !path.is_empty());
        let usual = Path::new(DEFAULT_FILE);
        let file = named
            .map(Path::to_owned)
            .or(variable.map(PathBuf::from))
            .or_else(|| usual.exists().then(|| usual.to_owned()));
        let environment = env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        Self::read(file.as_deref(), environment.collect())
    }

    fn read(file: Option<&Path>, environment: Environment) -> Result<Self, ConfigError> {
        let mut settings = Settings::read(file, environment)?;
        let local = ["localhost", "127.0.0.1", "::1"].map(String::from).into();
        let api_hosts = settings.value("api_hosts", local, api_hosts);
        let default = (Some("console.localhost".into()), true);
        let (console_host, console_is_local) = settings
            .value("console_host", default, |written| Ok((console_host(written, &api_hosts)?, false)));
        let (database, database_password_file) = database::read(&mut settings);
        let gateway = database::read_gateway(&mut settings, &database);
        let mut config = Self {
            listen: settings.value("listen", Address::Tcp(([127, 0, 0, 1], 8080).into()), listen),
            socket_mode: settings.value("socket_mode", 0o660, socket_mode),
            console_host,
            console_is_local,
            api_hosts,
            workers: settings.number("workers", 1..=1024, 16) as usize,
            queue: settings.number("queue", 0..=65_536, 64) as usize,
            max_connections: settings.number("max_connections", 1..=1_000_000, 4096) as usize,
            // At least a megabyte, so that a request of the largest size fits.
            buffer_limit: settings.number("buffer_limit", 1 << 20..=1 << 40, memory::default_buffer_limit())
                as usize,
            compatibility: settings.word("compatibility", &COMPATIBILITIES, Compatibility::Strict),
            log_level: settings.word("log_level", &LEVELS, LevelFilter::Info),
            tls: tls(&mut settings),
            trusted_proxies: settings.value("trusted_proxies", Proxies::default(), trusted_proxies),
            runtime: runtime::read(&mut settings),
            search: search::read(&mut settings, &database),
            database,
            database_password_file,
            gateway,
            retention_days: match settings.number("usage.retention_days", 0..=36_500, 0) {
                0 => None,
                days => Some(days as u32),
            },
            file: file.map(Path::to_owned),
            secret_files: mem::take(&mut settings.secret_files),
            unread_files: mem::take(&mut settings.unread_files),
            unknown_variables: Vec::new(),
            digests: Digests::default(),
        };
        (config.unknown_variables, config.digests) = settings.finish()?;
        Ok(config)
    }

    /// The bytes of `buffer_limit` that each worker has for the answers of the runtime and of Search.
    pub fn worker_share(&self) -> usize {
        self.buffer_limit / self.workers
    }

    /// The name of this gateway for people: that of the host if no other gateway can share the database.
    pub fn gateway_name(&self) -> String {
        if self.gateway.is_empty() { database::host_name() } else { self.gateway.clone() }
    }

    /// The database as messages name it: a file with its whole path, a URI without its password.
    pub fn database_name(&self) -> String {
        match &self.database {
            Database::Sqlite(path) => absolute(path),
            Database::Postgres(uri) => uri.to_string(),
        }
    }

    /// The command that sets the console's password in this service's database. A path is sent only to a client of this
    /// host. If the console has a public name, a local client may be a proxy that forwards requests of strangers.
    pub fn password_command(&self, is_local: bool) -> String {
        let command = "adriaticum console password";
        let is_usual = env::var_os("ADRIATICUM_DATABASE").is_none()
            && self.file.as_deref().is_some_and(|file| file == Path::new(DEFAULT_FILE));
        match (&self.database, &self.file) {
            _ if is_usual || !is_local || !self.console_is_local => command.into(),
            (Database::Sqlite(path), _) => format!("ADRIATICUM_DATABASE='{}' {command}", absolute(path)),
            (Database::Postgres(_), Some(file)) => {
                format!("adriaticum --config '{}' console password", absolute(file))
            }
            (Database::Postgres(_), None) => command.into(),
        }
    }

    /// Returns the settings that differ in `other` and that only a restart applies.
    pub fn differences(&self, other: &Self) -> Vec<&'static str> {
        let differs = |name: &&str| self.digests.get(name) != other.digests.get(name);
        self.digests.keys().copied().filter(|name| !RELOADED.contains(name)).filter(differs).collect()
    }
}

/// The settings that a reload applies: also new TLS files and new content in them, but not turning TLS on or off.
const RELOADED: [&str; 2] = ["log_level", "tls.key"];

const COMPATIBILITIES: [(&str, Compatibility); 2] =
    [("strict", Compatibility::Strict), ("openai", Compatibility::OpenAi)];

const LEVELS: [(&str, LevelFilter); 5] = [
    ("error", LevelFilter::Error),
    ("warn", LevelFilter::Warn),
    ("info", LevelFilter::Info),
    ("debug", LevelFilter::Debug),
    ("trace", LevelFilter::Trace),
];

fn listen(written: &RawSetting) -> Result<Address, Problem> {
    let accepted = "an address and a port, such as 127.0.0.1:8080 or [::1]:8080, or unix: and a path";
    written.parse(accepted, |text| match text.strip_prefix("unix:") {
        Some(path) => (!path.is_empty()).then(|| Address::Unix(path.into())),
        None => text.parse().ok().map(Address::Tcp),
    })
}

fn socket_mode(written: &RawSetting) -> Result<u32, Problem> {
    written.parse("permissions in octal from 0000 to 0777, such as 0660", |text| {
        let digits = text.bytes().all(|b| b.is_ascii_digit()).then_some(text)?;
        u32::from_str_radix(digits, 8).ok().filter(|&mode| mode <= 0o777)
    })
}

fn api_hosts(written: &RawSetting) -> Result<Vec<String>, Problem> {
    let accepted = "one or more host names or addresses, without ports";
    let hosts = written.parse_each(accepted, host)?;
    if hosts.is_empty() { Err(written.refuse(accepted)) } else { Ok(hosts) }
}

fn console_host(written: &RawSetting, api_hosts: &[String]) -> Result<Option<String>, Problem> {
    let accepted = "a host name without a port that is not one of api_hosts, or empty to disable the console";
    written.parse(accepted, |text| match text {
        "" => Some(None),
        text => host(text).filter(|host| !api_hosts.contains(host)).map(Some),
    })
}

fn trusted_proxies(written: &RawSetting) -> Result<Proxies, Problem> {
    let accepted = "addresses such as 10.0.0.7 or fd00::7, networks such as 10.0.0.0/8, or unix";
    written.parse_each(accepted, |text| text.parse().ok()).map(Proxies)
}

/// Normalizes a host name or address as it is in requests: lower case, an IPv6 address without brackets.
fn host(text: &str) -> Option<String> {
    let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    let is_name = !bare.is_empty() && bare.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b));
    (is_name || bare.parse::<std::net::Ipv6Addr>().is_ok()).then(|| bare.to_ascii_lowercase())
}

fn tls(settings: &mut Settings) -> Option<TlsFiles> {
    let is_set = |written: &RawSetting| !written.text().is_ok_and(str::is_empty);
    let cert = settings.take("tls.cert").filter(is_set);
    let key = settings.take("tls.key").filter(is_set);
    settings.note("tls.cert", &cert.is_some());
    settings.note("tls.key", &key.is_some());
    let path = |written: &RawSetting| written.text().map(PathBuf::from);
    let files = match (cert, key) {
        (None, None) => return None,
        (Some(cert), Some(key)) => path(&cert).and_then(|cert| Ok(TlsFiles { cert, key: path(&key)? })),
        (Some(cert), None) => Err(cert.refuse("tls.key to be set too")),
        (None, Some(key)) => Err(key.refuse("tls.cert to be set too")),
    };
    settings.accept(files)
}

fn absolute(path: &Path) -> String {
    path::absolute(path).unwrap_or_else(|_| path.to_owned()).display().to_string()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::*;
    use crate::secret::Secret;

    fn environment(variables: &[(&str, &str)]) -> Result<Config, ConfigError> {
        let owned = variables.iter().map(|(name, value)| (name.to_string(), value.to_string()));
        Config::read(None, owned.collect())
    }

    /// Errors are returned without the file's name.
    fn file(text: &str) -> Result<Config, String> {
        let path = env::temp_dir().join(format!("adriaticum-{}.toml", crate::secret::secret_hex::<8>()));
        fs::write(&path, text).expect("the folder for temporary files should take one");
        let config = Config::read(Some(&path), Environment::new());
        fs::remove_file(&path).expect("the file should still be there");
        config.map_err(|error| error.to_string().replace(&format!("{}:", path.display()), ""))
    }

    #[test]
    fn defaults() {
        let config = environment(&[]).expect("all defaults should be good");
        assert_eq!(config.listen.to_string(), "http://127.0.0.1:8080");
        assert_eq!(config.socket_mode, 0o660);
        assert_eq!(config.api_hosts, ["localhost", "127.0.0.1", "::1"]);
        assert_eq!(config.console_host.as_deref(), Some("console.localhost"));
        assert_eq!((config.workers, config.queue, config.max_connections), (16, 64, 4096));
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
            ("ADRIATICUM_RUNTIME_URL", "http://a/v1/,http://b:1/v1,http://a/v1"),
            ("ADRIATICUM_RUNTIME_TIMEOUT", "9"),
        ])
        .expect("the environment should be good");
        let debug = |config| format!("{:?}", Config { file: None, digests: Digests::default(), ..config });
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
            environment(&[("ADRIATICUM_DATABASE", uri), ("ADRIATICUM_DATABASE_PASSWORD_FILE", &file)])
        };
        let config = database("postgresql://user@db.test/").expect("a good URI");
        let Database::Postgres(uri) = &config.database else {
            panic!("it is a URI");
        };
        assert_eq!(uri.password.as_ref().map(Secret::expose), Some("sesame "), "without the line's end");
        assert!(!format!("{config:?}").contains("sesame") && !config.database.to_string().contains("sesame"));
        let twice = database("postgresql://user:x@db.test/").expect_err("two passwords").to_string();
        assert!(
            twice.starts_with("ADRIATICUM_DATABASE_PASSWORD_FILE") && twice.contains("no file"),
            "{twice}"
        );
        let config = database("some.db").expect("the packaged service always names a file");
        assert_eq!(config.database, Database::Sqlite("some.db".into()));
        fs::remove_file(&path).expect("the file should still be there");
    }

    /// The unit's files were found only with a variable, so a command without it had neither password nor key.
    #[test]
    fn secrets_are_beside_the_configuration_or_among_the_units_credentials() {
        let folder = |name: &str| {
            let path = env::temp_dir().join(format!("adriaticum-{}", crate::secret::secret_hex::<8>()));
            fs::create_dir(&path).expect("the folder for temporary files should take one");
            fs::write(path.join("runtime-key"), format!("key-{name}\n")).expect("a file");
            fs::write(path.join("database-password"), format!("word-{name}\n")).expect("a file");
            path
        };
        let (beside, credentials) = (folder("beside"), folder("unit"));
        let file = beside.join("adriaticum.toml");
        let read = |text: &str, set: &[(&str, &str)]| {
            fs::write(&file, text).expect("a file");
            let set = set.iter().map(|(name, value)| (name.to_string(), value.to_string()));
            let config = Config::read(Some(&file), set.collect()).unwrap_or_else(|error| panic!("{error}"));
            let password = match &config.database {
                Database::Postgres(uri) => uri.password.as_ref().map(Secret::expose).unwrap_or_default(),
                Database::Sqlite(_) => "",
            };
            let key = config.runtime.api_key.as_ref().map(Secret::expose).unwrap_or_default();
            format!("{password} {key}")
        };
        let (unit, other) =
            (credentials.display().to_string(), credentials.join("runtime-key").display().to_string());
        let database = "database = 'postgresql://user@db.test/'\n";
        assert_eq!(read(database, &[]), "word-beside key-beside");
        assert_eq!(read(database, &[("CREDENTIALS_DIRECTORY", &unit)]), "word-unit key-unit");
        assert_eq!(read("", &[]), " key-beside", "SQLite has no password");
        let named = format!("{database}database_password_file = '{other}'\nruntime.api_key_file = '{other}'");
        assert_eq!(read(&named, &[]), "key-unit key-unit");
        assert_eq!(read(&named, &[("ADRIATICUM_RUNTIME_API_KEY_FILE", "")]), "key-unit key-beside");
        let set = [
            ("ADRIATICUM_DATABASE", "postgresql://user:mine@db.test/"),
            ("ADRIATICUM_RUNTIME_API_KEY", "mine"),
        ];
        assert_eq!(read(database, &set), "mine mine", "a default comes last");
        let refused = Config::read(None, [("ADRIATICUM_CONFIG".into(), "x".into())].into());
        assert!(refused.is_ok_and(|config| config.runtime.api_key.is_none()), "no file, no folder");
        for folder in [beside, credentials] {
            fs::remove_dir_all(folder).expect("it should go");
        }
    }

    #[test]
    fn wrong_settings_are_named() {
        for (name, value) in [
            ("LISTEN", "8080"),
            ("LISTEN", "unix:"),
            ("SOCKET_MODE", ""),
            ("SOCKET_MODE", "rw-rw----"),
            ("SOCKET_MODE", "0o660"),
            ("SOCKET_MODE", "+660"),
            ("SOCKET_MODE", "0680"),
            ("SOCKET_MODE", "1777"),
            ("API_HOSTS", ""),
            ("API_HOSTS", "a.test:80"),
            ("API_HOSTS", "a b"),
            ("CONSOLE_HOST", "c:1"),
            ("CONSOLE_HOST", "localhost"),
            ("DATABASE", "postgresql://user:sesame@db.test:x/"),
            ("DATABASE", " postgresql://user:sesame@db.test/"),
            ("DATABASE", "mysql://user:sesame@db.test/"),
            ("DATABASE", "host=db.test password=sesame"),
            ("DATABASE_PASSWORD_FILE", "/nowhere/at/all"),
            ("WORKERS", "0"),
            ("WORKERS", "1.5"),
            ("QUEUE", "-1"),
            ("COMPATIBILITY", "loose"),
            ("LOG_LEVEL", "loud"),
            ("TLS_CERT", "/etc/ssl/cert.pem"),
            ("TLS_KEY", "/etc/ssl/key.pem"),
            ("TRUSTED_PROXIES", "localhost"),
            ("TRUSTED_PROXIES", "10.0.0.0/8, 10.0.0.0/33"),
            ("RUNTIME_URL", "ftp://a/v1"),
            ("RUNTIME_URL", "http:///v1"),
            ("RUNTIME_URL", "http://a:99999/v1"),
            ("RUNTIME_URL", "http://user@a/v1"),
            ("RUNTIME_URL", "http://a b/v1"),
            ("RUNTIME_URL", "http://a/v1?x=y"),
            ("RUNTIME_URL", "a/v1?key=sesame"),
            ("RUNTIME_URL", "http://good/v1, http://user:sesame@a/v1"),
            ("RUNTIME_URL", "https:///v1"),
            ("RUNTIME_URL", "http://a"),
            ("RUNTIME_URL", "http://a/"),
            ("RUNTIME_URL", "http://a/v1/chat/completions"),
            ("RUNTIME_URL", "http://a/v1,http://b"),
            ("RUNTIME_CA", "/nowhere/at/all"),
            ("RUNTIME_TIMEOUT", "0"),
            ("RUNTIME_API_KEY", "two words"),
            ("RUNTIME_API_KEY_FILE", "/nowhere/at/all"),
            ("SEARCH_GROUNDING", "sometimes"),
            ("SEARCH_GROUNDING", "always"),
            ("SEARCH_URL", "index"),
            ("SEARCH_URL", "ftp://a"),
            ("SEARCH_URL", "http://a/?q=x"),
            ("SEARCH_MATCH", "good\n(bad"),
            ("SEARCH_TIMEOUT", "0"),
            ("SEARCH_RESULTS", "21"),
            ("USAGE_RETENTION_DAYS", "-9"),
        ] {
            let variable = format!("ADRIATICUM_{name}");
            let error = environment(&[(&variable, value)]).expect_err(name).to_string();
            let is_secret = value.contains(['@', '?']) || ["DATABASE", "RUNTIME_API_KEY"].contains(&name);
            let found = if is_secret { variable } else { format!("{variable}={value:?}") };
            assert!(error.starts_with(&format!("{found}: expected ")) && error.ends_with('.'), "{error}");
            assert!(!error.contains("sesame"), "{error}");
        }
        let long = format!("http://a/{}", "v".repeat(2_000));
        assert!(environment(&[("ADRIATICUM_RUNTIME_URL", &long)]).is_err());
        for (text, message) in [
            (
                "nonsense = 1",
                "1: nonsense: there is no such setting. man adriaticum.toml lists all settings.",
            ),
            ("\nworker = 1", "2: worker: there is no such setting. Did you mean workers?"),
            ("api_key = 'sesame'", "1: api_key: there is no such setting. Did you mean runtime.api_key?"),
            ("[runtime]\nworkers = 1", "2: runtime.workers: there is no such setting. Did you mean workers?"),
            ("[searchx]\nurl = 1", "1: searchx: there is no such setting. Did you mean search?"),
            (
                "[nonsense]\na = 1",
                "1: nonsense: there is no such setting. man adriaticum.toml lists all settings.",
            ),
            (
                "[runtime]\n\nmodelx = 1",
                "3: runtime.modelx: there is no such setting. Did you mean runtime.model?",
            ),
            ("runtime = 1", "1: runtime: expected a table: [runtime]."),
            ("runtime = [{api_key = 'sesame'}]", "1: runtime: expected a table: [runtime]."),
            ("workers = '3'", "1: workers = '3': expected a whole number from 1 to 1024."),
            ("workers = -3", "1: workers = -3: expected a whole number from 1 to 1024."),
            (
                "workers = 99999999999999999999",
                "1: workers = 99999999999999999999: expected a whole number from 1 to 1024.",
            ),
            ("listen = 8080", "1: listen = 8080: expected a text in quotation marks."),
            ("socket_mode = 0o660", "1: socket_mode = 0o660: expected a text in quotation marks."),
            (
                "api_hosts = [1,\n2]",
                "1: api_hosts = [1, 2]: expected a text in quotation marks, or an array of them.",
            ),
            (
                "[runtime]\ntimeout = 1.5",
                "2: runtime.timeout = 1.5: expected a whole number from 1 to 86400.",
            ),
            (
                "[runtime]\napi_key = 'sesame two'",
                "2: runtime.api_key: expected a key of printable characters without white space.",
            ),
            ("tls.cert = 'a'", "1: tls.cert = 'a': expected tls.key to be set too."),
        ] {
            assert_eq!(file(text).expect_err(text), message, "{text}");
        }
        for (text, message) in [
            (
                "workers = 3\n\n[runtime]\nurl = 'http://a/v1'\n[search]\n [runtime] # again\nmodel = 'x'",
                "6: [runtime] is a duplicate: it is already in line 3. Put the settings of both under one heading.",
            ),
            (
                "runtime.url = 'http://a/v1'\n[runtime]",
                "2: [runtime] is a duplicate: it is already in line 1. Put the settings of both under one heading.",
            ),
            (
                "[runtime]\nurl = 'http://a/v1'\n[search]\ntimeout = 4\nurl = ''\n url = 'index:'",
                "6: search.url is a duplicate: it is already in line 5. Remove one of them.",
            ),
            (
                "runtime.url = ''\nsearch.url = ''\nruntime.url = 'http://a/v1'",
                "3: runtime.url is a duplicate: it is already in line 1. Remove one of them.",
            ),
            (
                "queue = 1\nqueue = 2\nworkers = 1\n'workers' = 2",
                "the configuration has 2 problems:\n  2: queue is a duplicate: it is already in line 1. Remove one of them.\n  \
                 4: workers is a duplicate: it is already in line 3. Remove one of them.",
            ),
            ("tls = { cert = 'sesame', cert = 'b' }", "1: it is not valid TOML: duplicate key cert."),
        ] {
            assert_eq!(file(text).expect_err(text), message, "{text}");
        }
        let broken = file("[runtime]\napi_key = 'sesame").expect_err("no end of the text");
        assert!(broken.starts_with("2: it is not valid TOML: ") && !broken.contains("sesame"), "{broken}");
    }

    #[test]
    fn every_problem_is_named_at_once() {
        let text =
            "workers = 0\n[search]\nurl = 'nowhere'\ngrounding = 'always'\n[tls]\nkey = 1\n[usage]\nday = 1";
        let message = file(text).expect_err("all of it is wrong");
        let starts: Vec<&str> =
            message.lines().map(|line| line.split(" = ").next().unwrap_or(line)).collect();
        // Grounding needs search.url, which is set: that it is wrong is one problem, not two.
        assert_eq!(
            starts,
            [
                "the configuration has 4 problems:",
                "  1: workers",
                "  3: search.url",
                "  6: tls.key",
                "  8: usage.day: there is no such setting. man adriaticum.toml lists all settings."
            ],
            "{message}"
        );
        let message = environment(&[("ADRIATICUM_QUEUE", "x"), ("ADRIATICUM_RUNTIME_API_KEY", "a b")]);
        let message = message.expect_err("both are wrong").to_string();
        assert!(
            message.contains("\n  ADRIATICUM_QUEUE=\"x\": ")
                && message.contains("\n  ADRIATICUM_RUNTIME_API_KEY: "),
            "{message}"
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
        assert_eq!(search.backend, Some(SearchBackend::SearXng("http://127.0.0.1:8888".into())));
        assert_eq!(search.index, Path::new("/var/lib/a/ledger.v2-search.db"));
        assert_eq!((search.patterns.len(), search.timeout.as_secs(), search.results), (2, 5, 4));
        let written = file("[search]\nurl = 'index:'\ngrounding = 'auto'\nmatch = ['a', 'b']\nresults = 1");
        let search = written.expect("they are good").search;
        assert_eq!((search.backend, search.grounding), (Some(SearchBackend::Index), GroundingMode::Auto));
        let off = environment(&[("ADRIATICUM_SEARCH_URL", "index:")]).expect("off needs nothing").search;
        assert_eq!(off.grounding, GroundingMode::Off);
        for (url, mode, word) in
            [("", "always", "search.url"), ("", "auto", "search.url"), ("index:", "match", "search.match")]
        {
            let set = [("ADRIATICUM_SEARCH_URL", url), ("ADRIATICUM_SEARCH_GROUNDING", mode)];
            let error = environment(&set).expect_err(mode).to_string();
            assert!(error.starts_with("ADRIATICUM_SEARCH_GROUNDING") && error.contains(word), "{error}");
        }
    }

    #[test]
    fn an_unknown_variable_is_named() {
        let config = environment(&[("ADRIATICUM_WORKER", "3"), ("ADRIATICUM_CONFIG", "x"), ("OTHER", "y")]);
        let unknown = config.expect("a warning is no error").unknown_variables;
        assert_eq!(unknown, ["ADRIATICUM_WORKER (did you mean ADRIATICUM_WORKERS?)"]);
    }

    #[test]
    fn settings_that_need_a_restart_are_named() {
        let running = environment(&[("ADRIATICUM_RUNTIME_API_KEY", "a")]).expect("good settings");
        let now = environment(&[
            ("ADRIATICUM_RUNTIME_API_KEY", "b"),
            ("ADRIATICUM_LISTEN", "127.0.0.1:1"),
            ("ADRIATICUM_LOG_LEVEL", "debug"),
        ])
        .expect("good settings");
        assert_eq!(running.differences(&now), ["listen", "runtime.api_key"]);
        assert!(running.differences(&running).is_empty());
        let with = |set: &[(&str, &str)]| environment(set).expect("good settings");
        let default = with(&[("ADRIATICUM_WORKERS", "16"), ("ADRIATICUM_RUNTIME_MODEL", "adriaticum")]);
        assert!(with(&[]).differences(&default).is_empty(), "a default that is written down is no change");
        let tls = |cert| with(&[("ADRIATICUM_TLS_CERT", cert), ("ADRIATICUM_TLS_KEY", "k")]);
        assert_eq!(with(&[]).differences(&tls("a")), ["tls.cert"]);
        assert!(tls("a").differences(&tls("b")).is_empty(), "a reload reads the new file");
    }

    #[test]
    fn a_secret_is_redacted() {
        let config = environment(&[("ADRIATICUM_RUNTIME_API_KEY", " sesame\n")]).expect("a good key");
        assert_eq!(config.runtime.api_key.as_ref().map(Secret::expose), Some("sesame"));
        assert!(!format!("{config:?}").contains("sesame"));
    }

    #[test]
    fn an_empty_key_file_is_none() {
        let path = env::temp_dir().join(format!("adriaticum-{}", crate::secret::secret_hex::<8>()));
        let read = |content: &str, key: &str| {
            fs::write(&path, content).expect("the folder for temporary files should take one");
            let file = path.to_str().expect("its path should be text");
            environment(&[("ADRIATICUM_RUNTIME_API_KEY_FILE", file), ("ADRIATICUM_RUNTIME_API_KEY", key)])
                .map(|config| config.runtime.api_key.map(|key| key.expose().to_owned()))
        };
        assert_eq!(read("\n", ""), Ok(None));
        assert_eq!(read("\n", "sesame"), Ok(Some("sesame".into())));
        assert_eq!(read("sesame\n", ""), Ok(Some("sesame".into())));
        assert!(read("sesame\n", "sesame").is_err_and(|error| error.to_string().contains("set too")));
        fs::remove_file(&path).expect("the file should still be there");
    }
}
