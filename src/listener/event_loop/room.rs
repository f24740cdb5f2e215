//! Eviction: which connection gives way to another.

use std::io;

use super::super::load::Cause;
use super::super::room::{Origin, Scarce};
use super::super::{Service, socket};
use super::{Entry, EventLoop};
use crate::error::Failure;
use crate::http::response;

const NO_CONNECTION: &str = "every connection is taken";
const NO_BYTES: &str = "the limit on buffered bytes is reached";

impl<S: Service> EventLoop<S> {
    /// Whether there is room for one more connection from an origin. One origin holds at most half of the connections:
    /// beyond that, a new one evicts one of its own.
    pub(super) fn make_room_for_connection(&mut self, origin: Origin) -> bool {
        let most = self.limits.max_connections;
        if !origin.is_shared && self.holdings.of(origin).connections >= most.div_ceil(2) {
            self.evict(Scarce::Connections, |entry| entry.origin == origin)
        } else {
            self.connections.len() < most || self.evict(Scarce::Connections, |_| true)
        }
    }

    /// Whether there is room for so many more bytes.
    pub(super) fn make_room_for_bytes(&mut self, wanted: usize) -> bool {
        while self.buffered + self.workers.weight() + wanted > self.limits.buffered_bytes {
            if !self.evict(Scarce::Bytes, |entry| entry.weight > 0) {
                return false;
            }
        }
        true
    }

    /// Evicts one of the connections that `is_meant` accepts: the oldest unfinished request or handshake of the origin that
    /// holds most, else the longest idle connection. A complete request is never evicted.
    pub(super) fn evict(&mut self, scarce: Scarce, is_meant: impl Fn(&Entry) -> bool) -> bool {
        let oldest = |is_chosen: &dyn Fn(&Entry) -> bool| {
            let chosen = self.connections.iter().filter(|(_, entry)| is_chosen(entry) && is_meant(entry));
            chosen.min_by_key(|(_, entry)| entry.connection.deadline()).map(|(index, _)| index)
        };
        // The largest holder may have no connection that `is_meant` accepts.
        let largest = self.holdings.largest(scarce);
        let unfinished = oldest(&|entry| entry.is_unfinished && Some(entry.origin) == largest)
            .or_else(|| oldest(&|entry| entry.is_unfinished));
        if let Some(index) = unfinished {
            self.load.count(Cause::UnfinishedEvicted);
            self.give_way(index, scarce);
        } else if let Some(index) = oldest(&|entry| entry.connection.is_idle()) {
            self.load.count(Cause::IdleEvicted);
            self.close(index);
        } else {
            return false;
        }
        true
    }

    fn give_way(&mut self, index: usize, scarce: Scarce) {
        let connection = &mut self.connections[index].connection;
        if !connection.holds_half_a_request() {
            return self.close(index);
        }
        match scarce {
            // Its bytes are free at once, and it may still read its response.
            Scarce::Bytes => {
                self.refuse(index, None, Failure::shed(NO_BYTES));
                self.account(index);
                self.line_up(index);
            }
            Scarce::Connections => {
                if let Some(stream) = connection.plain_stream() {
                    let response = self.service.refuse(connection.peer(), None, Failure::shed(NO_CONNECTION));
                    say_at_once(
                        stream,
                        &response.encode(response::Connection::Close, false),
                        &mut self.scratch,
                    );
                }
                self.close(index);
            }
        }
    }

    /// Closes a new connection for which there is no room. It gets a response if that can be sent at once.
    pub(super) fn turn_away(
        &mut self,
        stream: &socket::Stream,
        peer: Option<std::net::IpAddr>,
        is_plain: bool,
    ) {
        self.load.count(Cause::TurnedAway);
        if is_plain {
            let response = self.service.refuse(peer, None, Failure::shed(NO_CONNECTION));
            say_at_once(stream, &response.encode(response::Connection::Close, false), &mut self.scratch);
        }
    }
}

/// Sends a last response as far as that is possible at once. What has come is read first: closing a socket with unread bytes
/// would reset it and destroy the response.
fn say_at_once(stream: &socket::Stream, bytes: &[u8], scratch: &mut [u8]) {
    let _: io::Result<usize> = stream.read(scratch);
    let _ = stream.write(bytes);
    stream.finish();
}
