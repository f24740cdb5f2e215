//! Eviction: chooses the connection to close, or the waiting request to shed, when connections,
//! file descriptors or buffer bytes run out.

use std::io::{self, Read};
use std::net::IpAddr;

use super::{ConnectionEntry, EventLoop};
use crate::error::{Failure, FailureCause};
use crate::http::MAX_HEAD;
use crate::http::response::ConnectionHeader;
use crate::listener::load::LoadEvent;
use crate::listener::origins::{Origin, Resource};
use crate::listener::service::Service;
use crate::listener::socket::InboundStream;

/// The quarters of `buffer_limit` that the requests of one key may hold. The rest is left to the
/// others, also while none of its requests can be shed, because all of them run.
const LANE_QUARTERS: usize = 3;

impl<S: Service> EventLoop<S> {
    /// Returns whether there is capacity for one more connection from an origin, after an eviction
    /// if necessary. One origin holds at most half of the connections: beyond that, a new one
    /// evicts one of its own.
    pub(super) fn reserve_connection(&mut self, origin: Origin) -> bool {
        let most = self.limits.max_connections;
        if !origin.is_shared && self.holdings.get(origin).connections >= most.div_ceil(2) {
            self.evict(Resource::Connections, origin)
        } else {
            self.connections.len() < most || self.evict_from_largest(Resource::Connections)
        }
    }

    /// Frees memory for a complete request, whose lane holds `own` bytes with it; returns false if
    /// the request is to be shed itself. What can be evicted goes first, if that is enough. If not,
    /// the lanes that hold more than this one lose their newest requests, the heaviest first.
    /// Nothing is evicted unless that is enough.
    pub(super) fn reserve_bytes(&mut self, bytes: usize, own: usize, is_known: bool) -> bool {
        let limit = self.limits.buffered_bytes;
        if own > bytes && own > limit / 4 * LANE_QUARTERS {
            return false;
        }
        // A request with an unknown key displaces none with a known key.
        let sheds_above = if is_known { own } else { usize::MAX };
        let excess = |state: &Self| (state.holdings.total.bytes + bytes).saturating_sub(limit);
        if excess(self) == 0 {
            return true;
        }
        let waiting: usize = self
            .state
            .heavier_lanes(sheds_above)
            .map(|lane| lane.waiting)
            .sum();
        if excess(self) > self.holdings.total.evictable_bytes + waiting {
            return false;
        }
        while excess(self) > 0 {
            if excess(self) <= self.holdings.total.evictable_bytes
                && self.evict_from_largest(Resource::Bytes)
            {
                continue;
            }
            let lanes = self.state.heavier_lanes(sheds_above);
            let Some(heaviest) = lanes.max_by_key(|lane| lane.bytes) else {
                return false;
            };
            if let Some(job) = heaviest.shed() {
                self.refuse_shed(&job, LoadEvent::BuffersFull);
            }
        }
        true
    }

    /// Evicts connections after one of them has grown.
    pub(super) fn evict_excess_bytes(&mut self) {
        while self.holdings.total.bytes > self.limits.buffered_bytes
            && self.evict_from_largest(Resource::Bytes)
        {}
    }

    /// Evicts a connection of the largest holder. Returns false if no connection can be evicted.
    pub(super) fn evict_from_largest(&mut self, resource: Resource) -> bool {
        self.holdings
            .largest(resource)
            .is_some_and(|holder| self.evict(resource, holder))
    }

    /// Evicts one connection of an origin: the longest idle one, else the oldest of the others; if
    /// bytes are short, those that hold few come last. A complete request is never evicted. This
    /// looks at every connection: 50 µs for 4,096 of them.
    fn evict(&mut self, resource: Resource, origin: Origin) -> bool {
        let is_candidate = |entry: &ConnectionEntry| {
            entry.origin == origin
                && entry.held.evictable > 0
                && (resource == Resource::Connections || entry.held.bytes > 0)
        };
        let rank = |entry: &ConnectionEntry| {
            let is_small = resource == Resource::Bytes && entry.held.bytes <= MAX_HEAD;
            // The connection that has been idle longest has the earliest deadline.
            (
                entry.connection.is_unfinished(),
                is_small,
                entry.connection.deadline,
            )
        };
        let candidates = self
            .connections
            .iter()
            .filter(|(_, entry)| is_candidate(entry));
        let first = candidates.min_by_key(|(_, entry)| rank(entry));
        let Some((index, entry)) = first else {
            return false;
        };
        if entry.connection.is_unfinished() {
            self.state.count(LoadEvent::UnfinishedEvicted);
            self.evict_unfinished(index, resource);
        } else {
            self.state.count(LoadEvent::IdleEvicted);
            self.close(index);
        }
        true
    }

    fn evict_unfinished(&mut self, index: usize, resource: Resource) {
        let ConnectionEntry {
            connection, held, ..
        } = &self.connections[index];
        if !connection.has_partial_request() {
            return self.close(index);
        }
        // A large body is free at once, and its client may still read the response. A small one
        // holds less than that.
        if resource == Resource::Bytes && held.bytes > MAX_HEAD {
            self.refuse(index, None, Failure::overloaded(FailureCause::BuffersFull));
            self.account(index);
            return self.schedule(index, false);
        }
        if let Some(stream) = connection.plain_stream() {
            send_unavailable(&*self.service, stream, connection.peer, &mut self.scratch);
        }
        self.close(index);
    }
}

/// Sends 503 as far as that is possible at once. What has come is read first: closing a socket with
/// unread bytes would reset it and destroy the response.
pub(super) fn send_unavailable(
    service: &impl Service,
    mut stream: &InboundStream,
    peer: Option<IpAddr>,
    scratch: &mut [u8],
) {
    let response = service.refuse(
        peer,
        None,
        Failure::overloaded(FailureCause::ConnectionsFull),
    );
    let _: io::Result<usize> = stream.read(scratch);
    let _ = stream.write_available(&response.encode(ConnectionHeader::Close, false));
    stream.finish();
}
