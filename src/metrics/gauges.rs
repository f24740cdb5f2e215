//! What a scrape reads elsewhere: the listener, the ledger, the runtimes and the keys.

use std::cmp::Reverse;

use super::exposition::MetricsText;
use crate::keys::{Budget, Key};
use crate::listener::{LoadEvent, Snapshot};
use crate::runtime::RuntimeStatus;

/// The most keys with series of their own: those that have used the largest share of their budget.
const MOST_BUDGETS: usize = 100;

/// The state of the ledger at a scrape.
#[derive(Clone, Copy)]
pub struct LedgerGauges {
    pub is_available: bool,
    pub wal_bytes: u64,
}

/// Writes the listener's load and its limits, and the state of the ledger.
pub fn write_gauges(text: &mut MetricsText, load: &Snapshot, ledger: LedgerGauges) {
    let Snapshot {
        workers,
        queue,
        connections,
        buffered_bytes,
        ..
    } = load;
    for (name, help, value) in [
        (
            "workers_busy",
            "Workers that process a request.",
            workers.now,
        ),
        ("workers", "Workers in the pool.", workers.limit),
        (
            "queue_length",
            "Complete requests that wait for a worker.",
            queue.now,
        ),
        (
            "queue_limit",
            "Requests that may wait; one more is shed.",
            queue.limit,
        ),
        (
            "connections_open",
            "Open connections, idle ones too.",
            connections.now,
        ),
        (
            "connections_limit",
            "Connections that may be open.",
            connections.limit,
        ),
        (
            "buffered_bytes",
            "Bytes buffered for clients.",
            buffered_bytes.now,
        ),
        (
            "buffered_limit_bytes",
            "Bytes that may be buffered.",
            buffered_bytes.limit,
        ),
        (
            "ledger_available",
            "1 if the ledger accepts rows; 0: requests get 503.",
            ledger.is_available.into(),
        ),
        (
            "wal_bytes",
            "Bytes of the database's WAL that are in use.",
            ledger.wal_bytes as usize,
        ),
    ] {
        text.family("gauge", &format!("adriaticum_{name}"), help)
            .with("", value);
    }
}

pub fn write_shed(text: &mut MetricsText, load: &Snapshot) {
    text.counter(
        "adriaticum_connections_accepted_total",
        "Connections accepted.",
    )
    .with("", load.accepted);
    let help = "Connections closed because there was no room: new ones, and unfinished or idle ones that were evicted.";
    text.counter("adriaticum_connections_shed_total", help)
        .with("which=\"new\"", load.count_of(LoadEvent::Rejected))
        .with(
            "which=\"unfinished\"",
            load.count_of(LoadEvent::UnfinishedEvicted),
        )
        .with("which=\"idle\"", load.count_of(LoadEvent::IdleEvicted));
    text.counter(
        "adriaticum_requests_shed_total",
        "Requests answered 503 because there was no room.",
    )
    .with("reason=\"queue\"", load.count_of(LoadEvent::QueueFull))
    .with("reason=\"console\"", load.count_of(LoadEvent::ConsoleFull))
    .with("reason=\"buffer\"", load.count_of(LoadEvent::BuffersFull));
    let help = "Requests whose client went away before their answer.";
    text.counter("adriaticum_requests_abandoned_total", help)
        .with(
            "phase=\"waiting\"",
            load.count_of(LoadEvent::AbandonedWaiting),
        )
        .with(
            "phase=\"running\"",
            load.count_of(LoadEvent::AbandonedRunning),
        );
}

pub fn write_runtimes(text: &mut MetricsText, runtimes: &[RuntimeStatus]) {
    let mut write = |kind: &str, name: &str, help: &str, value: fn(&RuntimeStatus) -> u64| {
        let family = text.family(kind, &format!("adriaticum_runtime_{name}"), help);
        for runtime in runtimes {
            family.with(&format!("runtime=\"{}\"", runtime.url), value(runtime));
        }
    };
    let help =
        "1 if the runtime works; 0: its last call or probe failed, so others are called first.";
    write("gauge", "up", help, |runtime| {
        runtime.failed_since.is_none().into()
    });
    write(
        "gauge",
        "running",
        "Calls that the runtime processes.",
        |runtime| runtime.running as u64,
    );
    let help = "Calls and probes of the runtime that failed, also if another runtime then took the request.";
    write("counter", "failures_total", help, |runtime| {
        runtime.failures
    });
}

/// Writes two gauges for each key, which an alert compares.
pub fn write_budgets(text: &mut MetricsText, keys: &[Key]) {
    let mut budgets: Vec<(&Key, Budget)> = keys
        .iter()
        .filter_map(|key| Some((key, key.terms.budget?)))
        .collect();
    budgets.sort_by_key(|(_, budget)| Reverse(budget.percent()));
    budgets.truncate(MOST_BUDGETS);
    let mut write = |name: &str, help: &str, value: fn(Budget) -> i64| {
        let family = text.family("gauge", name, help);
        for (key, budget) in &budgets {
            let (per, name) = (
                budget.per.as_str(),
                key.name.replace('\\', r"\\").replace('"', r#"\""#),
            );
            family.with(
                &format!("key=\"{}\",name=\"{name}\",per=\"{per}\"", key.id),
                value(*budget),
            );
        }
    };
    let help =
        "The tokens that a key may use in a calendar day or month of the database's time zone.";
    write("adriaticum_key_budget_tokens", help, |budget| budget.tokens);
    let help = "The tokens that a key has used of its budget, at all gateways.";
    write("adriaticum_key_budget_used_tokens", help, |budget| {
        budget.used
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::KeyTerms;

    #[test]
    fn the_budgets_with_the_largest_used_share_have_series() {
        let mut text = MetricsText::default();
        let key = |number: i64| Key {
            id: format!("key_{number}"),
            name: r#"a "b\"#.into(),
            terms: KeyTerms {
                budget: Budget::parse("1000/month").map(|budget| Budget {
                    used: 10 * number,
                    ..budget
                }),
                ..KeyTerms::example()
            },
            ..Key::example()
        };
        write_budgets(
            &mut text,
            &(0..=MOST_BUDGETS as i64)
                .map(key)
                .chain([Key::example()])
                .collect::<Vec<_>>(),
        );
        let line = |line: &str| text.text.lines().any(|found| found == line);
        assert!(
            line(
                "adriaticum_key_budget_tokens{key=\"key_100\",name=\"a \\\"b\\\\\",per=\"month\"} 1000"
            ),
            "{}",
            text.text
        );
        assert!(line(
            "adriaticum_key_budget_used_tokens{key=\"key_1\",name=\"a \\\"b\\\\\",per=\"month\"} 10"
        ));
        assert!(
            !text.text.contains("\"key_0\"") && !text.text.contains("example"),
            "{}",
            text.text
        );
    }
}
