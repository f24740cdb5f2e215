//! The chore that removes old rows from the ledger.

use std::sync::Arc;
use std::time::{Duration, Instant};

use time::OffsetDateTime;

use crate::chore::Chore;
use crate::store::{Store, StoreError};

/// How many rows go at once: few enough that a request that waits for them does not notice.
const STEP: i64 = 100;

/// How many times as long as a step took the others have the ledger for themselves.
const REST: u32 = 4;

/// How often it is looked for rows that have become old.
const ROUND: Duration = Duration::from_secs(3600);

/// How soon it is looked again where old rows are not in the console's sums yet.
const SOON: Duration = Duration::from_secs(2);

const DAY: i64 = 86_400;

pub fn start(store: Arc<Store>, days: u32) -> Chore {
    Chore::start("retention", move |rest| round(&store, days, rest))
}

/// Removes all that is too old now; says how long to rest after it, or nothing at the end.
fn round(store: &Store, days: u32, rest: &dyn Fn(Duration) -> bool) -> Option<Duration> {
    let limit = OffsetDateTime::now_utc().unix_timestamp() - i64::from(days) * DAY;
    let mut removed = 0;
    loop {
        let began = Instant::now();
        match store.remove_before(limit, STEP) {
            Ok(0) => break,
            Ok(count) => removed += count,
            // Others have the database; there will be another step.
            Err(StoreError::Busy) => {}
            Err(error) => {
                log::error!("old rows could not be removed: {error}");
                break;
            }
        }
        if !rest(began.elapsed() * REST) {
            return None;
        }
    }
    if removed > 0 {
        log::info!("{removed} rows older than {days} days were removed from the ledger");
    }
    let waits = store.oldest_row().is_ok_and(|oldest| oldest.is_some_and(|created| created < limit));
    Some(if waits { SOON } else { ROUND })
}
