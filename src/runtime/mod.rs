//! The inference runtime: what it is asked, what it answers, and which of several is asked.
//!
//! A request is sent once. Where a connection can't be made, the next runtime is tried; from the moment that
//! a byte was sent, an inference may have been spent, and there is no second try.

mod probe;

use std::borrow::Cow;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

pub use probe::{About, probe};

use crate::client::{Call, CallError, Server};
use crate::config::RuntimeConfig;
use crate::store::Tokens;

/// The largest answer that is read.
const MAX_ANSWER: usize = 4 * 1024 * 1024;

/// How long a runtime that could not be reached is asked last.
const SHUNNED_MS: u64 = 5_000;

/// The largest figure that JSON can be trusted with (RFC 8259, 6); a larger one was not measured.
const MAX_FIGURE: u64 = (1 << 53) - 1;

/// What runtimes without a code of their own say of a prompt that is too long.
const PHRASES: [&str; 2] = ["maximum context length", "available context size"];

/// A conversation that is to be continued.
#[derive(Debug)]
pub struct Chat<'a> {
    pub messages: Vec<Message<'a>>,
    pub temperature: f64,
    pub max_tokens: u16,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Message<'a> {
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

/// What the runtime generated, and what it measured.
#[derive(Debug)]
pub struct Generated {
    pub content: String,
    pub finish_reason: Option<String>,
    pub tokens: Tokens,
}

/// What the calls of one request have cost so far.
#[derive(Debug, Default)]
pub struct Spent {
    /// Nothing where no call was made.
    pub time: Option<Duration>,
    /// The sums of what was measured; nothing where no call cost anything.
    pub tokens: Option<Tokens>,
}

impl Spent {
    /// Makes a call, and adds what it took.
    pub fn add(&mut self, call: impl FnOnce() -> Outcome) -> Outcome {
        let asked = Instant::now();
        let outcome = call();
        *self.time.get_or_insert_default() += asked.elapsed();
        let measured = match &outcome {
            Ok(generated) => Some(generated.tokens),
            Err((_, error)) if error.cost_nothing() => None,
            // Whatever it cost, nobody told.
            Err(_) => Some(Tokens::default()),
        };
        if let Some(tokens) = measured {
            self.tokens = Some(self.tokens.map_or(tokens, |before| before.plus(tokens)));
        }
        outcome
    }
}

/// What came of a call; an error comes with the address of the runtime it is about.
pub type Outcome = Result<Generated, (String, RuntimeError)>;

/// Why there is no answer. It holds nothing of what the runtime wrote, which may repeat the prompt.
#[derive(Debug)]
pub enum RuntimeError {
    /// No connection could be made; the text is the system's.
    Unreachable(String),
    TimedOut,
    /// The connection broke, or what came was not HTTP.
    Broken(String),
    Status(u16),
    /// It answered 200, and not with a completion.
    Unreadable(&'static str),
    /// The prompt does not fit: how many tokens it has and how many there may be, where the runtime tells.
    ContextExceeded(Option<(u64, u64)>),
}

impl RuntimeError {
    /// Whether no inference can have been spent: nothing was sent, or it was refused.
    fn cost_nothing(&self) -> bool {
        match self {
            Self::Unreachable(_) | Self::ContextExceeded(_) => true,
            Self::Status(status) => (400..500).contains(status),
            Self::TimedOut | Self::Broken(_) | Self::Unreadable(_) => false,
        }
    }
}

impl fmt::Display for RuntimeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable(cause) => write!(f, "no connection: {cause}"),
            Self::TimedOut => f.write_str("no complete answer in time"),
            Self::Broken(cause) => write!(f, "the call broke off: {cause}"),
            Self::Status(status) => write!(f, "it answered with HTTP status {status}"),
            Self::Unreadable(what) => write!(f, "its answer is no completion: {what}"),
            Self::ContextExceeded(_) => f.write_str("the prompt is longer than its context"),
        }
    }
}

/// The runtimes that are configured: at least one.
pub struct Runtimes {
    members: Vec<Member>,
    model: String,
    authorization: Option<String>,
    timeout: Duration,
    /// From which `Member::shunned_until` counts.
    started: Instant,
}

struct Member {
    url: String,
    server: Server,
    under_way: AtomicUsize,
    /// In milliseconds; before then it is asked last, because a connection could not be made.
    shunned_until: AtomicU64,
}

impl Runtimes {
    /// Nothing where no runtime is configured.
    pub fn new(config: &RuntimeConfig, workers: usize) -> Option<Self> {
        if config.urls.is_empty() {
            return None;
        }
        Some(Self {
            members: config.urls.iter().map(|url| Member::new(url, workers)).collect(),
            model: config.model.clone(),
            authorization: config.api_key.as_ref().map(|key| format!("Bearer {}", key.expose())),
            timeout: config.timeout,
            started: Instant::now(),
        })
    }

    /// Runs a completion on the runtime with the fewest calls under way that can be reached.
    pub fn complete(&self, chat: &Chat) -> Outcome {
        self.complete_as(chat, None)
    }

