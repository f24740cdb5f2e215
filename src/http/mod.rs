//! The wire: bytes to requests, responses to bytes. Nothing here knows of sockets or of the API.

pub mod body;
pub mod head;
pub mod reader;
pub mod response;

use std::net::IpAddr;

pub use head::Head;
pub use reader::{Reader, Step};
pub use response::Response;

/// The most bytes of a head, from its request line to its empty line.
pub const MAX_HEAD: usize = 16 * 1024;

/// The most headers of a head.
pub const MAX_HEADERS: usize = 100;

/// The most bytes of a body, however it is framed: the specification's 256 KB.
pub const MAX_BODY: usize = 262_144;

/// A request whose every byte has arrived, or whose head alone tells that its body is too large.
pub struct Request {
    pub head: Head,
    /// None where the body is larger than `MAX_BODY`: the rest of it was not read.
    pub body: Option<Vec<u8>>,
    /// The address that the request came from, past the proxies that are trusted; None on a Unix socket.
    pub peer: Option<IpAddr>,
    /// It came over TLS, or a trusted proxy says that it did.
    pub secure: bool,
}

/// What a request costs beside its bytes while it is answered: the buffers of the call to the runtime, and the answer.
const ANSWER_WEIGHT: usize = 32 * 1024;

impl Request {
    /// The memory that it needs until it is answered. The JSON for the runtime takes at most twice the bytes of the body: the
    /// same text, in a buffer that doubles.
    pub fn weight(&self) -> usize {
        self.head.weight() + 3 * self.body.as_ref().map_or(0, Vec::capacity) + ANSWER_WEIGHT
    }
}

/// The bytes of a token, such as a method or a header's name (RFC 9110, 5.6.2).
fn is_token_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// HTTP that can't be parsed or framed safely; the text tells a person what is wrong with it.
#[derive(Debug, PartialEq, Eq)]
pub struct Malformed(pub &'static str);
