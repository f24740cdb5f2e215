//! The request's content: its type, its JSON, and every member of it.
//!
//! The body is read as a tree of raw values, of which only the wanted ones are decoded: `serde`'s
//! derived types would repeat in their messages the text that was sent, and could name neither the
//! bound nor the length. An unwanted value costs no stack, and a byte of memory for each level of
//! its nesting while it is skipped.

use std::borrow::Cow;
use std::fmt::{self, Display};

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Number;
use serde_json::value::RawValue;

use super::head::MODEL;
use crate::config::Compatibility;
use crate::error::{Failure, FailureCause};
use crate::http::RequestHead;
use crate::runtime::{Chat, ChatMessage, Role};

const MAX_MESSAGES: usize = 20;
const MAX_CONTENT: usize = 10_000;
const MAX_CONTENT_TOGETHER: usize = 32_000;
const MAX_TEMPERATURE: f64 = 2.0;
const MAX_TOKENS: u16 = 512;
const DEFAULT_TEMPERATURE: f64 = 0.7;
const DEFAULT_TOKENS: u16 = 248;

/// The members of one object.
const MAX_MEMBERS: usize = 64;

/// The characters of an unknown member's name that a message repeats.
const MAX_NAME: usize = 64;

/// The names in the path of an unknown member: objects that contain only nulls are opened no deeper.
const MAX_UNKNOWN_NAMES: usize = 4;

/// The members that a refusal names in the log: those of the API, and those that
/// `compatibility = "openai"` adds, besides `HARMLESS`.
const REQUEST_MEMBERS: [&str; 7] = [
    "model",
    "messages",
    "temperature",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "n",
];
const OPENAI_MEMBERS: [&str; 2] = ["stream_options", "tools"];
const MESSAGE_MEMBERS: [&str; 2] = ["role", "content"];

/// The members that `compatibility = "openai"` accepts as well, with the values that change nothing;
/// none means any value. Null, `[]` and `{}` ask for nothing, whatever the member.
const HARMLESS: [(&str, &[&str]); 14] = [
    ("n", &["1"]),
    ("top_p", &["1"]),
    ("presence_penalty", &["0"]),
    ("frequency_penalty", &["0"]),
    ("logprobs", &["false"]),
    ("store", &["false"]),
    ("tool_choice", &["\"none\"", "\"auto\""]),
    ("response_format", &["{\"type\":\"text\"}"]),
    ("service_tier", &["\"auto\""]),
    ("parallel_tool_calls", &[]),
    ("user", &[]),
    ("metadata", &[]),
    ("safety_identifier", &[]),
    ("prompt_cache_key", &[]),
];

/// What a request asks for.
#[derive(Debug)]
pub struct ChatRequest<'a> {
    pub chat: Chat<'a>,
    /// The answer as server-sent events; `None` for one as JSON.
    pub stream: Option<StreamOptions>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamOptions {
    pub include_usage: bool,
}

/// Reads a body whose `Content-Type` is JSON.
pub fn read<'a>(
    head: &RequestHead,
    body: &'a [u8],
    compatibility: Compatibility,
) -> Result<ChatRequest<'a>, Failure> {
    check_content_type(head)?;
    parse(body, compatibility)
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

