//! Responses and their bytes.

use std::io::Write;

use time::OffsetDateTime;
use time::format_description::BorrowedFormatItem;
use time::macros::format_description;

/// A response, before it is known what becomes of its connection.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    pub content_type: &'static str,
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
}

/// What a response says about its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connection {
    /// The default of HTTP/1.1: nothing needs to be said.
    Keep,
    /// As HTTP/1.0 wants to hear it.
    KeepTold,
    Close,
}

/// RFC 9110, 5.6.7.
const HTTP_DATE: &[BorrowedFormatItem<'_>] =
    format_description!("[weekday repr:short], [day] [month repr:short] [year] [hour]:[minute]:[second] GMT");

/// What is sent to a client that waits for leave to send its body.
pub const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

impl Response {
    pub fn json(status: u16, body: Vec<u8>) -> Self {
        Self { status, content_type: "application/json", headers: Vec::new(), body }
    }

    pub fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// The bytes of it; to a HEAD request, those without the body.
    pub fn encode(&self, connection: Connection, without_body: bool) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(512 + self.body.len());
        write!(
            bytes,
            "HTTP/1.1 {} {}\r\ndate: {}\r\ncontent-type: {}\r\ncontent-length: {}\r\n",
            self.status,
            reason(self.status),
            OffsetDateTime::now_utc().format(HTTP_DATE).expect("a date after 1970 should have its text"),
            self.content_type,
            self.body.len()
        )
        .expect("a Vec should take all that is written");
        let mut line = |name: &str, value: &str| {
            for part in [name, ": ", value, "\r\n"] {
                bytes.extend_from_slice(part.as_bytes());
            }
        };
        for (name, value) in &self.headers {
            line(name, value);
        }
        match connection {
            Connection::Keep => {}
            Connection::KeepTold => line("connection", "keep-alive"),
            Connection::Close => line("connection", "close"),
        }
        bytes.extend_from_slice(b"\r\n");
        if !without_body {
            bytes.extend_from_slice(&self.body);
        }
        bytes
    }
}

/// The reason phrase; clients pass over it, people who look at the wire do not.
fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        413 => "Content Too Large",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        _ => "",
    }
}
