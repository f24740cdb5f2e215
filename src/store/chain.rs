//! Tamper evidence: each sealed row has a hash over its content and its predecessor's hash, so a row that was changed,
//! removed or inserted breaks the chain at its place.
//!
//! Anyone who may write the database could compute a new chain. A head that an operator has noted elsewhere, as
//! `usage verify` prints it, is not part of such a chain.

use std::fmt;

use sha2::{Digest, Sha256};

use super::engine::{Row, Session, values};
use super::ledger::{self, LedgerRow, Tokens};
use super::sealing::COUNT_UNSEALED;
use super::{DAY, Store, StoreError};

/// A row's place in the chain.
pub(super) struct Link {
    pub seq: i64,
    pub hash: [u8; 32],
}

impl Link {
    fn read(mut row: Row) -> Result<Self, StoreError> {
        Ok(Self { seq: row.next()?, hash: row.next()? })
    }

    /// The link of a row that is sealed after this one.
    pub fn next(&self, row: &LedgerRow) -> Self {
        let seq = self.seq + 1;
        Self { seq, hash: hash(row, seq, &self.hash) }
    }
}

/// The end of the chain: its newest row, or its anchor if there is no row.
pub(super) fn head(session: &dyn Session) -> Result<Link, StoreError> {
    let newest = "SELECT seq, hash FROM usage WHERE seq IS NOT NULL ORDER BY seq DESC LIMIT 1";
    match session.first(newest, &[], Link::read)? {
        Some(head) => Ok(head),
        None => anchor(session),
    }
}

/// The beginning of the chain.
fn anchor(session: &dyn Session) -> Result<Link, StoreError> {
    session.first("SELECT anchor_seq, anchor_hash FROM chain", &[], Link::read)?.ok_or(StoreError::NoRow)
}

/// The hash of a row in its place. It covers all columns.
fn hash(row: &LedgerRow, seq: i64, predecessor: &[u8; 32]) -> [u8; 32] {
    let mut hasher = Sha256::new();
    hasher.update(predecessor);
    let mut part = |bytes: Option<&[u8]>| {
        // Each part has its length, so that no two rows have the same bytes.
        match bytes {
            None => hasher.update([0xff; 4]),
            Some(bytes) => {
                let length = u32::try_from(bytes.len()).expect("a column should have less than 4 GiB");
                hasher.update(length.to_le_bytes());
                hasher.update(bytes);
            }
        }
    };
    let error_code = row.error_code.as_deref();
    for text in [Some(row.request_id.as_str()), Some(&row.key_id), Some(&row.key_name), error_code] {
        part(text.map(str::as_bytes));
    }
    let Tokens { prompt_tokens, completion_tokens, total_tokens } = row.tokens;
    for number in [Some(seq), Some(row.created), row.status, prompt_tokens, completion_tokens, total_tokens] {
        part(number.map(i64::to_le_bytes).as_ref().map(<[u8; 8]>::as_slice));
    }
    for time in [row.duration_ms, row.queue_ms, row.runtime_ms] {
        part(time.map(f64::to_le_bytes).as_ref().map(<[u8; 8]>::as_slice));
    }
    part(Some(&[row.grounded.into()]));
    // Rows that are older than these columns have null in all of them, and keep the hash that they were made with.
    if row.search_reason.is_some() || row.search_results.is_some() || row.search_ms.is_some() {
        part(Some(row.search_reason.as_deref().unwrap_or("").as_bytes()));
        part(row.search_results.map(i64::to_le_bytes).as_ref().map(<[u8; 8]>::as_slice));
        part(row.search_ms.map(f64::to_le_bytes).as_ref().map(<[u8; 8]>::as_slice));
    }
    hasher.finalize().into()
}