/// Reads what a body asks for, or says what is wrong with it.
pub fn parse(body: &[u8], compatibility: Compatibility) -> Result<ChatRequest<'_>, Failure> {
    let lenient = compatibility == Compatibility::OpenAi;
    let body = read_body(body)?;
    let (mut model, mut messages) = (None, None);
    let (mut temperature, mut max_tokens) = (None, None);
    let (mut is_stream, mut options) = (false, StreamOptions::default());
    let mut known = REQUEST_MEMBERS.to_vec();
    if lenient {
        known.extend(
            OPENAI_MEMBERS
                .iter()
                .chain(HARMLESS.iter().map(|(name, _)| name)),
        );
    }
    for (name, sent) in body.members("a JSON object", &known)? {
        match &*name {
            "model" => model = Some(check_model(&sent)?),
            "messages" => messages = Some(read_messages(&sent, lenient)?),
            _ if lenient && sent.asks_for_nothing() => (),
            "temperature" => temperature = Some(read_temperature(&sent)?),
            "max_tokens" | "max_completion_tokens" if lenient || name == "max_tokens" => {
                if max_tokens.replace(read_limit(&sent, lenient)?).is_some() {
                    let message =
                        "max_tokens and max_completion_tokens mean the same: send one of them.";
                    return Err(Failure::invalid(sent.cause, message));
                }
            }
            "stream" if lenient => is_stream = sent.boolean()?,
            "stream_options" if lenient => options = read_stream_options(&sent)?,
            "tools" if lenient => {
                return Err(sent.refused(
                    "are not supported: this service answers with text. Switch them off in your program (docs/clients.md)",
                ));
            }
            name if lenient && let Some(values) = harmless(name) => check_harmless(&sent, values)?,
            _ => {
                let takes = "model, messages, temperature and max_tokens";
                check_unknown(&sent, takes, lenient, MAX_UNKNOWN_NAMES)?;
            }
        }
    }
    model.ok_or_else(|| body.missing("model", "a request"))?;
    let default = if lenient { MAX_TOKENS } else { DEFAULT_TOKENS };
    let chat = Chat {
        messages: messages.ok_or_else(|| body.missing("messages", "a request"))?,
        temperature: temperature.unwrap_or(DEFAULT_TEMPERATURE),
        max_tokens: max_tokens.unwrap_or(default),
    };
    let stream = is_stream.then_some(options);
    Ok(ChatRequest { chat, stream })
}

/// Returns the values of a member that change nothing.
fn harmless(name: &str) -> Option<&'static [&'static str]> {
    let found = HARMLESS.iter().find(|(known, _)| *known == name);
    found.map(|(_, values)| *values)
}

/// The message repeats nothing: interfaces show it to the people who use them.
fn check_harmless(sent: &Sent, values: &[&str]) -> Result<(), Failure> {
    if values.is_empty() || values.iter().any(|value| sent.equals(value)) {
        return Ok(());
    }
    let values = values.join(" or ");
    Err(sent.refused(format_args!("must be {values} or left out")))
}

fn read_stream_options(sent: &Sent) -> Result<StreamOptions, Failure> {
    let mut options = StreamOptions::default();
    for (name, option) in sent.members("an object", &[])? {
        match &*name {
            "include_usage" => options.include_usage = option.boolean()?,
            // It pads chunks, which changes nothing here.
            "include_obfuscation" => {}
            _ => check_unknown(&option, "include_usage", true, MAX_UNKNOWN_NAMES)?,
        }
    }
    Ok(options)
}

/// Everything in the body is JSON, but for the escapes of strings and the size of numbers: they are
/// checked where the value is wanted.
fn read_body(body: &[u8]) -> Result<Sent<'_>, Failure> {
    let not_json = |error: &dyn Display| {
        let message = format!("The body is not valid JSON: {error}.");
        Failure::invalid(FailureCause::Body, message)
    };
    let text = str::from_utf8(body).map_err(|_| not_json(&"it is not encoded in UTF-8"))?;
    let raw: &RawValue = serde_json::from_str(text).map_err(|error| not_json(&error))?;
    Ok(Sent {
        path: String::new(),
        cause: FailureCause::Body,
        raw: raw.get(),
    })
}

fn check_model(sent: &Sent) -> Result<(), Failure> {
    let expected = format!("\"{MODEL}\"");
    match sent.text(&expected)? {
        text if text == MODEL => Ok(()),
        _ => Err(sent.refused(format_args!("must be {expected}"))),
    }
}

fn read_temperature(sent: &Sent) -> Result<f64, Failure> {
    match sent.number::<f64>() {
        // The sum turns a negative zero into the plain one.
        Some(value) if (0.0..=MAX_TEMPERATURE).contains(&value) => Ok(value + 0.0),
        _ => {
            let expected = format_args!("a number from 0 to {MAX_TEMPERATURE}");
            Err(sent.wrong(expected, sent.value()))
        }
    }
}

