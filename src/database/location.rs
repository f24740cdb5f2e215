//! The location of a database: the path of a file, or a connection URI as
//! `postgresql://user:password@host:port,host:port/database?sslmode=verify-full`.

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use percent_encoding::percent_decode_str;

use crate::secret::Secret;
use crate::text::has_password;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DatabaseLocation {
    Sqlite(PathBuf),
    Postgres(DatabaseUri),
}

impl DatabaseLocation {
    /// A URI or the path of a file. The error says what is accepted, and repeats nothing of the
    /// text.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (scheme, rest) = text.split_once(':').unwrap_or(("", text));
        if DatabaseUri::is_scheme(scheme) && rest.starts_with("//") {
            return DatabaseUri::parse(text).map(Self::Postgres);
        }
        // The URI of another database, a mistyped one, or libpq's `host=… password=…`. As the name
        // of a file it would be printed with its password.
        if DatabaseUri::is_scheme(scheme.trim_start()) || text.contains("://") || has_password(text)
        {
            return Err(
                "the path of a SQLite file, or a URI that begins with postgresql://, such as \
                        postgresql://adriaticum@db.example/adriaticum"
                    .into(),
            );
        }
        Ok(Self::Sqlite(text.into()))
    }

    /// The path of a SQLite database; `None` for PostgreSQL.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::Sqlite(path) => Some(path),
            Self::Postgres(_) => None,
        }
    }
}

/// The location without the password.
impl fmt::Display for DatabaseLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sqlite(path) => path.display().fmt(f),
            Self::Postgres(uri) => uri.fmt(f),
        }
    }
}

const DEFAULT_PORT: u16 = 5432;

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
    /// The certificate has to be signed by a trusted CA for the name of the host.
    VerifyFull,
}

impl DatabaseUri {
    /// The scheme may be in upper case, as in every URI.
    fn is_scheme(text: &str) -> bool {
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
        if user.is_empty() {
            return Err(
                "a URI with a user, such as postgresql://adriaticum@db.example/adriaticum".into(),
            );
        }
        let database = if database.is_empty() { user } else { database };
        let mut uri = Self {
            hosts: hosts.split(',').map(host).collect::<Result<_, _>>()?,
            user: decode(user)?,
            password: password.map(decode).transpose()?.map(Secret::new),
            database: decode(database)?,
            sslmode: None,
            sslrootcert: None,
        };
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            match (name, value) {
                ("sslmode", "disable") => uri.sslmode = Some(SslMode::Disable),
                ("sslmode", "verify-full") => uri.sslmode = Some(SslMode::VerifyFull),
                // Every other mode may talk to an impostor, or in plain text.
                ("sslmode", _) => {
                    return Err("sslmode=verify-full, with the file of the CA as sslrootcert if the system does not trust it, \
                                or sslmode=disable if the network can be trusted"
                        .into());
                }
                ("sslrootcert", _) => uri.sslrootcert = Some(decode(value)?.into()),
                _ => {
                    return Err("no other parameters than sslmode and sslrootcert: write user, password, hosts, ports and \
                                database before them, as in postgresql://user:password@db1.example:5432,db2.example/database, \
                                and leave all others out"
                        .into());
                }
            }
        }
        Ok(uri)
    }

    /// The mode for connecting to a host. Without `sslmode` a host of the same machine is plain,
    /// unless there is an `sslrootcert`. A Unix socket is always plain.
    pub fn sslmode_for(&self, host: &Host) -> SslMode {
        match (host, self.sslmode) {
            (Host::Unix(_), _) => SslMode::Disable,
            (_, Some(mode)) => mode,
            (Host::Tcp { name, .. }, None) if is_loopback(name) && self.sslrootcert.is_none() => {
                SslMode::Disable
            }
            _ => SslMode::VerifyFull,
        }
    }
}

fn is_loopback(name: &str) -> bool {
    name == "localhost"
        || name
            .parse::<IpAddr>()
            .is_ok_and(|address| address.is_loopback())
}

