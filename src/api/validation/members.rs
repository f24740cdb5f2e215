//! The members of a request and of its messages, each with the values that it accepts.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::fmt::Display;

use serde::de::{Error, IgnoredAny, MapAccess, SeqAccess};

use super::json::{Json, MemberParser, Seed};
use crate::api::MODEL;
use crate::error::FailureCause;
use crate::runtime::{Chat, ChatMessage, Role};

const MAX_MESSAGES: usize = 20;
const MAX_CONTENT: usize = 10_000;
const MAX_CONTENT_TOGETHER: usize = 32_000;
const MAX_TEMPERATURE: f64 = 2.0;
const MAX_TOKENS: u16 = 512;
const DEFAULT_TEMPERATURE: f64 = 0.7;
const DEFAULT_TOKENS: u16 = 248;

/// The characters of an unknown member's name that a message repeats.
const MAX_NAME: usize = 64;

/// The members that a refusal names in the log: those of the API, and those that
/// `compatibility = "openai"` adds.
const REQUEST_MEMBERS: [&str; 7] = [
    "model",
    "messages",
    "temperature",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "n",
];
const MESSAGE_MEMBERS: [&str; 2] = ["role", "content"];

#[derive(Clone, Copy)]
pub struct RequestParser<'r> {
    /// Accepts the members that `compatibility = "openai"` adds.
    pub lenient: bool,
    /// The member that is being read, which is the one that is refused if reading fails.
    pub reading: &'r Cell<FailureCause>,
}

impl<'de> MemberParser<'de> for RequestParser<'_> {
    type Value = Chat<'de>;

    fn parse(self, sent: Json) -> Result<Chat<'de>, String> {
        Err(format!("The body must be a JSON object, not {sent}."))
    }

    fn object<A: MapAccess<'de>>(self, members: A) -> Result<Chat<'de>, A::Error> {
        let lenient = self.lenient;
        let (mut model, mut messages) = (None, None);
        let (mut temperature, mut max_tokens) = (None, None);
        self.each_member(&REQUEST_MEMBERS, "", members, |name, place, members| {
            match name {
                "model" => model = Some(members.next_value_seed(Seed(check_model))?),
                "messages" => messages = Some(members.next_value_seed(Seed(MessagesParser(self)))?),
                "temperature" => {
                    temperature =
                        members.next_value_seed(Seed(|sent| read_temperature(sent, lenient)))?;
                }
                "max_tokens" | "max_completion_tokens" if lenient || name == "max_tokens" => {
                    let given =
                        members.next_value_seed(Seed(|sent| read_limit(name, sent, lenient)))?;
                    if given.is_some() && max_tokens.is_some() {
                        let message =
                            "max_tokens and max_completion_tokens mean the same: send one of them.";
                        return Err(A::Error::custom(message));
                    }
                    max_tokens = max_tokens.or(given);
                }
                "stream" if lenient => members.next_value_seed(Seed(check_stream))?,
                "n" if lenient => members.next_value_seed(Seed(check_count))?,
                _ => members.next_value_seed(Seed(UnknownParser {
                    place,
                    takes: "model, messages, temperature and max_tokens",
                    lenient,
                }))?,
            }
            Ok(())
        })?;
        model.ok_or_else(|| self.missing::<A::Error>("", "model", "a request"))?;
        Ok(Chat {
            messages: messages
                .ok_or_else(|| self.missing::<A::Error>("", "messages", "a request"))?,
            temperature: temperature.unwrap_or(DEFAULT_TEMPERATURE),
            max_tokens: max_tokens.unwrap_or(DEFAULT_TOKENS),
        })
    }
}

