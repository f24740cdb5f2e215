//! The members of a request and of its messages, each with what it takes.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt::Display;

use serde::de::{Error, IgnoredAny, MapAccess, SeqAccess};

use super::slot::{Fill, Name, Number, Slot};
use crate::api::MODEL;
use crate::config::Compatibility;
use crate::runtime::{Chat, Message, Role};

const MAX_MESSAGES: usize = 20;
const MAX_CONTENT: usize = 10_000;
const MAX_CONTENT_TOGETHER: usize = 32_000;
const MAX_TEMPERATURE: f64 = 2.0;
const MAX_TOKENS: u16 = 512;
const DEFAULT_TEMPERATURE: f64 = 0.7;
const DEFAULT_TOKENS: u16 = 248;

/// How much of an unknown member's name a message repeats.
const NAME_SHOWN: usize = 64;

/// The whole request.
pub struct Body(pub Compatibility);

impl<'de> Slot<'de> for Body {
    type Value = Chat<'de>;

    fn refusal(&self, sent: &dyn Display) -> String {
        format!("The body must be a JSON object, not {sent}.")
    }

    fn object<A: MapAccess<'de>>(self, mut members: A) -> Result<Chat<'de>, A::Error> {
        let lenient = self.0 == Compatibility::OpenAi;
        let mut seen = BTreeSet::new();
        let (mut model, mut messages) = (None, None);
        let (mut temperature, mut max_tokens) = (None, None);
        while let Some(name) = members.next_key_seed(Fill(Name))? {
            if !seen.insert(name.clone()) {
                return Err(A::Error::custom(twice(shown(&name))));
            }
            match &*name {
                "model" => model = Some(members.next_value_seed(Fill(Model))?),
                "messages" => messages = Some(members.next_value_seed(Fill(Messages { lenient }))?),
                "temperature" => temperature = members.next_value_seed(Fill(Temperature { lenient }))?,
                "max_tokens" | "max_completion_tokens" if lenient || name == "max_tokens" => {
                    let place = if name == "max_tokens" { "max_tokens" } else { "max_completion_tokens" };
                    let given = members.next_value_seed(Fill(Limit { place, lenient }))?;
                    if given.is_some() && max_tokens.is_some() {
                        let told = "max_tokens and max_completion_tokens say the same: send one of them.";
                        return Err(A::Error::custom(told));
                    }
                    max_tokens = max_tokens.or(given);
                }
                "stream" if lenient => members.next_value_seed(Fill(Stream))?,
                "n" if lenient => members.next_value_seed(Fill(Count))?,
                unknown => members.next_value_seed(Fill(Unknown {
                    place: shown(unknown),
                    takes: "model, messages, temperature and max_tokens",
                    lenient,
                }))?,
            }
        }
        let missing = |name| A::Error::custom(format!("{name} is missing: a request needs it."));
        model.ok_or_else(|| missing("model"))?;
        Ok(Chat {
            messages: messages.ok_or_else(|| missing("messages"))?,
            temperature: temperature.unwrap_or(DEFAULT_TEMPERATURE),
            max_tokens: max_tokens.unwrap_or(DEFAULT_TOKENS),
        })
    }
}

struct Model;

impl<'de> Slot<'de> for Model {
    type Value = ();

    fn refusal(&self, sent: &dyn Display) -> String {
        format!("model must be \"{MODEL}\", not {sent}.")
    }

    fn text(self, text: Cow<'de, str>) -> Result<(), String> {
        if text == MODEL { Ok(()) } else { Err(self.refusal(&"another name")) }
    }
}

struct Messages {
    lenient: bool,
}

impl<'de> Slot<'de> for Messages {
    type Value = Vec<Message<'de>>;

    fn refusal(&self, sent: &dyn Display) -> String {
        format!("messages must be an array of 1 to {MAX_MESSAGES} messages, not {sent}.")
    }

    fn array<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let mut messages: Vec<Message> = Vec::new();
        let mut together = 0;
        while messages.len() < MAX_MESSAGES {
            let slot = OneMessage { index: messages.len(), lenient: self.lenient };
            let Some((message, length)) = items.next_element_seed(Fill(slot))? else {
                break;
            };
            messages.push(message);
            together += length;
        }
        let mut count = messages.len();
        while items.next_element::<IgnoredAny>()?.is_some() {
            count += 1;
        }
        if count == 0 || count > MAX_MESSAGES {
            return Err(A::Error::custom(self.refusal(&count)));
        }
        if together > MAX_CONTENT_TOGETHER {
            return Err(A::Error::custom(format!(
                "messages must have at most {MAX_CONTENT_TOGETHER} characters of content together, not {together}."
            )));
        }
        Ok(messages)
    }
}

struct OneMessage {
    index: usize,
    lenient: bool,
}

impl<'de> Slot<'de> for OneMessage {
    /// The message, and how many characters its content has.
    type Value = (Message<'de>, usize);

    fn refusal(&self, sent: &dyn Display) -> String {
        format!("messages[{}] must be an object with role and content, not {sent}.", self.index)
    }

    fn object<A: MapAccess<'de>>(self, mut members: A) -> Result<Self::Value, A::Error> {
        let Self { index, lenient } = self;
        let mut seen = BTreeSet::new();
        let (mut role, mut content) = (None, None);
        while let Some(name) = members.next_key_seed(Fill(Name))? {
            if !seen.insert(name.clone()) {
                return Err(A::Error::custom(twice(format!("messages[{index}].{}", shown(&name)))));
            }
            match &*name {
                "role" => role = Some(members.next_value_seed(Fill(RoleOf(index)))?),
                "content" => content = Some(members.next_value_seed(Fill(ContentOf(index)))?),
                unknown => members.next_value_seed(Fill(Unknown {
                    place: format!("messages[{index}].{}", shown(unknown)),
                    takes: "role and content",
                    lenient,
                }))?,
            }
        }
        let missing =
            |name| A::Error::custom(format!("messages[{index}].{name} is missing: a message needs it."));
        let role = role.ok_or_else(|| missing("role"))?;
        let (content, length) = content.ok_or_else(|| missing("content"))?;
        Ok((Message { role, content }, length))
    }
}

