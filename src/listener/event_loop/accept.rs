//! Accepting connections.

use std::io;
use std::net::IpAddr;
use std::time::Instant;

use mio::Token;

use super::super::connection::Connection;
use super::super::{Service, socket};
use super::{Entry, EventLoop, count};

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
            // No file descriptor or no memory: the longest idle connection is closed, but not one that has just come and
            // had no time to send anything. If no other is idle, accepting pauses until some connection ends.
            _ => {
                let latest = began + self.limits.idle_time;
                if !self.close_longest_idle(|entry| entry.connection.deadline() < Some(latest)) {
                    log::warn!("no connection can be accepted for now: {error}");
                    self.accept_after = Instant::now() + self.limits.accept_pause;
                }
            }
        }
    }

    fn welcome(&mut self, mut stream: socket::Stream, peer: Option<IpAddr>) {
        if self.connections.len() >= self.limits.max_connections && !self.close_longest_idle(|_| true) {
            return count(&self.load.turned_away);
        }
        let tls = match (&self.acceptor, &stream) {
            (Some(acceptor), socket::Stream::Tcp(_)) => match acceptor.accept() {
                Ok(session) => Some(session),
                Err(error) => return log::error!("a TLS session could not be begun: {error}"),
            },
            _ => None,
        };
        count(&self.load.accepted);
        let slot = self.connections.vacant_entry();
        if let Err(error) = stream.register(self.poll.registry(), Token(slot.key())) {
            log::warn!("a connection could not be watched: {error}");
            return;
        }
        let connection = Connection::new(stream, tls, peer, Instant::now(), &self.limits);
        let index = slot.key();
        slot.insert(Entry { connection, in_line: false, weight: 0 });
        self.weigh(index);
        self.bound(index);
    }
}
