//! Dispatches a request by its host: to the console or to the API. The API is never served on the console's host, the
//! console on no other.

use std::net::IpAddr;
use std::time::Instant;

use crate::console::Console;
use crate::error::Failure;
use crate::http::{Head, Request, Response};
use crate::listener::{Admission, Destination, Service};
use crate::pipeline::Pipeline;

pub struct Dispatcher {
    /// The console and its host; `None` if there is no console.
    pub console: Option<(String, Console)>,
    pub api: Pipeline,
}

impl Dispatcher {
    /// The console, if the request is for it. A program that asks there for the API gets the API's own 404.
    fn console(&self, head: &Head) -> Option<&Console> {
        let (host, console) = self.console.as_ref()?;
        let is_meant = host.eq_ignore_ascii_case(head.host()) && !head.path().starts_with("/v1/");
        is_meant.then_some(console)
    }
}

impl Service for Dispatcher {
    fn admit(&self, client: Option<IpAddr>, head: &Head) -> Admission {
        if let Some(console) = self.console(head) {
            if let Some(response) = console.probe(head) {
                return Admission::Answer(response);
            }
            return Admission::Read(Destination::Console(console.credential(head)));
        }
        match self.api.check_head(head) {
            Ok(digest) => Admission::Read(Destination::Api(digest)),
            Err(failure) => Admission::Answer(self.api.refuse(client, failure)),
        }
    }

    fn answer(&self, request: &Request, received: Instant) -> Response {
        match self.console(&request.head) {
            Some(console) => console.answer(request),
            None => self.api.answer(request, received),
        }
    }

    fn refuse(&self, client: Option<IpAddr>, head: Option<&Head>, failure: Failure) -> Response {
        match head.and_then(|head| self.console(head)) {
            Some(console) => console.refuse(),
            None => self.api.refuse(client, failure),
        }
    }
}
