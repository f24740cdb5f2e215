//! The API: a request from its first check to its response.
//!
//! The steps stand here, one after the other, in the order of error precedence; a step that has
//! something to say has a file of its own, and the steps do not know each other. The event loop runs
//! those that the head decides, one worker all others; there every step blocks until it is done.

pub mod head;
pub mod key;
pub mod record;
pub mod reply;
pub mod validation;

use std::net::IpAddr;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::time::Instant;

use self::record::{Record, RowLimits};
use crate::config::Compatibility;
use crate::error::{ApiError, Failure, FailureCause, ProblemKind};
use crate::grounding::Grounding;
use crate::http::{ClientInfo, ClientNetwork, RequestHead, Response};
use crate::keys::Key;
use crate::ledger::Tokens;
use crate::listener::{Admission, Area, Dispatcher, Lane, PendingRequest, Service};
use crate::metrics::Metrics;
use crate::runtime::{Chat, Generated, RequestCost, RuntimeError, Runtimes};
use crate::store::Store;
use crate::when;

/// Everything that the steps use.
pub struct Api {
    pub hosts: Vec<String>,
    pub compatibility: Compatibility,
    pub store: Arc<Store>,
    pub runtimes: Option<Arc<Runtimes>>,
    /// `None` if no answer is grounded.
    pub grounding: Option<Arc<Grounding>>,
    pub metrics: Arc<Metrics>,
    pub row_limits: RowLimits,
}

impl Service for Api {
    fn serves(&self, _: &ClientInfo, _: &RequestHead) -> bool {
        true
    }

    fn admit(&self, client: &ClientInfo, head: &RequestHead) -> Result<Admission, Response> {
        let lenient = self.compatibility == Compatibility::OpenAi;
        let digest = head::check(head, &self.hosts, lenient).map_err(|failure| {
            self.metrics.head_refused.add(1);
            self.refuse(client.peer, failure)
        })?;
        // The models are the answer of the look-up: an interface asks for them at every page, and must
        // not wait behind its own requests.
        let area = match head::asks_for_models(head) {
            true => Area::LookUp,
            false => Area::Api,
        };
        Ok(Admission {
            area,
            credential: Some(digest),
            lane: None,
            network: client.peer.map(ClientNetwork::from),
        })
    }

    fn look_up(&self, pending: &PendingRequest) -> Result<Lane, Response> {
        let head = &pending.request.head;
        let is_for_models = head::asks_for_models(head);
        let found = catch_panic(|| {
            head::body(&pending.request)?;
            let key = self.authenticate(pending, when::now())?;
            if is_for_models {
                key::check_permission(&key.terms.permissions)?;
            }
            Ok(key)
        });
        match found {
            Ok(_) if is_for_models => Err(reply::models(head.path())),
            Ok(key) => Ok(Lane {
                name: key.id,
                limit: key.terms.concurrent,
            }),
            Err(failure) => {
                let record = Record::new(pending.request.client.peer, pending.received);
                Err(self.conclude(record, Err(failure)))
            }
        }
    }

    /// Runs the steps. The first that fails ends the request.
    fn respond(&self, pending: &PendingRequest, dispatcher: &Dispatcher) -> Response {
        let mut record = Record::new(pending.request.client.peer, pending.received);
        record.cost.cancellation = pending.cancellation.clone();
        let result = catch_panic(|| {
            let body = head::body(&pending.request)?;
            let key = self
                .authenticate(pending, record.row.created)
                .inspect_err(|failure| {
                    if failure.error == ApiError::InvalidApiKey {
                        dispatcher.forget(pending);
                    }
                })?;
            dispatcher.note_accepted(pending, &key.id, key.terms.concurrent);
            record.secret = pending.admission.credential;
            record.row.key_id.clone_from(&key.id);
            record.row.key_name.clone_from(&key.name);
            record.budget = key.terms.budget;
            let result =
                catch_panic(|| self.complete(&pending.request.head, body, &key, &mut record));
            self.append(&mut record, result)
        });
        self.conclude(record, result)
    }

    fn refuse(&self, peer: Option<IpAddr>, failure: Failure) -> Response {
        self.metrics.count_error(failure.error);
        let mut record = Record::new(peer, Instant::now());
        record.set_outcome(Some(&failure));
        record.log(Some(&failure));
        reply::error(&record.row.request_id, &failure)
    }

