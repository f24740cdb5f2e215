//! Dispatches a request by its host: to the console or to the API. The API is never served on the console's host, and
//! the console is served on no other host.

use std::net::IpAddr;
use std::sync::Arc;

use crate::console::Console;
use crate::error::{ApiError, Failure};
use crate::http::head::split_authority;
use crate::http::{ClientInfo, RequestHead, Response};
use crate::listener::{
    Admission, Destination, Lane, PendingRequest, RequestIdentity, RunningCall, Service, Ticket,
};
use crate::pipeline::Pipeline;

pub struct Dispatcher {
    /// The console and its host; `None` if there is no console.
    pub console: Option<(String, Console)>,
    /// The console is for clients on this host.
    pub console_is_local: bool,
    pub api: Pipeline,
}

impl Dispatcher {
    /// The console, if the request is for it. A program that asks there for the API gets the API's own 404. Any client can
    /// name the default host: from elsewhere only its health is answered there, which load balancers probe.
    fn console(&self, client: ClientInfo, head: &RequestHead) -> Option<&Console> {
        let (host, console) = self.console.as_ref()?;
        let is_meant = host.eq_ignore_ascii_case(head.host()) && !head.path().starts_with("/v1/");
        let is_admitted = !self.console_is_local || client.is_local() || console.probe(head).is_some();
        (is_meant && is_admitted).then_some(console)
    }

    /// A person on this host who opens the API's address in a browser probably looks for the console.
    fn with_console_address(&self, client: ClientInfo, head: &RequestHead, mut failure: Failure) -> Failure {
        let is_meant = failure.error == ApiError::NotFound && head.method() == "GET" && client.is_local();
        if let Some((host, _)) = self.console.as_ref().filter(|_| is_meant) {
            let scheme = if client.secure { "https" } else { "http" };
            let port = split_authority(head.authority()).and_then(|(_, port)| port.parse::<u16>().ok());
            let port = port.map_or_else(String::new, |port| format!(":{port}"));
            failure.message =
                format!("{} The console is at {scheme}://{host}{port}/.", failure.message).into();
        }
        failure
    }
}

impl Service for Dispatcher {
    fn admit(&self, client: ClientInfo, head: &RequestHead) -> Admission {
        if let Some(console) = self.console(client, head) {
            if let Some(response) = console.probe(head) {
                return Admission::Answer(response);
            }
            return Admission::Read(Destination::Console, console.ticket(client, head));
        }
        match self.api.check_head(head) {
            Ok(digest) => {
                let (credential, origin) = (Some(digest), client.peer);
                let ticket = Ticket { credential, origin, ..Ticket::default() };
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
        match (call.destination, &self.console) {
            (Destination::Api(digest), _) => match self.api.identify(call, &digest) {
                Ok(caller) => RequestIdentity::Known(Lane { name: caller.key_id, limit: caller.concurrent }),
                Err(response) => RequestIdentity::Refused(response),
            },
            (Destination::Console, Some((_, console))) => {
                console.lane(&call.request).map_or(RequestIdentity::Unknown, RequestIdentity::Known)
            }
            (Destination::Console, None) => RequestIdentity::Unknown,
        }
    }

    fn lanes(&self, names: &[Arc<str>]) -> Option<Vec<Lane>> {
        self.api.lanes(names)
    }

    fn answer(&self, call: &PendingRequest, running: &RunningCall) -> Response {
        match (call.destination, &self.console) {
            (Destination::Api(digest), _) => self.api.answer(call, &digest, running),
            (Destination::Console, Some((_, console))) => console.answer(&call.request),
            (Destination::Console, None) => unreachable!("only the console admits requests for it"),
        }
    }

    fn refuse(&self, peer: Option<IpAddr>, call: Option<&PendingRequest>, failure: Failure) -> Response {
        let is_for_console = call.is_some_and(|call| call.destination == Destination::Console);
        match self.console.as_ref().filter(|_| is_for_console) {
            Some((_, console)) => console.refuse(),
            None => self.api.refuse(peer, failure),
        }
    }
}
