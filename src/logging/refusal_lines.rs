//! A rate limit on log lines about requests without a valid key: otherwise any client could fill
//! the disk. Requests beyond it are counted for a summary.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::error::FailureCause;
use crate::network::ClientNetwork;
use crate::rate_limiter::RateLimiter;

/// The lines that are allowed at once.
const BURST: u32 = 20;

/// The most clients that are counted at once.
const CLIENTS: usize = 256;

pub(super) struct RefusalLines {
    lines: RateLimiter,
    /// When the first refusal was counted.
    since: Option<Instant>,
    /// The refusals without a line.
    causes: BTreeMap<FailureCause, u64>,
    clients: BTreeMap<Option<ClientNetwork>, u64>,
}

impl RefusalLines {
    pub const fn new() -> Self {
        Self {
            lines: RateLimiter::new(BURST, Duration::from_secs(1)),
            since: None,
            causes: BTreeMap::new(),
            clients: BTreeMap::new(),
        }
    }

    /// Returns true if a refusal gets a line of its own. Otherwise counts it.
    pub fn allow(
        &mut self,
        cause: FailureCause,
        client: Option<ClientNetwork>,
        now: Instant,
    ) -> bool {
        if self.lines.allow(now) {
            return true;
        }
        self.since.get_or_insert(now);
        *self.causes.entry(cause).or_default() += 1;
        if self.clients.len() < CLIENTS || self.clients.contains_key(&client) {
            *self.clients.entry(client).or_default() += 1;
        } else {
            // A client with more than a 256th of all refusals is never lost (Misra and Gries,
            // 1982).
            self.clients.retain(|_, count| {
                *count -= 1;
                *count > 0
            });
        }
        false
    }

    /// Returns a line about the counted refusals and resets the counts; `None` if there are none.
    pub fn sum_up(&mut self, now: Instant) -> Option<String> {
        let since = self.since.take()?;
        let mut causes: Vec<_> = std::mem::take(&mut self.causes).into_iter().collect();
        causes.sort_by_key(|&(_, count)| Reverse(count));
        let total: u64 = causes.iter().map(|(_, count)| count).sum();
        let causes: Vec<_> = causes
            .iter()
            .map(|(cause, count)| format!("{cause} {count}"))
            .collect();
        let most = std::mem::take(&mut self.clients)
            .into_iter()
            .max_by_key(|&(_, count)| count);
        let most = match most {
            Some((Some(client), _)) => format!(", most from {client}"),
            Some((None, _)) => ", most from a Unix socket".to_owned(),
            None => String::new(),
        };
        let seconds = now.saturating_duration_since(since).as_secs().max(1);
        Some(format!(
            "further requests refused without a valid key in the last {seconds} s: {total} ({}){most}",
            causes.join(", ")
        ))
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    fn address(last: u8) -> Option<ClientNetwork> {
        Some(IpAddr::from([192, 0, 2, last]).into())
    }

    #[test]
    fn a_burst_and_then_one_line_per_second() {
        let (mut budget, start) = (RefusalLines::new(), Instant::now());
        let mut lines = |second: u64| {
            let now = start + Duration::from_secs(second);
            (0..100)
                .filter(|_| budget.allow(FailureCause::NoKey, None, now))
                .count()
        };
        assert_eq!((lines(0), lines(0), lines(1), lines(4)), (20, 0, 1, 3));
        assert_eq!(
            (lines(3600), lines(3600)),
            (20, 0),
            "never more than the burst"
        );
    }

    #[test]
    fn the_rest_is_summed_up() {
        let (mut budget, start) = (RefusalLines::new(), Instant::now());
        assert!((0..20).all(|_| budget.allow(FailureCause::Host, address(9), start)));
        assert_eq!(budget.sum_up(start), None, "each had its line");
        for number in 0..30 {
            let cause = if number % 3 == 0 {
                FailureCause::NoKey
            } else {
                FailureCause::UnknownKey
            };
            assert!(!budget.allow(cause, address(1 + number % 2 * number), start));
        }
        assert_eq!(
            budget.sum_up(start + Duration::from_secs(60)).as_deref(),
            Some(
                "further requests refused without a valid key in the last 60 s: 30 (unknown_key 20, no_key 10), \
                 most from 192.0.2.1"
            )
        );
        assert_eq!(budget.sum_up(start + Duration::from_secs(120)), None);
    }

    #[test]
    fn many_addresses_do_not_hide_the_largest_or_fill_the_memory() {
        let (mut budget, start) = (RefusalLines::new(), Instant::now());
        assert!((0..BURST).all(|_| budget.allow(FailureCause::Host, None, start)));
        for number in 0..100_000_u32 {
            let client = if number % 100 == 0 {
                address(7)
            } else {
                Some(IpAddr::from(number.to_be_bytes()).into())
            };
            budget.allow(FailureCause::UnknownKey, client, start);
            assert!(budget.clients.len() <= CLIENTS);
        }
        let summary = budget.sum_up(start).expect("a line");
        assert!(
            summary.contains(": 100000 (unknown_key 100000), most from 192.0.2.7"),
            "{summary}"
        );
    }
}
