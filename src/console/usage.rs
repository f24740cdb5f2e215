//! The usage page: figures, charts, errors, and the usage of each key.

use maud::{Markup, html};

use super::html_table::{heading, table};
use super::page_request::Operator;
use super::usage_report::UsageReport;
use super::usage_view::UsageView;
use super::{PageResult, chart, filters, format, layout, usage_by_key, usage_charts};
use crate::store::Key;
use crate::text::{count, grouped};

pub fn page(operator: &Operator) -> PageResult {
    let Operator { console, request, .. } = *operator;
    let keys = console.store.list_keys()?;
    let view = UsageView::read(&request.query, request.now)
        .with_key(&console.store, &keys)?
        .countable(&console.store)?;
    let report = UsageReport::read(&console.store, &view, &keys)?;
    let content = html! {
        main {
            h1 { "Usage" }
            (filters::filters(&view, "/usage", &keys, &console.shared_gateways()?))
            @if view.key_text.is_empty() { (overview(&view, &keys, &report, request.now)) }
        }
    };
    Ok(layout::operator_page(operator, "/usage", "Usage", &content))
}

fn overview(view: &UsageView, keys: &[Key], report: &UsageReport, now: i64) -> Markup {
    let (charts, figures) = chart::draw(&usage_charts::all(report), &usage_charts::axis(view, now));
    html! {
        (filters::range(view, now))
        (cards(view, report))
        @if report.all.requests == 0 {
            section.empty {
                h2 { "No requests" }
                p {
                    @if keys.is_empty() { "There is no key yet. " a href="/keys/new" { "Create the first key" } " and send a request with it." }
                    @else if view.key.is_some() || view.gateway.is_some() || !view.outcome.is_empty() { "None in this range matches the filters. " a href="/usage?range=90d" { "Show 90 days, unfiltered" } }
                    @else { "There were none in this range. " a href="/usage?range=90d" { "Show 90 days" } }
                }
            }
        } @else {
            section.charts aria-label="Charts" {
                @for chart in charts { (chart) }
                (errors(view, report))
            }
            (figures)
            (usage_by_key::section(view, report))
            p.export {
                "Export the totals by key and day: " a href=(view.address("/usage/totals.csv")) download { "CSV" }
                ". The rows: see " a href=(view.address("/requests")) { "the requests" } "."
            }
        }
    }
}

fn cards(view: &UsageView, report: &UsageReport) -> Markup {
    let (all, succeeded) = (&report.all, report.all.succeeded());
    let unmeasured = html! { @if all.unmeasured > 0 { (count(all.unmeasured, "request")) " unmeasured" } };
    let is_measured = succeeded > all.unmeasured;
    let [median, p95, p99] =
        [0.5, 0.95, 0.99].map(|share| report.percentile(share).map_or("–".into(), format::exact_duration));
    let durations = html! {
        @match report.durations.len() {
            0 => "no completions",
            number => { "p95 " (p95) ", p99 " (p99) br; "of the newest " (count(number as i64, "completion")) },
        }
    };
    let ok = html! { a href=(view.requests_address("ok")) { (grouped(succeeded)) " succeeded" } };
    let not = html! {
        @if all.requests > 0 { a href=(view.requests_address("failed")) { (count(all.errors, "error")) } } @else { "no requests" }
    };
    let requests = html! { a href=(view.requests_address(&view.outcome)) { (grouped(all.requests)) } };
    html! {
        dl.cards-row {
            div { dt { "Requests" } dd { strong { (requests) } span { (ok) } } }
            @for (title, figure, detail) in [
                ("Success rate", rate(succeeded, all.requests), &not),
                ("Tokens in", tokens(all.prompt_tokens, is_measured && all.prompt_tokens > 0), &unmeasured),
                ("Tokens out", tokens(all.completion_tokens, is_measured), &unmeasured),
                ("Total tokens", tokens(all.total_tokens, is_measured), &unmeasured),
                ("Duration, median", median, &durations),
            ] { div { dt { (title) } dd { strong { (figure) } span { (detail) } } } }
        }
    }
}

/// A sum of tokens. If nothing was measured it is unknown, not zero.
pub fn tokens(sum: i64, is_known: bool) -> String {
    if is_known { grouped(sum) } else { "–".into() }
}

/// A share in percent. Rounding never makes it 0 % or 100 %.
pub fn rate(part: i64, all: i64) -> String {
    if all == 0 {
        return "–".into();
    }
    let percent = part as f64 / all as f64 * 100.0;
    match percent {
        p if part == all || p == 0.0 => format!("{p:.0} %"),
        p if p < 0.1 => "< 0.1 %".into(),
        p if p > 99.99 => "> 99.99 %".into(),
        p if p > 99.9 => format!("{p:.2} %"),
        p => format!("{:.1} %", p.min(99.9)),
    }
}

fn errors(view: &UsageView, report: &UsageReport) -> Markup {
    let cells = |(status, code, requests): &(Option<i64>, String, i64)| {
        let of_code = UsageView { outcome: code.clone(), ..view.clone() }.address("/usage");
        vec![
            // A phone breaks the line after a word of the code.
            html! { a href=(of_code) { @for word in code.split_inclusive('_') { (word) wbr; } } },
            html! { @match status { Some(status) => (status), None => "–" } },
            html! { a href=(view.requests_address(code)) { (grouped(*requests)) } },
            html! { (rate(*requests, report.all.requests)) },
        ]
    };
    html! {
        section.chart {
            h2 { "Errors by code" }
            @if report.errors.is_empty() { p.muted { "None in this range." } }
            @else { (table("numbers", false, &["Code", "Status", "Requests", "Share"].map(heading), report.errors.iter().map(cells))) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_whole_only_where_it_is() {
        for (part, all, text) in [
            (0, 0, "–"),
            (0, 9, "0 %"),
            (9, 9, "100 %"),
            (1, 3, "33.3 %"),
            (1, 100_000, "< 0.1 %"),
            (9_996, 10_000, "99.96 %"),
            (999_999, 1_000_000, "> 99.99 %"),
        ] {
            assert_eq!(rate(part, all), text, "{part} of {all}");
        }
    }
}
