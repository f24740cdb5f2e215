//! The key of a request: whether it is valid, may run completions, and has some of its budget left.

use crate::error::{ApiError, Failure, FailureCause};
use crate::keys::{Budget, Key, KeyState, Permission};
use crate::secret::SecretDigest;
use crate::store::Store;
use crate::text::grouped;
use crate::when::{self, Zone};

/// Looks up a key, as the last commit of any process left it, and checks revocation and expiry. The
/// budget is that of a request that was created at this time.
pub fn authenticate(digest: &SecretDigest, store: &Store, created: i64) -> Result<Key, Failure> {
    let key = store.keys.find(digest, created).map_err(|error| {
        let message = "The API keys can't be read at the moment. Try again later.";
        Failure::unavailable(error.cause(), message, error.details("keys"))
    })?;
    let Some((key, ends)) = key else {
        let message = "There is no such API key. Check that it was copied whole.";
        return Err(refused(FailureCause::UnknownKey, None, message));
    };
    let now = when::now();
    match key.state(now) {
        KeyState::Revoked => Err(revoked(key.id)),
        _ if ends.is_some_and(|ends| ends <= now) => Err(replaced(key.id)),
        KeyState::Active | KeyState::Expiring => Ok(key),
        KeyState::Expired => {
            let message = "This API key has expired. Ask for a new one.";
            Err(refused(FailureCause::Expired, Some(key.id), message))
        }
    }
}

pub fn revoked(key_id: String) -> Failure {
    let message = "This API key was revoked. Ask for a new one.";
    refused(FailureCause::Revoked, Some(key_id), message)
}

pub fn replaced(key_id: String) -> Failure {
    let message = "This API key's secret was replaced. Use the new one, or ask the operator of this service for it.";
    refused(FailureCause::Replaced, Some(key_id), message)
}

fn refused(cause: FailureCause, key_id: Option<String>, message: &'static str) -> Failure {
    Failure {
        key_id,
        ..Failure::new(ApiError::InvalidApiKey, cause, message)
    }
}

pub fn check_permission(permissions: &[Permission]) -> Result<(), Failure> {
    if permissions.contains(&Permission::Completions) {
        return Ok(());
    }
    let message = "This API key may not run completions. Use one that has the permission.";
    Err(Failure::new(
        ApiError::InsufficientPermission,
        FailureCause::Permission,
        message,
    ))
}

/// Refuses a key that has used its budget for the period in which the request was created.
pub fn check_budget(budget: Option<Budget>, created: i64, zone: &Zone) -> Result<(), Failure> {
    let Some(Budget { tokens, per, used }) = budget.filter(Budget::is_used_up) else {
        return Ok(());
    };
    let message = format!(
        "This API key has used its budget: {} of {} tokens per {}. It is renewed at {}. If you need more \
         before then, ask the operator of this service to raise it.",
        grouped(used),
        grouped(tokens),
        per.as_str(),
        zone.format_minute(Some(per.containing(created, zone).until)),
    );
    let failure = Failure::new(
        ApiError::InsufficientPermission,
        FailureCause::Budget,
        message,
    );
    Err(Failure {
        no_retry: true,
        ..failure
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_used_budget_is_refused_with_the_time_of_its_renewal() {
        let budget = |text, used| {
            let budget = Budget::parse(text).expect("a budget");
            Some(Budget { used, ..budget })
        };
        // 2001-12-31, in the last second.
        let created = 1_009_843_199;
        for good in [None, budget("1000/day", 999)] {
            assert!(check_budget(good, created, &Zone::utc()).is_ok());
        }
        for (text, used, part) in [
            (
                "1000/day",
                1000,
                "1,000 of 1,000 tokens per day. It is renewed at 2002-01-01 00:00Z.",
            ),
            (
                "1000000/month",
                1_000_250,
                "1,000,250 of 1,000,000 tokens per month. It is renewed at 2002-01-01 00:00Z.",
            ),
        ] {
            let failure =
                check_budget(budget(text, used), created, &Zone::utc()).expect_err("it is used up");
            assert!(failure.message.contains(part), "{}", failure.message);
            assert!(
                !failure.message.contains("another key"),
                "{}",
                failure.message
            );
            assert_eq!(
                (failure.error.status(), failure.cause, failure.no_retry),
                (403, FailureCause::Budget, true)
            );
        }
    }
}
