//! Seals rows a moment after their requests are answered, and writes when keys were last used.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Stop, Task};
use crate::store::{Store, StoreError};
use crate::when;

/// How many rows a transaction seals at most: a write that waits for it is delayed by some milliseconds.
const BATCH: i64 = 500;

/// The pause between two looks for rows.
const INTERVAL: Duration = Duration::from_secs(1);

pub fn start(store: Arc<Store>) -> Task {
    store.sealing_started(when::now());
    Task::start("sealing", move |stop| {
        let mut is_failing = false;
        stop.repeat(|| {
            if let Err(error) = store.write_uses() {
                log::warn!("the last use of keys could not be written: {error}");
            }
            match seal_all(&store, &stop) {
                Ok(()) if is_failing => {
                    is_failing = false;
                    log::info!("rows are sealed again");
                }
                Err(error) if !is_failing => {
                    is_failing = true;
                    log::error!(
                        "rows can't be sealed: {error}. Requests go on; sealing is tried again every second"
                    );
                }
                _ => {}
            }
            INTERVAL
        });
        // After a graceful stop every row has its seal.
        let _ = store.write_uses();
        while store.seal(BATCH, when::now()).is_ok_and(|sealed| sealed > 0) {}
    })
}

/// Seals all rows that wait. After a full batch requests have the database for as long as the batch took.
fn seal_all(store: &Store, stop: &Stop) -> Result<(), StoreError> {
    loop {
        let began = Instant::now();
        let sealed = match store.seal(BATCH, when::now()) {
            // Another process has the database; the next round comes soon.
            Err(StoreError::Busy) => 0,
            sealed => sealed?,
        };
        if sealed < BATCH as usize || stop.wait(began.elapsed()) {
            return Ok(());
        }
    }
}
