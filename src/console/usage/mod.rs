//! The usage page: figures, charts, errors, and the usage of each key.

mod bar_interval;
mod by_key;
mod chart;
pub mod filters;
mod report;
mod report_charts;
pub mod view;

use maud::{Markup, html};

use self::report::{UsageReport, percentile, tokens};
use self::view::UsageView;
use super::html::format::{self, figure, rate};
use super::html::table::{heading, table};
use super::layout;
use super::page::{Operator, PageResult};
use crate::keys::Key;
use crate::text::{count, grouped};

pub fn page(operator: &Operator) -> PageResult {
    let Operator {
        console, request, ..
    } = *operator;
    let keys = console.store.keys.list()?;
    let view = UsageView::from_request(operator, &keys)?
        .without_row_filters()
        .with_whole_days(&console.store)?;
    let report = UsageReport::read(&console.store, &view, &keys)?;
    let page = request.query.get("page").parse().unwrap_or(1);
    let content = html! {
        main {
            h1 { "Usage" }
            (filters::filters(&view, "/usage", &keys, &console.shared_gateways()?))
            @if view.key_text.is_empty() { (overview(&view, &keys, &report, page, request.now)) }
        }
    };
    Ok(layout::operator_page(
        operator, 200, "/usage", "Usage", &content,
    ))
}

fn overview(view: &UsageView, keys: &[Key], report: &UsageReport, page: usize, now: i64) -> Markup {
    let (charts, figures) = chart::draw(
        &report_charts::all(report),
        &report_charts::axis(view, report, now),
        &view.zone,
    );
    html! {
        (filters::range(view, now))
        (cards(view, report))
        @if report.selected.requests == 0 {
            section.empty {
                h2 { "No requests" }
                p {
                    @if keys.is_empty() { "There is no key yet. " a href="/keys/new" { "Create the first key" } " and send a request with it." }
                    @else { "None matches the range and the filters. " a href="/usage?range=all" { "Show all" } }
                }
            }
        } @else {
            section.charts aria-label="Charts" {
                @for chart in charts { (chart) }
                @if !report.errors.is_empty() { (errors(view, report)) }
            }
            (figures)
            (by_key::section(view, report, page))
            p.export {
                "Export the totals by key and day: " a href=(view.address("/usage/totals.csv")) { "CSV" }
                ". The rows: see " a href=(view.address("/requests")) { "the requests" } "."
            }
        }
    }
}

fn cards(view: &UsageView, report: &UsageReport) -> Markup {
    let UsageReport {
        all,
        selected,
        durations,
        ..
    } = report;
    let [prompt, completion, total] = tokens(selected);
    let [median, p95, p99] = [0.5, 0.95, 0.99]
        .map(|share| percentile(durations, share).map_or("–".into(), format::exact_duration));
    let requests = |outcome: &str, text: String| html! { a href=(view.address_with("/requests", "outcome", outcome)) { (text) } };
    let base = match view.outcome.as_str() {
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
                ("Requests", requests(&view.outcome, grouped(selected.requests)), base),
                ("Success rate", html! { (rate(all.succeeded(), all.requests)) }, failed),
                ("Total tokens", html! { (figure(total)) }, parts),
                ("Duration, median", html! { (median) }, slow),
            ] { div { dt { (title) } dd { strong { (figure) } span { (detail) } } } }
        }
    }
}

fn errors(view: &UsageView, report: &UsageReport) -> Markup {
    let cells = |((status, code), requests): &((Option<i64>, String), i64)| {
        let address = |path| view.address_with(path, "outcome", code);
        vec![
            // A phone breaks the line after a word of the code.
            html! { a href=(address("/usage")) { @for word in code.split_inclusive('_') { (word) wbr; } } },
            html! { @match status { Some(status) => (status), None => "–" } },
            html! { a href=(address("/requests")) { (grouped(*requests)) } },
            html! { (rate(*requests, report.all.requests)) },
        ]
    };
    html! {
        section.chart {
            h2 { "Errors by code" }
            (table("numbers", false, &["Code", "Status", "Requests", "Share"].map(heading), report.errors.iter().map(cells)))
        }
    }
}
