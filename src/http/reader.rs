//! Reads requests from a connection, whatever pieces the bytes arrive in.

use std::mem;

use super::body::{Body, BodyProgress};
use super::head::{self, RequestHead};
use super::request::{ClientInfo, Request};
use super::syntax::{MAX_HEAD, Malformed};

/// Empty lines that may come before a request (RFC 9112, 2.2).
const MAX_EMPTY_LINES: u8 = 2;

/// The reader of one connection. It knows of no socket, so the caller adds the address that a
/// request comes from. After an error, or a request whose body is too large, the beginning of the
/// next request is unknown: the connection has to end.
#[derive(Default)]
pub struct Reader {
    state: ReaderState,
    /// A client waits for `100 Continue`, which was not sent yet.
    continue_due: bool,
}

enum ReaderState {
    Head(PartialHead),
    Body(RequestHead, Body),
}

/// The result of reading some bytes.
pub enum ReadStep {
    /// More bytes are needed.
    More,
    /// The head is complete. The next step reads the body, unless [`Reader::refuse`] ends the
    /// request.
    Head,
    Request(Request),
}

/// A head that is not complete.
#[derive(Default)]
struct PartialHead {
    /// Empty between two requests.
    bytes: Vec<u8>,
    /// Bytes of the empty lines before it: a CR is next after an even number.
    empty_lines: u8,
    /// The request line is complete and checked.
    line_checked: bool,
}

impl Default for ReaderState {
    fn default() -> Self {
        Self::Head(PartialHead::default())
    }
}

impl Reader {
    /// Takes bytes off the front of `input` until a head or a request is complete or the input is
    /// used up.
    pub fn push(&mut self, input: &mut &[u8]) -> Result<ReadStep, Malformed> {
        let body = match &mut self.state {
            ReaderState::Head(start) => {
                let Some(head) = start.push(input)? else {
                    return Ok(ReadStep::More);
                };
                let body = Body::new(head.framing);
                self.continue_due = head.expects_continue;
                self.state = ReaderState::Body(head, body);
                return Ok(ReadStep::Head);
            }
            ReaderState::Body(_, body) => body,
        };
        let progress = body.push(input)?;
        if progress == BodyProgress::Incomplete {
            return Ok(ReadStep::More);
        }
        // A client that has sent the whole body does not wait for 100 Continue, and one that is
        // refused does not get it.
        self.continue_due = false;
        let (head, body) = self.take();
        let body = (progress == BodyProgress::Complete).then(|| body.into_content());
        Ok(ReadStep::Request(Request {
            head,
            body,
            client: ClientInfo::default(),
        }))
    }

    /// The head that was read last, until its request is complete.
    pub fn head(&self) -> &RequestHead {
        match &self.state {
            ReaderState::Body(head, _) => head,
            ReaderState::Head(_) => unreachable!("only a complete head is asked for"),
        }
    }

    /// Ends the request whose head was just read. Returns the head, and whether all of the body was
    /// in `input` and is skipped. If not, the connection has to end.
    pub fn refuse(&mut self, input: &mut &[u8]) -> (RequestHead, bool) {
        self.continue_due = false;
        let (head, mut body) = self.take();
        let is_skipped = body.push(input) == Ok(BodyProgress::Complete);
        (head, is_skipped)
    }

    fn take(&mut self) -> (RequestHead, Body) {
        match mem::take(&mut self.state) {
            ReaderState::Body(head, body) => (head, body),
            ReaderState::Head(_) => unreachable!("only a complete head is taken"),
        }
    }

    /// Returns true if no byte of a next request has come.
    pub fn is_between_requests(&self) -> bool {
        matches!(&self.state, ReaderState::Head(start) if start.bytes.is_empty())
    }

    /// Returns true if `100 Continue` has to be sent now, once per request.
    pub fn take_continue(&mut self) -> bool {
        mem::take(&mut self.continue_due)
    }

    /// The memory that an incomplete request holds.
    pub fn held_bytes(&self) -> usize {
        match &self.state {
            ReaderState::Head(start) => start.bytes.capacity(),
            ReaderState::Body(head, body) => head.held_bytes() + body.held_bytes(),
        }
    }
}

impl PartialHead {
    /// Takes a head off the front of `input`, and keeps an incomplete one.
    fn push(&mut self, input: &mut &[u8]) -> Result<Option<RequestHead>, Malformed> {
        if self.bytes.is_empty() {
            self.pass_empty_lines(input)?;
            // Most heads come whole: they are parsed in place.
            if let Some(end) = head_end(input, 0) {
                return cut_head(input, end);
            }
        }
        // Only new bytes are searched: a head sent byte by byte costs no more than one sent at
        // once.
        let searched = self.bytes.len();
        let taken = input.len().min(MAX_HEAD + 1 - searched);
        self.bytes.extend_from_slice(&input[..taken]);
        if let Some(end) = head_end(&self.bytes, searched) {
            *input = &input[end - searched..];
            return cut_head(&mut self.bytes.as_slice(), end);
        }
        let is_check_due = searched <= head::MAX_METHOD || self.bytes[searched..].contains(&b'\n');
        if is_check_due && !self.line_checked {
            self.line_checked = head::check_beginning(&self.bytes)?;
        }
        if self.bytes.len() > MAX_HEAD {
            return Err(TOO_LONG);
        }
        *input = &input[taken..];
        Ok(None)
    }

