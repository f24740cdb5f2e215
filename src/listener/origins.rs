//! Where connections come from: the client behind a trusted proxy, and what each origin holds. When
//! connections or bytes run out, the origin that holds most is evicted from; connections take turns
//! by origin.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::str;

use crate::http::{ClientInfo, ClientNetwork, RequestHead};

/// The proxies whose forwarding headers are trusted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Proxies(pub Vec<TrustedProxy>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TrustedProxy {
    /// Every client of the Unix socket.
    Unix,
    /// A network: the addresses whose leading bits, as many as the number says, equal those of this
    /// one.
    Network(IpAddr, u32),
}

impl TrustedProxy {
    /// Returns `None` if the text names no proxy.
    pub fn parse(text: &str) -> Option<Self> {
        if text == "unix" {
            return Some(Self::Unix);
        }
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits.parse().ok()?)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().ok()?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let bits = bits.unwrap_or(most);
        (bits <= most).then_some(Self::Network(address, bits))
    }

    /// Returns true for the peer of a connection that it matches; `None` is a peer on a Unix
    /// socket.
    fn matches(&self, peer: Option<IpAddr>) -> bool {
        match (self, peer) {
            (Self::Unix, peer) => peer.is_none(),
            (Self::Network(IpAddr::V4(network), bits), Some(IpAddr::V4(address))) => {
                (network.to_bits() ^ address.to_bits()).leading_zeros() >= *bits
            }
            (Self::Network(IpAddr::V6(network), bits), Some(IpAddr::V6(address))) => {
                (network.to_bits() ^ address.to_bits()).leading_zeros() >= *bits
            }
            _ => false,
        }
    }
}

impl Proxies {
    /// Replaces the address and the scheme of a trusted proxy by those of the client behind it.
    pub(super) fn apply_forwarding_headers(&self, client: &mut ClientInfo, head: &RequestHead) {
        if self.trusts(client.peer) {
            client.proxied = true;
            client.peer = self.client(client.peer, head);
            client.secure |= last(head, "x-forwarded-proto")
                .is_some_and(|scheme| scheme.eq_ignore_ascii_case("https"));
        }
    }

    fn trusts(&self, peer: Option<IpAddr>) -> bool {
        self.0.iter().any(|proxy| proxy.matches(peer))
    }

    /// The last address that a trusted proxy vouches for: each proxy appends the address of its own
    /// client.
    fn client(&self, peer: Option<IpAddr>, head: &RequestHead) -> Option<IpAddr> {
        let values: Vec<&[u8]> = head.header("x-forwarded-for").collect();
        let mut client = peer;
        for entry in values
            .iter()
            .rev()
            .flat_map(|value| value.rsplit(|&b| b == b','))
        {
            let Some(address) = address(entry).filter(|_| self.trusts(client)) else {
                break;
            };
            client = Some(address);
        }
        client
    }
}

/// The last of a header's values, which the nearest proxy has written.
fn last<'a>(head: &'a RequestHead, name: &'a str) -> Option<&'a str> {
    let value = head.header(name).last()?;
    let value = value.rsplit(|&b| b == b',').next()?;
    str::from_utf8(value).ok().map(str::trim)
}

/// An address, which some proxies write with a port.
fn address(text: &[u8]) -> Option<IpAddr> {
    let text = str::from_utf8(text).ok()?.trim();
    let address = text
        .parse()
        .or_else(|_| text.parse().map(|address: SocketAddr| address.ip()));
    address.ok().map(|address: IpAddr| address.to_canonical())
}

/// The origin of a connection: an IPv4 address, an IPv6 /56 network, or a Unix socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Origin {
    network: Option<ClientNetwork>,
    /// A trusted proxy or a Unix socket: many clients may be behind it.
    pub is_shared: bool,
}

impl Origin {
    pub fn new(peer: Option<IpAddr>, proxies: &Proxies) -> Self {
        Self {
            network: peer.map(ClientNetwork::from),
            is_shared: peer.is_none() || proxies.trusts(peer),
        }
    }
}

/// A resource that can run out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Resource {
    Connections,
    Bytes,
}