/// With `lenient`, a limit above the most is the most: `finish_reason` says that the text was cut.
fn read_limit(sent: &Sent, lenient: bool) -> Result<u16, Failure> {
    match sent.number::<u64>() {
        Some(value) if (1..=MAX_TOKENS.into()).contains(&value) => Ok(value as u16),
        Some(value) if lenient && value > 0 => Ok(MAX_TOKENS),
        _ => {
            let expected =
                format_args!("an integer from 1 to {MAX_TOKENS}, written without a fraction");
            Err(sent.wrong(expected, sent.value()))
        }
    }
}

fn read_messages<'a>(sent: &Sent<'a>, lenient: bool) -> Result<Vec<ChatMessage<'a>>, Failure> {
    let expected = format!("an array of 1 to {MAX_MESSAGES} messages");
    sent.must_be(&expected, sent.raw.starts_with('['))?;
    let not_json = |error| sent.not_json(error);
    // Nothing is allocated to count.
    let count = serde_json::from_str::<Vec<IgnoredAny>>(sent.raw)
        .map_err(not_json)?
        .len();
    if count == 0 || count > MAX_MESSAGES {
        return Err(sent.wrong(expected, count));
    }
    let elements: Vec<&RawValue> = serde_json::from_str(sent.raw).map_err(not_json)?;
    let mut messages = Vec::with_capacity(count);
    for (index, element) in elements.into_iter().enumerate() {
        let (path, raw) = (format!("messages[{index}]"), element.get());
        messages.push(read_message(&Sent { path, raw, ..*sent }, lenient)?);
    }
    let together: usize = messages
        .iter()
        .map(|message| message.content.chars().count())
        .sum();
    if together > MAX_CONTENT_TOGETHER {
        return Err(sent.refused(format_args!(
            "must have at most {MAX_CONTENT_TOGETHER} characters of content together, not {together}"
        )));
    }
    Ok(messages)
}

fn read_message<'a>(message: &Sent<'a>, lenient: bool) -> Result<ChatMessage<'a>, Failure> {
    let (mut role, mut content) = (None, None);
    for (name, sent) in message.members("an object with role and content", &MESSAGE_MEMBERS)? {
        match &*name {
            "role" => role = Some(read_role(&sent, lenient)?),
            "content" if lenient && sent.raw.starts_with('[') => {
                content = Some(read_parts(&sent)?);
            }
            "content" => content = Some(read_content(&sent)?),
            _ => check_unknown(&sent, "role and content", lenient, MAX_UNKNOWN_NAMES)?,
        }
    }
    Ok(ChatMessage {
        role: role.ok_or_else(|| message.missing("role", "a message"))?,
        content: content.ok_or_else(|| message.missing("content", "a message"))?,
    })
}

fn read_role(sent: &Sent, lenient: bool) -> Result<Role, Failure> {
    let expected = "\"system\", \"user\" or \"assistant\"";
    match &*sent.text(expected)? {
        "system" => Ok(Role::System),
        "developer" if lenient => Ok(Role::System),
        "user" => Ok(Role::User),
        "assistant" => Ok(Role::Assistant),
        _ => Err(sent.wrong(expected, "another role")),
    }
}

fn read_content<'a>(sent: &Sent<'a>) -> Result<Cow<'a, str>, Failure> {
    let expected = format!("a string of at most {MAX_CONTENT} characters");
    let text = sent.text(&expected)?;
    match text.chars().count() {
        length if length > MAX_CONTENT => Err(sent.wrong(expected, length)),
        _ => Ok(text),
    }
}

