//! What is asked over HTTP, the runtime and Search, is asked from here: HTTP/1.1 without TLS, on connections that are
//! kept for the next call.
//!
//! It is our own because a call is most of what a completion costs beside the ledger. A general client parses the address
//! anew, builds maps of headers, and asks the system nine times what this asks once or not at all; that took a third of
//! the service's processor time. And it says for certain what such a client can't: whether anything was sent.

mod answer;

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::RecvFlags;

pub use answer::Answer;
use answer::Reader;

/// How long a connection may take to be made: a host that is down may not say so.
const CONNECT_TIME: Duration = Duration::from_secs(3);

/// How long a connection is kept without use. The servers in use close theirs after 5 seconds, and a request
/// sent into a closing connection is lost.
const KEPT_TIME: Duration = Duration::from_secs(4);

/// How much is read at once.
const SCRATCH: usize = 8 * 1024;

/// Time-outs are rounded up to this, so that the system need not be told a new one for every call.
const TIMEOUT_STEP: Duration = Duration::from_millis(125);

/// Who is asked, and the connections to it that nobody uses at the moment.
pub struct Server {
    /// As the `Host` header names it.
    authority: String,
    host: String,
    port: u16,
    /// What every path begins with.
    base: String,
    kept: Mutex<Vec<Connection>>,
    most_kept: usize,
}

/// One call.
pub struct Call<'a> {
    pub method: &'a str,
    /// What follows the base address.
    pub path: &'a str,
    pub authorization: Option<&'a str>,
    /// JSON; a call without one is none that has a body.
    pub body: Option<&'a [u8]>,
    pub deadline: Instant,
    /// The largest answer that is read.
    pub limit: usize,
}

/// Why a call failed.
#[derive(Debug)]
pub enum CallError {
    /// No connection could be made, so nothing was sent; the text is the system's.
    Unreachable(String),
    TimedOut,
    /// The answer is larger than what is read of one.
    TooLarge,
    /// The connection broke, or what came was not HTTP.
    Broken(String),
}

impl From<io::Error> for CallError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            // What a socket says depends on the system.
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Self::TimedOut,
            _ => Self::Broken(error.to_string()),
        }
    }
}

impl Server {
    /// A server by its base address, `http://host[:port][/path]`, as the configuration has checked it.
    pub fn new(url: &str, most_kept: usize) -> Self {
        let rest = url.strip_prefix("http://").unwrap_or(url);
        let (authority, base) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        // An IPv6 address stands in brackets, and has colons of its own.
        let colon = authority.rfind(':').filter(|&colon| !authority[colon..].contains(']'));
        let (host, port) = match colon {
            Some(colon) => (&authority[..colon], authority[colon + 1..].parse().unwrap_or(80)),
            None => (authority, 80),
        };
        Self {
            authority: authority.to_owned(),
            host: host.trim_start_matches('[').trim_end_matches(']').to_owned(),
            port,
            base: base.to_owned(),
            kept: Mutex::default(),
            most_kept,
        }
    }

    /// Makes a call. It is sent once: whether a server that has gone away has run it, nobody knows.
    pub fn call(&self, call: &Call) -> Result<Answer, CallError> {
        let mut connection = match self.take_kept() {
            Some(connection) => connection,
            None => self.connect(call.deadline)?,
        };
        connection.send(&self.encode(call), call.deadline)?;
        let (answer, is_kept) = connection.receive(call)?;
        if is_kept {
            self.keep(connection);
        }
        Ok(answer)
    }

    fn encode(&self, call: &Call) -> Vec<u8> {
        let body = call.body.unwrap_or_default();
        let mut bytes = Vec::with_capacity(512 + body.len());
        let mut put = |parts: &[&str]| parts.iter().for_each(|part| bytes.extend_from_slice(part.as_bytes()));
        put(&[call.method, " ", &self.base, call.path, " HTTP/1.1\r\nhost: ", &self.authority]);
        put(&["\r\nuser-agent: adriaticum/", env!("CARGO_PKG_VERSION"), "\r\naccept: application/json\r\n"]);
        if let Some(authorization) = call.authorization {
            put(&["authorization: ", authorization, "\r\n"]);
        }
        if call.body.is_some() {
            put(&["content-type: application/json\r\ncontent-length: ", &body.len().to_string(), "\r\n"]);
        }
        put(&["\r\n"]);
        bytes.extend_from_slice(body);
        bytes
    }