/// The resources that one or more connections hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Holding {
    pub connections: usize,
    /// The memory of the connections and their requests.
    pub bytes: usize,
    /// The connections among them that can be evicted: all but those whose request waits or runs.
    pub evictable: usize,
    pub evictable_bytes: usize,
}

impl Holding {
    fn change(&mut self, from: Self, to: Self) {
        self.connections = self.connections - from.connections + to.connections;
        self.bytes = self.bytes - from.bytes + to.bytes;
        self.evictable = self.evictable - from.evictable + to.evictable;
        self.evictable_bytes = self.evictable_bytes - from.evictable_bytes + to.evictable_bytes;
    }

    /// Returns how much it holds of a resource; 0 if none of it can be evicted.
    fn amount(&self, resource: Resource) -> usize {
        match resource {
            Resource::Connections if self.evictable == 0 => 0,
            Resource::Connections => self.connections,
            Resource::Bytes => self.evictable_bytes,
        }
    }
}

#[derive(Default)]
pub(super) struct Holdings {
    by_origin: HashMap<Origin, OriginEntry>,
    pub total: Holding,
    /// The number of origins so far.
    arrivals: u64,
}

struct OriginEntry {
    held: Holding,
    /// The origin's number in the order in which they came.
    arrival: u64,
}

impl Holdings {
    pub fn get(&self, origin: Origin) -> Holding {
        self.by_origin
            .get(&origin)
            .map(|holding| holding.held)
            .unwrap_or_default()
    }

    /// Replaces what a connection holds.
    pub fn change(&mut self, origin: Origin, from: Holding, to: Holding) {
        if from == to {
            return;
        }
        let new = || {
            self.arrivals += 1;
            OriginEntry {
                held: Holding::default(),
                arrival: self.arrivals,
            }
        };
        let held = &mut self.by_origin.entry(origin).or_insert_with(new).held;
        held.change(from, to);
        self.total.change(from, to);
        if held.connections == 0 {
            self.by_origin.remove(&origin);
        }
    }

    /// Returns the largest holder among the origins that have something to evict. A shared one
    /// comes last, whatever it holds. Ties: the first to come, so that a new client has time to
    /// send its request.
    pub fn largest(&self, resource: Resource) -> Option<Origin> {
        let holders = self
            .by_origin
            .iter()
            .filter(|(_, holding)| holding.held.amount(resource) > 0);
        let rank = |(origin, holding): &(&Origin, &OriginEntry)| {
            (
                !origin.is_shared,
                holding.held.amount(resource),
                Reverse(holding.arrival),
            )
        };
        holders.max_by_key(rank).map(|(origin, _)| *origin)
    }
}

/// Connections that wait for a turn. The origins have theirs in turn, so that many connections of
/// one delay another by one turn.
#[derive(Default)]
pub(super) struct TurnQueue {
    by_origin: HashMap<Origin, VecDeque<usize>>,
    /// The origins with a connection here, in the order of their turns.
    turns: VecDeque<Origin>,
}

impl TurnQueue {
    pub fn push(&mut self, origin: Origin, index: usize) {
        let queue = self.by_origin.entry(origin).or_default();
        if queue.is_empty() {
            self.turns.push_back(origin);
        }
        queue.push_back(index);
    }

    pub fn pop(&mut self) -> Option<usize> {
        let origin = self.turns.pop_front()?;
        let queue = self.by_origin.get_mut(&origin)?;
        let next = queue.pop_front();
        if queue.is_empty() {
            self.by_origin.remove(&origin);
        } else {
            self.turns.push_back(origin);
        }
        next
    }

    pub fn remove(&mut self, origin: Origin, index: usize) {
        if let Some(queue) = self.by_origin.get_mut(&origin) {
            queue.retain(|other| *other != index);
            if queue.is_empty() {
                self.by_origin.remove(&origin);
                self.turns.retain(|other| *other != origin);
            }
        }
    }

    pub fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(peer: &str) -> Origin {
        Origin::new(
            peer.parse().ok(),
            &Proxies(vec![TrustedProxy::parse("10.0.0.0/8").expect("a network")]),
        )
    }

