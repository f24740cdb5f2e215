//! A request's head: the request line and the headers, checked for everything that makes framing
//! unsafe.

use std::net::Ipv6Addr;

use ::http::uri::Authority;
use ::http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};
use bytes::Bytes;
use httparse::Status;

use super::{MAX_HEAD, Malformed};

/// The longest method: the longest registered one has 17 letters.
const MAX_METHOD: usize = 32;

/// The most headers of a head, and the most trailers of a body.
pub(super) const MAX_HEADERS: usize = 100;

/// The memory of a header besides its own bytes: its places in the map and the allocator's.
const HEADER_BYTES: usize = 200;

const MALFORMED_LINE: Malformed = Malformed("The request line or a header is malformed.");
const MALFORMED_HEADER: Malformed = Malformed("A header of the request is malformed.");
const MALFORMED_HOST: Malformed =
    Malformed("The host of the request is not a host name with an optional port.");

/// A parsed head.
#[derive(Debug)]
pub struct RequestHead {
    method: Method,
    target: Uri,
    /// Of the target if it is an address, else of the Host header; `None` if that is empty.
    authority: Option<Authority>,
    headers: HeaderMap,
    pub framing: Framing,
    /// The client may send another request on this connection.
    pub keep_alive: bool,
    /// To keep the connection, the response needs `Connection: keep-alive`: the client speaks
    /// HTTP/1.0.
    pub needs_keep_alive_header: bool,
    /// The client waits for `100 Continue` before it sends the body.
    pub expects_continue: bool,
    /// The length on the wire.
    pub(super) length: usize,
}

/// The framing of a body, from its head.
#[derive(Clone, Copy, Debug)]
pub enum Framing {
    Length(u64),
    Chunked,
}

impl RequestHead {
    /// Reads the head that `bytes` begin with; `None` if it is not complete.
    pub(super) fn read(bytes: &[u8]) -> Result<Option<Self>, Malformed> {
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut parsed = httparse::Request::new(&mut headers);
        let within_bound = &bytes[..bytes.len().min(MAX_HEAD)];
        let status = parsed.parse(within_bound).map_err(parse_error)?;
        let length = match status {
            Status::Complete(length) => length,
            Status::Partial => within_bound.len(),
        };
        // `httparse` takes a lone line feed for the end of a line. Other parsers do not, and two
        // parsers that disagree on where a request ends are how requests are smuggled past a proxy.
        if has_bare_line_feed(&bytes[..length]) {
            return Err(Malformed(
                "A line of the head ends in a line feed without a carriage return.",
            ));
        }
        let target = parsed.path.unwrap_or_default();
        if !target
            .bytes()
            .all(|byte| byte.is_ascii_graphic() && byte != b'#')
        {
            return Err(Malformed(
                "The request's target has a fragment or a character that is not ASCII.",
            ));
        }
        match status {
            Status::Complete(_) => Self::from_parsed(&parsed, &bytes[..length]).map(Some),
            Status::Partial if bytes.len() > MAX_HEAD => {
                Err(Malformed("The head of the request is larger than 16 KiB."))
            }
            Status::Partial => Ok(None),
        }
    }

