//! A conversation, and the wire format in which a runtime continues it: OpenAI's chat completions.

use std::borrow::Cow;
use std::fmt;
use std::io::{self, Write};

use serde::de::{IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::error::RuntimeError;
use crate::ledger::Tokens;

/// The largest plausible token figure: a larger one was not measured, and sums of these can't
/// overflow.
const MAX_FIGURE: u32 = 1_000_000_000;

/// The longest finish reason that is passed on, in characters.
const MAX_REASON: usize = 64;

/// Phrases of runtimes that have no error code for a prompt that is too long: vLLM, SGLang, Ollama,
/// LM Studio and llama.cpp.
const TOO_LONG: [&str; 4] = [
    "context length",
    "context size",
    "context window",
    "maximum model length",
];

#[derive(Debug, Serialize)]
pub struct Chat<'a> {
    pub messages: Vec<ChatMessage<'a>>,
    pub temperature: f64,
    pub max_tokens: u16,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct ChatMessage<'a> {
    pub role: Role,
    pub content: Cow<'a, str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    System,
    User,
    Assistant,
}

/// The text that a runtime has generated, and the tokens that it measured in this call.
#[derive(Debug)]
pub struct Generated {
    pub content: String,
    pub finish_reason: Option<String>,
    pub tokens: Tokens,
}

/// The request to a runtime: only members that the service knows.
#[derive(Serialize)]
struct CompletionRequest<'a> {
    model: &'a str,
    #[serde(flatten)]
    chat: &'a Chat<'a>,
    stream: bool,
    #[serde(flatten)]
    parameters: &'a Map<String, Value>,
}

impl Chat<'_> {
    /// The JSON of a request. Its size is counted first: a buffer that grows as it is written takes
    /// up to three times as much, and a body may have 256 KiB in every worker.
    pub(super) fn to_json(&self, model: &str, parameters: &Map<String, Value>) -> Vec<u8> {
        let request = CompletionRequest {
            model,
            chat: self,
            stream: false,
            parameters,
        };
        let mut size = ByteCount(0);
        serde_json::to_writer(&mut size, &request).expect("a chat should have its JSON");
        let mut json = Vec::with_capacity(size.0);
        serde_json::to_writer(&mut json, &request).expect("a chat should have its JSON");
        json
    }
}

/// Counts the bytes that are written.
struct ByteCount(usize);

impl Write for ByteCount {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The members of an answer that are used. A raw member is read by itself: if it can't be used, the
/// answer still can. That holds for a number with more digits than any type has too. Nothing else
/// is built: an answer takes its own size and that of its text, whatever is in it.
#[derive(Deserialize)]
struct CompletionAnswer<'a> {
    #[serde(borrow, default)]
    choices: FirstChoice<'a>,
    #[serde(borrow, default)]
    usage: Option<&'a RawValue>,
}

/// The first element of a list of choices; the others are skipped.
#[derive(Default)]
struct FirstChoice<'a>(Option<AnswerChoice<'a>>);

#[derive(Deserialize)]
struct AnswerChoice<'a> {
    #[serde(default)]
    message: Option<AnswerMessage>,
    #[serde(borrow, default)]
    finish_reason: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct AnswerMessage {
    #[serde(default)]
    content: Option<String>,
}

#[derive(Default, Deserialize)]
struct AnswerUsage<'a> {
    #[serde(borrow, default)]
    prompt_tokens: Option<&'a RawValue>,
    #[serde(borrow, default)]
    completion_tokens: Option<&'a RawValue>,
    #[serde(borrow, default)]
    total_tokens: Option<&'a RawValue>,
}

/// The members of a refusal that are used: in its member `error`, or in the refusal itself.
#[derive(Default, Deserialize)]
struct RefusalAnswer<'a> {
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
    #[serde(borrow, default, rename = "type")]
    kind: Option<&'a RawValue>,
    #[serde(borrow, default)]
    code: Option<&'a RawValue>,
    #[serde(borrow, default)]
    message: Option<&'a RawValue>,
    #[serde(borrow, default)]
    n_prompt_tokens: Option<&'a RawValue>,
    #[serde(borrow, default)]
    n_ctx: Option<&'a RawValue>,
}