impl RequestParser<'_> {
    /// Reads the members of an object, of which none may be there twice. `read` gets the name of
    /// each and its place for a message.
    fn each_member<'de, A: MapAccess<'de>>(
        self,
        known: &[&'static str],
        prefix: &str,
        mut members: A,
        mut read: impl FnMut(&str, String, &mut A) -> Result<(), A::Error>,
    ) -> Result<(), A::Error> {
        let mut seen = BTreeSet::new();
        while let Some(name) = members.next_key::<String>()? {
            // The log has the name of a known member only.
            let known = known.iter().find(|known| **known == name);
            self.reading.set(match known {
                Some(name) => FailureCause::Member(name),
                None => FailureCause::UnknownMember,
            });
            let place = format!("{prefix}{}", format_name(&name));
            if seen.contains(&name) {
                return Err(A::Error::custom(format!("Duplicate member: {place}.")));
            }
            read(&name, place, &mut members)?;
            seen.insert(name);
        }
        Ok(())
    }

    fn missing<E: Error>(self, prefix: &str, name: &'static str, object: &str) -> E {
        self.reading.set(FailureCause::Member(name));
        E::custom(format!("{prefix}{name} is missing: {object} needs it."))
    }
}

fn check_model(sent: Json) -> Result<(), String> {
    match sent {
        Json::Text(text) if text == MODEL => Ok(()),
        Json::Text(_) => Err(format!("model must be \"{MODEL}\".")),
        sent => Err(format!("model must be \"{MODEL}\", not {sent}.")),
    }
}

fn read_temperature(sent: Json, lenient: bool) -> Result<Option<f64>, String> {
    match &sent {
        Json::Null if lenient => return Ok(None),
        Json::Number(number) => {
            let value = number
                .as_f64()
                .filter(|value| (0.0..=MAX_TEMPERATURE).contains(value));
            // The sum turns a negative zero into the plain one.
            value.map(|value| Some(value + 0.0))
        }
        _ => None,
    }
    .ok_or_else(|| format!("temperature must be a number from 0 to {MAX_TEMPERATURE}, not {sent}."))
}

fn read_limit(place: &str, sent: Json, lenient: bool) -> Result<Option<u16>, String> {
    match &sent {
        Json::Null if lenient => return Ok(None),
        Json::Number(number) => {
            let value = number.as_u64().filter(|value| (1..=MAX_TOKENS.into()).contains(value));
            value.map(|value| Some(value as u16))
        }
        _ => None,
    }
    .ok_or_else(|| {
        format!("{place} must be an integer from 1 to {MAX_TOKENS}, written without a fraction, not {sent}.")
    })
}

/// `stream`, of the clients that always say that they want no stream.
fn check_stream(sent: Json) -> Result<(), String> {
    match sent {
        Json::Null | Json::Boolean(false) => Ok(()),
        sent => Err(format!(
            "stream must be false or left out, not {sent}: this service does not stream."
        )),
    }
}

/// `n`, of the clients that always say that they want one choice.
fn check_count(sent: Json) -> Result<(), String> {
    match sent {
        Json::Null => Ok(()),
        Json::Number(number) if number.as_u64() == Some(1) => Ok(()),
        sent => Err(format!(
            "n must be 1 or left out, not {sent}: a completion has one choice."
        )),
    }
}

struct MessagesParser<'r>(RequestParser<'r>);

impl<'de> MemberParser<'de> for MessagesParser<'_> {
    type Value = Vec<ChatMessage<'de>>;

    fn parse(self, sent: Json) -> Result<Self::Value, String> {
        Err(wrong_messages(sent))
    }

    fn array<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let mut messages: Vec<ChatMessage> = Vec::new();
        let mut together = 0;
        while messages.len() < MAX_MESSAGES {
            let parser = MessageParser {
                index: messages.len(),
                request: self.0,
            };
            let Some((message, length)) = items.next_element_seed(Seed(parser))? else {
                break;
            };
            self.0.reading.set(FailureCause::Member("messages"));
            messages.push(message);
            together += length;
        }
        let mut count = messages.len();
        while items.next_element::<IgnoredAny>()?.is_some() {
            count += 1;
        }
        if count == 0 || count > MAX_MESSAGES {
            return Err(A::Error::custom(wrong_messages(count)));
        }
        if together > MAX_CONTENT_TOGETHER {
            return Err(A::Error::custom(format!(
                "messages must have at most {MAX_CONTENT_TOGETHER} characters of content together, not {together}."
            )));
        }
        Ok(messages)
    }
}

fn wrong_messages(sent: impl Display) -> String {
    format!("messages must be an array of 1 to {MAX_MESSAGES} messages, not {sent}.")
}