    fn outage(&self) -> Option<Failure> {
        self.store.ledger.outage().as_ref().map(record::unavailable)
    }
}

impl Api {
    fn authenticate(&self, pending: &PendingRequest, created: i64) -> Result<Key, Failure> {
        let digest = pending.admission.credential;
        let digest = digest.expect("the head of an admitted request has a key");
        key::authenticate(&digest, &self.store, created)
    }

    /// The steps of a request with a valid key, up to the inference.
    fn complete(
        &self,
        head: &RequestHead,
        body: &[u8],
        key: &Key,
        record: &mut Record,
    ) -> Result<Generated, Failure> {
        key::check_permission(&key.terms.permissions)?;
        key::check_budget(key.terms.budget, record.row.created, &self.store.zone)?;
        let asked = validation::read(head, body, self.compatibility)?;
        let mut chat = asked.chat;
        record.stream = asked.stream;
        let runtimes = self.runtimes()?;
        if let Some(failure) = self.outage() {
            record.is_refused_by_outage = true;
            return Err(failure);
        }
        let Record { cost, row, .. } = record;
        let mut quotation = match &self.grounding {
            Some(grounding) => grounding.ground(&mut chat, cost, row)?,
            None => None,
        };
        let shorten = |chat: &mut Chat| quotation.as_mut().is_some_and(|q| q.shorten(chat));
        infer(runtimes, &mut chat, shorten, cost)
    }

    fn runtimes(&self) -> Result<&Runtimes, Failure> {
        self.runtimes.as_deref().ok_or_else(|| {
            Failure::unavailable(
                FailureCause::NoRuntime,
                "The inference service is not configured. Contact the operator of this service.",
                Some("no runtime is configured: set runtime.url".into()),
            )
        })
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
        if !self.gets_row(record) {
            return result;
        }
        let started = Instant::now();
        let appended = self
            .store
            .ledger
            .append(record.row.clone(), record.secret.as_ref());
        record.ledger_time = Some(started.elapsed());
        let Err(error) = appended else {
            return result;
        };
        let key_id = record.row.key_id.clone();
        let not_sent = match error.kind {
            ProblemKind::KeyRevoked => key::revoked(key_id),
            ProblemKind::KeyReplaced => key::replaced(key_id),
            _ => {
                self.metrics.ledger_errors.add(1);
                if result.is_err() {
                    let details = format!("ledger: {error}");
                    log::error!("id={} details={details:?}", record.row.request_id);
                }
                record::not_written(&error)
            }
        };
        // An error stays what it is.
        result.and(Err(not_sent))
    }

    /// Decides whether a request gets a row, and counts one that is left out. A key that has had too
    /// many requests without a measured token lately gets none for more of them, nor a line in the
    /// log; and while the ledger is unavailable, only rows of requests that cost an inference are
    /// tried.
    fn gets_row(&self, record: &mut Record) -> bool {
        let is_free = record.row.status != Some(200) && record.row.tokens == Tokens::default();
        if is_free && !self.row_limits.allow(&record.row.key_id, Instant::now()) {
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
        let is_about_budget = failure.is_none_or(|it| it.cause == FailureCause::Budget);
        let response = match (&result, record.stream) {
            (Ok(generated), None) => reply::completion(&record.row, generated),
            (Ok(generated), Some(options)) => reply::stream(&record.row, generated, options),
            (Err(failure), _) => reply::error(&record.row.request_id, failure),
        };
        match record.budget.filter(|_| is_about_budget) {
            Some(budget) => reply::with_budget(response, &budget, &record.row, &self.store.zone),
            None => response,
        }
    }
}

/// Asks the runtime for the completion. If the prompt is too long for it, shortens it and retries
/// until `shorten` has nothing left to remove.
fn infer(
    runtimes: &Runtimes,
    chat: &mut Chat,
    mut shorten: impl FnMut(&mut Chat) -> bool,
    cost: &mut RequestCost,
) -> Result<Generated, Failure> {
    loop {
        match runtimes.complete(chat, cost) {
            Err((_, RuntimeError::ContextExceeded(_))) if shorten(chat) => {}
            result => return result.map_err(Failure::from),
        }
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