impl<'de: 'a, 'a> Deserialize<'de> for FirstChoice<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(Self::default())
    }
}

impl<'de: 'a, 'a> Visitor<'de> for FirstChoice<'a> {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a list of choices")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self, A::Error> {
        let first = list.next_element()?;
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Self(first))
    }
}

/// Reads the reply of a runtime with status 200: the text, the finish reason and the token figures.
pub fn read_answer(bytes: &[u8]) -> Result<Generated, RuntimeError> {
    let answer: CompletionAnswer =
        serde_json::from_slice(bytes).map_err(|_| RuntimeError::NotJson)?;
    let usage: AnswerUsage = answer
        .usage
        .and_then(|raw| serde_json::from_str(raw.get()).ok())
        .unwrap_or_default();
    let tokens = Tokens {
        prompt_tokens: read_token_figure(usage.prompt_tokens),
        completion_tokens: read_token_figure(usage.completion_tokens),
        total_tokens: read_token_figure(usage.total_tokens),
    };
    let no_text = || RuntimeError::NoText(tokens);
    let choice = answer.choices.0.ok_or_else(no_text)?;
    let finish_reason = finish_reason(choice.finish_reason);
    let content = match choice.message.ok_or_else(no_text)?.content {
        Some(content) => content,
        // A reasoning model has used up its tokens before the text.
        None if finish_reason.as_deref() == Some("length") => String::new(),
        None => return Err(no_text()),
    };
    Ok(Generated {
        content,
        finish_reason,
        tokens,
    })
}

/// A finish reason; `None` if it is not one that is passed on.
fn finish_reason(raw: Option<&RawValue>) -> Option<String> {
    // Each character has at most six as an escape.
    let raw = raw.filter(|raw| raw.get().len() <= 6 * MAX_REASON + 2)?;
    let reason: String = serde_json::from_str(raw.get()).ok()?;
    (reason.len() <= MAX_REASON && reason.bytes().all(|b| matches!(b, b' '..=b'~')))
        .then_some(reason)
}

/// Reads a token figure of the runtime's answer; `None` if it is not a plausible one.
fn read_token_figure(raw: Option<&RawValue>) -> Option<i64> {
    raw?.get()
        .parse()
        .ok()
        .filter(|&count: &u32| count <= MAX_FIGURE)
        .map(i64::from)
}

/// Reads an answer with a status of 4xx.
pub fn read_refusal(status: u16, bytes: &[u8]) -> RuntimeError {
    recognized_refusal(status, bytes).unwrap_or(RuntimeError::Status(status))
}

