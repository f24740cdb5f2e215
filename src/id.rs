//! Random names: of requests, of keys and of secrets.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use rand::{Rng, TryRng};

/// The one id of a request: in the answer, the headers, the log line and the ledger's row.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RequestId([u8; 16]);

impl RequestId {
    /// Milliseconds of the clock and 80 random bits: ids in the order of time stand side by side in the
    /// ledger's index, however large it grows. Unique, not secret: the thread's own generator will do.
    pub fn new() -> Self {
        let mut bytes = [0; 16];
        rand::rng().fill_bytes(&mut bytes[6..]);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        bytes[..6].copy_from_slice(&now.as_millis().to_be_bytes()[10..]);
        Self(bytes)
    }
}

impl Default for RequestId {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut digits = [0; 32];
        hex::encode_to_slice(self.0, &mut digits).expect("32 digits should hold 16 bytes");
        f.write_str("chatcmpl_")?;
        f.write_str(str::from_utf8(&digits).expect("hexadecimal digits should be ASCII"))
    }
}

/// `N` bytes from the operating system's random source, in hexadecimal.
pub fn secret_hex<const N: usize>() -> String {
    let mut bytes = [0; N];
    rand::rngs::SysRng.try_fill_bytes(&mut bytes).expect("the operating system should give random bytes");
    hex::encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_id_has_its_shape() {
        let text = RequestId::new().to_string();
        let digits = text.strip_prefix("chatcmpl_").expect("the prefix should be there");
        assert_eq!(digits.len(), 32);
        assert!(digits.bytes().all(|b| b.is_ascii_hexdigit()));
        assert_ne!(text, RequestId::new().to_string());
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a time after 1970").as_millis();
        let told = u128::from_str_radix(&digits[..12], 16).expect("digits");
        assert!(now - told < 60_000, "it begins with the time");
    }

    #[test]
    fn secrets_differ() {
        assert_eq!(secret_hex::<24>().len(), 48);
        assert_ne!(secret_hex::<24>(), secret_hex::<24>());
    }
}
