//! Certificates: PEM files, the roots that are trusted, and the few fields of DER that rustls does not
//! expose. A crate for all of X.509 would be larger than the rest of TLS here.

use std::io;
use std::path::Path;

use jiff::civil::DateTime;
use jiff::tz::Offset;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{CertificateError, Error, RootCertStore};

use crate::files;

/// The tags of the version, which may be missing, and of a time with two digits of the year.
const VERSION: u8 = 0xa0;
const UTC_TIME: u8 = 0x17;

/// Loads the root certificates of the system; `SSL_CERT_FILE` and `SSL_CERT_DIR` name others.
pub fn load_system_certificates() -> Vec<CertificateDer<'static>> {
    let certificates = rustls_native_certs::load_native_certs().certs;
    if certificates.is_empty() {
        log::warn!(
            "no root certificates found, so no https:// address is trusted: install ca-certificates"
        );
    }
    certificates
}

pub fn load_system_roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(load_system_certificates());
    roots
}

/// Reads the certificates of a PEM file: at least one.
pub fn read(path: &Path) -> io::Result<Vec<CertificateDer<'static>>> {
    let text = files::read(path)?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    match certificates {
        Ok(certificates) if certificates.is_empty() => {
            Err(io::Error::other("there is no certificate in it"))
        }
        result => result.map_err(|_| io::Error::other("it is not valid PEM")),
    }
}

/// Reads root certificates from a PEM file. The error says what is wrong with the file.
pub fn read_roots(path: &Path) -> io::Result<RootCertStore> {
    make_store(&read(path)?)
}

/// Makes a store of certificates; fails if one of them is not valid.
pub fn make_store(certificates: &[CertificateDer<'static>]) -> io::Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates {
        roots
            .add(certificate.clone())
            .map_err(|_| io::Error::other("a certificate in it is not valid"))?;
    }
    Ok(roots)
}

/// The content of the first DER value, and what follows it.
fn der_value(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (&[_, first], rest) = bytes.split_first_chunk()?;
    let (length, rest) = if first < 0x80 {
        (usize::from(first), rest)
    } else {
        let (digits, rest) = rest
            .split_at_checked(usize::from(first & 0x7f))
            .filter(|(d, _)| d.len() <= 4)?;
        (
            digits
                .iter()
                .fold(0, |length, &digit| length << 8 | usize::from(digit)),
            rest,
        )
    };
    rest.split_at_checked(length)
}

/// The first and the last second in which a certificate is valid, in Unix time.
pub fn validity(certificate: &[u8]) -> Option<[i64; 2]> {
    // Certificate { TBSCertificate { version, serialNumber, signature, issuer, Validity {
    // notBefore, notAfter }, … }, … }
    let (parts, _) = der_value(certificate)?;
    let (mut content, _) = der_value(parts)?;
    if content.first() == Some(&VERSION) {
        content = der_value(content)?.1;
    }
    for _ in ["serialNumber", "signature", "issuer"] {
        content = der_value(content)?.1;
    }
    let (validity, _) = der_value(content)?;
    let (_, not_after) = der_value(validity)?;
    Some([time(validity)?, time(not_after)?])
}

fn time(bytes: &[u8]) -> Option<i64> {
    let text = str::from_utf8(der_value(bytes)?.0).ok()?;
    let century = match (bytes[0], text.get(..2)?) {
        (UTC_TIME, year) if year < "50" => "20",
        (UTC_TIME, _) => "19",
        _ => "",
    };
    let time = DateTime::strptime("%Y%m%d%H%M%SZ", format!("{century}{text}")).ok()?;
    Some(Offset::UTC.to_timestamp(time).ok()?.as_second())
}

/// Says why a handshake with a server failed, with the next step; `not_trusted` is that for an unknown
/// CA. The error of TLS then has the kind `Other`.
pub fn explain(error: io::Error, not_trusted: &str) -> io::Error {
    use CertificateError as Wrong;
    let cause = error
        .get_ref()
        .and_then(|cause| cause.downcast_ref::<Error>());
    let text = match cause {
        None => return error,
        Some(Error::InvalidCertificate(
            Wrong::NotValidForName | Wrong::NotValidForNameContext { .. },
        )) => "its certificate is not for this name: use a name that the certificate has",
        // The last two: another CA of the same name.
        Some(Error::InvalidCertificate(
            Wrong::UnknownIssuer
            | Wrong::BadSignature
            | Wrong::UnsupportedSignatureAlgorithmForPublicKeyContext { .. },
        )) => &format!("its certificate is not signed by a trusted CA{not_trusted}"),
        Some(Error::InvalidCertificate(Wrong::Expired | Wrong::ExpiredContext { .. })) => {
            "its certificate has expired: renew it"
        }
        Some(Error::InvalidCertificate(Wrong::NotValidYet | Wrong::NotValidYetContext { .. })) => {
            "its certificate is not valid yet: check the clocks"
        }
        Some(cause) => &format!("TLS: {cause}"),
    };
    io::Error::other(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_validity_of_a_certificate() {
        // From 2050 on the year has four digits.
        for (year, expected) in [
            (2031, 1_924_992_000),
            (2049, 2_493_072_000),
            (2050, 2_524_608_000),
        ] {
            let mut parameters =
                rcgen::CertificateParams::new(["a.test".to_owned()]).expect("a name");
            parameters.not_before = rcgen::date_time_ymd(1970, 1, 2);
            parameters.not_after = rcgen::date_time_ymd(year, 1, 1);
            let key = rcgen::KeyPair::generate().expect("a key");
            let certificate = parameters.self_signed(&key).expect("a certificate");
            let bytes = certificate.der().as_ref();
            assert_eq!(validity(bytes), Some([86_400, expected]), "{year}");
            for length in 0..bytes.len().min(200) {
                assert_eq!(validity(&bytes[..length]), None, "the first {length} bytes");
            }
        }
    }
}
