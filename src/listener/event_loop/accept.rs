//! Accepting connections.

use std::io;
use std::net::IpAddr;
use std::sync::atomic::Ordering;
use std::time::Instant;

use mio::Token;

use super::super::connection::Connection;
use super::super::room::{Held, Origin, Scarce};
use super::super::{Service, socket};
use super::{Entry, EventLoop};

/// How many connections are accepted before the ones that are there have their turn again.
const ACCEPT_BATCH: usize = 64;

impl<S: Service> EventLoop<S> {
    pub(super) fn accept(&mut self) {
        let began = Instant::now();
        for index in 0..self.sockets.len() {
            for _ in 0..ACCEPT_BATCH {
                if !self.accepting[index] || Instant::now() < self.accept_after {
                    break;
                }
                match self.sockets[index].accept() {
                    Ok((stream, peer)) => self.welcome(stream, peer),
                    Err(error) => self.accept_failed(index, &error, began),
                }
            }
        }
    }

    fn accept_failed(&mut self, socket: usize, error: &io::Error, began: Instant) {
        match error.kind() {
            io::ErrorKind::WouldBlock => self.accepting[socket] = false,
            // The client gave up before it was its turn.
            io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted => {}
            // No file descriptor or no memory: evicts a connection, but not one that has just come and had no time to
            // send anything. If there is none to evict, accepting pauses until some connection ends.
            _ => {
                let latest = began + self.limits.idle_time;
                if !self.evict(Scarce::Connections, |entry| entry.connection.deadline() < Some(latest)) {
                    log::warn!("can't accept connections at the moment: {error}");
                    self.accept_after = Instant::now() + self.limits.accept_pause;
                }
            }
        }
    }

    fn welcome(&mut self, mut stream: socket::Stream, peer: Option<IpAddr>) {
        let origin = Origin::of(peer, &self.proxies);
        let is_plain = self.acceptor.is_none() || matches!(stream, socket::Stream::Unix(_));
        if !self.make_room_for_connection(origin) {
            return self.turn_away(&stream, peer, is_plain);
        }
        let tls = match (&self.acceptor, &stream) {
            (Some(acceptor), socket::Stream::Tcp(_)) => match acceptor.accept() {
                Ok(session) => Some(session),
                Err(error) => return log::error!("could not start a TLS session: {error}"),
            },
            _ => None,
        };
        self.load.accepted.fetch_add(1, Ordering::Relaxed);
        let slot = self.connections.vacant_entry();
        if let Err(error) = stream.register(self.poll.registry(), Token(slot.key())) {
            log::warn!("could not register a connection: {error}");
            return;
        }
        let connection = Connection::new(stream, tls, peer, Instant::now(), &self.limits);
        let index = slot.key();
        let entry = Entry { connection, in_line: false, origin, weight: 0, is_unfinished: false, call: None };
        self.holdings.change(origin, Held::default(), entry.held());
        slot.insert(entry);
        self.account(index);
        self.make_room_for_bytes(0);
    }
}
