//! The requests themselves, the newest first.

use maud::{Markup, html};

use super::page::{self, took};
use super::table::{cards, heading};
use super::usage::hidden;
use super::view::{Took, View};
use crate::id::RequestId;
use crate::store::{LedgerRow, Listing};
use crate::text::grouped;

/// How many requests a page lists.
pub const LISTED: usize = 15;

const COLUMNS: [&str; 9] =
    ["Time", "Request", "Key", "Outcome", "Tokens in", "Tokens out", "Runtime", "Total", "Gateway"];

pub fn section(view: &View, listing: &Listing, is_later_page: bool, with_gateway: bool) -> Markup {
    let headings: Vec<Markup> =
        COLUMNS.into_iter().filter(|name| with_gateway || *name != "Gateway").map(heading).collect();
    html! {
        section #requests {
            div.head {
                h2 { @if is_later_page { "Earlier requests" } @else { "Newest requests" } }
                (by_duration(view))
                @if !listing.rows.is_empty() {
                    p.export { "Export: "
                        a href=(format!("/usage/export.csv?{}", view.query())) download { "CSV" } " "
                        a href=(format!("/usage/export.json?{}", view.query())) download { "JSON" }
                    }
                }
            }
            @if listing.rows.is_empty() { p.muted { "None." } }
            @else {
                (cards("requests", &headings, listing.rows.iter().map(|row| cells(row, with_gateway))))
            }
            @if let Some(last) = &listing.searched_to {
                p.muted { "Searched " (grouped(view.which().searched_rows())) " requests, back to " (page::time(RequestId::time_of(last), true)) "." }
            }
            @if let Some(next) = &listing.next {
                nav.pages aria-label="Pages" {
                    a.button href=(format!("/usage?{}&before={next}", view.query())) rel="next" { "Earlier requests →" }
                }
            }
        }
    }
}

/// The filter that only the list knows.
fn by_duration(view: &View) -> Markup {
    let Took { least, most } = view.took;
    html! {
        form.took method="get" action="/usage#requests" {
            (hidden(view, &["least", "most"]))
            @for (name, text, value) in [("least", "Took at least", least), ("most", "at most", most)] {
                label { (text) input name=(name) type="number" min="0" max=(u32::MAX) value=[value]; "ms" }
            }
            button type="submit" { "Filter" }
        }
    }
}

fn cells(row: &LedgerRow, with_gateway: bool) -> Vec<Markup> {
    let id = &row.request_id;
    let short_id =
        if id.len() > 24 { format!("{}…{}", &id[..15], &id[id.len() - 6..]) } else { id.clone() };
    let number = |value: Option<i64>| html! { (value.map_or("–".into(), grouped)) };
    let time = |value: Option<f64>| html! { (value.map_or("–".into(), took)) };
    let mut cells = vec![
        page::time(row.created, true),
        html! { a href=(format!("/usage/{id}")) { code { (short_id) } } },
        html! { span.text { (row.key_name) } },
        outcome(row.status, row.error_code.as_deref()),
        number(row.tokens.prompt_tokens),
        number(row.tokens.completion_tokens),
        time(row.runtime_ms),
        time(row.duration_ms),
    ];
    if with_gateway {
        cells.push(html! { (gateway_name(&row.gateway)) });
    }
    cells
}

/// Rows of a ledger that was moved here have no gateway.
pub fn gateway_name(name: &str) -> &str {
    if name.is_empty() { "–" } else { name }
}

/// What came of a request, in a word or two.
pub fn outcome(status: Option<i64>, code: Option<&str>) -> Markup {
    html! {
        @match (status, code) {
            (Some(200), _) => span.badge.good { "200" },
            (None, None) => span.badge { "in progress" },
            (status, code) => span.badge.bad { @if let Some(status) = status { (status) " " } (code.unwrap_or("")) },
        }
    }
}
