//! Usage: what was asked, what came of it, and how long it took.

use maud::{Markup, html};

use super::figures::Figures;
use super::page::{self, Part, count, rounded};
use super::view::{CHOICES, CODES, Took, View};
use super::visit::{Session, Visit};
use super::{Console, Stop, axis, by_key, chart, charts, requests};
use crate::http::Response;
use crate::store::{Durations, Gateway, Key};
use crate::text::grouped;

/// How many keys can be chosen from a list; the table by key leads to the others. More make the page exceed 60 KB.
const KEYS_OFFERED: usize = 40;

pub fn page(console: &Console, visit: &Visit, session: &Session) -> Result<Response, Stop> {
    let view = View::read(&visit.query, visit.now);
    let before = Some(visit.query.get("before")).filter(|id| super::request::is_id(id));
    let keys = console.store.list_keys()?;
    let gateways = console.shared_gateways()?;
    let listing = console.store.newest(&view.which(), before, requests::LISTED)?;
    let content = html! {
        main {
            div.head {
                h1 { "Usage" }
                (super::request::find_form("Find a request: chatcmpl_…"))
            }
            (filters(&view, &keys, &gateways))
            @if before.is_some() || view.took != Took::default() {
                p { a href=(format!("/usage?{}", view.of_any_duration().query())) { "← Back to the figures and the newest requests" } }
            } @else {
                (overview(console, visit, &view, &keys)?)
            }
            (requests::section(&view, &listing, before.is_some(), gateways.len() > 1))
        }
    };
    Ok(page::inside(&console.assets, session, Part::Usage, "Usage", &content))
}

fn filters(view: &View, keys: &[Key], gateways: &[Gateway]) -> Markup {
    let (from, to) = view.dates();
    let link = |choice: &'static str| View { choice, ..view.clone() }.query();
    let is_chosen = |key: &Key| view.key.as_ref() == Some(&key.id);
    let offered = keys.iter().enumerate().filter(|(number, key)| *number < KEYS_OFFERED || is_chosen(key));
    html! {
        div.filters {
            nav.choices aria-label="Range" {
                @for (word, name) in CHOICES {
                    a href=(format!("/usage?{}", link(word))) aria-current=[(view.choice == word).then_some("true")] { (name) }
                }
            }
            form.dates method="get" action="/usage" {
                (hidden(view, &["range", "from", "to"]))
                label for="from" { "From" } input #from type="date" name="from" value=(from) required;
                label for="to" { "to" } input #to type="date" name="to" value=(to) required;
                button type="submit" { "Show" }
            }
            form.pick method="get" action="/usage" {
                (hidden(view, &["key", "gateway", "outcome"]))
                label for="key" { "Key" }
                select #key name="key" {
                    option value="" { "All keys" }
                    @for (_, key) in offered { option value=(key.id) selected[is_chosen(key)] {
                        (key.name) @if key.revoked.is_some() { " (revoked)" }
                    } }
                }
                @if gateways.len() > 1 {
                    label for="gateway" { "Gateway" }
                    select #gateway name="gateway" {
                        option value="" { "All gateways" }
                        @for Gateway { name, .. } in gateways { option selected[view.gateway.as_ref() == Some(name)] { (name) } }
                    }
                }
                label for="outcome" { "Outcome" }
                select #outcome name="outcome" {
                    @for (value, name) in [("", "All outcomes"), ("ok", "Succeeded"), ("failed", "Not succeeded")] {
                        option value=(value) selected[view.outcome == value] { (name) }
                    }
                    @for code in CODES { option value=(code) selected[view.outcome == code] { (code) } }
                }
                button type="submit" { "Apply" }
            }
        }
    }
}

/// The rest of a view, for a form that asks for some of its fields.
pub fn hidden(view: &View, asked: &[&str]) -> Markup {
    html! {
        @for (name, value) in view.fields() {
            @if !asked.contains(&name) { input type="hidden" name=(name) value=(value); }
        }
    }
}

/// The times that the figures are of.
pub fn range(view: &View, now: i64) -> Markup {
    let meaning = match view.choice {
        "7d" => ": today and the 6 days before it",
        "30d" => ": today and the 29 days before it",
        "90d" => ": today and the 89 days before it",
        _ => "",
    };
    html! {
        p.muted.range {
            (page::time(view.range.since, false)) " to "
            @if view.range.until > now { "now" } @else { (page::time(view.range.until, false)) }
            ", UTC" (meaning)
        }
    }
}

fn overview(console: &Console, visit: &Visit, view: &View, keys: &[Key]) -> Result<Markup, Stop> {
    let figures = Figures::read(&console.store, view, keys)?;
    let (drawn, table) = chart::draw(&charts::all(&figures), &axis::axis(view));
    Ok(html! {
        (range(view, visit.now))
        (cards(&figures))
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
        }
    })
}

fn cards(figures: &Figures) -> Markup {
    let (all, succeeded) = (&figures.all, figures.all.succeeded());
    let unmeasured = html! { @if all.unmeasured > 0 { (count(all.unmeasured, "request")) " unmeasured" } };
    let is_measured = succeeded > all.unmeasured;
    let times = |times: &Durations| match (times.percentile(0.5), times.percentile(0.95)) {
        (Some(half), Some(most)) => (rounded(half), html! { "p95 " (rounded(most)) }),
        _ => ("–".to_owned(), html! { "nothing measured" }),
    };
    let (runtime, own) = (times(&figures.runtime), times(&figures.own));
    let ok = html! { (grouped(succeeded)) " succeeded" };
    let not = html! { @if all.requests > 0 { (count(all.errors, "error")) } @else { "no requests" } };
    html! {
        dl.cards-row {
            @for (title, figure, told) in [
                ("Requests", grouped(all.requests), &ok),
                ("Success rate", rate(succeeded, all.requests), &not),
                ("Tokens in", tokens(all.prompt_tokens, is_measured && all.prompt_tokens > 0), &unmeasured),
                ("Tokens out", tokens(all.completion_tokens, is_measured), &unmeasured),
                ("Total tokens", tokens(all.total_tokens, is_measured), &unmeasured),
                ("Runtime, p50", runtime.0, &runtime.1),
                ("Overhead, p50", own.0, &own.1),
            ] { div { dt { (title) } dd { strong { (figure) } span { (told) } } } }
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
                                td.number { (grouped(*requests)) }
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
