//! A request's head: the request line and the headers, checked for everything that makes framing
//! unsafe.

use super::body::Framing;
use super::syntax::{Malformed, is_token_byte};

/// The longest method: the longest registered one has 17 letters.
pub(super) const MAX_METHOD: usize = 32;

const MAX_HEADERS: usize = 100;

/// A parsed head. It owns its bytes; the other fields are places in them.
#[derive(Debug)]
pub struct RequestHead {
    bytes: Box<[u8]>,
    method: ByteSpan,
    path: ByteSpan,
    query: ByteSpan,
    authority: ByteSpan,
    host: ByteSpan,
    headers: Vec<(ByteSpan, ByteSpan)>,
    pub framing: Framing,
    /// The client may send another request on this connection.
    pub keep_alive: bool,
    /// To keep the connection, the response needs `Connection: keep-alive`: the client speaks
    /// HTTP/1.0.
    pub needs_keep_alive_header: bool,
    /// The client waits for `100 Continue` before it sends the body.
    pub expects_continue: bool,
}

/// A place in the head's bytes; a head has at most 16 KiB, so 16 bits hold it.
#[derive(Clone, Copy, Debug, Default)]
struct ByteSpan {
    start: u16,
    end: u16,
}

impl RequestHead {
    /// Parses the bytes of a head, its empty line included.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        check_beginning(bytes)?;
        refuse_bare_line_feeds(bytes)?;
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut parsed = httparse::Request::new(&mut headers);
        match parsed.parse(bytes) {
            Ok(httparse::Status::Complete(length)) if length == bytes.len() => {}
            Ok(_) => {
                return Err(Malformed(
                    "The head of the request does not end where it should.",
                ));
            }
            Err(error) => return Err(Malformed(parse_message(error))),
        }
        let method = parsed.method.expect("a complete head should have a method");
        let target = parsed.path.expect("a complete head should have a target");
        let http11 = parsed.version == Some(1);

        let host = read_host(parsed.headers, http11)?;
        let framing = read_framing(parsed.headers, http11)?;
        let (authority, path) = match absolute_form(target) {
            Some((authority, path)) if !authority.is_empty() => (authority, path),
            Some(_) => return Err(Malformed("The request's target names no host.")),
            None => (host, target),
        };
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        let (host, _port) = split_authority(authority).ok_or(Malformed(
            "The host of the request is not a host name with an optional port.",
        ))?;

        let has = |name, token| values(parsed.headers, name).any(|value| has_token(value, token));
        let place = |part: &[u8]| ByteSpan::locate(part, bytes);
        Ok(Self {
            method: place(method.as_bytes()),
            path: place(path.as_bytes()),
            query: place(query.as_bytes()),
            authority: place(authority.as_bytes()),
            host: place(host.as_bytes()),
            headers: parsed
                .headers
                .iter()
                .map(|h| (place(h.name.as_bytes()), place(h.value)))
                .collect(),
            framing,
            keep_alive: (http11 || has("connection", b"keep-alive"))
                && !has("connection", b"close"),
            needs_keep_alive_header: !http11,
            expects_continue: http11 && has("expect", b"100-continue"),
            bytes: bytes.into(),
        })
    }

    pub fn method(&self) -> &str {
        self.text(self.method)
    }

    /// The target's path, without the query.
    pub fn path(&self) -> &str {
        self.text(self.path)
    }

    /// The query: the text after the question mark.
    pub fn query(&self) -> &str {
        self.text(self.query)
    }

    /// The host that the request is for, with the port if one was named.
    pub fn authority(&self) -> &str {
        self.text(self.authority)
    }

    /// The host that the request is for, without the port; an IPv6 address without its brackets.
    pub fn host(&self) -> &str {
        self.text(self.host)
    }

    /// The values of a header, in order; its name in any case.
    pub fn header<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
        self.headers
            .iter()
            .filter(move |(key, _)| self.slice(*key).eq_ignore_ascii_case(name.as_bytes()))
            .map(|(_, value)| self.slice(*value))
    }

    /// The memory that it holds, for the bound on all of it.
    pub fn held_bytes(&self) -> usize {
        self.bytes.len() + self.headers.capacity() * size_of::<(ByteSpan, ByteSpan)>()
    }

    fn slice(&self, span: ByteSpan) -> &[u8] {
        &self.bytes[span.start.into()..span.end.into()]
    }

    fn text(&self, span: ByteSpan) -> &str {
        str::from_utf8(self.slice(span)).expect("what was cut from a str should be one")
    }
}

