//! Dispatches a request by its host: to the console or to the API. The API is never served on the console's host, and
//! the console is served on no other host.

use std::net::IpAddr;
use std::time::Instant;

use crate::api::key::Caller;
use crate::client::Cancellation;
use crate::console::Console;
use crate::error::{ApiError, Failure};
use crate::http::head::split_authority;
use crate::http::{Client, Head, Request, Response};
use crate::listener::{Admission, Destination, Lane, Service};
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
    fn console(&self, client: Client, head: &Head) -> Option<&Console> {
        let (host, console) = self.console.as_ref()?;
        let is_meant = host.eq_ignore_ascii_case(head.host()) && !head.path().starts_with("/v1/");
        let is_admitted = !self.console_is_local || client.is_local() || console.probe(head).is_some();
        (is_meant && is_admitted).then_some(console)
    }

    /// A person on this host who opens the API's address in a browser probably looks for the console.
    fn with_console_address(&self, client: Client, head: &Head, mut failure: Failure) -> Failure {
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
    /// `None` for the console, whose pages look up their session themselves.
    type Caller = Option<Result<Caller, Failure>>;

    fn admit(&self, client: Client, head: &Head) -> Admission {
        if let Some(console) = self.console(client, head) {
            if let Some(response) = console.probe(head) {
                return Admission::Answer(response);
            }
            return Admission::Read(Destination::Console(console.ticket(client, head)));
        }
        match self.api.check_head(head) {
            Ok(digest) => Admission::Read(Destination::Api(digest)),
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

    fn identify(&self, request: &Request) -> (Self::Caller, Option<Lane>) {
        if let Some(console) = self.console(request.client, &request.head) {
            return (None, console.lane(request));
        }
        let caller = self.api.identify(request);
        let lane = caller.as_ref().ok().map(|caller| Lane {
            name: caller.key_id.clone(),
            limit: caller.concurrent.map(|limit| limit as usize),
        });
        (Some(caller), lane)
    }

    fn answer(
        &self,
        request: &Request,
        caller: Self::Caller,
        received: Instant,
        cancellation: &Cancellation,
    ) -> Response {
        match self.console(request.client, &request.head) {
            Some(console) => console.answer(request),
            None => {
                let caller = caller.unwrap_or_else(|| self.api.identify(request));
                self.api.answer(request, caller, received, cancellation)
            }
        }
    }

    fn refuse(&self, peer: Option<IpAddr>, request: Option<&Request>, failure: Failure) -> Response {
        match request.and_then(|request| self.console(request.client, &request.head)) {
            Some(console) => console.refuse(),
            None => self.api.refuse(peer, failure),
        }
    }
}
