//! The inference runtime: its requests and answers, and the choice between several.
//!
//! A request is run once. If a connection can't be made, or a runtime answers 503 or 429, nothing was run, and the next runtime
//! is tried. After any other failure an inference may have been spent, and there is no second try.

mod entry;
mod probe;
mod wire;

use std::borrow::Cow;
use std::time::{Duration, Instant};
use std::{fmt, io};

use serde::Serialize;

use entry::RuntimeEntry;
pub use entry::RuntimeStatus;
pub use probe::{RuntimeInfo, probe};
use wire::CompletionRequest;
pub use wire::{read_answer, read_refusal};

use crate::client::{Call, CallError, Cancellation, HttpClient};
use crate::config::RuntimeConfig;
use crate::error::FailureCause;
use crate::ledger::Tokens;

/// The bounds of the limit on the size of an answer, apart from a repeated prompt. Every worker may hold an answer, so
/// the limit is a worker's share of `buffer_limit`. The least is enough for an honest answer: a completion has at most
/// 512 tokens, and the longest tokens of common vocabularies have some 128 characters. An answer, its text and the reply
/// are in memory together: with 4 MiB as the greatest limit, 16 answers took 237 MiB at their peak, with 1 MiB they take 75.
const ANSWER_LIMITS: (usize, usize) = (128 * 1024, 1024 * 1024);

/// A conversation that is to be continued.
#[derive(Debug)]
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

/// The text that the runtime generated, and the tokens that it measured.
#[derive(Debug)]
pub struct Generated {
    pub content: String,
    pub finish_reason: Option<String>,
    pub tokens: Tokens,
}

/// The cost of the runtime calls of one request so far. They share `runtime.timeout`, and are cancelled together.
#[derive(Debug, Default)]
pub struct Spent {
    /// `None` if no call was made.
    pub time: Option<Duration>,
    /// The sums of what was measured; `None` if no call cost anything.
    pub tokens: Option<Tokens>,
    pub cancellation: Cancellation,
}

impl Spent {
    /// Makes a call that ends when the request's time for the runtime does, and adds its time and tokens.
    fn add(
        &mut self,
        timeout: Duration,
        call: impl FnOnce(Instant, &Cancellation) -> CallResult,
    ) -> CallResult {
        let started = Instant::now();
        let deadline = started + timeout.saturating_sub(self.time.unwrap_or_default());
        let outcome = call(deadline, &self.cancellation);
        *self.time.get_or_insert_default() += started.elapsed();
        let measured = match &outcome {
            Ok(generated) => Some(generated.tokens),
            Err((_, error)) if error.cost_nothing() => None,
            // It may have cost tokens, but no figure was received.
            Err(_) => Some(Tokens::default()),
        };
        if let Some(tokens) = measured {
            self.tokens = Some(self.tokens.map_or(tokens, |before| before.plus(tokens)));
        }
        outcome
    }
}

/// The result of a call; an error comes with the address of the runtime it is about.
pub type CallResult = Result<Generated, (String, RuntimeError)>;

/// The reason why there is no answer. It contains nothing that the runtime sent, because that may repeat the prompt.
#[derive(Debug)]
pub enum RuntimeError {
    /// There is no answer, or not a whole one.
    Call(CallError),
    Status(u16),
    /// It answered with this status that it does not have the model.
    UnknownModel(u16),
    /// It answered 200, and not with JSON of the expected form.
    NotJson,
    /// It answered 200, and without a choice or without text.
    NoText,
    /// The prompt does not fit: how many tokens it has and how many fit, if the runtime says so.
    ContextExceeded(Option<(u64, u64)>),
}

impl RuntimeError {
    /// Returns true if another runtime may be tried: nothing was sent, or the runtime is loading, stopping or busy.
    fn is_refusal(&self) -> bool {
        matches!(
            self,
            Self::Call(CallError::Unreachable(_)) | Self::Status(429 | 503)
        )
    }

    /// Returns true if no inference can have been spent: nothing was sent, or it was refused.
    fn cost_nothing(&self) -> bool {
        self.is_refusal()
            || matches!(
                self,
                Self::ContextExceeded(_) | Self::UnknownModel(_) | Self::Status(400..500)
            )
    }

