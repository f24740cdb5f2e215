//! `/metrics`, `/healthz` and `/readyz` on the console's host, for programs.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::api::{key, reply};
use crate::error::{ApiError, Failure};
use crate::http::{Head, Request, Response};
use crate::id::RequestId;
use crate::listener::{Load, Snapshot};
use crate::metrics::Metrics;
use crate::store::{Permission, Store};

/// How long a state of the ledger holds: however often it is asked for, it costs no more than a write in this
/// time.
const STATE_HOLDS: Duration = Duration::from_secs(1);

const TEXT: &str = "text/plain; charset=utf-8";

/// What Prometheus takes for its text format.
const METRICS_TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

pub struct Monitoring {
    store: Arc<Store>,
    metrics: Arc<Metrics>,
    load: Arc<Load>,
    has_runtime: bool,
    ledger: Trial,
}

impl Monitoring {
    pub fn new(store: Arc<Store>, metrics: Arc<Metrics>, load: Arc<Load>, has_runtime: bool) -> Self {
        Self { store, metrics, load, has_runtime, ledger: Trial::default() }
    }

    /// Whether a request presents a key, and not a session.
    pub fn takes_key(head: &Head) -> bool {
        head.path() == "/metrics"
    }

    /// How busy the service is.
    pub fn load(&self) -> Snapshot {
        self.load.snapshot()
    }

    /// Returns `None` if the request is for another path.
    pub fn answer(&self, request: &Request) -> Option<Response> {
        let head = &request.head;
        let answer: fn(&Self, &Head) -> Response = match head.path() {
            "/metrics" => Self::metrics,
            "/healthz" => |_, _| plain(200, "ok"),
            "/readyz" => |monitoring, _| monitoring.readiness(),
            _ => return None,
        };
        let response = match head.method() {
            "GET" | "HEAD" => answer(self, head),
            _ => plain(405, "Only GET and HEAD are answered here.").with("allow", "GET, HEAD"),
        };
        Some(response.with("cache-control", "no-store"))
    }

    fn metrics(&self, head: &Head) -> Response {
        let id = RequestId::new();
        match self.admit(head, id.created()) {
            Ok(()) => {
                let text = self.metrics.render(&self.load(), &self.store.state(id.created()));
                Response::new(200, METRICS_TEXT, text.into_bytes())
            }
            Err(failure) => {
                if let Some(cause) = &failure.cause {
                    log::error!("{id} {cause}");
                }
                reply::error(id, &failure)
            }
        }
    }

    /// Lets a key with the permission through. A scrape is no request of the API: it leaves no row.
    fn admit(&self, head: &Head, now: i64) -> Result<(), Failure> {
        let caller = key::authenticate(head, &self.store, now)?;
        if !caller.permissions.contains(&Permission::Metrics) {
            return Err(Failure::new(
                ApiError::InsufficientPermission,
                "This API key may not read the metrics. Make one that may: \
                 adriaticum keys create NAME --permission metrics",
            ));
        }
        if caller.note_use {
            // Not written here: the metrics are wanted most when something is wrong with the database.
            self.store.note_use(&caller.key_id, now);
        }
        Ok(())
    }

    /// Whether a completion could be run now, as far as this service can say by itself.
    fn readiness(&self) -> Response {
        let reason = if !self.has_runtime {
            "No runtime is configured: set runtime.url."
        } else {
            match self.ledger.takes_a_write(&self.store) {
                Some(true) => return plain(200, "ready"),
                Some(false) => "The ledger takes no write. The log tells why.",
                None => "It is being tried whether the ledger takes a write.",
            }
        };
        plain(503, reason).with("retry-after", STATE_HOLDS.as_secs().to_string())
    }
}

fn plain(status: u16, line: &str) -> Response {
    Response::new(status, TEXT, format!("{line}\n").into_bytes())
}

/// What came of the last trial write, and when it was made. Only one thread tries at a time, and nobody waits for it: a
/// locked database holds up one thread for some seconds, not all that ask.
#[derive(Default)]
struct Trial {
    last: Mutex<Option<(bool, Instant)>>,
    trying: Mutex<()>,
}

impl Trial {
    /// Whether the ledger takes a write. Returns `None` until that was tried once.
    fn takes_a_write(&self, store: &Store) -> Option<bool> {
        let last = || self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let before = *last();
        let before_took = before.map(|(took, _)| took);
        if before.is_some_and(|(_, tried)| tried.elapsed() < STATE_HOLDS) {
            return before_took;
        }
        let Ok(_trying) = self.trying.try_lock() else {
            return before_took;
        };
        let written = store.try_write();
        match &written {
            Err(error) if before_took != Some(false) => {
                log::error!("not ready: the ledger takes no write: {error}");
            }
            Ok(()) if before_took == Some(false) => log::info!("ready again: the ledger takes a write"),
            _ => {}
        }
        *last() = Some((written.is_ok(), Instant::now()));
        Some(written.is_ok())
    }
}
