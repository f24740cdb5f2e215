//! A request from its complete bytes to its response: the steps of `api`, one call each, in the order of error
//! precedence. One worker runs all of them, and every step blocks until it is done.

mod record;

use std::net::IpAddr;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::record::Record;
use crate::api::refusals::Refusals;
use crate::api::{inference, key, reply, steps, validation};
use crate::config::Compatibility;
use crate::error::{Failure, FailureCause};
use crate::grounding::Grounding;
use crate::http::{Request, RequestHead, Response};
use crate::listener::{Lane, PendingRequest, RunningCall};
use crate::metrics::Metrics;
use crate::runtime::{Chat, Generated, Runtimes};
use crate::secret::SecretDigest;
use crate::store::{Key, Store, StoreError};
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
        self.store
            .outage()
            .map(|error| steps::ledger_unavailable(&error))
    }

    /// Looks up the key of a request that the queue does not know, or answers the request.
    pub fn identify(
        &self,
        call: &PendingRequest,
        digest: &SecretDigest,
    ) -> Result<Key, Box<Response>> {
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
        let keys = self
            .store
            .find_keys(ids)
            .ok()?
            .into_iter()
            .filter(|key| key.is_valid(now));
        Some(
            keys.map(|key| Lane {
                name: key.id,
                limit: key.concurrent,
            })
            .collect(),
        )
    }

    /// Answers a complete request that has passed [`check_head`](Self::check_head), which returned this digest.
    pub fn answer(
        &self,
        call: &PendingRequest,
        digest: &SecretDigest,
        running: &RunningCall,
    ) -> Response {
        let mut record = Record::new(call.request.client.peer, call.received);
        record.spent.cancellation = call.cancellation.clone();
        let result = catch_panic(|| self.complete(&call.request, digest, running, &mut record));
        self.conclude(&record, &result)
    }

    /// Counts and logs a request, and makes its response.
    fn conclude(&self, record: &Record, result: &Result<Generated, Failure>) -> Response {
        let outcome = result
            .as_ref()
            .map(|generated| generated.tokens)
            .map_err(|failure| failure.error);
        if !record.is_abandoned {
            self.metrics.answered(outcome, &record.times());
        }
        record
            .searched()
            .iter()
            .for_each(|searched| self.metrics.searched(searched));
        if !record.is_quiet {
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
        let key = key::authenticate(digest, &self.store, record.id.created())?;
        running.set_limit(key.concurrent);
        record.set_key(&key);
        let result = catch_panic(|| self.run(request, body, &key, record));
        self.append(record, &key.id, result)
    }

    /// The steps of a request with a valid key, up to the inference.
    fn run(
        &self,
        request: &Request,
        body: &[u8],
        key: &Key,
        record: &mut Record,
    ) -> Result<Generated, Failure> {
        steps::check_permission(&key.permissions)?;
        steps::check_budget(key.budget, record.id.created())?;
        let mut chat = validation::read(&request.head, body, self.compatibility)?;
        let runtimes = inference::configured(self.runtimes.as_deref())?;
        if let Some(failure) = self.outage() {
            record.has_no_row = true;
            return Err(failure);
        }
        let mut quoted = match &self.grounding {
            Some(grounding) => grounding.ground(
                &key.id,
                runtimes,
                &mut chat,
                &mut record.spent,
                &mut record.searched,
            )?,
            None => None,
        };
        let shorten = |chat: &mut Chat| quoted.as_mut().is_some_and(|quoted| quoted.shorten(chat));
        inference::run(runtimes, &mut chat, shorten, &mut record.spent)
    }

    /// Writes the row. A completion whose row is not durable is not sent; an error stays what it is. If the client has gone
    /// by now, that is the outcome, and nothing is sent.
    fn append(
        &self,
        record: &mut Record,
        key_id: &str,
        result: Result<Generated, Failure>,
    ) -> Result<Generated, Failure> {
        record.is_abandoned = record.spent.cancellation.is_cancelled();
        if !self.has_row(record, key_id, result.as_ref().err()) {
            return result;
        }
        let row = record.row(result.as_ref().map(drop));
        let Err(error) = timed(&mut record.ledger, || self.store.append(row)) else {
            return result;
        };
        Err(match (result, error) {
            (Ok(_), StoreError::KeyRevoked) => key::revoked(key_id.to_owned()),
            (Err(failure), StoreError::KeyRevoked) => failure,
            (Ok(_), error) => {
                self.metrics.ledger_errors.add(1);
                steps::row_not_written(&error)
            }
            (Err(failure), error) => {
                self.metrics.ledger_errors.add(1);
                record.log_ledger_error(&error);
                failure
            }
        })
    }

    /// Decides whether a request gets a row. A key that has had too many refusals lately gets none for more of them, nor a
    /// line in the log; and while the ledger is unavailable, only rows of requests that cost an inference are tried.
    fn has_row(&self, record: &mut Record, key_id: &str, failure: Option<&Failure>) -> bool {
        let is_clients_fault =
            failure.is_some_and(|failure| (400..500).contains(&failure.error.status()));
        if is_clients_fault && !self.refusals.allow_row(key_id, Instant::now()) {
            record.is_quiet = true;
            self.metrics.unrecorded.add(1);
            return false;
        }
        !record.has_no_row && (record.spent.time.is_some() || self.store.outage().is_none())
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
        let failure = catch_panic::<()>(|| panic!("on purpose, with xyzzy in it"))
            .expect_err("there is no completion");
        assert_eq!(failure.error, ApiError::ServiceUnavailable);
        assert!(
            !format!("{failure:?}").contains("xyzzy"),
            "what a panic says may be a client's"
        );
    }
}
