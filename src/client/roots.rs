//! The root certificates that are trusted for `https://`.

use std::path::Path;

use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::{self, PemObject};

/// Those of the system; `SSL_CERT_FILE` and `SSL_CERT_DIR` name others.
pub fn of_the_system() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() {
        log::warn!("no root certificates found, so no https:// address is trusted: install ca-certificates");
    }
    roots
}

/// Those of a PEM file. The error says what is wrong with the file.
pub fn read(path: &Path) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    let certificates = CertificateDer::pem_file_iter(path).map_err(|error| cause(&error))?;
    for certificate in certificates {
        let certificate = certificate.map_err(|error| cause(&error))?;
        roots.add(certificate).map_err(|_| "a certificate in it is not valid".to_owned())?;
    }
    if roots.is_empty() { Err("there is no certificate in it".into()) } else { Ok(roots) }
}

fn cause(error: &pem::Error) -> String {
    match error {
        pem::Error::Io(error) => error.to_string(),
        _ => "it is not valid PEM".into(),
    }
}