/// The result of a walk along the chain.
#[derive(Debug, PartialEq, Eq)]
pub struct Verification {
    pub rows: u64,
    pub head: String,
    /// Rows that have an outcome and wait for their seal: no fault.
    pub unsealed: i64,
    /// The first fault.
    pub fault: Option<Fault>,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Fault {
    /// A row's content does not match its hash.
    Altered { request_id: String },
    /// Rows are missing between two others.
    Removed { before: String, count: i64 },
    /// The newest rows are missing.
    Cut { count: i64 },
    /// The sums of a day are not those of its rows.
    Sums { day: i64 },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Altered { request_id } => {
                write!(f, "the row of {request_id} was altered, or put in the place of another")
            }
            Self::Removed { before, count } => write!(f, "{count} rows were removed before that of {before}"),
            Self::Cut { count } => write!(f, "the newest {count} rows were removed"),
            Self::Sums { day } => {
                write!(f, "the sums of the day {} are not those of its rows", super::date(*day))
            }
        }
    }
}

impl Store {
    /// Walks the whole chain, then compares the sums of each day with its rows, on one state of the database.
    pub fn verify(&self) -> Result<Verification, StoreError> {
        self.engine.report(|session| {
            let mut verification = walk(session)?;
            if verification.fault.is_none() {
                verification.fault = compare_sums(session)?;
            }
            Ok(verification)
        })
    }
}

fn walk(session: &dyn Session) -> Result<Verification, StoreError> {
    let mut last = anchor(session)?;
    let (mut rows, mut fault) = (0, None);
    let statement = format!("SELECT hash, {} FROM usage WHERE seq IS NOT NULL ORDER BY seq", ledger::COLUMNS);
    session.query(&statement, &[], &mut |mut columns| {
        if fault.is_some() {
            return Ok(());
        }
        let stored: Option<Vec<u8>> = columns.next()?;
        let row = ledger::read_row(columns)?;
        let seq = row.seq.unwrap_or_default();
        let link = last.next(&row);
        if seq != link.seq {
            fault = Some(Fault::Removed { before: row.request_id, count: seq - link.seq });
        } else if stored.as_deref() != Some(&link.hash) {
            fault = Some(Fault::Altered { request_id: row.request_id });
        } else {
            last = link;
            rows += 1;
        }
        Ok(())
    })?;
    // Every row of the chain, also one that retention removed, is in the sums of its day.
    let counted: i64 = session.value(
        "SELECT CAST(coalesce(sum(requests), 0) AS BIGINT) FROM usage_rollup WHERE span = $1",
        &values![DAY],
    )?;
    if fault.is_none() && counted > last.seq {
        fault = Some(Fault::Cut { count: counted - last.seq });
    }
    let head = format!("{}:{}", last.seq, hex::encode(last.hash));
    Ok(Verification { rows, head, unsealed: session.value(COUNT_UNSEALED, &[])?, fault })
}

/// The first day whose sums differ from its rows, among the days of which retention has removed no row.
fn compare_sums(session: &dyn Session) -> Result<Option<Fault>, StoreError> {
    let first_whole_day = first_whole_day(session)?;
    let counted = "SELECT created / 86400 AS day, key_id, key_name, coalesce(status, 0), coalesce(error_code, ''),
         count(*), coalesce(sum(prompt_tokens), 0), coalesce(sum(completion_tokens), 0), coalesce(sum(total_tokens), 0),
         count(*) FILTER (WHERE status = 200 AND total_tokens IS NULL)
         FROM usage WHERE seq IS NOT NULL AND created >= $1 * 86400 GROUP BY 1, 2, 3, 4, 5";
    let kept = "SELECT start / 86400 AS day, key_id, key_name, status, error_code, requests, prompt_tokens,
         completion_tokens, total_tokens, unmeasured FROM usage_rollup WHERE span = 86400 AND start >= $1 * 86400";
    let differing = format!(
        "SELECT min(day) FROM (SELECT day FROM ({counted} EXCEPT {kept}) AS a
         UNION ALL SELECT day FROM ({kept} EXCEPT {counted}) AS b) AS differing"
    );
    let day: Option<i64> = session.value(&differing, &values![first_whole_day])?;
    Ok(day.map(|day| Fault::Sums { day }))
}

/// The first day of which retention has removed no row.
pub(super) fn first_whole_day(session: &dyn Session) -> Result<i64, StoreError> {
    let kept_since: i64 = session.value("SELECT kept_since FROM chain", &[])?;
    Ok(kept_since.div_euclid(DAY) + i64::from(kept_since.rem_euclid(DAY) > 0))
}

