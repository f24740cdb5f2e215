//! The request reader: whatever comes, in whatever pieces, the outcome is the same and within the bounds.

#![no_main]

use adriaticum::http::{MAX_BODY, MAX_HEAD, Malformed, Reader, ReadStep};
use libfuzzer_sys::fuzz_target;

/// What a connection came to: its requests, and how it ended.
#[derive(Debug)]
struct Story {
    requests: Vec<(String, String, String, Option<Vec<u8>>)>,
    end: Option<Malformed>,
}

fn read<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Story {
    let mut reader = Reader::default();
    let mut story = Story { requests: Vec::new(), end: None };
    for piece in pieces {
        reader.append(piece);
        loop {
            let step = reader.step();
            assert!(reader.held_bytes() <= MAX_BODY + 8 * MAX_HEAD, "it holds {}", reader.held_bytes());
            match step {
                Ok(ReadStep::More) => break,
                Ok(ReadStep::Head) => {}
                Ok(ReadStep::Request(request)) => {
                    let parts = [request.head.method(), request.head.host(), request.head.path()];
                    let [method, host, path] = parts.map(str::to_owned);
                    let cut = request.body.is_none();
                    assert!(request.body.as_ref().is_none_or(|body| body.len() <= MAX_BODY));
                    story.requests.push((method, host, path, request.body));
                    if cut {
                        // Where the next request begins is unknown: the service ends the connection.
                        return story;
                    }
                }
                Err(malformed) => {
                    story.end = Some(malformed);
                    return story;
                }
            }
        }
    }
    story
}

fuzz_target!(|data: &[u8]| {
    let Some((&size, wire)) = data.split_first() else {
        return;
    };
    // A connection reads at most 16 KiB at once.
    let whole = read(wire.chunks(MAX_HEAD));
    let pieces = read(wire.chunks(usize::from(size).max(1)));
    assert_eq!(whole.requests, pieces.requests);
    // In smaller pieces a fault is found with the end of its line, which may not have come.
    assert!(whole.end.is_some() || pieces.end.is_none());
});
