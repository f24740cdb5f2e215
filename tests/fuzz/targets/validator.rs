//! The validator: what it accepts fits the specification by another reading of the same bytes.

#![no_main]

use adriaticum::api::validation::parse;
use adriaticum::config::Compatibility;
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

fuzz_target!(|body: &[u8]| {
    let strict = parse(body, Compatibility::Strict);
    let lenient = parse(body, Compatibility::OpenAi);
    for failure in [&strict, &lenient].into_iter().filter_map(|result| result.as_ref().err()) {
        assert_eq!(failure.error.status(), 400);
        assert!(failure.message.chars().count() < 400, "{}", failure.message);
    }
    if let Ok(asked) = &lenient {
        assert!((1..=512).contains(&asked.chat.max_tokens));
        let lengths = asked.chat.messages.iter().map(|message| message.content.chars().count());
        assert!((1..=20).contains(&lengths.len()));
        assert!(lengths.clone().all(|length| length <= 10_000) && lengths.sum::<usize>() <= 32_000);
    }
    let Ok(asked) = strict else {
        return;
    };
    assert!(asked.stream.is_none());
    let chat = asked.chat;
    let json: Value = serde_json::from_slice(body).expect("what is accepted is JSON");
    let members = json.as_object().expect("an object");
    let mut lenient = lenient.expect("what is strictly good is good").chat;
    if !members.contains_key("max_tokens") {
        assert_eq!(lenient.max_tokens, 512);
        lenient.max_tokens = chat.max_tokens;
    }
    assert_eq!(format!("{chat:?}"), format!("{lenient:?}"));

    assert!(members.keys().all(|name| ["model", "messages", "temperature", "max_tokens"].contains(&name.as_str())));
    assert_eq!(json["model"], "adriaticum");
    let temperature = json.get("temperature").map_or(0.7, |value| value.as_f64().expect("a number"));
    assert_eq!(chat.temperature, temperature);
    assert!((0.0..=2.0).contains(&temperature));
    let max_tokens = json.get("max_tokens").map_or(248, |value| value.as_u64().expect("an integer"));
    assert_eq!(u64::from(chat.max_tokens), max_tokens);
    assert!((1..=512).contains(&max_tokens));
    let messages = json["messages"].as_array().expect("an array");
    assert!((1..=20).contains(&messages.len()) && messages.len() == chat.messages.len());
    let mut together = 0;
    for (message, read) in messages.iter().zip(&chat.messages) {
        assert_eq!(message.as_object().expect("an object").len(), 2);
        assert_eq!(message["role"], serde_json::to_value(read.role).expect("a role"));
        assert_eq!(message["content"], *read.content);
        let length = read.content.chars().count();
        assert!(length <= 10_000);
        together += length;
    }
    assert!(together <= 32_000);
});
