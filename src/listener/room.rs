//! How many connections and bytes each origin holds: when they run out, the origin that holds most is evicted first.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};

use super::proxies::Proxies;

/// Where a connection comes from: an IPv4 address, an IPv6 network of 64 bits, or a Unix socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Origin {
    network: Option<IpAddr>,
    /// A trusted proxy or a Unix socket: many clients may be behind it.
    pub is_shared: bool,
}

impl Origin {
    pub fn of(peer: Option<IpAddr>, proxies: &Proxies) -> Self {
        let network = peer.map(|address| match address {
            IpAddr::V4(_) => address,
            IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
        });
        Self { network, is_shared: peer.is_none() || proxies.trust(peer) }
    }
}

/// What can run out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scarce {
    Connections,
    Bytes,
}

/// What one or more connections hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Held {
    pub connections: usize,
    /// Of these, the ones that can be evicted before they are idle: unfinished requests and handshakes.
    pub unfinished: usize,
    pub unfinished_bytes: usize,
}

#[derive(Default)]
pub(super) struct Holdings(HashMap<Origin, Held>);

impl Holdings {
    pub fn of(&self, origin: Origin) -> Held {
        self.0.get(&origin).copied().unwrap_or_default()
    }

    /// Replaces what a connection holds.
    pub fn change(&mut self, origin: Origin, from: Held, to: Held) {
        if from == to {
            return;
        }
        let held = self.0.entry(origin).or_default();
        held.connections = held.connections - from.connections + to.connections;
        held.unfinished = held.unfinished - from.unfinished + to.unfinished;
        held.unfinished_bytes = held.unfinished_bytes - from.unfinished_bytes + to.unfinished_bytes;
        if held.connections == 0 {
            self.0.remove(&origin);
        }
    }

    /// The origin whose unfinished requests hold most. A shared one comes last, whatever it holds.
    pub fn largest(&self, scarce: Scarce) -> Option<Origin> {
        let amount = |held: &Held| match scarce {
            Scarce::Connections => held.unfinished,
            Scarce::Bytes => held.unfinished_bytes,
        };
        let holders = self.0.iter().filter(|(_, held)| amount(held) > 0);
        holders.max_by_key(|(origin, held)| (!origin.is_shared, amount(held))).map(|(origin, _)| *origin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(peer: &str) -> Origin {
        Origin::of(peer.parse().ok(), &Proxies(vec!["10.0.0.0/8".parse().expect("a network")]))
    }

    #[test]
    fn an_origin_is_an_address_or_a_network() {
        assert_ne!(origin("192.0.2.1"), origin("192.0.2.2"));
        assert_eq!(origin("2001:db8::1"), origin("2001:db8::ffff:1"));
        assert_ne!(origin("2001:db8::1"), origin("2001:db8:0:1::1"));
        assert!(origin("10.1.1.1").is_shared && origin("unix").is_shared && !origin("192.0.2.1").is_shared);
    }

    #[test]
    fn the_largest_holder_is_found_and_shared_origins_come_last() {
        let mut holdings = Holdings::default();
        let held = |unfinished, unfinished_bytes| Held { connections: 100, unfinished, unfinished_bytes };
        assert_eq!(holdings.largest(Scarce::Connections), None);
        holdings.change(origin("unix"), Held::default(), held(90, 9_000));
        assert_eq!(holdings.largest(Scarce::Connections), Some(origin("unix")), "there is no other");
        holdings.change(origin("192.0.2.1"), Held::default(), held(50, 10));
        holdings.change(origin("192.0.2.2"), Held::default(), held(2, 5_000));
        assert_eq!(holdings.largest(Scarce::Connections), Some(origin("192.0.2.1")));
        assert_eq!(holdings.largest(Scarce::Bytes), Some(origin("192.0.2.2")));
        holdings.change(origin("192.0.2.1"), held(50, 10), held(1, 10));
        assert_eq!(holdings.largest(Scarce::Connections), Some(origin("192.0.2.2")));
        holdings.change(origin("192.0.2.2"), held(2, 5_000), Held::default());
        assert_eq!(holdings.of(origin("192.0.2.2")), Held::default());
        assert_eq!(holdings.0.len(), 2, "an origin without a connection is forgotten");
    }
}
