//! The response: the completion object of part 2.2, or the error envelope of part 2.5.

use serde::Serialize;
use serde_json::json;

use super::MODEL;
use crate::error::{ApiError, Failure};
use crate::http::Response;
use crate::ledger::{LedgerRow, Tokens};
use crate::runtime::Generated;

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
