//! The request's content: its type, its JSON, and every member of it.

mod json;
mod members;

use std::cell::Cell;

use serde::de::DeserializeSeed;
use serde_json::error::Category;

use self::json::Seed;
use self::members::RequestParser;
use crate::config::Compatibility;
use crate::error::{Failure, FailureCause};
use crate::http::RequestHead;
use crate::runtime::Chat;

/// Reads a body whose `Content-Type` is JSON.
pub fn read<'a>(
    head: &RequestHead,
    body: &'a [u8],
    compatibility: Compatibility,
) -> Result<Chat<'a>, Failure> {
    check_content_type(head)?;
    parse(body, compatibility)
}

/// Reads the chat of a body, or says what is wrong with it.
pub fn parse(body: &[u8], compatibility: Compatibility) -> Result<Chat<'_>, Failure> {
    let text = str::from_utf8(body).map_err(|_| {
        Failure::invalid(
            FailureCause::Body,
            "The body is not valid JSON: it is not encoded in UTF-8.",
        )
    })?;
    let mut json = serde_json::Deserializer::from_str(text);
    let reading = Cell::new(FailureCause::Body);
    Seed(RequestParser {
        lenient: compatibility == Compatibility::OpenAi,
        reading: &reading,
    })
    .deserialize(&mut json)
    .and_then(|chat| json.end().map(|()| chat))
    .map_err(|error| failure(&error, reading.get()))
}

fn check_content_type(head: &RequestHead) -> Result<(), Failure> {
    let mut types = head.header("content-type");
    let is_json = types.next().is_some_and(|value| {
        let essence = value.split(|&b| b == b';').next().unwrap_or_default();
        essence
            .trim_ascii()
            .eq_ignore_ascii_case(b"application/json")
    });
    if !is_json || types.next().is_some() {
        let message = "The Content-Type must be application/json.";
        return Err(Failure::invalid(FailureCause::ContentType, message));
    }
    if head.header("content-encoding").next().is_some() {
        let message = "A Content-Encoding is not supported. Send the body as it is.";
        return Err(Failure::invalid(FailureCause::ContentEncoding, message));
    }
    Ok(())
}