/// Reads `name:port`, `[address]:port` or the folder of a Unix socket, whose slashes are encoded.
fn host(text: &str) -> Result<Host, String> {
    let (name, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, port)) => (address, port.strip_prefix(':').unwrap_or(port)),
        None => text.rsplit_once(':').unwrap_or((text, "")),
    };
    let name = decode(name)?;
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

    #[test]
    fn what_is_neither_a_uri_nor_a_path_is_refused() {
        for text in [
            " postgresql://u:sesame@a/",
            "postgresql:/u:sesame@a/",
            "mysql://u:sesame@a/",
            "file:///a.db?key=sesame",
            "host=a password=sesame",
            "host=a PASSWORD = 'sesame'",
        ] {
            let error = DatabaseLocation::parse(text).expect_err(text);
            assert!(
                error.contains("postgresql://") && !error.contains("sesame"),
                "{error}"
            );
        }
        for path in [
            "a.db",
            "/srv/password/a=b.db",
            "a@b:c.db",
            "postgres.db",
            "./a?b.db",
        ] {
            assert_eq!(
                DatabaseLocation::parse(path),
                Ok(DatabaseLocation::Sqlite(path.into()))
            );
        }
    }

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
        check("postgres://u@localhost", "postgresql://u@localhost:5432/u");
        check(
            "PostgreSQL://u:hidden@localhost",
            "postgresql://u@localhost:5432/u",
        );
        check("postgresql://u@[::1]", "postgresql://u@[::1]:5432/u");
        check(
            "postgresql://u@%2Frun%2Fpg:7,b.test/d%2Fb",
            "postgresql://u@/run/pg/.s.PGSQL.7,b.test:5432/d/b",
        );
        check(
            "postgresql://u@/db",
            "postgresql://u@/var/run/postgresql/.s.PGSQL.5432/db",
        );
        let uri = check(
            "postgresql://u@a/?sslrootcert=%2Fetc%2Fca.pem&sslmode=verify-full",
            "postgresql://u@a:5432/u",
        );
        assert_eq!(uri.sslrootcert, Some("/etc/ca.pem".into()));
    }

    #[test]
    fn what_is_wrong_is_named_and_not_repeated() {
        for (text, named) in [
            ("postgresql://db.test/secret", "a user"),
            ("postgresql://u:secret@a:0/", "ports"),
            ("postgresql://u:secret@a:x/", "ports"),
            ("postgresql://u:secret@a b/", "hosts"),
            ("postgresql://u:secret%ff@a/", "UTF-8"),
            ("postgresql://u:secret%00@a/", "UTF-8"),
            (
                "postgresql://u:secret@a/?sslmode=prefer",
                "sslmode=verify-full",
            ),
            (
                "postgresql://u:secret@a/?sslmode=require",
                "sslmode=verify-full",
            ),
            (
                "postgresql://u:secret@a/?sslmode=verify-ca",
                "sslrootcert if",
            ),
            ("postgresql://u:secret@a/?sslmode", "or sslmode=disable"),
            (
                "postgresql://u@a/?password=secret",
                "postgresql://user:password@",
            ),
            ("postgresql://u@a/?connect_timeout=9", "leave all others"),
            ("postgresql://u@a/?secret", "no other parameters"),
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
        use SslMode::{Disable, VerifyFull};
        for (uri, mode) in [
            ("postgresql://u@db.test/", VerifyFull),
            ("postgresql://u@localhost/", Disable),
            ("postgresql://u@[::1]/", Disable),
            ("postgresql://u@127.0.0.1/?sslmode=verify-full", VerifyFull),
            ("postgresql://u@localhost/?sslrootcert=ca.pem", VerifyFull),
            ("postgresql://u@db.test/?sslmode=disable", Disable),
            ("postgresql://u@%2Ftmp/?sslmode=verify-full", Disable),
        ] {
            let parsed = DatabaseUri::parse(uri).expect(uri);
            assert_eq!(parsed.sslmode_for(&parsed.hosts[0]), mode, "{uri}");
        }
    }
}