    /// A connection that was used before and that the server has not closed.
    fn take_kept(&self) -> Option<Connection> {
        loop {
            let connection = self.kept().pop()?;
            if connection.used.elapsed() < KEPT_TIME && connection.is_open() {
                return Some(connection);
            }
        }
    }

    fn keep(&self, connection: Connection) {
        let mut kept = self.kept();
        // Those that were used longest ago stand first.
        let is_old = |connection: &Connection| connection.used.elapsed() >= KEPT_TIME;
        while kept.len() >= self.most_kept.max(1) || kept.first().is_some_and(is_old) {
            kept.remove(0);
        }
        kept.push(connection);
    }

    fn kept(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks up the name and connects, to the first of its addresses that can be reached. What the C library's resolver
    /// takes for a name is bounded by its own settings, not by ours; an address needs no look-up.
    fn connect(&self, deadline: Instant) -> Result<Connection, CallError> {
        let unreachable = |error: io::Error| CallError::Unreachable(error.to_string());
        let end = deadline.min(Instant::now() + CONNECT_TIME);
        let mut failure = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        let mut addresses =
            (self.host.as_str(), self.port).to_socket_addrs().map_err(unreachable)?.peekable();
        while let Some(address) = addresses.next() {
            let left = end.saturating_duration_since(Instant::now());
            // One that does not answer leaves time for the next.
            let time = if addresses.peek().is_some() { left / 2 } else { left };
            match Connection::make(&address, time) {
                Ok(connection) => return Ok(connection),
                Err(error) => failure = error,
            }
        }
        Err(unreachable(failure))
    }
}

struct Connection {
    stream: TcpStream,
    used: Instant,
    /// The time-out that the socket was given last.
    timeout: Duration,
}

impl Connection {
    fn make(address: &SocketAddr, time: Duration) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(address, time.max(Duration::from_millis(1)))?;
        // A request is one write: waiting to fill a packet would only delay it.
        stream.set_nodelay(true)?;
        Ok(Self { stream, used: Instant::now(), timeout: Duration::ZERO })
    }

    /// Whether the server has neither closed it nor sent what nobody asked for.
    fn is_open(&self) -> bool {
        let nothing = rustix::net::recv(&self.stream, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT);
        matches!(nothing, Err(rustix::io::Errno::AGAIN))
    }

    fn send(&mut self, bytes: &[u8], deadline: Instant) -> Result<(), CallError> {
        let mut sent = 0;
        while sent < bytes.len() {
            self.set_timeout(deadline)?;
            match self.stream.write(&bytes[sent..]) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
                Ok(count) => sent += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Reads the answer, and says whether the connection can be used again.
    fn receive(&mut self, call: &Call) -> Result<(Answer, bool), CallError> {
        let mut reader = Reader::new(call.limit);
        let mut scratch = [0; SCRATCH];
        loop {
            self.set_timeout(call.deadline)?;
            let count = match self.stream.read(&mut scratch) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error.into()),
            };
            if count == 0 {
                return reader.end();
            }
            if let Some(whole) = reader.push(&scratch[..count])? {
                self.used = Instant::now();
                return Ok(whole);
            }
        }
    }