    pub fn cause(&self) -> FailureCause {
        match self {
            Self::Call(error) => error.cause(),
            Self::Status(status) | Self::UnknownModel(status) => FailureCause::Status(*status),
            Self::NotJson => FailureCause::NotJson,
            Self::NoText => FailureCause::NoText,
            Self::ContextExceeded(_) => FailureCause::Context,
        }
    }

    /// The message for the operator, the same in `check`, on the status page and in the log: the error and what to look at.
    pub fn diagnosis(&self) -> String {
        let advice = match self {
            // The connector's own errors are those of TLS.
            Self::Call(CallError::Unreachable(error)) if error.kind() == io::ErrorKind::Other => {
                "Check that it serves HTTPS, with a certificate of a CA in runtime.ca, or without that setting, of the system"
            }
            Self::Call(CallError::Unreachable(_)) => {
                "Check that it runs, and that runtime.url is its address"
            }
            Self::Call(CallError::TimedOut(_)) => {
                "If it hangs, read its log; if it needs more time, raise runtime.timeout"
            }
            Self::Call(CallError::TooLarge) => "Raise buffer_limit, or configure fewer workers",
            Self::Status(401 | 403) => "It refuses the key: check runtime.api_key",
            Self::Status(300..=399 | 404) | Self::NotJson | Self::NoText => {
                "Check runtime.url: it is the base address of an OpenAI-compatible API and ends in /v1"
            }
            Self::Status(503) => "It is loading its model, or is busy: wait, or read its log",
            Self::Status(429) => "It is busy: wait, or configure fewer workers",
            Self::UnknownModel(_) => "Set runtime.model to a model that it has",
            Self::ContextExceeded(_) => "Start it with a larger context",
            Self::Status(_) | Self::Call(CallError::Cancelled | CallError::Broken(_)) => {
                "Read its log"
            }
        };
        format!("{self}. {advice}")
    }
}

impl fmt::Display for RuntimeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Call(error) => error.fmt(f),
            Self::Status(status) => write!(f, "it answered with HTTP status {status}"),
            Self::UnknownModel(status) => {
                write!(f, "it does not have the model (HTTP status {status})")
            }
            Self::NotJson => {
                f.write_str("its answer is not a completion: it is not JSON of the expected form")
            }
            Self::NoText => f.write_str("its answer is not a completion: it has no text"),
            Self::ContextExceeded(_) => f.write_str("the prompt is longer than its context"),
        }
    }
}

/// The runtimes that are configured: at least one.
pub struct Runtimes {
    client: HttpClient,
    members: Vec<RuntimeEntry>,
    model: String,
    authorization: Option<String>,
    timeout: Duration,
    answer_limit: u64,
}

impl Runtimes {
    /// Returns `None` if no runtime is configured.
    pub fn new(config: &RuntimeConfig, workers: usize, worker_share: usize) -> Option<Self> {
        if config.urls.is_empty() {
            return None;
        }
        Some(Self {
            client: HttpClient::new(workers, config.ca.clone()),
            members: config
                .urls
                .iter()
                .map(|url| RuntimeEntry::new(url))
                .collect(),
            model: config.model.clone(),
            authorization: config
                .api_key
                .as_ref()
                .map(|key| format!("Bearer {}", key.expose())),
            timeout: config.timeout,
            answer_limit: worker_share.clamp(ANSWER_LIMITS.0, ANSWER_LIMITS.1) as u64,
        })
    }

    /// Runs a completion on the well runtime with the fewest running calls that takes it, within what is left of the
    /// request's time, and adds its cost to `spent`. `response_format` is OpenAI's: the form of the text.
    pub fn complete(
        &self,
        chat: &Chat,
        response_format: Option<&serde_json::Value>,
        spent: &mut Spent,
    ) -> CallResult {
        let body = self.body(chat, response_format);
        spent.add(self.timeout, |deadline, cancellation| {
            self.ask_in_order(&body, deadline, cancellation)
        })
    }

