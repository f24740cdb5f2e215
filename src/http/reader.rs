//! Reads requests from a connection, whatever pieces the bytes arrive in.

use std::mem;

use httparse::Status;

use super::head::{self, MAX_HEADERS};
use super::{ClientInfo, Framing, MAX_BODY, MAX_HEAD, Malformed, Request, RequestHead};

/// Empty lines that may come before a request (RFC 9112, 2.2).
const MAX_EMPTY_LINES: u8 = 2;

/// The most bytes of a chunked body that are not content: sizes, extensions and trailers.
const MAX_OVERHEAD: usize = 16 * 1024;

/// A buffer of this size or more grows at least by it, so that a body sent byte by byte is not
/// copied for every byte. A smaller one doubles.
const LEAST_GROWTH: usize = 4 * 1024;

/// The reader of one connection. It knows of no socket, so the caller adds the address that a
/// request comes from. After an error, or a request whose body is too large, the beginning of the
/// next request is unknown: the connection has to end.
#[derive(Default)]
pub struct Reader {
    /// The bytes that have come since the last request or the last complete head. A body is decoded
    /// in place. Between two requests the buffer is empty and holds no memory.
    buffer: Vec<u8>,
    /// The bytes of an incomplete head in which a line feed was looked for.
    searched: usize,
    /// The empty lines that came before the head.
    empty_lines: u8,
    /// The head of the request whose body is being read. A box, because most connections are idle.
    current: Option<Box<(RequestHead, ChunkDecoder)>>,
    /// A client waits for `100 Continue`, which was not sent yet.
    continue_due: bool,
}

/// The result of reading some bytes.
#[expect(
    clippy::large_enum_variant,
    reason = "a request is moved once, to its box"
)]
pub enum ReadStep {
    /// More bytes are needed.
    More,
    /// The head is complete. The next step reads the body, unless [`Reader::refuse`] ends the
    /// request.
    Head,
    Request(Request),
}

/// The state of a body. If it is complete, the buffer begins with this many bytes of content.
enum BodyProgress {
    Incomplete,
    Complete(usize),
    TooLarge,
}

