//! A server under test, a scripted runtime behind it, and a client that speaks in bytes.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use adriaticum::listener::{Address, Admission, Area, Limits, Listener, ListeningSocket};
use adriaticum::secret::SecretDigest;
use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

#[cfg(feature = "test-postgres")]
use crate::postgres_server::{self, PostgresServer};

pub const BINARY: &str = env!("CARGO_BIN_EXE_adriaticum");

/// As long as anything on a busy machine may take.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A TCP port that refuses connections: its socket is bound, so that no other one gets it, and does not listen.
pub struct ClosedPort {
    pub address: SocketAddr,
    _socket: OwnedFd,
}

impl ClosedPort {
    pub fn new() -> Self {
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
        let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
        bind(&socket, &any_port).expect("a port should be free");
        let address = getsockname(&socket).expect("it has an address");
        Self {
            address: address.try_into().expect("an address of IPv4"),
            _socket: socket,
        }
    }
}

/// Waits for a condition, not for a time.
#[track_caller]
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "it did not come true in time: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A listener on a free port of this host, and its address.
pub fn local_listener(limits: Limits) -> (Listener, SocketAddr) {
    let any = Address::Tcp(([127, 0, 0, 1], 0).into());
    let sockets = ListeningSocket::bind(&any, 0).expect("a port should be free");
    let Address::Tcp(address) = sockets[0].address else {
        panic!("a TCP socket should have an address");
    };
    (Listener::new(sockets, limits).expect("a listener"), address)
}

/// Admits a request as one of this key.
pub fn admit_with_key(key: &str) -> Admission {
    Admission {
        area: Area::Api,
        credential: Some(SecretDigest::of(key)),
        lane: None,
        network: None,
    }
}

/// A folder of its own, which goes with the value.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let name = format!(
            "adriaticum-{}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).expect("the folder for temporary files should take one");
        Self(path)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// What the scripted runtime does with a call.
pub enum Script {
    Answer(u16, Value),
    Text(u16, String),
    /// The answer waits until the gate is open.
    Held(Arc<AtomicBool>, Value),
    /// There is no answer; that the caller closes the connection is counted.
    Silent,
}

