//! Eviction: chooses the connection to close, or the waiting requests to shed, when connections,
//! file descriptors or buffer bytes run out.

use std::sync::Arc;

use super::connection::send_unavailable;
use super::event_loop::{ConnectionEntry, EventLoop};
use super::load::LoadEvent;
use super::origins::{Origin, Resource};
use crate::error::{Failure, FailureCause};
use crate::http::MAX_HEAD;

/// The quarters of `buffer_limit` that the requests of one key may hold. The rest is left to the
/// others, also while none of its requests can be shed, because all of them run.
const LANE_QUARTERS: usize = 3;

impl EventLoop {
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

    /// Makes room for a complete request, to whose lane `own` bytes belong by now; returns false if
    /// the request is to be shed itself. Evicts from the origins that hold most, and if all of that
    /// is not enough, sheds the newest waiting requests of the lanes that hold more than this one.
    /// Evicts and sheds nothing unless it is enough.
    pub(super) fn make_room(&mut self, bytes: usize, own: usize, is_known: bool) -> bool {
        let limit = self.limits.buffered_bytes;
        if own > 0 && own + bytes > limit / 4 * LANE_QUARTERS {
            return false;
        }
        let excess = (self.holdings.total.bytes + bytes).saturating_sub(limit);
        if let Some(needed @ 1..) = excess.checked_sub(self.holdings.total.evictable_bytes) {
            // A request with an unknown key displaces none with a known key.
            let shed = is_known.then(|| self.state.dispatcher.shed_bytes(needed, own + bytes));
            let Some(shed) = shed.flatten() else {
                return false;
            };
            for pending in shed {
                self.refuse_shed(&pending, FailureCause::BuffersFull);
            }
        }
        while self.holdings.total.bytes + bytes > limit && self.evict_from_largest(Resource::Bytes)
        {
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
            // It would free little, and may be the 503 of a request that was just shed.
            let is_small = resource == Resource::Bytes && entry.held.bytes <= MAX_HEAD;
            let is_unfinished = entry.connection.is_unfinished();
            // The connection that has been idle longest has the earliest deadline.
            (is_unfinished, is_small, entry.connection.deadline)
        };
        let first = self
            .connections
            .iter()
            .filter(|(_, entry)| is_candidate(entry))
            .min_by_key(|(_, entry)| rank(entry));
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
            let service = Arc::clone(self.default_service());
            send_unavailable(&*service, stream, connection.peer, &mut self.scratch);
        }
        self.close(index);
    }
}
