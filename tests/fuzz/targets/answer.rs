//! The reader of a runtime's answer: what it takes from it is there by another reading of the same bytes.

#![no_main]

use adriaticum::runtime::{read_answer, read_refusal};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

fuzz_target!(|bytes: &[u8]| {
    let _ = read_refusal(404, bytes);
    let Ok(generated) = read_answer(bytes) else {
        return;
    };
    // A number that no type has makes the whole unreadable here, and not there.
    let Ok(answer) = serde_json::from_slice::<Value>(bytes) else {
        return;
    };
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"]["content"], generated.content);
    assert_eq!(choice["finish_reason"].as_str(), generated.finish_reason.as_deref());
    let tokens = generated.tokens;
    let figures = [
        ("prompt_tokens", tokens.prompt_tokens),
        ("completion_tokens", tokens.completion_tokens),
        ("total_tokens", tokens.total_tokens),
    ];
    for (name, figure) in figures {
        if let Some(figure) = figure {
            assert_eq!(answer["usage"][name], figure);
            assert!((0..=1_000_000_000).contains(&figure));
        }
    }
});
