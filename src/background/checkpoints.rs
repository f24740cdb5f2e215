//! Runs checkpoints, so that no request has to.

use std::sync::Arc;
use std::time::Duration;

use super::Task;
use crate::store::{Store, StoreError};

/// The pause between two looks at the WAL, while it is written and while it is not.
const BUSY: Duration = Duration::from_millis(500);
const IDLE: Duration = Duration::from_secs(1);

pub fn start(store: Arc<Store>) -> Task {
    Task::start("checkpoints", move |stop| {
        let mut is_failing = false;
        stop.repeat(|| match store.checkpoint() {
            Ok(was_written) => {
                is_failing = false;
                if was_written { BUSY } else { IDLE }
            }
            Err(StoreError::Busy) => IDLE,
            Err(error) => {
                if !is_failing {
                    log::error!(
                        "checkpoints fail: {error}. Requests go on; the WAL grows until they succeed"
                    );
                }
                is_failing = true;
                IDLE
            }
        });
    })
}