/// Our own message if a member is wrong; the parser's, with its position, if the body is not JSON.
fn failure(error: &serde_json::Error, reading: FailureCause) -> Failure {
    let text = error.to_string();
    if error.classify() == Category::Data {
        // `serde_json` adds the position to our message, and has no way to read it without.
        let place = format!(" at line {} column {}", error.line(), error.column());
        return Failure::invalid(
            reading,
            text.strip_suffix(&place).unwrap_or(&text).to_owned(),
        );
    }
    Failure::invalid(
        FailureCause::Body,
        format!("The body is not valid JSON: {text}."),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::Role;

    const STRICT: Compatibility = Compatibility::Strict;
    const OPENAI: Compatibility = Compatibility::OpenAi;

    /// A body with these members beside a good model and message.
    fn with(members: &str) -> String {
        format!(r#"{{"model":"adriaticum","messages":[{{"role":"user","content":"x"}}]{members}}}"#)
    }

    fn of(messages: &str) -> String {
        format!(r#"{{"model":"adriaticum","messages":{messages}}}"#)
    }

    #[track_caller]
    fn refused(body: &str, compatibility: Compatibility, words: &[&str]) {
        let message = parse(body.as_bytes(), compatibility)
            .expect_err(body)
            .message;
        for word in words {
            assert!(
                message.contains(word),
                "{body}: {word:?} expected in {message:?}"
            );
        }
        assert!(
            !message.contains(" at line 1 column") || message.contains("not valid JSON"),
            "{message}"
        );
    }

    #[test]
    fn what_the_headers_say_of_the_body() {
        let is_taken = |lines: &str| {
            let head = format!("POST / HTTP/1.1\r\nHost: h\r\n{lines}\r\n");
            check_content_type(&RequestHead::parse(head.as_bytes()).expect("a good head")).is_ok()
        };
        assert!(is_taken("Content-Type: application/json\r\n"));
        assert!(is_taken(
            "Content-Type: Application/JSON ; charset=utf-8\r\n"
        ));
        for refused in [
            "",
            "Content-Type: text/plain\r\n",
            "Content-Type: application/jsonl\r\n",
            "Content-Type: text/plain; application/json\r\n",
            "Content-Type: application/json\r\nContent-Type: application/json\r\n",
            "Content-Type: application/json\r\nContent-Encoding: identity\r\n",
        ] {
            assert!(!is_taken(refused), "{refused}");
        }
    }

    #[test]
    fn defaults_and_values() {
        let body = with("");
        let chat = parse(body.as_bytes(), STRICT).expect("the least there can be");
        assert_eq!(
            (chat.temperature, chat.max_tokens, chat.messages.len()),
            (0.7, 248, 1)
        );
        assert_eq!(
            (chat.messages[0].role, &*chat.messages[0].content),
            (Role::User, "x")
        );
        for (members, temperature, max_tokens) in [
            (r#","temperature":0"#, 0.0, 248),
            (r#","temperature":-0.0"#, 0.0, 248),
            (r#","temperature":2,"max_tokens":1"#, 2.0, 1),
            (
                r#","temperature":0.30000000000000004,"max_tokens":512"#,
                0.1 + 0.2,
                512,
            ),
        ] {
            let body = with(members);
            let chat = parse(body.as_bytes(), STRICT).expect(members);
            assert_eq!(
                (chat.temperature, chat.max_tokens),
                (temperature, max_tokens),
                "{members}"
            );
            assert!(chat.temperature.is_sign_positive());
        }
    }

    #[test]
    fn text_is_taken_as_it_is() {
        let body = of(r#"[{"content":" \u00e9\ud83c\udf0a\n","role":"assistant"}]"#);
        let chat = parse(body.as_bytes(), STRICT).expect("escapes are text");
        assert_eq!(chat.messages[0].content, " é🌊\n");
    }

    #[test]
    fn what_is_refused_is_named() {
        for (body, words) in [
            (
                with(r#","temperature":2.5"#),
                &["temperature", "0 to 2", "2.5"][..],
            ),
            (with(r#","temperature":-1"#), &["temperature", "-1"]),
            (with(r#","temperature":1e300"#), &["temperature", "1e+300"]),
            (
                with(r#","temperature":"hot""#),
                &["temperature", "a string"],
            ),
            (with(r#","temperature":null"#), &["temperature", "null"]),
            (
                with(r#","max_tokens":513"#),
                &["max_tokens", "1 to 512", "513"],
            ),
            (
                with(r#","max_tokens":5.0"#),
                &["max_tokens", "without a fraction", "5.0"],
            ),
            (with(r#","max_tokens":-1"#), &["max_tokens", "-1"]),
            (
                with(r#","max_tokens":99999999999999999999"#),
                &["max_tokens"],
            ),
            (with(r#","max_tokens":true"#), &["max_tokens", "true"]),
            (with(r#","max_tokens":{}"#), &["max_tokens", "an object"]),
            (
                with(r#","n":1"#),
                &["n is not recognized", "temperature and max_tokens"],
            ),
            (with(r#","stream":true"#), &["stream", "does not stream"]),
            (
                with(r#","stream":false"#),
                &["stream is not recognized", "compatibility = \"openai\""],
            ),
            (
                with(r#","max_completion_tokens":7"#),
                &["max_completion_tokens is not recognized", "Use max_tokens."],
            ),
            (with(r#","":1"#), &["\"\" is not recognized"]),
            (with(r#","user":null"#), &["user is not recognized"]),
            (
                with(&format!(r#","{}":1"#, "é".repeat(5_000))),
                &[&*format!("\"{}…\" is not", "é".repeat(64))],
            ),
            (with(r#","model":"adriaticum""#), &["model", "Duplicate"]),
            (
                with(r#","\u006dodel":"adriaticum""#),
                &["model", "Duplicate"],
            ),
            (of("[]"), &["messages", "1 to 20", "not 0"]),
            (of("null"), &["messages", "null"]),
            (of("{}"), &["messages", "an object"]),
            (of("[7]"), &["messages[0]", "7"]),
            (
                of(r#"[{"role":"user"}]"#),
                &["messages[0].content", "missing"],
            ),
            (of(r#"[{"content":"x"}]"#), &["messages[0].role", "missing"]),
            (
                of(r#"[{"role":"tool","content":"x"}]"#),
                &["messages[0].role", "another role"],
            ),
            (
                of(r#"[{"role":"user","content":null}]"#),
                &["messages[0].content", "null"],
            ),
            (
                of(r#"[{"role":"user","content":[]}]"#),
                &["messages[0].content", "an array"],
            ),
            (
                of(r#"[{"role":"user","content":"x","name":"y"}]"#),
                &["messages[0].name", "role and content"],
            ),
            (
                of(r#"[{"role":"user","role":"user","content":"x"}]"#),
                &["messages[0].role", "Duplicate"],
            ),
            (
                r#"{"messages":[{"role":"user","content":"x"}]}"#.into(),
                &["model", "missing"],
            ),
            (r#"{"model":"adriaticum"}"#.into(), &["messages", "missing"]),
            (r#"{"model":"gpt"}"#.into(), &["model", "\"adriaticum\""]),
            (r#"{"model":7}"#.into(), &["model", "7"]),
            ("[]".into(), &["object", "an array"]),
            (r#""text""#.into(), &["object", "a string"]),
        ] {
            refused(&body, STRICT, words);
        }
    }

    #[test]
    fn the_log_has_the_name_of_a_known_member_only() {
        for (body, cause) in [
            (with(r#","temperature":2.5"#), "temperature"),
            (with(r#","max_tokens":513"#), "max_tokens"),
            (
                with(r#","max_completion_tokens":7"#),
                "max_completion_tokens",
            ),
            (with(r#","stream":false"#), "stream"),
            (with(r#","n":1"#), "n"),
            (with(r#","model":"adriaticum""#), "model"),
            (with(r#","role":1"#), "unknown_member"),
            (with(r#","xyzzy":1"#), "unknown_member"),
            (with(r#","xyzzy":{"model":1}"#), "unknown_member"),
            (of("[]"), "messages"),
            (of("[7]"), "messages"),
            (of(r#"[{"role":"user","content":"x"},7]"#), "messages"),
            (of(r#"[{"role":"user"}]"#), "content"),
            (of(r#"[{"content":"x"}]"#), "role"),
            (of(r#"[{"role":"user","content":7}]"#), "content"),
            (of(r#"[{"role":"tool","content":"x"}]"#), "role"),
            (of(r#"[{"role":"user","role":"user"}]"#), "role"),
            (
                of(r#"[{"role":"user","content":"x","model":"y"}]"#),
                "unknown_member",
            ),
            (
                of(&format!(
                    "[{}]",
                    vec![r#"{"role":"user","content":"x"}"#; 21].join(",")
                )),
                "messages",
            ),
            (r#"{"model":"adriaticum"}"#.into(), "messages"),
            (
                r#"{"messages":[{"role":"user","content":"x"}]}"#.into(),
                "model",
            ),
            (r#"{"temperature":1,"max_tokens":1}"#.into(), "model"),
            ("[]".into(), "body"),
            (r#"{"model":"#.into(), "body"),
            (with("") + "x", "body"),
        ] {
            let failure = parse(body.as_bytes(), STRICT).expect_err(&body);
            assert_eq!(failure.cause.to_string(), cause, "{body}");
        }
        let body = with(r#","tools":{"stream":true}"#);
        let failure = parse(body.as_bytes(), OPENAI).expect_err(&body);
        assert_eq!(
            failure.cause,
            FailureCause::UnknownMember,
            "only members of the request count"
        );
    }

    #[test]
    fn invalid_json_is_refused_with_its_position() {
        for body in [
            "",
            " ",
            "{",
            "nonsense",
            "\u{feff}{}",
            r#"{"model":"adriaticum",}"#,
            &with("").replace('x', "\n"),
            &(with("") + "x"),
            &with(r#","temperature":NaN"#),
            &with(r#","temperature":1e400"#),
            &with("").replace('x', r"\ud800"),
            &with("").replace('x', r"\udf0a\ud83c"),
        ] {
            refused(body, STRICT, &["not valid JSON", "line"]);
        }
        assert!(parse(b"\xff\xfe", STRICT).is_err_and(|failure| failure.message.contains("UTF-8")));
        for deep in [
            "[".repeat(100_000),
            r#"{"a":"#.repeat(40_000),
            with(r#","a":"#) + &"[".repeat(100_000),
        ] {
            refused(&deep, STRICT, &[]);
        }
    }

    #[test]
    fn bounds_count_characters() {
        let messages = |count: usize, content: &str| {
            let one = format!(r#"{{"role":"user","content":"{content}"}}"#);
            of(&format!("[{}]", vec![one; count].join(",")))
        };
        for (body, is_good) in [
            (messages(1, &"🌊".repeat(10_000)), true),
            (messages(1, &"é".repeat(10_001)), false),
            (messages(20, "x"), true),
            (messages(21, "x"), false),
            (messages(4, &"é".repeat(8_000)), true),
            (messages(4, &"x".repeat(8_001)), false),
        ] {
            assert_eq!(
                parse(body.as_bytes(), STRICT).is_ok(),
                is_good,
                "{}",
                &body[..60]
            );
        }
        refused(&messages(21, "x"), STRICT, &["messages", "20", "21"]);
        refused(
            &messages(5, &"x".repeat(8_000)),
            STRICT,
            &["messages", "32000", "40000"],
        );
        refused(
            &messages(1, &"é".repeat(10_002)),
            STRICT,
            &["messages[0].content", "10000", "10002"],
        );
    }

    #[test]
    fn compatibility_accepts_what_asks_for_nothing_more() {
        for members in [
            r#","stream":false"#,
            r#","stream":null,"n":1,"tools":null,"user":null"#,
            r#","n":null,"temperature":null,"max_tokens":null"#,
            r#","max_completion_tokens":7"#,
            r#","max_completion_tokens":null,"max_tokens":7"#,
        ] {
            let body = with(members);
            let chat = parse(body.as_bytes(), OPENAI).expect(members);
            assert_eq!(chat.max_tokens, if members.contains('7') { 7 } else { 248 });
            assert!(parse(body.as_bytes(), STRICT).is_err(), "{members}");
        }
        let answer = of(
            r#"[{"role":"assistant","content":"x","refusal":null,"a":{"b":null,"c":{"d":null}}}]"#,
        );
        assert!(parse(answer.as_bytes(), OPENAI).is_ok());
        assert!(parse(answer.as_bytes(), STRICT).is_err());
        for (body, words) in [
            (
                with(r#","stream":true"#),
                &["stream", "does not stream"][..],
            ),
            (with(r#","n":2"#), &["n must be 1", "2"]),
            (with(r#","tools":[]"#), &["tools is not recognized"]),
            (
                with(r#","tools":{"a":null,"b":1}"#),
                &["tools.b is not recognized"],
            ),
            (
                with(r#","max_tokens":7,"max_completion_tokens":7"#),
                &["send one of them"],
            ),
            (
                with(r#","max_completion_tokens":513"#),
                &["max_completion_tokens", "513"],
            ),
            (with(r#","user":null,"user":null"#), &["user", "Duplicate"]),
            (with(r#","model":null"#), &["model"]),
            (
                of(r#"[{"role":"assistant","content":null}]"#),
                &["messages[0].content"],
            ),
            (
                of(r#"[{"role":"user","content":"x","name":"y"}]"#),
                &["messages[0].name"],
            ),
        ] {
            refused(&body, OPENAI, words);
        }
    }
}
