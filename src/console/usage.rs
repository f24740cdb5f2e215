//! Usage: what was asked, what came of it, and how long it took.

use maud::{Markup, html};
use time::OffsetDateTime;
use time::format_description::BorrowedFormatItem;
use time::macros::format_description;

use super::chart::{Chart, Series, short};
use super::figures::{Bar, Figures, Kind};
use super::page::{self, Part, count, took};
use super::view::{CHOICES, CODES, View};
use super::visit::{Session, Visit};
use super::{Console, Stop};
use crate::http::Response;
use crate::store::{Key, LedgerRow, Listing};
use crate::text::grouped;

/// How many requests a page lists.
const LISTED: usize = 15;

pub fn page(console: &Console, visit: &Visit, session: &Session) -> Result<Response, Stop> {
    let view = View::read(&visit.query, visit.now);
    let before = Some(visit.query.get("before")).filter(|id| super::request::is_id(id));
    let keys = console.store.list_keys()?;
    let listing = console.store.newest(&view.which(), before, LISTED)?;
    let content = html! {
        main {
            div.head {
                h1 { "Usage" }
                (super::request::find_form("Find a request: chatcmpl_…"))
            }
            (filters(&view, &keys))
            @match before {
                Some(_) => p { a href=(format!("/usage?{}", view.query())) { "← Back to the figures and the newest requests" } },
                None => (overview(console, visit, &view, &keys)?),
            }
            (requests(&view, &listing, before.is_some()))
        }
    };
    Ok(page::inside(&console.assets, session, Part::Usage, "Usage", &content))
}

