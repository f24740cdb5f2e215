//! TLS to a server: what is checked of its certificate, and the hash of it that the password
//! exchange is bound to.

use std::io;
use std::path::Path;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, SignatureScheme};
use sha2::{Digest, Sha256, Sha384, Sha512};

use super::uri::SslMode;
use crate::certificates;

pub fn config(mode: SslMode, sslrootcert: Option<&Path>) -> Result<Arc<ClientConfig>, String> {
    let provider = Arc::new(ring::default_provider());
    let chain = match mode {
        SslMode::Disable | SslMode::Require => None,
        SslMode::VerifyCa | SslMode::VerifyFull => {
            let roots = match sslrootcert {
                Some(path) => certificates::read_roots(path)
                    .map_err(|error| format!("sslrootcert {}: {error}", path.display()))?,
                None => certificates::load_system_roots(),
            };
            let verifier =
                WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
            Some(verifier.build().map_err(|error| error.to_string())?)
        }
    };
    let verifier = Verifier {
        chain,
        any_name: mode != SslMode::VerifyFull,
        provider: Arc::clone(&provider),
    };
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the provider should support the default versions")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_no_client_auth();
    Ok(Arc::new(config))
}

/// Checks what `sslmode` asks for. The server always has to prove that it has the certificate's
/// key.
#[derive(Debug)]
struct Verifier {
    /// `None`: any certificate is accepted.
    chain: Option<Arc<WebPkiServerVerifier>>,
    any_name: bool,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let Some(chain) = &self.chain else {
            return Ok(ServerCertVerified::assertion());
        };
        // The name is checked last, after the chain and the dates.
        match chain.verify_server_cert(certificate, intermediates, name, ocsp_response, now) {
            Err(Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) if self.any_name => Ok(ServerCertVerified::assertion()),
            verdict => verdict,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(
            message,
            certificate,
            signed,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(
            message,
            certificate,
            signed,
            &self.provider.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider
            .signature_verification_algorithms
            .supported_schemes()
    }
}

/// Explains why a handshake failed, with the next step.
pub fn explain(error: &io::Error) -> String {
    use CertificateError as Wrong;
    let Some(cause) = error
        .get_ref()
        .and_then(|cause| cause.downcast_ref::<Error>())
    else {
        return error.to_string();
    };
    match cause {
        Error::InvalidCertificate(
            Wrong::NotValidForName | Wrong::NotValidForNameContext { .. },
        ) => "its certificate is not for this name: use a name that the certificate has".into(),
        // The last two: another CA of the same name.
        Error::InvalidCertificate(
            Wrong::UnknownIssuer
            | Wrong::BadSignature
            | Wrong::UnsupportedSignatureAlgorithmForPublicKeyContext { .. },
        ) => "its certificate is not signed by a trusted CA: set sslrootcert to the file of its CA"
            .into(),
        Error::InvalidCertificate(Wrong::Expired | Wrong::ExpiredContext { .. }) => {
            "its certificate has expired: renew it".into()
        }
        Error::InvalidCertificate(Wrong::NotValidYet | Wrong::NotValidYetContext { .. }) => {
            "its certificate is not valid yet: check the clocks".into()
        }
        cause => format!("TLS: {cause}"),
    }
}

/// The channel binding `tls-server-end-point` (RFC 5929): the certificate's hash, by the algorithm
/// of its signature, and SHA-256 in place of MD5 and SHA-1. `None` if that is not defined, as for
/// Ed25519.
pub fn end_point(certificate: &[u8]) -> Option<Vec<u8>> {
    // Certificate { TBSCertificate, AlgorithmIdentifier { OID, … }, … }
    let (certificate_parts, _) = certificates::der_value(certificate)?;
    let (_, after_content) = certificates::der_value(certificate_parts)?;
    let (algorithm, _) = certificates::der_value(after_content)?;
    let (oid, _) = certificates::der_value(algorithm)?;
    const RSA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1];
    const ECDSA: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 4];
    let sha_256 = || Some(Sha256::digest(certificate).to_vec());
    match (oid.strip_prefix(RSA), oid.strip_prefix(ECDSA)) {
        (Some([4 | 5 | 11]), _) | (_, Some([1] | [3, 2])) => sha_256(),
        (Some([12]), _) | (_, Some([3, 3])) => Some(Sha384::digest(certificate).to_vec()),
        (Some([13]), _) | (_, Some([3, 4])) => Some(Sha512::digest(certificate).to_vec()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_follows_the_signature() {
        let length = |algorithm| {
            let key = rcgen::KeyPair::generate_for(algorithm).expect("a key");
            let parameters = rcgen::CertificateParams::new(["db.test".into()]).expect("parameters");
            end_point(parameters.self_signed(&key).expect("a certificate").der())
                .map(|hash| hash.len())
        };
        assert_eq!(length(&rcgen::PKCS_ECDSA_P256_SHA256), Some(32));
        assert_eq!(length(&rcgen::PKCS_ECDSA_P384_SHA384), Some(48));
        assert_eq!(length(&rcgen::PKCS_ED25519), None, "it is not defined");
        assert!(
            [&b""[..], b"0", b"\x30\xff", b"\x30\x82\xff\xff", &[0x30; 9]]
                .map(end_point)
                .iter()
                .all(Option::is_none)
        );
    }
}
