//! The inference runtime: its requests and answers, and the choice between several.
//!
//! A request is run once. If a connection can't be made, or a runtime answers 503 or 429, nothing
//! was run, and the next runtime is tried. After any other failure an inference may have been
//! spent, and there is no second try.

mod error;
mod record;
mod wire;

use std::borrow::Cow;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Map, Value};
use ureq::http::Uri;

pub use self::error::RuntimeError;
use self::record::RuntimeRecord;
pub use self::record::RuntimeStatus;
pub use self::wire::{Chat, ChatMessage, Generated, Role, read_answer, read_refusal};
use crate::client::{Call, CallError, Cancellation, HttpClient};
use crate::config::RuntimeConfig;
use crate::ledger::Tokens;
use crate::locks::lock;

/// The bounds of the limit on the size of an answer, apart from a repeated prompt. Every worker may
/// hold an answer, so the limit is a worker's share of `buffer_limit`. The least is enough for an
/// honest answer: a completion has at most 512 tokens, and the longest tokens of common
/// vocabularies have some 128 characters. An answer, its text and the reply are in memory together:
/// with 4 MiB as the greatest limit, 16 answers took 237 MiB at their peak, with 1 MiB they take
/// 75.
const ANSWER_LIMITS: (usize, usize) = (128 * 1024, 1024 * 1024);

/// The longest time of a probe. A runtime whose slots are all in use lets it wait.
const PROBE_TIME: Duration = Duration::from_secs(30);

/// The pause before the runtimes are asked again.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// With less time, a runtime would only be noted as failed: no model answers as fast.
const LEAST_TIME: Duration = Duration::from_millis(50);

const PROBE_MESSAGE: &str = "Are you there?";

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

/// The result of a call; an error comes with the address of the runtime it is about.
pub type CallResult = Result<Generated, (String, RuntimeError)>;

/// The runtimes that are configured: at least one.
pub struct Runtimes {
    servers: Vec<Server>,
    /// The records of the servers, in the same order. One lock for all: a worker chooses a runtime
    /// and counts its call at once.
    records: Mutex<Vec<RuntimeRecord>>,
    model: String,
    authorization: Option<String>,
    parameters: Map<String, Value>,
    timeout: Duration,
    wait: Duration,
    /// The requests that wait for a runtime to answer again.
    waiting: AtomicUsize,
    answer_limit: u64,
}

struct Server {
    url: String,
    /// The URL of its completions, parsed once.
    uri: Uri,
    client: HttpClient,
}

/// The `Authorization` header of every call to a runtime.
pub fn authorization(config: &RuntimeConfig) -> Option<String> {
    let key = config.api_key.as_ref()?;
    Some(format!("Bearer {}", key.expose()))
}

/// Counts a call as running until it is dropped.
struct RunningCall<'a> {
    records: &'a Mutex<Vec<RuntimeRecord>>,
    place: usize,
}

impl Drop for RunningCall<'_> {
    fn drop(&mut self) {
        lock(self.records)[self.place].status.running -= 1;
    }
}

impl Runtimes {
    /// Returns `None` if no runtime is configured.
    pub fn new(config: &RuntimeConfig, worker_share: usize) -> Option<Self> {
        let server = |url: &String| Server {
            url: url.clone(),
            uri: format!("{url}/chat/completions")
                .parse()
                .expect("the configuration has checked the address"),
            client: HttpClient::new(url, config.ca.as_deref()),
        };
        (!config.urls.is_empty()).then(|| Self {
            servers: config.urls.iter().map(server).collect(),
            records: Mutex::new(
                config
                    .urls
                    .iter()
                    .map(|url| RuntimeRecord::new(url))
                    .collect(),
            ),
            model: config.model.clone(),
            authorization: authorization(config),
            parameters: config.parameters.clone(),
            timeout: config.timeout,
            wait: config.wait,
            waiting: AtomicUsize::new(0),
            answer_limit: worker_share.clamp(ANSWER_LIMITS.0, ANSWER_LIMITS.1) as u64,
        })
    }

