//! Trusted proxies, and the client address and scheme in their forwarding headers.

use std::net::{IpAddr, SocketAddr};
use std::str;

use crate::http::{ClientInfo, RequestHead};

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

    pub(super) fn trusts(&self, peer: Option<IpAddr>) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;

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
