//! Turns: each connection with something to do gets one, then the others do.

use std::mem;
use std::time::{Duration, Instant};

use super::EventLoop;
use crate::error::{Failure, FailureCause};
use crate::http::{ClientInfo, RequestHead};
use crate::listener::connection::{Turn, TurnResult};
use crate::listener::service::Service;

/// The bytes that a connection may read before the others have their turn.
const TURN: usize = 64 * 1024;

/// The time limit for the turns of one round. Then the loop sends responses, accepts connections
/// and checks deadlines.
const ROUND: Duration = Duration::from_millis(10);

impl<S: Service> EventLoop<S> {
    /// Gives each ready connection its turn, until the round is over.
    pub(super) fn take_turns(&mut self) {
        let began = Instant::now();
        while let Some(index) = self.ready.pop() {
            self.take_turn(index, false);
            if began.elapsed() > ROUND {
                break;
            }
        }
        if let Some(index) = self.handshakes.pop() {
            self.take_turn(index, true);
        }
    }

    fn take_turn(&mut self, index: usize, handshake_allowed: bool) {
        // It may have been closed meanwhile.
        if let Some(entry) = self.connections.get_mut(index) {
            entry.is_scheduled = false;
            self.advance(index, handshake_allowed);
        }
    }

    /// Schedules a turn for a connection, after those of the others, if it has none yet.
    pub(super) fn schedule(&mut self, index: usize, for_handshake: bool) {
        let entry = &mut self.connections[index];
        if !mem::replace(&mut entry.is_scheduled, true) {
            let queue = match for_handshake {
                true => &mut self.handshakes,
                false => &mut self.ready,
            };
            queue.push(entry.origin, index);
        }
    }

    /// Advances a connection as far as it can go in one turn without waiting.
    pub(super) fn advance(&mut self, index: usize, handshake_allowed: bool) {
        let mut left = TURN;
        loop {
            let Some(entry) = self.connections.get_mut(index) else {
                return;
            };
            let admit = |client: &mut ClientInfo, head: &RequestHead| {
                let proxies = &self.listener.trusted_proxies;
                proxies.apply_forwarding_headers(client, head);
                self.service.admit(*client, head)
            };
            let stopping = self.state.is_stopping();
            let mut turn = Turn {
                scratch: &mut self.scratch,
                limits: &self.limits,
                left,
                handshake_allowed,
                stopping,
                admit: &admit,
            };
            let result = entry.connection.run_turn(&mut turn);
            left = turn.left;
            match result {
                TurnResult::Waiting => break,
                TurnResult::TurnOver => {
                    self.schedule(index, false);
                    break;
                }
                TurnResult::Handshake => {
                    self.schedule(index, true);
                    break;
                }
                TurnResult::Gone => return self.close(index),
                TurnResult::Malformed(malformed) => {
                    self.refuse(
                        index,
                        None,
                        Failure::invalid(FailureCause::Http, malformed.0),
                    );
                }
                TurnResult::Response(outgoing) => {
                    // One response a turn: a client that pipelines such requests gets no more of
                    // the loop than others.
                    left = 0;
                    entry.connection.send_response(outgoing, &self.limits);
                }
                TurnResult::Request(pending) => self.hand_over(index, pending),
            }
        }
        self.account(index);
        // The evicted connection may be this one.
        self.evict_excess_bytes();
    }
}
