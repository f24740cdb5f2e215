//! Accepts connections, within the limits.

use std::io;
use std::net::IpAddr;
use std::sync::atomic::Ordering;
use std::time::Instant;

use mio::Token;
use rustix::io::Errno;

use super::eviction::send_unavailable;
use super::{ConnectionEntry, EventLoop};
use crate::listener::connection::InboundConnection;
use crate::listener::load::LoadEvent;
use crate::listener::origins::{Holding, Origin, Resource};
use crate::listener::service::Service;
use crate::listener::socket::InboundStream;

/// The connections that a socket accepts in one round, before the established ones have their turn
/// again.
const ACCEPT_BATCH: usize = 64;

impl<S: Service> EventLoop<S> {
    pub(super) fn accept(&mut self) {
        let mut has_accepted = false;
        for index in 0..self.listener.sockets.len() {
            for _ in 0..ACCEPT_BATCH {
                if !self.accepting[index] || Instant::now() < self.accept_after {
                    break;
                }
                match self.listener.sockets[index].accept() {
                    Ok((stream, peer)) => {
                        self.add_connection(stream, peer);
                        has_accepted = true;
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        self.accepting[index] = false
                    }
                    // An error of the one connection: its client gave up before it was its turn, or
                    // a filter forbids it.
                    Err(error) if !is_shortage(&error) => {}
                    // The connections that have just come take their turns first: evicted now, they
                    // would have had no time to send anything.
                    Err(_) if has_accepted => return,
                    Err(error) => self.free_descriptor(&error),
                }
            }
        }
    }

    /// Evicts a connection, because there is no file descriptor or no memory for another. If there
    /// is none to evict, accepting pauses until some connection ends.
    fn free_descriptor(&mut self, error: &io::Error) {
        if !self.evict_from_largest(Resource::Connections) {
            log::warn!("can't accept connections at the moment: {error}");
            self.accept_after = Instant::now() + self.limits.accept_pause;
        }
    }

    /// Adds a new connection, or rejects it if no other can be evicted for it.
    fn add_connection(&mut self, mut stream: InboundStream, peer: Option<IpAddr>) {
        let origin = Origin::new(peer, &self.listener.trusted_proxies);
        let acceptor = self.listener.acceptor.clone().filter(|_| peer.is_some());
        if !self.reserve_connection(origin) {
            self.state.count(LoadEvent::Rejected);
            if acceptor.is_none() {
                send_unavailable(&*self.service, &stream, peer, &mut self.scratch);
            }
            return;
        }
        let tls = match acceptor.map(|acceptor| acceptor.accept()).transpose() {
            Ok(session) => session,
            Err(error) => return log::error!("could not start a TLS session: {error}"),
        };
        self.state.accepted.fetch_add(1, Ordering::Relaxed);
        let vacant = self.connections.vacant_entry();
        let index = vacant.key();
        if let Err(error) = stream.register(self.listener.poll.registry(), Token(index)) {
            return log::warn!("could not register a connection: {error}");
        }
        vacant.insert(ConnectionEntry {
            connection: InboundConnection::new(stream, tls, peer, &self.limits),
            is_scheduled: false,
            origin,
            held: Holding::default(),
            in_flight: None,
        });
        self.account(index);
        self.evict_excess_bytes();
    }
}

/// Returns true if there is no file descriptor or no memory for a connection, which another one can
/// give back.
fn is_shortage(error: &io::Error) -> bool {
    let shortages = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    Errno::from_io_error(error).is_some_and(|errno| shortages.contains(&errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The errors of accept(2): an error of one connection evicts no other.
    #[test]
    fn only_a_shortage_evicts() {
        let evicts = |errno: Errno| is_shortage(&errno.into());
        assert!(
            [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM]
                .into_iter()
                .all(evicts)
        );
        let of_one_connection = [
            Errno::CONNABORTED,
            Errno::INTR,
            Errno::PERM,
            Errno::PROTO,
            Errno::NETDOWN,
            Errno::NOPROTOOPT,
            Errno::HOSTDOWN,
            Errno::HOSTUNREACH,
            Errno::OPNOTSUPP,
            Errno::NETUNREACH,
        ];
        assert!(!of_one_connection.into_iter().any(evicts));
        assert!(
            !is_shortage(&io::ErrorKind::ConnectionAborted.into()),
            "an error without a number"
        );
    }
}
