//! The limits of a request, and the bytes and the error that its parsers share.

/// The most bytes of a head, from its request line to its empty line.
pub const MAX_HEAD: usize = 16 * 1024;

/// The most bytes of a body, however it is framed: the specification's 256 KB.
pub const MAX_BODY: usize = 262_144;

/// The bytes of a token, such as a method or a header's name (RFC 9110, 5.6.2).
pub(super) fn is_token_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// HTTP that can't be parsed or framed safely. The text is the message for the client.
#[derive(Debug, PartialEq, Eq)]
pub struct Malformed(pub &'static str);