struct RoleOf(usize);

impl<'de> Slot<'de> for RoleOf {
    type Value = Role;

    fn refusal(&self, sent: &dyn Display) -> String {
        format!("messages[{}].role must be \"system\", \"user\" or \"assistant\", not {sent}.", self.0)
    }

    fn text(self, text: Cow<'de, str>) -> Result<Role, String> {
        match &*text {
            "system" => Ok(Role::System),
            "user" => Ok(Role::User),
            "assistant" => Ok(Role::Assistant),
            _ => Err(self.refusal(&"another role")),
        }
    }
}

struct ContentOf(usize);

impl<'de> Slot<'de> for ContentOf {
    /// The text, and how many characters it has.
    type Value = (Cow<'de, str>, usize);

    fn refusal(&self, sent: &dyn Display) -> String {
        format!(
            "messages[{}].content must be a string of at most {MAX_CONTENT} characters, not {sent}.",
            self.0
        )
    }

    fn text(self, text: Cow<'de, str>) -> Result<Self::Value, String> {
        match text.chars().count() {
            length if length > MAX_CONTENT => Err(self.refusal(&length)),
            length => Ok((text, length)),
        }
    }
}

struct Temperature {
    lenient: bool,
}

impl<'de> Slot<'de> for Temperature {
    type Value = Option<f64>;

    fn refusal(&self, sent: &dyn Display) -> String {
        format!("temperature must be a number from 0 to {MAX_TEMPERATURE}, not {sent}.")
    }

    fn null(self) -> Result<Self::Value, String> {
        if self.lenient { Ok(None) } else { Err(self.refusal(&"null")) }
    }

    fn number(self, number: Number) -> Result<Self::Value, String> {
        match number.as_f64() {
            // The sum turns a negative zero into the plain one.
            value if (0.0..=MAX_TEMPERATURE).contains(&value) => Ok(Some(value + 0.0)),
            _ => Err(self.refusal(&number)),
        }
    }
}

struct Limit {
    place: &'static str,
    lenient: bool,
}

impl<'de> Slot<'de> for Limit {
    type Value = Option<u16>;

    fn refusal(&self, sent: &dyn Display) -> String {
        format!(
            "{} must be an integer from 1 to {MAX_TOKENS}, written without a fraction, not {sent}.",
            self.place
        )
    }

    fn null(self) -> Result<Self::Value, String> {
        if self.lenient { Ok(None) } else { Err(self.refusal(&"null")) }
    }

    fn number(self, number: Number) -> Result<Self::Value, String> {
        match number {
            Number::Integer(value) if (1..=MAX_TOKENS.into()).contains(&value) => Ok(Some(value as u16)),
            _ => Err(self.refusal(&number)),
        }
    }
}

/// `stream`, of the clients that always say that they want no stream.
struct Stream;

impl<'de> Slot<'de> for Stream {
    type Value = ();

    fn refusal(&self, sent: &dyn Display) -> String {
        format!("stream must be false or left out, not {sent}: this service does not stream.")
    }

    fn null(self) -> Result<(), String> {
        Ok(())
    }

    fn boolean(self, value: bool) -> Result<(), String> {
        if value { Err(self.refusal(&value)) } else { Ok(()) }
    }
}

/// `n`, of the clients that always say that they want one choice.
struct Count;

impl<'de> Slot<'de> for Count {
    type Value = ();

    fn refusal(&self, sent: &dyn Display) -> String {
        format!("n must be 1 or left out, not {sent}: a completion has one choice.")
    }

    fn null(self) -> Result<(), String> {
        Ok(())
    }

    fn number(self, number: Number) -> Result<(), String> {
        match number {
            Number::Integer(1) => Ok(()),
            _ => Err(self.refusal(&number)),
        }
    }
}

/// A member that the specification does not have. Null asks for nothing, so it may be passed over; so may an
/// object that holds nothing else, as LiteLLM's answers have one.
struct Unknown {
    place: String,
    takes: &'static str,
    lenient: bool,
}

impl<'de> Slot<'de> for Unknown {
    type Value = ();

    fn refusal(&self, _: &dyn Display) -> String {
        let hint = if self.place == "stream" { " This service does not stream." } else { "" };
        format!("{} is not recognized: only {} are.{hint}", self.place, self.takes)
    }

    fn null(self) -> Result<(), String> {
        if self.lenient { Ok(()) } else { Err(self.refusal(&"null")) }
    }

    fn object<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        if !self.lenient {
            return Err(A::Error::custom(self.refusal(&"an object")));
        }
        while let Some(name) = members.next_key_seed(Fill(Name))? {
            let place = format!("{}.{}", self.place, shown(&name));
            members.next_value_seed(Fill(Unknown { place, ..self }))?;
        }
        Ok(())
    }
}

/// That a member's name stands in its object a second time.
fn twice(place: impl Display) -> String {
    format!("{place} stands there twice.")
}

fn shown(name: &str) -> String {
    match name.char_indices().nth(NAME_SHOWN) {
        Some((end, _)) => format!("\"{}…\"", &name[..end]),
        None if name.is_empty() => "\"\"".into(),
        None => name.into(),
    }
}
