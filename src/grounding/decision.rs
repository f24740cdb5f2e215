//! Asks the model whether a conversation needs facts, and what to search for.

use std::borrow::Cow;
use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::client::CallError;
use crate::error::Failure;
use crate::runtime::{Chat, ChatMessage, RequestCost, Role, RuntimeError, Runtimes};
use crate::search::cleaning;

/// Enough for a short query in its JSON.
const MAX_TOKENS: u16 = 96;

/// The part of the conversation that the model sees: enough to know what "it" is.
const LAST_MESSAGES: usize = 4;
const MAX_MESSAGE: usize = 1_000;

const TASK: &str = "You decide whether a question needs a look-up. Read the conversation. If a good answer to the last \
    user message needs facts, such as names, numbers, dates, places, products, rules or events, \"search\" is true and \
    \"query\" holds the few words to search for. If it is small talk, arithmetic, translation, or writing and changing \
    text that is given, \"search\" is false and \"query\" is empty. Answer with JSON only.";

/// The format of the answer, for a runtime that can enforce one.
static RESPONSE_FORMAT: LazyLock<Value> = LazyLock::new(|| {
    json!({"type": "json_schema", "json_schema": {"name": "decision", "strict": true, "schema": {
        "type": "object",
        "properties": {"search": {"type": "boolean"}, "query": {"type": "string"}},
        "required": ["search", "query"],
        "additionalProperties": false,
    }}})
});

#[derive(Deserialize)]
struct Decision {
    search: bool,
    #[serde(default)]
    query: String,
}

/// Returns the model's query, or `None` if no search is needed. If the answer can't be read, the
/// query is the user's own text: without Search, the model would make up facts.
pub fn ask(
    runtimes: &Runtimes,
    chat: &Chat,
    text: String,
    cost: &mut RequestCost,
) -> Result<Option<String>, Failure> {
    let question = Chat {
        messages: vec![
            ChatMessage {
                role: Role::System,
                content: Cow::Borrowed(TASK),
            },
            ChatMessage {
                role: Role::User,
                content: Cow::Owned(transcript(chat)),
            },
        ],
        temperature: 0.0,
        max_tokens: MAX_TOKENS,
    };
    match runtimes.complete(&question, Some(&RESPONSE_FORMAT), cost) {
        Ok(generated) => Ok(read_query(&generated.content, text)),
        // The request's time for the runtime is used up, or the client has gone.
        Err(failure @ (_, RuntimeError::Call(CallError::TimedOut(_) | CallError::Cancelled))) => {
            Err(failure.into())
        }
        Err(_) => Ok(Some(text)),
    }
}

/// The end of the conversation as one text, so that the model judges it and does not answer it.
fn transcript(chat: &Chat) -> String {
    let lines: Vec<String> = chat
        .messages
        .iter()
        .filter_map(|message| {
            let role = match message.role {
                Role::System => return None,
                Role::User => "user",
                Role::Assistant => "assistant",
            };
            Some(format!(
                "{role}: {}",
                cleaning::cut(&cleaning::one_line(&message.content), MAX_MESSAGE)
            ))
        })
        .collect();
    lines[lines.len().saturating_sub(LAST_MESSAGES)..].join("\n")
}

/// Reads an answer. A runtime without `response_format` may put other text around the JSON.
fn read_query(answer: &str, text: String) -> Option<String> {
    let json = answer
        .find('{')
        .zip(answer.rfind('}'))
        .and_then(|(start, end)| answer.get(start..=end));
    match json.map(serde_json::from_str::<Decision>) {
        Some(Ok(Decision { search: false, .. })) => None,
        Some(Ok(Decision { query, .. })) if !query.trim().is_empty() => Some(query),
        _ => Some(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_a_model() {
        const OWN_TEXT: Option<&str> = Some("own text");
        for (answer, query) in [
            (
                r#"{"search": true, "query": "height of the lighthouse"}"#,
                Some("height of the lighthouse"),
            ),
            (
                "```json\n{\"search\": true, \"query\": \"x\"}\n```",
                Some("x"),
            ),
            (r#"{"search": true, "query": " "}"#, OWN_TEXT),
            (r#"{"search": true}"#, OWN_TEXT),
            (r#"{"search": false, "query": "x"}"#, None),
            (r#"{"search": false}"#, None),
            (r#"{"search": "no", "query": ""}"#, OWN_TEXT),
            (r#"{"search": tr"#, OWN_TEXT),
            ("} no {", OWN_TEXT),
            ("No.", OWN_TEXT),
            ("", OWN_TEXT),
        ] {
            let found = read_query(answer, "own text".to_owned());
            assert_eq!(found.as_deref(), query, "{answer}");
        }
    }

    #[test]
    fn the_model_sees_only_the_end_of_a_conversation() {
        let message = |role, content: &str| ChatMessage {
            role,
            content: Cow::Owned(content.to_owned()),
        };
        let mut messages = vec![message(Role::System, "secret")];
        messages.extend((0..9).map(|number| message(Role::User, &format!("a\nb {number}"))));
        messages.push(message(Role::Assistant, &"x".repeat(5_000)));
        let text = transcript(&Chat {
            messages,
            temperature: 0.0,
            max_tokens: 1,
        });
        assert!(
            text.starts_with("user: a b 6\nuser: a b 7\nuser: a b 8\nassistant: x"),
            "{text}"
        );
        assert!(text.len() < 1_100);
    }
}
