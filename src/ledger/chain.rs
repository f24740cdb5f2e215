//! Tamper evidence: each row has a hash over its content and its predecessor's hash, so a row that
//! was changed, removed or inserted breaks the chain at its place.
//!
//! Anyone who may write the database could compute a new chain. A head that an operator has noted
//! elsewhere, as `usage verify` prints it, is not part of such a chain.

use std::fmt;

use sha2::{Digest, Sha256};

use super::row::{LedgerRow, Tokens};
use crate::database::{Result, Row};

/// A row's place in the chain.
#[derive(Clone, Copy)]
pub(super) struct ChainLink {
    pub seq: i64,
    pub hash: [u8; 32],
}

impl ChainLink {
    pub fn read(mut row: Row) -> Result<Self> {
        Ok(Self {
            seq: row.column()?,
            hash: row.column()?,
        })
    }

    /// Computes the link of the row that follows.
    pub fn following(&self, row: &LedgerRow) -> Self {
        let seq = self.seq + 1;
        Self {
            seq,
            hash: row_hash(row, seq, &self.hash),
        }
    }
}

/// Computes the hash of a row from its columns, its number and the hash of its predecessor in the
/// chain. It does not cover the gateway, which rows of earlier versions do not have: a row that is
/// moved to another chain breaks both.
fn row_hash(row: &LedgerRow, seq: i64, predecessor: &[u8; 32]) -> [u8; 32] {
    let mut hasher = Sha256::new();
    hasher.update(predecessor);
    let mut part = |bytes: Option<&[u8]>| {
        // Each part has its length, so that no two rows have the same bytes.
        match bytes {
            None => hasher.update([0xff; 4]),
            Some(bytes) => {
                let length =
                    u32::try_from(bytes.len()).expect("a column should have less than 4 GiB");
                hasher.update(length.to_le_bytes());
                hasher.update(bytes);
            }
        }
    };
    let error_code = row.error_code.as_deref();
    for text in [
        Some(row.request_id.as_str()),
        Some(&row.key_id),
        Some(&row.key_name),
        error_code,
    ] {
        part(text.map(str::as_bytes));
    }
    let Tokens {
        prompt_tokens,
        completion_tokens,
        total_tokens,
    } = row.tokens;
    for number in [
        Some(seq),
        Some(row.created),
        row.status,
        prompt_tokens,
        completion_tokens,
        total_tokens,
    ] {
        part(
            number
                .map(i64::to_le_bytes)
                .as_ref()
                .map(<[u8; 8]>::as_slice),
        );
    }
    for time in [row.duration_ms, row.queue_ms, row.runtime_ms] {
        part(time.map(f64::to_le_bytes).as_ref().map(<[u8; 8]>::as_slice));
    }
    part(Some(&[row.grounded.into()]));
    // Rows that are older than these columns have null in them, and keep the hash that they were
    // made with.
    if row.search_reason.is_some() || row.search_results.is_some() || row.search_ms.is_some() {
        part(Some(row.search_reason.as_deref().unwrap_or("").as_bytes()));
        part(
            row.search_results
                .map(i64::to_le_bytes)
                .as_ref()
                .map(<[u8; 8]>::as_slice),
        );
        part(
            row.search_ms
                .map(f64::to_le_bytes)
                .as_ref()
                .map(<[u8; 8]>::as_slice),
        );
    }
    if let Some(cause) = &row.cause {
        part(Some(cause.as_bytes()));
    }
    hasher.finalize().into()
}

/// A place in a gateway's chain, as an operator notes it elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainHead {
    /// Empty for the chain of a SQLite database.
    pub gateway: String,
    pub seq: i64,
    pub hash: [u8; 32],
}

impl ChainHead {
    /// Reads what `Display` writes.
    pub fn parse(text: &str) -> Option<Self> {
        let (rest, hash) = text.rsplit_once(':')?;
        let (gateway, seq) = rest.rsplit_once(':').unwrap_or(("", rest));
        let seq = seq.parse().ok().filter(|&seq| seq >= 0)?;
        Some(Self {
            gateway: gateway.to_owned(),
            seq,
            hash: hex::decode(hash).ok()?.try_into().ok()?,
        })
    }
}

/// `SEQ:HASH`, or `GATEWAY:SEQ:HASH`.
impl fmt::Display for ChainHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.gateway.is_empty() {
            write!(f, "{}:", self.gateway)?;
        }
        write!(f, "{}:{}", self.seq, hex::encode(self.hash))
    }
}