    /// Runs a completion on the least busy runtime that works and accepts it, within the rest of
    /// the request's time, and adds its cost.
    pub fn complete(&self, chat: &Chat, cost: &mut RequestCost) -> CallResult {
        let body = chat.to_json(&self.model, &self.parameters);
        let started = Instant::now();
        let deadline = started + self.timeout.saturating_sub(cost.time.unwrap_or_default());
        let result = self.ask_until_answered(&body, deadline, &cost.cancellation);
        *cost.time.get_or_insert_default() += started.elapsed();
        let measured = match &result {
            Ok(generated) => Some(generated.tokens),
            Err((_, error)) => error.cost(),
        };
        if let Some(tokens) = measured {
            cost.tokens = Some(cost.tokens.map_or(tokens, |before| before.plus(tokens)));
        }
        result
    }

    /// Returns the status of each runtime, in the order of the configuration.
    pub fn status(&self) -> Vec<RuntimeStatus> {
        let records = lock(&self.records);
        records.iter().map(|record| record.status.clone()).collect()
    }

    /// Probes the runtimes that do not answer, if that is due. Each probe has a thread of its own,
    /// which nothing waits for: a runtime that hangs delays neither the caller nor a stop.
    pub fn probe_failed(self: &Arc<Self>) {
        let now = Instant::now();
        for place in 0..self.servers.len() {
            if !lock(&self.records)[place].begin_due_probe(now) {
                continue;
            }
            let runtimes = Arc::clone(self);
            let probe = move || {
                let time = runtimes.timeout.min(PROBE_TIME);
                let result = runtimes.generate_token(place, PROBE_MESSAGE, time);
                lock(&runtimes.records)[place].end_probe(Instant::now(), Some(&result));
            };
            if let Err(error) = thread::Builder::new().name("probe".into()).spawn(probe) {
                log::error!(
                    "no thread for a probe of {}: {error}",
                    self.servers[place].url
                );
                lock(&self.records)[place].end_probe(now, None);
            }
        }
    }

    /// Has a runtime continue this message by one token, in at most this time. It is not noted in
    /// the runtime's record.
    pub fn generate_token(
        &self,
        place: usize,
        message: &str,
        time: Duration,
    ) -> Result<Generated, RuntimeError> {
        let chat = Chat {
            messages: vec![ChatMessage {
                role: Role::User,
                content: Cow::Borrowed(message),
            }],
            temperature: 0.0,
            max_tokens: 1,
        };
        let body = chat.to_json(&self.model, &self.parameters);
        self.ask(
            place,
            &body,
            Instant::now() + time,
            &Cancellation::default(),
        )
    }