impl Reader {
    /// Takes what the socket gave. The buffer grows by a quarter and not to twice its size, and to
    /// no more than a body needs: what is allocated counts against the limit for all clients. A
    /// length that a head declares allocates nothing: the client may never send as much.
    pub fn append(&mut self, bytes: &[u8]) {
        let (length, capacity) = (self.buffer.len(), self.buffer.capacity());
        if bytes.len() > capacity - length {
            let framing = self.current.as_deref().map(|(head, _)| head.framing);
            let most = match framing {
                Some(Framing::Length(declared)) => declared as usize,
                Some(Framing::Chunked) | None => MAX_BODY,
            };
            let growth = capacity.min(LEAST_GROWTH).max(capacity / 4);
            let growth = growth.min(most.saturating_sub(length));
            self.buffer.reserve_exact(growth.max(bytes.len()));
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// Advances until a head or a request is complete or more bytes are needed.
    pub fn step(&mut self) -> Result<ReadStep, Malformed> {
        if self.current.is_none() {
            return self.read_head();
        }
        let body = match self.read_body()? {
            BodyProgress::Incomplete => return Ok(ReadStep::More),
            BodyProgress::Complete(length) => Some(length),
            BodyProgress::TooLarge => None,
        };
        let (head, body) = self.end_request(body);
        Ok(ReadStep::Request(Request {
            head,
            body,
            client: ClientInfo::default(),
        }))
    }

    /// The head that was read last, until its request is complete.
    pub fn head(&self) -> &RequestHead {
        let current = self.current.as_deref();
        current
            .map(|(head, _)| head)
            .expect("only a complete head is asked for")
    }

    /// Ends the request whose head was just read. Returns the head, and whether all of the body had
    /// come and is skipped. If not, the connection has to end.
    pub fn refuse(&mut self) -> (RequestHead, bool) {
        let length = match self.read_body() {
            Ok(BodyProgress::Complete(length)) => Some(length),
            _ => None,
        };
        let (head, body) = self.end_request(length);
        (head, body.is_some())
    }

    /// Returns true if no byte of a next request has come.
    pub fn is_between_requests(&self) -> bool {
        self.current.is_none() && self.buffer.is_empty()
    }

    /// Returns true if `100 Continue` has to be sent now, once per request.
    pub fn take_continue(&mut self) -> bool {
        mem::take(&mut self.continue_due)
    }

    /// The memory that it holds.
    pub fn held_bytes(&self) -> usize {
        let head = self.current.as_deref();
        self.buffer.capacity() + head.map_or(0, |(head, _)| head.held_bytes())
    }

    fn read_head(&mut self) -> Result<ReadStep, Malformed> {
        loop {
            match self.buffer[..] {
                [] | [b'\r'] => return Ok(ReadStep::More),
                [b'\r', b'\n', ..] if self.empty_lines < MAX_EMPTY_LINES => {
                    self.empty_lines += 1;
                    self.cut(2);
                }
                [b'\r', b'\n', ..] => {
                    return Err(Malformed(
                        "More than two empty lines come before the request.",
                    ));
                }
                [b'\r' | b'\n', ..] => {
                    return Err(Malformed(
                        "A line before the request does not end in CR and LF.",
                    ));
                }
                _ => break,
            }
        }
        head::check_beginning(&self.buffer)?;
        // Only a new line feed can complete a line: a head sent byte by byte is parsed once for
        // each line, not for each byte.
        let has_new_line = self.buffer[self.searched..].contains(&b'\n');
        self.searched = self.buffer.len();
        if !has_new_line && self.buffer.len() <= MAX_HEAD {
            return Ok(ReadStep::More);
        }
        let Some(head) = RequestHead::read(&self.buffer)? else {
            return Ok(ReadStep::More);
        };
        self.cut(head.length);
        self.searched = 0;
        self.empty_lines = 0;
        self.continue_due = head.expects_continue;
        self.current = Some(Box::new((head, ChunkDecoder::default())));
        Ok(ReadStep::Head)
    }

    fn read_body(&mut self) -> Result<BodyProgress, Malformed> {
        let current = self.current.as_deref_mut();
        let (head, chunks) = current.expect("a body follows a head");
        match head.framing {
            Framing::Length(length) if length > MAX_BODY as u64 => Ok(BodyProgress::TooLarge),
            Framing::Length(length) if length > self.buffer.len() as u64 => {
                Ok(BodyProgress::Incomplete)
            }
            Framing::Length(length) => Ok(BodyProgress::Complete(length as usize)),
            Framing::Chunked => chunks.decode(&mut self.buffer),
        }
    }

    /// Separates the content, if it is complete, from the bytes of the next request.
    fn end_request(&mut self, length: Option<usize>) -> (RequestHead, Option<Vec<u8>>) {
        // A client that has sent the whole body does not wait for 100 Continue, and one that is
        // refused does not get it.
        self.continue_due = false;
        let current = self.current.take();
        let (head, _) = *current.expect("only a complete head is taken");
        let mut buffer = mem::take(&mut self.buffer);
        let body = length.map(|length| {
            self.buffer = buffer[length..].to_vec();
            buffer.truncate(length);
            buffer.shrink_to_fit();
            buffer
        });
        (head, body)
    }

    /// Removes bytes from the front of the buffer.
    fn cut(&mut self, length: usize) {
        self.buffer.drain(..length);
        if self.buffer.is_empty() {
            self.buffer = Vec::new();
        }
    }
}

/// Decodes a chunked body (RFC 9112, 7.1). Its lines must end in CR LF: a lenient decoder here is
/// how requests are smuggled.
#[derive(Default)]
struct ChunkDecoder {
    next: ChunkPart,
    /// The bytes of content, with which the buffer begins.
    content: usize,
    /// The bytes of an incomplete line, or of the trailers, in which a line feed was looked for.
    searched: usize,
    /// Bytes of the chunked coding that were not content.
    overhead: usize,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum ChunkPart {
    #[default]
    Size,
    /// This many bytes of content.
    Data(usize),
    DataEnd,
    Trailers,
    End,
}

impl ChunkDecoder {
    /// Moves the content in `buffer` to its front, and removes what is decoded behind it.
    fn decode(&mut self, buffer: &mut Vec<u8>) -> Result<BodyProgress, Malformed> {
        let mut decoded = self.content;
        let progress = loop {
            let rest = &buffer[decoded..];
            match self.next {
                ChunkPart::End => break BodyProgress::Complete(self.content),
                ChunkPart::Data(size) if size > MAX_BODY - self.content => {
                    break BodyProgress::TooLarge;
                }
                ChunkPart::Data(size) => {
                    let taken = size.min(rest.len());
                    buffer.copy_within(decoded..decoded + taken, self.content);
                    self.content += taken;
                    decoded += taken;
                    if taken < size {
                        self.next = ChunkPart::Data(size - taken);
                        break BodyProgress::Incomplete;
                    }
                    self.next = ChunkPart::DataEnd;
                }
                ChunkPart::Size | ChunkPart::DataEnd | ChunkPart::Trailers => {
                    let found = self.next_part(rest)?;
                    let length = found.map_or(rest.len(), |(length, _)| length);
                    if self.overhead + length > MAX_OVERHEAD {
                        return Err(Malformed(
                            "The chunk sizes, extensions and trailers of the body are longer than 16 KiB.",
                        ));
                    }
                    let Some((length, next)) = found else {
                        self.searched = rest.len();
                        break BodyProgress::Incomplete;
                    };
                    self.searched = 0;
                    self.overhead += length;
                    decoded += length;
                    self.next = next;
                }
            }
        };
        buffer.drain(self.content..decoded);
        Ok(progress)
    }

    /// Reads anything but data. Returns its length and what follows; `None` if it is not complete.
    fn next_part(&self, rest: &[u8]) -> Result<Option<(usize, ChunkPart)>, Malformed> {
        const MALFORMED: Malformed = Malformed("The chunked body is malformed.");
        if self.next == ChunkPart::DataEnd {
            return match rest {
                [b'\r', b'\n', ..] => Ok(Some((2, ChunkPart::Size))),
                [] | [b'\r'] => Ok(None),
                _ => Err(MALFORMED),
            };
        }
        let new = &rest[self.searched..];
        let Some(line_feed) = new.iter().position(|&byte| byte == b'\n') else {
            return Ok(None);
        };
        if self.next == ChunkPart::Size {
            let line = &rest[..=self.searched + line_feed];
            return match parse_chunk_size(line).ok_or(MALFORMED)? {
                0 => Ok(Some((line.len(), ChunkPart::Trailers))),
                size => Ok(Some((line.len(), ChunkPart::Data(size)))),
            };
        }
        let mut trailers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let (length, found) = match httparse::parse_headers(rest, &mut trailers) {
            Ok(Status::Complete((length, _))) => (length, Some((length, ChunkPart::End))),
            Ok(Status::Partial) => (rest.len(), None),
            Err(_) => return Err(MALFORMED),
        };
        if head::has_bare_line_feed(&rest[..length]) {
            return Err(MALFORMED);
        }
        Ok(found)
    }
}

/// The size in the line before a chunk, the first line feed included. `httparse` skips extensions,
/// whatever they are. It also takes a line without a size, white space that no extension follows,
/// and a line feed in an extension.
fn parse_chunk_size(line: &[u8]) -> Option<usize> {
    let is_sound = line.first()?.is_ascii_hexdigit()
        && !line.ends_with(b" \r\n")
        && !line.ends_with(b"\t\r\n");
    match httparse::parse_chunk_size(line) {
        Ok(Status::Complete((_, size))) if is_sound => Some(size.try_into().unwrap_or(usize::MAX)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOO_LONG: Malformed = Malformed("The head of the request is larger than 16 KiB.");

    const ONE: &str = "POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nfirst";
    const TWO: &str = "POST /b HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n6\r\nsecond\r\n0\r\nX: y\r\n\r\n";
    const THREE: &str = "GET /c HTTP/1.1\r\nHost: h\r\n\r\n";

    /// A request's path and body.
    type Found = (String, Option<Vec<u8>>);

    /// Appends what has come, and returns the next complete request.
    fn next(reader: &mut Reader, input: &[u8]) -> Result<Option<Request>, Malformed> {
        reader.append(input);
        loop {
            match reader.step()? {
                ReadStep::More => return Ok(None),
                ReadStep::Head => {}
                ReadStep::Request(request) => return Ok(Some(request)),
            }
        }
    }

    /// Returns true if one of the pieces of a size is refused.
    fn is_refused(wire: &[u8], size: usize) -> bool {
        let mut reader = Reader::default();
        wire.chunks(size)
            .any(|piece| next(&mut reader, piece).is_err())
    }

    /// Reads everything that `wire` holds, in pieces of a size.
    fn read(wire: &[u8], size: usize) -> Result<Vec<Found>, Malformed> {
        let mut reader = Reader::default();
        let mut found = Vec::new();
        for mut piece in wire.chunks(size) {
            while let Some(request) = next(&mut reader, mem::take(&mut piece))? {
                found.push((request.head.path().to_owned(), request.body));
                if found.last().is_some_and(|(_, body)| body.is_none()) {
                    // The connection has to end.
                    return Ok(found);
                }
            }
        }
        assert!(reader.is_between_requests());
        assert_eq!(
            reader.held_bytes(),
            0,
            "an idle connection should hold nothing"
        );
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
        for piece in endless.as_bytes()[..MAX_HEAD].chunks(7) {
            assert!(next(&mut reader, piece).is_ok_and(|found| found.is_none()));
        }
        assert!(next(&mut reader, b"a").is_err_and(|error| error == TOO_LONG));
        assert!(
            reader.held_bytes() <= MAX_HEAD * 5 / 4,
            "an endless head should not be kept"
        );
    }

    #[test]
    fn a_body_too_large_needs_no_byte_of_it() {
        let mut reader = Reader::default();
        let input = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 10000000000000\r\n\r\nabc";
        let request = next(&mut reader, input)
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
            next(&mut reader, head.as_bytes())
                .expect("well framed")
                .is_none()
        );
        assert!(reader.take_continue());
        assert!(!reader.take_continue());
        assert!(next(&mut reader, b"{}").expect("well framed").is_some());
        let mut whole = head.to_owned() + "{}";
        assert!(
            next(&mut reader, whole.as_bytes())
                .expect("well framed")
                .is_some()
        );
        assert!(!reader.take_continue());
        whole = head.replace("Length: 2", "Length: 2000000");
        assert!(
            next(&mut reader, whole.as_bytes())
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
            let mut reader = Reader::default();
            reader.append(wire.as_bytes());
            assert!(matches!(reader.step(), Ok(ReadStep::Head)), "{wire:?}");
            let (_, skipped) = reader.refuse();
            assert_eq!(skipped, is_skipped, "{wire:?}");
            assert!(!reader.take_continue());
            if is_skipped {
                let next = next(&mut reader, b"")
                    .expect("well framed")
                    .expect("complete");
                assert_eq!(next.head.path(), "/c", "{wire:?}");
            }
            assert!(reader.is_between_requests());
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
                assert!(is_refused(wire.as_bytes(), size), "{wire:?}");
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
                assert!(is_refused(wire.as_bytes(), size), "{wire:?}");
            }
        }
        let long = format!("GET /{} ", "x".repeat(5000));
        assert!(!is_refused(long.as_bytes(), 7));
        let with_end = long + "\r\n";
        assert!(
            is_refused(with_end.as_bytes(), 7),
            "a long request line is checked at its end too"
        );
    }

    /// Reads a chunked request and what follows it, whole and then byte by byte: the outcome is the
    /// same.
    fn read_chunks(wire: &str) -> Result<Vec<Found>, Malformed> {
        let wire =
            format!("POST /b HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n{wire}");
        let [whole, pieces] = [wire.len(), 1].map(|size| read(wire.as_bytes(), size));
        assert_eq!(whole, pieces, "the pieces should not matter: {wire:?}");
        whole
    }

    #[track_caller]
    fn good(wire: &str, content: &str) {
        let found = read_chunks(&format!("{wire}{THREE}")).expect("the body should be taken");
        let expected = [("/b", content), ("/c", "")]
            .map(|(path, body)| (path.to_owned(), Some(body.as_bytes().to_vec())));
        assert_eq!(found, expected, "{wire:?}");
    }

    #[test]
    fn chunked_bodies_that_are_taken() {
        good("0\r\n\r\n", "");
        good("5\r\nhello\r\n0\r\n\r\n", "hello");
        good("3\r\nhel\r\n002\r\nlo\r\n00\r\n\r\n", "hello");
        good(
            "A\r\n0123456789\r\na\r\n0123456789\r\n0\r\n\r\n",
            "01234567890123456789",
        );
        good("5;name=value\r\nhello\r\n0;last\r\n\r\n", "hello");
        for extensions in [
            ";a",
            ";a;b=c;d",
            "\t;\ta = b ; c",
            ";a=\"\"",
            ";a=\"quo;ted\"",
            ";a = \"\\\"\\\\ é\";b",
            " ; a=b ;c",
            // httparse skips them, whatever they are.
            ";",
            ";;a",
            ";=b",
            ";a=",
            ";a=b=c",
            ";a=b c",
            ";a=\"b",
            ";a=\"b\"c",
            ";a\u{1}",
        ] {
            good(
                &format!("5{extensions}\r\nhello\r\n0{extensions}\r\n\r\n"),
                "hello",
            );
        }
        good(
            "5\r\nhello\r\n0\r\nX-After: y\r\nX-More:\tz z\r\n\r\n",
            "hello",
        );
        good("2\r\n\r\n\r\n0\r\n\r\n", "\r\n");
    }

    #[test]
    fn chunked_bodies_that_are_refused() {
        for wire in [
            "\r\n",
            "zz\r\n",
            "-5\r\n",
            "+5\r\n",
            "0x5\r\n",
            " 5\r\n",
            "5 \r\n",
            "5\n",
            "5 5\r\n",
            "5\rhello\r\n",
            "5\r\r\n",
            "5;a\nhello\r\n",
            "5;a\n\r\n",
            "5;a\rb\r\n",
            "5;a=\"b\nc\"\r\n",
            "5;a \r\n",
            "5;a=b\t\r\n",
            "00000000000000005\r\n",
            "fffffffffffffffff\r\n",
            "5\r\nhelloX",
            "5\r\nhello\n",
            "5\r\nhello\rX",
            "4\r\nhello\r\n",
            "0\r\n: y\r\n\r\n",
            "0\r\nno colon\r\n\r\n",
            "0\r\nX: y\n\r\n",
            "0\r\nX: \0\r\n",
            "0\r\n\n",
            "0\r\n\rX\r\n",
            "0\r\nX: y\r\n\n",
            ";a\r\n",
        ] {
            assert!(read_chunks(wire).is_err(), "{wire:?} was taken");
        }
    }

    #[test]
    fn a_chunked_body_has_a_bound() {
        let chunk = |size: usize| format!("{size:x}\r\n{}\r\n", "x".repeat(size));
        let whole = chunk(MAX_BODY - 1) + &chunk(1);
        good(&format!("{whole}0\r\n\r\n"), &"x".repeat(MAX_BODY));
        for wire in [
            format!("{whole}1\r\n"),
            "40001\r\n".into(),
            "ffffffffffffffff\r\n".into(),
        ] {
            assert_eq!(read_chunks(&wire), Ok(vec![("/b".into(), None)]));
        }
    }

    #[test]
    fn overhead_has_a_bound() {
        let chunk = |extension: usize| format!("1;{}\r\nx\r\n", "e".repeat(extension));
        for wire in [
            format!("5;{}", "x".repeat(MAX_OVERHEAD)),
            "0".repeat(MAX_OVERHEAD + 1),
            format!("0\r\nX: {}", "y".repeat(MAX_OVERHEAD)),
            // It is a bound on the whole body, not on a chunk.
            chunk(MAX_OVERHEAD / 4).repeat(4),
            "1\r\nx\r\n".repeat(MAX_OVERHEAD / 5 + 1),
        ] {
            assert!(read_chunks(&wire).is_err_and(|e| e.0.contains("longer than 16 KiB")));
        }
        let trailers = |count| format!("0\r\n{}\r\n", "X: y\r\n".repeat(count));
        good(&trailers(MAX_HEADERS), "");
        assert!(read_chunks(&trailers(MAX_HEADERS + 1)).is_err());
        let small = "10\r\n0123456789abcdef\r\n".repeat(2_000);
        good(
            &format!("{small}0\r\n\r\n"),
            &"0123456789abcdef".repeat(2_000),
        );
    }

    #[test]
    fn the_buffer_is_little_larger_than_its_content() {
        const BODY: usize = 200_000;
        for size in [1, 1000, 5000, MAX_HEAD] {
            for framing in [
                "Content-Length: 200000\r\n\r\n",
                "Transfer-Encoding: chunked\r\n\r\n30d40\r\n",
            ] {
                let mut reader = Reader::default();
                let head = format!("POST / HTTP/1.1\r\nHost: h\r\n{framing}");
                assert!(next(&mut reader, head.as_bytes()).is_ok_and(|found| found.is_none()));
                assert!(
                    reader.buffer.capacity() < 100,
                    "nothing should be allocated on the word of a header"
                );
                let mut last = None;
                for piece in vec![b'x'; BODY].chunks(size) {
                    last = next(&mut reader, piece).expect("it should be taken");
                    let length = reader.buffer.len();
                    assert!(
                        reader.buffer.capacity() <= length + (length / 4).max(LEAST_GROWTH),
                        "{length}"
                    );
                }
                if framing.ends_with("30d40\r\n") {
                    last = next(&mut reader, b"\r\n0\r\n\r\n").expect("the end");
                }
                let body = last.and_then(|request| request.body).expect("a body");
                assert_eq!((body.len(), body.capacity()), (BODY, BODY), "{framing}");
            }
        }
    }

    #[test]
    fn lengths() {
        let check = |length: u64, expected: Option<Option<Vec<u8>>>| {
            let head = format!("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: {length}\r\n\r\n");
            let found = next(&mut Reader::default(), head.as_bytes()).expect("well framed");
            assert_eq!(found.map(|request| request.body), expected, "{length}");
        };
        check(0, Some(Some(Vec::new())));
        check(1, None);
        check(MAX_BODY as u64, None);
        check(MAX_BODY as u64 + 1, Some(None));
        check(u64::MAX, Some(None));
    }
}
