//! The sockets that the service listens on.

use std::io;

use listenfd::ListenFd;

use super::error::{CliError, failed};
use crate::config::Config;
use crate::listener::{Address, ListeningSocket};

/// Returns the sockets that systemd passes, else those of the configuration.
pub(super) fn sockets(config: &Config) -> Result<Vec<ListeningSocket>, CliError> {
    let mut handed = ListenFd::from_env();
    let mut sockets = Vec::new();
    for index in 0..handed.len() {
        let socket = if let Ok(Some(listener)) = handed.take_tcp_listener(index) {
            ListeningSocket::inherited_tcp(listener)
        } else if let Ok(Some(listener)) = handed.take_unix_listener(index) {
            ListeningSocket::inherited_unix(listener)
        } else {
            Err(io::Error::other(
                "it is neither a TCP nor a Unix socket in the listening state",
            ))
        };
        sockets.push(socket.map_err(failed("a socket passed by systemd"))?);
    }
    if sockets.is_empty() {
        let cannot_listen = |(address, error): (Address, io::Error)| {
            let cause = listen_failed(&error);
            let both = match config.listen {
                Address::Localhost(_) => {
                    "; localhost is both 127.0.0.1 and [::1], because clients use either"
                }
                _ => "",
            };
            CliError::failed(format!(
                "can't listen on {address}: {cause}. The setting is listen (ADRIATICUM_LISTEN){both}."
            ))
        };
        sockets =
            ListeningSocket::bind(&config.listen, config.socket_mode).map_err(cannot_listen)?;
    }
    Ok(sockets)
}

/// Explains why an address can't be used, and what to do.
fn listen_failed(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "another program uses this address, perhaps another adriaticum serve: stop it, or choose another one".into()
        }
        io::ErrorKind::PermissionDenied => {
            "permission denied: a port below 1024 needs root or CAP_NET_BIND_SERVICE, a Unix socket a folder that this user \
             may write to and in which no other user has a socket of this name"
                .into()
        }
        io::ErrorKind::AddrNotAvailable => "this host does not have this address: `ip address` lists its addresses".into(),
        _ => error.to_string(),
    }
}

/// Formats an address as a client would write it.
pub(super) fn format_address(address: &Address, scheme: &str) -> String {
    match address {
        Address::Tcp(address) => format!("{scheme}://{address}"),
        address => address.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_has_its_own_advice() {
        for (kind, advice) in [
            (io::ErrorKind::AddrInUse, "choose another one"),
            (io::ErrorKind::PermissionDenied, "CAP_NET_BIND_SERVICE"),
            (
                io::ErrorKind::AddrNotAvailable,
                "does not have this address",
            ),
            (io::ErrorKind::NotFound, "not found"),
        ] {
            let message = listen_failed(&kind.into());
            assert!(message.contains(advice), "{message}");
        }
    }
}
