//! How connections are made: by the worker itself, and so that a failure to make one can be told from a failure
//! after it.
//!
//! `ureq`'s own resolver starts a thread for every request where a time-out is set, and its errors do not say
//! whether anything was sent.

use std::fmt;
use std::net::ToSocketAddrs;
use std::sync::Arc;

use ureq::Error;
use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{ConnectionDetails, Connector, NextTimeout, TcpConnector, Transport};

/// How many addresses of one name are tried: what `ureq` has room for.
const MOST_ADDRESSES: usize = 16;

/// No connection was made, so nothing was sent.
#[derive(Debug)]
pub(super) struct Unconnected(Error);

impl fmt::Display for Unconnected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Unconnected {}

/// Leaves the look-up of a name to the moment when a connection is made: a request on a connection that is
/// there already needs none.
#[derive(Debug)]
pub(super) struct Later;

impl Resolver for Later {
    fn resolve(&self, _: &Uri, _: &Config, _: NextTimeout) -> Result<ResolvedSocketAddrs, Error> {
        Ok(self.empty())
    }
}

/// Looks up the name and connects. What the C library's resolver takes for a name is bounded by its own
/// settings, not by ours; an address needs no look-up.
#[derive(Debug, Default)]
pub(super) struct Connect(TcpConnector);

impl<In: Transport> Connector<In> for Connect {
    type Out = <TcpConnector as Connector<In>>::Out;

    fn connect(&self, details: &ConnectionDetails, chained: Option<In>) -> Result<Option<Self::Out>, Error> {
        let unconnected = |error| Error::Other(Box::new(Unconnected(error)));
        let looked_up = ConnectionDetails {
            addrs: look_up(details.uri).map_err(unconnected)?,
            uri: details.uri,
            config: details.config,
            request_level: details.request_level,
            resolver: details.resolver,
            now: details.now,
            timeout: details.timeout,
            current_time: Arc::clone(&details.current_time),
            run_connector: Arc::clone(&details.run_connector),
            register_shutdown: Arc::clone(&details.register_shutdown),
        };
        self.0.connect(&looked_up, chained).map_err(unconnected)
    }
}

fn look_up(uri: &Uri) -> Result<ResolvedSocketAddrs, Error> {
    let (scheme, authority) = uri.scheme().zip(uri.authority()).ok_or(Error::HostNotFound)?;
    let name = DefaultResolver::host_and_port(scheme, authority).ok_or(Error::HostNotFound)?;
    let mut found = Later.empty();
    for address in name.to_socket_addrs()?.take(MOST_ADDRESSES) {
        found.push(address);
    }
    if found.is_empty() { Err(Error::HostNotFound) } else { Ok(found) }
}
