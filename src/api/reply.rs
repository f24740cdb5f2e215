//! The response: the completion object of part 2.2, or the error envelope of part 2.5.

use std::fmt::Write;

use serde::Serialize;
use serde_json::{Value, json};

use super::head::{MODEL, MODEL_PATH};
use super::validation::StreamOptions;
use crate::error::{ApiError, Failure};
use crate::http::Response;
use crate::id::RequestId;
use crate::keys::Budget;
use crate::ledger::{LedgerRow, Tokens};
use crate::runtime::Generated;
use crate::when::Zone;

const EVENTS: &str = "text/event-stream; charset=utf-8";

#[derive(Serialize)]
struct Completion<'a> {
    id: &'a str,
    object: &'static str,
    created: i64,
    model: &'static str,
    choices: [Choice<'a>; 1],
    usage: Tokens,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: u8,
    message: ReplyMessage<'a>,
    finish_reason: &'a str,
}

#[derive(Serialize)]
struct ReplyMessage<'a> {
    role: &'static str,
    content: &'a str,
}

pub fn completion(row: &LedgerRow, generated: &Generated) -> Response {
    let body = serde_json::to_vec(&Completion {
        id: &row.request_id,
        object: "chat.completion",
        created: row.created,
        model: MODEL,
        choices: [Choice {
            index: 0,
            message: ReplyMessage {
                role: "assistant",
                content: &generated.content,
            },
            // A text without a reason means that the runtime finished normally.
            finish_reason: generated.finish_reason.as_deref().unwrap_or("stop"),
        }],
        usage: row.tokens,
    })
    .expect("a completion should have its JSON");
    Response::json(200, body).with("x-request-id", &row.request_id)
}

/// The same as server-sent events, as a whole: its row is durable before the first byte is sent.
pub fn stream(row: &LedgerRow, generated: &Generated, options: StreamOptions) -> Response {
    let reason = generated.finish_reason.as_deref().unwrap_or("stop");
    let delta = json!({"role": "assistant", "content": generated.content});
    let choice = |delta, reason| json!([{"index": 0, "delta": delta, "finish_reason": reason}]);
    let mut chunks = vec![
        json!({"choices": choice(delta, Value::Null)}),
        json!({"choices": choice(json!({}), reason.into())}),
    ];
    if options.include_usage {
        chunks.push(json!({"choices": [], "usage": row.tokens}));
    }
    let mut body = String::new();
    for mut chunk in chunks {
        chunk["id"] = row.request_id.as_str().into();
        chunk["object"] = "chat.completion.chunk".into();
        chunk["created"] = row.created.into();
        chunk["model"] = MODEL.into();
        body += &format!("data: {}\n\n", in_ascii(&chunk.to_string()));
    }
    body += "data: [DONE]\n\n";
    Response::new(200, EVENTS, body.into_bytes()).with("x-request-id", &row.request_id)
}

/// Escapes what is not ASCII in a JSON text: some clients take U+2028, U+2029 and U+0085 for the end
/// of a line.
fn in_ascii(json: &str) -> String {
    let mut escaped = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            c if c.is_ascii() => escaped.push(c),
            c => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    write!(escaped, "\\u{unit:04x}").expect("a string takes any text");
                }
            }
        }
    }
    escaped
}

/// The list of models, or the one model.
pub fn models(path: &str) -> Response {
    let model = json!({"id": MODEL, "object": "model", "created": 0, "owned_by": MODEL});
    let body = match path {
        MODEL_PATH => model,
        _ => json!({"object": "list", "data": [model]}),
    };
    Response::json(200, body.to_string().into()).with("x-request-id", RequestId::now().to_string())
}

/// Says what is left of a key's budget: as its look-up found it, less the tokens of this request.
pub fn with_budget(response: Response, budget: &Budget, row: &LedgerRow, zone: &Zone) -> Response {
    let own = row.tokens.total_tokens.unwrap_or(0);
    let left = (budget.tokens - budget.used - own).max(0);
    let until = budget.per.containing(row.created, zone).until;
    let seconds = (until - row.created).max(0);
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    response
        .with("x-ratelimit-limit-tokens", budget.tokens.to_string())
        .with("x-ratelimit-remaining-tokens", left.to_string())
        .with(
            "x-ratelimit-reset-tokens",
            format!("{hours}h{minutes}m{}s", seconds % 60),
        )
}

pub fn error(id: impl ToString, failure: &Failure) -> Response {
    let id = id.to_string();
    let error = json!({"code": failure.error.code(), "message": failure.message, "request_id": id});
    let mut response = Response::json(
        failure.error.status(),
        json!({ "error": error }).to_string().into(),
    );
    match failure.error {
        ApiError::InvalidApiKey => response = response.with("www-authenticate", "Bearer"),
        ApiError::ServiceUnavailable | ApiError::SearchUnavailable => {
            // A full queue clears quickly; a fault of the host, such as a full disk, does not.
            let seconds = if failure.cause.is_shed() { "1" } else { "5" };
            response = response.with("retry-after", seconds);
        }
        _ => {}
    }
    if failure.no_retry {
        response = response.with("x-should-retry", "false");
    }
    response.with("x-request-id", id)
}
