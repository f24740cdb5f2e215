//! Random names: of requests, of keys and of secrets.

use std::fmt;

use rand::{Rng, TryRng};

/// The one id of a request: in the answer, the headers, the log line and the ledger's row.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RequestId([u8; 16]);

impl RequestId {
    /// Unique, not secret: the thread's own generator saves a system call for each request.
    pub fn new() -> Self {
        let mut bytes = [0; 16];
        rand::rng().fill_bytes(&mut bytes);
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
    }

    #[test]
    fn secrets_differ() {
        assert_eq!(secret_hex::<24>().len(), 48);
        assert_ne!(secret_hex::<24>(), secret_hex::<24>());
    }
}
