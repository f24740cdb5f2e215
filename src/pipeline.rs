//! A request's way from its complete bytes to its answer: the steps of `api`, one call each, in the order in
//! which their errors win.
//!
//! It is a straight line in four parts: admitted, opened in the ledger, run, settled in the ledger. The ledger calls
//! back when it has written for all who came at the same time, so that no worker waits for another one's disk.

use std::fmt::Write;
use std::net::IpAddr;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crate::api::grounding::Grounding;
use crate::api::key::{self, Caller};
use crate::api::{host, inference, ledger, permission, reply, route, size, validation};
use crate::config::Compatibility;
use crate::error::{ApiError, Failure};
use crate::http::{Request, Response};
use crate::id::RequestId;
use crate::listener::Reply;
use crate::metrics::{Metrics, Times};
use crate::runtime::{Chat, Generated, Runtimes, Spent};
use crate::store::{CalledBy, Entry, NewRow, Outcome, Searched, Store, StoreError};
use crate::when::milliseconds;

/// How often a key is looked up again because keys were changed meanwhile.
const LOOKS: u8 = 3;

/// Everything that the steps use.
pub struct Pipeline {
    pub api_hosts: Vec<String>,
    pub compatibility: Compatibility,
    pub store: Arc<Store>,
    pub runtimes: Option<Runtimes>,
    /// Nothing where no answer has to rest on Search.
    pub grounding: Option<Grounding>,
    pub metrics: Arc<Metrics>,
}

/// A request on its way, and where its answer goes.
struct Exchange {
    pipeline: Arc<Pipeline>,
    record: Record,
    reply: Reply,
}

/// What is known of a request while it goes through the steps.
struct Record {
    id: RequestId,
    /// When the request was complete, in Unix seconds.
    created: i64,
    received: Instant,
    queue: Duration,
    /// Where it came from, as far as that is known.
    client: Option<IpAddr>,
    caller: Option<Caller>,
    row: Row,
    /// What is to be kept of asking Search, where it was asked.
    searched: Option<Searched>,
    /// What the calls to the runtime have cost.
    spent: Spent,
    /// Of opening the row and settling it together.
    ledger: Option<Duration>,
    /// How often the key may still be looked up again.
    looks: u8,
}

/// Where a request stands with the ledger.
enum Row {
    None,
    Open(Arc<NewRow>),
    /// It could not be opened: there is no use in another try.
    Refused,
}

impl Pipeline {
    /// Answers a complete request.
    pub fn answer(self: &Arc<Self>, request: Request, received: Instant, reply: Reply) {
        let mut record = Record::new(request.peer, received);
        let admitted = guarded(|| self.admit(&request, &mut record));
        drop(request);
        let exchange = Exchange { pipeline: Arc::clone(self), record, reply };
        match admitted {
            Ok(chat) => exchange.open(chat),
            Err(failure) => exchange.settle(Err(failure)),
        }
    }

    /// Answers what no worker will see.
    pub fn refuse(&self, client: Option<IpAddr>, failure: Failure) -> Response {
        self.metrics.refused(failure.error);
        respond(&Record::new(client, Instant::now()), Err(failure))
    }

    /// The steps before anything is spent. The first that fails ends it.
    fn admit(&self, request: &Request, record: &mut Record) -> Result<Chat<'static>, Failure> {
        host::check(&request.head, &self.api_hosts)?;
        route::check(&request.head)?;
        let body = size::check(request)?;
        let caller = record.caller.insert(key::authenticate(&request.head, &self.store, record.created)?);
        permission::check(&caller.permissions)?;
        let chat = validation::read(&request.head, body, self.compatibility)?;
        inference::configured(self.runtimes.as_ref())?;
        Ok(chat.into_owned())
    }

    /// The steps that cost an inference.
    fn run(&self, mut chat: Chat, record: &mut Record) -> Result<Generated, Failure> {
        let runtimes = inference::configured(self.runtimes.as_ref())?;
        let mut quoted = match &self.grounding {
            Some(grounding) => {
                grounding.ground(runtimes, &mut chat, &mut record.spent, &mut record.searched)?
            }
            None => None,
        };
        let shorten = |chat: &mut Chat| quoted.as_mut().is_some_and(|quoted| quoted.shorten(chat));
        inference::run(runtimes, &mut chat, shorten, &mut record.spent)
    }
}

