//! An answer, from its bytes as they come.

use super::CallError;
use crate::http::body::{Body, Framing, Progress};
use crate::http::{MAX_HEAD, MAX_HEADERS};

/// An answer whose every byte has come.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub body: Vec<u8>,
}

/// Takes the bytes of one answer.
pub(super) struct Reader {
    limit: usize,
    part: Part,
}

enum Part {
    /// What has come of the head.
    Head(Vec<u8>),
    Body(Head, Body),
    /// A body that ends with the connection.
    Rest(Head, Vec<u8>),
}

struct Head {
    status: u16,
    is_kept: bool,
}

/// How the head says that the body ends.
enum End {
    Framed(Framing),
    Closed,
}

impl Reader {
    pub fn new(limit: usize) -> Self {
        Self { limit, part: Part::Head(Vec::new()) }
    }

    /// The answer, once it is whole, and whether its connection can be used again.
    pub fn push(&mut self, mut input: &[u8]) -> Result<Option<(Answer, bool)>, CallError> {
        while let Part::Head(bytes) = &mut self.part {
            bytes.extend_from_slice(input);
            let Some((length, head, end)) = read_head(bytes)? else {
                return if bytes.len() > MAX_HEAD { Err(broken("its head is too long")) } else { Ok(None) };
            };
            // The bytes of the body that came with the head.
            let came = bytes.len() - length;
            input = &input[input.len() - came..];
            if (100..200).contains(&head.status) {
                // It only tells that the answer is on its way.
                bytes.clear();
                continue;
            }
            self.part = match end {
                End::Framed(framing) => {
                    let body = Body::new(framing, self.limit).ok_or(CallError::TooLarge)?;
                    Part::Body(head, body)
                }
                End::Closed => Part::Rest(head, Vec::new()),
            };
        }
        match &mut self.part {
            Part::Body(head, body) => match body.push(&mut input).map_err(|malformed| broken(malformed.0))? {
                Progress::Incomplete => Ok(None),
                Progress::TooLarge => Err(CallError::TooLarge),
                Progress::Complete => {
                    let answer = Answer { status: head.status, body: body.take_content() };
                    // What comes after an answer that is whole is no answer to anything.
                    Ok(Some((answer, head.is_kept && input.is_empty())))
                }
            },
            Part::Rest(_, body) if body.len() + input.len() > self.limit => Err(CallError::TooLarge),
            Part::Rest(_, body) => {
                body.extend_from_slice(input);
                Ok(None)
            }
            Part::Head(_) => Ok(None),
        }
    }

    /// The server has closed the connection.
    pub fn end(self) -> Result<(Answer, bool), CallError> {
        match self.part {
            Part::Rest(Head { status, .. }, body) => Ok((Answer { status, body }, false)),
            Part::Head(_) | Part::Body(..) => Err(broken("the connection was closed before its end")),
        }
    }
}

/// The head, if it is whole, with its length and how the body ends.
fn read_head(bytes: &[u8]) -> Result<Option<(usize, Head, End)>, CallError> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut response = httparse::Response::new(&mut headers);
    let length = match response.parse(bytes) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(error) => return Err(broken(&format!("it is no HTTP: {error}"))),
    };
    let status = response.code.ok_or_else(|| broken("it has no status"))?;
    let values = |name: &'static str| {
        let named = response.headers.iter().filter(move |header| header.name.eq_ignore_ascii_case(name));
        named.map(|header| header.value.trim_ascii())
    };
    let says = |word: &str| {
        let mut words = values("connection").flat_map(|value| value.split(|&byte| byte == b','));
        words.any(|said| said.trim_ascii().eq_ignore_ascii_case(word.as_bytes()))
    };
    let is_kept = if response.version == Some(1) { !says("close") } else { says("keep-alive") };
    let end = if status == 204 || status == 304 || (100..200).contains(&status) {
        End::Framed(Framing::Length(0))
    } else if let Some(coding) = values("transfer-encoding").next() {
        if !coding.eq_ignore_ascii_case(b"chunked") || values("transfer-encoding").nth(1).is_some() {
            return Err(broken("its transfer-encoding is not known"));
        }
        End::Framed(Framing::Chunked)
    } else {
        let mut lengths = values("content-length").map(read_length);
        match lengths.next() {
            None => End::Closed,
            Some(first) if lengths.all(|other| other == first) => {
                End::Framed(Framing::Length(first.ok_or_else(|| broken("its length is no number"))?))
            }
            Some(_) => return Err(broken("it has two lengths")),
        }
    };
    Ok(Some((length, Head { status, is_kept }, end)))
}

