//! Blocking HTTP client for a runtime or SearXNG: `ureq`, with its connector, pool and time limits.
//!
//! Each call in flight has an agent of its own, with one connection at most, so that another thread
//! can cancel the call: it shuts its agent down. Agents without a call wait in a stack.
//!
//! The resolver is ours: that of `ureq` starts a thread for each call that has a time limit, which
//! takes 213 µs of CPU time per request instead of 124.

use std::fmt;
use std::io::{self, Read};
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustls::crypto::ring;
use rustls::pki_types::CertificateDer;
use ureq::config::Config;
use ureq::http::{HeaderValue, Response, Uri, header};
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{
    ConnectionDetails, Connector, DefaultConnector, NextTimeout, Transport,
};
use ureq::{Agent, Error, SendBody, Timeout};

use crate::certificates::{self, load_system_certificates};
use crate::error::FailureCause;
use crate::http::MAX_HEAD;
use crate::locks::lock;

/// The time to connect, TLS handshake included: a host that is down may not refuse.
const CONNECT_TIME: Duration = Duration::from_secs(3);

/// The time a connection is kept without use. The servers in use close theirs after 5 seconds, and
/// a request sent into a closing connection is lost.
const IDLE_TIME: Duration = Duration::from_secs(4);

/// The sizes of a connection's buffers. With the default of 128 KiB each, the load leaves 17 MiB in
/// use instead of 11. What is sent is mostly shorter, and 64 workers have to fit into 28 MiB.
const INPUT_BUFFER: usize = 16 * 1024;
const OUTPUT_BUFFER: usize = 8 * 1024;

/// The time for which addresses of a name are used before they are looked up again.
const ADDRESS_TIME: Duration = Duration::from_secs(30);

/// The most addresses that `ureq` takes.
const MAX_ADDRESSES: usize = 16;

/// Cancels the calls of a request from another thread.
#[derive(Clone, Debug, Default)]
pub struct Cancellation(Arc<Mutex<CallState>>);

#[derive(Debug, Default)]
struct CallState {
    is_cancelled: bool,
    /// The agent of the call in progress.
    agent: Option<Agent>,
}

impl Cancellation {
    /// Cancels the call in progress, if there is one: it fails at once, and so does every later
    /// one. A connection that is being made is waited for, at most for `CONNECT_TIME`.
    pub fn cancel(&self) {
        // The lock is held, so that the agent serves no other call yet.
        let mut state = lock(&self.0);
        state.is_cancelled = true;
        if let Some(agent) = state.agent.take() {
            agent.shutdown();
        }
    }

    pub fn is_cancelled(&self) -> bool {
        lock(&self.0).is_cancelled
    }

    /// Returns false if the request was cancelled already.
    fn begin_call(&self, agent: &Agent) -> bool {
        let mut state = lock(&self.0);
        if !state.is_cancelled {
            state.agent = Some(agent.clone());
        }
        !state.is_cancelled
    }

    /// Returns false if the call was cancelled: its agent was shut down then, and is not used again.
    fn end_call(&self) -> bool {
        let mut state = lock(&self.0);
        state.agent = None;
        !state.is_cancelled
    }
}

/// A client of one server.
pub struct HttpClient {
    config: Config,
    connector: SharedConnector,
    addresses: Addresses,
    idle: Mutex<Vec<Agent>>,
}

/// One call: a POST if it has a body, else a GET.
pub struct Call<'a> {
    pub uri: &'a Uri,
    pub authorization: Option<&'a str>,
    /// A JSON text.
    pub body: Option<&'a [u8]>,
    pub deadline: Instant,
    /// The largest answer that is read, in bytes.
    pub limit: u64,
    pub cancellation: &'a Cancellation,
}

/// Why a call failed. The messages repeat nothing that the server sent.
#[derive(Debug)]
pub enum CallError {
    /// No connection could be made. Nothing was run, so the call can be made to another server.
    Unreachable(io::Error),
    /// There was no complete answer in this time.
    TimedOut(Duration),
    /// Another thread has cancelled it.
    Cancelled,
    /// The answer is larger than the call's limit.
    TooLarge,
    /// The connection ended early, or the answer is not valid HTTP.
    Broken(String),
}

impl CallError {
    pub fn cause(&self) -> FailureCause {
        match self {
            Self::Unreachable(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                FailureCause::Refused
            }
            Self::Unreachable(_) => FailureCause::Unreachable,
            Self::TimedOut(_) => FailureCause::Timeout,
            Self::Cancelled => FailureCause::Cancelled,
            Self::TooLarge => FailureCause::AnswerTooLarge,
            Self::Broken(_) => FailureCause::Broken,
        }
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable(error) => write!(f, "no connection: {error}"),
            Self::TimedOut(time) => write!(f, "no complete answer in {:.1} s", time.as_secs_f64()),
            Self::Cancelled => f.write_str("the client has gone"),
            Self::TooLarge => {
                f.write_str("its answer is too large for a worker's share of buffer_limit")
            }
            Self::Broken(how) => write!(f, "the call broke off: {how}"),
        }
    }
}

