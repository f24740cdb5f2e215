//! The network of a client: everything that is counted by client is counted by this.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

/// The bits of an IPv6 address that name a client: many providers give each customer a /56.
const IPV6_BITS: u32 = 56;

/// An IPv4 address, or the /56 network of an IPv6 address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientNetwork(IpAddr);

impl From<IpAddr> for ClientNetwork {
    fn from(address: IpAddr) -> Self {
        Self(match address {
            IpAddr::V4(_) => address,
            IpAddr::V6(address) => {
                let host_bits = u128::BITS - IPV6_BITS;
                Ipv6Addr::from_bits(address.to_bits() >> host_bits << host_bits).into()
            }
        })
    }
}

impl fmt::Display for ClientNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            IpAddr::V4(address) => address.fmt(f),
            IpAddr::V6(network) => write!(f, "{network}/{IPV6_BITS}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ipv6_client_has_a_network() {
        let network =
            |address: &str| ClientNetwork::from(address.parse::<IpAddr>().expect("an address"));
        assert_eq!(network("192.0.2.7").to_string(), "192.0.2.7");
        assert_ne!(network("192.0.2.7"), network("192.0.2.8"));
        assert_eq!(
            network("2001:db8:1:2ff::1").to_string(),
            "2001:db8:1:200::/56"
        );
        assert_eq!(
            network("2001:db8:1:2ff::1"),
            network("2001:db8:1:200:1:2:3:4")
        );
        assert_ne!(network("2001:db8:1:2ff::1"), network("2001:db8:1:300::1"));
    }
}