    /// Runs a completion whose text is to have a form: OpenAI's `response_format`.
    pub fn complete_as(&self, chat: &Chat, response_format: Option<&serde_json::Value>) -> Outcome {
        let body = serde_json::to_vec(&Question {
            model: &self.model,
            messages: &chat.messages,
            temperature: chat.temperature,
            max_tokens: chat.max_tokens,
            stream: false,
            response_format,
        })
        .expect("a chat should have its JSON");
        let deadline = Instant::now() + self.timeout;
        let mut failure = None;
        for member in self.in_order() {
            match self.ask(member, &body, deadline) {
                Err(error @ RuntimeError::Unreachable(_)) => {
                    member.shunned_until.store(self.now_ms() + SHUNNED_MS, Ordering::Relaxed);
                    failure = Some((member.url.clone(), error));
                }
                result => return result.map_err(|error| (member.url.clone(), error)),
            }
        }
        Err(failure.expect("there should be at least one runtime"))
    }

    /// The addresses, each to be tried by itself.
    pub fn each(config: &RuntimeConfig) -> impl Iterator<Item = (&str, Self)> {
        config.urls.iter().filter_map(|url| {
            let alone = RuntimeConfig { urls: vec![url.clone()], ..config.clone() };
            Some((url.as_str(), Self::new(&alone, 1)?))
        })
    }

    /// Those that can be reached first, and of these the one with the fewest calls first.
    fn in_order(&self) -> Vec<&Member> {
        let now = self.now_ms();
        let mut members: Vec<&Member> = self.members.iter().collect();
        members.sort_by_cached_key(|member| {
            let shunned = member.shunned_until.load(Ordering::Relaxed) > now;
            (shunned, member.under_way.load(Ordering::Relaxed))
        });
        members
    }

    fn ask(&self, member: &Member, body: &[u8], deadline: Instant) -> Result<Generated, RuntimeError> {
        let _counted = member.count();
        let answer = member.server.call(&Call {
            method: "POST",
            path: "/chat/completions",
            authorization: self.authorization.as_deref(),
            body: Some(body),
            deadline,
            limit: MAX_ANSWER,
        })?;
        match answer.status {
            200 => read_answer(&answer.body),
            status @ 400..500 => Err(context_exceeded(&answer.body).unwrap_or(RuntimeError::Status(status))),
            status => Err(RuntimeError::Status(status)),
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

impl Member {
    fn new(url: &str, workers: usize) -> Self {
        Self {
            url: url.to_owned(),
            server: Server::new(url, workers),
            under_way: AtomicUsize::new(0),
            shunned_until: AtomicU64::new(0),
        }
    }

    /// Counts a call as under way until the result is dropped, by a panic too.
    fn count(&self) -> impl Drop {
        struct Counted<'a>(&'a AtomicUsize);
        impl Drop for Counted<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::Relaxed);
            }
        }
        self.under_way.fetch_add(1, Ordering::Relaxed);
        Counted(&self.under_way)
    }
}

impl From<CallError> for RuntimeError {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Unreachable(cause) => Self::Unreachable(cause),
            CallError::TimedOut => Self::TimedOut,
            CallError::TooLarge => Self::Unreadable("it is larger than 4 MiB"),
            CallError::Broken(cause) => Self::Broken(cause),
        }
    }
}

/// What is sent: nothing but what the service knows of.
#[derive(Serialize)]
struct Question<'a> {
    model: &'a str,
    messages: &'a [Message<'a>],
    temperature: f64,
    max_tokens: u16,
    stream: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    response_format: Option<&'a serde_json::Value>,
}

/// What is read of an answer. A member that is not what it should be counts as absent.
#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    choices: Vec<AnswerChoice>,
    #[serde(default)]
    usage: serde_json::Value,
}

#[derive(Deserialize)]
struct AnswerChoice {
    #[serde(default)]
    message: AnswerMessage,
    #[serde(default)]
    finish_reason: serde_json::Value,
}

#[derive(Default, Deserialize)]
struct AnswerMessage {
    #[serde(default)]
    content: Option<String>,
}

fn read_answer(bytes: &[u8]) -> Result<Generated, RuntimeError> {
    let answer: Answer =
        serde_json::from_slice(bytes).map_err(|_| RuntimeError::Unreadable("it is not the JSON of one"))?;
    let choice = answer.choices.into_iter().next().ok_or(RuntimeError::Unreadable("it has no choice"))?;
    let content = choice.message.content.ok_or(RuntimeError::Unreadable("it has no text"))?;
    let figure = |name: &str| {
        let measured = answer.usage.get(name)?.as_u64().filter(|&figure| figure <= MAX_FIGURE)?;
        i64::try_from(measured).ok()
    };
    Ok(Generated {
        content,
        finish_reason: choice.finish_reason.as_str().map(str::to_owned),
        tokens: Tokens {
            prompt_tokens: figure("prompt_tokens"),
            completion_tokens: figure("completion_tokens"),
            total_tokens: figure("total_tokens"),
        },
    })
}

