//! The status page: the results of the checks, the queue, the gateways, and facts about the
//! service.

pub mod check_runner;
pub mod verdict;

use std::cmp::Reverse;
use std::time::Duration;

use maud::{Markup, html};

use self::verdict::PartState;
use super::html::format;
use super::html::table::{cards, heading, scrolling};
use super::layout;
use super::page::{Operator, PageResult};
use super::state::Console;
use crate::checks::Verdict;
use crate::config::GroundingMode;
use crate::database::Problem;
use crate::ledger::Gateway;
use crate::listener::{Gauge, LoadEvent};
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
    let response = layout::operator_page(operator, 200, "/status", "Status", &content);
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
    Ok(layout::redirect("/status"))
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
    let cells = |part: &PartState| {
        let (class, state) = match part.verdict {
            Some(Verdict::Ok) => ("badge good", "ok"),
            Some(Verdict::Warn) => ("badge warn", "note"),
            Some(Verdict::Fail) => ("badge bad", "fails"),
            None => ("badge", "not asked yet"),
        };
        vec![
            html! { (part.name) },
            html! { span class=(class) { (state) } },
            details(part, zone),
        ]
    };
    cards(
        "findings",
        &["Part", "State", "Details"].map(heading),
        parts.iter().map(cells),
    )
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
    let cells = |gateway: &Gateway| {
        vec![
            html! { span.text { (gateway.name) } },
            html! { (gateway.version) },
            html! { span.text { (gateway.address) } },
            html! {
                @match gateway.seen_ago {
                    None => "stopped",
                    Some(ago) if ago > SEEN_LATELY => {
                        span.badge.bad { "not seen" } " for " (format::long_duration(Duration::from_secs(ago as u64)))
                    }
                    Some(_) => span.badge.good { "now" },
                }
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
fn queue_by_key(console: &Console) -> Result<Markup, Problem> {
    let mut lanes = console.monitoring.listener.dispatcher.lanes();
    if lanes.is_empty() {
        return Ok(html! {});
    }
    let keys = console.store.keys.list()?;
    lanes.sort_by_key(|lane| Reverse((lane.waiting, lane.running, lane.shed)));
    let rows = lanes.iter().map(|lane| {
        let name = keys
            .iter()
            .find(|key| key.id == *lane.name)
            .map_or(&*lane.name, |key| &key.name);
        let cells = [
            name.to_owned(),
            grouped(lane.waiting as i64),
            lane.longest_wait.map_or("–".into(), format::long_duration),
            grouped(lane.running as i64),
            format::figure(lane.limit.map(|limit| limit as i64)),
            grouped(lane.shed as i64),
        ];
        cells.map(|text| html! { (text) }).into()
    });
    let headings = ["Key", "Waiting", "Longest wait", "Running", "Limit", "Shed"].map(heading);
    Ok(html! {
        h2 { "Queue by key" }
        (scrolling("numbers", "Queue by key", &headings, rows))
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
