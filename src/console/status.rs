//! The status page: the verdict, what is wrong, and the facts.

use std::cmp::Reverse;
use std::time::Duration;

use maud::{Markup, html};

use super::Console;
use super::page::{Operator, PageResult, class};
use crate::config::GroundingMode;
use crate::error::Problem;
use crate::health::{Finding, Health, Status, Verdict};
use crate::ledger::Gateway;
use crate::listener::{Gauge, LoadEvent};
use crate::report::format;
use crate::report::{Cell, Table};
use crate::runtime::RuntimeStatus;
use crate::text::{count, escaped, grouped};
use crate::when::Zone;

/// A gateway that was seen within this many seconds is running: it reports about every second.
const SEEN_LATELY: i64 = 5;

pub fn page(operator: &Operator) -> PageResult {
    let (console, health, findings) = (
        operator.console,
        &operator.health,
        operator.health.findings(),
    );
    let now = format::second(operator.request.now, &console.store.zone);
    let content = html! {
        main {
            h1 { "Status" }
            p.lead role="status" {
                (badge(health.verdict())) " "
                @match health.verdict() {
                    Verdict::Works => "Completions can be run.",
                    Verdict::Degraded => "Completions can be run, but something is wrong.",
                    Verdict::Failing => "No completion can be run.",
                }
                span.muted { " As of " (now) " " (console.store.zone.name()) ". To test each part: " code { "adriaticum check" } }
            }
            @if !findings.is_empty() { (what_is_wrong(&findings)) }
            @if !health.runtimes.is_empty() {
                h2 { "Runtimes" }
                (runtimes(&health.runtimes, &console.store.zone))
            }
            (queue_by_key(console)?)
            (gateways(console)?)
            (facts(console, health))
        }
    };
    Ok(operator.page("Status", &content))
}

/// The verdict in its colour.
fn badge(verdict: Verdict) -> Markup {
    html! { span class=(format!("badge {}", class(verdict))) { (verdict.word()) } }
}

fn what_is_wrong(findings: &[Finding]) -> Markup {
    let state = |finding: &Finding| match finding.status {
        Status::Fail => Cell::text("fails").class("badge bad"),
        Status::Warn | Status::Ok => Cell::text("note").class("badge warn"),
    };
    Table::new(findings)
        .text("part", "Part", |finding| Cell::text(finding.part))
        .text("state", "State", state)
        .class("bare")
        .text("details", "Details", |finding| {
            Cell::text(&*finding.message)
        })
        .class("w bare")
        .html("findings", "part,state,details")
}

fn runtimes(runtimes: &[RuntimeStatus], zone: &Zone) -> Markup {
    let state = |runtime: &RuntimeStatus| {
        let cell = match (runtime.is_failing, runtime.failed_since) {
            (true, _) => Cell::text("failing").class("badge bad"),
            (false, Some(_)) => Cell::text("last call failed").class("badge warn"),
            (false, None) if runtime.has_answered => Cell::text("works").class("badge good"),
            (false, None) => Cell::text("not asked yet").class("badge"),
        };
        match runtime.failed_since {
            Some(time) => {
                cell.and(Cell::text("").on_page(html! { "since " (format::second(time, zone)) }))
            }
            None => cell,
        }
    };
    let error = |runtime: &RuntimeStatus| match &runtime.last_error {
        Some((time, error)) => {
            Cell::name("").on_page(html! { (format::second(*time, zone)) ": " (escaped(error)) })
        }
        None => Cell::text("–"),
    };
    Table::new(runtimes)
        .text("runtime", "Runtime", |runtime| Cell::name(&runtime.url))
        .text("state", "State", state)
        .class("bare")
        .number("running", "In progress", |runtime| {
            Cell::number(Some(runtime.running as i64))
        })
        .number("failures", "Failures", |runtime| {
            Cell::number(Some(runtime.failures as i64))
        })
        .text("error", "Last error", error)
        .class("w")
        .html("runtimes", "runtime,state,running,failures,error")
}