fn read_length(value: &[u8]) -> Option<u64> {
    let digits = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
    digits.then(|| str::from_utf8(value).ok()?.parse().ok())?
}

fn broken(what: &str) -> CallError {
    CallError::Broken(what.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads an answer at once and then byte by byte; both must agree.
    fn read(wire: &str) -> Result<(Answer, bool), CallError> {
        let [at_once, in_bytes] = [wire.len(), 1].map(|size| {
            let mut reader = Reader::new(16);
            for piece in wire.as_bytes().chunks(size.max(1)) {
                if let Some(whole) = reader.push(piece)? {
                    return Ok(whole);
                }
            }
            reader.end()
        });
        let shown = |outcome: &Result<(Answer, bool), CallError>| format!("{outcome:?}");
        assert_eq!(shown(&at_once), shown(&in_bytes), "{wire:?}");
        at_once
    }

    #[test]
    fn answers() {
        for (wire, status, body, is_kept) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", 200, "ok", true),
            ("HTTP/1.1 200 OK\r\ncontent-length: 2\r\nContent-Length: 2\r\n\r\nok", 200, "ok", true),
            ("HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n", 500, "", true),
            ("HTTP/1.1 204 None\r\n\r\n", 204, "", true),
            ("HTTP/1.1 200 OK\r\nconnection: x, Close\r\ncontent-length: 2\r\n\r\nok", 200, "ok", false),
            ("HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok", 200, "ok", false),
            ("HTTP/1.0 200 OK\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nok", 200, "ok", true),
            ("HTTP/1.1 200 OK\r\n\r\nto the end", 200, "to the end", false),
            (
                "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2;x=y\r\nok\r\n1\r\n!\r\n0\r\nx: y\r\n\r\n",
                200,
                "ok!",
                true,
            ),
            (
                "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nx: y\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
                200,
                "ok",
                true,
            ),
        ] {
            let (answer, kept) = read(wire).expect(wire);
            assert_eq!(
                (answer.status, str::from_utf8(&answer.body), kept),
                (status, Ok(body), is_kept),
                "{wire:?}"
            );
        }
        let mut reader = Reader::new(16);
        let whole =
            reader.push(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1").expect("an answer");
        assert!(whole.is_some_and(|(_, is_kept)| !is_kept), "what follows is not asked for");
    }

    #[test]
    fn what_is_none() {
        for wire in [
            "",
            "HTTP/1.1 200 OK\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok",
            "HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nok",
            "HTTP/1.1 200 OK\r\ncontent-length: -2\r\n\r\nok",
            "HTTP/1.1 200 OK\r\ncontent-length: +2\r\n\r\nok",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nok",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nx\r\n",
            "HTTP/2 200\r\n\r\n",
            "SSH-2.0-OpenSSH\r\n\r\n",
        ] {
            assert!(matches!(read(wire), Err(CallError::Broken(_))), "{wire:?}");
        }
        let long = format!("HTTP/1.1 200 OK\r\nx: {}", "y".repeat(MAX_HEAD));
        assert!(matches!(Reader::new(16).push(long.as_bytes()), Err(CallError::Broken(_))));
        for wire in [
            "HTTP/1.1 200 OK\r\ncontent-length: 17\r\n\r\n",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n11\r\n",
            "HTTP/1.1 200 OK\r\n\r\n12345678901234567",
        ] {
            assert!(matches!(read(wire), Err(CallError::TooLarge)), "{wire:?}");
        }
    }
}
