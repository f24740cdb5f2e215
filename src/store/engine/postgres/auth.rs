//! The password exchange: SCRAM-SHA-256, bound to the TLS certificate where the server can do that.

use postgres_protocol::authentication::sasl::{
    ChannelBinding, SCRAM_SHA_256, SCRAM_SHA_256_PLUS, ScramSha256,
};

/// The connection under the exchange.
pub(super) enum Channel {
    Plain,
    Tls {
        /// See `tls::end_point`.
        end_point: Option<Vec<u8>>,
        /// Only the binding proves the identity of the server.
        is_unverified: bool,
    },
}

/// Chooses the mechanism, and begins the exchange.
pub(super) fn begin(
    mechanisms: &[String],
    channel: Channel,
    password: &[u8],
) -> Result<(&'static str, ScramSha256), String> {
    let offers = |mechanism| mechanisms.iter().any(|offered| offered == mechanism);
    let (mechanism, binding) = match channel {
        Channel::Tls { end_point: Some(hash), .. } if offers(SCRAM_SHA_256_PLUS) => {
            (SCRAM_SHA_256_PLUS, ChannelBinding::tls_server_end_point(hash))
        }
        Channel::Tls { is_unverified: true, .. } => {
            return Err("it offers no channel binding, so sslmode=require does not prove who it is: use \
                        sslmode=verify-full"
                .into());
        }
        // The server learns that we would have bound, so that it notices if its offer was removed on the way.
        Channel::Tls { end_point: Some(_), .. } => (SCRAM_SHA_256, ChannelBinding::unrequested()),
        _ => (SCRAM_SHA_256, ChannelBinding::unsupported()),
    };
    if !offers(mechanism) {
        return Err(format!("it offers no {SCRAM_SHA_256}, but {}", mechanisms.join(", ")));
    }
    Ok((mechanism, ScramSha256::new(password, binding)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_mechanism_is_chosen() {
        let both = [SCRAM_SHA_256_PLUS.to_owned(), SCRAM_SHA_256.to_owned()];
        let tls = |is_unverified, hash: Option<u8>| Channel::Tls {
            end_point: hash.map(|byte| vec![byte; 32]),
            is_unverified,
        };
        let first = |offered: &[String], channel| {
            let (mechanism, scram) = begin(offered, channel, b"x").ok()?;
            Some((mechanism, String::from_utf8_lossy(&scram.message()[..2]).into_owned()))
        };
        let chosen = |mechanism, flag: &str| Some((mechanism, flag.to_owned()));
        assert_eq!(first(&both, tls(true, Some(1))), chosen(SCRAM_SHA_256_PLUS, "p="));
        assert_eq!(first(&both, tls(false, Some(1))), chosen(SCRAM_SHA_256_PLUS, "p="));
        assert_eq!(first(&both[1..], tls(false, Some(1))), chosen(SCRAM_SHA_256, "y,"));
        assert_eq!(first(&both, tls(false, None)), chosen(SCRAM_SHA_256, "n,"), "no hash is defined");
        assert_eq!(first(&both, Channel::Plain), chosen(SCRAM_SHA_256, "n,"));
        for channel in [tls(true, None), tls(true, Some(1))] {
            assert_eq!(first(&both[1..], channel), None, "nothing would prove who the server is");
        }
        assert_eq!(first(&["OTHER".into()], Channel::Plain), None);
    }
}
