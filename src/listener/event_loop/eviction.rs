//! Eviction: which connection gives way to another.

use std::io;

use super::{ConnectionEntry, EventLoop};
use crate::error::{Failure, FailureCause};
use crate::http::response;
use crate::listener::load::Cause;
use crate::listener::origins::{Origin, Scarce};
use crate::listener::{Service, socket};

impl<S: Service> EventLoop<S> {
    /// Whether there is room for one more connection from an origin. One origin holds at most half of the connections:
    /// beyond that, a new one evicts one of its own.
    pub(super) fn make_room_for_connection(&mut self, origin: Origin) -> bool {
        let most = self.limits.max_connections;
        if !origin.is_shared && self.holdings.of(origin).connections >= most.div_ceil(2) {
            self.evict(Scarce::Connections, origin)
        } else {
            self.connections.len() < most || self.evict_from_largest(Scarce::Connections)
        }
    }

    /// Whether there is room for so many more bytes.
    pub(super) fn make_room_for_bytes(&mut self, wanted: usize) -> bool {
        while self.buffered + self.workers.weight() + wanted > self.limits.buffered_bytes {
            if !self.evict_from_largest(Scarce::Bytes) {
                return false;
            }
        }
        true
    }

    /// Evicts a connection of the largest holder. Returns false if no connection can be evicted.
    pub(super) fn evict_from_largest(&mut self, scarce: Scarce) -> bool {
        self.holdings.largest(scarce).is_some_and(|holder| self.evict(scarce, holder))
    }

    /// Evicts one connection of an origin: the longest idle one, else the oldest unfinished request or handshake. A complete
    /// request is never evicted. This looks at every connection: 50 µs for 4,096 of them.
    fn evict(&mut self, scarce: Scarce, origin: Origin) -> bool {
        let is_meant = |entry: &ConnectionEntry| {
            entry.origin == origin
                && entry.is_evictable()
                && (scarce == Scarce::Connections || entry.weight > 0)
        };
        let candidates = self.connections.iter().filter(|(_, entry)| is_meant(entry));
        let first = candidates.min_by_key(|(_, entry)| (entry.is_unfinished, entry.connection.deadline()));
        let Some((index, entry)) = first else {
            return false;
        };
        if entry.is_unfinished {
            self.load.count(Cause::UnfinishedEvicted);
            self.give_way(index, scarce);
        } else {
            self.load.count(Cause::IdleEvicted);
            self.close(index);
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
                self.refuse(index, None, Failure::shed(FailureCause::BuffersFull));
                self.account(index);
                self.line_up(index);
            }
            Scarce::Connections => {
                if let Some(stream) = connection.plain_stream() {
                    let failure = Failure::shed(FailureCause::ConnectionsFull);
                    let response = self.service.refuse(connection.peer(), None, failure);
                    say_at_once(
                        stream,
                        &response.encode(response::ConnectionHeader::Close, false),
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
        stream: &socket::InboundStream,
        peer: Option<std::net::IpAddr>,
        is_plain: bool,
    ) {
        self.load.count(Cause::TurnedAway);
        if is_plain {
            let response = self.service.refuse(peer, None, Failure::shed(FailureCause::ConnectionsFull));
            say_at_once(
                stream,
                &response.encode(response::ConnectionHeader::Close, false),
                &mut self.scratch,
            );
        }
    }
}

/// Sends a last response as far as that is possible at once. What has come is read first: closing a socket with unread bytes
/// would reset it and destroy the response.
fn say_at_once(stream: &socket::InboundStream, bytes: &[u8], scratch: &mut [u8]) {
    let _: io::Result<usize> = stream.read(scratch);
    let _ = stream.write(bytes);
    stream.finish();
}
