//! The parser of heads: what it accepts can be framed in one way only, by another reading of the same bytes.

#![no_main]

use adriaticum::http::{MAX_HEAD, ReadStep, Reader};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if bytes.len() > MAX_HEAD {
        return;
    }
    let mut reader = Reader::default();
    reader.append(bytes);
    let Ok(ReadStep::Head) = reader.step() else {
        return;
    };
    let head = reader.head();
    let text = String::from_utf8_lossy(bytes);
    let text = text.trim_start_matches("\r\n");
    let token = |name: &str| {
        !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b))
    };
    assert!(token(head.method()));
    assert!(!head.host().bytes().any(|b| b.is_ascii_control() || b" /?#@".contains(&b)), "{:?}", head.host());
    assert!(
        !head.path().bytes().any(|b| b <= b' ' || b == b'?' || b == b'#' || b > b'~'),
        "{:?}",
        head.path()
    );
    assert!(!head.query().bytes().any(|b| b <= b' ' || b == b'#' || b > b'~'), "{:?}", head.query());
    let count = |name: &str| head.header(name).count();
    assert!(count("content-length") + count("transfer-encoding") <= 1, "it can be framed in two ways");
    assert!(count("host") <= 1);
    assert!(head.held_bytes() <= 16 * MAX_HEAD, "it holds {}", head.held_bytes());
    // Another reading: a line for each header, whose name is a token and whose value has no control characters.
    for line in text.split("\r\n").skip(1).take_while(|line| !line.is_empty()) {
        let (name, value) = line.split_once(':').expect("a header has a name");
        assert!(token(name), "{name:?}");
        assert!(!value.bytes().any(|b| b == 0 || b == b'\r' || b == b'\n'), "{value:?}");
        let value = value.trim_matches([' ', '\t']);
        let is_kept = head.header(name).any(|known| String::from_utf8_lossy(known) == value);
        assert!(is_kept, "{name}: {value:?} is lost");
    }
});