    /// Runs a completion on the first runtime, for a check: it is not noted in the runtime's state.
    pub fn check(&self, chat: &Chat) -> Result<Generated, RuntimeError> {
        let deadline = Instant::now() + self.timeout;
        self.ask(
            &self.members[0],
            &self.body(chat, None),
            deadline,
            &Cancellation::default(),
        )
    }

    /// Returns the status of each runtime, in the order of the configuration.
    pub fn status(&self) -> Vec<RuntimeStatus> {
        self.members.iter().map(RuntimeEntry::status).collect()
    }

    /// Probes the failed runtimes, one after the other: one that hangs delays the others by the time of a probe.
    pub fn probe_failed(&self) {
        for member in &self.members {
            let Some(failures) = member.probe_due() else {
                continue;
            };
            if probe::is_ready(&self.client, self.authorization.as_deref(), &member.url) {
                member.recover(failures);
            } else {
                member.note_failed_probe();
            }
        }
    }

    fn body(&self, chat: &Chat, response_format: Option<&serde_json::Value>) -> Vec<u8> {
        let request = CompletionRequest {
            model: &self.model,
            messages: &chat.messages,
            temperature: chat.temperature,
            max_tokens: chat.max_tokens,
            stream: false,
            response_format,
        };
        request.to_json()
    }

    fn ask_in_order(
        &self,
        body: &[u8],
        deadline: Instant,
        cancellation: &Cancellation,
    ) -> CallResult {
        let mut refusal = None;
        for member in self.in_order() {
            let sent = Instant::now();
            // A runtime without time for an answer would only be noted as failed.
            if refusal.is_some() && sent >= deadline {
                break;
            }
            let result = self.ask(member, body, deadline, cancellation);
            member.note(sent, &result);
            match result {
                Err(error) if error.is_refusal() => {
                    refusal.get_or_insert_with(|| (member.url.clone(), error));
                }
                result => return result.map_err(|error| (member.url.clone(), error)),
            }
        }
        // That of the runtime that was most likely to work is news; the others may have failed long ago, and the log says so.
        Err(refusal.expect("there should be at least one runtime"))
    }

    /// Well runtimes first, and among these the one with the fewest running calls first; of equals, the one configured first.
    fn in_order(&self) -> Vec<&RuntimeEntry> {
        let mut members: Vec<&RuntimeEntry> = self.members.iter().collect();
        members.sort_by_cached_key(|member| member.rank());
        members
    }

