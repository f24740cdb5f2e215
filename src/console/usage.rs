//! Usage: what was asked, what came of it, and how long it took.

use maud::{Markup, html};

use super::figures::Figures;
use super::page::{self, Part, count, rounded};
use super::view::View;
use super::visit::{ConsoleSession, Visit};
use super::{Console, PageError, axis, by_key, chart, charts, filters};
use crate::http::Response;
use crate::store::{Durations, Key};
use crate::text::grouped;

pub fn page(console: &Console, visit: &Visit, session: &ConsoleSession) -> Result<Response, PageError> {
    let keys = console.store.list_keys()?;
    let view = View::read(&visit.query, visit.now).with_key(&keys);
    let content = html! {
        main {
            div.head {
                h1 { "Usage" }
                (super::request::find_form("Find a request: chatcmpl_…"))
            }
            (filters::filters(&view, "/usage", &keys, &console.shared_gateways()?))
            (overview(console, visit, &view, &keys)?)
        }
    };
    Ok(page::inside(console, session, Part::Usage, "Usage", &content))
}

fn overview(console: &Console, visit: &Visit, view: &View, keys: &[Key]) -> Result<Markup, PageError> {
    let figures = Figures::read(&console.store, view, keys)?;
    let (drawn, table) = chart::draw(&charts::all(&figures), &axis::axis(view, visit.now));
    Ok(html! {
        (filters::range(view, visit.now))
        (cards(view, &figures))
        @if figures.all.requests == 0 {
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
                @for chart in drawn { (chart) }
                (errors(view, &figures))
            }
            (table)
            (by_key::section(view, &figures))
            p.export {
                "Export the totals by key and day: " a href=(format!("/usage/totals.csv?{}", view.query())) download { "CSV" }
                ". The rows: see " a href=(format!("/requests?{}", view.query())) { "the requests" } "."
            }
        }
    })
}

fn cards(view: &View, figures: &Figures) -> Markup {
    let (all, succeeded) = (&figures.all, figures.all.succeeded());
    let unmeasured = html! { @if all.unmeasured > 0 { (count(all.unmeasured, "request")) " unmeasured" } };
    let is_measured = succeeded > all.unmeasured;
    let times = |times: &Durations| match (times.percentile(0.5), times.percentile(0.95)) {
        (Some(half), Some(most)) => (rounded(half), html! { "p95 " (rounded(most)) }),
        _ => ("–".to_owned(), html! { "nothing measured" }),
    };
    let (runtime, own) = (times(&figures.runtime), times(&figures.own));
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
                ("Runtime, p50", runtime.0, &runtime.1),
                ("Overhead, p50", own.0, &own.1),
            ] { div { dt { (title) } dd { strong { (figure) } span { (detail) } } } }
        }
    }
}

/// A sum of tokens. What was not measured is unknown, and no zero.
pub fn tokens(sum: i64, is_known: bool) -> String {
    if is_known { grouped(sum) } else { "–".into() }
}

/// A share in percent; one that is not whole never looks as if it were.
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

fn errors(view: &View, figures: &Figures) -> Markup {
    let all = figures.all.requests;
    let of = |code: &String| View { outcome: code.clone(), ..view.clone() }.query();
    html! {
        section.chart {
            h2 { "Errors by code" }
            @if figures.errors.is_empty() { p.muted { "None in this range." } }
            @else {
                table {
                    thead { tr { th scope="col" { "Code" } th.number scope="col" { "Status" } th.number scope="col" { "Requests" } th.number scope="col" { "Share" } } }
                    tbody {
                        @for (status, code, requests) in &figures.errors {
                            tr {
                                th scope="row" {
                                    a href=(format!("/usage?{}", of(code))) {
                                        // On a phone it is broken after a word.
                                        @for word in code.split_inclusive('_') { (word) wbr; }
                                    }
                                }
                                td.number { @match status { Some(status) => (status), None => "–" } }
                                td.number { a href=(view.requests_address(code)) { (grouped(*requests)) } }
                                td.number { (rate(*requests, all)) }
                            }
                        }
                    }
                }
            }
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