    fn pass_empty_lines(&mut self, input: &mut &[u8]) -> Result<(), Malformed> {
        while let Some((&byte, rest)) = input.split_first() {
            match (byte, self.empty_lines % 2) {
                (b'\r', 0) | (b'\n', 1) if self.empty_lines < 2 * MAX_EMPTY_LINES => {
                    self.empty_lines += 1
                }
                (b'\r', 0) => {
                    return Err(Malformed(
                        "More than two empty lines come before the request.",
                    ));
                }
                (b'\n', 0) | (_, 1) => {
                    return Err(Malformed(
                        "A line before the request does not end in CR and LF.",
                    ));
                }
                _ => break,
            }
            *input = rest;
        }
        Ok(())
    }
}

const TOO_LONG: Malformed = Malformed("The head of the request is larger than 16 KiB.");

fn cut_head(input: &mut &[u8], end: usize) -> Result<Option<RequestHead>, Malformed> {
    if end > MAX_HEAD {
        // The same error as for a head that comes in pieces.
        head::check_beginning(&input[..=MAX_HEAD])?;
        return Err(TOO_LONG);
    }
    let (head, rest) = input.split_at(end);
    *input = rest;
    RequestHead::parse(head).map(Some)
}

/// The length of the head that ends in `bytes`, where nothing before `from` ends one. A line feed
/// alone counts as the end of a line here, so that it is refused at once and not waited on.
fn head_end(bytes: &[u8], from: usize) -> Option<usize> {
    let mut at = from;
    while let Some(found) = bytes.get(at..)?.iter().position(|&b| b == b'\n') {
        at += found;
        let line = &bytes[..at];
        if line.ends_with(b"\n") || line.ends_with(b"\n\r") {
            return Some(at + 1);
        }
        at += 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nfirst";
    const TWO: &str = "POST /b HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n6\r\nsecond\r\n0\r\nX: y\r\n\r\n";
    const THREE: &str = "GET /c HTTP/1.1\r\nHost: h\r\n\r\n";

    /// A request's path and body.
    type Found = (String, Option<Vec<u8>>);

    /// The next complete request in the input.
    fn next(reader: &mut Reader, input: &mut &[u8]) -> Result<Option<Request>, Malformed> {
        loop {
            match reader.push(input)? {
                ReadStep::More => return Ok(None),
                ReadStep::Head => {}
                ReadStep::Request(request) => return Ok(Some(request)),
            }
        }
    }

    /// Reads everything that `wire` holds, in pieces of a size.
    fn read(wire: &[u8], size: usize) -> Result<Vec<Found>, Malformed> {
        let mut reader = Reader::default();
        let mut found = Vec::new();
        for piece in wire.chunks(size) {
            let mut input = piece;
            while let Some(request) = next(&mut reader, &mut input)? {
                found.push((request.head.path().to_owned(), request.body));
            }
        }
        assert!(reader.is_between_requests());
        Ok(found)
    }

    #[test]
    fn the_pieces_do_not_matter() {
        let wire = format!("{ONE}\r\n{TWO}\r\n\r\n{THREE}{ONE}");
        let whole = read(wire.as_bytes(), wire.len()).expect("four good requests");
        let paths: Vec<_> = whole.iter().map(|(path, _)| path.as_str()).collect();
        assert_eq!(paths, ["/a", "/b", "/c", "/a"]);
        assert_eq!(whole[1].1.as_deref(), Some(&b"second"[..]));
        assert_eq!(whole[2].1.as_deref(), Some(&b""[..]));
        for size in 1..wire.len() {
            assert_eq!(
                read(wire.as_bytes(), size).expect("four good requests"),
                whole,
                "{size}"
            );
        }
    }

    #[test]
    fn a_head_has_a_bound() {
        let with = |value: usize| {
            format!(
                "GET / HTTP/1.1\r\nHost: h\r\nX: {}\r\n\r\n",
                "a".repeat(value)
            )
        };
        let room = MAX_HEAD - with(0).len();
        for size in [1, 1000, MAX_HEAD * 2] {
            assert_eq!(
                read(with(room).as_bytes(), size)
                    .expect("a head of 16 KiB")
                    .len(),
                1
            );
            assert_eq!(read(with(room + 1).as_bytes(), size), Err(TOO_LONG));
        }
        let mut reader = Reader::default();
        let endless = with(MAX_HEAD * 4);
        assert!(
            reader
                .push(&mut &endless.as_bytes()[..MAX_HEAD * 2])
                .is_err_and(|e| e == TOO_LONG)
        );
        assert!(
            reader.held_bytes() <= MAX_HEAD * 2,
            "an endless head should not be kept"
        );
    }

    #[test]
    fn a_body_too_large_needs_no_byte_of_it() {
        let mut reader = Reader::default();
        let mut input =
            &b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 10000000000000\r\n\r\nabc"[..];
        let request = next(&mut reader, &mut input)
            .expect("well framed")
            .expect("complete");
        assert!(request.body.is_none());
    }

    #[test]
    fn leave_to_send_is_asked_for_once_and_only_while_waiting() {
        let head =
            "POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n";
        let mut reader = Reader::default();
        assert!(
            next(&mut reader, &mut head.as_bytes())
                .expect("well framed")
                .is_none()
        );
        assert!(reader.take_continue());
        assert!(!reader.take_continue());
        assert!(
            next(&mut reader, &mut &b"{}"[..])
                .expect("well framed")
                .is_some()
        );
        let mut whole = head.to_owned() + "{}";
        assert!(
            next(&mut reader, &mut whole.as_bytes())
                .expect("well framed")
                .is_some()
        );
        assert!(!reader.take_continue());
        whole = head.replace("Length: 2", "Length: 2000000");
        assert!(
            next(&mut reader, &mut whole.as_bytes())
                .expect("well framed")
                .is_some()
        );
        assert!(!reader.take_continue());
    }

    #[test]
    fn the_body_of_a_refused_request_is_skipped_if_it_is_there() {
        let length =
            "POST /a HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n";
        let chunked = TWO.split_inclusive("\r\n\r\n").next().expect("a head");
        for (head, body, is_skipped) in [
            (THREE, "", true),
            (length, "first", true),
            (length, "firs", false),
            (length, "", false),
            (chunked, "6\r\nsecond\r\n0\r\nX: y\r\n\r\n", true),
            (chunked, "6\r\nsecond\r\n0\r\nX: y\r\n", false),
            (chunked, "nonsense", false),
            (
                &length.replace("Length: 5", "Length: 262145"),
                "first",
                false,
            ),
        ] {
            let wire = format!("{head}{body}{}", if is_skipped { THREE } else { "" });
            let (mut reader, mut input) = (Reader::default(), wire.as_bytes());
            assert!(
                matches!(reader.push(&mut input), Ok(ReadStep::Head)),
                "{wire:?}"
            );
            let (_, skipped) = reader.refuse(&mut input);
            assert_eq!(skipped, is_skipped, "{wire:?}");
            assert!(reader.is_between_requests() && !reader.take_continue());
            if is_skipped {
                let next = next(&mut reader, &mut input)
                    .expect("well framed")
                    .expect("complete");
                assert_eq!(next.head.path(), "/c", "{wire:?}");
            }
        }
    }

    #[test]
    fn a_lone_line_feed_is_refused_at_once() {
        for wire in [
            "GET / HTTP/1.1\nHost: h\n\n",
            "GET / HTTP/1.1\r\nHost: h\r\n\n",
            "GET /\n\r\n",
            "\n",
            "\r\n\n",
            "\rG",
            "\r\r\n",
        ] {
            for size in [1, wire.len()] {
                let mut reader = Reader::default();
                let refused = wire
                    .as_bytes()
                    .chunks(size)
                    .any(|mut piece| reader.push(&mut piece).is_err());
                assert!(refused, "{wire:?}");
            }
        }
    }

    #[test]
    fn two_empty_lines_may_come_before_each_request() {
        for size in [1, 2, 3, 1000] {
            assert_eq!(
                read(format!("\r\n\r\n{THREE}\r\n\r\n{THREE}").as_bytes(), size).map(|r| r.len()),
                Ok(2)
            );
            assert!(read(format!("{THREE}\r\n\r\n\r\n{THREE}").as_bytes(), size).is_err());
        }
    }

    #[test]
    fn a_beginning_is_refused_before_the_head_is_complete() {
        for wire in [
            "\u{16}\u{3}\u{1}",
            "SSH-2.0-x\r\n",
            "GET /\r\n",
            "GET / HTTP/1.1 x\r\nHost: h\r\n",
        ] {
            for size in [1, wire.len()] {
                let mut reader = Reader::default();
                let refused = wire
                    .as_bytes()
                    .chunks(size)
                    .any(|mut piece| reader.push(&mut piece).is_err());
                assert!(refused, "{wire:?}");
            }
        }
        let long = format!("GET /{} ", "x".repeat(5000));
        let mut reader = Reader::default();
        assert!(
            long.as_bytes()
                .chunks(7)
                .all(|mut piece| matches!(reader.push(&mut piece), Ok(ReadStep::More)))
        );
        assert!(
            reader.push(&mut &b"\r\n"[..]).is_err(),
            "a long request line is checked at its end too"
        );
    }
}