    /// Returns whether requests wait for a runtime to answer again.
    pub fn have_waiting(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// Asks the runtimes in turn. If none has run the request, and they have stopped answering only
    /// lately, they are asked again each second: one that restarts is not yet worth an error.
    fn ask_until_answered(
        &self,
        body: &[u8],
        deadline: Instant,
        cancellation: &Cancellation,
    ) -> CallResult {
        let mut result = self.ask_in_turn(body, deadline, cancellation);
        if self.is_worth_a_wait(&result, deadline) {
            self.waiting.fetch_add(1, Ordering::Relaxed);
            while self.is_worth_a_wait(&result, deadline) {
                thread::sleep(RETRY_PAUSE);
                result = self.ask_in_turn(body, deadline, cancellation);
            }
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        result
    }

    /// Returns true if no runtime has run the request, there is time for another try, and the last of
    /// them stopped answering less than `runtime.wait` before it.
    fn is_worth_a_wait(&self, result: &CallResult, deadline: Instant) -> bool {
        let next = Instant::now() + RETRY_PAUSE;
        let is_refusal = matches!(result, Err((_, error)) if error.is_refusal());
        let records = lock(&self.records);
        let stopped = records
            .iter()
            .filter_map(|record| record.last_stopped)
            .max();
        let is_recent = stopped.is_some_and(|time| next < time + self.wait);
        is_refusal && is_recent && next + LEAST_TIME < deadline
    }

    fn ask_in_turn(
        &self,
        body: &[u8],
        deadline: Instant,
        cancellation: &Cancellation,
    ) -> CallResult {
        let mut tried = Vec::new();
        let mut refusal = None;
        while Instant::now() + LEAST_TIME < deadline
            && let Some(call) = self.begin_call(&tried)
        {
            let place = call.place;
            tried.push(place);
            let sent = Instant::now();
            let result = self.ask(place, body, deadline, cancellation);
            lock(&self.records)[place].note_call(Instant::now(), sent.elapsed(), &result);
            match result {
                Err(error) if error.is_refusal() => {
                    refusal.get_or_insert((place, error));
                }
                result => return result.map_err(|error| (self.servers[place].url.clone(), error)),
            }
        }
        // The first runtime was the most likely to work; the others may have failed long ago, and
        // the log says so.
        let late = || (0, RuntimeError::Call(CallError::TimedOut(self.timeout)));
        let (place, error) = refusal.unwrap_or_else(late);
        Err((self.servers[place].url.clone(), error))
    }

    /// Chooses one of the runtimes that were not tried, and counts a call of it as running. Ties:
    /// the order of the configuration.
    fn begin_call(&self, tried: &[usize]) -> Option<RunningCall<'_>> {
        let mut records = lock(&self.records);
        let untried = (0..records.len()).filter(|place| !tried.contains(place));
        let place = untried.min_by_key(|&place| records[place].rank())?;
        records[place].status.running += 1;
        Some(RunningCall {
            records: &self.records,
            place,
        })
    }

    fn ask(
        &self,
        place: usize,
        body: &[u8],
        deadline: Instant,
        cancellation: &Cancellation,
    ) -> Result<Generated, RuntimeError> {
        let Server { uri, client, .. } = &self.servers[place];
        let answer = client.call(&Call {
            uri,
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

    fn runtimes(timeout: Duration) -> Runtimes {
        let config = RuntimeConfig {
            urls: ["http://a/v1", "http://b/v1", "http://c/v1"]
                .map(String::from)
                .into(),
            model: "m".into(),
            api_key: None,
            timeout,
            parameters: Map::new(),
            wait: Duration::ZERO,
            ca: None,
        };
        Runtimes::new(&config, 0).expect("there are three")
    }

    #[test]
    fn a_request_without_time_left_blames_no_runtime() {
        let runtimes = runtimes(Duration::from_secs(100));
        let mut cost = RequestCost {
            time: Some(Duration::from_secs(130)),
            ..RequestCost::default()
        };
        let chat = Chat {
            messages: Vec::new(),
            temperature: 0.0,
            max_tokens: 1,
        };
        let result = runtimes.complete(&chat, &mut cost);
        assert!(
            matches!(result, Err((_, RuntimeError::Call(CallError::TimedOut(_))))),
            "{result:?}"
        );
        let failures: u64 = runtimes.status().iter().map(|status| status.failures).sum();
        assert_eq!(failures, 0);
        assert!(cost.time >= Some(Duration::from_secs(130)));
    }

    #[test]
    fn the_least_busy_runtime_that_works_comes_first() {
        let runtimes = runtimes(Duration::from_secs(1));
        // The order in which one request would try them.
        let order = || -> String {
            let (mut calls, mut tried) = (Vec::new(), Vec::new());
            while let Some(call) = runtimes.begin_call(&tried) {
                tried.push(call.place);
                calls.push(call);
            }
            tried
                .iter()
                .map(|&place| &runtimes.servers[place].url[7..8])
                .collect()
        };
        let note = |place: usize, result: Result<(), u16>| {
            let result = match result {
                Ok(()) => read_answer(br#"{"choices":[{"message":{"content":"x"}}]}"#),
                Err(status) => Err(RuntimeError::Status(status)),
            };
            let took = Duration::from_secs(1);
            lock(&runtimes.records)[place].note_call(Instant::now(), took, &result);
        };
        assert_eq!(order(), "abc");
        let first = runtimes.begin_call(&[]);
        assert_eq!(order(), "bca");
        note(1, Err(500));
        assert_eq!(order(), "cab");
        drop(first);
        assert_eq!(order(), "acb");
        note(0, Err(500));
        let _second = runtimes.begin_call(&[1, 2]);
        assert_eq!(order(), "cba", "the least busy of those that failed");
        (0..2).for_each(|_| note(1, Err(503)));
        assert_eq!(order(), "cab", "a failing one comes last");
        note(2, Err(400));
        assert_eq!(order(), "cab", "it has refused one conversation");
        note(1, Ok(()));
        assert_eq!(order(), "bca");
    }
}