fn filters(view: &View, keys: &[Key]) -> Markup {
    let (from, to) = view.dates();
    let link = |choice: &'static str| View { choice, ..view.clone() }.query();
    html! {
        div.filters {
            nav.choices aria-label="Range" {
                @for (word, name) in CHOICES {
                    a href=(format!("/usage?{}", link(word))) aria-current=[(view.choice == word).then_some("true")] { (name) }
                }
            }
            form.dates method="get" action="/usage" {
                @if let Some(key) = &view.key { input type="hidden" name="key" value=(key); }
                @if !view.outcome.is_empty() { input type="hidden" name="outcome" value=(view.outcome); }
                label for="from" { "From" } input #from type="date" name="from" value=(from) required;
                label for="to" { "to" } input #to type="date" name="to" value=(to) required;
                button type="submit" { "Show" }
            }
            form.pick method="get" action="/usage" data-now {
                @match view.choice {
                    "dates" => { input type="hidden" name="from" value=(from); input type="hidden" name="to" value=(to); },
                    choice => input type="hidden" name="range" value=(choice);,
                }
                label for="key" { "Key" }
                select #key name="key" {
                    option value="" { "All keys" }
                    @for key in keys { option value=(key.id) selected[view.key.as_ref() == Some(&key.id)] {
                        (key.name) @if key.revoked.is_some() { " (revoked)" }
                    } }
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

fn overview(console: &Console, visit: &Visit, view: &View, keys: &[Key]) -> Result<Markup, Stop> {
    let figures = Figures::read(&console.store, view, keys)?;
    Ok(html! {
        p.muted.range {
            (page::time(view.range.since, false)) " to "
            @if view.range.until > visit.now { "now" } @else { (page::time(view.range.until, false)) }
            ", UTC"
        }
        @if figures.missing > 0 {
            p.notice role="status" { (count(figures.missing, "newer request")) " not in these figures yet: sealing is behind. \
                The status page shows by how much." }
        }
        (cards(&figures))
        @if figures.all.requests == 0 {
            section.empty {
                h2 { "No requests here" }
                p {
                    @if keys.is_empty() { "Nobody has a key yet. " a href="/keys/new" { "Create the first key" } " and send a request with it." }
                    @else if view.key.is_some() || !view.outcome.is_empty() { "None in this range matches the filters. " a href="/usage?range=90d" { "Show 90 days, unfiltered" } }
                    @else { "There were none in this range. " a href="/usage?range=90d" { "Show 90 days" } }
                }
            }
        } @else {
            section.charts aria-label="Charts" {
                (requests_chart(view, &figures).bars())
                @if !figures.keys.is_empty() { (tokens_chart(view, &figures).bars()) }
                (times_chart(view, &figures).lines())
                (errors(view, &figures))
            }
        }
    })
}

fn cards(figures: &Figures) -> Markup {
    let all = &figures.all;
    let unmeasured = html! { @if all.unmeasured > 0 { (count(all.unmeasured, "request")) " unmeasured" } };
    // What was not measured is unknown, and no zero.
    let tokens = |sum: i64, is_known: bool| if is_known { grouped(sum) } else { "–".into() };
    let is_measured = figures.measured() > 0;
    let times = |times: &crate::store::Durations| match (times.percentile(0.5), times.percentile(0.95)) {
        (Some(half), Some(most)) => (took(half), html! { "95 % within " (took(most)) }),
        _ => ("–".to_owned(), html! { "nothing measured" }),
    };
    let (runtime, own) = (times(&all.runtime), times(&all.own));
    let succeeded = html! { (grouped(figures.succeeded)) " succeeded" };
    let not = html! { @if all.requests > 0 { (grouped(all.requests - figures.succeeded)) " did not succeed" } @else { "no requests" } };
    let (prompt, completion) = (all.prompt_tokens, all.completion_tokens);
    html! {
        dl.cards-row {
            @for (title, figure, told) in [
                ("Requests", grouped(all.requests), &succeeded),
                ("Success rate", rate(figures.succeeded, all.requests), &not),
                ("Tokens in", tokens(prompt, is_measured && prompt > 0), &unmeasured),
                ("Tokens out", tokens(completion, is_measured), &unmeasured),
                ("Runtime, median", runtime.0, &runtime.1),
                ("Our own time, median", own.0, &own.1),
            ] { div { dt { (title) } dd { strong { (figure) } span { (told) } } } }
        }
    }
}

/// A share in percent; one that is not whole never looks as if it were.
fn rate(part: i64, all: i64) -> String {
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

/// What the bars are of, and what stands under every quarter of them.
fn labels(view: &View) -> (Vec<String>, Vec<String>) {
    const DAY: &[BorrowedFormatItem<'_>] = format_description!("[year]-[month]-[day]");
    const CLOCK: &[BorrowedFormatItem<'_>] = format_description!("[hour]:[minute]");
    const SHORT: &[BorrowedFormatItem<'_>] = format_description!("[month repr:short] [day padding:none]");
    let shown = |unix: i64, format: &[BorrowedFormatItem<'_>]| {
        OffsetDateTime::from_unix_timestamp(unix)
            .ok()
            .and_then(|time| time.format(format).ok())
            .unwrap_or_default()
    };
    // A year is named where it could be another.
    let day = if view.range.until - view.range.since > 300 * 86_400 { DAY } else { SHORT };
    let label = |bar: usize| {
        let (start, end) = (view.start(bar), (view.start(bar) + view.width).min(view.range.until));
        match view.width {
            86_400 => shown(start, day),
            width if width > 86_400 => format!("{} – {}", shown(start, day), shown(end - 1, day)),
            _ => format!("{} {}–{}", shown(start, day), shown(start, CLOCK), shown(end, CLOCK)),
        }
    };
    let is_one_day = view.range.until - view.range.since <= 86_400;
    let bars = view.bars();
    let ticks = if bars < 4 { 1 } else { 4 };
    let tick = |number: usize| shown(view.start(number * bars / ticks), if is_one_day { CLOCK } else { day });
    ((0..bars).map(label).collect(), (0..ticks).map(tick).collect())
}

fn series(figures: &Figures, name: &str, class: &str, value: impl Fn(&Bar) -> Option<f64>) -> Series {
    Series { name: name.into(), class: class.into(), values: figures.bars.iter().map(value).collect() }
}

fn requests_chart(view: &View, figures: &Figures) -> Chart<'static> {
    let (labels, ticks) = labels(view);
    let kind = |name, class, kind: Kind| {
        series(figures, name, class, move |bar| Some(bar.requests[kind as usize] as f64))
    };
    let (all, succeeded) = (count(figures.all.requests, "request"), grouped(figures.succeeded));
    Chart {
        title: "Requests by outcome",
        summary: format!("Bars: {all}, {succeeded} of them succeeded"),
        series: vec![
            kind("Succeeded", "ok", Kind::Succeeded),
            kind("Refused (4xx)", "refused", Kind::Refused),
            kind("Failed", "failed", Kind::Failed),
        ],
        labels,
        ticks,
        told: |value| grouped(value as i64),
        axis: short,
    }
}

fn tokens_chart(view: &View, figures: &Figures) -> Chart<'static> {
    let (labels, ticks) = labels(view);
    let by_key = figures.keys.iter().enumerate().map(|(number, name)| {
        series(figures, name, &format!("k{number}"), |bar| Some(bar.tokens[number] as f64))
    });
    let missing = match figures.all.unmeasured {
        0 => String::new(),
        unmeasured => format!(", {} unmeasured", count(unmeasured, "request")),
    };
    Chart {
        title: "Tokens by key",
        summary: format!("Bars: {}{missing}", count(figures.all.total_tokens, "token")),
        series: by_key.collect(),
        labels,
        ticks,
        told: |value| grouped(value as i64),
        axis: short,
    }
}

fn times_chart(view: &View, figures: &Figures) -> Chart<'static> {
    let (labels, ticks) = labels(view);
    let runtime =
        |name, class, share| series(figures, name, class, move |bar| bar.sums.runtime.percentile(share));
    let own = |name, class, share| series(figures, name, class, move |bar| bar.sums.own.percentile(share));
    Chart {
        title: "Time taken",
        summary: "Lines: the median, and what 95 % did not exceed, of the runtime's time and of our own"
            .into(),
        series: vec![
            runtime("Runtime, 95 %", "k1", 0.95),
            runtime("Runtime, median", "k0", 0.5),
            own("Our own, 95 %", "k3", 0.95),
            own("Our own, median", "k2", 0.5),
        ],
        labels,
        ticks,
        told: took,
        axis: |value| match value {
            v if v < 1000.0 => format!("{v:.0} ms"),
            v if v < 120_000.0 => format!("{} s", short(v / 1000.0)),
            v => format!("{} min", short(v / 60_000.0)),
        },
    }
}

fn errors(view: &View, figures: &Figures) -> Markup {
    let all = figures.all.requests;
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
                                th scope="row" { a href=(format!("/usage?{}", view.with_outcome(code).query())) { (code) } }
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

fn requests(view: &View, listing: &Listing, is_later_page: bool) -> Markup {
    html! {
        section {
            div.head {
                h2 { @if is_later_page { "Earlier requests" } @else { "Newest requests" } }
                @if !listing.rows.is_empty() {
                    p.export { "Export: "
                        a href=(format!("/usage/export.csv?{}", view.query())) download { "CSV" } " "
                        a href=(format!("/usage/export.json?{}", view.query())) download { "JSON" }
                    }
                }
            }
            @if listing.rows.is_empty() { p.muted { "None." } }
            @else {
                div.scroll tabindex="0" role="region" aria-label="Requests" {
                    table.requests {
                        thead { tr {
                            th scope="col" { "Time" } th scope="col" { "Request" } th scope="col" { "Key" } th scope="col" { "Outcome" }
                            th.number scope="col" { "Tokens in" } th.number scope="col" { "Tokens out" }
                            th.number scope="col" { "Runtime" } th.number scope="col" { "Total" }
                        } }
                        tbody { @for row in &listing.rows { (request(row)) } }
                    }
                }
            }
            @if let Some(next) = &listing.next {
                nav.pages aria-label="Pages" {
                    a.button href=(format!("/usage?{}&before={next}", view.query())) rel="next" { "Earlier requests →" }
                }
            }
        }
    }
}

fn request(row: &LedgerRow) -> Markup {
    let id = &row.request_id;
    let short_id =
        if id.len() > 24 { format!("{}…{}", &id[..15], &id[id.len() - 6..]) } else { id.clone() };
    let number = |value: Option<i64>| value.map_or("–".into(), grouped);
    let time = |value: Option<f64>| value.map_or("–".into(), took);
    html! {
        tr {
            td { (page::time(row.created, true)) }
            td { a href=(format!("/usage/{id}")) { code { (short_id) } } }
            td.name { span.text { (row.key_name) } }
            td { (outcome(row.status, row.error_code.as_deref())) }
            td.number { (number(row.tokens.prompt_tokens)) }
            td.number { (number(row.tokens.completion_tokens)) }
            td.number { (time(row.runtime_ms)) }
            td.number { (time(row.duration_ms)) }
        }
    }
}

/// What came of a request, in a word or two.
pub fn outcome(status: Option<i64>, code: Option<&str>) -> Markup {
    html! {
        @match (status, code) {
            (Some(200), _) => span.badge.good { "200" },
            (None, None) => span.badge { "under way" },
            (status, code) => span.badge.bad { @if let Some(status) = status { (status) " " } (code.unwrap_or("")) },
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
