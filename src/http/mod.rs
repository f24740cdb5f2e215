//! The wire: bytes to requests, responses to bytes. Nothing here knows of sockets or of the API's
//! format.

mod head;
mod reader;

use std::fmt;
use std::io::Write;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use ::http::StatusCode;
use jiff::Timestamp;

pub use head::{Framing, RequestHead, split_authority};
pub use reader::{ReadStep, Reader};

/// The most bytes of a head, from its request line to its empty line.
pub const MAX_HEAD: usize = 16 * 1024;

/// The most bytes of a body, however it is framed: the specification's 256 KB.
pub const MAX_BODY: usize = 262_144;

/// The memory that a request needs besides its own bytes: the buffers of the call to the runtime,
/// and the answer.
const ANSWER_BYTES: usize = 32 * 1024;

/// HTTP that can't be parsed or framed safely. The text is the message for the client.
#[derive(Debug, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

/// A request whose every byte has arrived, or whose head declares a body that is too large.
pub struct Request {
    pub head: RequestHead,
    /// `None` if the body is larger than `MAX_BODY`: the rest of it was not read.
    pub body: Option<Vec<u8>>,
    pub client: ClientInfo,
}

/// The client of a request, as the connection and trusted proxies report it.
#[derive(Clone, Copy, Debug, Default)]
pub struct ClientInfo {
    /// Behind a trusted proxy, the address that the proxy names; `None` on a Unix socket.
    pub peer: Option<IpAddr>,
    /// A trusted proxy passed the request on.
    pub proxied: bool,
    /// The request came over TLS, or a trusted proxy says so.
    pub secure: bool,
}

impl Request {
    /// The memory that it needs until it is answered. The texts of the body and the JSON for the
    /// runtime take as many bytes again, each.
    pub fn held_bytes(&self) -> usize {
        self.head.held_bytes() + 3 * self.body.as_ref().map_or(0, Vec::capacity) + ANSWER_BYTES
    }
}

impl ClientInfo {
    /// Returns true if the request was sent on this host.
    pub fn is_local(&self) -> bool {
        !self.proxied && self.peer.is_none_or(|address| address.is_loopback())
    }
}

/// The bits of an IPv6 address that name a client: many providers give each customer a /56.
const IPV6_BITS: u32 = 56;

/// An IPv4 address, or the /56 network of an IPv6 address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientNetwork(IpAddr);

impl From<IpAddr> for ClientNetwork {
    fn from(address: IpAddr) -> Self {
        Self(match address {
            IpAddr::V4(_) => address,
            IpAddr::V6(address) => {
                let host_bits = u128::BITS - IPV6_BITS;
                Ipv6Addr::from_bits(address.to_bits() >> host_bits << host_bits).into()
            }
        })
    }
}

impl fmt::Display for ClientNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            IpAddr::V4(address) => address.fmt(f),
            IpAddr::V6(network) => write!(f, "{network}/{IPV6_BITS}"),
        }
    }
}

/// A response, without the headers that depend on its connection.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    pub content_type: &'static str,
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
    /// Held until the response was sent or its connection has ended.
    pub permit: Option<Arc<()>>,
}

/// The `connection` header of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionHeader {
    /// The connection stays open, which is the default of HTTP/1.1.
    Omitted,
    /// The connection stays open, and HTTP/1.0 needs the header for that.
    KeepAlive,
    Close,
}

/// RFC 9110, 5.6.7.
const HTTP_DATE: &str = "%a, %d %b %Y %H:%M:%S GMT";

/// For a client that waits for this before it sends its body.
pub const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

impl Response {
    pub fn new(status: u16, content_type: &'static str, body: Vec<u8>) -> Self {
        Self {
            status,
            content_type,
            headers: Vec::new(),
            body,
            permit: None,
        }
    }

    pub fn json(status: u16, body: Vec<u8>) -> Self {
        Self::new(status, "application/json", body)
    }

