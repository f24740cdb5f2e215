//! Responses and their bytes.

use std::io::Write;
use std::sync::Arc;

use ::http::StatusCode;
use jiff::Timestamp;

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
