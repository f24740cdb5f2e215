//! A request from its complete bytes to its response: the steps of `api`, one call each, in the order of error
//! precedence. One worker runs all of them, and every step blocks until it is done.

mod record;

use std::net::IpAddr;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::record::Record;
use crate::api::grounding::Grounding;
use crate::api::refusals::Refusals;
use crate::api::{inference, key, reply, steps, validation};
use crate::config::Compatibility;
use crate::error::{Failure, FailureCause};
use crate::http::{Request, RequestHead, Response};
use crate::listener::{Lane, PendingRequest, RunningCall};
use crate::metrics::Metrics;
use crate::runtime::{Chat, Generated, Runtimes};
use crate::secret::SecretDigest;
use crate::store::{BegunRow, Key, NewRow, Store, StoreError};
use crate::when;

/// Everything that the steps use.
pub struct Pipeline {
    pub api_hosts: Vec<String>,
    pub compatibility: Compatibility,
    pub store: Arc<Store>,
    pub runtimes: Option<Arc<Runtimes>>,
    /// `None` if no answer is grounded.
    pub grounding: Option<Grounding>,
    pub metrics: Arc<Metrics>,
    pub refusals: Refusals,
}

impl Pipeline {
    /// Runs the steps that need only the head, before any of the body is read. They look nothing up.
    pub fn check_head(&self, head: &RequestHead) -> Result<SecretDigest, Failure> {
        steps::check_host(head, &self.api_hosts)?;
        steps::check_route(head)?;
        steps::check_declared_size(head)?;
        key::digest(head)
    }

    /// Returns the failure that every request would get now, if it is known.
    pub fn outage(&self) -> Option<Failure> {
        self.store.lost().map(|error| steps::row_not_opened(&error))
    }

    /// Looks up the key of a request that the queue does not know, or answers the request.
    pub fn identify(&self, call: &PendingRequest, digest: &SecretDigest) -> Result<Key, Box<Response>> {
        let look_up = || {
            steps::check_size(&call.request)?;
            key::authenticate(digest, &self.store, when::now())
        };
        catch_panic(look_up).map_err(|failure| {
            let record = Record::new(call.request.client.peer, call.received);
            Box::new(self.conclude(&record, &Err(failure)))
        })
    }

    /// Returns the lanes of those keys that are valid; `None` if they can't be read.
    pub fn lanes(&self, ids: &[Arc<str>]) -> Option<Vec<Lane>> {
        let now = when::now();
        let keys = self.store.find_keys(ids).ok()?.into_iter().filter(|key| key.is_valid(now));
        Some(keys.map(|key| Lane { name: key.id, limit: key.concurrent }).collect())
    }

    /// Answers a complete request that has passed [`check_head`](Self::check_head), which returned this digest.
    pub fn answer(&self, call: &PendingRequest, digest: &SecretDigest, running: &RunningCall) -> Response {
        let mut record = Record::new(call.request.client.peer, call.received);
        record.spent.cancellation = call.cancellation.clone();
        let result = catch_panic(|| self.complete(&call.request, digest, running, &mut record));
        self.conclude(&record, &result)
    }

    /// Counts and logs a request, and makes its response.
    fn conclude(&self, record: &Record, result: &Result<Generated, Failure>) -> Response {
        let outcome = result.as_ref().map(|generated| generated.tokens).map_err(|failure| failure.error);
        if !record.is_abandoned {
            self.metrics.answered(outcome, &record.times());
        }
        record.searched().iter().for_each(|searched| self.metrics.searched(searched));
        // A key whose refusals leave no row must not fill the log either.
        if !record.is_unrecorded {
            record.log(result);
        }
        respond(record, result)
    }

    /// Answers a request that gets no worker.
    pub fn refuse(&self, client: Option<IpAddr>, failure: Failure) -> Response {
        self.metrics.refused(failure.error);
        let record = Record::new(client, Instant::now());
        let result = Err(failure);
        record.log(&result);
        respond(&record, &result)
    }

    /// Runs the steps. The first that fails ends the request.
    fn complete(
        &self,
        request: &Request,
        digest: &SecretDigest,
        running: &RunningCall,
        record: &mut Record,
    ) -> Result<Generated, Failure> {
        let body = steps::check_size(request)?;
        // `begin` looks the key up, and only a good request may begin. So the body is read first, but what is wrong with it
        // counts only if the key is valid and has the permission: 401 and 403 come before 400.
        let read = catch_panic(|| self.read(request, body));
        let (runtimes, chat) = read.map_err(|failure| self.refuse_key_first(record, digest, failure))?;
        let BegunRow { row, concurrent } = self.begin(record, digest)?;
        running.set_limit(concurrent);
        let result = catch_panic(|| self.run(runtimes, chat, record));
        self.finish(record, &row, result)
    }

