//! The reader of chunked bodies: what it accepts has the same content by another reading of the same bytes.

#![no_main]

use adriaticum::http::{MAX_BODY, ReadStep, Reader};
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

/// The content, and how many bytes of the wire were read; `None` if the body is not complete or not accepted.
fn read(wire: &[u8], size: usize) -> Option<(Vec<u8>, usize)> {
    let mut reader = Reader::default();
    reader.append(b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n");
    assert!(matches!(reader.step(), Ok(ReadStep::Head)));
    let mut read = 0;
    for piece in wire.chunks(size) {
        reader.append(piece);
        read += piece.len();
        assert!(reader.held_bytes() <= 2 * MAX_BODY, "it holds {}", reader.held_bytes());
        match reader.step().ok()? {
            ReadStep::More => {}
            ReadStep::Head => unreachable!("a body follows"),
            ReadStep::Request(request) => return Some((request.body?, read)),
        }
    }
    None
}

fuzz_target!(|data: &[u8]| {
    let Some((&size, wire)) = data.split_first() else {
        return;
    };
    let whole = read(wire, 16 * 1024).map(|(content, _)| content);
    let pieces = read(wire, usize::from(size).max(1)).map(|(content, _)| content);
    assert_eq!(whole, pieces, "in pieces");
    if let Some((content, length)) = read(wire, 1) {
        assert!(content.len() <= MAX_BODY);
        // Byte by byte, nothing after the body was read.
        assert_eq!(decode(wire), Some((content, &wire[length..])));
    }
});
