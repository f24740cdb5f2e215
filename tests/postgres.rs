//! A PostgreSQL server for the tests of one process. `postgres.sh` removes it when the process ends.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

pub struct PostgresServer {
    /// For the role that may create databases.
    pub uri: String,
    folder: PathBuf,
    /// It stops the server when its standard input ends.
    script: Child,
}

impl PostgresServer {
    /// Starts a server, with TLS if there is a folder with a certificate.
    pub fn start(certificate: Option<&Path>) -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/postgres.sh");
        let mut child = Command::new(script)
            .args(certificate)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the script should start");
        let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        let mut line = || {
            lines
                .next()
                .and_then(Result::ok)
                .expect("PostgreSQL 15 should start")
        };
        let (uri, folder) = (line(), line().into());
        Self {
            uri,
            folder,
            script: child,
        }
    }

    /// The server that the tests of this process share.
    pub fn shared() -> &'static Self {
        static SERVER: OnceLock<PostgresServer> = OnceLock::new();
        SERVER.get_or_init(|| Self::start(None))
    }

    /// The URI of a new, empty database.
    pub fn database(&self) -> String {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("test_{}", COUNT.fetch_add(1, Ordering::Relaxed));
        self.psql(&format!("CREATE DATABASE {name} OWNER adriaticum"));
        self.uri.replace("/postgres?", &format!("/{name}?"))
    }

    /// The URI of the superuser, by way of the Unix socket.
    pub fn socket_uri(&self) -> String {
        let folder = self.folder.display().to_string().replace('/', "%2F");
        format!("postgresql://postgres@{folder}:{}/postgres", self.port())
    }

    fn port(&self) -> &str {
        self.uri
            .rsplit_once(':')
            .and_then(|(_, rest)| rest.split_once('/'))
            .map_or("", |(port, _)| port)
    }

    /// Runs a statement as the superuser, and returns what it prints.
    pub fn psql(&self, statement: &str) -> String {
        psql(&self.socket_uri(), &["-c", statement])
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        drop(self.script.stdin.take());
        let _ = self.script.wait();
    }
}

/// Returns what psql prints: a line for each row.
pub fn psql(uri: &str, arguments: &[&str]) -> String {
    let output = Command::new("psql")
        .args(["-X", "-q", "-A", "-t", uri])
        .args(arguments)
        .output()
        .expect("psql should run");
    assert!(
        output.status.success(),
        "{arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout)
        .trim_end_matches('\n')
        .to_owned()
}