impl Exchange {
    /// Makes the row of a request that is about to be run. Where that fails, it is not.
    fn open(mut self, chat: Chat<'static>) {
        let caller = self.record.caller.as_ref().expect("whoever is admitted should have a key");
        let row = self.record.new_row(caller);
        self.record.row = Row::Refused;
        let store = Arc::clone(&self.pipeline.store);
        let began = Instant::now();
        store.enter(Entry::Open(Arc::clone(&row)), move |kept, by| {
            self.record.add_ledger_time(began);
            match kept {
                Ok(()) => {
                    self.record.row = Row::Open(row);
                    self.go_on(by, |mut exchange| {
                        let result = guarded(|| exchange.pipeline.run(chat, &mut exchange.record));
                        exchange.settle(result);
                    });
                }
                Err(StoreError::KeysChanged) => self.look_again(|exchange| exchange.open(chat)),
                Err(error) => {
                    self.pipeline.metrics.ledger_open_errors.add(1);
                    self.respond(Err(ledger::not_opened(&error)));
                }
            }
        });
    }

    /// Puts what came of a caller's request into the ledger. A completion that can't be put there is none;
    /// an error stays what it is.
    fn settle(mut self, result: Result<Generated, Failure>) {
        let outcome = self.record.outcome(&result);
        let entry = match (&self.record.row, &self.record.caller) {
            (Row::Open(row), _) => Entry::Close(Arc::clone(row), outcome),
            (Row::None, Some(caller)) => Entry::Add(self.record.new_row(caller), outcome),
            _ => return self.respond(result),
        };
        let store = Arc::clone(&self.pipeline.store);
        let began = Instant::now();
        store.enter(entry, move |kept, _| {
            self.record.add_ledger_time(began);
            match kept {
                Ok(()) => self.respond(result),
                Err(StoreError::KeysChanged) => self.look_again(|exchange| exchange.settle(result)),
                Err(error) => {
                    self.pipeline.metrics.ledger_settle_errors.add(1);
                    if result.is_ok() {
                        return self.respond(Err(ledger::not_kept(&error)));
                    }
                    log::error!("{} ledger: {error}", self.record.id);
                    self.respond(result);
                }
            }
        });
    }

    /// Goes on with a step that may take its time: on this thread, if nobody else needs it.
    fn go_on(self, by: CalledBy, step: impl FnOnce(Self) + Send + 'static) {
        match by {
            CalledBy::Owner => step(self),
            CalledBy::Another => {
                let workers = self.reply.workers();
                workers.execute_next(move || step(self));
            }
        }
    }

    /// Looks up the caller's key once more, because keys were changed since it was, and tries the step again if it still
    /// holds.
    fn look_again(self, step: impl FnOnce(Self) + Send + 'static) {
        self.go_on(CalledBy::Another, |mut exchange| {
            match guarded(|| exchange.record.look_again(&exchange.pipeline.store)) {
                Ok(()) => step(exchange),
                // A caller whose key is good but may not do this has a row.
                Err(failure) => exchange.settle(Err(failure)),
            }
        });
    }

    fn respond(self, result: Result<Generated, Failure>) {
        let Self { pipeline, record, reply } = self;
        let outcome = result.as_ref().map(|generated| generated.tokens).map_err(|failure| failure.error);
        pipeline.metrics.answered(outcome, &record.times());
        record.searched.iter().for_each(|searched| pipeline.metrics.searched(searched));
        reply.send(respond(&record, result));
    }
}

/// Runs a step; a panic in it is this request's failure and nobody else's.
fn guarded<T>(step: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    panic::catch_unwind(AssertUnwindSafe(step)).unwrap_or_else(|_| {
        Err(Failure::unavailable(
            "Something went wrong inside the service. Tell whoever runs it the id of this request.",
            "a step panicked; the line before tells where",
        ))
    })
}

fn respond(record: &Record, result: Result<Generated, Failure>) -> Response {
    let response = match &result {
        Ok(generated) => reply::completion(record.id, record.created, generated),
        Err(failure) => reply::error(record.id, failure),
    };
    match &result {
        Err(failure) if failure.is_shed => log::debug!("{} client={} shed", record.id, shown(record.client)),
        _ => record.log(&result),
    }
    response.with("server-timing", record.server_timing())
}

impl Record {
    fn new(client: Option<IpAddr>, received: Instant) -> Self {
        let queue = received.elapsed();
        let id = RequestId::at(SystemTime::now() - queue);
        Self {
            id,
            created: id.created(),
            received,
            queue,
            client,
            caller: None,
            row: Row::None,
            searched: None,
            spent: Spent::default(),
            ledger: None,
            looks: LOOKS,
        }
    }

