//! Status: what the checks say, and how the service is doing.

use std::cmp::Reverse;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use maud::{Markup, html};
use threadpool::ThreadPool;

use super::html_table::{cards, heading};
use super::page::{self, Part, count, form_token, rounded};
use super::visit::ConsoleSession;
use super::{Console, PageError};
use crate::checks::{self, Finding, Verdict};
use crate::config::GroundingMode;
use crate::http::Response;
use crate::listener::{Cause, Level};
use crate::runtime::RuntimeStatus;
use crate::store::CLOCK_SLACK;
use crate::text::grouped;
use crate::when;

/// For how long what the checks found is good enough: they ask the runtime for a token.
const GOOD_FOR: Duration = Duration::from_secs(60);

/// A gateway says that it is there about every second.
const SEEN_LATELY: i64 = 5;

/// What the checks found last. They have a thread of their own: a runtime that is down takes its time to say so.
pub struct Checks {
    thread: ThreadPool,
    found: Arc<Mutex<Option<Arc<CheckRun>>>>,
}

struct CheckRun {
    findings: Vec<Finding>,
    at: Instant,
    time: i64,
}

impl Checks {
    pub fn new() -> Self {
        Self { thread: ThreadPool::with_name("checks".into(), 1), found: Arc::default() }
    }

    /// Returns what was found last, and whether checks run now. Starts them if that is too old.
    fn latest(&self, console: &Console, good_for: Duration) -> (Option<Arc<CheckRun>>, bool) {
        let last = lock(&self.found);
        let is_good = last.as_ref().is_some_and(|found| found.at.elapsed() < good_for);
        if !is_good && !self.are_running() {
            // The thread has the store only while they run: at the end of the service it must not be the last that has it.
            let (config, store) = (Arc::clone(&console.config), Arc::clone(&console.store));
            let found = Arc::clone(&self.found);
            self.thread.execute(move || {
                let findings = checks::check_running_service(&config, &store);
                *lock(&found) = Some(Arc::new(CheckRun { findings, at: Instant::now(), time: when::now() }));
            });
        }
        (last.clone(), self.are_running())
    }