struct MessageParser<'r> {
    index: usize,
    request: RequestParser<'r>,
}

impl<'de> MemberParser<'de> for MessageParser<'_> {
    /// The message, and how many characters its content has.
    type Value = (ChatMessage<'de>, usize);

    fn parse(self, sent: Json) -> Result<Self::Value, String> {
        Err(format!(
            "messages[{}] must be an object with role and content, not {sent}.",
            self.index
        ))
    }

    fn object<A: MapAccess<'de>>(self, members: A) -> Result<Self::Value, A::Error> {
        let Self { index, request } = self;
        let prefix = format!("messages[{index}].");
        let (mut role, mut content) = (None, None);
        request.each_member(
            &MESSAGE_MEMBERS,
            &prefix,
            members,
            |name, place, members| {
                match name {
                    "role" => {
                        role = Some(members.next_value_seed(Seed(|sent| read_role(&place, sent)))?)
                    }
                    "content" => {
                        content =
                            Some(members.next_value_seed(Seed(|sent| read_content(&place, sent)))?);
                    }
                    _ => members.next_value_seed(Seed(UnknownParser {
                        place,
                        takes: "role and content",
                        lenient: request.lenient,
                    }))?,
                }
                Ok(())
            },
        )?;
        let role = role.ok_or_else(|| request.missing::<A::Error>(&prefix, "role", "a message"))?;
        let (content, length) =
            content.ok_or_else(|| request.missing::<A::Error>(&prefix, "content", "a message"))?;
        Ok((ChatMessage { role, content }, length))
    }
}

fn read_role(place: &str, sent: Json) -> Result<Role, String> {
    let refuse = |sent: &dyn Display| {
        Err(format!(
            "{place} must be \"system\", \"user\" or \"assistant\", not {sent}."
        ))
    };
    match sent {
        Json::Text(text) => match &*text {
            "system" => Ok(Role::System),
            "user" => Ok(Role::User),
            "assistant" => Ok(Role::Assistant),
            _ => refuse(&"another role"),
        },
        sent => refuse(&sent),
    }
}

/// The text, and how many characters it has.
fn read_content<'de>(place: &str, sent: Json<'de>) -> Result<(Cow<'de, str>, usize), String> {
    let refuse = |sent: &dyn Display| {
        Err(format!(
            "{place} must be a string of at most {MAX_CONTENT} characters, not {sent}."
        ))
    };
    match sent {
        Json::Text(text) => match text.chars().count() {
            length if length > MAX_CONTENT => refuse(&length),
            length => Ok((text, length)),
        },
        sent => refuse(&sent),
    }
}

/// A member that the specification does not have. Null asks for nothing, so it may be ignored. So
/// may an object that contains only nulls: LiteLLM adds one to its answers, and clients send these
/// back.
struct UnknownParser {
    place: String,
    takes: &'static str,
    lenient: bool,
}

impl<'de> MemberParser<'de> for UnknownParser {
    type Value = ();

    fn parse(self, sent: Json) -> Result<(), String> {
        if self.lenient && matches!(sent, Json::Null) {
            return Ok(());
        }
        let hint = match (&*self.place, sent) {
            ("stream", Json::Boolean(false)) => {
                " This service does not stream: leave it out, or ask the operator to accept false with the setting \
                 compatibility = \"openai\"."
            }
            ("stream", _) => " This service does not stream.",
            ("max_completion_tokens", _) => " Use max_tokens.",
            _ => "",
        };
        Err(format!(
            "{} is not recognized: only {} are.{hint}",
            self.place, self.takes
        ))
    }

    fn object<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        if !self.lenient {
            return self.parse(Json::Object).map_err(A::Error::custom);
        }
        while let Some(name) = members.next_key::<String>()? {
            let place = format!("{}.{}", self.place, format_name(&name));
            members.next_value_seed(Seed(UnknownParser { place, ..self }))?;
        }
        Ok(())
    }
}

fn format_name(name: &str) -> String {
    match name.char_indices().nth(MAX_NAME) {
        Some((end, _)) => format!("\"{}…\"", &name[..end]),
        None if name.is_empty() => "\"\"".into(),
        None => name.into(),
    }
}
