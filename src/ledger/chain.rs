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
    let mut hasher = RowHasher(Sha256::new_with_prefix(predecessor));
    hasher.add(Some(&row.request_id));
    hasher.add(Some(&row.key_id));
    hasher.add(Some(&row.key_name));
    hasher.add(row.error_code.as_ref());
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
        hasher.add(number.map(i64::to_le_bytes));
    }
    for time in [row.duration_ms, row.queue_ms, row.runtime_ms] {
        hasher.add(time.map(f64::to_le_bytes));
    }
    hasher.add(Some([u8::from(row.grounded)]));
    // Rows that are older than these columns have null in them, and keep the hash that they were
    // made with.
    if row.search_reason.is_some() || row.search_results.is_some() || row.search_ms.is_some() {
        hasher.add(Some(row.search_reason.as_deref().unwrap_or("")));
        hasher.add(row.search_results.map(i64::to_le_bytes));
        hasher.add(row.search_ms.map(f64::to_le_bytes));
    }
    if row.cause.is_some() {
        hasher.add(row.cause.as_ref());
    }
    hasher.0.finalize().into()
}

struct RowHasher(Sha256);

impl RowHasher {
    /// Adds a column. Each has its length, so that no two rows have the same bytes.
    fn add(&mut self, column: Option<impl AsRef<[u8]>>) {
        let Some(column) = column else {
            return self.0.update([0xff; 4]);
        };
        let bytes = column.as_ref();
        let length = u32::try_from(bytes.len()).expect("a column should have less than 4 GiB");
        self.0.update(length.to_le_bytes());
        self.0.update(bytes);
    }
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