    #[test]
    fn an_origin_is_an_address_or_a_network() {
        assert_ne!(origin("192.0.2.1"), origin("192.0.2.2"));
        assert_eq!(origin("2001:db8::1"), origin("2001:db8::ffff:1"));
        assert_eq!(origin("2001:db8::1"), origin("2001:db8:0:ff::1"));
        assert_ne!(origin("2001:db8::1"), origin("2001:db8:0:100::1"));
        assert!(
            origin("10.1.1.1").is_shared
                && origin("unix").is_shared
                && !origin("192.0.2.1").is_shared
        );
    }

    fn held(connections: usize, evictable: usize, evictable_bytes: usize) -> Holding {
        Holding {
            connections,
            bytes: evictable_bytes,
            evictable,
            evictable_bytes,
        }
    }

    #[test]
    fn the_largest_holder_is_found_and_shared_origins_come_last() {
        let mut holdings = Holdings::default();
        assert_eq!(holdings.largest(Resource::Connections), None);
        holdings.change(origin("unix"), Holding::default(), held(100, 90, 9_000));
        assert_eq!(
            holdings.largest(Resource::Connections),
            Some(origin("unix")),
            "there is no other"
        );
        holdings.change(origin("192.0.2.1"), Holding::default(), held(50, 50, 10));
        holdings.change(origin("192.0.2.2"), Holding::default(), held(60, 1, 5_000));
        assert_eq!(
            holdings.largest(Resource::Connections),
            Some(origin("192.0.2.2")),
            "all connections count"
        );
        assert_eq!(holdings.largest(Resource::Bytes), Some(origin("192.0.2.2")));
        holdings.change(origin("192.0.2.2"), held(60, 1, 5_000), held(60, 0, 0));
        assert_eq!(
            holdings.largest(Resource::Connections),
            Some(origin("192.0.2.1")),
            "the other has no victim"
        );
        assert_eq!(holdings.largest(Resource::Bytes), Some(origin("192.0.2.1")));
        holdings.change(origin("192.0.2.2"), held(60, 0, 0), Holding::default());
        assert_eq!(holdings.get(origin("192.0.2.2")), Holding::default());
        assert_eq!(holdings.total, held(150, 140, 9_010));
        assert_eq!(
            holdings.by_origin.len(),
            2,
            "an origin without a connection is forgotten"
        );
    }

    /// A connection with the number of one that was closed once had two turns.
    #[test]
    fn a_connection_that_is_removed_has_no_turn() {
        let mut queue = TurnQueue::default();
        for (peer, index) in [("192.0.2.1", 1), ("192.0.2.1", 2), ("192.0.2.2", 3)] {
            queue.push(origin(peer), index);
        }
        for (peer, index) in [("192.0.2.1", 1), ("192.0.2.2", 3), ("192.0.2.3", 4)] {
            queue.remove(origin(peer), index);
        }
        assert_eq!((queue.pop(), queue.pop()), (Some(2), None));
        assert!(queue.is_empty());
    }

    /// An attacker with thousands of addresses must not make newcomers evict one another.
    #[test]
    fn of_equal_holders_the_first_to_come_is_evicted_from() {
        let mut holdings = Holdings::default();
        let addresses = (1..=200)
            .map(|number| origin(&format!("192.0.2.{number}")))
            .collect::<Vec<_>>();
        for &address in &addresses {
            holdings.change(address, Holding::default(), held(1, 1, 0));
        }
        for address in addresses {
            assert_eq!(holdings.largest(Resource::Connections), Some(address));
            holdings.change(address, held(1, 1, 0), Holding::default());
        }
    }

    #[track_caller]
    fn check(trusted: &str, peer: &str, headers: &str, client: &str, secure: bool) {
        let proxies = Proxies(
            trusted
                .split_whitespace()
                .map(|text| TrustedProxy::parse(text).expect("a good proxy"))
                .collect(),
        );
        let head = format!("GET / HTTP/1.1\r\nHost: h\r\n{headers}\r\n");
        let head = RequestHead::parse(head.as_bytes()).expect("a good head");
        let mut found = ClientInfo {
            peer: peer.parse().ok(),
            ..ClientInfo::default()
        };
        proxies.apply_forwarding_headers(&mut found, &head);
        let address = found
            .peer
            .map_or("unix".into(), |address| address.to_string());
        assert_eq!(
            (address.as_str(), found.secure),
            (client, secure),
            "{trusted} {peer} {headers}"
        );
    }