    fn are_running(&self) -> bool {
        self.thread.queued_count() + self.thread.active_count() > 0
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn page(console: &Console, session: &ConsoleSession) -> Result<Response, PageError> {
    let (found, is_running) = console.checks.latest(console, GOOD_FOR);
    let parts = parts(console, found.as_deref());
    let content = html! {
        main {
            div.head {
                h1 { "Status" }
                form method="post" action="/status" {
                    (form_token(session))
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
    let response = page::inside(console, session, Part::Status, "Status", &content);
    // Without a script too, the page shows what was found as soon as it was.
    Ok(if is_running { response.with("refresh", "1; url=/status") } else { response })
}

pub fn check_again(console: &Console) -> Result<Response, PageError> {
    console.checks.latest(console, Duration::ZERO);
    Ok(page::redirect("/status"))
}

/// A part that completions need, and its state.
struct PartState {
    name: Markup,
    is_runtime: bool,
    verdict: Option<Verdict>,
    details: Markup,
}

/// What the checks found, and what calls of the API have shown since; what fails comes first.
fn parts(console: &Console, found: Option<&CheckRun>) -> Vec<PartState> {
    let findings = found.map_or(&[][..], |found| &found.findings);
    let mut runtimes = console.monitoring.runtimes.as_ref().map_or_else(Vec::new, |all| all.status());
    let mut parts = Vec::new();
    for finding in findings {
        let place = runtimes.iter().position(|runtime| Some(&runtime.url) == finding.runtime.as_ref());
        parts.push(match place {
            Some(place) => runtime(&runtimes.remove(place), found.map(|found| (finding, found.time))),
            None => PartState {
                name: html! { (finding.part) },
                is_runtime: false,
                verdict: Some(finding.status),
                details: html! { span.text { (finding.message) } },
            },
        });
    }
    // Before the first check is over.
    parts.extend(runtimes.iter().map(|status| runtime(status, None)));
    parts.sort_by_key(|part| Reverse(part.verdict));
    parts
}

/// One verdict on a runtime: a failed call counts unless a later check succeeded.
fn runtime(status: &RuntimeStatus, checked: Option<(&Finding, i64)>) -> PartState {
    let address = status.url.split("//").nth(1).unwrap_or(&status.url).split('/').next().unwrap_or_default();
    let failed_since = |time: i64| status.last_error.as_ref().is_some_and(|(failed, _)| *failed >= time);
    let is_failing = status.is_failing || status.is_unreachable;
    let verdict = match checked {
        Some((_, time)) if is_failing && failed_since(time) => Some(Verdict::Fail),
        Some((finding, _)) => Some(finding.status),
        None if is_failing => Some(Verdict::Fail),
        None => status.median.map(|_| Verdict::Ok),
    };
    PartState {
        name: html! { "runtime" },
        is_runtime: true,
        verdict,
        details: html! {
            @if status.is_unreachable && verdict == Some(Verdict::Fail) { "Runtime " (address) " is unreachable. " }
            span.text { @match checked { Some((finding, _)) => (finding.message), None => (status.url) } }
            br;
            span.muted {
                (grouped(status.in_progress as i64)) " in progress"
                @if let Some(time) = status.median { ", p50 " (rounded(when::milliseconds(time))) " of the last 100 answers" }
                @if let Some((time, error)) = &status.last_error { ", last error " (page::time(*time, true)) ": " span.text { (error) } }
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
                span.muted { " Checked at " (page::time(found.time, true)) " UTC" @if is_running { ", checking again…" } }
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

fn facts(console: &Console) -> Result<Markup, PageError> {
    let load = console.monitoring.load.snapshot();
    let now = when::now();
    let ledger = console.store.state();
    let file = console.config.database.file();
    let size = file.and_then(|file| file.metadata().ok()).map(|file| file.len());
    let last = |time: Option<i64>| html! { @match time { Some(time) => (page::time(time, true)), None => "none since the start" } };
    let clock = match file {
        Some(_) => None,
        None => Some(console.store.clock_difference()?),
    };
    Ok(html! {
        h2 { "The service" }
        dl.facts {
            dt { "Version" } dd { (env!("ADRIATICUM_VERSION")) }
            dt { "Uptime" } dd { (lasted(console.started.elapsed())) }
            dt { "Workers busy" } dd { (level(load.workers)) }
            dt { "Queue" } dd { (level(load.queue)) }
            dt { "Connections" } dd { (level(load.connections)) }
            dt { "Buffers" } dd { (format!("{:.1} of {:.1} MiB", mib(load.buffered_bytes.now), mib(load.buffered_bytes.most))) }
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
                @match size { Some(size) => { (bytes(size)) ", and " (bytes(ledger.wal_bytes)) " of WAL" }, None => (console.config.database) }
            }
            @if let Some(file) = file {
                dt { "Last checkpoint" } dd { (last(ledger.last_checkpoint)) }
                dt { "Free disk space" } dd { @match checks::bytes_free(file) { Some(free) => (bytes(free)), None => "not known" } }
            }
        }
    })
}

/// When answers rest on Search, and what came of asking it.
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

/// The end of the certificate that new connections get. The check warns in time.
fn certificate(expires: i64, now: i64) -> Markup {
    html! {
        @if expires > now { "expires " (page::time(expires, false)) ", in " (lasted(Duration::from_secs((expires - now) as u64))) }
        @else { span.badge.bad { "expired" } " " (page::time(expires, false)) }
    }
}

/// How far this host's clock is from the database's, by which gateways see each other.
fn clock_difference(ahead: f64) -> Markup {
    let way = if ahead > 0.0 { "ahead of" } else { "behind" };
    html! {
        @if ahead.abs() > CLOCK_SLACK { span.badge.warn { "differs" } " " }
        @if ahead.abs() < 0.5 { "agrees with the database’s" }
        @else { (format!("{:.1} seconds ", ahead.abs())) (way) " the database’s" }
    }
}

/// The gateways that share the database; nothing if it is a file.
fn gateways(console: &Console) -> Result<Markup, PageError> {
    let gateways = console.shared_gateways()?;
    Ok(html! {
        @if !gateways.is_empty() {
            h2 { "Gateways" }
            div.scroll tabindex="0" role="region" aria-label="Gateways" {
                table {
                    thead { tr {
                        @for name in ["Gateway", "Version", "Address", "Last seen"] { th scope="col" { (name) } }
                        th.number scope="col" { "Unfinished rows" }
                    } }
                    tbody { @for gateway in gateways {
                        tr {
                            th.text scope="row" { (gateway.name) }
                            td { (gateway.version) }
                            td.text { (gateway.address) }
                            td { @if gateway.seen_ago > SEEN_LATELY { span.badge.bad { "not seen" } " for " (lasted(Duration::from_secs(gateway.seen_ago as u64))) } @else { span.badge.good { "now" } } }
                            td.number { (grouped(gateway.open_requests)) }
                        }
                    } }
                }
            }
        }
    })
}

/// Which keys' requests run and wait; nothing if there are none.
fn queue_by_key(console: &Console) -> Result<Markup, PageError> {
    let mut lanes = console.monitoring.load.lanes();
    if lanes.is_empty() {
        return Ok(html! {});
    }
    let keys = console.store.list_keys()?;
    lanes.sort_by_key(|lane| Reverse((lane.waiting, lane.running, lane.shed)));
    Ok(html! {
        h2 { "Queue by key" }
        div.scroll tabindex="0" role="region" aria-label="Queue by key" {
            table {
                thead { tr {
                    th scope="col" { "Key" }
                    @for figure in ["Waiting", "Longest wait", "Running", "Limit", "Shed"] { th.number scope="col" { (figure) } }
                } }
                tbody { @for lane in lanes {
                    tr {
                        th scope="row" { (keys.iter().find(|key| key.id == *lane.name).map_or(&*lane.name, |key| &key.name)) }
                        td.number { (lane.waiting) }
                        td.number { @match lane.longest_wait { Some(time) => (lasted(time)), None => "–" } }
                        td.number { (lane.running) }
                        td.number { @match lane.limit { Some(limit) => (limit), None => "–" } }
                        td.number { (lane.shed) }
                    }
                } }
            }
        }
        p.muted { "Shed requests are counted since the start." }
    })
}

fn level(level: Level) -> String {
    format!("{} of {}", grouped(level.now as i64), grouped(level.most as i64))
}

fn mib(bytes: usize) -> f64 {
    bytes as f64 / 1024.0 / 1024.0
}

fn lasted(time: Duration) -> String {
    let seconds = time.as_secs() as i64;
    match seconds {
        0..60 => count(seconds, "second"),
        60..3600 => count(seconds / 60, "minute"),
        3600..172_800 => format!("{}, {}", count(seconds / 3600, "hour"), count(seconds / 60 % 60, "minute")),
        _ => format!("{}, {}", count(seconds / 86_400, "day"), count(seconds / 3600 % 24, "hour")),
    }
}

fn bytes(size: u64) -> String {
    let size = size as f64;
    match size {
        s if s < 1024.0 * 1024.0 => format!("{:.0} KiB", s / 1024.0),
        s if s < 1024.0 * 1024.0 * 1024.0 => format!("{:.1} MiB", s / 1024.0 / 1024.0),
        s => format!("{:.1} GiB", s / 1024.0 / 1024.0 / 1024.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_sizes() {
        for (seconds, text) in
            [(1, "1 second"), (61, "1 minute"), (7_260, "2 hours, 1 minute"), (180_000, "2 days, 2 hours")]
        {
            assert_eq!(lasted(Duration::from_secs(seconds)), text);
        }
        assert_eq!((bytes(4096), bytes(5 << 30)), ("4 KiB".into(), "5.0 GiB".into()));
    }
}