/// The texts of a list of text parts, a line each.
fn read_parts<'a>(sent: &Sent<'a>) -> Result<Cow<'a, str>, Failure> {
    let parts: Vec<&RawValue> =
        serde_json::from_str(sent.raw).map_err(|error| sent.not_json(error))?;
    let mut content = String::new();
    for (index, part) in parts.into_iter().enumerate() {
        let (path, raw) = (format!("{}[{index}]", sent.path), part.get());
        let part = Sent { path, raw, ..*sent };
        let (mut kind, mut text) = (None, None);
        for (name, member) in part.members("an object with type and text", &[])? {
            match &*name {
                "type" => kind = Some(member.equals("\"text\"")),
                "text" => text = Some(read_content(&member)?),
                _ => check_unknown(&member, "type and text", true, MAX_UNKNOWN_NAMES)?,
            }
        }
        if kind != Some(true) {
            return Err(part.refused("must be a part of the type \"text\""));
        }
        if index > 0 {
            content.push('\n');
        }
        content += &text.ok_or_else(|| part.missing("text", "a part"))?;
    }
    match content.chars().count() {
        length if length > MAX_CONTENT => {
            let expected = format_args!("texts of at most {MAX_CONTENT} characters together");
            Err(sent.wrong(expected, length))
        }
        _ => Ok(content.into()),
    }
}

/// A member that the specification does not have. Null asks for nothing, so it may be ignored. So
/// may an object that contains only nulls: LiteLLM adds one to its answers, and clients send these
/// back. Each level of nesting is read once more, so only a few are opened.
fn check_unknown(sent: &Sent, takes: &str, lenient: bool, names: usize) -> Result<(), Failure> {
    if lenient && sent.asks_for_nothing() {
        return Ok(());
    }
    if lenient && sent.raw.starts_with('{') && names > 1 {
        for (_, member) in sent.members("null", &[])? {
            check_unknown(&member, takes, lenient, names - 1)?;
        }
        return Ok(());
    }
    let hint = match &*sent.path {
        "stream" => {
            " Leave it out, or ask the operator to accept it with the setting compatibility = \"openai\"."
        }
        "max_completion_tokens" => " Use max_tokens.",
        _ => "",
    };
    let message = format!("{} is not recognized: only {takes} are.{hint}", sent.path);
    Err(Failure::invalid(sent.cause, message))
}

/// A value that was sent, and how a refusal names it to the client and in the log.
struct Sent<'a> {
    /// Empty for the body.
    path: String,
    cause: FailureCause,
    raw: &'a str,
}

impl<'a> Sent<'a> {
    fn refused(&self, message: impl Display) -> Failure {
        let place = if self.path.is_empty() {
            "The body"
        } else {
            &self.path
        };
        Failure::invalid(self.cause, format!("{place} {message}."))
    }

    /// Null, an empty list and an empty object.
    fn asks_for_nothing(&self) -> bool {
        let inner = self.raw.get(1..self.raw.len() - 1).unwrap_or_default();
        let is_empty = self.raw.starts_with(['[', '{']) && inner.trim().is_empty();
        self.raw == "null" || is_empty
    }

    /// Whether the value is this one, which is short. Numbers are equal by their value.
    fn equals(&self, value: &str) -> bool {
        const MOST: usize = 64;
        let parse = |text: &str| serde_json::from_str::<serde_json::Value>(text).ok();
        let is_same_number = || Some(self.number::<f64>()? == value.parse::<f64>().ok()?);
        self.raw.len() <= MOST
            && (parse(self.raw) == parse(value) || is_same_number() == Some(true))
    }

    fn boolean(&self) -> Result<bool, Failure> {
        match self.raw {
            "true" => Ok(true),
            "false" => Ok(false),
            _ => Err(self.refused("must be true or false")),
        }
    }

    fn wrong(&self, expected: impl Display, sent: impl Display) -> Failure {
        self.refused(format_args!("must be {expected}, not {sent}"))
    }

    fn must_be(&self, expected: &str, holds: bool) -> Result<(), Failure> {
        if holds {
            return Ok(());
        }
        Err(self.wrong(expected, self.value()))
    }

    /// The parser's text repeats nothing. Its position counts from the beginning of the value.
    fn not_json(&self, error: serde_json::Error) -> Failure {
        self.refused(format_args!("is not valid JSON: {error}"))
    }

