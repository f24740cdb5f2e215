//! `/metrics`, `/healthz` and `/readyz` on the console's host.

use std::sync::Arc;

use crate::api::{head, key, reply};
use crate::error::{ApiError, Failure, FailureCause};
use crate::http::{RequestHead, Response};
use crate::id::RequestId;
use crate::keys::{Key, Permission};
use crate::listener::{Acceptor, Dispatcher, ListenerState, PendingRequest};
use crate::logging;
use crate::metrics::{Metrics, Scrape};
use crate::runtime::{RuntimeStatus, Runtimes};
use crate::store::Store;

const TEXT: &str = "text/plain; charset=utf-8";

/// The content type of Prometheus's text format.
const METRICS_TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

pub struct MonitoringEndpoints {
    pub store: Arc<Store>,
    pub metrics: Arc<Metrics>,
    pub listener: Arc<ListenerState>,
    /// `None` if none is configured.
    pub runtimes: Option<Arc<Runtimes>>,
    /// `None` without TLS.
    pub acceptor: Option<Arc<Acceptor>>,
}

impl MonitoringEndpoints {
    /// Answers a probe of `/healthz` or `/readyz` from memory, without waiting for anything.
    /// Returns `None` for another path.
    pub fn probe(&self, head: &RequestHead) -> Option<Response> {
        match head.path() {
            "/healthz" => Some(respond_to_get(head, || plain(200, "ok"))),
            "/readyz" => Some(respond_to_get(head, || self.readiness())),
            _ => None,
        }
    }

    /// True for a health probe.
    pub fn is_probe(head: &RequestHead) -> bool {
        matches!(head.path(), "/healthz" | "/readyz")
    }

    /// True if a request presents a key, and not a session.
    pub fn takes_key(head: &RequestHead) -> bool {
        head.path() == "/metrics"
    }

    /// Responds to a scrape. Returns `None` if the request is for another path.
    pub fn respond(&self, pending: &PendingRequest, dispatcher: &Dispatcher) -> Option<Response> {
        let head = &pending.request.head;
        Self::takes_key(head).then(|| respond_to_get(head, || self.metrics(pending, dispatcher)))
    }

    pub fn runtime_status(&self) -> Vec<RuntimeStatus> {
        let runtimes = self.runtimes.as_ref();
        runtimes.map_or_else(Vec::new, |all| all.status())
    }

    fn metrics(&self, pending: &PendingRequest, dispatcher: &Dispatcher) -> Response {
        let (id, request) = (RequestId::now(), &pending.request);
        match self.admit(&request.head, id.created()) {
            Ok(key) => {
                dispatcher.authenticate(pending, &key.id, None);
                // Without a database there are no budgets, but the other metrics are wanted most.
                let mut keys = self.store.keys.with_budget().unwrap_or_default();
                keys.retain(|key| key.is_valid(id.created()));
                let acceptor = self.acceptor.as_ref();
                let text = self.metrics.render(&Scrape {
                    load: &self.listener.snapshot(),
                    is_ledger_available: self.store.ledger.outage().is_none(),
                    wal_bytes: self.store.wal_figures().bytes,
                    runtimes: &self.runtime_status(),
                    keys: &keys,
                    certificate_expires: acceptor.and_then(|acceptor| acceptor.expires()),
                });
                Response::new(200, METRICS_TEXT, text.into_bytes())
            }
            Err(failure) => {
                dispatcher.forget(pending);
                if let Some(details) = &failure.details
                    && logging::allow_refusal_line(failure.cause, request.client.peer)
                {
                    log::error!("id={id} cause={} details={details:?}", failure.cause);
                }
                reply::error(id, &failure)
            }
        }
    }

    /// Accepts a key with the permission. A scrape is not a request of the API, so it leaves no
    /// row.
    fn admit(&self, head: &RequestHead, now: i64) -> Result<Key, Failure> {
        let key = key::authenticate(&head::digest(head)?, &self.store, now)?;
        if !key.terms.permissions.contains(&Permission::Metrics) {
            return Err(Failure::new(
                ApiError::InsufficientPermission,
                FailureCause::Permission,
                "This API key may not read the metrics. Make one that may: \
                 adriaticum keys create NAME --permission metrics",
            ));
        }
        Ok(key)
    }

    /// Answers `/readyz`: 200 if a completion could be run now, without asking the runtime.
    fn readiness(&self) -> Response {
        let reason = if self.runtimes.is_none() {
            "No runtime is configured: set runtime.url."
        } else if self
            .runtime_status()
            .iter()
            .all(|runtime| runtime.is_failing)
        {
            "No runtime answers. The log says why."
        } else if self.store.ledger.probe().is_some() {
            "The ledger can't be written. The log says why."
        } else {
            return plain(200, "ready");
        };
        plain(503, reason).with("retry-after", "1")
    }
}

/// Responds to GET and HEAD, and refuses other methods.
fn respond_to_get(head: &RequestHead, response: impl FnOnce() -> Response) -> Response {
    let response = match head.method() {
        "GET" | "HEAD" => response(),
        _ => plain(405, "Only GET and HEAD are answered here.").with("allow", "GET, HEAD"),
    };
    response.with("cache-control", "no-store")
}

fn plain(status: u16, line: &str) -> Response {
    Response::new(status, TEXT, format!("{line}\n").into_bytes())
}