impl HttpClient {
    /// A client of the server at this address. `ca` are the certificates of CAs that are trusted
    /// for `https://`; `None` trusts those of the system, which are read only for such an address.
    pub fn new(url: &str, ca: Option<&[CertificateDer]>) -> Self {
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            // A redirect is not followed: it counts as a failed answer.
            .max_redirects(0)
            .max_redirects_will_error(false)
            // A runtime on a private address is not behind the proxy that the environment names.
            .proxy(None)
            .user_agent(format!("adriaticum/{}", crate::VERSION))
            .accept("application/json")
            .max_response_header_size(MAX_HEAD)
            .input_buffer_size(INPUT_BUFFER)
            .output_buffer_size(OUTPUT_BUFFER)
            .max_idle_connections(1)
            .max_idle_age(IDLE_TIME)
            .timeout_connect(Some(CONNECT_TIME));
        if url.starts_with("https://") {
            let system = ca.is_none().then(load_system_certificates);
            let trusted = ca.or(system.as_deref()).unwrap_or_default();
            let roots = trusted
                .iter()
                .map(|certificate| Certificate::from_der(certificate).to_owned());
            let tls = TlsConfig::builder()
                .root_certs(RootCerts::from(roots))
                .unversioned_rustls_crypto_provider(Arc::new(ring::default_provider()));
            config = config.tls_config(tls.build());
        }
        Self {
            config: config.build(),
            connector: SharedConnector(Arc::default()),
            addresses: Addresses::default(),
            idle: Mutex::default(),
        }
    }

    /// Makes a call. It is sent once: if the connection is lost, the server may have run it all the
    /// same.
    pub fn call(&self, call: &Call) -> Result<Response<Vec<u8>>, CallError> {
        let idle = lock(&self.idle).pop();
        let agent = idle.unwrap_or_else(|| self.new_agent());
        if !call.cancellation.begin_call(&agent) {
            return Err(CallError::Cancelled);
        }
        let began = Instant::now();
        let mut unread = call.body.unwrap_or_default();
        let result = send(&agent, call, &mut unread);
        if !call.cancellation.end_call() {
            return Err(CallError::Cancelled);
        }
        lock(&self.idle).push(agent);
        result.map_err(|error| match error {
            Error::Timeout(Timeout::Connect) => {
                let error = io::Error::new(io::ErrorKind::TimedOut, "it does not answer in time");
                CallError::Unreachable(error)
            }
            Error::Timeout(_) => CallError::TimedOut(began.elapsed()),
            Error::BodyExceedsLimit(_) => CallError::TooLarge,
            Error::Io(error) => {
                // `ureq` asks for the body after it has written the head. A server that got no body
                // has run nothing. A GET is never made to another server, so a guess is enough.
                let was_sent = match call.body {
                    Some(body) => unread.len() < body.len(),
                    None => is_lost_connection(&error),
                };
                let error = certificates::explain(error, "");
                if was_sent {
                    CallError::Broken(error.to_string())
                } else {
                    CallError::Unreachable(error)
                }
            }
            Error::LargeResponseHeader(..) => {
                CallError::Broken("the head of its answer is too large".into())
            }
            // The others may repeat what the server wrote.
            _ => CallError::Broken("its answer is not valid HTTP".into()),
        })
    }

    fn new_agent(&self) -> Agent {
        Agent::with_parts(
            self.config.clone(),
            self.connector.clone(),
            self.addresses.clone(),
        )
    }
}

fn send(agent: &Agent, call: &Call, unread: &mut &[u8]) -> Result<Response<Vec<u8>>, Error> {
    let answer = if call.body.is_some() {
        let length = HeaderValue::from(unread.len());
        let request = agent
            .post(call.uri)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::CONTENT_LENGTH, length);
        prepare(request, call).send(SendBody::from_reader(unread))?
    } else {
        prepare(agent.get(call.uri), call).call()?
    };
    let (head, mut body) = answer.into_parts();
    if body.content_length() > Some(call.limit) {
        return Err(Error::BodyExceedsLimit(call.limit));
    }
    // A buffer that grows is copied, and leaves unused memory behind.
    let mut content = Vec::with_capacity(body.content_length().unwrap_or_default() as usize);
    // `ureq` refuses a body of exactly the limit.
    let mut reader = body.with_config().limit(call.limit + 1).reader();
    reader.read_to_end(&mut content)?;
    Ok(Response::from_parts(head, content))
}

fn prepare<B>(request: ureq::RequestBuilder<B>, call: &Call) -> ureq::RequestBuilder<B> {
    let left = call.deadline.saturating_duration_since(Instant::now());
    let request = request.config().timeout_global(Some(left)).build();
    match call.authorization {
        Some(value) => request.header(header::AUTHORIZATION, value),
        None => request,
    }
}

/// Returns true if the error is that of a connection that was made.
fn is_lost_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    let lost = [
        BrokenPipe,
        ConnectionAborted,
        ConnectionReset,
        UnexpectedEof,
    ];
    lost.contains(&error.kind())
}

