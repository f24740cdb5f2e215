//! Documents: whatever is in a file, its passages are short and hold nothing that is not to be seen.

#![no_main]

use std::path::Path;

use adriaticum::search::passages::{MAX_PASSAGE, read, split};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|content: &[u8]| {
    let content = String::from_utf8_lossy(content);
    for name in ["a.html", "a.md", "a.txt"] {
        let outline = read(Path::new(name), &content);
        assert!(!outline.title.contains('\n'));
        for piece in split(&outline) {
            assert!(!piece.text.trim().is_empty());
            for text in [&piece.heading, &piece.text] {
                assert!(text.chars().count() <= MAX_PASSAGE, "{name}");
                assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{name}: {text:?}");
            }
        }
    }
});
