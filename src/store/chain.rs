//! Tamper evidence: each completed row bears a hash over its content and its predecessor's hash, so that a
//! row that was altered, removed or put in between breaks the chain where it stands.
//!
//! Whoever may write the database could compute a whole new chain. What an operator notes elsewhere of the
//! head, which `usage verify` prints, can't be met by one.

use std::fmt;

use rusqlite::{Connection, OptionalExtension, Row};
use sha2::{Digest, Sha256};

use super::ledger::{self, LedgerRow, NewRow, Outcome, Tokens};
use super::{DAY, Store, StoreError};

/// A row's place in the chain.
pub(super) struct Link {
    pub seq: i64,
    pub hash: [u8; 32],
}

impl Link {
    /// The link of a row that is completed now, after this one.
    pub fn next(&self, row: &NewRow, outcome: &Outcome) -> Self {
        let content = Content {
            request_id: &row.request_id,
            key_id: &row.key_id,
            key_name: &row.key_name,
            created: row.created,
            status: outcome.status.map(i64::from),
            error_code: outcome.error_code,
            tokens: outcome.tokens,
            times: [outcome.duration_ms, outcome.queue_ms, outcome.runtime_ms],
            grounded: outcome.grounded,
            search: outcome
                .search
                .as_ref()
                .map(|search| (search.reason, search.results, Some(search.time_ms))),
        };
        let seq = self.seq + 1;
        Self { seq, hash: content.hash(seq, &self.hash) }
    }
}

/// Where the chain ends: its newest row, or what stands for it where all rows were removed or none was made.
pub(super) fn head(connection: &Connection) -> rusqlite::Result<Link> {
    let newest = "SELECT seq, hash FROM usage WHERE seq IS NOT NULL ORDER BY seq DESC LIMIT 1";
    let link = |row: &Row| Ok(Link { seq: row.get(0)?, hash: row.get(1)? });
    match connection.query_row(newest, [], link).optional()? {
        Some(head) => Ok(head),
        None => anchor(connection),
    }
}

/// Where the chain begins.
fn anchor(connection: &Connection) -> rusqlite::Result<Link> {
    connection.query_row("SELECT anchor_seq, anchor_hash FROM chain", [], |row| {
        Ok(Link { seq: row.get(0)?, hash: row.get(1)? })
    })
}

/// What of a row is hashed: all of it.
struct Content<'a> {
    request_id: &'a str,
    key_id: &'a str,
    key_name: &'a str,
    created: i64,
    status: Option<i64>,
    error_code: Option<&'a str>,
    tokens: Tokens,
    times: [Option<f64>; 3],
    grounded: bool,
    /// Why Search was asked, what it found, and how long it took.
    search: Option<(&'a str, Option<i64>, Option<f64>)>,
}

impl<'a> Content<'a> {
    fn of(row: &'a LedgerRow) -> Self {
        Self {
            request_id: &row.request_id,
            key_id: &row.key_id,
            key_name: &row.key_name,
            created: row.created,
            status: row.status,
            error_code: row.error_code.as_deref(),
            tokens: row.tokens,
            times: [row.duration_ms, row.queue_ms, row.runtime_ms],
            grounded: row.grounded,
            search: (row.search_reason.is_some() || row.search_results.is_some() || row.search_ms.is_some())
                .then(|| (row.search_reason.as_deref().unwrap_or(""), row.search_results, row.search_ms)),
        }
    }

    /// The hash of a row in its place after another.
    fn hash(&self, seq: i64, predecessor: &[u8; 32]) -> [u8; 32] {
        let mut hasher = Sha256::new();
        hasher.update(predecessor);
        let mut part = |bytes: Option<&[u8]>| {
            // Each part says how long it is, so that no two rows have the same bytes.
            match bytes {
                None => hasher.update([0xff; 4]),
                Some(bytes) => {
                    let length = u32::try_from(bytes.len()).expect("a column should have less than 4 GiB");
                    hasher.update(length.to_le_bytes());
                    hasher.update(bytes);
                }
            }
        };
        for text in [Some(self.request_id), Some(self.key_id), Some(self.key_name), self.error_code] {
            part(text.map(str::as_bytes));
        }
        let Tokens { prompt_tokens, completion_tokens, total_tokens } = self.tokens;
        let numbers =
            [Some(seq), Some(self.created), self.status, prompt_tokens, completion_tokens, total_tokens];
        for number in numbers {
            part(number.map(i64::to_le_bytes).as_ref().map(<[u8; 8]>::as_slice));
        }
        for time in self.times {
            part(time.map(f64::to_le_bytes).as_ref().map(<[u8; 8]>::as_slice));
        }
        part(Some(&[self.grounded.into()]));
        // Rows that are older than these columns have none of them, and keep the hash that they were made with.
        if let Some((reason, results, time)) = self.search {
            part(Some(reason.as_bytes()));
            part(results.map(i64::to_le_bytes).as_ref().map(<[u8; 8]>::as_slice));
            part(time.map(f64::to_le_bytes).as_ref().map(<[u8; 8]>::as_slice));
        }
        hasher.finalize().into()
    }
}

/// What a walk along the chain found.
#[derive(Debug, PartialEq, Eq)]
pub struct Verdict {
    pub rows: u64,
    pub head: String,
    /// The first thing that is wrong.
    pub fault: Option<Fault>,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Fault {
    /// A row's content is not what its hash was made from.
    Altered { request_id: String },
    /// Rows are missing between two that are there.
    Removed { before: String, count: i64 },
    /// The newest rows are missing.
    Cut { count: i64 },
    /// A row has an outcome and no place in the chain.
    Inserted { request_id: String },
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
            Self::Inserted { request_id } => write!(f, "the row of {request_id} was put in"),
            Self::Sums { day } => {
                write!(f, "the sums of the day {} are not those of its rows", super::date(*day))
            }
        }
    }
}

