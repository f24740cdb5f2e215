//! The console: API keys and usage for the operator, on a host of its own.

mod machines;

use std::time::Instant;

pub use self::machines::Machines;
use crate::http::{Request, Response};

pub struct Console {
    pub machines: Machines,
}

impl Console {
    /// Answers a request for the console's host.
    pub fn answer(&self, request: &Request, _: Instant) -> Response {
        if let Some(response) = self.machines.answer(request) {
            return response;
        }
        Response::new(404, "text/plain; charset=utf-8", b"There is nothing here.\n".to_vec())
    }

    /// Answers a request for which there is no room.
    pub fn refuse(&self) -> Response {
        Response::new(503, "text/plain; charset=utf-8", b"The console is busy. Try again shortly.\n".to_vec())
            .with("retry-after", "1")
    }
}
