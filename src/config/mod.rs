//! The configuration: every setting checked once, at start.

mod database;
mod memory;
mod raw_setting;
pub mod reference;
mod runtime;
mod search;
mod settings;

use std::path::{Path, PathBuf};
use std::{env, fs, io, mem, path, str};

use log::LevelFilter;
use regex_lite::Regex;

pub use database::password_in;
use raw_setting::{RawSetting, WrongSetting};
pub use runtime::RuntimeConfig;
pub use search::{GroundingMode, SearchBackend, SearchConfig};
use settings::{Environment, Settings};

use crate::database::{DatabaseLocation, Result};
use crate::listener::{Address, Proxies, TrustedProxy};
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
    /// The file with its password, if there is one.
    pub database_password_file: Option<PathBuf>,
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
    /// Files with a secret: this one, if it has a key or a password, and those that settings name.
    pub secret_files: Vec<PathBuf>,
    /// Files of the service with a secret that this user can't read, by their settings, and the
    /// reason.
    pub unread_files: Vec<(&'static str, String)>,
    /// Variables with the prefix of settings that are unknown, each with the one that was probably
    /// meant.
    pub unknown_variables: Vec<String>,
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
    /// Reads the file named on the command line, else that of `ADRIATICUM_CONFIG`, else the usual
    /// one if it exists. The environment overrides it.
    pub fn load(named: Option<&Path>) -> Result<Self> {
        let variable = env::var_os("ADRIATICUM_CONFIG").filter(|path| !path.is_empty());
        let usual = Path::new(DEFAULT_FILE);
        let file = named
            .map(Path::to_owned)
            .or(variable.map(PathBuf::from))
            .or_else(|| may_exist(usual).then(|| usual.to_owned()));
        Self::read(file.as_deref(), env::vars_os().collect())
    }

    fn read(file: Option<&Path>, environment: Environment) -> Result<Self> {
        let mut settings = Settings::read(file, environment)?;
        let api_hosts = settings.value("api_hosts", api_hosts);
        let (console_host, console_is_local) = settings.value("console_host", |written| {
            Ok((console_host(written, &api_hosts)?, written.is_default()))
        });
        let (database, database_password_file) = database::read(&mut settings);
        let gateway = database::read_gateway(&mut settings, &database);
        let mut config = Self {
            listen: settings.value("listen", listen),
            socket_mode: settings.value("socket_mode", socket_mode),
            console_host,
            console_is_local,
            api_hosts,
            workers: settings.value("workers", RawSetting::number) as usize,
            queue: settings.value("queue", RawSetting::number) as usize,
            max_connections: settings.value("max_connections", RawSetting::number) as usize,
            buffer_limit: settings
                .optional("buffer_limit", RawSetting::number)
                .unwrap_or_else(memory::default_buffer_limit) as usize,
            compatibility: settings.value("compatibility", compatibility),
            log_level: settings.value("log_level", |written| {
                written.parse(|word| word.parse().ok())
            }),
            tls: tls(&mut settings),
            trusted_proxies: settings.value("trusted_proxies", trusted_proxies),
            runtime: runtime::read(&mut settings),
            search: search::read(&mut settings, &database),
            database,
            database_password_file,
            time_zone: time_zone(&mut settings),
            gateway,
            retention_days: match settings.value("usage.retention_days", RawSetting::number) {
                0 => None,
                days => Some(days as u32),
            },
            file: file.map(Path::to_owned),
            secret_files: mem::take(&mut settings.secret_files),
            unread_files: mem::take(&mut settings.unread_files),
            unknown_variables: Vec::new(),
        };
        config.unknown_variables = settings.finish()?;
        Ok(config)
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
            database::host_name()
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
    /// `log_level`, new TLS files and new content in them, but does not turn TLS on or off. The
    /// files of secrets count by their content.
    pub fn differences(&self, new: &Self) -> Vec<&'static str> {
        let (runtime, search) = (&self.runtime, &self.search);
        let console = |config: &Self| (config.console_host.clone(), config.console_is_local);
        let patterns = |config: &Self| {
            config
                .search
                .patterns
                .iter()
                .map(Regex::to_string)
                .collect::<Vec<_>>()
        };
        let differing = [
            ("database", self.database != new.database),
            (
                "database_password_file",
                self.database_password_file != new.database_password_file,
            ),
            ("time_zone", self.time_zone != new.time_zone),
            ("gateway", self.gateway != new.gateway),
            ("listen", self.listen != new.listen),
            ("socket_mode", self.socket_mode != new.socket_mode),
            ("api_hosts", self.api_hosts != new.api_hosts),
            ("console_host", console(self) != console(new)),
            (
                "trusted_proxies",
                self.trusted_proxies != new.trusted_proxies,
            ),
            ("workers", self.workers != new.workers),
            ("queue", self.queue != new.queue),
            (
                "max_connections",
                self.max_connections != new.max_connections,
            ),
            ("buffer_limit", self.buffer_limit != new.buffer_limit),
            ("compatibility", self.compatibility != new.compatibility),
            ("tls.cert", self.tls.is_some() != new.tls.is_some()),
            ("runtime.url", runtime.urls != new.runtime.urls),
            ("runtime.model", runtime.model != new.runtime.model),
            ("runtime.api_key", runtime.api_key != new.runtime.api_key),
            ("runtime.ca", runtime.ca != new.runtime.ca),
            ("runtime.timeout", runtime.timeout != new.runtime.timeout),
            ("search.url", search.backend != new.search.backend),
            ("search.grounding", search.grounding != new.search.grounding),
            ("search.match", patterns(self) != patterns(new)),
            ("search.timeout", search.timeout != new.search.timeout),
            ("search.results", search.results != new.search.results),
            (
                "usage.retention_days",
                self.retention_days != new.retention_days,
            ),
        ];
        differing
            .into_iter()
            .filter_map(|(name, differs)| differs.then_some(name))
            .collect()
    }
}