    fn ask(
        &self,
        member: &RuntimeEntry,
        body: &[u8],
        deadline: Instant,
        cancellation: &Cancellation,
    ) -> Result<Generated, RuntimeError> {
        let _running = member.begin_call();
        let answer = self.client.call(&Call {
            uri: &member.uri,
            authorization: self.authorization.as_deref(),
            body: Some(body),
            deadline,
            // Some runtimes repeat the prompt, as llama.cpp with `--verbose`. Escapes make it three times as long.
            limit: self.answer_limit + 3 * body.len() as u64,
            cancellation,
        });
        let answer = answer.map_err(RuntimeError::Call)?;
        match answer.status().as_u16() {
            200 => read_answer(answer.body()),
            status @ 400..500 => Err(read_refusal(status, answer.body())),
            status => Err(RuntimeError::Status(status)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_calls_of_a_request_share_its_time() {
        let timeout = Duration::from_secs(100);
        for (used, least, most) in [
            (None, 99, 100),
            (Some(30), 69, 70),
            (Some(100), 0, 0),
            (Some(130), 0, 0),
        ] {
            let mut spent = Spent {
                time: used.map(Duration::from_secs),
                ..Spent::default()
            };
            let outcome = spent.add(timeout, |deadline, _| {
                let left = deadline.saturating_duration_since(Instant::now());
                assert!(
                    left >= Duration::from_secs(least) && left <= Duration::from_secs(most),
                    "{left:?}"
                );
                Err((
                    String::new(),
                    RuntimeError::Call(CallError::TimedOut(timeout)),
                ))
            });
            assert!(outcome.is_err());
            assert!(spent.time >= used.map(Duration::from_secs).or(Some(Duration::ZERO)));
        }
    }

    #[test]
    fn the_least_busy_well_runtime_comes_first() {
        let config = RuntimeConfig {
            urls: ["http://a/v1", "http://b/v1", "http://c/v1"]
                .map(String::from)
                .into(),
            model: "m".into(),
            api_key: None,
            timeout: Duration::from_secs(1),
            ca: None,
        };
        let runtimes = Runtimes::new(&config, 1, 0).expect("there are three");
        let order = || -> String {
            runtimes
                .in_order()
                .iter()
                .map(|member| &member.url[7..8])
                .collect()
        };
        let fail = |number: usize| {
            runtimes.members[number].note(Instant::now(), &Err(RuntimeError::Status(500)))
        };
        assert_eq!(order(), "abc");
        let first = runtimes.members[0].begin_call();
        assert_eq!(order(), "bca");
        fail(1);
        assert_eq!(order(), "cab");
        drop(first);
        assert_eq!(order(), "acb");
        fail(0);
        let _second = runtimes.members[0].begin_call();
        assert_eq!(
            order(),
            "cba",
            "the least busy of the failed ones comes first, too"
        );
        fail(2);
        assert_eq!(order(), "bca");
        runtimes.members[0].recover(1);
        assert_eq!(order(), "abc");
    }

    #[test]
    fn refusals_cost_nothing() {
        let unreachable =
            || RuntimeError::Call(CallError::Unreachable(std::io::ErrorKind::Other.into()));
        for (error, is_refusal, cost_nothing) in [
            (unreachable(), true, true),
            (RuntimeError::Status(503), true, true),
            (RuntimeError::Status(429), true, true),
            (RuntimeError::Status(400), false, true),
            (RuntimeError::ContextExceeded(None), false, true),
            (RuntimeError::Status(500), false, false),
            (RuntimeError::Status(502), false, false),
            (
                RuntimeError::Call(CallError::TimedOut(Duration::ZERO)),
                false,
                false,
            ),
            (RuntimeError::UnknownModel(404), false, true),
            (
                RuntimeError::Call(CallError::Broken(String::new())),
                false,
                false,
            ),
            (RuntimeError::NotJson, false, false),
        ] {
            assert_eq!(
                (error.is_refusal(), error.cost_nothing()),
                (is_refusal, cost_nothing),
                "{error:?}"
            );
        }
    }
    #[test]
    fn a_diagnosis_names_the_setting() {
        let unreachable =
            |kind: io::ErrorKind| RuntimeError::Call(CallError::Unreachable(kind.into()));
        let late = || RuntimeError::Call(CallError::TimedOut(Duration::from_secs(120)));
        for (error, parts) in [
            (
                RuntimeError::Status(401),
                ["HTTP status 401", "runtime.api_key"],
            ),
            (
                RuntimeError::Status(403),
                ["HTTP status 403", "runtime.api_key"],
            ),
            (
                RuntimeError::Status(404),
                ["HTTP status 404", "runtime.url"],
            ),
            (
                RuntimeError::Status(308),
                ["HTTP status 308", "runtime.url"],
            ),
            (
                RuntimeError::Status(503),
                ["HTTP status 503", "loading its model"],
            ),
            (
                RuntimeError::Status(500),
                ["HTTP status 500", "Read its log"],
            ),
            (
                RuntimeError::UnknownModel(404),
                ["does not have the model", "Set runtime.model"],
            ),
            (RuntimeError::NotJson, ["not a completion", "runtime.url"]),
            (late(), ["no complete answer in 120.0 s", "runtime.timeout"]),
            (
                unreachable(io::ErrorKind::ConnectionRefused),
                ["no connection", "runtime.url"],
            ),
            (
                unreachable(io::ErrorKind::Other),
                ["no connection", "runtime.ca"],
            ),
        ] {
            let diagnosis = error.diagnosis();
            assert!(
                parts.iter().all(|part| diagnosis.contains(part)),
                "{diagnosis}"
            );
        }
    }
}
