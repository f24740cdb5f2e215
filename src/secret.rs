//! Secrets and their digests. Neither is printed by `Debug`.

use std::fmt;

use rand::TryRng;
use sha2::{Digest, Sha256};

/// A secret that the service sends, such as the key for the runtime.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// The SHA-256 of a secret: enough to recognize it. A secret has 192 random bits, so it can't be guessed and needs no
/// slow hash.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SecretDigest(pub [u8; 32]);

impl SecretDigest {
    pub fn of(secret: &str) -> Self {
        Self(Sha256::digest(secret.as_bytes()).into())
    }
}

impl fmt::Debug for SecretDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretDigest(…)")
    }
}

/// Returns `N` bytes from the operating system's random source, in hexadecimal.
pub fn secret_hex<const N: usize>() -> String {
    let mut bytes = [0; N];
    rand::rngs::SysRng.try_fill_bytes(&mut bytes).expect("the operating system should give random bytes");
    hex::encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_secrets_differ() {
        assert_eq!(secret_hex::<24>().len(), 48);
        assert_ne!(secret_hex::<24>(), secret_hex::<24>());
    }
}
