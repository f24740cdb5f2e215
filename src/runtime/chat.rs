//! A conversation, and the text with which a runtime continues it.

use std::borrow::Cow;

use serde::Serialize;

use crate::ledger::Tokens;

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
