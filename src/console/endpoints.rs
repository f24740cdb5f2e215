//! What programs ask the console's host for: `/healthz`, `/readyz` and `/metrics`.

use super::Console;
use crate::api::{head, key, reply};
use crate::error::{ApiError, Failure, FailureCause};
use crate::health::Verdict;
use crate::http::{RequestHead, Response};
use crate::id::RequestId;
use crate::keys::{Key, Permission};
use crate::listener::{Dispatcher, PendingRequest};
use crate::logging;

const TEXT: &str = "text/plain; charset=utf-8";

/// The content type of Prometheus's text format.
const METRICS_TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// True for a health probe.
pub fn is_probe(head: &RequestHead) -> bool {
    matches!(head.path(), "/healthz" | "/readyz")
}

/// True if a request presents a key, and not a session.
pub fn takes_key(head: &RequestHead) -> bool {
    head.path() == "/metrics"
}

/// Answers a health probe from memory, without waiting for anything. Returns `None` for another
/// path.
pub fn probe(console: &Console, head: &RequestHead) -> Option<Response> {
    match head.path() {
        "/healthz" => Some(respond_to_get(head, || plain(200, "ok"))),
        "/readyz" => Some(respond_to_get(head, || readiness(console))),
        _ => None,
    }
}

/// Responds to a scrape. Returns `None` if the request is for another path.
pub fn respond(
    console: &Console,
    pending: &PendingRequest,
    dispatcher: &Dispatcher,
) -> Option<Response> {
    let head = &pending.request.head;
    takes_key(head).then(|| respond_to_get(head, || metrics(console, pending, dispatcher)))
}

/// 503 while no completion can be run.
fn readiness(console: &Console) -> Response {
    // The writer tests the ledger while this is asked.
    console.store.ledger.probe();
    let health = console.service.health();
    match health.verdict() {
        Verdict::Works | Verdict::Degraded => plain(200, &health.summary()),
        Verdict::Failing => plain(503, &health.summary()).with("retry-after", "1"),
    }
}

fn metrics(console: &Console, pending: &PendingRequest, dispatcher: &Dispatcher) -> Response {
    let (id, request) = (RequestId::now(), &pending.request);
    match admit(console, &request.head, id.created()) {
        Ok(key) => {
            dispatcher.authenticate(pending, &key.id, None);
            // Without a database there are no budgets, but the other metrics are wanted most.
            let mut keys = console.store.keys.with_budget().unwrap_or_default();
            keys.retain(|key| key.is_valid(id.created()));
            let text = console.metrics.render(&console.service.health(), &keys);
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

/// Accepts a key with the permission. A scrape is not a request of the API, so it leaves no row.
fn admit(console: &Console, head: &RequestHead, now: i64) -> Result<Key, Failure> {
    let key = key::authenticate(&head::digest(head)?, &console.store, now)?;
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
