//! Opens connections on the caller's thread.

use std::io;
use std::net::ToSocketAddrs;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustls::crypto::ring;
use rustls::pki_types::ServerName;
use rustls::{CertificateError, ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use ureq::Error;
use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{ConnectionDetails, NextTimeout};

use super::cancellation;
use super::outbound::{OutboundConnection, OutboundStream};
use crate::certificates::load_system_roots;
use crate::timed_stream::TimedStream;

/// The time to connect, TLS handshake included: a host that is down may not refuse.
pub(super) const CONNECT_TIME: Duration = Duration::from_secs(3);

/// Finds no address. `ureq` asks its resolver for every call, on a thread of its own if there is a
/// timeout; a call on a kept connection needs no address, and the connector looks up the name of a
/// new one.
#[derive(Debug)]
pub(super) struct ResolveLater;

impl Resolver for ResolveLater {
    fn resolve(&self, _: &Uri, _: &Config, _: NextTimeout) -> Result<ResolvedSocketAddrs, Error> {
        Ok(self.empty())
    }
}

#[derive(Debug)]
pub(super) struct Connector {
    roots: Option<RootCertStore>,
    /// Made for the first `https://` call: without one, the system's certificates are never read.
    tls: OnceLock<Arc<ClientConfig>>,
}

impl Connector {
    pub fn new(roots: Option<RootCertStore>) -> Self {
        Self {
            roots,
            tls: OnceLock::new(),
        }
    }

    fn tls(&self) -> Arc<ClientConfig> {
        let make = || {
            let roots = self.roots.clone().unwrap_or_else(load_system_roots);
            let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
                .with_safe_default_protocol_versions()
                .expect("the provider should support the default versions")
                .with_root_certificates(roots)
                .with_no_client_auth();
            Arc::new(config)
        };
        Arc::clone(self.tls.get_or_init(make))
    }

    fn open(&self, details: &ConnectionDetails) -> io::Result<OutboundConnection> {
        let deadline = Instant::now() + (*details.timeout.after).min(CONNECT_TIME);
        // The C library's own settings bound the time of a look-up; an address needs none.
        let addresses = host_and_port(details.uri).to_socket_addrs()?;
        let mut stream = TimedStream::connect(addresses, deadline)?;
        cancellation::set_socket(Some(&stream));
        let stream = if details.needs_tls() {
            let mut session = ClientConnection::new(self.tls(), server_name(details.uri)?)
                .map_err(io::Error::other)?;
            session.complete_io(&mut stream).map_err(handshake_error)?;
            // That was the handshake, and nothing of the call.
            stream.has_sent = false;
            OutboundStream::Tls(Box::new(StreamOwned::new(session, stream)))
        } else {
            OutboundStream::Plain(stream)
        };
        Ok(OutboundConnection::new(stream))
    }
}

impl ureq::unversioned::transport::Connector for Connector {
    type Out = OutboundConnection;

    fn connect(
        &self,
        details: &ConnectionDetails,
        _: Option<()>,
    ) -> Result<Option<OutboundConnection>, Error> {
        self.open(details).map(Some).map_err(Error::Io)
    }
}

/// Describes a failed handshake, so that an operator knows what to do.
fn handshake_error(error: io::Error) -> io::Error {
    match error
        .get_ref()
        .and_then(|cause| cause.downcast_ref::<rustls::Error>())
    {
        Some(rustls::Error::InvalidCertificate(
            CertificateError::UnknownIssuer | CertificateError::BadSignature,
        )) => io::Error::other("its certificate is not signed by a trusted CA"),
        Some(cause) => io::Error::other(format!("TLS: {cause}")),
        None => error,
    }
}

fn host_and_port(uri: &Uri) -> String {
    let parts = uri.scheme().zip(uri.authority());
    parts
        .and_then(|(scheme, authority)| DefaultResolver::host_and_port(scheme, authority))
        .unwrap_or_default()
}

fn server_name(uri: &Uri) -> io::Result<ServerName<'static>> {
    let host = uri
        .host()
        .unwrap_or_default()
        .trim_start_matches('[')
        .trim_end_matches(']');
    ServerName::try_from(host.to_owned()).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_addresses() {
        for (address, host_and_port, name) in [
            ("http://a.test/v1", "a.test:80", "a.test"),
            ("https://a.test/v1", "a.test:443", "a.test"),
            ("https://10.0.0.7:81", "10.0.0.7:81", "10.0.0.7"),
            ("https://[::1]:81/v1", "[::1]:81", "::1"),
            ("http://[::1]/v1", "[::1]:80", "::1"),
        ] {
            let uri: Uri = address.parse().expect(address);
            assert_eq!(super::host_and_port(&uri), host_and_port);
            assert_eq!(server_name(&uri).expect(address).to_str(), name);
        }
    }
}