fn facts(console: &Console, health: &Health) -> Markup {
    let (load, zone) = (&health.load, &console.store.zone);
    let [buffered, buffer_limit] = [load.buffered_bytes.now, load.buffered_bytes.limit]
        .map(|bytes| bytes as f64 / 1024.0 / 1024.0);
    let file = console.config.database.file();
    let size = file
        .and_then(|file| file.metadata().ok())
        .map(|file| file.len());
    html! {
        h2 { "The service" }
        dl.facts {
            dt { "Uptime" } dd { (format::long_duration(console.started.elapsed())) }
            dt { "Workers busy" } dd { (gauge(load.workers)) }
            dt { "Queue" } dd { (gauge(load.queue)) }
            dt { "Connections" } dd { (gauge(load.connections)) }
            dt { "Buffers" } dd { (format!("{buffered:.1} of {buffer_limit:.1} MiB")) }
            dt { "Rejected (no room)" } dd { (count((load.count_of(LoadEvent::QueueFull) + load.count_of(LoadEvent::BuffersFull)) as i64, "request")) " since the start" }
            @if let Some(searches) = searches(console) { dt { "Search" } dd { (searches) } }
            @if let Some([_, expires]) = health.certificate { dt { "Certificate" } dd { "expires at " (format::second(expires, zone)) } }
        }
        h2 { "The ledger" }
        dl.facts {
            dt { "Database" } dd {
                @match size { Some(size) => { (format::bytes(size)) ", and " (format::bytes(health.wal.bytes)) " of WAL" }, None => (console.config.database) }
            }
            @if file.is_some() {
                dt { "Last checkpoint" }
                dd { @match health.wal.last_checkpoint { Some(time) => (format::second(time, zone)), None => "none since the start" } }
            }
        }
    }
}

/// The grounding mode, and the results of searches since the start; `None` if it is off.
fn searches(console: &Console) -> Option<String> {
    let mode = match console.config.search.grounding {
        GroundingMode::Off => return None,
        GroundingMode::Always => "always",
        GroundingMode::Match => "match",
    };
    let [found, nothing, unavailable] = console
        .metrics
        .searches()
        .map(|number| grouped(number as i64));
    Some(format!(
        "{mode}; since the start {found} searches with passages, {nothing} without, {unavailable} unavailable"
    ))
}

/// A table of the gateways that share the database; nothing if it is a file.
fn gateways(console: &Console) -> Result<Markup, Problem> {
    let gateways = console.shared_gateways()?;
    let seen = |gateway: &Gateway| match gateway.seen_ago {
        None => Cell::text("stopped"),
        Some(ago) if ago > SEEN_LATELY => {
            let ago = format::long_duration(Duration::from_secs(ago as u64));
            let badge = Cell::text("not seen").class("badge bad");
            badge.and(Cell::text(format!("for {ago}")))
        }
        Some(_) => Cell::text("now").class("badge good"),
    };
    let table = Table::new(&gateways)
        .text("name", "Gateway", |gateway| Cell::name(&gateway.name))
        .text("version", "Version", |gateway| Cell::text(&gateway.version))
        .text("address", "Address", |gateway| Cell::name(&gateway.address))
        .text("seen", "Last seen", seen);
    Ok(html! {
        @if !gateways.is_empty() {
            h2 { "Gateways" }
            (table.html("gateways", "name,version,address,seen"))
        }
    })
}

/// A table of the keys whose requests run or wait; nothing if there are none.
fn queue_by_key(console: &Console) -> Result<Markup, Problem> {
    let mut lanes = console.service.listener.dispatcher.lanes();
    if lanes.is_empty() {
        return Ok(html! {});
    }
    let keys = console.store.keys.list()?;
    lanes.sort_by_key(|lane| Reverse((lane.waiting, lane.running, lane.shed)));
    let number = |number: usize| Cell::number(Some(number as i64));
    let table = Table::new(&lanes)
        .text("key", "Key", |lane| {
            let key = keys.iter().find(|key| key.id == *lane.name);
            Cell::name(key.map_or(&*lane.name, |key| &key.name))
        })
        .number("waiting", "Waiting", |lane| number(lane.waiting))
        .number("wait", "Longest wait", |lane| {
            Cell::text(lane.longest_wait.map_or("–".into(), format::long_duration))
        })
        .number("running", "Running", |lane| number(lane.running))
        .number("limit", "Limit", |lane| {
            Cell::number(lane.limit.map(|limit| limit as i64))
        })
        .number("shed", "Shed", |lane| Cell::number(Some(lane.shed as i64)));
    Ok(html! {
        h2 { "Queue by key" }
        (table.html("queue", "key,waiting,wait,running,limit,shed"))
        p.muted { "Shed requests are counted since the start." }
    })
}

fn gauge(gauge: Gauge) -> String {
    format!(
        "{} of {}",
        grouped(gauge.now as i64),
        grouped(gauge.limit as i64)
    )
}
