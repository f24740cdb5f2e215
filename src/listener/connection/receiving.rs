//! Reading from a client, within the limits of a turn.

use std::io::{self, Read};
use std::mem;
use std::time::Instant;

use super::{InboundConnection, Outgoing, Phase, Turn, TurnResult};
use crate::http::response::CONTINUE;
use crate::http::{ClientInfo, ReadStep, Request};
use crate::listener::admission::PendingRequest;

/// The responses that only a head was needed for, after which a connection ends: a client that
/// pipelines such requests and reads nothing would fill the system's buffers with the responses.
const MAX_HEAD_RESPONSES: usize = 100;

impl InboundConnection {
    /// Reads until a request is complete or its head was enough for a response.
    pub(super) fn receive(&mut self, turn: &mut Turn) -> TurnResult {
        if turn.left == 0 {
            return TurnResult::TurnOver;
        }
        let mut was_between = self.reader.is_between_requests();
        loop {
            let mut client = ClientInfo {
                peer: self.peer,
                proxied: false,
                secure: self.tls.is_some(),
            };
            let mut step = self.reader.step();
            if let Ok(ReadStep::Head) = step {
                match (turn.admit)(&mut client, self.reader.head()) {
                    Ok(admission) => self.admitted = Some((client, admission)),
                    Err(response) => {
                        let (head, is_body_skipped) = self.reader.refuse();
                        self.head_responses += 1;
                        let is_last = turn.stopping || self.head_responses >= MAX_HEAD_RESPONSES;
                        // If the body has not come whole, the beginning of the next request is
                        // unknown.
                        return TurnResult::Response(Outgoing::encode(
                            response,
                            &head,
                            is_body_skipped,
                            is_last,
                        ));
                    }
                }
                step = self.reader.step();
            }
            match step {
                Err(malformed) => return TurnResult::Malformed(malformed),
                Ok(ReadStep::Head) => unreachable!("a body or its end follows a head"),
                Ok(ReadStep::Request(request)) => {
                    let (client, admission) = self
                        .admitted
                        .take()
                        .expect("the head comes before the request");
                    let request = Request { client, ..request };
                    let pending = PendingRequest::new(request, admission);
                    return TurnResult::Request(Box::new(pending));
                }
                Ok(ReadStep::More) => {
                    if was_between && !self.reader.is_between_requests() {
                        self.deadline = Some(Instant::now() + turn.limits.request_time);
                    }
                    if self.reader.take_continue() {
                        // Best effort: a client that can't take it now will send its body anyway.
                        let _ = self.write(CONTINUE);
                    }
                    was_between = self.reader.is_between_requests();
                    match self.fill(turn) {
                        Ok(count) => self.reader.append(&turn.scratch[..count]),
                        Err(end) => return end,
                    }
                }
            }
        }
    }

    /// Discards what the client still sends, until it ends or the limit is reached.
    pub(super) fn drain(&mut self, turn: &mut Turn) -> TurnResult {
        loop {
            let count = match self.fill_raw(turn) {
                Ok(count) => count,
                Err(end) => return end,
            };
            let Phase::Draining { left } = &mut self.phase else {
                unreachable!("only after the last response is there anything to drain");
            };
            *left = left.saturating_sub(count);
            if *left == 0 {
                return TurnResult::Gone;
            }
        }
    }

    /// Reads decrypted bytes into `turn.scratch`, and returns how many. Without any, the turn ends.
    fn fill(&mut self, turn: &mut Turn) -> Result<usize, TurnResult> {
        let Some(session) = &mut self.tls else {
            return self.fill_raw(turn);
        };
        session.flush(&self.stream)?;
        loop {
            match session.read(turn.scratch)? {
                Some(0) => return Err(TurnResult::Gone),
                Some(count) => return Ok(count),
                None => {}
            }
            if !self.readable {
                session.shrink_buffer();
                return Err(TurnResult::Waiting);
            }
            if turn.left == 0 {
                return Err(TurnResult::TurnOver);
            }
            let (was_handshaking, was_established) =
                (session.is_handshaking(), session.is_established());
            if !was_established && !mem::take(&mut turn.handshake_allowed) {
                return Err(TurnResult::Handshake);
            }
            match session.receive(&self.stream) {
                Ok(0) => return Err(TurnResult::Gone),
                Ok(count) => {
                    turn.left = turn.left.saturating_sub(count);
                    self.readable = !self.stream.is_drained.get() || self.read_closed;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable = false,
                Err(_) => return Err(TurnResult::Gone),
            }
            // A handshake has the same deadline as a request, from its first byte on.
            if session.is_handshaking() && !was_handshaking {
                self.deadline = Some(Instant::now() + turn.limits.request_time);
            } else if !was_established && session.is_established() {
                self.deadline = Some(Instant::now() + turn.limits.idle_time);
            }
        }
    }

    /// Reads bytes as they are on the wire.
    fn fill_raw(&mut self, turn: &mut Turn) -> Result<usize, TurnResult> {
        if !self.readable {
            return Err(TurnResult::Waiting);
        }
        let most = turn.left.min(turn.scratch.len());
        if most == 0 {
            return Err(TurnResult::TurnOver);
        }
        match (&self.stream).read(&mut turn.scratch[..most]) {
            Ok(0) => Err(TurnResult::Gone),
            Ok(count) => {
                turn.left -= count;
                self.readable = !self.stream.is_drained.get() || self.read_closed;
                Ok(count)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.readable = false;
                Err(TurnResult::Waiting)
            }
            Err(_) => Err(TurnResult::Gone),
        }
    }
}
