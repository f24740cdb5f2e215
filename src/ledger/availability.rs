//! Whether the ledger accepts rows. While it does not, requests are refused before they cost an
//! inference.

use std::panic::{self, AssertUnwindSafe};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::database::{DatabaseError, Result};
use crate::mutex::lock;

/// If a write has waited for this long, the ledger is unavailable. The write may go on.
const LONG_WAIT: Duration = Duration::from_secs(5);

/// The pause before a test write. It doubles if rows fail again right after a test that succeeded:
/// otherwise every worker would spend an inference each second on a row that fails.
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

#[derive(Default)]
pub(super) struct Availability(Mutex<AvailabilityState>);

#[derive(Default)]
struct AvailabilityState {
    /// The reason why it is unavailable.
    failure: Option<DatabaseError>,
    next_test: Option<Instant>,
    pause: Duration,
    /// Only a test write has succeeded since the last failure, and no row.
    is_unproven: bool,
    /// The time when the test write in progress began.
    testing: Option<Instant>,
}

impl Availability {
    /// The reason why a row could not be written now. `waiting` is the time since which the oldest
    /// row has waited.
    pub fn failure(&self, waiting: Option<Instant>) -> Option<DatabaseError> {
        let state = lock(&self.0);
        let mut waiting = waiting.into_iter().chain(state.testing);
        let is_late = || {
            waiting
                .any(|since| since.elapsed() >= LONG_WAIT)
                .then_some(DatabaseError::Stalled)
        };
        state.failure.clone().or_else(is_late)
    }

    /// Notes the results of a group. A row that fails alone does not count, and a key that was
    /// refused says nothing.
    pub fn note_group(&self, results: &[Result<()>]) {
        let mut failures = results.iter().filter_map(|result| result.as_ref().err());
        let mut state = lock(&self.0);
        if results.iter().any(Result::is_ok) {
            state.recover();
            (state.is_unproven, state.pause) = (false, SHORTEST_PAUSE);
        } else if let Some(error) =
            failures.find(|error| !matches!(error, DatabaseError::KeyRevoked))
        {
            state.note_failed_rows(error);
        }
    }

    pub fn is_test_due(&self, now: Instant) -> bool {
        lock(&self.0)
            .next_test
            .is_some_and(|next_test| now >= next_test)
    }

    /// Runs a test write and notes its result. A panic is a failure: otherwise the ledger would
    /// stay unavailable, because no row and no other test would be tried.
    pub fn test(&self, write: impl FnOnce() -> Result<()>) {
        lock(&self.0).testing = Some(Instant::now());
        let result =
            panic::catch_unwind(AssertUnwindSafe(write)).unwrap_or(Err(DatabaseError::Panicked));
        let mut state = lock(&self.0);
        state.testing = None;
        match result {
            Ok(()) if state.failure.is_some() => {
                state.recover();
                state.is_unproven = true;
            }
            Ok(()) => {}
            Err(error) => state.note_failed_test(&error),
        }
    }

    /// Notes that a look at the database has found that nothing can be written to it.
    pub fn note_failure(&self, error: &DatabaseError) {
        lock(&self.0).note_failed_test(error);
    }
}

impl AvailabilityState {
    fn note_failed_rows(&mut self, error: &DatabaseError) {
        if self.fail(error) {
            let pause = if self.is_unproven {
                self.pause * 2
            } else {
                SHORTEST_PAUSE
            };
            self.pause = pause.clamp(SHORTEST_PAUSE, LONGEST_PAUSE);
            self.next_test = Some(Instant::now() + self.pause);
        }
    }

    fn note_failed_test(&mut self, error: &DatabaseError) {
        self.fail(error);
        self.next_test = Some(Instant::now() + self.pause.max(SHORTEST_PAUSE));
    }

    /// Returns whether the ledger was available before.
    fn fail(&mut self, error: &DatabaseError) -> bool {
        let was_available = self.failure.replace(error.clone()).is_none();
        // The engine logs by itself that the database is lost, and that it is back.
        if was_available && !matches!(error, DatabaseError::Unavailable(_)) {
            log::error!(
                "the ledger can't be written: {error}. Requests get 503, and the runtime is not called"
            );
        }
        was_available
    }

    fn recover(&mut self) {
        self.next_test = None;
        match self.failure.take() {
            None | Some(DatabaseError::Unavailable(_)) => {}
            Some(_) => log::info!("the ledger can be written again"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_or_a_row_ends_it_and_a_row_that_fails_alone_does_not_begin_it() {
        let availability = Availability::default();
        let fails = || availability.failure(None).is_some();
        availability.note_group(&[Err(DatabaseError::NoRow), Ok(())]);
        availability.note_group(&[Err(DatabaseError::KeyRevoked)]);
        assert!(!fails() && !availability.is_test_due(Instant::now() + LONGEST_PAUSE));
        let ends: [&dyn Fn(); 2] = [&|| availability.note_group(&[Ok(())]), &|| {
            availability.test(|| Ok(()))
        }];
        for end in ends {
            availability.note_group(&[Err(DatabaseError::KeyRevoked), Err(DatabaseError::Full)]);
            assert!(matches!(
                availability.failure(None),
                Some(DatabaseError::Full)
            ));
            assert!(!availability.is_test_due(Instant::now()));
            assert!(availability.is_test_due(Instant::now() + SHORTEST_PAUSE));
            availability.test(|| Err(DatabaseError::ReadOnly));
            assert!(
                matches!(availability.failure(None), Some(DatabaseError::ReadOnly)),
                "the last reason"
            );
            end();
            assert!(!fails());
        }
    }

    #[test]
    fn a_test_that_succeeds_while_rows_fail_comes_less_and_less_often() {
        let availability = Availability::default();
        let mut pauses = Vec::new();
        for _ in 0..9 {
            availability.note_group(&[Err(DatabaseError::NoRow)]);
            let state = lock(&availability.0);
            pauses.push(state.pause.as_secs());
            drop(state);
            availability.test(|| Ok(()));
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        availability.note_group(&[Ok(())]);
        availability.note_group(&[Err(DatabaseError::NoRow)]);
        assert_eq!(
            lock(&availability.0).pause,
            SHORTEST_PAUSE,
            "a row was written meanwhile"
        );
    }

    #[test]
    fn a_test_that_panics_is_followed_by_another() {
        let availability = Availability::default();
        availability.test(|| panic!("on purpose"));
        assert!(matches!(
            availability.failure(None),
            Some(DatabaseError::Panicked)
        ));
        assert!(availability.is_test_due(Instant::now() + SHORTEST_PAUSE));
        availability.test(|| Ok(()));
        assert!(availability.failure(None).is_none());
    }

    #[test]
    fn a_write_that_waits_makes_it_unavailable() {
        let availability = Availability::default();
        let ago = |time: Duration| Instant::now().checked_sub(time);
        assert!(availability.failure(ago(LONG_WAIT / 2)).is_none());
        assert!(matches!(
            availability.failure(ago(LONG_WAIT)),
            Some(DatabaseError::Stalled)
        ));
        lock(&availability.0).testing = ago(LONG_WAIT);
        assert!(
            availability.failure(None).is_some(),
            "a test that hangs, too"
        );
    }
}
