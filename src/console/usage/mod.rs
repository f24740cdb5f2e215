//! The usage page: figures, charts, and a table of groups.

mod axis;
mod chart;
mod report;

use maud::{Markup, html};

use self::chart::{Chart, Series};
use self::report::{ResultKind, UsageReport, percentile};
use super::filters::{self, Asked};
use super::page::{Operator, PageResult};
use crate::keys::Key;
use crate::report::format::{self, figure, rate};
use crate::report::query::{GROUPS, Query};
use crate::report::rows::{self, tokens};
use crate::report::table::choices;
use crate::text::{count, grouped};
use crate::when::Range;

/// The columns of the table by key or day, after what names it.
const FIGURES: &str = "requests,succeeded,prompt_tokens,completion_tokens,total_tokens";

pub fn page(operator: &Operator) -> PageResult {
    let Operator {
        console, request, ..
    } = *operator;
    let mut asked = filters::read(operator, "/usage")?;
    let whole_days = console.store.ledger.with_whole_days(asked.query.range)?;
    let is_extended = whole_days != asked.query.range;
    if is_extended {
        asked.query = asked.query.between(whole_days);
    }
    let content = html! {
        main {
            h1 { "Usage" }
            (asked.filters("/usage"))
            @if asked.unclear.is_none() {
                @if is_extended {
                    p.notice role="status" {
                        "From and To are whole days now: retention has removed the requests of a day that the range cut, and only its sums are kept."
                    }
                }
                (overview(&asked, &UsageReport::read(&console.store, &asked)?, request.now))
            }
        }
    };
    Ok(operator.page("Usage", &content))
}

fn overview(asked: &Asked, report: &UsageReport, now: i64) -> Markup {
    let Asked { query, keys, .. } = asked;
    let axis = axis::axis(query, report.step, &report.bars, now);
    html! {
        (range(query, now))
        (cards(query, report))
        @if report.selected.requests == 0 {
            section.empty {
                h2 { "No requests" }
                p {
                    @if keys.is_empty() { "There is no key yet. " a href="/keys/new" { "Create the first key" } " and send a request with it." }
                    @else { "None matches the range and the filters. " a href="/usage?range=all" { "Show all" } }
                }
            }
        } @else {
            @let charts = charts(report, keys);
            @let address = axis::address(query, report.step, &report.bars);
            (chart::draw(&charts, &axis, &address))
            (groups(query, report, &chart::figures(&charts, &axis, query, &address)))
            p.export {
                "Export the totals by key and day: " a href=(query.link("/usage/totals.csv", &[])) { "CSV" }
                ". The rows: see " a href=(query.link("/requests", &[])) { "the requests" } "."
            }
        }
    }
}

fn range(query: &Query, now: i64) -> Markup {
    let (Range { since, until }, zone) = (query.range, &query.zone);
    let time = if since % 60 == 0 && until % 60 == 0 {
        format::minute
    } else {
        format::second
    };
    html! {
        p.muted.range { (time(since, zone)) " to " @if until > now { "now" } @else { (time(until, zone)) } ", " (zone.name()) }
    }
}

fn cards(query: &Query, report: &UsageReport) -> Markup {
    let UsageReport {
        all,
        selected,
        durations,
        ..
    } = report;
    let [prompt, completion, total] = tokens(selected);
    let [median, p95, p99] = [0.5, 0.95, 0.99]
        .map(|share| percentile(durations, share).map_or("–".into(), format::duration));
    let requests = |outcome: &str, text: String| html! { a href=(query.link("/requests", &[("outcome", outcome)])) { (text) } };
    let outcome = query.get("outcome");
    let base = match outcome {
        "" => requests("ok", format!("{} succeeded", grouped(all.succeeded()))),
        _ => requests("", format!("of {}", grouped(all.requests))),
    };
    let failed = if all.requests > 0 {
        requests("failed", count(all.errors, "error"))
    } else {
        html! { "no requests" }
    };
    let parts = html! {
        @if total.is_some() { (figure(prompt)) " in, " (figure(completion)) " out" br; }
        @if selected.unmeasured > 0 { (count(selected.unmeasured, "request")) " unmeasured" }
    };
    let slow = html! {
        @match durations.len() {
            0 if all.succeeded() == 0 => "no completions",
            0 => "none among the newest requests",
            number => {
                "p95 " (p95) ", p99 " (p99) br;
                "of " @if (number as i64) < all.succeeded() { "the newest " } (count(number as i64, "completion"))
            },
        }
    };
    html! {
        dl.cards-row {
            @for (title, figure, detail) in [
                ("Requests", requests(outcome, grouped(selected.requests)), base),
                ("Success rate", html! { (rate(all.succeeded(), all.requests)) }, failed),
                ("Total tokens", html! { (figure(total)) }, parts),
                ("Duration, median", html! { (median) }, slow),
            ] { div { dt { (title) } dd { strong { (figure) } span { (detail) } } } }
        }
    }
}

/// Requests by outcome and, if any were measured, tokens by key.
fn charts(report: &UsageReport, keys: &[Key]) -> Vec<Chart> {
    let outcome = |name: &str, class: &str, kind: ResultKind| {
        let values = report
            .requests
            .iter()
            .map(|kinds| Some(kinds[kind as usize]));
        Series {
            name: name.into(),
            class: class.into(),
            values: values.collect(),
        }
    };
    let selected = &report.selected;
    let (all, succeeded) = (
        count(selected.requests, "request"),
        grouped(selected.succeeded()),
    );
    let mut charts = vec![Chart {
        title: "Requests by outcome",
        summary: format!("Bars: {all}, {succeeded} of them succeeded"),
        series: vec![
            // Errors are few: at the bottom they can be compared.
            outcome("Failed", "failed", ResultKind::Failed),
            outcome("Refused (4xx)", "refused", ResultKind::Refused),
            outcome("Succeeded", "ok", ResultKind::Succeeded),
        ],
    }];
    let series = report.tokens_by_key(keys);
    if !series.is_empty() {
        let missing = match selected.unmeasured {
            0 => String::new(),
            unmeasured => format!(", {} unmeasured", count(unmeasured, "request")),
        };
        let tokens = count(selected.total_tokens, "token");
        charts.push(Chart {
            title: "Tokens by key",
            summary: format!("Bars: {tokens}{missing}"),
            series,
        });
    }
    charts
}

/// The table by key, day or outcome, or the figures of the charts.
fn groups(query: &Query, report: &UsageReport, figures: &Markup) -> Markup {
    let word = query.get("by");
    let chosen = if word.is_empty() { "key" } else { word };
    let links = GROUPS.into_iter().map(|word| {
        let value = if word == "key" { "" } else { word };
        let address = query.link("/usage", &[("by", value), ("sort", "")]) + "#list";
        (address, word, word == chosen)
    });
    let (columns, default) = match chosen {
        "key" => (format!("name,{FIGURES},share"), "-total_tokens"),
        "day" => (format!("day,{FIGURES}"), "-day"),
        _ => ("error_code,requests,requests_share".to_owned(), "-requests"),
    };
    let by = [query.grouping()];
    let table = rows::usage(&report.rows, &by, &report.all, query);
    html! {
        section.groups {
            div.head { h2 { "By " (chosen) } (choices("Groups", links)) }
            @if chosen == "bar" { div #list.data { (figures) } }
            @else { (table.sorted_html("groups", &columns, (chosen, default), query, "/usage")) }
        }
    }
}