/// Returns false only if there is no such file. One in a folder that may not be entered is there for
/// the service, so that a command without it would use another database.
fn may_exist(path: &Path) -> bool {
    !fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

fn compatibility(written: &RawSetting) -> Result<Compatibility, WrongSetting> {
    written.parse(|word| match word {
        "strict" => Some(Compatibility::Strict),
        "openai" => Some(Compatibility::OpenAi),
        _ => None,
    })
}

fn listen(written: &RawSetting) -> Result<Address, WrongSetting> {
    written.parse(|text| match text.strip_prefix("unix:") {
        Some(path) => (!path.is_empty()).then(|| Address::Unix(path.into())),
        None => match text.strip_prefix("localhost:") {
            Some(port) => port.parse().ok().map(Address::Localhost),
            None => text.parse().ok().map(Address::Tcp),
        },
    })
}

fn socket_mode(written: &RawSetting) -> Result<u32, WrongSetting> {
    written.parse(|text| {
        let digits = text.bytes().all(|b| b.is_ascii_digit()).then_some(text)?;
        u32::from_str_radix(digits, 8)
            .ok()
            .filter(|&mode| mode <= 0o777)
    })
}

fn api_hosts(written: &RawSetting) -> Result<Vec<String>, WrongSetting> {
    let hosts = written.parse_each(host)?;
    if hosts.is_empty() {
        Err(written.refuse())
    } else {
        Ok(hosts)
    }
}

fn console_host(
    written: &RawSetting,
    api_hosts: &[String],
) -> Result<Option<String>, WrongSetting> {
    written.parse(|text| match text {
        "" => Some(None),
        text => host(text)
            .filter(|host| written.is_default() || !api_hosts.contains(host))
            .map(Some),
    })
}

fn trusted_proxies(written: &RawSetting) -> Result<Proxies, WrongSetting> {
    written.parse_each(TrustedProxy::parse).map(Proxies)
}

/// Normalizes a host name or address as it is in requests: lower case, an IPv6 address without
/// brackets.
fn host(text: &str) -> Option<String> {
    let bare = text
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
        .unwrap_or(text);
    let is_name = !bare.is_empty()
        && bare
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b));
    (is_name || bare.parse::<std::net::Ipv6Addr>().is_ok()).then(|| bare.to_ascii_lowercase())
}

