//! The password exchange: SCRAM-SHA-256, bound to the TLS certificate where the server can do that.

use postgres_protocol::authentication::sasl::{
    ChannelBinding, SCRAM_SHA_256, SCRAM_SHA_256_PLUS, ScramSha256,
};

/// Chooses the mechanism, and begins the exchange. Without TLS there is no `end_point`: see
/// `tls::end_point`. If `is_unverified`, only the binding proves the identity of the server.
pub fn begin(
    mechanisms: &[String],
    end_point: Option<Vec<u8>>,
    is_unverified: bool,
    password: &[u8],
) -> Result<(&'static str, ScramSha256), String> {
    let offers = |mechanism| mechanisms.iter().any(|offered| offered == mechanism);
    let (mechanism, binding) = match end_point {
        Some(hash) if offers(SCRAM_SHA_256_PLUS) => (
            SCRAM_SHA_256_PLUS,
            ChannelBinding::tls_server_end_point(hash),
        ),
        _ if is_unverified => {
            return Err(
                "it offers no channel binding, so sslmode=require does not prove who it is: use \
                        sslmode=verify-full"
                    .into(),
            );
        }
        // The server learns that we would have bound, so that it notices if its offer was removed
        // on the way.
        Some(_) => (SCRAM_SHA_256, ChannelBinding::unrequested()),
        None => (SCRAM_SHA_256, ChannelBinding::unsupported()),
    };
    if !offers(mechanism) {
        return Err(format!(
            "it offers no {SCRAM_SHA_256}, but {}",
            mechanisms.join(", ")
        ));
    }
    Ok((mechanism, ScramSha256::new(password, binding)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_mechanism_is_chosen() {
        let both = [SCRAM_SHA_256_PLUS.to_owned(), SCRAM_SHA_256.to_owned()];
        let first = |offered: &[String], is_unverified, hash: Option<u8>| {
            let end_point = hash.map(|byte| vec![byte; 32]);
            let (mechanism, scram) = begin(offered, end_point, is_unverified, b"x").ok()?;
            Some((
                mechanism,
                String::from_utf8_lossy(&scram.message()[..2]).into_owned(),
            ))
        };
        let chosen = |mechanism, flag: &str| Some((mechanism, flag.to_owned()));
        assert_eq!(
            first(&both, true, Some(1)),
            chosen(SCRAM_SHA_256_PLUS, "p=")
        );
        assert_eq!(
            first(&both, false, Some(1)),
            chosen(SCRAM_SHA_256_PLUS, "p=")
        );
        assert_eq!(
            first(&both[1..], false, Some(1)),
            chosen(SCRAM_SHA_256, "y,")
        );
        assert_eq!(
            first(&both, false, None),
            chosen(SCRAM_SHA_256, "n,"),
            "no hash is defined, or no TLS"
        );
        for hash in [None, Some(1)] {
            assert_eq!(
                first(&both[1..], true, hash),
                None,
                "nothing would prove who the server is"
            );
        }
        assert_eq!(first(&["OTHER".into()], false, None), None);
    }
}