    fn path_of(&self, name: &str) -> String {
        match &*self.path {
            "" => name.into(),
            path => format!("{path}.{name}"),
        }
    }

    fn missing(&self, name: &'static str, object: &str) -> Failure {
        let message = format!("{} is missing: {object} needs it.", self.path_of(name));
        Failure::invalid(FailureCause::Member(name), message)
    }

    /// The value in a message: itself if it is short, else its kind.
    fn value(&self) -> Cow<'a, str> {
        match self.raw.as_bytes()[0] {
            b'"' => "a string".into(),
            b'[' => "an array".into(),
            b'{' => "an object".into(),
            b'n' | b't' | b'f' => self.raw.into(),
            _ => match self.number::<Number>() {
                Some(number) => number.to_string().into(),
                None => "a number that is too large".into(),
            },
        }
    }

    /// Returns `None` if the value is no number of this type. The parser is not asked about a string:
    /// its error would be a copy of it.
    fn number<T: Deserialize<'a>>(&self) -> Option<T> {
        if matches!(self.raw.as_bytes()[0], b'-' | b'0'..=b'9') {
            serde_json::from_str(self.raw).ok()
        } else {
            None
        }
    }

    fn text(&self, expected: &str) -> Result<Cow<'a, str>, Failure> {
        self.must_be(expected, self.raw.starts_with('"'))?;
        let Text(text) = serde_json::from_str(self.raw).map_err(|error| self.not_json(error))?;
        Ok(text)
    }

    /// The members of an object, of which none may be there twice, by their names. Those that are
    /// not `known` have no name in the log.
    fn members(
        &self,
        expected: &str,
        known: &[&'static str],
    ) -> Result<Vec<(Cow<'a, str>, Self)>, Failure> {
        self.must_be(expected, self.raw.starts_with('{'))?;
        let (first, count) = serde_json::Deserializer::from_str(self.raw)
            .deserialize_map(MembersVisitor)
            .map_err(|error| self.not_json(error))?;
        if count > MAX_MEMBERS {
            return Err(self.refused(format_args!(
                "must have at most {MAX_MEMBERS} members, not {count}"
            )));
        }
        let mut members: Vec<(Cow<str>, Self)> = Vec::with_capacity(count);
        for (name, raw) in first {
            let path = self.path_of(&format_name(&name));
            let cause = match known.iter().find(|known| **known == name) {
                Some(name) => FailureCause::Member(name),
                None => FailureCause::UnknownMember,
            };
            if members.iter().any(|(other, _)| *other == name) {
                let message = format!("Duplicate member: {path}.");
                return Err(Failure::invalid(cause, message));
            }
            let raw = raw.get();
            members.push((name, Self { path, cause, raw }));
        }
        Ok(members)
    }
}

/// A member's name in a message.
fn format_name(name: &str) -> Cow<'_, str> {
    match name.char_indices().nth(MAX_NAME) {
        Some((end, _)) => format!("\"{}…\"", &name[..end]).into(),
        None if name.is_empty() => "\"\"".into(),
        None => name.into(),
    }
}

/// Reads the first members of an object, and how many there are.
struct MembersVisitor;

impl<'de> Visitor<'de> for MembersVisitor {
    type Value = (Vec<(Cow<'de, str>, &'de RawValue)>, usize);

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Self::Value, A::Error> {
        let mut first = Vec::new();
        while first.len() < MAX_MEMBERS
            && let Some((Text(name), raw)) = members.next_entry()?
        {
            first.push((name, raw));
        }
        let mut count = first.len();
        while members.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
            count += 1;
        }
        Ok((first, count))
    }
}