pub fn completion(content: &str) -> Value {
    json!({
        "choices": [{"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14},
    })
}

/// A call as the runtime got it.
pub struct Call {
    pub url: String,
    pub headers: Vec<(String, String)>,
}

/// What the scripted runtime answers to the service's probes, and to `check` if that asks for its
/// models. They are no calls, and follow no script.
pub struct Probes {
    /// The status of an answer to a probe; 0 is no answer.
    pub status: AtomicU16,
    pub count: AtomicU64,
    /// The list of its models, and the status with which it is sent.
    pub models: Mutex<(u16, Value)>,
}

/// A probe, after the name of the model.
const PROBE: &[u8] = br#","messages":[{"role":"user","content":"Are you there?"}],"temperature":0.0,"max_tokens":1,"stream":false}"#;

/// A scripted runtime: it follows the script, and at its end returns good completions.
pub struct Runtime {
    address: SocketAddr,
    pub calls: Arc<Mutex<Vec<Call>>>,
    pub script: Arc<Mutex<VecDeque<Script>>>,
    /// How many calls were ended by the caller.
    pub ended: Arc<AtomicU64>,
    pub probes: Arc<Probes>,
    is_over: Arc<AtomicBool>,
    accepting: Option<JoinHandle<()>>,
}

impl Runtime {
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
        let mut runtime = Self {
            address: listener.local_addr().expect("it listens"),
            calls: Arc::default(),
            script: Arc::default(),
            ended: Arc::default(),
            // No probe finds it well, so that a failure lasts as long as a test needs it.
            probes: Arc::new(Probes {
                status: AtomicU16::new(503),
                count: AtomicU64::new(0),
                models: Mutex::new((503, json!({}))),
            }),
            is_over: Arc::default(),
            accepting: None,
        };
        let (calls, script, ended) = (
            Arc::clone(&runtime.calls),
            Arc::clone(&runtime.script),
            Arc::clone(&runtime.ended),
        );
        let (probes, is_over) = (Arc::clone(&runtime.probes), Arc::clone(&runtime.is_over));
        runtime.accepting = Some(thread::spawn(move || {
            let mut streams = Vec::new();
            for stream in listener.incoming().map_while(Result::ok) {
                if is_over.load(Ordering::Acquire) {
                    break;
                }
                streams.push(stream.try_clone().expect("a second handle"));
                let (calls, script, ended) =
                    (Arc::clone(&calls), Arc::clone(&script), Arc::clone(&ended));
                let probes = Arc::clone(&probes);
                thread::spawn(move || {
                    let mut client = Client::of(stream);
                    while serve_call(&mut client, &calls, &script, &ended, &probes).is_some() {}
                    let _ = client.stream.shutdown(Shutdown::Both);
                });
            }
            streams
                .iter()
                .for_each(|stream| _ = stream.shutdown(Shutdown::Both));
        }));
        runtime
    }

    pub fn url(&self) -> String {
        format!("http://{}/v1", self.address)
    }

    pub fn next(&self, script: Script) {
        self.script.lock().expect("the script").push_back(script);
    }

    /// Holds the next call until the result is true.
    pub fn hold(&self, content: &str) -> Arc<AtomicBool> {
        let gate = Arc::new(AtomicBool::new(false));
        self.next(Script::Held(Arc::clone(&gate), completion(content)));
        gate
    }

    /// Lets probes find it well.
    pub fn is_ready(&self) {
        self.probes.status.store(200, Ordering::Release);
    }

    pub fn count(&self) -> usize {
        self.calls.lock().expect("the calls").len()
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        // It ends the wait for a connection.
        let _ = TcpStream::connect(self.address);
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
    }
}

/// Answers the next call of a connection; `None` if it is the last.
fn serve_call(
    client: &mut Client,
    calls: &Mutex<Vec<Call>>,
    script: &Mutex<VecDeque<Script>>,
    ended: &AtomicU64,
    probes: &Probes,
) -> Option<()> {
    let (head, body) = client.request()?;
    if head.split(' ').nth(1) == Some("/v1/models") {
        let (status, models) = probes.models.lock().expect("the list").clone();
        return client.answer(status, &models.to_string());
    }
    if body.ends_with(PROBE) {
        probes.count.fetch_add(1, Ordering::AcqRel);
        let status = probes.status.load(Ordering::Acquire);
        if status == 0 {
            client.ends();
            return None;
        }
        return client.answer(status, &completion("Yes").to_string());
    }
    let next = script.lock().expect("the script").pop_front();
    calls.lock().expect("the calls").push(Call {
        url: head.split(' ').nth(1).unwrap_or_default().to_owned(),
        headers: head
            .lines()
            .filter_map(|line| line.split_once(": "))
            .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
            .collect(),
    });
    let (status, text) = match next {
        None => (200, completion("Zagreb.").to_string()),
        Some(Script::Answer(status, answer)) => (status, answer.to_string()),
        Some(Script::Text(status, text)) => (status, text),
        Some(Script::Held(gate, answer)) => {
            until("the gate opens", || gate.load(Ordering::Acquire));
            (200, answer.to_string())
        }
        Some(Script::Silent) => {
            if client.ends() {
                ended.fetch_add(1, Ordering::AcqRel);
            }
            return None;
        }
    };
    client.answer(status, &text)
}

/// The binary with an environment of its own.
pub struct Server {
    pub folder: Folder,
    pub environment: Vec<(String, String)>,
    process: Option<Child>,
    pub address: String,
}

impl Server {
    /// Not started yet: what is set now holds when it is.
    pub fn new(runtime: Option<&Runtime>) -> Self {
        let folder = Folder::new();
        // Without a file of its own, it would read that of a service installed on this host.
        let config = folder.path("empty.toml");
        File::create(&config).expect("the folder should take a file");
        let mut environment = vec![
            ("ADRIATICUM_CONFIG".into(), config.display().to_string()),
            ("ADRIATICUM_LISTEN".into(), "127.0.0.1:0".into()),
            ("ADRIATICUM_API_HOSTS".into(), "api.test".into()),
            // An error of a runtime comes at once.
            ("ADRIATICUM_RUNTIME_WAIT".into(), "0".into()),
        ];
        #[cfg(feature = "test-postgres")]
        let database = PostgresServer::shared().database();
        #[cfg(not(feature = "test-postgres"))]
        let database = folder.path("adriaticum.db").display().to_string();
        environment.push(("ADRIATICUM_DATABASE".into(), database));
        if let Some(runtime) = runtime {
            environment.push(("ADRIATICUM_RUNTIME_URL".into(), runtime.url()));
        }
        Self {
            folder,
            environment,
            process: None,
            address: String::new(),
        }
    }

    pub fn set(mut self, name: &str, value: impl ToString) -> Self {
        self.environment.retain(|(known, _)| known != name);
        self.environment.push((name.into(), value.to_string()));
        self
    }

    /// For what only SQLite has, whichever engine the tests run on.
    pub fn sqlite(self) -> Self {
        let path = self.folder.path("adriaticum.db");
        self.set("ADRIATICUM_DATABASE", path.display())
    }

    fn database(&self) -> &str {
        let setting = self
            .environment
            .iter()
            .find(|(name, _)| name == "ADRIATICUM_DATABASE");
        &setting.expect("the database is always set").1
    }

    /// A command of the binary, with this server's environment and nothing of the tests' own.
    pub fn command(&self, arguments: &[&str]) -> Command {
        self.prefixed(&[], arguments)
    }

    /// A command of the binary by way of another program, such as a shell that sets limits.
    pub fn prefixed(&self, prefix: &[&str], arguments: &[&str]) -> Command {
        let mut words = prefix
            .iter()
            .copied()
            .chain([BINARY])
            .chain(arguments.iter().copied());
        let mut command = Command::new(words.next().expect("the binary is always there"));
        command
            .args(words)
            // The search index of a service on PostgreSQL is in the current folder.
            .current_dir(self.folder.path(""))
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .envs(self.environment.clone())
            .stdin(Stdio::null());
        command
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments)
            .output()
            .expect("the binary should run")
    }

    /// Runs a command that has to succeed, and gives what it prints.
    #[track_caller]
    pub fn stdout_of(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(
            output.status.success(),
            "{arguments:?}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).expect("what is printed should be text")
    }

    pub fn key(&self) -> String {
        self.stdout_of(&["keys", "create", "test"])
            .trim()
            .to_owned()
    }

    #[track_caller]
    pub fn start(self) -> Self {
        self.start_with(&[])
    }

    /// Starts it by way of another program, such as a shell that sets limits, and waits until it listens.
    #[track_caller]
    pub fn start_with(self, prefix: &[&str]) -> Self {
        let mut server = self.spawn(prefix);
        server.await_address();
        server
    }

    /// Starts it and does not wait for anything.
    pub fn spawn(mut self, prefix: &[&str]) -> Self {
        let log = File::create(self.folder.path("log")).expect("the folder should take a log");
        let child = self
            .prefixed(prefix, &["serve"])
            .stdout(log.try_clone().expect("a file can be cloned"))
            .stderr(log)
            .spawn()
            .expect("the binary should start");
        self.process = Some(child);
        self
    }

    #[track_caller]
    pub fn await_address(&mut self) {
        until("it listens", || {
            let ended = self
                .process
                .as_mut()
                .and_then(|child| child.try_wait().ok())
                .flatten();
            assert!(ended.is_none(), "it ended at start: {}", self.log());
            match self.log().split_once("listening on ") {
                Some((_, rest)) if rest.contains('\n') => {
                    let address = rest.lines().next().unwrap_or_default();
                    let (_, address) = address.split_once("://").unwrap_or(("", address));
                    self.address = address.into();
                    true
                }
                _ => false,
            }
        });
    }

    /// Everything that was logged so far: the thread that writes the log sleeps when it has written all lines.
    pub fn log(&self) -> String {
        if let Some(process) = &self.process {
            until("the log is written", || !is_writing_log(process.id()));
        }
        fs::read_to_string(self.folder.path("log")).unwrap_or_default()
    }

    #[track_caller]
    pub fn has_logged(&self, text: &str) {
        let log = self.log();
        assert!(log.contains(text), "{text}: {log}");
    }

    pub fn pid(&self) -> u32 {
        self.process.as_ref().expect("it should be running").id()
    }

    /// A line of the system's own account of the process, such as `VmRSS`.
    pub fn status(&self, name: &str) -> u64 {
        let text = fs::read_to_string(format!("/proc/{}/status", self.pid()))
            .expect("it should be running");
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let number = line.and_then(|line| line.split_whitespace().next());
        number
            .and_then(|number| number.parse().ok())
            .expect("the line should hold a number")
    }

    /// The number of threads. The service logs its address before it starts all of them, and answers nothing before it has:
    /// so this waits for an answer, which over TLS is an alert.
    pub fn threads(&self) -> u64 {
        let mut client = self.connect();
        client.send("GET / HTTP/1.1\r\nHost: api.test\r\n\r\n");
        client.fill();
        self.status("Threads")
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid() as i32).expect("a pid");
        kill_process(pid, signal).expect("the signal should reach it");
    }

    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        let child = self.process.as_mut().expect("it should have been started");
        let mut ended = None;
        until("it ends", || {
            ended = child.try_wait().expect("it can be waited for");
            ended.is_some()
        });
        self.process = None;
        ended.expect("it has ended")
    }

    pub fn connect(&self) -> Client {
        Client::new(TcpStream::connect(&self.address).expect("it should take a connection"))
    }

    /// One request on a connection of its own.
    #[track_caller]
    pub fn post(&self, key: &str, body: &Value) -> Reply {
        let mut client = self.connect();
        client.send(request(key, body));
        client.reply()
    }

    /// Asks for a completion, without a word that matters.
    #[track_caller]
    pub fn complete(&self, key: &str) -> Reply {
        self.post(key, &chat("x"))
    }

    pub fn query(&self, sql: &str) -> Vec<Vec<rusqlite::types::Value>> {
        #[cfg(feature = "test-postgres")]
        if self.database().starts_with("postgresql:") {
            return query_postgres(self.database(), sql);
        }
        let database =
            rusqlite::Connection::open(self.database()).expect("the database should open");
        let mut statement = database.prepare(sql).expect("the query should be good");
        let width = statement.column_count();
        let rows = statement
            .query_map([], |row| (0..width).map(|i| row.get(i)).collect())
            .expect("it should run");
        rows.collect::<rusqlite::Result<_>>()
            .expect("its rows should be read")
    }
}

