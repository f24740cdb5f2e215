//! The inference runtime: its requests and answers, and the choice between several.
//!
//! A request is run once. If a connection can't be made, or a runtime answers 503 or 429, nothing
//! was run, and the next runtime is tried. After any other failure an inference may have been
//! spent, and there is no second try.

mod chat;
mod entry;
mod error;
mod probe;
mod wire;

use std::time::{Duration, Instant};

pub use chat::{Chat, ChatMessage, Generated, Role};
use entry::RuntimeEntry;
pub use entry::RuntimeStatus;
pub use error::RuntimeError;
pub use probe::{RuntimeInfo, probe};
use wire::CompletionRequest;
pub use wire::{read_answer, read_refusal};

use crate::client::{Call, Cancellation, HttpClient};
use crate::config::RuntimeConfig;
use crate::ledger::Tokens;

/// The bounds of the limit on the size of an answer, apart from a repeated prompt. Every worker may
/// hold an answer, so the limit is a worker's share of `buffer_limit`. The least is enough for an
/// honest answer: a completion has at most 512 tokens, and the longest tokens of common
/// vocabularies have some 128 characters. An answer, its text and the reply are in memory together:
/// with 4 MiB as the greatest limit, 16 answers took 237 MiB at their peak, with 1 MiB they take
/// 75.
const ANSWER_LIMITS: (usize, usize) = (128 * 1024, 1024 * 1024);

/// The cost of the runtime calls of one request. They share `runtime.timeout`, and are cancelled
/// together.
#[derive(Debug, Default)]
pub struct RequestCost {
    /// `None` if no call was made.
    pub time: Option<Duration>,
    /// The sums of all measurements; `None` if no call cost anything.
    pub tokens: Option<Tokens>,
    pub cancellation: Cancellation,
}

impl RequestCost {
    /// Makes a call within what is left of the request's `runtime.timeout`, and adds its time and
    /// tokens.
    fn measure(
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

/// The runtimes that are configured: at least one.
pub struct Runtimes {
    client: HttpClient,
    entries: Vec<RuntimeEntry>,
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
            entries: config
                .urls
                .iter()
                .map(|url| RuntimeEntry::new(url))
                .collect(),
            model: config.model.clone(),
            authorization: probe::authorization(config),
            timeout: config.timeout,
            answer_limit: worker_share.clamp(ANSWER_LIMITS.0, ANSWER_LIMITS.1) as u64,
        })
    }

    /// Runs a completion on the least busy healthy runtime that accepts it, within the rest of the
    /// request's time, and adds its cost. `response_format` is OpenAI's: the form of the text.
    pub fn complete(
        &self,
        chat: &Chat,
        response_format: Option<&serde_json::Value>,
        cost: &mut RequestCost,
    ) -> CallResult {
        let body = self.body(chat, response_format);
        cost.measure(self.timeout, |deadline, cancellation| {
            self.ask_by_rank(&body, deadline, cancellation)
        })
    }

    /// Runs a completion on the first runtime, for a check: it is not noted in the runtime's state.
    pub fn check(&self, chat: &Chat) -> Result<Generated, RuntimeError> {
        let deadline = Instant::now() + self.timeout;
        self.ask(
            &self.entries[0],
            &self.body(chat, None),
            deadline,
            &Cancellation::default(),
        )
    }

    /// Returns the status of each runtime, in the order of the configuration.
    pub fn status(&self) -> Vec<RuntimeStatus> {
        self.entries.iter().map(RuntimeEntry::status).collect()
    }

    /// Probes the failed runtimes, one after the other: one that hangs delays the others by the
    /// time of a probe.
    pub fn probe_failed(&self) {
        for entry in &self.entries {
            let Some(failures) = entry.begin_due_probe() else {
                continue;
            };
            if probe::is_ready(&self.client, self.authorization.as_deref(), &entry.url) {
                entry.recover(failures);
            } else {
                entry.note_failed_probe();
            }
        }
    }

    fn body(&self, chat: &Chat, response_format: Option<&serde_json::Value>) -> Vec<u8> {
        let request = CompletionRequest {
            model: &self.model,
            chat,
            stream: false,
            response_format,
        };
        request.to_json()
    }

    fn ask_by_rank(
        &self,
        body: &[u8],
        deadline: Instant,
        cancellation: &Cancellation,
    ) -> CallResult {
        let mut refusal = None;
        for entry in self.by_rank() {
            let sent = Instant::now();
            // A runtime without time for an answer would only be noted as failed.
            if refusal.is_some() && sent >= deadline {
                break;
            }
            let result = self.ask(entry, body, deadline, cancellation);
            entry.note(sent, &result);
            match result {
                Err(error) if error.is_refusal() => {
                    refusal.get_or_insert_with(|| (entry.url.clone(), error));
                }
                result => return result.map_err(|error| (entry.url.clone(), error)),
            }
        }
        // The first runtime was the most likely to work; the others may have failed long ago, and
        // the log says so.
        Err(refusal.expect("there should be at least one runtime"))
    }

    /// Healthy runtimes first, and among these the least busy. Ties: the order of the
    /// configuration.
    fn by_rank(&self) -> Vec<&RuntimeEntry> {
        let mut entries: Vec<&RuntimeEntry> = self.entries.iter().collect();
        entries.sort_by_cached_key(|entry| entry.rank());
        entries
    }

    fn ask(
        &self,
        entry: &RuntimeEntry,
        body: &[u8],
        deadline: Instant,
        cancellation: &Cancellation,
    ) -> Result<Generated, RuntimeError> {
        let _running = entry.begin_call();
        let answer = self.client.call(&Call {
            uri: &entry.uri,
            authorization: self.authorization.as_deref(),
            body: Some(body),
            deadline,
            // Some runtimes repeat the prompt, as llama.cpp with `--verbose`. Escapes make it three
            // times as long.
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
    use crate::client::CallError;

    #[test]
    fn the_calls_of_a_request_share_its_time() {
        let timeout = Duration::from_secs(100);
        for (used, least, most) in [
            (None, 99, 100),
            (Some(30), 69, 70),
            (Some(100), 0, 0),
            (Some(130), 0, 0),
        ] {
            let mut cost = RequestCost {
                time: used.map(Duration::from_secs),
                ..RequestCost::default()
            };
            let outcome = cost.measure(timeout, |deadline, _| {
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
            assert!(cost.time >= used.map(Duration::from_secs).or(Some(Duration::ZERO)));
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
                .by_rank()
                .iter()
                .map(|entry| &entry.url[7..8])
                .collect()
        };
        let fail = |number: usize| {
            runtimes.entries[number].note(Instant::now(), &Err(RuntimeError::Status(500)))
        };
        assert_eq!(order(), "abc");
        let first = runtimes.entries[0].begin_call();
        assert_eq!(order(), "bca");
        fail(1);
        assert_eq!(order(), "cab");
        drop(first);
        assert_eq!(order(), "acb");
        fail(0);
        let _second = runtimes.entries[0].begin_call();
        assert_eq!(
            order(),
            "cba",
            "the least busy of the failed ones comes first, too"
        );
        fail(2);
        assert_eq!(order(), "bca");
        runtimes.entries[0].recover(1);
        assert_eq!(order(), "abc");
    }
}