    pub fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// The bytes of the head and of the body; for a HEAD request, the head only.
    pub fn encode(&self, connection: ConnectionHeader, without_body: bool) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(512 + self.body.len());
        // Clients ignore the reason phrase; it helps people who read the traffic.
        let reason = StatusCode::from_u16(self.status)
            .ok()
            .and_then(|status| status.canonical_reason())
            .unwrap_or_default();
        write!(bytes, "HTTP/1.1 {} {reason}\r\n", self.status)
            .expect("a Vec should take all that is written");
        let mut line = |name: &str, value: &str| {
            for part in [name, ": ", value, "\r\n"] {
                bytes.extend_from_slice(part.as_bytes());
            }
        };
        line("date", &format_date(Timestamp::now()));
        line("content-type", self.content_type);
        line("content-length", &self.body.len().to_string());
        for (name, value) in &self.headers {
            line(name, value);
        }
        match connection {
            ConnectionHeader::Omitted => {}
            ConnectionHeader::KeepAlive => line("connection", "keep-alive"),
            ConnectionHeader::Close => line("connection", "close"),
        }
        bytes.extend_from_slice(b"\r\n");
        if !without_body {
            bytes.extend_from_slice(&self.body);
        }
        bytes
    }
}

fn format_date(time: Timestamp) -> String {
    time.strftime(HTTP_DATE).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_and_unix_clients_are_local() {
        let check = |peer: Option<&str>, proxied, local| {
            let peer = peer.map(|address| address.parse().expect("an address"));
            assert_eq!(
                ClientInfo {
                    peer,
                    proxied,
                    secure: false
                }
                .is_local(),
                local,
                "{peer:?}"
            );
        };
        check(None, false, true);
        check(Some("127.0.0.2"), false, true);
        check(Some("::1"), false, true);
        for address in [None, Some("127.0.0.1"), Some("::1")] {
            check(address, true, false);
        }
        for address in ["10.0.0.1", "203.0.113.7", "fe80::1"] {
            check(Some(address), false, false);
        }
    }

    #[test]
    fn an_ipv6_client_has_a_network() {
        let network =
            |address: &str| ClientNetwork::from(address.parse::<IpAddr>().expect("an address"));
        assert_eq!(network("192.0.2.7").to_string(), "192.0.2.7");
        assert_ne!(network("192.0.2.7"), network("192.0.2.8"));
        assert_eq!(
            network("2001:db8:1:2ff::1").to_string(),
            "2001:db8:1:200::/56"
        );
        assert_eq!(
            network("2001:db8:1:2ff::1"),
            network("2001:db8:1:200:1:2:3:4")
        );
        assert_ne!(network("2001:db8:1:2ff::1"), network("2001:db8:1:300::1"));
    }

    #[test]
    fn a_head_request_gets_the_headers_of_its_body() {
        let text = |status, without_body| {
            let response = Response::new(status, "text/plain", b"0123456789abcdef".to_vec());
            String::from_utf8(response.encode(ConnectionHeader::Omitted, without_body))
                .expect("a response is text")
        };
        assert!(text(200, false).starts_with("HTTP/1.1 200 OK\r\ndate: "));
        assert!(text(404, false).starts_with("HTTP/1.1 404 Not Found\r\n"));
        for without_body in [false, true] {
            assert!(text(200, without_body).contains("\r\ncontent-length: 16\r\n"));
        }
        assert!(text(200, false).ends_with("\r\n\r\n0123456789abcdef"));
        assert!(text(200, true).ends_with("\r\n\r\n"));
    }

    #[test]
    fn the_date_follows_the_second() {
        let check = |seconds: i64, expected: &str| {
            let time = Timestamp::from_second(seconds).expect("a time");
            assert_eq!(format_date(time), expected);
        };
        check(1_700_000_000, "Tue, 14 Nov 2023 22:13:20 GMT");
        check(1_700_000_001, "Tue, 14 Nov 2023 22:13:21 GMT");
    }
}
