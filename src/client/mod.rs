//! What is asked over HTTP, the runtime and Search, is asked through an agent that is made here.

mod connect;

use std::time::Duration;

use connect::Unconnected;

/// How long a connection may take to be made: a host that is down may not say so.
const CONNECT_TIME: Duration = Duration::from_secs(3);

/// How long a connection is kept without use. The servers in use close theirs after 5 seconds, and a request
/// sent into a closing connection is lost.
const KEPT_TIME: Duration = Duration::from_secs(4);

/// What a connection sends and reads at once; the default of 128 KiB each is more than a worker needs.
const BUFFER: usize = 16 * 1024;

/// An agent that keeps a connection to each host for each worker, and follows no redirects.
pub fn agent(workers: usize, hosts: usize) -> ureq::Agent {
    let config = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        // An address beside the host is not to be reached through the proxy that the environment names.
        .proxy(None)
        .user_agent(concat!("adriaticum/", env!("CARGO_PKG_VERSION")))
        .input_buffer_size(BUFFER)
        .output_buffer_size(BUFFER)
        .max_idle_connections(workers * hosts)
        .max_idle_connections_per_host(workers)
        .max_idle_age(KEPT_TIME)
        .timeout_connect(Some(CONNECT_TIME))
        .build();
    ureq::Agent::with_parts(config, connect::Connect::default(), connect::Later)
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

impl From<ureq::Error> for CallError {
    fn from(error: ureq::Error) -> Self {
        match error {
            ureq::Error::Timeout(_) => Self::TimedOut,
            ureq::Error::Other(other) if other.is::<Unconnected>() => Self::Unreachable(other.to_string()),
            ureq::Error::BodyExceedsLimit(_) => Self::TooLarge,
            error => Self::Broken(error.to_string()),
        }
    }
}
