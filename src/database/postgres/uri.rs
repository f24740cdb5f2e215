//! Connection URIs as libpq takes them:
//! `postgresql://user:password@host:port,host:port/database?sslmode=verify-full`.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use percent_encoding::percent_decode_str;

use crate::secret::Secret;

const DEFAULT_PORT: u16 = 5432;

/// The timeout for connecting to one host, unless `connect_timeout` is set.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// The usual folder of the Unix socket of a server on the same machine.
const DEFAULT_FOLDER: &str = "/var/run/postgresql";

/// A database that was named by a URI. Neither `Debug` nor `Display` shows the password.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatabaseUri {
    pub hosts: Vec<Host>,
    pub user: String,
    pub password: Option<Secret>,
    pub database: String,
    /// `None`: not written in the URI.
    pub sslmode: Option<SslMode>,
    /// A PEM file with the CAs that are trusted; `None` means those of the system.
    pub sslrootcert: Option<PathBuf>,
    /// The timeout for each host.
    pub connect_timeout: Duration,
    /// Skips hosts that only read, such as a standby.
    pub needs_writable: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Host {
    Tcp {
        name: String,
        port: u16,
    },
    /// The path of the socket itself.
    Unix(PathBuf),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SslMode {
    Disable,
    /// Encrypted. The certificate is not checked; the password exchange, bound to it, proves the
    /// server instead.
    Require,
    /// The certificate has to be signed by a trusted CA, and may be of any name.
    VerifyCa,
    VerifyFull,
}

impl DatabaseUri {
    /// The scheme may be in upper case, as in every URI.
    pub fn is_scheme(text: &str) -> bool {
        ["postgresql", "postgres"]
            .iter()
            .any(|scheme| scheme.eq_ignore_ascii_case(text))
    }

    /// The error names what is wrong, and repeats nothing that may be a secret.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (_, rest) = text
            .split_once("://")
            .ok_or("a URI that begins with postgresql://")?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, database) = rest.split_once('/').unwrap_or((rest, ""));
        let (user_info, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
        let (user, password) = match user_info.split_once(':') {
            Some((user, password)) => (user, Some(password)),
            None => (user_info, None),
        };
        let mut uri = Self {
            hosts: Vec::new(),
            user: decode(user)?,
            password: password.map(decode).transpose()?.map(Secret::new),
            database: decode(database)?,
            sslmode: None,
            sslrootcert: None,
            connect_timeout: CONNECT_TIMEOUT,
            needs_writable: true,
        };
        let (mut names, mut ports) = split_hosts(hosts)?;
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair
                .split_once('=')
                .ok_or("parameters such as sslmode=verify-full")?;
            let value = decode(value)?;
            match name {
                "host" => names = value.split(',').map(String::from).collect(),
                "port" => ports = value.split(',').map(String::from).collect(),
                _ => uri.set(name, value)?,
            }
        }
        if ports.len() == 1 {
            ports = vec![ports[0].clone(); names.len()];
        }
        if ports.len() != names.len() {
            return Err("one port for all hosts, or one for each".into());
        }
        uri.hosts = names
            .into_iter()
            .zip(&ports)
            .map(|(name, port)| host(name, port))
            .collect::<Result<_, _>>()?;
        if uri.user.is_empty() {
            return Err(
                "a URI with a user, such as postgresql://adriaticum@db.example/adriaticum".into(),
            );
        }
        if uri.database.is_empty() {
            uri.database = uri.user.clone();
        }
        Ok(uri)
    }

    fn set(&mut self, name: &str, value: String) -> Result<(), String> {
        match name {
            "user" => self.user = value,
            "password" => self.password = Some(Secret::new(value)),
            "dbname" => self.database = value,
            "sslmode" => self.sslmode = Some(SslMode::parse(&value)?),
            "sslrootcert" => self.sslrootcert = Some(value.into()),
            "connect_timeout" => {
                let seconds = value
                    .parse()
                    .ok()
                    .filter(|seconds| (1..=60).contains(seconds));
                let seconds = seconds.ok_or("connect_timeout from 1 to 60 seconds")?;
                self.connect_timeout = Duration::from_secs(seconds);
            }
            "target_session_attrs" => {
                self.needs_writable = match value.as_str() {
                    "read-write" | "primary" => true,
                    "any" => false,
                    _ => {
                        return Err(
                            "target_session_attrs=read-write, primary or any: the service writes"
                                .into(),
                        );
                    }
                }
            }
            _ => {
                return Err(
                    "no other parameters than host, port, user, password, dbname, sslmode, sslrootcert, \
                            connect_timeout and target_session_attrs"
                        .into(),
                );
            }
        }
        Ok(())
    }

    /// The mode for connecting to a host. Without `sslmode`: `verify-full` if there is an
    /// `sslrootcert`; else `require`, and on the same machine plain. A Unix socket is always plain.
    pub fn sslmode_for(&self, host: &Host) -> SslMode {
        match (host, self.sslmode) {
            (Host::Unix(_), _) => SslMode::Disable,
            // As in libpq: a CA that is named is used.
            (_, Some(SslMode::Require)) if self.sslrootcert.is_some() => SslMode::VerifyCa,
            (_, Some(mode)) => mode,
            (_, None) if self.sslrootcert.is_some() => SslMode::VerifyFull,
            (Host::Tcp { name, .. }, None) if is_loopback(name) => SslMode::Disable,
            _ => SslMode::Require,
        }
    }
}

