//! Secrets and their digests. Neither is printed by `Debug`.

use std::fmt;

use rand::TryRng;
use sha2::{Digest, Sha256};

/// The prefix of an API key's secret, and the number of hexadecimal digits after it.
pub const SECRET_PREFIX: &str = "adr_";
pub const SECRET_DIGITS: usize = 48;

/// The number of digits from which on a message does not repeat a part of a secret. A hint has
/// four.
const TELLING_DIGITS: usize = 8;

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

/// The SHA-256 of a secret: enough to recognize it. A secret has 192 random bits, so it can't be
/// guessed and needs no slow hash.
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
    rand::rngs::SysRng
        .try_fill_bytes(&mut bytes)
        .expect("the operating system should give random bytes");
    hex::encode(bytes)
}

/// Makes the secret of a new API key.
pub fn new_secret() -> String {
    SECRET_PREFIX.to_owned() + &secret_hex::<{ SECRET_DIGITS / 2 }>()
}

/// Returns whether a text contains the secret of an API key or the beginning of one.
pub fn contains_secret(text: &str) -> bool {
    let has_digits =
        |rest: &str| rest.bytes().take_while(u8::is_ascii_hexdigit).count() >= TELLING_DIGITS;
    text.to_ascii_lowercase()
        .split(SECRET_PREFIX)
        .skip(1)
        .any(has_digits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_recognized_in_a_text() {
        let secret = new_secret();
        assert_eq!(secret.len(), SECRET_PREFIX.len() + SECRET_DIGITS);
        for text in [
            &secret,
            &secret.to_uppercase(),
            &format!("Bearer {secret}\n"),
            &secret[..12],
        ] {
            assert!(contains_secret(text), "{text:?}");
        }
        for text in [
            "",
            "adr_",
            "adr_3f9a…c41d",
            "adr_ic sea",
            "key_0123456789abcdef",
            "Ana's laptop",
        ] {
            assert!(!contains_secret(text), "{text:?}");
        }
    }

    #[test]
    fn random_secrets_differ() {
        assert_eq!(secret_hex::<24>().len(), 48);
        assert_ne!(secret_hex::<24>(), secret_hex::<24>());
    }
}