/// Whether the thread of this process that writes the log has something to do.
fn is_writing_log(pid: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task"));
    threads.into_iter().flatten().flatten().any(|thread| {
        let stat = fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        stat.split_once(" (log) ")
            .is_some_and(|(_, rest)| rest.starts_with(['R', 'D']))
    })
}

/// The same on PostgreSQL. A text that looks like a number becomes one.
#[cfg(feature = "test-postgres")]
fn query_postgres(uri: &str, sql: &str) -> Vec<Vec<rusqlite::types::Value>> {
    use rusqlite::types::Value::{Integer, Null, Real, Text};
    let read = |text: &str| match text {
        "<null>" => Null,
        // Truth is a number in SQLite.
        "t" | "f" => Integer((text == "t").into()),
        _ => match (text.parse(), text.parse()) {
            (Ok(number), _) => Integer(number),
            (_, Ok(number)) => Real(number),
            _ => Text(text.into()),
        },
    };
    let printed = postgres_server::psql(uri, &["-F", "\u{1f}", "-P", "null=<null>", "-c", sql]);
    printed
        .lines()
        .map(|line| line.split('\u{1f}').map(read).collect())
        .collect()
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(child) = &mut self.process {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

pub fn chat(content: &str) -> Value {
    json!({"model": "adriaticum", "messages": [{"role": "user", "content": content}]})
}

/// The bytes of a good request.
pub fn request(key: &str, body: &Value) -> String {
    raw_request(key, "", &body.to_string())
}

/// The bytes of a request with these header lines in it, each with its line's end.
pub fn raw_request(key: &str, headers: &str, body: &str) -> String {
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: api.test\r\nContent-Type: application/json\r\n\
         Authorization: Bearer {key}\r\n{headers}Content-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// Connects from another address of this host than 127.0.0.1.
pub fn connect_from(source: [u8; 4], address: SocketAddr) -> TcpStream {
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    bind(&socket, &SocketAddr::from((source, 0))).expect("an address of the loopback network");
    rustix::net::connect(&socket, &address).expect("a connection");
    socket.into()
}

/// A stream to a server, with what came after the last reply.
pub struct Client<S = TcpStream> {
    pub stream: S,
    rest: Vec<u8>,
}

impl Client<TcpStream> {
    pub fn new(stream: TcpStream) -> Self {
        stream
            .set_read_timeout(Some(PATIENCE))
            .expect("a time-out can be set");
        Self {
            stream,
            rest: Vec::new(),
        }
    }

    /// The next request, as a server reads it: its head and its body. `None` at the end.
    fn request(&mut self) -> Option<(String, Vec<u8>)> {
        let end = loop {
            if let Some(end) = self.rest.windows(4).position(|w| w == b"\r\n\r\n") {
                break end + 4;
            }
            if self.fill() == 0 {
                return None;
            }
        };
        let head = String::from_utf8(self.rest[..end].to_vec()).expect("a head should be text");
        let length: usize = value_of(&head, "content-length")
            .and_then(|v| v.parse().ok())
            .unwrap_or(0);
        while self.rest.len() < end + length {
            if self.fill() == 0 {
                return None;
            }
        }
        let body = self.rest.drain(..end + length).skip(end).collect();
        Some((head, body))
    }
}

impl<S: Read + Write> Client<S> {
    /// Answers a request, as a server does. `None` if the caller has given up on it.
    fn answer(&mut self, status: u16, text: &str) -> Option<()> {
        let length = text.len();
        let answer = format!("HTTP/1.1 {status} X\r\nContent-Length: {length}\r\n\r\n{text}");
        self.stream.write_all(answer.as_bytes()).ok()
    }

    pub fn of(stream: S) -> Self {
        Self {
            stream,
            rest: Vec::new(),
        }
    }

    /// Sends as much as the server takes.
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) {
        let _ = self.stream.write_all(bytes.as_ref());
    }

    /// Sends bytes, and gives the next reply.
    #[track_caller]
    pub fn ask(&mut self, bytes: impl AsRef<[u8]>) -> Reply {
        self.send(bytes);
        self.reply()
    }

    /// The next reply; its status is 0 if the server closed the connection instead.
    #[track_caller]
    pub fn reply(&mut self) -> Reply {
        loop {
            if let Some(end) = self.rest.windows(4).position(|w| w == b"\r\n\r\n") {
                let head =
                    String::from_utf8(self.rest[..end].to_vec()).expect("a head should be text");
                let length: usize = value_of(&head, "content-length")
                    .and_then(|v| v.parse().ok())
                    .unwrap_or(0);
                let whole = end + 4 + length;
                while self.rest.len() < whole && self.fill() > 0 {}
                let body = self.rest[end + 4..whole.min(self.rest.len())].to_vec();
                self.rest.drain(..whole.min(self.rest.len()));
                let status = head[9..12].parse().expect("a status should be a number");
                return Reply { status, head, body };
            }
            if self.fill() == 0 {
                return Reply {
                    status: 0,
                    head: String::new(),
                    body: self.rest.clone(),
                };
            }
        }
    }

    /// Whether the server closes without another byte.
    pub fn ends(&mut self) -> bool {
        self.rest.is_empty() && self.fill() == 0
    }

    #[track_caller]
    fn fill(&mut self) -> usize {
        let mut piece = [0; 65536];
        match self.stream.read(&mut piece) {
            Ok(count) => {
                self.rest.extend_from_slice(&piece[..count]);
                count
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => 0,
            // The system does so to a read with a timeout if the process is stopped and continued.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => self.fill(),
            Err(error) => panic!("no reply came: {error}"),
        }
    }
}

#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl Reply {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        value_of(&self.head, name)
    }

    /// That it is an error of this code, and what it says.
    #[track_caller]
    pub fn is_error(&self, status: u16, code: &str) -> String {
        let json = self.json();
        assert_eq!(
            (self.status, json["error"]["code"].as_str()),
            (status, Some(code)),
            "{self:?}"
        );
        json["error"]["message"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    }

    #[track_caller]
    pub fn is_completion(&self) -> String {
        assert_eq!(
            self.status,
            200,
            "{self:?} {}",
            String::from_utf8_lossy(&self.body)
        );
        self.json()["choices"][0]["message"]["content"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    }
}

fn value_of<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        key.eq_ignore_ascii_case(name).then(|| value.trim())
    })
}

/// Whether a file exists.
pub fn exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}