impl ByteSpan {
    /// Returns the place of `part`, a slice of `whole`, in it.
    fn locate(part: &[u8], whole: &[u8]) -> Self {
        if part.is_empty() {
            return Self::default();
        }
        let start = part.as_ptr().addr() - whole.as_ptr().addr();
        let place = |at: usize| u16::try_from(at).expect("a head should be at most 16 KiB");
        Self {
            start: place(start),
            end: place(start + part.len()),
        }
    }
}

fn values<'a>(headers: &[httparse::Header<'a>], name: &str) -> impl Iterator<Item = &'a [u8]> {
    headers
        .iter()
        .filter(move |header| header.name.eq_ignore_ascii_case(name))
        .map(|header| header.value)
}

/// The value of a header that a request has at most once.
fn single_value<'a>(
    headers: &[httparse::Header<'a>],
    name: &str,
    duplicate: Malformed,
) -> Result<Option<&'a [u8]>, Malformed> {
    let mut values = values(headers, name);
    let value = values.next();
    if values.next().is_some() {
        Err(duplicate)
    } else {
        Ok(value)
    }
}

fn read_host<'a>(headers: &[httparse::Header<'a>], http11: bool) -> Result<&'a str, Malformed> {
    match single_value(
        headers,
        "host",
        Malformed("The request has two Host headers."),
    )? {
        Some(value) => str::from_utf8(value).map_err(|_| Malformed("The Host header is not text.")),
        None if http11 => Err(Malformed("The request has no Host header.")),
        None => Ok(""),
    }
}

fn read_framing(headers: &[httparse::Header<'_>], http11: bool) -> Result<Framing, Malformed> {
    const UNSUPPORTED: Malformed =
        Malformed("The only supported Transfer-Encoding is chunked, and only once.");
    let duplicate = Malformed("The request has two Content-Length headers.");
    let length = single_value(headers, "content-length", duplicate)?
        .map(content_length)
        .transpose()?;
    let coding = single_value(headers, "transfer-encoding", UNSUPPORTED)?;
    match (length, coding) {
        (length, None) => Ok(Framing::Length(length.unwrap_or(0))),
        (_, Some(coding)) if !coding.eq_ignore_ascii_case(b"chunked") => Err(UNSUPPORTED),
        (Some(_), _) => Err(Malformed(
            "The request has both a Content-Length and a Transfer-Encoding.",
        )),
        (None, _) if !http11 => Err(Malformed("HTTP/1.0 does not have Transfer-Encoding.")),
        (None, _) => Ok(Framing::Chunked),
    }
}

/// Refuses bytes that can't begin a request before the head is complete: a client that speaks
/// another protocol may wait for an answer. Returns whether the request line is complete.
pub(super) fn check_beginning(bytes: &[u8]) -> Result<bool, Malformed> {
    let method = bytes
        .iter()
        .take(MAX_METHOD + 1)
        .take_while(|&&byte| is_token_byte(byte))
        .count();
    match bytes.get(method) {
        _ if method > MAX_METHOD => {
            return Err(Malformed(
                "The request's method is longer than 32 characters.",
            ));
        }
        None => return Ok(false),
        Some(b' ') if method > 0 => {}
        // The first byte of a TLS handshake.
        Some(0x16) if method == 0 => {
            return Err(Malformed(
                "This port speaks plain HTTP and not TLS: use http:// in the base address.",
            ));
        }
        Some(_) => {
            return Err(Malformed(
                "The first bytes are not the method of an HTTP request and a space.",
            ));
        }
    }
    let Some(end) = bytes.iter().position(|&byte| byte == b'\n') else {
        return Ok(false);
    };
    let line = &bytes[..=end];
    refuse_bare_line_feeds(line)?;
    let mut parsed = httparse::Request::new(&mut []);
    parsed
        .parse(line)
        .map_err(|error| Malformed(parse_message(error)))?;
    let target = parsed.path.unwrap_or_default();
    if !target
        .bytes()
        .all(|byte| byte.is_ascii_graphic() && byte != b'#')
    {
        return Err(Malformed(
            "The request's target has a fragment or a character that is not ASCII.",
        ));
    }
    Ok(true)
}

/// `httparse` takes a lone line feed for the end of a line. Other parsers do not, and two parsers
/// that disagree on where a request ends are how requests are smuggled past a proxy.
fn refuse_bare_line_feeds(bytes: &[u8]) -> Result<(), Malformed> {
    let mut previous = 0;
    for &byte in bytes {
        if byte == b'\n' && previous != b'\r' {
            return Err(Malformed(
                "A line of the head ends in a line feed without a carriage return.",
            ));
        }
        previous = byte;
    }
    Ok(())
}

fn parse_message(error: httparse::Error) -> &'static str {
    use httparse::Error;
    match error {
        Error::Version => "The HTTP version is neither 1.0 nor 1.1.",
        Error::TooManyHeaders => "The request has more than 100 headers.",
        Error::HeaderName | Error::HeaderValue => "A header of the request is malformed.",
        Error::NewLine | Error::Status | Error::Token => {
            "The request line or a header is malformed."
        }
    }
}

