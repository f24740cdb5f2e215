//! The reader of chunked bodies: what it accepts has the same content by another reading of the same bytes.

#![no_main]

use adriaticum::http::MAX_BODY;
use adriaticum::http::body::{Body, Framing, BodyProgress};
use libfuzzer_sys::fuzz_target;

/// The content, and what follows the body. It is more lenient than the reader has to be.
fn decode(mut wire: &[u8]) -> Option<(Vec<u8>, &[u8])> {
    let mut content = Vec::new();
    loop {
        let line = line(&mut wire)?;
        let digits = line.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
        let size = usize::from_str_radix(std::str::from_utf8(&line[..digits]).ok()?, 16).ok()?;
        if size == 0 {
            while !self::line(&mut wire)?.is_empty() {}
            return Some((content, wire));
        }
        content.extend_from_slice(wire.get(..size)?);
        wire = wire[size..].strip_prefix(b"\r\n")?;
    }
}

fn line<'a>(wire: &mut &'a [u8]) -> Option<&'a [u8]> {
    let end = wire.windows(2).position(|pair| pair == b"\r\n")?;
    let line = &wire[..end];
    *wire = &wire[end + 2..];
    Some(line)
}

/// The content, and what follows the body; `None` if it is not complete or not accepted.
fn read(wire: &[u8], size: usize) -> Option<(Vec<u8>, &[u8])> {
    let mut body = Body::new(Framing::Chunked);
    let mut start = 0;
    for piece in wire.chunks(size) {
        let mut input = piece;
        let progress = body.push(&mut input).ok()?;
        assert!(body.held_bytes() <= 2 * MAX_BODY, "it holds {}", body.held_bytes());
        start += piece.len() - input.len();
        match progress {
            BodyProgress::Complete => return Some((body.into_content(), &wire[start..])),
            BodyProgress::TooLarge => return None,
            BodyProgress::Incomplete => assert!(input.is_empty(), "it stopped before the end"),
        }
    }
    None
}

fuzz_target!(|data: &[u8]| {
    let Some((&size, wire)) = data.split_first() else {
        return;
    };
    let accepted = read(wire, usize::MAX);
    assert_eq!(accepted, read(wire, usize::from(size).max(1)), "in pieces");
    if let Some((content, rest)) = accepted {
        assert!(content.len() <= MAX_BODY);
        assert_eq!(decode(wire), Some((content, rest)));
    }
});
