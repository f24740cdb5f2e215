//! How many tokens a key may use.

use crate::error::{ApiError, Failure, FailureCause};
use crate::store::{Budget, KeyBudget};
use crate::text::grouped;
use crate::when;

/// Refuses a key that has used its budget for the period in which the request was created.
pub fn check(budget: Option<KeyBudget>, created: i64) -> Result<(), Failure> {
    let Some(KeyBudget { budget: Budget { tokens, per }, used }) = budget.filter(KeyBudget::is_used_up)
    else {
        return Ok(());
    };
    let message = format!(
        "This API key has used its budget: {} of {} tokens per {}. It is renewed at {}. Use another key until then, or ask for a \
         larger budget.",
        grouped(used),
        grouped(tokens),
        per.as_str(),
        when::format_minute(Some(per.around(created).until)),
    );
    let failure = Failure::new(ApiError::InsufficientPermission, FailureCause::Budget, message);
    Err(Failure { no_retry: true, ..failure })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_says_what_was_used_and_when_it_is_renewed() {
        let budget = |text, used| Some(KeyBudget { budget: Budget::parse(text).expect("a budget"), used });
        // 2001-12-31, in the last second.
        let created = 1_009_843_199;
        for good in [None, budget("1000/day", 999)] {
            assert!(check(good, created).is_ok());
        }
        for (text, used, part) in [
            ("1000/day", 1000, "1,000 of 1,000 tokens per day. It is renewed at 2002-01-01 00:00Z."),
            (
                "1000000/month",
                1_000_250,
                "1,000,250 of 1,000,000 tokens per month. It is renewed at 2002-01-01 00:00Z.",
            ),
        ] {
            let failure = check(budget(text, used), created).expect_err("it is used up");
            assert!(failure.message.contains(part), "{}", failure.message);
            assert_eq!(
                (failure.error.status(), failure.cause, failure.no_retry),
                (403, FailureCause::Budget, true)
            );
        }
    }
}