/// A length as RFC 9110 writes it: digits alone. One too large for the type is too large anyway.
fn content_length(value: &[u8]) -> Result<u64, Malformed> {
    if value.is_empty() || !value.iter().all(u8::is_ascii_digit) {
        return Err(Malformed("The Content-Length is not a whole number."));
    }
    let digits = str::from_utf8(value).expect("digits should be text");
    Ok(digits.parse().unwrap_or(u64::MAX))
}

fn has_token(value: &[u8], token: &[u8]) -> bool {
    value
        .split(|&b| b == b',')
        .any(|t| t.trim_ascii().eq_ignore_ascii_case(token))
}

/// Splits `http://host:port/path` into its authority and the rest.
fn absolute_form(target: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = target.split_once("://")?;
    if !scheme.eq_ignore_ascii_case("http") && !scheme.eq_ignore_ascii_case("https") {
        return None;
    }
    Some(rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len())))
}

/// The host and the port of `host`, `host:port` or `[address]:port`; `None` for anything else.
pub fn split_authority(authority: &str) -> Option<(&str, &str)> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (address, port) = rest.split_once(']')?;
            address.parse::<std::net::Ipv6Addr>().ok()?;
            (address, port)
        }
        None => {
            let (host, port) = authority.split_at(authority.find(':').unwrap_or(authority.len()));
            host.bytes().all(is_name_byte).then_some((host, port))?
        }
    };
    let digits = if port.is_empty() {
        port
    } else {
        port.strip_prefix(':')?
    };
    digits
        .bytes()
        .all(|b| b.is_ascii_digit())
        .then_some((host, digits))
}

