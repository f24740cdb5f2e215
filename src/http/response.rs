//! Responses and their bytes.

use std::fmt;
use std::io::Write;

use time::OffsetDateTime;
use time::format_description::BorrowedFormatItem;
use time::macros::format_description;

/// A response, without the headers that depend on its connection.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    pub content_type: &'static str,
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
    /// The rest of a body that is too large to be kept in memory.
    pub rest: Option<Box<dyn BodyStream>>,
}

/// The rest of a body, made piece by piece as the client takes it.
pub trait BodyStream: Send {
    /// The next piece, empty if there is nothing to send yet; `None` at the end. After an error the
    /// connection is closed, so that the client knows that something is missing.
    fn next(&mut self) -> Result<Option<Vec<u8>>, BodyStreamError>;
}

/// A piece could not be made; the cause is in the log.
#[derive(Debug)]
pub struct BodyStreamError;

impl fmt::Debug for dyn BodyStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BodyStream(…)")
    }
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
const HTTP_DATE: &[BorrowedFormatItem<'_>] = format_description!(
    "[weekday repr:short], [day] [month repr:short] [year] [hour]:[minute]:[second] GMT"
);

/// For a client that waits for this before it sends its body.
pub const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

impl Response {
    pub fn new(status: u16, content_type: &'static str, body: Vec<u8>) -> Self {
        Self {
            status,
            content_type,
            headers: Vec::new(),
            body,
            rest: None,
        }
    }

    pub fn json(status: u16, body: Vec<u8>) -> Self {
        Self::new(status, "application/json", body)
    }

    pub fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// The bytes of the head and of `body`, without `rest`; for a HEAD request, the head only.
    pub fn encode(&self, connection: ConnectionHeader, without_body: bool) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(512 + self.body.len());
        write!(
            bytes,
            "HTTP/1.1 {} {}\r\n",
            self.status,
            reason(self.status)
        )
        .expect("a Vec should take all that is written");
        let mut line = |name: &str, value: &str| {
            for part in [name, ": ", value, "\r\n"] {
                bytes.extend_from_slice(part.as_bytes());
            }
        };
        line("date", &format_date(OffsetDateTime::now_utc()));
        line("content-type", self.content_type);
        match &self.rest {
            None => line("content-length", &self.body.len().to_string()),
            Some(_) => line("transfer-encoding", "chunked"),
        }
        for (name, value) in &self.headers {
            line(name, value);
        }
        match connection {
            ConnectionHeader::Omitted => {}
            ConnectionHeader::KeepAlive => line("connection", "keep-alive"),
            ConnectionHeader::Close => line("connection", "close"),
        }
        bytes.extend_from_slice(b"\r\n");
        if without_body {
            return bytes;
        }
        match &self.rest {
            None => bytes.extend_from_slice(&self.body),
            Some(_) => bytes.append(&mut chunk(&self.body)),
        }
        bytes
    }
}

fn format_date(time: OffsetDateTime) -> String {
    time.format(HTTP_DATE)
        .expect("a date after 1970 should have its text")
}

/// The end of a body in chunks.
pub const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// A piece as RFC 9112, 7.1 frames it. An empty one has no bytes: they would end the body.
pub fn chunk(piece: &[u8]) -> Vec<u8> {
    if piece.is_empty() {
        return Vec::new();
    }
    let mut bytes = Vec::with_capacity(piece.len() + 16);
    write!(bytes, "{:x}\r\n", piece.len()).expect("a Vec should take all that is written");
    bytes.extend_from_slice(piece);
    bytes.extend_from_slice(b"\r\n");
    bytes
}

/// The reason phrase. Clients ignore it; it helps people who read the traffic.
fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        303 => "See Other",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        413 => "Content Too Large",
        429 => "Too Many Requests",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nothing;

    impl BodyStream for Nothing {
        fn next(&mut self) -> Result<Option<Vec<u8>>, BodyStreamError> {
            Ok(None)
        }
    }

    #[test]
    fn a_body_is_framed_by_its_length_or_in_chunks() {
        let text = |response: &Response, without_body| {
            String::from_utf8(response.encode(ConnectionHeader::Omitted, without_body))
                .expect("a response is text")
        };
        let mut response = Response::new(200, "text/plain", b"0123456789abcdef".to_vec());
        assert!(text(&response, false).contains("content-length: 16\r\n"));
        assert!(text(&response, false).ends_with("\r\n\r\n0123456789abcdef"));
        response.rest = Some(Box::new(Nothing));
        assert!(text(&response, false).contains("transfer-encoding: chunked\r\n"));
        assert!(!text(&response, false).contains("content-length"));
        assert!(text(&response, false).ends_with("\r\n\r\n10\r\n0123456789abcdef\r\n"));
        assert!(text(&response, true).ends_with("chunked\r\n\r\n"));
        response.body.clear();
        assert!(text(&response, false).ends_with("chunked\r\n\r\n"));
        assert_eq!(chunk(b""), b"", "an empty chunk would end the body");
    }

    #[test]
    fn the_date_follows_the_second() {
        let check = |seconds: i64, expected: &str| {
            let time = OffsetDateTime::from_unix_timestamp(seconds).expect("a time");
            assert_eq!(format_date(time), expected);
        };
        check(1_700_000_000, "Tue, 14 Nov 2023 22:13:20 GMT");
        check(1_700_000_001, "Tue, 14 Nov 2023 22:13:21 GMT");
    }
}
