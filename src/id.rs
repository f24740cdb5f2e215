//! The ids of requests and of audit rows, and the shape of ids.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

/// The one id of a request: in the answer, the headers, the log line and the ledger's row.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RequestId(u128);

impl RequestId {
    /// Makes the id of a request that is complete now.
    pub fn now() -> Self {
        Self::at(SystemTime::now())
    }

    /// Makes the id of a request that was complete at this time: its milliseconds and 80 random
    /// bits. Ids sort by time, so new rows are next to each other in the ledger's index, however
    /// large it grows. Unique, not secret: the thread's own generator is enough.
    pub fn at(time: SystemTime) -> Self {
        let time = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self(time.as_millis() << 80 | rand::random::<u128>() >> 48)
    }

    /// When the request was complete, in Unix seconds.
    pub fn created(&self) -> i64 {
        (self.0 >> 80) as i64 / 1000
    }

    /// When the request of an id was complete, in Unix seconds; `None` if the text is no id.
    pub fn time_of(id: &str) -> Option<i64> {
        let milliseconds = id.strip_prefix("chatcmpl_")?.get(..12)?;
        Some(i64::from_str_radix(milliseconds, 16).ok()? / 1000)
    }

    /// The lower bound of the ids that were made at this second or later: as texts, too, ids sort
    /// by time.
    pub fn from(second: i64) -> String {
        let last = (1 << 48) - 1;
        format!(
            "chatcmpl_{:012x}",
            second.saturating_mul(1000).clamp(0, last)
        )
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "chatcmpl_{:032x}", self.0)
    }
}

/// The id of a row of the audit, in the order of time as a request's is.
pub fn audit_id() -> String {
    format!("audit_{:032x}", RequestId::now().0)
}

/// Returns true for a prefix and so many lower-case hexadecimal digits.
pub fn has_shape(text: &str, prefix: &str, digits: usize) -> bool {
    let is_digit = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    text.strip_prefix(prefix)
        .is_some_and(|rest| rest.len() == digits && rest.bytes().all(is_digit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_id_has_its_shape() {
        let text = RequestId::now().to_string();
        assert!(has_shape(&text, "chatcmpl_", 32) && !has_shape(&text, "chatcmpl_", 31));
        assert_ne!(text, RequestId::now().to_string());
    }

    #[test]
    fn ids_are_in_the_order_of_time() {
        let id = RequestId::now();
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .expect("a time after 1970")
            .as_secs() as i64;
        assert!((now - id.created()).abs() < 60);
        let text = id.to_string();
        assert!(text >= RequestId::from(id.created()) && text < RequestId::from(id.created() + 1));
        assert!(RequestId::from(i64::MIN) < text && text < RequestId::from(i64::MAX));
    }
}