/// The bytes of a registered name (RFC 3986, 3.2.2).
fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~%!$&'()*+,;=".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(lines: &str) -> Result<RequestHead, Malformed> {
        RequestHead::parse(format!("{}\r\n\r\n", lines.replace('\n', "\r\n")).as_bytes())
    }

    #[track_caller]
    fn good(lines: &str) -> RequestHead {
        parse(lines).unwrap_or_else(|error| panic!("{lines:?} was refused: {error:?}"))
    }

    #[track_caller]
    fn refused(lines: &str, word: &str) {
        match parse(lines) {
            Ok(_) => panic!("{lines:?} was taken"),
            Err(Malformed(text)) => assert!(text.contains(word), "{lines:?}: {text}"),
        }
    }

    #[test]
    fn parts_of_a_head() {
        let head = good("POST /v1/x?a=b?c HTTP/1.1\nHost: API.test:80\nX: 1\nx: 2");
        assert_eq!(
            (head.method(), head.path(), head.host()),
            ("POST", "/v1/x", "API.test")
        );
        assert_eq!((head.query(), head.authority()), ("a=b?c", "API.test:80"));
        assert_eq!(head.header("X").collect::<Vec<_>>(), [b"1", b"2"]);
        assert_eq!(head.header("Y").count(), 0);
        assert!(matches!(head.framing, Framing::Length(0)));
    }

    #[test]
    fn hosts() {
        for (value, host) in [
            ("a.test", "a.test"),
            ("a.test:8080", "a.test"),
            ("a.test:", "a.test"),
            ("127.0.0.1:1", "127.0.0.1"),
            ("[::1]", "::1"),
            ("[::1]:80", "::1"),
            ("", ""),
        ] {
            assert_eq!(good(&format!("GET / HTTP/1.1\nHost: {value}")).host(), host);
        }
        for value in [
            "a b",
            "a.test:x",
            "user@a.test",
            "[::1",
            "[::1]x",
            "[x]",
            "a/b",
            "a.test:1:2",
            "é",
        ] {
            refused(&format!("GET / HTTP/1.1\nHost: {value}"), "host");
        }
        refused("GET / HTTP/1.1", "no Host");
        refused("GET / HTTP/1.1\nHost: a\nhost: a", "two Host");
        refused("GET / HTTP/1.0\nHost: a\nHost: b", "two Host");
        assert_eq!(good("GET / HTTP/1.0").host(), "");
    }

    #[test]
    fn targets() {
        for (target, host, path) in [
            ("/x", "h", "/x"),
            ("/x?y", "h", "/x"),
            ("*", "h", "*"),
            ("http://other.test/x?y", "other.test", "/x"),
            ("HTTPS://other.test:443/x", "other.test", "/x"),
            ("http://other.test", "other.test", ""),
            ("http://other.test?/x", "other.test", ""),
            ("ftp://other.test/x", "h", "ftp://other.test/x"),
            ("/?u=http://other.test/", "h", "/"),
        ] {
            let head = good(&format!("GET {target} HTTP/1.1\nHost: h"));
            assert_eq!((head.host(), head.path()), (host, path), "{target}");
        }
        for target in [
            "/#",
            "/x?y#z",
            "http://other.test/#x",
            "/é",
            "/?é",
            "é",
            "/\u{7f}",
        ] {
            refused(&format!("GET {target} HTTP/1.1\nHost: h"), "");
        }
        refused("GET http:///x HTTP/1.1\nHost: h", "no host");
        refused("GET http://user@h/x HTTP/1.1\nHost: h", "host");
        refused("GET http://h/x HTTP/1.1", "no Host");
    }

    #[test]
    fn framing() {
        let with = |headers: &str| format!("POST / HTTP/1.1\nHost: h\n{headers}");
        for (headers, length) in [
            ("X: y", 0),
            ("Content-Length: 0", 0),
            ("Content-Length: 007", 7),
            ("Content-Length:  7 ", 7),
            ("Content-Length: 99999999999999999999999999", u64::MAX),
        ] {
            match good(&with(headers)).framing {
                Framing::Length(found) => assert_eq!(found, length, "{headers}"),
                Framing::Chunked => panic!("{headers}: chunked"),
            }
        }
        assert!(matches!(
            good(&with("Transfer-Encoding: ChunKed")).framing,
            Framing::Chunked
        ));
        for (headers, word) in [
            ("Content-Length: x", "whole number"),
            ("Content-Length:", "whole number"),
            ("Content-Length: -1", "whole number"),
            ("Content-Length: +1", "whole number"),
            ("Content-Length: 0x1", "whole number"),
            ("Content-Length: 1 1", "whole number"),
            ("Content-Length: 1, 1", "whole number"),
            ("Content-Length: 1\nContent-Length: 1", "two Content-Length"),
            ("Content-Length: 1\nContent-Length: 2", "two Content-Length"),
            ("Content-Length: 1\nTransfer-Encoding: chunked", "both"),
            ("Transfer-Encoding: chunked\nContent-Length: 1", "both"),
            ("Transfer-Encoding: gzip", "chunked"),
            ("Transfer-Encoding: identity", "chunked"),
            ("Transfer-Encoding: gzip, chunked", "chunked"),
            ("Transfer-Encoding: chunked, chunked", "chunked"),
            (
                "Transfer-Encoding: chunked\nTransfer-Encoding: chunked",
                "chunked",
            ),
            ("Transfer-Encoding: \u{b}chunked", "header"),
            ("Transfer-Encoding:", "chunked"),
        ] {
            refused(&with(headers), word);
        }
        refused("POST / HTTP/1.0\nTransfer-Encoding: chunked", "HTTP/1.0");
    }

    #[test]
    fn lines() {
        for (lines, word) in [
            ("GARBAGE", "first bytes"),
            ("GET /", "malformed"),
            ("GET  / HTTP/1.1\nHost: h", "malformed"),
            ("GET / HTTP/1.1 \nHost: h", "malformed"),
            ("GET / HTTP/2.0\nHost: h", "version"),
            ("GET / http/1.1\nHost: h", "version"),
            ("G(T / HTTP/1.1\nHost: h", "first bytes"),
            ("GET / HTTP/1.1\nHost: h\nno colon", "header"),
            ("GET / HTTP/1.1\nHost: h\nX : y", "header"),
            ("GET / HTTP/1.1\nHost: h\n: y", "header"),
            ("GET / HTTP/1.1\nHost: h\nX: y\n folded", "header"),
            ("GET / HTTP/1.1\nHost: h\nX: \0", "header"),
            ("GET / HTTP/1.1\nHost: h\nX: a\rb", "malformed"),
        ] {
            refused(lines, word);
        }
        for bytes in [
            &b"GET / HTTP/1.1\nHost: h\r\n\r\n"[..],
            b"GET / HTTP/1.1\r\nHost: h\n\r\n",
            b"GET / HTTP/1.1\r\nHost: h\r\n\n",
            b"GET / HTTP/1.1\r\nHost: h\n\n",
        ] {
            assert!(
                RequestHead::parse(bytes).is_err_and(|e| e.0.contains("line feed")),
                "{bytes:?}"
            );
        }
        let many = |count: usize| format!("GET / HTTP/1.1\nHost: h{}", "\nX: y".repeat(count - 1));
        good(&many(100));
        refused(&many(101), "100 headers");
    }

    #[test]
    fn what_cannot_begin_a_request_is_refused_at_once() {
        for (bytes, word) in [
            (&b"\x16"[..], "TLS"),
            (b"\x16\x03\x01\x02", "TLS"),
            (b"\0\0\0", "first bytes"),
            (b" GET", "first bytes"),
            (b"SSH-2.0-x\r", "first bytes"),
            (b"SSH-2.0-x\r\n", "first bytes"),
            (b"GE\xc3", "first bytes"),
            (b"GET\t/", "first bytes"),
            (b"GET /\r\n", "malformed"),
            (b"GET / HTTP/0.9\r\n", "version"),
            (b"PRI * HTTP/2.0\r\n", "version"),
            (b"GET / HTTP/1.1\n", "line feed"),
            (b"GET /#x HTTP/1.1\r\n", "fragment"),
            (&[b'A'; 33], "method"),
        ] {
            let found = check_beginning(bytes);
            assert!(
                found.is_err_and(|error| error.0.contains(word)),
                "{bytes:?}"
            );
        }
        for (bytes, complete) in [
            ("G", false),
            ("GET", false),
            ("GET ", false),
            ("GET /a b", false),
            (&"A".repeat(32), false),
            ("GET / HTTP/1.1\r", false),
            ("GET / HTTP/1.1\r\n", true),
            ("GET / HTTP/1.1\r\nHo st", true),
        ] {
            assert_eq!(check_beginning(bytes.as_bytes()), Ok(complete), "{bytes:?}");
        }
    }

    #[test]
    fn connections() {
        for (lines, keep) in [
            ("GET / HTTP/1.1\nHost: h", true),
            ("GET / HTTP/1.1\nHost: h\nConnection: Close", false),
            ("GET / HTTP/1.1\nHost: h\nConnection: x, close", false),
            (
                "GET / HTTP/1.1\nHost: h\nConnection: keep-alive\nConnection: close",
                false,
            ),
            ("GET / HTTP/1.1\nHost: h\nConnection: closed", true),
            ("GET / HTTP/1.0", false),
            ("GET / HTTP/1.0\nConnection: Keep-Alive", true),
            ("GET / HTTP/1.0\nConnection: keep-alive, close", false),
        ] {
            assert_eq!(good(lines).keep_alive, keep, "{lines}");
        }
        assert!(good("GET / HTTP/1.1\nHost: h\nExpect: 100-Continue").expects_continue);
        assert!(!good("GET / HTTP/1.1\nHost: h\nExpect: else").expects_continue);
        assert!(!good("GET / HTTP/1.0\nExpect: 100-continue").expects_continue);
    }
}
