//! The pipeline as the listener calls it: the head of a request, its key, its response.
//!
//! The console's requests pass through here too. The API is never served on the console's host, and
//! the console is served on no other host.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use super::{Pipeline, catch_panic};
use crate::api::record::Record;
use crate::api::{key, ledger, reply, size};
use crate::console::Console;
use crate::error::Failure;
use crate::http::{ClientInfo, RequestHead, Response};
use crate::keys::Key;
use crate::listener::{Admission, Destination, Lane, PendingRequest, RunningRequest, Service};
use crate::network::ClientNetwork;
use crate::when;

impl Service for Pipeline {
    /// A program that asks the console's host for the API gets the API's own 404. Any client can
    /// name the default host: from elsewhere only its health is answered there, which load
    /// balancers probe.
    fn admit(&self, client: ClientInfo, head: &RequestHead) -> Result<Admission, Response> {
        if let Some((host, console)) = &self.console
            && host.eq_ignore_ascii_case(head.host())
            && !head.path().starts_with("/v1/")
        {
            if let Some(response) = console.monitoring.probe(head) {
                return Err(response);
            }
            if !self.console_is_local || client.is_local() {
                return Ok(console.admit(client, head));
            }
        }
        match self.check_head(head) {
            Ok(digest) => Ok(Admission {
                client_network: client.peer.map(ClientNetwork::from),
                ..Admission::new(Destination::Api(digest))
            }),
            Err(failure) => {
                self.metrics.head_refused.add(1);
                Err(self.refuse(client.peer, None, failure))
            }
        }
    }

    fn outage(&self) -> Option<Failure> {
        self.store.ledger.outage().as_ref().map(ledger::unavailable)
    }

    fn identify(&self, pending: &PendingRequest) -> Result<Option<Lane>, Response> {
        let digest = match pending.admission.destination {
            Destination::Api(digest) => digest,
            Destination::Console(_) => return Ok(self.console().identify(&pending.request)),
        };
        let look_up = || {
            size::check_size(&pending.request)?;
            key::authenticate(&digest, &self.store, when::now())
        };
        match catch_panic(look_up) {
            Ok(key) => Ok(Some(lane(key))),
            Err(failure) => {
                let record = Record::new(pending.request.client.peer, pending.received);
                Err(self.conclude(record, Err(failure)))
            }
        }
    }

    fn lanes(&self, ids: &[Arc<str>]) -> Option<Vec<Lane>> {
        let now = when::now();
        let keys = self.store.keys.find_all(ids).ok()?.into_iter();
        Some(keys.filter(|key| key.is_valid(now)).map(lane).collect())
    }

    fn respond(&self, pending: &PendingRequest, running: &RunningRequest) -> Response {
        let digest = match pending.admission.destination {
            Destination::Api(digest) => digest,
            Destination::Console(_) => return self.console().respond(&pending.request),
        };
        let mut record = Record::new(pending.request.client.peer, pending.received);
        record.cost.cancellation = pending.cancellation.clone();
        let result = catch_panic(|| self.complete(pending, &digest, running, &mut record));
        self.conclude(record, result)
    }

    fn refuse(
        &self,
        peer: Option<IpAddr>,
        destination: Option<Destination>,
        failure: Failure,
    ) -> Response {
        if let Some(Destination::Console(_)) = destination {
            return self.console().refuse();
        }
        self.metrics.count_error(failure.error);
        let mut record = Record::new(peer, Instant::now());
        record.set_outcome(Some(&failure));
        record.log(Some(&failure));
        reply::error(&record.row.request_id, &failure).with("server-timing", record.server_timing())
    }
}

impl Pipeline {
    /// The console, for a request that was admitted for it.
    fn console(&self) -> &Console {
        let (_, console) = self
            .console
            .as_ref()
            .expect("only a configured console admits requests");
        console
    }
}

fn lane(key: Key) -> Lane {
    Lane {
        name: key.id,
        limit: key.concurrent,
    }
}
