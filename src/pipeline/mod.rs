//! A request from its head to its response: the steps of `api`, one after the other, in the order
//! of error precedence. The event loop runs those that the head decides, one worker all others;
//! there every step blocks until it is done.

mod service;

use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::time::Instant;

use crate::api::ledger::Refusals;
use crate::api::record::Record;
use crate::api::{inference, key, ledger, permission, reply, route, size, validation};
use crate::config::Compatibility;
use crate::console::Console;
use crate::database::DatabaseError;
use crate::error::{Failure, FailureCause};
use crate::grounding::Grounding;
use crate::http::{RequestHead, Response};
use crate::keys::Key;
use crate::listener::{PendingRequest, RunningRequest, Service};
use crate::metrics::Metrics;
use crate::runtime::{Chat, Generated, Runtimes};
use crate::secret::SecretDigest;
use crate::store::Store;

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
    /// The console and its host; `None` if there is no console.
    pub console: Option<(String, Console)>,
    /// The console is for clients on this host.
    pub console_is_local: bool,
}

impl Pipeline {
    /// Runs the steps that need only the head, before any of the body is read. They look nothing
    /// up.
    fn check_head(&self, head: &RequestHead) -> Result<SecretDigest, Failure> {
        route::check_host(head, &self.api_hosts)?;
        route::check_route(head)?;
        size::check_declared_size(head)?;
        key::digest(head)
    }

    /// Runs the steps. The first that fails ends the request.
    fn complete(
        &self,
        pending: &PendingRequest,
        digest: &SecretDigest,
        running: &RunningRequest,
        record: &mut Record,
    ) -> Result<Generated, Failure> {
        let body = size::check_size(&pending.request)?;
        let key = key::authenticate(digest, &self.store, record.row.created)?;
        running.set_limit(key.concurrent);
        record.row.key_id.clone_from(&key.id);
        record.row.key_name.clone_from(&key.name);
        let result = catch_panic(|| self.run(&pending.request.head, body, &key, record));
        self.append(record, result)
    }

    /// The steps of a request with a valid key, up to the inference.
    fn run(
        &self,
        head: &RequestHead,
        body: &[u8],
        key: &Key,
        record: &mut Record,
    ) -> Result<Generated, Failure> {
        permission::check_permission(&key.permissions)?;
        permission::check_budget(key.budget, record.row.created)?;
        let mut chat = validation::read(head, body, self.compatibility)?;
        let runtimes = inference::configured(self.runtimes.as_deref())?;
        if let Some(failure) = self.outage() {
            record.is_refused_by_outage = true;
            return Err(failure);
        }
        let Record { cost, row, .. } = record;
        let mut quotation = match &self.grounding {
            Some(grounding) => grounding.ground(runtimes, &mut chat, cost, row)?,
            None => None,
        };
        let shorten = |chat: &mut Chat| quotation.as_mut().is_some_and(|q| q.shorten(chat));
        inference::run(runtimes, &mut chat, shorten, cost)
    }

    /// Writes the row. A completion whose row is not durable is not sent; an error stays what it
    /// is. If the client has gone by now, that is the outcome, and nothing is sent.
    fn append(
        &self,
        record: &mut Record,
        result: Result<Generated, Failure>,
    ) -> Result<Generated, Failure> {
        record.is_abandoned = record.cost.cancellation.is_cancelled();
        record.set_outcome(result.as_ref().err());
        if !self.decide_on_row(record, result.as_ref().err()) {
            return result;
        }
        let started = Instant::now();
        let appended = self.store.ledger.append(record.row.clone());
        record.ledger_time = Some(started.elapsed());
        let Err(error) = appended else {
            return result;
        };
        let is_revoked = matches!(error, DatabaseError::KeyRevoked);
        if !is_revoked {
            self.metrics.ledger_errors.add(1);
        }
        match result {
            Ok(_) if is_revoked => Err(key::revoked_failure(record.row.key_id.clone())),
            Ok(_) => Err(ledger::row_not_written(&error)),
            Err(failure) => {
                if !is_revoked {
                    let details = format!("ledger: {error}");
                    log::error!("id={} details={details:?}", record.row.request_id);
                }
                Err(failure)
            }
        }
    }

    /// Decides whether a request gets a row, and counts one that is left out. A key that has had
    /// too many refusals lately gets none for more of them, nor a line in the log; and while the
    /// ledger is unavailable, only rows of requests that cost an inference are tried.
    fn decide_on_row(&self, record: &mut Record, failure: Option<&Failure>) -> bool {
        let is_clients_fault =
            failure.is_some_and(|failure| (400..500).contains(&failure.error.status()));
        if is_clients_fault && !self.refusals.allow_row(&record.row.key_id, Instant::now()) {
            record.is_not_logged = true;
            self.metrics.unrecorded.add(1);
            return false;
        }
        !record.is_refused_by_outage
            && (record.cost.time.is_some() || self.store.ledger.outage().is_none())
    }

    /// Counts and logs a request, and makes its response.
    fn conclude(&self, mut record: Record, result: Result<Generated, Failure>) -> Response {
        let failure = result.as_ref().err();
        record.set_outcome(failure);
        if !record.is_abandoned {
            let error = failure.map(|failure| failure.error);
            let total = record.received.elapsed();
            self.metrics
                .count_answer(&record.row, error, total, record.ledger_time);
        }
        self.metrics.count_search(&record.row);
        if !record.is_not_logged {
            record.log(failure);
        }
        let response = match &result {
            Ok(generated) => reply::completion(&record.row, generated),
            Err(failure) => reply::error(&record.row.request_id, failure),
        };
        response.with("server-timing", record.server_timing())
    }
}

/// A panic fails this request only. Its text is not repeated: it may contain what the client sent.
fn catch_panic<T>(step: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    panic::catch_unwind(AssertUnwindSafe(step)).unwrap_or_else(|_| {
        Err(Failure::unavailable(
            FailureCause::Panic,
            "Internal error. Give the operator the id of this request.",
            Some("a step panicked; the line before says where".into()),
        ))
    })
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