    fn set_timeout(&mut self, deadline: Instant) -> Result<(), CallError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(CallError::TimedOut);
        }
        let steps = left.as_nanos().div_ceil(TIMEOUT_STEP.as_nanos());
        let timeout = TIMEOUT_STEP.saturating_mul(u32::try_from(steps).unwrap_or(u32::MAX));
        if timeout != self.timeout {
            self.stream.set_read_timeout(Some(timeout))?;
            self.stream.set_write_timeout(Some(timeout))?;
            self.timeout = timeout;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    /// Answers each connection's requests with the texts given, one for each, and then closes it.
    fn serve(connections: Vec<Vec<&'static str>>) -> (Server, thread::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
        let port = listener.local_addr().expect("it listens").port();
        let heard = thread::spawn(move || {
            let mut heard = Vec::new();
            for answers in connections {
                let (mut stream, _) = listener.accept().expect("a connection");
                for answer in answers {
                    let mut bytes = [0; 1024];
                    let count = stream.read(&mut bytes).expect("a request in one piece");
                    heard.push(String::from_utf8_lossy(&bytes[..count]).into_owned());
                    stream.write_all(answer.as_bytes()).expect("it should be taken");
                }
            }
            heard
        });
        (Server::new(&format!("http://127.0.0.1:{port}/v1"), 4), heard)
    }

    fn get(server: &Server) -> Result<Answer, CallError> {
        let deadline = Instant::now() + Duration::from_secs(5);
        server.call(&Call { method: "GET", path: "/x", authorization: None, body: None, deadline, limit: 64 })
    }

    const SHORT: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

    #[test]
    fn a_connection_is_used_again_for_as_long_as_it_lasts() {
        let last = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok";
        let (server, heard) = serve(vec![vec![SHORT, last], vec![SHORT], vec![SHORT]]);
        for _ in 0..3 {
            assert_eq!(get(&server).expect("an answer").body, b"ok");
        }
        // The server closes the second connection, which is found out before anything is sent.
        while server.kept().first().is_some_and(Connection::is_open) {
            thread::yield_now();
        }
        assert_eq!(get(&server).expect("an answer").body, b"ok");
        let heard = heard.join().expect("no panic");
        assert_eq!(heard.len(), 4);
        assert!(heard[0].starts_with("GET /v1/x HTTP/1.1\r\nhost: 127.0.0.1:"), "{}", heard[0]);
    }

    #[test]
    fn what_is_sent() {
        let (server, heard) = serve(vec![vec![SHORT]]);
        let deadline = Instant::now() + Duration::from_secs(5);
        let (authorization, body) = (Some("Bearer x"), Some(&b"{}"[..]));
        let call = Call { method: "POST", path: "/chat", authorization, body, deadline, limit: 64 };
        assert_eq!(server.call(&call).expect("an answer").status, 200);
        let heard = heard.join().expect("no panic").remove(0);
        assert!(heard.starts_with("POST /v1/chat HTTP/1.1\r\n"), "{heard}");
        for line in ["authorization: Bearer x", "content-type: application/json", "content-length: 2"] {
            assert!(heard.contains(&format!("\r\n{line}\r\n")), "{heard}");
        }
        assert!(heard.ends_with("\r\n\r\n{}"), "{heard}");
    }

    #[test]
    fn what_fails_and_how() {
        for (answers, is_so) in [
            (vec![""], CallError::Broken(String::new())),
            (vec!["HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok"], CallError::Broken(String::new())),
            (vec!["nonsense\r\n\r\n"], CallError::Broken(String::new())),
            (vec!["HTTP/1.1 200 OK\r\ncontent-length: 65\r\n\r\n"], CallError::TooLarge),
        ] {
            let (server, _heard) = serve(vec![answers.clone()]);
            let error = get(&server).expect_err("no answer");
            assert_eq!(
                std::mem::discriminant(&error),
                std::mem::discriminant(&is_so),
                "{answers:?}: {error:?}"
            );
        }
        assert!(matches!(get(&Server::new("http://127.0.0.1:1", 1)), Err(CallError::Unreachable(_))));
        let silent = TcpListener::bind("127.0.0.1:0").expect("a port should be free");
        let url = format!("http://{}", silent.local_addr().expect("it listens"));
        let deadline = Instant::now() + Duration::from_millis(20);
        let call = Call { method: "GET", path: "/", authorization: None, body: None, deadline, limit: 64 };
        assert!(matches!(Server::new(&url, 1).call(&call), Err(CallError::TimedOut)));
    }

    #[test]
    fn addresses() {
        for (url, authority, host, port, base) in [
            ("http://a", "a", "a", 80, ""),
            ("http://a:81/v1", "a:81", "a", 81, "/v1"),
            ("http://[::1]:81/v1", "[::1]:81", "::1", 81, "/v1"),
            ("http://[::1]/v1", "[::1]", "::1", 80, "/v1"),
        ] {
            let server = Server::new(url, 1);
            assert_eq!(
                (server.authority.as_str(), server.host.as_str(), server.port, server.base.as_str()),
                (authority, host, port, base)
            );
        }
    }
}
