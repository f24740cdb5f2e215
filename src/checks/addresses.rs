//! Warns about addresses that other hosts can reach.

use std::net::IpAddr;

use crate::config::Config;
use crate::listener::{Address, TrustedProxy};
use crate::store::Store;

/// Warns about the address that the service listens on. With a socket of systemd, it is the one of
/// the last start.
pub(super) fn reachable_address(config: &Config, store: Option<&Store>) -> Option<String> {
    let gateways = store
        .and_then(|store| store.ledger.gateways().ok())
        .unwrap_or_default();
    let own = gateways
        .iter()
        .find(|gateway| gateway.name == config.gateway);
    let tcp = |address: &str| {
        address
            .split_once("://")
            .and_then(|(_, address)| address.parse().ok())
            .map(Address::Tcp)
    };
    let last = own
        .into_iter()
        .flat_map(|gateway| gateway.address.split(' ').filter_map(tcp));
    let mut addresses = [config.listen.clone()].into_iter().chain(last);
    addresses.find_map(|address| reachable(config, &address))
}

/// Warns about an address that other hosts can reach: they would get 404, or send their keys
/// without encryption.
pub fn reachable(config: &Config, address: &Address) -> Option<String> {
    let Address::Tcp(address) = address else {
        return None;
    };
    if address.ip().is_loopback() {
        return None;
    }
    let mut message = Vec::new();
    if config.api_hosts.iter().all(|host| is_local(host)) {
        message.push(format!(
            "clients of other hosts get 404, because api_hosts has only names of this host ({}). Add the name or address that \
             they use to api_hosts (ADRIATICUM_API_HOSTS)",
            config.api_hosts.join(", ")
        ));
    }
    let proxies = &config.trusted_proxies.0;
    if config.tls.is_none() && proxies.iter().all(|proxy| *proxy == TrustedProxy::Unix) {
        message.push(
            "keys and prompts are sent without encryption. Set tls.cert and tls.key, or put a proxy with TLS in front and \
             name it in trusted_proxies"
                .into(),
        );
    }
    (!message.is_empty()).then(|| {
        format!(
            "other hosts can reach {address} (listen, or adriaticum.socket): {}",
            message.join("; ")
        )
    })
}

/// Returns true for a name or address that means this host on every host.
pub fn is_local(host: &str) -> bool {
    let is_name = host == "localhost" || host.ends_with(".localhost");
    is_name
        || host
            .parse()
            .is_ok_and(|address: IpAddr| address.is_loopback())
}
