//! Removes old rows from the ledger.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Stop, Task};
use crate::store::{Store, StoreError};
use crate::when;

/// How many rows a transaction removes at most: a write that waits for it is hardly delayed.
const BATCH: i64 = 100;

/// After a batch, requests have the database for this many times as long as the batch took.
const PAUSE: u32 = 4;

/// The pause between two looks for old rows.
const INTERVAL: Duration = Duration::from_secs(3600);

const DAY: i64 = 86_400;

pub fn start(store: Arc<Store>, days: u32) -> Task {
    Task::start("retention", move |stop| {
        stop.repeat(|| {
            match remove_old(&store, when::now() - i64::from(days) * DAY, &stop) {
                Ok(0) => {}
                Ok(removed) => log::info!("removed {removed} rows older than {days} days from the ledger"),
                Err(error) => log::error!("old rows can't be removed: {error}"),
            }
            INTERVAL
        });
    })
}

fn remove_old(store: &Store, before: i64, stop: &Stop) -> Result<usize, StoreError> {
    let mut removed = 0;
    loop {
        let began = Instant::now();
        match store.remove_before(before, BATCH) {
            Ok(0) => return Ok(removed),
            Ok(count) => removed += count,
            // Another process has the database.
            Err(StoreError::Busy) => {}
            Err(error) => return Err(error),
        }
        if stop.wait(began.elapsed() * PAUSE) {
            return Ok(removed);
        }
    }
}
