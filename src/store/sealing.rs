//! Sealing: rows that have an outcome get their place in the chain and are added to the rollup.
//!
//! A background job does it, in transactions of its own, so that a request touches its own row only. A row changed before
//! its seal is not detected by `verify`: that is a second or two, longer if sealing has much to do.

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicI64, Ordering};

use super::engine::{Session, values};
use super::keys::NOTE_USE;
use super::ledger::{COLUMNS, LedgerRow, read_row};
use super::rollup::{self, Batch};
use super::{Store, StoreError, chain};
use crate::when;

/// Rows of a gateway that have an outcome and no seal, the oldest first.
pub(super) static UNSEALED_ROWS: LazyLock<String> = LazyLock::new(|| {
    format!(
        "SELECT {COLUMNS} FROM usage WHERE seq IS NULL AND gateway = $2
         AND (status IS NOT NULL OR error_code IS NOT NULL) ORDER BY request_id LIMIT $1"
    )
});

pub(super) const COUNT_UNSEALED: &str = "SELECT count(*), min(created) FROM usage
    WHERE seq IS NULL AND (status IS NOT NULL OR error_code IS NOT NULL)";

pub(super) const COUNT_UNSEALED_OF: &str = "SELECT count(*) FROM usage
    WHERE seq IS NULL AND gateway = $1 AND (status IS NOT NULL OR error_code IS NOT NULL)";

/// How many rows wait for their seal, counted without the database.
pub(super) struct Backlog {
    rows: AtomicI64,
    /// When sealing last had nothing left to do. The time before a start does not count.
    caught_up: AtomicI64,
    /// When rows were last sealed; 0: not since the start.
    last_seal: AtomicI64,
}

impl Backlog {
    pub fn new() -> Self {
        Self { rows: AtomicI64::new(0), caught_up: AtomicI64::new(when::now()), last_seal: AtomicI64::new(0) }
    }

    pub fn last_seal(&self) -> Option<i64> {
        Some(self.last_seal.load(Ordering::Relaxed)).filter(|&time| time != 0)
    }

    /// A row whose fsync failed was not counted and may be sealed all the same, so the count stops at zero.
    pub fn add(&self, rows: i64) {
        self.rows.fetch_add(rows, Ordering::Relaxed);
        self.rows.fetch_max(0, Ordering::Relaxed);
    }

    /// The rows, and for how many seconds sealing has not caught up.
    pub fn state(&self, now: i64) -> (i64, i64) {
        let rows = self.rows.load(Ordering::Relaxed);
        let behind = (now - self.caught_up.load(Ordering::Relaxed)).max(0);
        if rows == 0 { (0, 0) } else { (rows, behind) }
    }
}

/// Rows that have an outcome and no seal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unsealed {
    pub rows: i64,
    /// When the oldest of them was created.
    pub oldest: Option<i64>,
}

impl Store {
    /// Seals the oldest rows that wait, at most `most`, and returns how many they were.
    pub fn seal(&self, most: i64, now: i64) -> Result<usize, StoreError> {
        // A row that has an outcome is changed by sealing only, so requests need not wait until it is read.
        let parameters = values![most, &self.gateway];
        let rows = self.engine.read(|session| session.rows(&UNSEALED_ROWS, &parameters, read_row))?;
        if rows.is_empty() {
            self.backlog.caught_up.store(now, Ordering::Relaxed);
            return Ok(0);
        }
        // Durable, because a head that `verify` has printed must survive a power cut.
        self.engine.transaction(true, |session| {
            lock_gateway(session, &self.gateway, self.epoch)?;
            seal(session, &self.gateway, &rows, now)
        })?;
        self.backlog.add(-(rows.len() as i64));
        self.backlog.last_seal.store(now, Ordering::Relaxed);
        Ok(rows.len())
    }

    /// The rows that wait for their seal, those of other gateways included, as counted by the database.
    pub fn unsealed(&self) -> Result<Unsealed, StoreError> {
        let read = |session: &dyn Session| {
            session
                .first(COUNT_UNSEALED, &[], |mut row| Ok(Unsealed { rows: row.next()?, oldest: row.next()? }))
        };
        Ok(self.engine.read(read)?.unwrap_or_default())
    }
}

