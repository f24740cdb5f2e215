//! A request's way from its complete bytes to its answer: the steps of `api`, one call each, in the order in
//! which their errors win.

use std::net::IpAddr;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::api::grounding::Grounding;
use crate::api::key::{self, Caller};
use crate::api::{host, inference, ledger, permission, reply, route, size, validation};
use crate::config::Compatibility;
use crate::error::{ApiError, Failure};
use crate::http::{Head, Request, Response};
use crate::id::RequestId;
use crate::listener::Service;
use crate::metrics::{Metrics, Times};
use crate::runtime::{Chat, Generated, Runtimes, Spent};
use crate::store::{NewRow, Outcome, Searched, Store};
use crate::when::milliseconds;

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

/// What is known of a request while it goes through the steps.
struct Record {
    id: RequestId,
    /// Unix time in seconds.
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
}

/// Where a request stands with the ledger.
enum Row {
    None,
    Open(Arc<NewRow>),
    /// It could not be opened: there is no use in another try.
    Refused,
}

impl Service for Pipeline {
    fn answer(&self, request: &Request, received: Instant) -> Response {
        let mut record = Record::new(request.peer, received);
        let result = guarded(|| self.complete(request, &mut record));
        let result = guarded(|| self.settle(&mut record, result));
        let outcome = result.as_ref().map(|generated| generated.tokens).map_err(|failure| failure.error);
        self.metrics.answered(outcome, &record.times());
        record.searched.iter().for_each(|searched| self.metrics.searched(searched));
        respond(&record, result)
    }

    fn refuse(&self, client: Option<IpAddr>, _: Option<&Head>, failure: Failure) -> Response {
        self.metrics.refused(failure.error);
        respond(&Record::new(client, Instant::now()), Err(failure))
    }
}

impl Pipeline {
    /// The steps. The first that fails ends it.
    fn complete(&self, request: &Request, record: &mut Record) -> Result<Generated, Failure> {
        host::check(&request.head, &self.api_hosts)?;
        route::check(&request.head)?;
        let body = size::check(request)?;
        let caller = record.caller.insert(key::authenticate(&request.head, &self.store, record.created)?);
        permission::check(&caller.permissions)?;
        let mut chat = validation::read(&request.head, body, self.compatibility)?;
        let runtimes = inference::configured(self.runtimes.as_ref())?;
        record.row = Row::Refused;
        let row = new_row(record.id, caller);
        timed(&mut record.ledger, || ledger::open(&self.store, Arc::clone(&row)))
            .inspect_err(|_| self.metrics.ledger_open_errors.add(1))?;
        record.row = Row::Open(row);
        let mut quoted = match &self.grounding {
            Some(grounding) => {
                grounding.ground(runtimes, &mut chat, &mut record.spent, &mut record.searched)?
            }
            None => None,
        };
        let shorten = |chat: &mut Chat| quoted.as_mut().is_some_and(|quoted| quoted.shorten(chat));
        inference::run(runtimes, &mut chat, shorten, &mut record.spent)
    }

    /// Puts what came of a caller's request into the ledger. A completion that can't be put there is none;
    /// an error stays what it is.
    fn settle(&self, record: &mut Record, result: Result<Generated, Failure>) -> Result<Generated, Failure> {
        let outcome = record.outcome(&result);
        let settled = match (&record.row, &record.caller) {
            (Row::Open(row), _) => {
                let row = Arc::clone(row);
                timed(&mut record.ledger, || self.store.close_row(row, outcome))
            }
            (Row::None, Some(caller)) => {
                let row = new_row(record.id, caller);
                timed(&mut record.ledger, || self.store.add_row(row, outcome))
            }
            _ => return result,
        };
        match settled.inspect_err(|_| self.metrics.ledger_settle_errors.add(1)) {
            Ok(()) => result,
            Err(error) if result.is_ok() => Err(ledger::not_kept(&error)),
            Err(error) => {
                log::error!("{} ledger: {error}", record.id);
                result
            }
        }
    }
}

/// Runs the steps; a panic in one is this request's failure and nobody else's.
fn guarded(steps: impl FnOnce() -> Result<Generated, Failure>) -> Result<Generated, Failure> {
    panic::catch_unwind(AssertUnwindSafe(steps)).unwrap_or_else(|_| {
        Err(Failure::unavailable(
            "Something went wrong inside the service. Tell whoever runs it the id of this request.",
            "a step panicked; the line before tells where",
        ))
    })
}

/// Does a step, and adds the time that it took.
fn timed<T>(time: &mut Option<Duration>, step: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let result = step();
    *time = Some(time.unwrap_or_default() + began.elapsed());
    result
}

fn respond(record: &Record, result: Result<Generated, Failure>) -> Response {
    let response = match &result {
        Ok(generated) => reply::completion(record.id, record.created, generated),
        Err(failure) => reply::error(record.id, failure),
    };
    record.log(&result);
    response.with("server-timing", record.server_timing())
}

impl Record {
    fn new(client: Option<IpAddr>, received: Instant) -> Self {
        let id = RequestId::new();
        Self {
            id,
            created: id.created(),
            received,
            queue: received.elapsed(),
            client,
            caller: None,
            row: Row::None,
            searched: None,
            spent: Spent::default(),
            ledger: None,
        }
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
        let mut text = format!("queue;dur={:.3}", milliseconds(self.queue));
        if let Some(searched) = &self.searched {
            text += &format!(", search;dur={:.3}", searched.time_ms);
        }
        if let Some(runtime) = self.spent.time {
            text += &format!(", runtime;dur={:.3}", milliseconds(runtime));
        }
        if let Some(ledger) = self.ledger {
            text += &format!(", ledger;dur={:.3}", milliseconds(ledger));
        }
        text + &format!(", total;dur={:.3}", milliseconds(self.received.elapsed()))
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

fn new_row(id: RequestId, caller: &Caller) -> Arc<NewRow> {
    Arc::new(NewRow {
        request_id: id.to_string(),
        key_id: caller.key_id.clone(),
        key_name: caller.key_name.clone(),
        created: id.created(),
        note_use: caller.note_use,
    })
}

fn shown(value: Option<impl ToString>) -> String {
    value.map_or("-".into(), |value| value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_one_requests_failure() {
        let failure = guarded(|| panic!("on purpose, with xyzzy in it")).expect_err("there is no completion");
        assert_eq!(failure.error, ApiError::ServiceUnavailable);
        assert!(!format!("{failure:?}").contains("xyzzy"), "what a panic says may be a client's");
    }
}
