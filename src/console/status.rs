//! The status page: the results of the checks, the queue, the gateways, and facts about the service.

use std::cmp::Reverse;
use std::time::Duration;

use maud::{Markup, html};

use super::check_runner::CheckRun;
use super::html_table::{cards, heading, scrolling};
use super::layout::{self, form_token};
use super::page_request::Operator;
use super::{Console, PageResult, format};
use crate::checks::{self, Finding, Verdict};
use crate::config::GroundingMode;
use crate::listener::{Cause, Level};
use crate::runtime::RuntimeStatus;
use crate::store::{CLOCK_SLACK, Gateway, StoreError};
use crate::text::{count, grouped};
use crate::when;

/// The age at which the results of the checks are too old: a check costs a token of the runtime.
const MAX_AGE: Duration = Duration::from_secs(60);

/// A gateway that was seen within this many seconds is running: it reports about every second.
const SEEN_LATELY: i64 = 5;

pub fn page(operator: &Operator) -> PageResult {
    let console = operator.console;
    let (found, is_running) = console.checks.latest(console, MAX_AGE);
    let parts = parts(console, found.as_deref());
    let content = html! {
        main {
            div.head {
                h1 { "Status" }
                form method="post" action="/status" {
                    (form_token(operator.session))
                    button type="submit" disabled[is_running] { "Check again" }
                }
            }
            (verdict(&parts, found.as_deref(), is_running))
            (table(&parts))
            (queue_by_key(console)?)
            (gateways(console)?)
            (facts(console)?)
        }
    };
    let response = layout::operator_page(operator, "/status", "Status", &content);
    // The page reloads without a script until the checks are done.
    Ok(if is_running { response.with("refresh", "1; url=/status") } else { response })
}

pub fn check_again(operator: &Operator) -> PageResult {
    operator.console.checks.latest(operator.console, Duration::ZERO);
    Ok(layout::redirect("/status"))
}

/// The state of a part that completions need.
struct PartState {
    name: Markup,
    is_runtime: bool,
    verdict: Option<Verdict>,
    details: Markup,
}

/// Combines the results of the checks with the calls of the API since. Failing parts come first.
fn parts(console: &Console, found: Option<&CheckRun>) -> Vec<PartState> {
    let mut runtimes = console.monitoring.runtimes.as_ref().map_or_else(Vec::new, |all| all.status());
    let mut parts = Vec::new();
    for finding in found.iter().flat_map(|run| &run.findings) {
        let place = runtimes.iter().position(|runtime| Some(&runtime.url) == finding.runtime.as_ref());
        parts.push(match place {
            Some(place) => runtime(&runtimes.remove(place), Some(finding)),
            None => PartState {
                name: html! { (finding.part) },
                is_runtime: false,
                verdict: Some(finding.status),
                details: html! { span.text { (finding.message) } },
            },
        });
    }
    // The runtimes before the first check has ended.
    parts.extend(runtimes.iter().map(|status| runtime(status, None)));
    parts.sort_by_key(|part| Reverse(part.verdict));
    parts
}

/// The state of a runtime: one that requests avoid has failed, whatever a check says.
fn runtime(status: &RuntimeStatus, finding: Option<&Finding>) -> PartState {
    let verdict = match (status.failed_since, finding) {
        (Some(_), _) => Some(Verdict::Fail),
        (None, Some(finding)) => Some(finding.status),
        (None, None) => status.median.map(|_| Verdict::Ok),
    };
    PartState {
        name: html! { "runtime" },
        is_runtime: true,
        verdict,
        details: html! {
            span.text { @match finding { Some(finding) => (finding.message), None => (status.url) } }
            br;
            span.muted {
                (grouped(status.running as i64)) " in progress"
                @if let Some(time) = status.failed_since { ", failed since " (format::second(time)) }
                @if let Some(time) = status.median { ", p50 " (format::exact_duration(when::milliseconds(time))) " of the last 100 answers" }
                @if let Some((time, error)) = &status.last_error { ", last error " (format::second(*time)) ": " span.text { (error) } }
            }
        },
    }
}