    #[test]
    fn only_a_trusted_proxys_word_counts() {
        let forwarded = "X-Forwarded-For: 203.0.113.7\r\nX-Forwarded-Proto: https\r\n";
        check("", "10.0.0.1", forwarded, "10.0.0.1", false);
        check("10.0.0.2", "10.0.0.1", forwarded, "10.0.0.1", false);
        check("10.0.0.1", "10.0.0.1", forwarded, "203.0.113.7", true);
        check("10.0.0.0/8", "10.255.0.1", forwarded, "203.0.113.7", true);
        check("10.0.0.0/9", "10.255.0.1", forwarded, "10.255.0.1", false);
        check("0.0.0.0/0", "198.51.100.1", forwarded, "203.0.113.7", true);
        check("::/0", "10.0.0.1", forwarded, "10.0.0.1", false);
        check("fd00::/8", "fd12::1", forwarded, "203.0.113.7", true);
        check("fd00::/8", "fe80::1", forwarded, "fe80::1", false);
        check("unix", "unix", forwarded, "203.0.113.7", true);
        check("unix", "10.0.0.1", forwarded, "10.0.0.1", false);
        check("10.0.0.1", "unix", forwarded, "unix", false);
    }

    #[test]
    fn the_last_address_that_no_proxy_has_is_the_clients() {
        let with = |value: &str| format!("X-Forwarded-For: {value}\r\n");
        let trusted = "10.0.0.0/8";
        check(trusted, "10.0.0.1", "", "10.0.0.1", false);
        check(trusted, "10.0.0.1", &with(""), "10.0.0.1", false);
        check(
            trusted,
            "10.0.0.1",
            &with("1.1.1.1, 2.2.2.2"),
            "2.2.2.2",
            false,
        );
        check(
            trusted,
            "10.0.0.1",
            &with("1.1.1.1, 2.2.2.2, 10.0.0.9"),
            "2.2.2.2",
            false,
        );
        check(
            trusted,
            "10.0.0.1",
            &with("10.0.0.7, 10.0.0.8"),
            "10.0.0.7",
            false,
        );
        check(
            trusted,
            "10.0.0.1",
            &with("1.1.1.1, nonsense, 10.0.0.9"),
            "10.0.0.9",
            false,
        );
        check(trusted, "10.0.0.1", &with("nonsense"), "10.0.0.1", false);
        check(
            trusted,
            "10.0.0.1",
            &(with("1.1.1.1") + &with("2.2.2.2")),
            "2.2.2.2",
            false,
        );
        check(trusted, "10.0.0.1", &with("2.2.2.2:4711"), "2.2.2.2", false);
        check(
            trusted,
            "10.0.0.1",
            &with("[2001:db8::7]:4711"),
            "2001:db8::7",
            false,
        );
        check(
            trusted,
            "10.0.0.1",
            &with("2001:db8::7"),
            "2001:db8::7",
            false,
        );
        check(
            trusted,
            "10.0.0.1",
            "X-Forwarded-Proto: https, http\r\n",
            "10.0.0.1",
            false,
        );
    }

    #[test]
    fn what_names_a_proxy() {
        for good in [
            "unix",
            "127.0.0.1",
            "10.0.0.0/8",
            "::1",
            "fd00::/8",
            "0.0.0.0/0",
        ] {
            assert!(TrustedProxy::parse(good).is_some(), "{good}");
        }
        for bad in [
            "",
            "localhost",
            "10.0.0.0/33",
            "::/129",
            "10.0.0.0/",
            "10.0.0.0/-1",
            "10.0.0.0/8/8",
        ] {
            assert!(TrustedProxy::parse(bad).is_none(), "{bad}");
        }
    }
}