impl SslMode {
    fn parse(word: &str) -> Result<Self, String> {
        match word {
            "disable" => Ok(Self::Disable),
            "require" => Ok(Self::Require),
            "verify-ca" => Ok(Self::VerifyCa),
            "verify-full" => Ok(Self::VerifyFull),
            // They may send the password exchange and every row in plain text, whatever the
            // operator expects.
            _ => Err("sslmode=disable, require, verify-ca or verify-full".into()),
        }
    }
}

fn is_loopback(name: &str) -> bool {
    name == "localhost"
        || name
            .parse::<std::net::IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}

/// Names and ports as they are written, with an empty text for what is not.
fn split_hosts(hosts: &str) -> Result<(Vec<String>, Vec<String>), String> {
    let mut both = (Vec::new(), Vec::new());
    for host in hosts.split(',') {
        let (name, port) = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((address, port)) => (address, port.strip_prefix(':').unwrap_or(port)),
            None => host.rsplit_once(':').unwrap_or((host, "")),
        };
        both.0.push(decode(name)?);
        both.1.push(port.to_owned());
    }
    Ok(both)
}

fn host(name: String, port: &str) -> Result<Host, String> {
    let port = match port {
        "" => DEFAULT_PORT,
        _ => port
            .parse()
            .ok()
            .filter(|&port| port > 0)
            .ok_or("ports from 1 to 65535")?,
    };
    let folder = if name.is_empty() {
        DEFAULT_FOLDER
    } else {
        &name
    };
    if folder.starts_with('/') {
        return Ok(Host::Unix(
            PathBuf::from(folder).join(format!(".s.PGSQL.{port}")),
        ));
    }
    let is_name = name
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || b"-._:".contains(&b));
    if is_name {
        Ok(Host::Tcp { name, port })
    } else {
        Err("hosts that are names or addresses".into())
    }
}