/// Whether a refusal says that the prompt is too long: in the words of llama.cpp, of OpenAI, or of those that
/// have no code of their own for it, as vLLM, which does not always wrap its errors either.
fn context_exceeded(bytes: &[u8]) -> Option<RuntimeError> {
    let answer: serde_json::Value = serde_json::from_slice(bytes).ok()?;
    let error = answer.get("error").unwrap_or(&answer);
    let is = |member: &str, word: &str| error.get(member).and_then(|value| value.as_str()) == Some(word);
    let told = is("type", "exceed_context_size_error")
        || is("code", "context_length_exceeded")
        || error["message"].as_str().is_some_and(|text| PHRASES.iter().any(|phrase| text.contains(phrase)));
    let figures = error["n_prompt_tokens"].as_u64().zip(error["n_ctx"].as_u64());
    told.then_some(RuntimeError::ContextExceeded(figures))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_that_are_completions() {
        for (answer, content, reason, total) in [
            (
                r#"{"choices":[{"message":{"content":"x"},"finish_reason":"length"}],"usage":{"total_tokens":3}}"#,
                "x",
                Some("length"),
                Some(3),
            ),
            (r#"{"choices":[{"message":{"content":""},"finish_reason":null}]}"#, "", None, None),
            (r#"{"choices":[{"message":{"content":"x"}},{"message":{}}],"usage":null}"#, "x", None, None),
            (r#"{"choices":[{"message":{"content":"x"}}],"usage":{"total_tokens":-1}}"#, "x", None, None),
            (r#"{"choices":[{"message":{"content":"x"}}],"usage":{"total_tokens":1.5}}"#, "x", None, None),
            (r#"{"choices":[{"message":{"content":"x"}}],"usage":{"total_tokens":"7"}}"#, "x", None, None),
            (
                r#"{"choices":[{"message":{"content":"x"}}],"usage":{"total_tokens":18446744073709551615}}"#,
                "x",
                None,
                None,
            ),
            (r#"{"choices":[{"message":{"content":"x"}}],"usage":7}"#, "x", None, None),
            (r#"{"choices":[{"message":{"content":"x"},"finish_reason":7}]}"#, "x", None, None),
        ] {
            let found = read_answer(answer.as_bytes()).expect(answer);
            let told = (found.content.as_str(), found.finish_reason.as_deref(), found.tokens.total_tokens);
            assert_eq!(told, (content, reason, total), "{answer}");
        }
    }

    #[test]
    fn answers_that_are_none() {
        for answer in [
            "",
            "null",
            "[]",
            "x",
            "{}",
            r#"{"choices":[]}"#,
            r#"{"choices":[{}]}"#,
            r#"{"choices":7}"#,
            r#"{"choices":[{"message":{}}]}"#,
            r#"{"choices":[{"message":{"content":null}}]}"#,
            r#"{"choices":[{"message":{"content":7}}]}"#,
            r#"{"choices":[{"text":"x"}]}"#,
        ] {
            assert!(matches!(read_answer(answer.as_bytes()), Err(RuntimeError::Unreadable(_))), "{answer}");
        }
    }

    #[test]
    fn refusals_for_length() {
        for (refusal, figures) in [
            (r#"{"error":{"type":"exceed_context_size_error","n_prompt_tokens":9,"n_ctx":4}}"#, Some((9, 4))),
            (r#"{"error":{"code":"context_length_exceeded"}}"#, None),
            (
                r#"{"object":"error","message":"This model's maximum context length is 4 tokens.","code":400}"#,
                None,
            ),
        ] {
            match context_exceeded(refusal.as_bytes()) {
                Some(RuntimeError::ContextExceeded(found)) => assert_eq!(found, figures),
                other => panic!("{refusal}: {other:?}"),
            }
        }
        for refusal in ["", "[]", "7", r#"{"error":"x"}"#, r#"{"error":{"message":"bad grammar"}}"#] {
            assert!(context_exceeded(refusal.as_bytes()).is_none(), "{refusal}");
        }
    }

    #[test]
    fn the_least_busy_that_can_be_reached_comes_first() {
        let config = RuntimeConfig {
            urls: ["http://a/v1", "http://b/v1", "http://c/v1"].map(String::from).into(),
            model: "m".into(),
            api_key: None,
            timeout: Duration::from_secs(1),
        };
        let runtimes = Runtimes::new(&config, 1).expect("there are three");
        let order = || -> Vec<&str> { runtimes.in_order().iter().map(|m| &m.url[7..8]).collect() };
        assert_eq!(order(), ["a", "b", "c"]);
        let first = runtimes.members[0].count();
        assert_eq!(order(), ["b", "c", "a"]);
        runtimes.members[1].shunned_until.store(u64::MAX, Ordering::Relaxed);
        assert_eq!(order(), ["c", "a", "b"]);
        drop(first);
        assert_eq!(order(), ["a", "c", "b"]);
    }
}
