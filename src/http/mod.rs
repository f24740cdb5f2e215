//! The wire: bytes to requests, responses to bytes. Nothing here knows of sockets or of the API's
//! format.

mod head;
mod reader;
pub mod response;

use std::net::IpAddr;

pub use head::{Framing, RequestHead, split_authority};
pub use reader::{ReadStep, Reader};
pub use response::Response;

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
}