/// A string, borrowed if it has no escapes: `Cow` alone is always a copy.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

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

    #[test]
    fn the_page_on_clients_names_what_changes_nothing() {
        let page = include_str!("../../docs/clients.md").replace(' ', "");
        for (name, values) in HARMLESS {
            let value = values.first().map(|value| format!(":{value}"));
            let named = format!("`{name}{}`", value.unwrap_or_default());
            assert!(page.contains(&named), "{named}");
            assert!(values.iter().all(|value| page.contains(value)), "{name}");
        }
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
        let chat = parse(body.as_bytes(), STRICT)
            .expect("the least there can be")
            .chat;
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
            let chat = parse(body.as_bytes(), STRICT).expect(members).chat;
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
        let chat = parse(body.as_bytes(), STRICT)
            .expect("escapes are text")
            .chat;
        assert_eq!(chat.messages[0].content, " é🌊\n");
        let body = of(r#"[{"content":" é🌊 ","role":"user"}]"#);
        let chat = parse(body.as_bytes(), STRICT)
            .expect("text without escapes")
            .chat;
        assert!(matches!(chat.messages[0].content, Cow::Borrowed(" é🌊 ")));
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
                with(r#","temperature":1e400"#),
                &["temperature", "0 to 2", "too large"],
            ),
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
            (
                with(r#","stream":true"#),
                &["stream", "Leave it out", "compatibility"],
            ),
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
                of(r#"[{"role":"user","content":"\ud800"}]"#),
                &["messages[0].content is not valid JSON", "column 8"],
            ),
            (
                of(r#"[{"role":"user","\ud800":"x"}]"#),
                &["messages[0] is not valid JSON"],
            ),
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
        let body = with(r#","xyzzy":{"stream":true}"#);
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
            &with("").replace('x', r"\ud800"),
            &with("").replace('x', r"\udf0a\ud83c"),
        ] {
            refused(body, STRICT, &["not valid JSON", "line"]);
        }
        assert!(parse(b"\xff\xfe", STRICT).is_err_and(|failure| failure.message.contains("UTF-8")));
        for deep in [
            "[".repeat(100_000),
            r#"{"a":"#.repeat(40_000),
            r#"{"a":"#.repeat(40_000) + "1" + &"}".repeat(40_000),
            with(r#","model":"#) + &"[".repeat(100_000) + &"]".repeat(100_000) + "}",
            with(r#","a":"#) + &"[".repeat(100_000),
        ] {
            refused(&deep, STRICT, &[]);
            refused(&deep, OPENAI, &[]);
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
        let nulls = |count: usize| -> String {
            (0..count)
                .map(|n| format!(r#","a{}":null"#, "x".repeat(n)))
                .collect()
        };
        for (members, max_tokens) in [
            (r#","stream":false"#, 512),
            (r#","stream":null,"n":1,"tools":null,"user":null"#, 512),
            (r#","n":null,"temperature":null,"max_tokens":null"#, 512),
            (r#","max_completion_tokens":7"#, 7),
            (r#","max_completion_tokens":null,"max_tokens":7"#, 7),
            (r#","max_tokens":1000000000000"#, 512),
            (r#","tools":[],"stop":[ ],"logit_bias":{},"seed":null"#, 512),
            (
                r#","top_p":1.0,"n":1,"presence_penalty":0.0,"frequency_penalty":-0"#,
                512,
            ),
            (
                r#","logprobs":false,"store":false,"service_tier":"auto""#,
                512,
            ),
            (r#","tool_choice":"none","parallel_tool_calls":true"#, 512),
            (
                r#","tool_choice":"auto","response_format":{ "type" : "text" }"#,
                512,
            ),
            (
                r#","user":"u","metadata":{"a":1},"safety_identifier":"x""#,
                512,
            ),
            (&nulls(62), 512),
        ] {
            let body = with(members);
            let asked = parse(body.as_bytes(), OPENAI).expect(members);
            assert_eq!(
                (asked.chat.max_tokens, asked.stream),
                (max_tokens, None),
                "{members}"
            );
            assert!(parse(body.as_bytes(), STRICT).is_err(), "{members}");
        }
        let answer = of(
            r#"[{"role":"assistant","content":"x","refusal":null,"a":{"b":null,"c":{"d":null}}}]"#,
        );
        assert!(parse(answer.as_bytes(), OPENAI).is_ok());
        assert!(parse(answer.as_bytes(), STRICT).is_err());
        for (body, words) in [
            (
                with(r#","stream":1"#),
                &["stream must be true or false."][..],
            ),
            (with(r#","n":2"#), &["n must be 1 or left out."]),
            (with(r#","top_p":0.9"#), &["top_p must be 1 or left out."]),
            (
                with(r#","tool_choice":"required""#),
                &[r#"tool_choice must be "none" or "auto" or left out."#],
            ),
            (
                with(r#","response_format":{"type":"json_object"}"#),
                &[r#"response_format must be {"type":"text"} or left out."#],
            ),
            (
                with(r#","tools":[{}]"#),
                &["tools are not supported", "docs/clients.md"],
            ),
            (with(r#","stop":["x"]"#), &["stop is not recognized"]),
            (with(r#","seed":7"#), &["seed is not recognized"]),
            (
                with(r#","stream_options":{"include_usage":1}"#),
                &["stream_options.include_usage must be true or false."],
            ),
            (with(r#","a":{"a":null,"b":1}"#), &["a.b is not recognized"]),
            (
                with(r#","max_tokens":7,"max_completion_tokens":7"#),
                &["send one of them"],
            ),
            (
                with(r#","max_completion_tokens":0"#),
                &["max_completion_tokens", "0"],
            ),
            (with(r#","user":null,"user":null"#), &["user", "Duplicate"]),
            (with(r#","a":{"b":null,"b":null}"#), &["a.b", "Duplicate"]),
            (
                with(r#","a":{"b":{"c":{"d":{"e":null}}}}"#),
                &["a.b.c.d is not recognized"],
            ),
            (with(&nulls(63)), &["The body", "64 members", "65"]),
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

    #[test]
    fn a_stream_and_what_it_ends_with() {
        for (members, stream) in [
            ("", None),
            (
                r#","stream":false,"stream_options":{"include_usage":true}"#,
                None,
            ),
            (r#","stream":true"#, Some(false)),
            (r#","stream":true,"stream_options":{}"#, Some(false)),
            (
                r#","stream":true,"stream_options":{"include_usage":true}"#,
                Some(true),
            ),
            (
                r#","stream":true,"stream_options":{"include_usage":false,"include_obfuscation":true}"#,
                Some(false),
            ),
        ] {
            let asked = parse(with(members).as_bytes(), OPENAI).map(|asked| asked.stream);
            let expected = stream.map(|include_usage| StreamOptions { include_usage });
            assert_eq!(asked.ok(), Some(expected), "{members}");
        }
    }

    #[test]
    fn contents_in_parts_and_instructions_of_a_developer() {
        let part = |text: &str| format!(r#"{{"type":"text","text":"{text}"}}"#);
        let message = |parts: &str| of(&format!(r#"[{{"role":"user","content":[{parts}]}}]"#));
        let parts = message(&[part("a"), part("\\u00e9")].join(", "));
        let asked = parse(parts.as_bytes(), OPENAI).expect("two parts");
        assert_eq!(asked.chat.messages[0].content, "a\né");
        refused(&parts, STRICT, &["messages[0].content", "an array"]);
        let developer = of(r#"[{"role":"developer","content":"x"}]"#);
        let asked = parse(developer.as_bytes(), OPENAI).expect("instructions");
        assert_eq!(asked.chat.messages[0].role, Role::System);
        refused(&developer, STRICT, &["messages[0].role", "another role"]);
        for (parts, words) in [
            (
                r#"{"type":"image_url","image_url":{"url":"x"}}"#.to_owned(),
                &["messages[0].content[0]"][..],
            ),
            (
                r#"{"type":"text"}"#.into(),
                &["messages[0].content[0].text is missing"],
            ),
            (
                r#"{"text":"x"}"#.into(),
                &["messages[0].content[0] must be a part"],
            ),
            ("7".into(), &["messages[0].content[0]", "7"]),
            (
                [part(&"é".repeat(5_000)), part(&"é".repeat(5_000))].join(","),
                &["messages[0].content", "10000", "10001"],
            ),
        ] {
            refused(&message(&parts), OPENAI, words);
        }
    }
}