fn time_zone(settings: &mut Settings) -> Option<String> {
    let written = settings.take_filled("time_zone")?;
    let name = written.parse(|text| time_zone::is_name(text).then(|| text.to_owned()));
    settings.accept(name)
}

fn tls(settings: &mut Settings) -> Option<TlsFiles> {
    let path = |written: &RawSetting| written.text().map(PathBuf::from);
    let files = match (
        settings.take_filled("tls.cert"),
        settings.take_filled("tls.key"),
    ) {
        (None, None) => return None,
        (Some(cert), Some(key)) => path(&cert).and_then(|cert| {
            Ok(TlsFiles {
                cert,
                key: path(&key)?,
            })
        }),
        (Some(cert), None) => Err(cert.refuse_for("tls.key to be set too")),
        (None, Some(key)) => Err(key.refuse_for("tls.cert to be set too")),
    };
    settings.accept(files)
}

/// The whole path of a file, for messages.
pub fn absolute(path: &Path) -> String {
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
    use crate::database::ProblemKind;
    use crate::secret::Secret;

    fn environment(variables: &[(&str, &str)]) -> Result<Config> {
        let owned = variables
            .iter()
            .map(|(name, value)| (name.into(), value.into()));
        Config::read(None, owned.collect())
    }

    /// Errors are returned without the file's name.
    fn file(text: &str) -> Result<Config, String> {
        let path = env::temp_dir().join(format!(
            "adriaticum-{}.toml",
            crate::secret::secret_hex::<8>()
        ));
        fs::write(&path, text).expect("the folder for temporary files should take one");
        let config = Config::read(Some(&path), Environment::new());
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

    /// The unit's files were found only with a variable, so a command without it had neither
    /// password nor key.
    #[test]
    fn secrets_are_beside_the_configuration_or_among_the_units_credentials() {
        let folder = |name: &str| {
            let path =
                env::temp_dir().join(format!("adriaticum-{}", crate::secret::secret_hex::<8>()));
            fs::create_dir(&path).expect("the folder for temporary files should take one");
            fs::write(path.join("runtime-key"), format!("key-{name}\n")).expect("a file");
            fs::write(path.join("database-password"), format!("word-{name}\n")).expect("a file");
            path
        };
        let (beside, credentials) = (folder("beside"), folder("unit"));
        let file = beside.join("adriaticum.toml");
        let read = |text: &str, set: &[(&str, &str)]| {
            fs::write(&file, text).expect("a file");
            let set = set.iter().map(|(name, value)| (name.into(), value.into()));
            let config =
                Config::read(Some(&file), set.collect()).unwrap_or_else(|error| panic!("{error}"));
            let password = match &config.database {
                DatabaseLocation::Postgres(uri) => uri
                    .password
                    .as_ref()
                    .map(Secret::expose)
                    .unwrap_or_default(),
                DatabaseLocation::Sqlite(_) => "",
            };
            let key = config
                .runtime
                .api_key
                .as_ref()
                .map(Secret::expose)
                .unwrap_or_default();
            format!("{password} {key}")
        };
        let (unit, other) = (
            credentials.display().to_string(),
            credentials.join("runtime-key").display().to_string(),
        );
        let database = "database = 'postgresql://user@db.test/'\n";
        assert_eq!(read(database, &[]), "word-beside key-beside");
        assert_eq!(
            read(database, &[("CREDENTIALS_DIRECTORY", &unit)]),
            "word-unit key-unit"
        );
        assert_eq!(read("", &[]), " key-beside", "SQLite has no password");
        let named = format!(
            "{database}database_password_file = '{other}'\nruntime.api_key_file = '{other}'"
        );
        assert_eq!(read(&named, &[]), "key-unit key-unit");
        assert_eq!(
            read(&named, &[("ADRIATICUM_RUNTIME_API_KEY_FILE", "")]),
            "key-unit key-beside"
        );
        let set = [
            ("ADRIATICUM_DATABASE", "postgresql://user:mine@db.test/"),
            ("ADRIATICUM_RUNTIME_API_KEY", "mine"),
        ];
        assert_eq!(read(database, &set), "mine mine", "a default comes last");
        let refused = Config::read(None, [("ADRIATICUM_CONFIG".into(), "x".into())].into());
        assert!(
            refused.is_ok_and(|config| config.runtime.api_key.is_none()),
            "no file, no folder"
        );
        for folder in [beside, credentials] {
            fs::remove_dir_all(folder).expect("it should go");
        }
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
        let cases: Vec<&str> = include_str!("../../tests/wrong_configurations.txt")
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
            let message = Config::read(Some(&path), set.collect())
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
        let written =
            file("[search]\nurl = 'index:'\ngrounding = 'auto'\nmatch = ['a', 'b']\nresults = 1");
        let search = written.expect("they are good").search;
        assert_eq!(
            (search.backend, search.grounding),
            (Some(SearchBackend::Index), GroundingMode::Auto)
        );
        let off = environment(&[("ADRIATICUM_SEARCH_URL", "index:")])
            .expect("off needs nothing")
            .search;
        assert_eq!(off.grounding, GroundingMode::Off);
    }

    /// It was dropped: a database of such a name became adriaticum.db.
    #[test]
    fn a_variable_that_is_not_text_is_a_problem() {
        let path = OsStr::from_bytes(b"/var/lib/a\xff.db").to_owned();
        let read = |name: &str| Config::read(None, [(name.into(), path.clone())].into());
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
            let message =
                Config::read(Some(&path), Environment::new()).map_err(|it| it.to_string());
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
             tls.key = 'k'\n[runtime]\nurl = 'http://a/v1'\nmodel = 'm'\napi_key = 'k'\ntimeout = 1\n[search]\nurl = 'index:'\n\
             grounding = 'match'\nmatch = 'a'\ntimeout = 1\nresults = 1\n[usage]\nretention_days = 1",
        );
        let mut changed = changed.expect("good settings");
        changed.runtime.ca = Some(Vec::new());
        let not_named = ["log_level", "tls.key", "runtime.api_key_file"];
        let names = reference::SETTINGS
            .iter()
            .map(|setting| setting.name)
            .filter(|name| !not_named.contains(name));
        assert_eq!(with(&[]).differences(&changed), names.collect::<Vec<_>>());
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

    #[test]
    fn an_empty_key_file_is_none() {
        let path = env::temp_dir().join(format!("adriaticum-{}", crate::secret::secret_hex::<8>()));
        let read = |content: &str, key: &str| {
            fs::write(&path, content).expect("the folder for temporary files should take one");
            let file = path.to_str().expect("its path should be text");
            environment(&[
                ("ADRIATICUM_RUNTIME_API_KEY_FILE", file),
                ("ADRIATICUM_RUNTIME_API_KEY", key),
            ])
            .map(|config| config.runtime.api_key.map(|key| key.expose().to_owned()))
        };
        assert_eq!(read("\n", ""), Ok(None));
        assert_eq!(read("\n", "sesame"), Ok(Some("sesame".into())));
        assert_eq!(read("sesame\n", ""), Ok(Some("sesame".into())));
        fs::remove_file(&path).expect("the file should still be there");
    }
}
