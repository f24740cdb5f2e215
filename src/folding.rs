//! The chore that folds the ledger's new rows into the console's sums, and writes the uses of keys that are in memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::chore::Chore;
use crate::store::{Store, StoreError};
use crate::when;

/// How many rows are folded at once: few enough that a request that waits for them does not notice.
const STEP: i64 = 500;

/// How many times as long as a step took the others have the ledger for themselves.
const REST: u32 = 4;

/// How often it is looked for new rows: sooner again where there were some. What is newer, every page reads from the
/// rows, and under a full load a second has many.
const ROUND: Duration = Duration::from_secs(2);
const NEXT_ROUND: Duration = Duration::from_millis(200);

pub fn start(store: Arc<Store>) -> Chore {
    Chore::start("folding", move |rest| round(&store, rest))
}

/// Folds all that is there now; says how long to rest after it, or nothing at the end.
fn round(store: &Store, rest: &dyn Fn(Duration) -> bool) -> Option<Duration> {
    if let Err(error) = store.write_uses() {
        log::warn!("the last use of keys could not be written: {error}");
    }
    loop {
        let began = Instant::now();
        match store.fold(STEP, when::now()) {
            Ok(0) => return Some(ROUND),
            Ok(count) if count < STEP as usize => return Some(NEXT_ROUND),
            // Others have the database; there will be another step.
            Ok(_) | Err(StoreError::Busy) => {}
            Err(error) => {
                log::error!("new rows could not be added to the console's sums: {error}");
                return Some(ROUND);
            }
        }
        if !rest(began.elapsed() * REST) {
            return None;
        }
    }
}