/// Keeps other processes from sealing rows of a gateway until the transaction ends. Fails if the epoch has changed.
fn lock_gateway(session: &dyn Session, name: &str, epoch: i64) -> Result<(), StoreError> {
    let lock = "UPDATE gateways SET epoch = epoch WHERE name = $1 AND epoch = $2";
    if session.execute(lock, &values![name, epoch])? == 0 { Err(StoreError::Fenced) } else { Ok(()) }
}

/// Seals rows of a gateway in its chain.
pub(super) fn seal(
    session: &dyn Session,
    gateway: &str,
    rows: &[LedgerRow],
    now: i64,
) -> Result<(), StoreError> {
    let mut head = chain::head(session, gateway)?;
    let mut batch = Batch::default();
    let mut last_used: BTreeMap<&str, i64> = BTreeMap::new();
    for row in rows {
        head = head.next(row);
        let sealed = session.execute(
            "UPDATE usage SET seq = $2, hash = $3 WHERE request_id = $1 AND seq IS NULL",
            &values![&row.request_id, head.seq, head.hash],
        )?;
        if sealed != 1 {
            return Err(StoreError::NoRow);
        }
        batch.add(row, now);
        let used = last_used.entry(&row.key_id).or_insert(row.created);
        *used = row.created.max(*used);
    }
    batch.write(session)?;
    rollup::remove_old(session, now)?;
    last_used
        .into_iter()
        .try_for_each(|(key_id, used)| session.execute(NOTE_USE, &values![key_id, used]).map(drop))
}

#[cfg(test)]
mod tests {
    use super::super::Digest;
    use super::super::ledger::tests::{id, outcome, row, write};
    use super::super::tests::Temporary;
    use super::*;

    #[test]
    fn rows_are_sealed_in_batches_in_the_order_of_their_ids() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        for number in [3, 1, 2, 5, 4] {
            write(store, "x", "key_1", number, 200, Some(1));
        }
        store.begin(&row("open", "key_1", 0)).expect("a running request");
        assert_eq!(store.backlog.state(9).0, 5);
        assert_eq!(store.unsealed().expect("a count"), Unsealed { rows: 5, oldest: Some(1) });
        assert_eq!(store.backlog.last_seal(), None);
        assert_eq!(store.seal(3, 9).expect("a batch"), 3);
        assert_eq!(store.backlog.last_seal(), Some(9));
        assert_eq!(store.seal(3, 9).expect("a batch"), 2);
        assert_eq!(store.seal(3, 9).expect("a batch"), 0);
        for number in 1..=5 {
            let found = store.find_row(&id("x", number)).expect("a look-up").expect("the row");
            assert_eq!(found.seq, Some(number));
        }
        assert_eq!(store.backlog.state(9), (0, 0));
        assert_eq!(store.unsealed().expect("a count"), Unsealed::default());
        assert_eq!(store.verify().expect("a walk").fault, None);
    }

    #[test]
    fn the_last_use_is_the_newest_row_and_never_goes_back() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        let last_used =
            || store.find_key(&Digest::of("key_1")).expect("a look-up").expect("the key").last_used;
        write(store, "a", "key_1", 50, 200, None);
        store.record(&row("b", "key_1", 70), &outcome(400, None)).expect("a refused one");
        assert_eq!(last_used(), None);
        store.seal_all(100);
        assert_eq!(last_used(), Some(70));
        write(store, "c", "key_1", 60, 200, None);
        store.seal_all(100);
        assert_eq!(last_used(), Some(70));
    }

    #[test]
    fn how_long_sealing_is_behind() {
        let temporary = Temporary::new();
        let store = &temporary.store;
        store.seal_all(100);
        assert_eq!(store.backlog.state(500), (0, 0), "nothing waits");
        write(store, "a", "key_1", 500, 200, None);
        assert_eq!(store.backlog.state(510), (1, 410));
        store.seal_all(520);
        write(store, "b", "key_1", 600, 200, None);
        assert_eq!(store.backlog.state(523), (1, 3));
    }
}