fn verdict(parts: &[PartState], found: Option<&CheckRun>, is_running: bool) -> Markup {
    let number = |is_runtime: bool, verdict: Verdict| {
        parts.iter().filter(|part| part.is_runtime == is_runtime && part.verdict == Some(verdict)).count()
    };
    let (others, runtimes) = (number(false, Verdict::Fail), number(true, Verdict::Fail));
    let all_runtimes = parts.iter().filter(|part| part.is_runtime).count();
    let warnings = number(false, Verdict::Warn) + number(true, Verdict::Warn);
    html! {
        p.lead role="status" {
            @if others > 0 || (runtimes > 0 && runtimes == all_runtimes) {
                span.badge.bad { "failing" } " " (count((others + runtimes) as i64, "part")) " that completions need can’t be used."
            } @else if runtimes > 0 {
                span.badge.warn { "degraded: " (runtimes) " of " (count(all_runtimes as i64, "runtime")) }
                " Completions are run by the others."
            } @else if found.is_none() { "Checking every part that completions need…" }
            @else if warnings > 0 { span.badge.warn { "works" } " Completions can be run; " (count(warnings as i64, "note")) " below." }
            @else { span.badge.good { "works" } " Every part that completions need is available." }
            @if let Some(found) = found {
                span.muted { " Checked at " (format::second(found.time)) " UTC" @if is_running { ", checking again…" } }
            }
        }
    }
}

fn table(parts: &[PartState]) -> Markup {
    let cells = |part: &PartState| {
        let badge = match part.verdict {
            Some(Verdict::Ok) => html! { span.badge.good { "ok" } },
            Some(Verdict::Warn) => html! { span.badge.warn { "note" } },
            Some(Verdict::Fail) => html! { span.badge.bad { "fails" } },
            None => html! { span.badge { "not asked yet" } },
        };
        vec![part.name.clone(), badge, part.details.clone()]
    };
    cards("findings", &["Part", "State", "Details"].map(heading), parts.iter().map(cells))
}

fn facts(console: &Console) -> Result<Markup, StoreError> {
    let load = console.monitoring.load.snapshot();
    let [buffered, buffer_limit] =
        [load.buffered_bytes.now, load.buffered_bytes.most].map(|bytes| bytes as f64 / 1024.0 / 1024.0);
    let now = when::now();
    let wal = console.store.wal_figures();
    let file = console.config.database.file();
    let size = file.and_then(|file| file.metadata().ok()).map(|file| file.len());
    let last = |time: Option<i64>| html! { @match time { Some(time) => (format::second(time)), None => "none since the start" } };
    let clock = match file {
        Some(_) => None,
        None => Some(console.store.clock_difference()?),
    };
    Ok(html! {
        h2 { "The service" }
        dl.facts {
            dt { "Version" } dd { (env!("ADRIATICUM_VERSION")) }
            dt { "Uptime" } dd { (format::long_duration(console.started.elapsed())) }
            dt { "Workers busy" } dd { (level(load.workers)) }
            dt { "Queue" } dd { (level(load.queue)) }
            dt { "Connections" } dd { (level(load.connections)) }
            dt { "Buffers" } dd { (format!("{buffered:.1} of {buffer_limit:.1} MiB")) }
            dt { "Rejected (no room)" } dd { (count((load.of(Cause::QueueFull) + load.of(Cause::BuffersFull)) as i64, "request")) " since the start" }
            dt { "Search" } dd { (search(console)) }
            @if let Some(acceptor) = &console.monitoring.acceptor {
                dt { "Certificate" } dd { @match acceptor.expires() { Some(time) => (certificate(time, now)), None => "in use; its end can’t be read" } }
            }
            @if let Some(ahead) = clock { dt { "Clock" } dd { (clock_difference(ahead)) } }
        }
        h2 { "The ledger" }
        dl.facts {
            dt { "Database" } dd {
                @match size { Some(size) => { (format::bytes(size)) ", and " (format::bytes(wal.bytes)) " of WAL" }, None => (console.config.database) }
            }
            @if let Some(file) = file {
                dt { "Last checkpoint" } dd { (last(wal.last_checkpoint)) }
                dt { "Free disk space" } dd { @match checks::bytes_free(file) { Some(free) => (format::bytes(free)), None => "not known" } }
            }
        }
    })
}