    /// The steps that need neither the key nor the ledger.
    fn read<'a>(&self, request: &Request, body: &'a [u8]) -> Result<(&Runtimes, Chat<'a>), Failure> {
        let chat = validation::read(&request.head, body, self.compatibility)?;
        let runtimes = inference::configured(self.runtimes.as_deref())?;
        Ok((runtimes, chat))
    }

    /// The steps that cost an inference.
    fn run(&self, runtimes: &Runtimes, mut chat: Chat, record: &mut Record) -> Result<Generated, Failure> {
        let mut quoted = match &self.grounding {
            Some(grounding) => {
                grounding.ground(runtimes, &mut chat, &mut record.spent, &mut record.searched)?
            }
            None => None,
        };
        let shorten = |chat: &mut Chat| quoted.as_mut().is_some_and(|quoted| quoted.shorten(chat));
        inference::run(runtimes, &mut chat, shorten, &mut record.spent)
    }

    /// Looks up the key and inserts the open row. If that fails, no inference is spent.
    fn begin(&self, record: &mut Record, digest: &SecretDigest) -> Result<BegunRow, Failure> {
        let (id, created) = (record.id.to_string(), record.id.created());
        let begun = timed(&mut record.ledger, || self.store.begin(&id, created, digest));
        match begun {
            Ok(begun) => {
                record.key_id = Some(begun.row.key_id.clone());
                Ok(begun)
            }
            Err(StoreError::KeyRefused) => Err(self.refuse_key_first(record, digest, key::changed())),
            Err(error) => {
                self.metrics.ledger_open_errors.add(1);
                let failure = steps::row_not_opened(&error);
                // The row may be there all the same, now or in a moment.
                if let StoreError::Unknown(_) = error {
                    self.store.settle_later(id, record.outcome(Err(&failure)));
                }
                Err(failure)
            }
        }
    }

    /// Makes the outcome durable. A completion whose outcome is not durable is not sent; an error stays what it is. If the
    /// client has gone by now, that is the outcome, and nothing is sent.
    fn finish(
        &self,
        record: &mut Record,
        row: &NewRow,
        result: Result<Generated, Failure>,
    ) -> Result<Generated, Failure> {
        record.is_abandoned = record.spent.cancellation.is_cancelled();
        let outcome = record.outcome(result.as_ref().map(drop));
        let Err(error) = timed(&mut record.ledger, || self.store.finish(row, &outcome)) else {
            return result;
        };
        self.metrics.ledger_settle_errors.add(1);
        let failure = match result {
            Ok(_) => steps::outcome_not_durable(&error),
            Err(failure) => {
                record.log_ledger_error(&error);
                failure
            }
        };
        self.store.settle_later(row.request_id.clone(), record.outcome(Err(&failure)));
        Err(failure)
    }

    /// Looks up the key of a request that is not run. Returns what is wrong with the key, or else this failure. If the key is
    /// valid, the request has a row.
    fn refuse_key_first(&self, record: &mut Record, digest: &SecretDigest, failure: Failure) -> Failure {
        let created = record.id.created();
        let caller = match catch_panic(|| key::authenticate(digest, &self.store, created)) {
            Ok(caller) => caller,
            Err(of_key) => return of_key,
        };
        record.key_id = Some(caller.id.clone());
        let allowed = steps::check_permission(&caller.permissions)
            .and_then(|()| steps::check_budget(caller.budget, created));
        let failure = allowed.err().unwrap_or(failure);
        self.record(record, &caller, &failure);
        failure
    }

    /// Writes the row of a refused request, unless its key has had too many. The client gets its error even if that fails.
    fn record(&self, record: &mut Record, key: &Key, failure: &Failure) {
        let is_clients_fault = (400..500).contains(&failure.error.status());
        if is_clients_fault && !self.refusals.allow_row(&key.id, Instant::now()) {
            record.is_unrecorded = true;
            return self.metrics.unrecorded.add(1);
        }
        let (row, outcome) = (record.new_row(key), record.outcome(Err(failure)));
        if let Err(error) = timed(&mut record.ledger, || self.store.record(&row, &outcome)) {
            self.metrics.ledger_settle_errors.add(1);
            record.log_ledger_error(&error);
        }
    }
}

/// A panic fails this request only. What it says is not repeated: it may contain what the client sent.
fn catch_panic<T>(step: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    panic::catch_unwind(AssertUnwindSafe(step)).unwrap_or_else(|_| {
        Err(Failure::unavailable(
            FailureCause::Panic,
            "Internal error. Give the operator the id of this request.",
            Some("a step panicked; the line before says where".into()),
        ))
    })
}

fn timed<T>(time: &mut Option<Duration>, step: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let result = step();
    *time.get_or_insert_default() += began.elapsed();
    result
}

fn respond(record: &Record, result: &Result<Generated, Failure>) -> Response {
    let response = match result {
        Ok(generated) => reply::completion(record.id, record.id.created(), generated),
        Err(failure) => reply::error(record.id, failure),
    };
    response.with("server-timing", record.server_timing())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ApiError;

    #[test]
    fn a_panic_is_one_requests_failure() {
        let failure =
            catch_panic::<()>(|| panic!("on purpose, with xyzzy in it")).expect_err("there is no completion");
        assert_eq!(failure.error, ApiError::ServiceUnavailable);
        assert!(!format!("{failure:?}").contains("xyzzy"), "what a panic says may be a client's");
    }
}