#[cfg(test)]
mod tests {
    use super::super::ledger::tests::{id, row, write};
    use super::super::tests::Temporary;
    use super::*;

    fn ten_rows() -> Temporary {
        let temporary = Temporary::new();
        for number in 0..10 {
            write(&temporary.store, &number.to_string(), "key_1", number * 40_000, 200, Some(number));
        }
        temporary.store.seal_all(400_000);
        temporary
    }

    #[track_caller]
    fn fault_after(statements: &str) -> Option<Fault> {
        let temporary = ten_rows();
        temporary.store.tamper(statements);
        temporary.store.verify().expect("a walk").fault
    }

    #[test]
    fn an_untouched_ledger_verifies() {
        let temporary = ten_rows();
        let found = temporary.store.verify().expect("a walk");
        assert_eq!((found.rows, found.unsealed, found.fault), (10, 0, None));
        assert!(found.head.starts_with("10:"));
        write(&temporary.store, "unsealed", "key_1", 400_000, 200, None);
        temporary.store.begin(&row("open", "key_1", 400_000)).expect("a running request");
        let found = temporary.store.verify().expect("a walk");
        assert_eq!(
            (found.rows, found.unsealed, found.fault),
            (10, 1, None),
            "a row without a seal is no fault"
        );
    }

    #[test]
    fn what_was_done_to_a_row_is_found() {
        let of = |number: i64| id(&number.to_string(), number * 40_000);
        let altered = |number: i64| Some(Fault::Altered { request_id: of(number) });
        for column in [
            "key_id = 'key_2'",
            "key_name = 'x'",
            "created = created + 1",
            "status = 201",
            "error_code = 'x'",
            "prompt_tokens = 0",
            "completion_tokens = NULL",
            "total_tokens = 5",
            "duration_ms = 9",
            "queue_ms = NULL",
            "runtime_ms = 0",
            "grounded = 1",
            "search_reason = 'always'",
            "search_results = 0",
            "search_ms = 1",
            "hash = (SELECT anchor_hash FROM chain)",
        ] {
            let sql = format!("UPDATE usage SET {column} WHERE seq = 5");
            assert_eq!(fault_after(&sql), altered(4), "{column}");
        }
        let removed = Some(Fault::Removed { before: of(6), count: 2 });
        assert_eq!(fault_after("DELETE FROM usage WHERE seq IN (5, 6)"), removed);
        assert_eq!(fault_after("DELETE FROM usage WHERE seq > 7"), Some(Fault::Cut { count: 3 }));
        assert_eq!(
            fault_after("UPDATE usage SET seq = 100 WHERE seq = 10"),
            Some(Fault::Removed { before: of(9), count: 90 })
        );
        assert_eq!(
            fault_after(
                "UPDATE usage SET seq = -1 WHERE seq = 3; UPDATE usage SET seq = 3 WHERE seq = 4;
                 UPDATE usage SET seq = 4 WHERE seq = -1"
            ),
            altered(3),
            "two rows that changed places"
        );
    }

    #[test]
    fn a_fault_says_where_it_is() {
        for (fault, told) in [
            (
                Fault::Altered { request_id: "x".into() },
                "the row of x was altered, or put in the place of another",
            ),
            (Fault::Removed { before: "x".into(), count: 2 }, "2 rows were removed before that of x"),
            (Fault::Cut { count: 3 }, "the newest 3 rows were removed"),
            (Fault::Sums { day: 1 }, "the sums of the day 1970-01-02 are not those of its rows"),
        ] {
            assert_eq!(fault.to_string(), told);
        }
    }

    #[test]
    fn sums_that_are_not_those_of_the_rows_are_found() {
        assert_eq!(
            fault_after("UPDATE usage_rollup SET total_tokens = 0 WHERE span = 86400 AND start = 86400"),
            Some(Fault::Sums { day: 1 })
        );
        for day in [0, 2] {
            let sql = format!("DELETE FROM usage_rollup WHERE start = {day} * 86400");
            assert_eq!(fault_after(&sql), Some(Fault::Sums { day }));
        }
    }
}
