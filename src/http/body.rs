//! Bodies as RFC 9112 frames them, read piece by piece into one bounded buffer.

use super::syntax::{MAX_BODY, Malformed, is_token_byte};

/// The most bytes of a chunked body that are not content: sizes, extensions and trailers.
const MAX_OVERHEAD: usize = 16 * 1024;

/// The least by which the content's buffer grows, so that a body sent byte by byte is not copied
/// for every byte.
const LEAST_GROWTH: usize = 4 * 1024;

/// The framing of a body, from its head.
#[derive(Clone, Copy, Debug)]
pub enum Framing {
    Length(u64),
    Chunked,
}

/// Decodes one body from the bytes as they arrive. The lines of the chunked coding must end in CR
/// LF: a lenient reader here is how requests are smuggled.
#[derive(Debug)]
pub struct Body {
    content: Vec<u8>,
    /// The most bytes of `content`.
    most: usize,
    state: BodyState,
    /// The state after the bytes of a chunk, or of the whole body if it has a length.
    after_data: BodyState,
    /// The bytes of data that are still to come; while the line of a chunk's size is read, the size
    /// so far.
    left: usize,
    /// Bytes of the chunked coding that were not content.
    overhead: usize,
}

/// The state of a body after some bytes.
#[derive(Debug, PartialEq, Eq)]
pub enum BodyProgress {
    Incomplete,
    Complete,
    TooLarge,
}

impl Body {
    /// Allocates nothing: the client may never send as much as it declares.
    pub fn new(framing: Framing) -> Self {
        let (most, state, after_data, left) = match framing {
            Framing::Length(length) => {
                let length = usize::try_from(length).unwrap_or(usize::MAX);
                (
                    length.min(MAX_BODY),
                    BodyState::Data,
                    BodyState::End,
                    length,
                )
            }
            Framing::Chunked => (MAX_BODY, BodyState::SizeStart, BodyState::DataReturn, 0),
        };
        Self {
            content: Vec::new(),
            most,
            state,
            after_data,
            left,
            overhead: 0,
        }
    }

    /// Takes what belongs to the body off the front of `input`.
    pub fn push(&mut self, input: &mut &[u8]) -> Result<BodyProgress, Malformed> {
        while self.state != BodyState::End {
            if self.state == BodyState::Data {
                if self.left > self.most - self.content.len() {
                    return Ok(BodyProgress::TooLarge);
                }
                self.take_data(input);
                if self.left > 0 {
                    return Ok(BodyProgress::Incomplete);
                }
                self.state = self.after_data;
                continue;
            }
            let Some((&byte, rest)) = input.split_first() else {
                return Ok(BodyProgress::Incomplete);
            };
            *input = rest;
            self.overhead += 1;
            if self.overhead > MAX_OVERHEAD {
                return Err(Malformed(
                    "The chunk sizes, extensions and trailers of the body are longer than 16 KiB.",
                ));
            }
            self.state = self.step(byte)?;
        }
        Ok(BodyProgress::Complete)
    }

    /// Moves bytes of data from `input` to `content`. The buffer grows by a quarter and not to
    /// twice its size: what is allocated counts against the limit for all clients.
    fn take_data(&mut self, input: &mut &[u8]) {
        let Self {
            content,
            most,
            left,
            ..
        } = self;
        let (taken, rest) = input.split_at((*left).min(input.len()));
        if taken.len() > content.capacity() - content.len() {
            let growth = taken.len().max(LEAST_GROWTH).max(content.capacity() / 4);
            content.reserve_exact(growth.min(*most - content.len()));
        }
        content.extend_from_slice(taken);
        *left -= taken.len();
        *input = rest;
    }

    pub fn into_content(self) -> Vec<u8> {
        self.content
    }

    /// The memory that it holds.
    pub fn held_bytes(&self) -> usize {
        self.content.capacity()
    }

