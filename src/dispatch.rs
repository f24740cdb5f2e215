//! Decides the destination of a request: the console, the API, or an answer at once. The API is never served on the
//! console's host, and the console is served on no other host.

use std::net::IpAddr;
use std::sync::Arc;

use crate::console::Console;
use crate::error::{ApiError, Failure};
use crate::http::head::split_authority;
use crate::http::{ClientInfo, RequestHead, Response};
use crate::listener::{
    Admission, Destination, Lane, PendingRequest, RequestIdentity, RunningRequest, Service, Ticket,
};
use crate::network::ClientNetwork;
use crate::pipeline::Pipeline;

pub struct Dispatcher {
    /// The console and its host; `None` if there is no console.
    pub console: Option<(String, Console)>,
    /// The console is for clients on this host.
    pub console_is_local: bool,
    pub api: Pipeline,
}

impl Dispatcher {
    /// The console, for a request that was admitted for it.
    fn console(&self) -> &Console {
        let (_, console) = self
            .console
            .as_ref()
            .expect("only a configured console admits requests");
        console
    }

    /// Adds the console's address to a 404: a person on this host who opens the API in a browser probably looks for it.
    fn with_console_address(
        &self,
        client: ClientInfo,
        head: &RequestHead,
        mut failure: Failure,
    ) -> Failure {
        let is_meant =
            failure.error == ApiError::NotFound && head.method() == "GET" && client.is_local();
        if let Some((host, _)) = self.console.as_ref().filter(|_| is_meant) {
            let scheme = if client.secure { "https" } else { "http" };
            let port =
                split_authority(head.authority()).and_then(|(_, port)| port.parse::<u16>().ok());
            let port = port.map_or_else(String::new, |port| format!(":{port}"));
            failure.message = format!(
                "{} The console is at {scheme}://{host}{port}/.",
                failure.message
            )
            .into();
        }
        failure
    }
}

impl Service for Dispatcher {
    /// Decides the destination of a request, once. A program that asks the console's host for the API gets the API's own
    /// 404. Any client can name the default host: from elsewhere only its health is answered there, which load balancers
    /// probe.
    fn admit(&self, client: ClientInfo, head: &RequestHead) -> Admission {
        if let Some((host, console)) = &self.console
            && host.eq_ignore_ascii_case(head.host())
            && !head.path().starts_with("/v1/")
        {
            if let Some(response) = console.monitoring.probe(head) {
                return Admission::Answer(response);
            }
            if !self.console_is_local || client.is_local() {
                return Admission::Read(Destination::Console, console.ticket(client, head));
            }
        }
        match self.api.check_head(head) {
            Ok(digest) => {
                let (credential, origin) = (Some(digest), client.peer.map(ClientNetwork::from));
                let ticket = Ticket {
                    credential,
                    origin,
                    ..Ticket::default()
                };
                Admission::Read(Destination::Api(digest), ticket)
            }
            Err(failure) => {
                self.api.metrics.head_refused.add(1);
                let failure = self.with_console_address(client, head, failure);
                Admission::Answer(self.api.refuse(client.peer, failure))
            }
        }
    }

    fn outage(&self) -> Option<Failure> {
        self.api.outage()
    }

    fn identify(&self, call: &PendingRequest) -> RequestIdentity {
        match call.destination {
            Destination::Api(digest) => match self.api.identify(call, &digest) {
                Ok(key) => RequestIdentity::Known(Lane {
                    name: key.id,
                    limit: key.concurrent,
                }),
                Err(response) => RequestIdentity::Refused(response),
            },
            Destination::Console => self
                .console()
                .lane(&call.request)
                .map_or(RequestIdentity::Unknown, RequestIdentity::Known),
        }
    }

    fn lanes(&self, names: &[Arc<str>]) -> Option<Vec<Lane>> {
        self.api.lanes(names)
    }

    fn answer(&self, call: &PendingRequest, running: &RunningRequest) -> Response {
        match call.destination {
            Destination::Api(digest) => self.api.answer(call, &digest, running),
            Destination::Console => self.console().answer(&call.request),
        }
    }

    fn refuse(
        &self,
        peer: Option<IpAddr>,
        call: Option<&PendingRequest>,
        failure: Failure,
    ) -> Response {
        match call.map(|call| call.destination) {
            Some(Destination::Console) => self.console().refuse(),
            Some(Destination::Api(_)) | None => self.api.refuse(peer, failure),
        }
    }
}
