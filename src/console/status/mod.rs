//! The status page: the results of the checks, the queue, the gateways, and facts about the
//! service.

pub mod check_runner;
pub mod verdict;

use std::cmp::Reverse;
use std::time::Duration;

use maud::{Markup, html};

use self::verdict::PartState;
use super::Console;
use super::page::{Operator, PageResult, redirect};
use crate::checks::Verdict;
use crate::config::GroundingMode;
use crate::database::Problem;
use crate::ledger::Gateway;
use crate::listener::{Gauge, LoadEvent};
use crate::report::format;
use crate::report::{Cell, Table};
use crate::text::{count, grouped};
use crate::when::Zone;

/// The age at which the results of the checks are too old: a check costs a token of the runtime.
const MAX_AGE: Duration = Duration::from_secs(60);

/// A gateway that was seen within this many seconds is running: it reports about every second.
const SEEN_LATELY: i64 = 5;

pub fn page(operator: &Operator) -> PageResult {
    let console = operator.console;
    console
        .checks
        .start(&console.config, &console.store, MAX_AGE);
    let is_running = console.checks.are_running();
    let checked = console.checks.latest().map(|run| run.time);
    let (parts, zone) = (verdict::parts(console), &console.store.zone);
    let content = html! {
        main {
            div.head {
                h1 { "Status" }
                form method="post" action="/status" {
                    button type="submit" disabled[is_running] { "Check again" }
                }
            }
            (lead(&parts, checked, is_running, zone))
            (table(&parts, zone))
            (queue_by_key(console)?)
            (gateways(console)?)
            (facts(console))
        }
    };
    let response = operator.page("Status", &content);
    // The page reloads without a script until the checks are done.
    Ok(if is_running {
        response.with("refresh", "1; url=/status")
    } else {
        response
    })
}

pub fn check_again(operator: &Operator) -> PageResult {
    let console = operator.console;
    console
        .checks
        .start(&console.config, &console.store, Duration::ZERO);
    Ok(redirect("/status"))
}

fn lead(parts: &[PartState], checked: Option<i64>, is_running: bool, zone: &Zone) -> Markup {
    let notes = parts
        .iter()
        .filter(|part| part.verdict == Some(Verdict::Warn))
        .count();
    html! {
        p.lead role="status" {
            @if let Some(trouble) = verdict::trouble(parts) {
                span class=(format!("badge {}", trouble.class)) { (trouble.words) } " " (trouble.meaning)
            } @else if checked.is_none() { "Checking every part that completions need…" }
            @else if notes > 0 { span.badge.warn { "works" } " Completions can be run; " (count(notes as i64, "note")) " below." }
            @else { span.badge.good { "works" } " Every part that completions need is available." }
            @if let Some(time) = checked {
                span.muted { " Checked at " (format::second(time, zone)) " " (zone.name()) @if is_running { ", checking again…" } }
            }
        }
    }
}

fn table(parts: &[PartState], zone: &Zone) -> Markup {
    let state = |part: &PartState| match part.verdict {
        Some(Verdict::Ok) => Cell::text("ok").class("badge good"),
        Some(Verdict::Warn) => Cell::text("note").class("badge warn"),
        Some(Verdict::Fail) => Cell::text("fails").class("badge bad"),
        None => Cell::text("not asked yet").class("badge"),
    };
    Table::new(parts)
        .text("part", "Part", |part| Cell::text(part.name.to_string()))
        .text("state", "State", state)
        .class("bare")
        .text("details", "Details", |part| {
            Cell::text("").on_page(details(part, zone))
        })
        .class("w bare")
        .html("findings", "part,state,details")
}

fn details(part: &PartState, zone: &Zone) -> Markup {
    html! {
        span.text { (part.message) }
        @if let Some(runtime) = &part.runtime {
            br;
            span.muted {
                (grouped(runtime.running as i64)) " in progress"
                @if let Some(time) = runtime.failed_since.filter(|_| part.verdict == Some(Verdict::Fail)) { ", failed since " (format::second(time, zone)) }
                @if let Some((time, error)) = &runtime.last_error { ", last error " (format::second(*time, zone)) ": " span.text { (error) } }
            }
        }
    }
}

/// Facts that no check reports.
fn facts(console: &Console) -> Markup {
    let load = console.monitoring.listener.snapshot();
    let [buffered, buffer_limit] = [load.buffered_bytes.now, load.buffered_bytes.limit]
        .map(|bytes| bytes as f64 / 1024.0 / 1024.0);
    let wal = console.store.wal_figures();
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
        }
        h2 { "The ledger" }
        dl.facts {
            dt { "Database" } dd {
                @match size { Some(size) => { (format::bytes(size)) ", and " (format::bytes(wal.bytes)) " of WAL" }, None => (console.config.database) }
            }
            @if file.is_some() {
                dt { "Last checkpoint" }
                dd { @match wal.last_checkpoint { Some(time) => (format::second(time, &console.store.zone)), None => "none since the start" } }
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
        GroundingMode::Auto => "auto",
    };
    let [found, nothing, unavailable] = console
        .monitoring
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
    let mut lanes = console.monitoring.listener.dispatcher.lanes();
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
