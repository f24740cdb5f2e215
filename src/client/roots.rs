//! The root certificates that are trusted for `https://`.

use std::io;
use std::path::Path;

use rustls::RootCertStore;

use crate::files;

/// Loads the root certificates of the system; `SSL_CERT_FILE` and `SSL_CERT_DIR` name others.
pub fn load_system_roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if roots.is_empty() {
        log::warn!(
            "no root certificates found, so no https:// address is trusted: install ca-certificates"
        );
    }
    roots
}

/// Reads root certificates from a PEM file. The error says what is wrong with the file.
pub fn read(path: &Path) -> io::Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for certificate in files::read_certificates(path)? {
        roots
            .add(certificate)
            .map_err(|_| io::Error::other("a certificate in it is not valid"))?;
    }
    Ok(roots)
}