    /// Checks the parts of a complete head, which has these bytes. They are copied once, and all parts
    /// share them: the loop allocates and a worker frees, which costs a lock each time.
    fn from_parsed(parsed: &httparse::Request, bytes: &[u8]) -> Result<Self, Malformed> {
        let copy = Bytes::copy_from_slice(bytes);
        let share = |part: &[u8]| {
            if part.is_empty() {
                return Bytes::new();
            }
            let start = part.as_ptr().addr() - bytes.as_ptr().addr();
            copy.slice(start..start + part.len())
        };
        let method = parsed.method.unwrap_or_default();
        let method = Method::from_bytes(method.as_bytes()).map_err(|_| MALFORMED_LINE)?;
        let http11 = parsed.version == Some(1);
        let mut headers = HeaderMap::with_capacity(parsed.headers.len());
        for header in parsed.headers.iter() {
            let name = HeaderName::from_bytes(header.name.as_bytes());
            let value = HeaderValue::from_maybe_shared(share(header.value));
            let (Ok(name), Ok(value)) = (name, value) else {
                return Err(MALFORMED_HEADER);
            };
            headers.append(name, value);
        }

        let host = read_host(&headers, http11)?;
        let framing = read_framing(&headers, http11)?;
        let target = share(parsed.path.unwrap_or_default().as_bytes());
        let target = Uri::from_maybe_shared(target).map_err(|_| {
            Malformed("The request's target is malformed, or it is an address that names no host.")
        })?;
        let mut named = target.authority().into_iter().chain(&host);
        if named.any(|authority| split_authority(authority).is_none()) {
            return Err(MALFORMED_HOST);
        }

        let has = |name, token| {
            let mut values = headers.get_all(name).iter();
            values.any(|value: &HeaderValue| has_token(value.as_bytes(), token))
        };
        Ok(Self {
            framing,
            keep_alive: (http11 || has("connection", b"keep-alive"))
                && !has("connection", b"close"),
            needs_keep_alive_header: !http11,
            expects_continue: http11 && has("expect", b"100-continue"),
            method,
            authority: target.authority().cloned().or(host),
            target,
            headers,
            length: bytes.len(),
        })
    }

    pub fn method(&self) -> &str {
        self.method.as_str()
    }

    /// The target's path, without the query.
    pub fn path(&self) -> &str {
        self.target.path()
    }

    /// The query: the text after the question mark.
    pub fn query(&self) -> &str {
        self.target.query().unwrap_or_default()
    }

    /// The host that the request is for, with the port if one was named.
    pub fn authority(&self) -> &str {
        self.authority.as_ref().map_or("", Authority::as_str)
    }

    /// The host that the request is for, without the port; an IPv6 address without its brackets.
    pub fn host(&self) -> &str {
        self.authority
            .as_ref()
            .and_then(split_authority)
            .map_or("", |(host, _)| host)
    }

    /// The values of a header, in order; its name in any case.
    pub fn header<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
        self.headers.get_all(name).iter().map(HeaderValue::as_bytes)
    }

    /// The memory that it holds, for the bound on all of it.
    pub fn held_bytes(&self) -> usize {
        self.length + HEADER_BYTES * self.headers.len()
    }
}

/// Refuses bytes that can't begin a request before a line is complete: a client that speaks another
/// protocol may wait for an answer.
pub(super) fn check_beginning(bytes: &[u8]) -> Result<(), Malformed> {
    let method = bytes
        .iter()
        .take(MAX_METHOD + 1)
        .take_while(|&&byte| is_token_byte(byte))
        .count();
    match bytes.get(method) {
        _ if method > MAX_METHOD => Err(Malformed(
            "The request's method is longer than 32 characters.",
        )),
        None => Ok(()),
        Some(b' ') if method > 0 => Ok(()),
        // The first byte of a TLS handshake.
        Some(0x16) if method == 0 => Err(Malformed(
            "This port speaks plain HTTP and not TLS: use http:// in the base address.",
        )),
        Some(_) => Err(Malformed(
            "The first bytes are not the method of an HTTP request and a space.",
        )),
    }
}

/// The bytes of a token, such as a method (RFC 9110, 5.6.2).
fn is_token_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// Returns true if a line feed comes without a carriage return.
pub(super) fn has_bare_line_feed(bytes: &[u8]) -> bool {
    let mut lines = bytes.split_inclusive(|&byte| byte == b'\n');
    lines.any(|line| line.ends_with(b"\n") && !line.ends_with(b"\r\n"))
}

fn parse_error(error: httparse::Error) -> Malformed {
    use httparse::Error;
    match error {
        Error::Version => Malformed("The HTTP version is neither 1.0 nor 1.1."),
        Error::TooManyHeaders => Malformed("The request has more than 100 headers."),
        Error::HeaderName | Error::HeaderValue => MALFORMED_HEADER,
        Error::NewLine | Error::Status | Error::Token => MALFORMED_LINE,
    }
}

