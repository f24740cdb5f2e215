//! Reads requests off a connection, whatever the pieces are in which the bytes come.

use std::mem;

use super::body::{Body, Progress};
use super::{Head, MAX_HEAD, Malformed, Request};

/// The reader of one connection. It knows of no socket, so whom a request comes from is for others to say. After an error, or a request whose body was too large, where the next
/// request begins is unknown: the connection has to end.
#[derive(Default)]
pub struct Reader {
    state: State,
    /// A client waits for `100 Continue` and was not told yet.
    continue_due: bool,
}

enum State {
    /// The bytes of a head that has not ended yet; none between two requests.
    Head(Vec<u8>),
    Body(Head, Body),
}

impl Default for State {
    fn default() -> Self {
        Self::Head(Vec::new())
    }
}

impl Reader {
    /// Takes bytes off the front of `input` until a request is complete or the input is used up.
    pub fn push(&mut self, input: &mut &[u8]) -> Result<Option<Request>, Malformed> {
        if let State::Head(start) = &mut self.state {
            let Some(head) = read_head(start, input)? else {
                return Ok(None);
            };
            let Some(body) = Body::new(head.framing) else {
                self.state = State::default();
                return Ok(Some(Request { head, body: None, peer: None, proxied: false, secure: false }));
            };
            self.continue_due = head.expects_continue;
            self.state = State::Body(head, body);
        }
        let State::Body(_, body) = &mut self.state else {
            unreachable!("the head was just replaced");
        };
        let progress = body.push(input)?;
        if progress == Progress::Incomplete {
            return Ok(None);
        }
        // Whoever has sent the whole body does not wait for leave to send it.
        self.continue_due = false;
        let State::Body(head, body) = mem::take(&mut self.state) else {
            unreachable!("the state was a body a moment ago");
        };
        let body = (progress == Progress::Complete).then(|| body.into_content());
        Ok(Some(Request { head, body, peer: None, proxied: false, secure: false }))
    }

    /// Whether no byte of a next request has come.
    pub fn is_between_requests(&self) -> bool {
        matches!(&self.state, State::Head(start) if start.is_empty())
    }

    /// Whether `100 Continue` has to be sent now; it is asked once.
    pub fn take_continue(&mut self) -> bool {
        mem::take(&mut self.continue_due)
    }

    /// The memory that an incomplete request holds.
    pub fn weight(&self) -> usize {
        match &self.state {
            State::Head(start) => start.capacity(),
            State::Body(head, body) => head.weight() + body.weight(),
        }
    }
}

/// Takes a head off the front of `input`; what is left of an incomplete one is kept in `start`.
fn read_head(start: &mut Vec<u8>, input: &mut &[u8]) -> Result<Option<Head>, Malformed> {
    if start.is_empty() {
        // RFC 9112, 2.2: empty lines before a request line are passed over.
        let blank = input.iter().take_while(|b| matches!(b, b'\r' | b'\n')).count();
        *input = &input[blank..];
        // Most heads come whole: they are parsed where they lie.
        if let Some(end) = head_end(input, 0) {
            return cut_head(input, end);
        }
    }
    // Only what is new is searched, so that a head sent byte by byte costs no more than one sent whole.
    let searched = start.len();
    let taken = input.len().min(MAX_HEAD + 1 - searched);
    start.extend_from_slice(&input[..taken]);
    match head_end(start, searched) {
        Some(end) => {
            *input = &input[end - searched..];
            let whole = mem::take(start);
            cut_head(&mut whole.as_slice(), end)
        }
        None if start.len() > MAX_HEAD => Err(TOO_LONG),
        None => {
            *input = &input[taken..];
            Ok(None)
        }
    }
}

const TOO_LONG: Malformed = Malformed("The head of the request is larger than 16 KiB.");

fn cut_head(input: &mut &[u8], end: usize) -> Result<Option<Head>, Malformed> {
    if end > MAX_HEAD {
        return Err(TOO_LONG);
    }
    let (head, rest) = input.split_at(end);
    *input = rest;
    Head::parse(head).map(Some)
}

/// The length of the head that ends in `bytes`, where nothing before `from` ends one. A line feed alone
/// counts as the end of a line here, so that it is refused at once and not waited on.
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
    const TWO: &str =
        "POST /b HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n6\r\nsecond\r\n0\r\nX: y\r\n\r\n";
    const THREE: &str = "GET /c HTTP/1.1\r\nHost: h\r\n\r\n";

    /// A request's path and body.
    type Found = (String, Option<Vec<u8>>);

    /// Reads everything that `wire` holds, in pieces of a size.
    fn read(wire: &[u8], size: usize) -> Result<Vec<Found>, Malformed> {
        let mut reader = Reader::default();
        let mut found = Vec::new();
        for piece in wire.chunks(size) {
            let mut input = piece;
            while !input.is_empty() {
                if let Some(request) = reader.push(&mut input)? {
                    found.push((request.head.path().to_owned(), request.body));
                }
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
            assert_eq!(read(wire.as_bytes(), size).expect("four good requests"), whole, "{size}");
        }
    }

    #[test]
    fn a_head_has_a_bound() {
        let with = |value: usize| format!("GET / HTTP/1.1\r\nHost: h\r\nX: {}\r\n\r\n", "a".repeat(value));
        let room = MAX_HEAD - with(0).len();
        for size in [1, 1000, MAX_HEAD * 2] {
            assert_eq!(read(with(room).as_bytes(), size).expect("a head of 16 KiB").len(), 1);
            assert_eq!(read(with(room + 1).as_bytes(), size), Err(TOO_LONG));
        }
        let mut reader = Reader::default();
        let endless = vec![b'a'; MAX_HEAD * 4];
        assert!(reader.push(&mut endless.as_slice()).is_err_and(|e| e == TOO_LONG));
        assert!(reader.weight() <= MAX_HEAD * 2, "an endless head should not be kept");
    }

    #[test]
    fn a_body_too_large_needs_no_byte_of_it() {
        let mut reader = Reader::default();
        let mut input = &b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 10000000000000\r\n\r\nabc"[..];
        let request = reader.push(&mut input).expect("well framed").expect("complete");
        assert!(request.body.is_none());
    }

    #[test]
    fn leave_to_send_is_asked_for_once_and_only_while_waiting() {
        let head = "POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n";
        let mut reader = Reader::default();
        assert!(reader.push(&mut head.as_bytes()).expect("well framed").is_none());
        assert!(reader.take_continue());
        assert!(!reader.take_continue());
        assert!(reader.push(&mut &b"{}"[..]).expect("well framed").is_some());
        let mut whole = head.to_owned() + "{}";
        assert!(reader.push(&mut whole.as_bytes()).expect("well framed").is_some());
        assert!(!reader.take_continue());
        whole = head.replace("Length: 2", "Length: 2000000");
        assert!(reader.push(&mut whole.as_bytes()).expect("well framed").is_some());
        assert!(!reader.take_continue());
    }

    #[test]
    fn a_lone_line_feed_is_refused_at_once() {
        for wire in ["GET / HTTP/1.1\nHost: h\n\n", "GET / HTTP/1.1\r\nHost: h\r\n\n", "GET /\n\r\n"] {
            assert!(Reader::default().push(&mut wire.as_bytes()).is_err(), "{wire:?}");
        }
    }
}
