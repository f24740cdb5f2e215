//! Documents: whatever is in a file, its passages are short and hold nothing that is not to be seen.

#![no_main]

use std::path::Path;

use adriaticum::search::documents::{MAX_PASSAGE, split};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|content: &[u8]| {
    let content = String::from_utf8_lossy(content);
    for name in ["a.html", "a.md", "a.txt"] {
        let checked = split(Path::new(name), &content, |piece| {
            assert!(!piece.text.trim().is_empty());
            for text in [piece.title, piece.heading, piece.text] {
                assert!(text.chars().count() <= MAX_PASSAGE, "{name}");
                assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{name}: {text:?}");
            }
            Ok::<_, ()>(())
        });
        assert!(checked.is_ok());
    }
});