impl Store {
    /// Walks the whole chain, then holds the sums of each day against its rows. It reads one state of the
    /// database, and nobody waits for it.
    pub fn verify(&self) -> Result<Verdict, StoreError> {
        self.read(|connection| {
            let snapshot = connection.unchecked_transaction()?;
            let verdict = walk(&snapshot)?;
            match verdict.fault {
                None => Ok(Verdict { fault: compare_sums(&snapshot)?, ..verdict }),
                Some(_) => Ok(verdict),
            }
        })
    }
}

fn walk(connection: &Connection) -> rusqlite::Result<Verdict> {
    let Link { mut seq, mut hash } = anchor(connection)?;
    let mut verdict = Verdict { rows: 0, head: String::new(), fault: None };
    let columns = ledger::COLUMNS;
    let mut statement = connection
        .prepare(&format!("SELECT {columns}, hash FROM usage WHERE seq IS NOT NULL ORDER BY seq"))?;
    let mut rows = statement.query([])?;
    while let Some(found) = rows.next()? {
        let row = ledger::read_row(found)?;
        let place = row.seq.unwrap_or_default();
        if place != seq + 1 {
            verdict.fault = Some(Fault::Removed { before: row.request_id, count: place - seq - 1 });
            return Ok(verdict);
        }
        let kept: [u8; 32] = found.get("hash")?;
        if Content::of(&row).hash(place, &hash) != kept {
            verdict.fault = Some(Fault::Altered { request_id: row.request_id });
            return Ok(verdict);
        }
        (seq, hash) = (place, kept);
        verdict.rows += 1;
    }
    verdict.head = format!("{seq}:{}", hex::encode(hash));
    // Every row of the chain, removed ones too, was counted once in the sums of its day.
    let counted: i64 =
        connection.query_row("SELECT coalesce(sum(requests), 0) FROM usage_daily", [], |row| row.get(0))?;
    if counted > seq {
        verdict.fault = Some(Fault::Cut { count: counted - seq });
        return Ok(verdict);
    }
    let mut stray = connection.prepare(
        "SELECT request_id FROM usage WHERE seq IS NULL AND (status IS NOT NULL OR error_code IS NOT NULL)",
    )?;
    let mut stray = stray.query([])?;
    if let Some(row) = stray.next()? {
        verdict.fault = Some(Fault::Inserted { request_id: row.get(0)? });
    }
    Ok(verdict)
}

/// The first day whose sums differ from its rows, of the days of which no row was removed on purpose.
fn compare_sums(connection: &Connection) -> rusqlite::Result<Option<Fault>> {
    let kept_since: i64 = connection.query_row("SELECT kept_since FROM chain", [], |row| row.get(0))?;
    let first_whole_day = kept_since.div_euclid(DAY) + i64::from(kept_since.rem_euclid(DAY) > 0);
    let counted = format!(
        "SELECT created / {DAY} AS day, key_id, key_name, coalesce(status, 0) AS status,
         coalesce(error_code, '') AS error_code, count(*) AS requests, coalesce(sum(prompt_tokens), 0),
         coalesce(sum(completion_tokens), 0), coalesce(sum(total_tokens), 0),
         count(*) FILTER (WHERE status = 200 AND total_tokens IS NULL)
         FROM usage WHERE seq IS NOT NULL AND created >= ?1 * {DAY} GROUP BY 1, 2, 3, 4, 5"
    );
    let kept = "SELECT * FROM usage_daily WHERE day >= ?1";
    let mut differing = connection.prepare(&format!(
        "SELECT min(day) FROM (SELECT day FROM ({counted} EXCEPT {kept}) UNION ALL SELECT day FROM ({kept} EXCEPT {counted}))"
    ))?;
    let day: Option<i64> = differing.query_row([first_whole_day], |row| row.get(0))?;
    Ok(day.map(|day| Fault::Sums { day }))
}

#[cfg(test)]
mod tests {
    use super::super::ledger::tests::{id, write};
    use super::super::tests::Temporary;
    use super::*;

    fn ten_rows() -> Temporary {
        let temporary = Temporary::new();
        for number in 0..10 {
            write(&temporary.store, &number.to_string(), "key_1", number * 40_000, 200, Some(number));
        }
        temporary
    }

    #[track_caller]
    fn fault_after(sql: &'static str) -> Option<Fault> {
        let temporary = ten_rows();
        temporary.store.write(move |connection| connection.execute_batch(sql)).expect("a change");
        temporary.store.verify().expect("a walk").fault
    }

    #[test]
    fn an_untouched_ledger_verifies() {
        let temporary = ten_rows();
        let verdict = temporary.store.verify().expect("a walk");
        assert_eq!((verdict.rows, verdict.fault), (10, None));
        assert!(verdict.head.starts_with("10:"));
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
            "hash = zeroblob(32)",
        ] {
            let sql = format!("UPDATE usage SET {column} WHERE seq = 5");
            assert_eq!(fault_after(sql.leak()), altered(4), "{column}");
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
                "INSERT INTO usage (request_id, key_id, key_name, created, status) VALUES ('new', 'k', 'n', 1, 200)"
            ),
            Some(Fault::Inserted { request_id: "new".into() })
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
    fn sums_that_are_not_those_of_the_rows_are_found() {
        assert_eq!(
            fault_after("UPDATE usage_daily SET total_tokens = 0 WHERE day = 1"),
            Some(Fault::Sums { day: 1 })
        );
        assert_eq!(fault_after("DELETE FROM usage_daily WHERE day = 2"), Some(Fault::Sums { day: 2 }));
    }
}