fn decode(text: &str) -> Result<String, String> {
    // NUL ends a text in the protocol.
    let decoded = percent_decode_str(text)
        .decode_utf8()
        .ok()
        .filter(|text| !text.contains('\0'));
    decoded
        .map(Into::into)
        .ok_or_else(|| "UTF-8 without NUL behind its percent signs".into())
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { name, port } if name.contains(':') => write!(f, "[{name}]:{port}"),
            Self::Tcp { name, port } => write!(f, "{name}:{port}"),
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

impl fmt::Display for DatabaseUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hosts: Vec<String> = self.hosts.iter().map(Host::to_string).collect();
        write!(
            f,
            "postgresql://{}@{}/{}",
            self.user,
            hosts.join(","),
            self.database
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::database::DatabaseLocation;

    #[track_caller]
    fn check(text: &str, displayed: &str) -> DatabaseUri {
        let Ok(DatabaseLocation::Postgres(uri)) = DatabaseLocation::parse(text) else {
            panic!("{text}");
        };
        assert_eq!(uri.to_string(), displayed);
        uri
    }

    #[test]
    fn uris() {
        let uri = check(
            "postgresql://u:p%40ss%3A@a.test:1,[fd00::7]:2,10.0.0.7/db",
            "postgresql://u@a.test:1,[fd00::7]:2,10.0.0.7:5432/db",
        );
        assert_eq!(uri.password.as_ref().map(Secret::expose), Some("p@ss:"));
        assert_eq!(
            (uri.connect_timeout, uri.needs_writable),
            (Duration::from_secs(1), true)
        );
        check("postgres://u@localhost", "postgresql://u@localhost:5432/u");
        check(
            "PostgreSQL://u:hidden@localhost",
            "postgresql://u@localhost:5432/u",
        );
        check("postgresql://u@[::1]", "postgresql://u@[::1]:5432/u");
        check(
            "postgresql://u@%2Frun%2Fpg:7/d%2Fb",
            "postgresql://u@/run/pg/.s.PGSQL.7/d/b",
        );
        check(
            "postgresql://u@/db",
            "postgresql://u@/var/run/postgresql/.s.PGSQL.5432/db",
        );
        check(
            "postgresql:///db?host=/tmp,b.test&port=7&user=u",
            "postgresql://u@/tmp/.s.PGSQL.7,b.test:7/db",
        );
        let uri = check(
            "postgresql://a,b/?user=u&password=x&dbname=d&connect_timeout=9&target_session_attrs=any&port=1,2",
            "postgresql://u@a:1,b:2/d",
        );
        assert_eq!(
            (uri.connect_timeout, uri.needs_writable),
            (Duration::from_secs(9), false)
        );
    }

    #[test]
    fn what_is_wrong_is_named_and_not_repeated() {
        for (text, named) in [
            ("postgresql://db.test/secret", "a user"),
            ("postgresql://u:secret@a:0/", "ports"),
            ("postgresql://u:secret@a:x/", "ports"),
            ("postgresql://u:secret@a,b,c/?port=1,2", "one for each"),
            ("postgresql://u:secret@a b/", "hosts"),
            ("postgresql://u:secret%ff@a/", "UTF-8"),
            ("postgresql://u:secret%00@a/", "UTF-8"),
            ("postgresql://u:secret@a/?sslmode=prefer", "verify-full"),
            ("postgresql://u:secret@a/?connect_timeout=0", "60"),
            (
                "postgresql://u:secret@a/?target_session_attrs=standby",
                "the service writes",
            ),
            ("postgresql://u@a/?passwd=secret", "no other parameters"),
            ("postgresql://u@a/?secret", "parameters"),
        ] {
            let error = DatabaseUri::parse(text).expect_err(text);
            assert!(
                error.contains(named) && !error.contains("secret"),
                "{text}: {error}"
            );
        }
    }

    #[test]
    fn the_password_is_not_printed() {
        let uri = DatabaseUri::parse("postgresql://u:hidden@a/").expect("a good URI");
        assert!(!format!("{uri} {uri:?}").contains("hidden"));
    }

    #[test]
    fn how_a_host_is_connected_to() {
        use SslMode::{Disable, Require, VerifyCa, VerifyFull};
        for (uri, mode) in [
            ("postgresql://u@db.test/", Require),
            ("postgresql://u@localhost/", Disable),
            ("postgresql://u@[::1]/", Disable),
            ("postgresql://u@127.0.0.1/?sslmode=require", Require),
            ("postgresql://u@db.test/?sslrootcert=ca.pem", VerifyFull),
            (
                "postgresql://u@db.test/?sslrootcert=ca.pem&sslmode=require",
                VerifyCa,
            ),
            ("postgresql://u@db.test/?sslmode=verify-ca", VerifyCa),
            ("postgresql://u@db.test/?sslmode=disable", Disable),
            ("postgresql://u@%2Ftmp/?sslmode=verify-full", Disable),
        ] {
            let parsed = DatabaseUri::parse(uri).expect(uri);
            assert_eq!(parsed.sslmode_for(&parsed.hosts[0]), mode, "{uri}");
        }
    }
}