/// One connector for all agents of a client: its TLS configuration has a store of certificates.
#[derive(Clone, Debug)]
struct SharedConnector(Arc<DefaultConnector>);

impl Connector for SharedConnector {
    type Out = Box<dyn Transport>;

    fn connect(
        &self,
        details: &ConnectionDetails,
        _: Option<()>,
    ) -> Result<Option<Self::Out>, Error> {
        let details = ConnectionDetails {
            // The time limit of a call makes a configuration of its own, for which `ureq` would
            // build a store for each connection. All calls have the same TLS configuration.
            request_level: false,
            addrs: details.addrs.clone(),
            current_time: Arc::clone(&details.current_time),
            run_connector: Arc::clone(&details.run_connector),
            register_shutdown: Arc::clone(&details.register_shutdown),
            ..*details
        };
        self.0.connect(&details, None)
    }
}

/// The addresses of the server, once they were looked up, and when that is due again.
#[derive(Clone, Debug, Default)]
struct Addresses(Arc<Mutex<Option<(ResolvedSocketAddrs, Instant)>>>);

impl Resolver for Addresses {
    /// Looks the name up at most once in `ADDRESS_TIME`. One thread looks it up again, and may have to
    /// wait for that; the others use the old addresses meanwhile.
    fn resolve(&self, uri: &Uri, _: &Config, _: NextTimeout) -> Result<ResolvedSocketAddrs, Error> {
        let now = Instant::now();
        let mut known = None;
        if let Some((addresses, due)) = &mut *lock(&self.0) {
            if now < *due {
                return Ok(addresses.clone());
            }
            *due = now + ADDRESS_TIME;
            known = Some(addresses.clone());
        }
        let name = host_and_port(uri).ok_or(Error::HostNotFound)?;
        let mut found = self.empty();
        match look_up(&name) {
            Ok(addresses) => addresses
                .into_iter()
                .take(MAX_ADDRESSES)
                .for_each(|address| found.push(address)),
            Err(error) => return known.ok_or(Error::Io(error)),
        }
        *lock(&self.0) = Some((found.clone(), now + ADDRESS_TIME));
        Ok(found)
    }
}

pub fn host_and_port(uri: &Uri) -> Option<String> {
    DefaultResolver::host_and_port(uri.scheme()?, uri.authority()?)
}

/// Looks up the addresses of a host and port. Of those of this host, the IPv4 ones come first: any
/// local user can listen on a port of `::1` that the server has on 127.0.0.1 only.
pub fn look_up(name: &str) -> io::Result<Vec<SocketAddr>> {
    let mut addresses: Vec<SocketAddr> = name.to_socket_addrs()?.collect();
    if addresses.iter().all(|address| address.ip().is_loopback()) {
        addresses.sort_by_key(SocketAddr::is_ipv6);
    }
    Ok(addresses)
}

#[cfg(test)]
mod tests {
    use ureq::unversioned::transport::time::Duration as Time;

    use super::*;

    fn resolve(addresses: &Addresses, url: &str) -> Result<String, Error> {
        let timeout = NextTimeout {
            after: Time::NotHappening,
            reason: Timeout::Global,
            ..NextTimeout::default()
        };
        let uri = url.parse().expect("an address");
        let found = addresses.resolve(&uri, &Config::default(), timeout)?;
        Ok(found.iter().map(|address| format!("{address} ")).collect())
    }

    #[test]
    fn addresses_of_names() {
        for (url, expected) in [
            ("http://10.0.0.7/v1", "10.0.0.7:80 "),
            ("https://10.0.0.7/v1", "10.0.0.7:443 "),
            ("http://[::1]:81/v1", "[::1]:81 "),
        ] {
            assert_eq!(resolve(&Addresses::default(), url).expect(url), expected);
        }
        let local = resolve(&Addresses::default(), "http://localhost:81/v1").expect("this host");
        assert!(local.starts_with("127.0.0.1:81 "), "{local}");
    }

    /// A DNS server that does not answer holds one worker at most.
    #[test]
    fn old_addresses_are_used_while_one_thread_looks_them_up_again() {
        let addresses = Addresses::default();
        let url = "http://no-such-host.invalid/v1";
        assert!(resolve(&addresses, url).is_err(), "a failure is not kept");
        let mut old = addresses.empty();
        old.push(([10, 0, 0, 7], 80).into());
        *lock(&addresses.0) = Some((old, Instant::now()));
        assert_eq!(
            resolve(&addresses, url).expect("the old one"),
            "10.0.0.7:80 "
        );
        let due = lock(&addresses.0).as_ref().expect("addresses").1;
        assert!(due > Instant::now(), "the next look-up is some time away");
        assert_eq!(
            resolve(&addresses, url).expect("the old one"),
            "10.0.0.7:80 "
        );
        let again = lock(&addresses.0).as_ref().expect("addresses").1;
        assert_eq!(again, due, "none was made");
    }
}