/// The value of a header that a request has at most once.
fn single_value<'a>(
    headers: &'a HeaderMap,
    name: &str,
    duplicate: Malformed,
) -> Result<Option<&'a [u8]>, Malformed> {
    let mut values = headers.get_all(name).iter();
    let value = values.next();
    if values.next().is_some() {
        Err(duplicate)
    } else {
        Ok(value.map(HeaderValue::as_bytes))
    }
}

fn read_host(headers: &HeaderMap, http11: bool) -> Result<Option<Authority>, Malformed> {
    let duplicate = Malformed("The request has two Host headers.");
    match single_value(headers, "host", duplicate)? {
        Some(b"") => Ok(None),
        Some(value) => Authority::try_from(value)
            .map(Some)
            .map_err(|_| MALFORMED_HOST),
        None if http11 => Err(Malformed("The request has no Host header.")),
        None => Ok(None),
    }
}

fn read_framing(headers: &HeaderMap, http11: bool) -> Result<Framing, Malformed> {
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

/// The host, an IPv6 address without its brackets, and the digits of the port. `None` for what
/// [`Authority`] takes besides: a user's name, a port that is not a number, and brackets around
/// anything.
pub fn split_authority(authority: &Authority) -> Option<(&str, &str)> {
    let host = authority.host();
    let digits = match authority.as_str().strip_prefix(host)? {
        "" => "",
        port => port.strip_prefix(':')?,
    };
    let bare = match host.strip_prefix('[') {
        Some(address) => address
            .strip_suffix(']')
            .filter(|address| address.parse::<Ipv6Addr>().is_ok())?,
        None => host,
    };
    let is_good = !bare.contains(['[', ']']) && digits.bytes().all(|b| b.is_ascii_digit());
    is_good.then_some((bare, digits))
}

#[cfg(test)]
mod tests {
    use super::*;

    impl RequestHead {
        /// A head that is known to be complete.
        pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
            check_beginning(bytes)?;
            let head = Self::read(bytes)?.expect("a complete head");
            assert_eq!(head.length, bytes.len(), "one head");
            Ok(head)
        }
    }

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
            (":80", ""),
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
            "a.test:+1",
            "@a.test",
            "a.test@",
            "a.test@a.test",
            "user@[::1]",
            "a[b]",
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
            ("http://other.test", "other.test", "/"),
            ("http://other.test?/x", "other.test", "/"),
            ("ftp://other.test/x", "other.test", "/x"),
            ("other.test:443", "other.test", ""),
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
        for (target, word) in [
            ("http:///x", "no host"),
            ("x/y", "target"),
            ("/<", "target"),
            ("http://user@h/x", "host"),
            ("http://h@h:80/x", "host"),
            ("http://h:x/", "host"),
            ("http://[x]/", "host"),
            ("http://a[::1]/", "host"),
            ("http://[::1]a/", "host"),
            ("user@h:80", "host"),
        ] {
            refused(&format!("GET {target} HTTP/1.1\nHost: h"), word);
        }
        refused("GET http://h/x HTTP/1.1", "no Host");
        refused("GET http://h/x HTTP/1.1\nHost: user@h", "host");
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
            b"GET / HTTP/1.1\r\nHost: h\n",
        ] {
            assert!(
                RequestHead::read(bytes).is_err_and(|e| e.0.contains("line feed")),
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
            let found = check_beginning(bytes).and_then(|()| RequestHead::read(bytes));
            assert!(
                found.is_err_and(|error| error.0.contains(word)),
                "{bytes:?}"
            );
        }
        for bytes in [
            "G",
            "GET",
            "GET ",
            "GET /a b",
            &"A".repeat(32),
            "GET / HTTP/1.1\r",
            "GET / HTTP/1.1\r\n",
        ] {
            assert_eq!(check_beginning(bytes.as_bytes()), Ok(()), "{bytes:?}");
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