/// Recognizes a refusal because the prompt is too long: by the error type of llama.cpp, the code of
/// OpenAI, or the message of runtimes that have no code for it. vLLM does not always wrap its errors,
/// and LM Studio's may be a text. An unknown model has a code of OpenAI and LM Studio, and only a
/// message of Ollama (404), vLLM (404) and llama.cpp (400).
fn recognized_refusal(status: u16, bytes: &[u8]) -> Option<RuntimeError> {
    let answer: RefusalAnswer = serde_json::from_slice(bytes).ok()?;
    let refusal = match answer.error {
        Some(text) if text.get().starts_with('"') => RefusalAnswer {
            message: Some(text),
            ..RefusalAnswer::default()
        },
        Some(error) => serde_json::from_str(error.get()).ok()?,
        None => answer,
    };
    // No JSON writer escapes a character of these words, so they are compared as written.
    let is = |member: Option<&RawValue>, word: &str| member.is_some_and(|raw| raw.get() == word);
    let message = refusal
        .message
        .map_or("", RawValue::get)
        .to_ascii_lowercase();
    let number = |member: Option<&RawValue>| member?.get().parse().ok();
    if is(refusal.kind, r#""exceed_context_size_error""#)
        || is(refusal.code, r#""context_length_exceeded""#)
        || TOO_LONG.iter().any(|phrase| message.contains(phrase))
    {
        let figures = number(refusal.n_prompt_tokens).zip(number(refusal.n_ctx));
        return Some(RuntimeError::ContextExceeded(figures));
    }
    let is_unknown_model = is(refusal.code, r#""model_not_found""#) || says_unknown_model(&message);
    (matches!(status, 400 | 404 | 422) && is_unknown_model)
        .then_some(RuntimeError::UnknownModel(status))
}

/// Returns true for `"model 'x' not found"` and `"the model x does not exist."`. Only the beginning
/// of a message is the runtime's own: the rest may repeat the prompt.
fn says_unknown_model(message: &str) -> bool {
    let text = message.trim_start_matches('"');
    let is_about_model = text
        .strip_prefix("the ")
        .unwrap_or(text)
        .starts_with("model ");
    is_about_model && (text.contains("not found") || text.contains("does not exist"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_json_of_a_request_has_no_spare_room() {
        let contents = ["\u{1}\n\"é".repeat(10_000), "x".repeat(7)];
        let message = |content| ChatMessage {
            role: Role::User,
            content: Cow::Borrowed(content),
        };
        let messages: Vec<ChatMessage> = contents
            .iter()
            .map(|content| message(content.as_str()))
            .collect();
        let chat = Chat {
            messages,
            temperature: 0.5,
            max_tokens: 9,
        };
        let json = chat.to_json("m", &Map::new());
        assert_eq!(json.capacity(), json.len());
        let read: serde_json::Value = serde_json::from_slice(&json).expect("JSON");
        assert_eq!(read["messages"][0]["content"], contents[0].as_str());
    }

    #[test]
    fn answers_that_are_completions() {
        for (answer, content, reason, total) in [
            (
                r#"{"choices":[{"message":{"content":"x"},"finish_reason":"length"}],"usage":{"total_tokens":3}}"#,
                "x",
                Some("length"),
                Some(3),
            ),
            (
                r#"{"choices":[{"message":{"content":""},"finish_reason":null}]}"#,
                "",
                None,
                None,
            ),
            // A reasoning model that has used up its tokens, as vLLM answers.
            (
                r#"{"choices":[{"message":{"role":"assistant","content":null,"reasoning_content":"…"},"finish_reason":"length"}],"usage":{"total_tokens":9}}"#,
                "",
                Some("length"),
                Some(9),
            ),
            (
                r#"{"choices":[{"message":{"content":"x"}},{"message":{}}],"usage":null}"#,
                "x",
                None,
                None,
            ),
            (
                r#"{"choices":[{"message":{"content":"x"}}],"usage":7}"#,
                "x",
                None,
                None,
            ),
            (
                r#"{"choices":[{"message":{"content":"x"},"finish_reason":7}]}"#,
                "x",
                None,
                None,
            ),
            // Of several choices only the first is read.
            (
                r#"{"choices":[{"message":{"content":"x"}},{"message":7},[[]],0]}"#,
                "x",
                None,
                None,
            ),
            (
                r#"{"choices":[{"message":{"content":"\u0000\n\u00e9"}}]}"#,
                "\0\n\u{e9}",
                None,
                None,
            ),
        ] {
            let found = read_answer(answer.as_bytes()).expect(answer);
            let read = (
                found.content.as_str(),
                found.finish_reason.as_deref(),
                found.tokens.total_tokens,
            );
            assert_eq!(read, (content, reason, total), "{answer}");
        }
    }

    #[test]
    fn finish_reasons() {
        let read = |reason: &str| {
            let answer = serde_json::json!({"choices": [{"message": {"content": "x"}, "finish_reason": reason}]});
            read_answer(answer.to_string().as_bytes())
                .expect(reason)
                .finish_reason
        };
        let long = "x".repeat(MAX_REASON);
        for reason in ["stop", "tool calls", "~", &long] {
            assert_eq!(read(reason).as_deref(), Some(reason));
        }
        let escaped = format!(r#""{}""#, r"\u0041".repeat(MAX_REASON));
        let raw = RawValue::from_string(escaped).expect("JSON");
        assert_eq!(finish_reason(Some(&raw)), Some("A".repeat(MAX_REASON)));
        for reason in [
            "st\u{f6}p",
            "a\nb",
            "\u{0}",
            "\u{7f}",
            &(long.clone() + "x"),
        ] {
            assert_eq!(read(reason), None, "{reason:?}");
        }
    }

    #[test]
    fn token_figures() {
        let read = |figure: &str| {
            let usage =
                format!(r#"{{"prompt_tokens":7,"completion_tokens":{figure},"total_tokens":8}}"#);
            let answer =
                format!(r#"{{"usage":{usage},"choices":[{{"message":{{"content":"x"}}}}]}}"#);
            let Tokens {
                prompt_tokens,
                completion_tokens,
                total_tokens,
            } = read_answer(answer.as_bytes()).expect(figure).tokens;
            assert_eq!(
                (prompt_tokens, total_tokens),
                (Some(7), Some(8)),
                "{figure}"
            );
            completion_tokens
        };
        for (figure, measured) in [("0", 0), ("1", 1), ("1000000000", 1_000_000_000)] {
            assert_eq!(read(figure), Some(measured));
        }
        let long = "9".repeat(400);
        let bad = r#"-1 -0 1.5 1.0 1e3 1000000001 18446744073709551615 1e400 null "7" true [] {}"#;
        for figure in bad.split(' ').chain([long.as_str()]) {
            assert_eq!(read(figure), None, "{figure}");
        }
        // Nor does such a number elsewhere lose the answer.
        for member in ["usage", "finish_reason", "created"] {
            let answer = format!(
                r#"{{"{member}":{long},"choices":[{{"message":{{"content":"x"}},"{member}":{long}}}]}}"#
            );
            assert_eq!(read_answer(answer.as_bytes()).expect(member).content, "x");
        }
    }

    #[test]
    fn answers_that_are_none() {
        for (answer, cause) in [
            ("", "not_json"),
            ("null", "not_json"),
            ("x", "not_json"),
            (r#"{"choices":7}"#, "not_json"),
            (r#"{"choices":[{"message":{"content":7}}]}"#, "not_json"),
            ("[]", "no_text"),
            ("{}", "no_text"),
            (r#"{"choices":[]}"#, "no_text"),
            (r#"{"choices":null}"#, "not_json"),
            (r#"{"choices":[{},{"message":{"content":"x"}}]}"#, "no_text"),
            (r#"{"choices":[[],[]]}"#, "no_text"),
            (r#"{"choices":[{"message":{"content":"x"}},}"#, "not_json"),
            ("[0,0]", "not_json"),
            (r#"{"choices":[{}]}"#, "no_text"),
            (r#"{"choices":[{"message":{}}]}"#, "no_text"),
            (r#"{"choices":[{"message":{"content":null}}]}"#, "no_text"),
            (
                r#"{"choices":[{"text":"x","finish_reason":"length"}]}"#,
                "no_text",
            ),
            (
                r#"{"choices":[{"message":{"content":null},"finish_reason":"stop"}]}"#,
                "no_text",
            ),
        ] {
            let error = read_answer(answer.as_bytes()).expect_err(answer);
            assert_eq!(error.cause().to_string(), cause, "{answer}");
        }
    }

    #[test]
    fn an_answer_without_text_has_its_tokens() {
        let usage = r#"{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9}"#;
        for choices in [
            "[]",
            r#"[{"message":{"content":null}}]"#,
            r#"[{"text":"x"}]"#,
        ] {
            let answer = format!(r#"{{"choices":{choices},"usage":{usage}}}"#);
            match read_answer(answer.as_bytes()) {
                Err(RuntimeError::NoText(tokens)) => {
                    assert_eq!(tokens.total_tokens, Some(9), "{choices}")
                }
                other => panic!("{choices}: {other:?}"),
            }
        }
    }

    /// The messages of vLLM (new and old), SGLang, Ollama, LM Studio and llama.cpp.
    #[test]
    fn refusals_for_length_in_words() {
        for (status, refusal) in [
            (
                400,
                r#"{"error":{"message":"You passed 5000 input tokens, but the model's context length is only 4096.","code":400}}"#,
            ),
            (
                400,
                r#"{"error":{"message":"This model's maximum context length is 4096 tokens."}}"#,
            ),
            (
                400,
                r#"{"object":"error","message":"The decoder prompt (length 5000) is longer than the maximum model length of 4096."}"#,
            ),
            (
                400,
                r#"{"object":"error","message":"The input (5000 tokens) is longer than the model's context length (4096 tokens)."}"#,
            ),
            (
                400,
                r#"{"error":{"message":"the input length exceeds the max context length","type":"invalid_request_error"}}"#,
            ),
            (
                400,
                r#"{"error":"Trying to keep the first 5000 tokens when the context overflows. However, the model is loaded with context length of only 4096 tokens."}"#,
            ),
            (
                400,
                r#"{"error":{"message":"the request exceeds the available context size"}}"#,
            ),
            (413, r#"{"error":{"message":"Context Window exceeded"}}"#),
        ] {
            let error = read_refusal(status, refusal.as_bytes());
            assert!(
                matches!(error, RuntimeError::ContextExceeded(None)),
                "{refusal}: {error:?}"
            );
        }
    }

    #[test]
    fn refusals_for_length() {
        for (refusal, figures) in [
            (
                r#"{"error":{"type":"exceed_context_size_error","n_prompt_tokens":9,"n_ctx":4}}"#,
                Some((9, 4)),
            ),
            (r#"{"error":{"code":"context_length_exceeded"}}"#, None),
            (
                r#"{"object":"error","message":"This model's maximum context length is 4 tokens.","code":400}"#,
                None,
            ),
            (
                r#"{"code":"context_length_exceeded","n_ctx":[[]],"n_prompt_tokens":9,"x":[0,0]}"#,
                None,
            ),
        ] {
            match read_refusal(400, refusal.as_bytes()) {
                RuntimeError::ContextExceeded(found) => assert_eq!(found, figures),
                other => panic!("{refusal}: {other:?}"),
            }
        }
        for refusal in [
            "",
            "[]",
            "[0,0]",
            "7",
            r#"{"error":"x"}"#,
            r#"{"error":"x","code":"context_length_exceeded"}"#,
            r#"{"error":{"message":"bad grammar"}}"#,
        ] {
            let error = read_refusal(400, refusal.as_bytes());
            assert!(
                matches!(error, RuntimeError::Status(400)),
                "{refusal}: {error:?}"
            );
        }
    }

    /// As Ollama, vLLM (old and new), llama.cpp's router and LM Studio answer; and 404 of llama.cpp
    /// and vLLM for a wrong path.
    #[test]
    fn refusals_for_the_model() {
        for (status, refusal, is_unknown_model) in [
            (
                404,
                r#"{"error":{"message":"model \"x\" not found, try pulling it first","type":"api_error"}}"#,
                true,
            ),
            (
                404,
                r#"{"object":"error","message":"The model `x` does not exist.","type":"NotFoundError"}"#,
                true,
            ),
            (
                404,
                r#"{"error":{"message":"The model `x` does not exist.","param":"model","code":404}}"#,
                true,
            ),
            (
                400,
                r#"{"error":{"code":400,"message":"model not found","type":"invalid_request_error"}}"#,
                true,
            ),
            (
                404,
                r#"{"error":{"message":"Invalid model identifier","code":"model_not_found"}}"#,
                true,
            ),
            (
                404,
                r#"{"error":{"code":404,"message":"File Not Found","type":"not_found_error"}}"#,
                false,
            ),
            (404, r#"{"detail":"Not Found"}"#, false),
            (404, "404 page not found", false),
            (401, r#"{"error":{"message":"model not found"}}"#, false),
            (
                400,
                r#"{"error":{"message":"bad prompt: the model does not exist"}}"#,
                false,
            ),
        ] {
            let error = read_refusal(status, refusal.as_bytes());
            assert_eq!(
                matches!(error, RuntimeError::UnknownModel(_)),
                is_unknown_model,
                "{refusal}"
            );
            assert_eq!(error.cause().to_string(), format!("status_{status}"));
        }
    }
}