    /// Returns the state after one byte of anything but data.
    fn step(&mut self, byte: u8) -> Result<BodyState, Malformed> {
        use BodyState::*;
        let state = match (self.state, byte) {
            (SizeStart | Size, b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F') => {
                let digit = char::from(byte)
                    .to_digit(16)
                    .expect("the match should leave digits");
                self.left = self.left.saturating_mul(16).saturating_add(digit as usize);
                Size
            }
            (Size, b'\r') => SizeLineFeed,
            (Size | BeforeExtension, b';') => ExtensionStart,
            (Size | BeforeExtension, b' ' | b'\t') => BeforeExtension,
            // RFC 9112, 7.1.1: *( BWS ";" BWS name [ BWS "=" BWS ( token / quoted-string ) ] )
            (ExtensionStart, b' ' | b'\t') => ExtensionStart,
            (ExtensionStart | ExtensionName, byte) if is_token_byte(byte) => ExtensionName,
            (ExtensionName | AfterExtensionName, b' ' | b'\t') => AfterExtensionName,
            (ExtensionName | AfterExtensionName, b'=') => ExtensionValueStart,
            (AfterExtensionName, b';') => ExtensionStart,
            (ExtensionValueStart, b' ' | b'\t') => ExtensionValueStart,
            (ExtensionValueStart, b'"') => QuotedValue,
            (ExtensionValueStart | ExtensionValue, byte) if is_token_byte(byte) => ExtensionValue,
            (QuotedValue, b'"') => QuotedValueEnd,
            (QuotedValue, b'\\') => QuotedPair,
            (QuotedValue | QuotedPair, byte) if is_field_byte(byte) => QuotedValue,
            (ExtensionName | ExtensionValue | QuotedValueEnd, b';') => ExtensionStart,
            (ExtensionName | ExtensionValue | QuotedValueEnd, b'\r') => SizeLineFeed,
            (ExtensionValue | QuotedValueEnd, b' ' | b'\t') => BeforeExtension,
            (SizeLineFeed, b'\n') if self.left == 0 => TrailerStart,
            (SizeLineFeed, b'\n') => Data,
            (DataReturn, b'\r') => DataLineFeed,
            (DataLineFeed, b'\n') => SizeStart,
            (TrailerStart, b'\r') => EndLineFeed,
            (TrailerStart | TrailerName, byte) if is_token_byte(byte) => TrailerName,
            (TrailerName, b':') => TrailerValue,
            (TrailerValue, b'\r') => TrailerLineFeed,
            (TrailerValue, byte) if is_field_byte(byte) => TrailerValue,
            (TrailerLineFeed, b'\n') => TrailerStart,
            (EndLineFeed, b'\n') => End,
            _ => return Err(Malformed("The chunked body is malformed.")),
        };
        Ok(state)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BodyState {
    SizeStart,
    Size,
    /// White space after the size or after an extension, which only an extension may follow.
    BeforeExtension,
    ExtensionStart,
    ExtensionName,
    AfterExtensionName,
    ExtensionValueStart,
    ExtensionValue,
    QuotedValue,
    QuotedPair,
    QuotedValueEnd,
    SizeLineFeed,
    Data,
    DataReturn,
    DataLineFeed,
    TrailerStart,
    TrailerName,
    TrailerValue,
    TrailerLineFeed,
    EndLineFeed,
    End,
}

/// The bytes of a header's value (RFC 9110, 5.5): no control character but the tab.
fn is_field_byte(byte: u8) -> bool {
    byte == b'\t' || (byte >= b' ' && byte != 0x7f)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a whole chunked body at once and then byte by byte; both must agree.
    fn read(wire: &[u8]) -> Result<(BodyProgress, Vec<u8>, usize), Malformed> {
        let mut outcomes = [wire.len(), 1].map(|size| {
            let mut body = Body::new(Framing::Chunked);
            let mut progress = BodyProgress::Incomplete;
            let mut used = 0;
            for piece in wire.chunks(size.max(1)) {
                let mut input = piece;
                progress = body.push(&mut input)?;
                used += piece.len() - input.len();
                if progress != BodyProgress::Incomplete {
                    break;
                }
            }
            Ok((progress, body.into_content(), used))
        });
        assert_eq!(
            outcomes[0], outcomes[1],
            "the pieces should not matter: {wire:?}"
        );
        std::mem::replace(&mut outcomes[0], Err(Malformed("taken")))
    }

    #[track_caller]
    fn good(wire: &str, content: &str) {
        let (progress, found, used) = read(wire.as_bytes()).expect("the body should be taken");
        assert_eq!(
            (progress, found.as_slice()),
            (BodyProgress::Complete, content.as_bytes()),
            "{wire:?}"
        );
        assert_eq!(used, wire.trim_end_matches("NEXT").len(), "{wire:?}");
    }

    #[test]
    fn chunked_bodies_that_are_taken() {
        good("0\r\n\r\n", "");
        good("5\r\nhello\r\n0\r\n\r\n", "hello");
        good("5\r\nhello\r\n0\r\n\r\nNEXT", "hello");
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
        ] {
            good(
                &format!("5{extensions}\r\nhello\r\n0{extensions}\r\n\r\n"),
                "hello",
            );
        }
        good(
            "5\r\nhello\r\n0\r\nX-After: y\r\nX-More:\tz z\r\n\r\nNEXT",
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
            "5\rhello",
            "5;a\nhello",
            "5;a\u{1}\r\n",
            "5;\r\n",
            "5;;a\r\n",
            "5;a \r\n",
            "5;a=\r\n",
            "5;a=b \r\n",
            "5;a=b c\r\n",
            "5;a=b=c\r\n",
            "5;=b\r\n",
            "5;é\r\n",
            "5;a=\"b\r\n",
            "5;a=\"b\\\r\n",
            "5;a=\"b\"c\r\n",
            "5;a=\"b\"=\r\n",
            "5\r\nhelloX",
            "5\r\nhello\n",
            "5\r\nhello\rX",
            "4\r\nhello\r\n",
            "0\r\n: y\r\n\r\n",
            "0\r\nno colon\r\n\r\n",
            "0\r\nX: y\n\r\n",
            "0\r\nX: \0\r\n",
            "0\r\n\n",
            "0\r\n\rX",
            ";a\r\n",
        ] {
            assert!(read(wire.as_bytes()).is_err(), "{wire:?} was taken");
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
            "fffffffffffffffffffff\r\n".into(),
        ] {
            assert_eq!(
                read(wire.as_bytes()).expect("not malformed").0,
                BodyProgress::TooLarge
            );
        }
    }

    #[test]
    fn overhead_has_a_bound() {
        let chunk = |extension: usize| format!("1;{}\r\nx\r\n", "e".repeat(extension));
        for wire in [
            format!("5;{}", "x".repeat(MAX_OVERHEAD)),
            "0".repeat(MAX_OVERHEAD + 1),
            format!("0\r\n{}", "X: y\r\n".repeat(MAX_OVERHEAD / 6 + 1)),
            // It is a bound on the whole body, not on a chunk.
            chunk(MAX_OVERHEAD / 4).repeat(4),
            "1\r\nx\r\n".repeat(MAX_OVERHEAD / 5 + 1),
        ] {
            assert!(read(wire.as_bytes()).is_err_and(|e| e.0.contains("longer than 16 KiB")));
        }
        let small = "10\r\n0123456789abcdef\r\n".repeat(2_000);
        good(
            &format!("{small}0\r\n\r\n"),
            &"0123456789abcdef".repeat(2_000),
        );
    }

    #[test]
    fn the_buffer_is_little_larger_than_its_content() {
        for size in [1, 1000, 5000, 65_536] {
            for framing in [Framing::Length(200_000), Framing::Chunked] {
                let mut body = Body::new(framing);
                if let Framing::Chunked = framing {
                    body.push(&mut &b"30d40\r\n"[..]).expect("a size");
                }
                for piece in vec![b'x'; 200_000].chunks(size) {
                    body.push(&mut &*piece).expect("it should be taken");
                    let length = body.content.len();
                    assert!(
                        body.held_bytes() <= length + (length / 4).max(LEAST_GROWTH),
                        "{length}"
                    );
                }
                assert!(matches!(framing, Framing::Chunked) || body.held_bytes() == 200_000);
            }
        }
    }

    #[test]
    fn lengths() {
        let progress = |length| Body::new(Framing::Length(length)).push(&mut &b""[..]);
        assert_eq!(progress(0), Ok(BodyProgress::Complete));
        assert_eq!(progress(MAX_BODY as u64), Ok(BodyProgress::Incomplete));
        assert_eq!(progress(MAX_BODY as u64 + 1), Ok(BodyProgress::TooLarge));
        assert_eq!(progress(u64::MAX), Ok(BodyProgress::TooLarge));
        let mut body = Body::new(Framing::Length(5));
        assert_eq!(
            body.held_bytes(),
            0,
            "nothing should be allocated on the word of a header"
        );
        let mut input = &b"hel"[..];
        assert_eq!(body.push(&mut input), Ok(BodyProgress::Incomplete));
        let mut input = &b"loNEXT"[..];
        assert_eq!(body.push(&mut input), Ok(BodyProgress::Complete));
        assert_eq!(
            (input, body.into_content()),
            (&b"NEXT"[..], b"hello".to_vec())
        );
    }
}
