//! The verdict on each part that completions need, for the status page and for the dot that every
//! page has. It needs no check: of the last check and the calls of the API since, the newer counts.

use std::cmp::Reverse;
use std::time::Instant;

use super::check_runner::CheckRun;
use crate::checks::{self, Finding, Verdict};
use crate::config::GroundingMode;
use crate::console::Console;
use crate::runtime::RuntimeStatus;
use crate::text::count;
use crate::when;

pub struct PartState {
    pub name: &'static str,
    /// `None` if it was neither checked nor called yet.
    pub verdict: Option<Verdict>,
    pub message: String,
    /// `None` if the part is not a runtime.
    pub runtime: Option<RuntimeStatus>,
}

/// A problem that the operator has to know on every page.
pub struct Trouble {
    /// The class of the badge and the dot.
    pub class: &'static str,
    pub words: String,
    pub meaning: String,
}

/// Returns `None` if completions can be run, by every runtime.
pub fn trouble(parts: &[PartState]) -> Option<Trouble> {
    let (runtimes, others): (Vec<&PartState>, Vec<&PartState>) =
        parts.iter().partition(|part| part.runtime.is_some());
    let failing = |parts: &[&PartState]| {
        parts
            .iter()
            .filter(|part| part.verdict == Some(Verdict::Fail))
            .count()
    };
    match (failing(&others), failing(&runtimes), runtimes.len()) {
        (0, 0, _) => None,
        (0, down, all) if down < all => Some(Trouble {
            class: "warn",
            words: format!("degraded: {down} of {}", count(all as i64, "runtime")),
            meaning: "Completions are run by the others.".into(),
        }),
        (others, down, _) => Some(Trouble {
            class: "bad",
            words: "failing".into(),
            meaning: format!(
                "{} that completions need can’t be used.",
                count((others + down) as i64, "part")
            ),
        }),
    }
}

/// The parts, failing ones first.
pub fn parts(console: &Console) -> Vec<PartState> {
    let found = console.checks.latest();
    let found = found.as_deref();
    let mut runtimes = console.monitoring.runtime_status();
    let known = known_failures(console);
    let is_off = console.config.search.grounding == GroundingMode::Off;
    let is_shown = |finding: &&Finding| match (finding.part, finding.status) {
        (_, Verdict::Warn) => true,
        // The process knows whether the ledger can be written now.
        ("database", Verdict::Fail) => false,
        ("search", Verdict::Ok) => !is_off,
        (part, _) => known.iter().all(|failure| failure.part != part),
    };
    let mut parts = Vec::new();
    for finding in known
        .iter()
        .chain(found.iter().flat_map(|run| &run.findings).filter(is_shown))
    {
        let place = runtimes
            .iter()
            .position(|runtime| Some(&runtime.url) == finding.runtime.as_ref());
        parts.push(match place {
            Some(place) => runtime(runtimes.remove(place), Some(finding), found),
            None => PartState {
                name: finding.part,
                verdict: Some(finding.status),
                message: finding.message.clone(),
                runtime: None,
            },
        });
    }
    // The runtimes before the first check has ended.
    let unchecked = runtimes.into_iter();
    parts.extend(unchecked.map(|status| runtime(status, None, None)));
    parts.sort_by_key(|part| Reverse(part.verdict));
    parts
}

/// The failures that the process knows without a check.
fn known_failures(console: &Console) -> Vec<Finding> {
    let monitoring = &console.monitoring;
    let mut failures = Vec::new();
    if monitoring.runtimes.is_none() {
        failures.push(checks::not_configured());
    }
    if let Some(error) = monitoring.store.ledger.outage() {
        failures.push(Finding::fail(
            "database",
            checks::database_failed(&console.config, error).text,
        ));
    }
    if let Some(acceptor) = &monitoring.acceptor {
        let finding = checks::judge_certificate(&acceptor.certificate(), when::now());
        failures.extend(finding.filter(|finding| finding.status == Verdict::Fail));
    }
    failures
}

fn runtime(
    status: RuntimeStatus,
    finding: Option<&Finding>,
    found: Option<&CheckRun>,
) -> PartState {
    let is_newer =
        |time: Option<Instant>| time.is_some_and(|time| found.is_none_or(|run| time > run.at));
    let (verdict, message) = match finding {
        _ if status.is_failing && is_newer(status.last_failure) => (
            Some(Verdict::Fail),
            format!("{}: the last calls failed", status.url),
        ),
        Some(finding) if finding.status == Verdict::Fail && is_newer(status.last_answer) => (
            Some(Verdict::Ok),
            format!("{}: has answered since the check", status.url),
        ),
        Some(finding) => (Some(finding.status), finding.message.clone()),
        None => (status.last_answer.map(|_| Verdict::Ok), status.url.clone()),
    };
    PartState {
        name: "runtime",
        verdict,
        message,
        runtime: Some(status),
    }
}