    fn new_row(&self, caller: &Caller) -> Arc<NewRow> {
        Arc::new(NewRow {
            request_id: self.id.to_string(),
            key_id: caller.key_id.clone(),
            key_name: caller.key_name.clone(),
            created: self.created,
            note_use: caller.note_use,
            seen: caller.seen,
        })
    }

    /// Looks up the caller's key again.
    fn look_again(&mut self, store: &Store) -> Result<(), Failure> {
        self.row = Row::Refused;
        self.looks = self.looks.checked_sub(1).ok_or_else(|| ledger::not_opened(&StoreError::KeysChanged))?;
        self.row = Row::None;
        if let Some(caller) = self.caller.take() {
            let caller = self.caller.insert(caller.again(store, self.created)?);
            permission::check(&caller.permissions)?;
        }
        Ok(())
    }

    fn add_ledger_time(&mut self, began: Instant) {
        *self.ledger.get_or_insert_default() += began.elapsed();
    }

    fn outcome(&self, result: &Result<Generated, Failure>) -> Outcome {
        let (status, error_code) = match result {
            Ok(_) => (200, None),
            Err(failure) => (failure.error.status(), Some(failure.error.code())),
        };
        let found = self.searched.as_ref().and_then(|searched| searched.results).unwrap_or(0);
        Outcome {
            status: Some(status),
            error_code,
            tokens: self.spent.tokens.unwrap_or_default(),
            duration_ms: Some(milliseconds(self.received.elapsed())),
            queue_ms: Some(milliseconds(self.queue)),
            runtime_ms: self.spent.time.map(milliseconds),
            grounded: result.is_ok() && found > 0,
            search: self.searched.clone(),
        }
    }

    fn times(&self) -> Times {
        let Self { queue, ledger, .. } = *self;
        Times { whole: self.received.elapsed(), queue, runtime: self.spent.time, ledger }
    }

    fn server_timing(&self) -> String {
        let parts = [
            ("queue", Some(self.queue)),
            (
                "search",
                self.searched.as_ref().map(|searched| Duration::from_secs_f64(searched.time_ms / 1000.0)),
            ),
            ("runtime", self.spent.time),
            ("ledger", self.ledger),
            ("total", Some(self.received.elapsed())),
        ];
        let mut text = String::with_capacity(128);
        for (name, time) in parts {
            let Some(time) = time else { continue };
            let separator = if text.is_empty() { "" } else { ", " };
            // In milliseconds. Whole numbers are written in a fraction of the time that a floating one takes.
            let (whole, fraction) = (time.as_millis(), time.subsec_micros() % 1000);
            let _ = write!(text, "{separator}{name};dur={whole}.{fraction:03}");
        }
        text
    }

    /// One line a request, with nothing in it that the client wrote; and the cause of every 5xx.
    fn log(&self, result: &Result<Generated, Failure>) {
        let Outcome { status, error_code, tokens, duration_ms, queue_ms, runtime_ms, search, .. } =
            self.outcome(result);
        let key = self.caller.as_ref().map_or("-", |caller| &caller.key_id);
        let id = self.id;
        log::info!(
            "{id} client={} status={} error={} key={key} total_ms={} queue_ms={} runtime_ms={} prompt_tokens={} \
             completion_tokens={} total_tokens={}{}",
            shown(self.client),
            shown(status),
            error_code.unwrap_or("-"),
            shown(duration_ms),
            shown(queue_ms),
            shown(runtime_ms),
            shown(tokens.prompt_tokens),
            shown(tokens.completion_tokens),
            shown(tokens.total_tokens),
            search.map_or(String::new(), |Searched { reason, results, time_ms }| format!(
                " search={reason} search_results={} search_ms={time_ms}",
                shown(results)
            )),
        );
        if let Err(failure @ Failure { cause: Some(cause), .. }) = result {
            match failure.error {
                ApiError::InferenceError | ApiError::SearchUnavailable => log::warn!("{id} {cause}"),
                _ => log::error!("{id} {cause}"),
            }
        }
    }
}

fn shown(value: Option<impl ToString>) -> String {
    value.map_or("-".into(), |value| value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_one_requests_failure() {
        let failure =
            guarded::<()>(|| panic!("on purpose, with xyzzy in it")).expect_err("there is no completion");
        assert_eq!(failure.error, ApiError::ServiceUnavailable);
        assert!(!format!("{failure:?}").contains("xyzzy"), "what a panic says may be a client's");
    }
}