/// The grounding mode, and the results of searches since the start.
fn search(console: &Console) -> String {
    let mode = match console.config.search.grounding {
        GroundingMode::Off => return "off: answers are not grounded".into(),
        GroundingMode::Always => "always",
        GroundingMode::Match => "match",
        GroundingMode::Auto => "auto",
    };
    let [found, nothing, unavailable] =
        console.monitoring.metrics.searches().map(|number| grouped(number as i64));
    format!(
        "{mode}; since the start {found} searches with passages, {nothing} without, {unavailable} unavailable"
    )
}

/// The expiry of the certificate. The check warns in time.
fn certificate(expires: i64, now: i64) -> Markup {
    html! {
        @if expires > now { "expires " (format::minute(expires)) ", in " (format::long_duration(Duration::from_secs((expires - now) as u64))) }
        @else { span.badge.bad { "expired" } " " (format::minute(expires)) }
    }
}

/// The difference between this host's clock and the database's, by which gateways see each other.
fn clock_difference(ahead: f64) -> Markup {
    let way = if ahead > 0.0 { "ahead of" } else { "behind" };
    html! {
        @if ahead.abs() > CLOCK_SLACK { span.badge.warn { "differs" } " " }
        @if ahead.abs() < 0.5 { "agrees with the database’s" }
        @else { (format!("{:.1} seconds ", ahead.abs())) (way) " the database’s" }
    }
}

/// A table of the gateways that share the database; nothing if it is a file.
fn gateways(console: &Console) -> Result<Markup, StoreError> {
    let gateways = console.shared_gateways()?;
    let cells = |gateway: &Gateway| {
        let ago = gateway.seen_ago;
        vec![
            html! { span.text { (gateway.name) } },
            html! { (gateway.version) },
            html! { span.text { (gateway.address) } },
            html! {
                @if ago > SEEN_LATELY { span.badge.bad { "not seen" } " for " (format::long_duration(Duration::from_secs(ago as u64))) }
                @else { span.badge.good { "now" } }
            },
        ]
    };
    let headings = ["Gateway", "Version", "Address", "Last seen"].map(heading);
    Ok(html! {
        @if !gateways.is_empty() {
            h2 { "Gateways" }
            (scrolling("gateways", "Gateways", &headings, gateways.iter().map(cells)))
        }
    })
}

/// A table of the keys whose requests run or wait; nothing if there are none.
fn queue_by_key(console: &Console) -> Result<Markup, StoreError> {
    let mut lanes = console.monitoring.load.lanes();
    if lanes.is_empty() {
        return Ok(html! {});
    }
    let keys = console.store.list_keys()?;
    lanes.sort_by_key(|lane| Reverse((lane.waiting, lane.running, lane.shed)));
    let rows = lanes.iter().map(|lane| {
        let name = keys.iter().find(|key| key.id == *lane.name).map_or(&*lane.name, |key| &key.name);
        let figures = [
            grouped(lane.waiting as i64),
            lane.longest_wait.map_or("–".into(), format::long_duration),
            grouped(lane.running as i64),
            lane.limit.map_or("–".into(), |limit| grouped(limit as i64)),
            grouped(lane.shed as i64),
        ];
        [name.to_owned()].into_iter().chain(figures).map(|text| html! { (text) }).collect()
    });
    let headings = ["Key", "Waiting", "Longest wait", "Running", "Limit", "Shed"].map(heading);
    Ok(html! {
        h2 { "Queue by key" }
        (scrolling("numbers", "Queue by key", &headings, rows))
        p.muted { "Shed requests are counted since the start." }
    })
}

fn level(level: Level) -> String {
    format!("{} of {}", grouped(level.now as i64), grouped(level.most as i64))
}
