//! The requests page: rows of the ledger, the newest first.

use std::iter;

use maud::{Markup, html};

use super::details::{self, gateway_name, outcome};
use crate::console::{
    html::{
        format::{self, figure, measured_duration},
        table::{cards, heading, page_links},
    },
    layout,
    page::{Operator, PageResult},
    usage::{filters::filters, view::UsageView},
};
use crate::id::RequestId;
use crate::ledger::{LedgerRow, Listing};
use crate::when::Zone;

const ROWS_PER_PAGE: usize = 50;

/// The columns after the time. The last one is for a database that several gateways share.
const COLUMNS: [&str; 8] = [
    "Request",
    "Key",
    "Outcome",
    "Tokens in",
    "Tokens out",
    "Runtime",
    "Total",
    "Gateway",
];

pub fn page(operator: &Operator) -> PageResult {
    let Operator {
        console, request, ..
    } = *operator;
    let keys = console.store.keys.list()?;
    let view = UsageView::from_request(operator, &keys)?;
    let gateways = console.shared_gateways()?;
    let id = |name| Some(request.query.get(name)).filter(|id| details::is_id(id));
    let (before, after) = (id("before"), id("after"));
    let (ledger, filter) = (&console.store.ledger, view.row_filter());
    let is_forward = after.is_some();
    let mut listing = if is_forward {
        ledger.oldest(&filter, after, ROWS_PER_PAGE)?
    } else {
        ledger.newest(&filter, before, ROWS_PER_PAGE)?
    };
    let next = listing.next.as_deref();
    let (later, earlier) = if is_forward {
        listing.rows.reverse();
        (next, listing.rows.last().map(|row| &*row.request_id))
    } else {
        let first = listing.rows.first().map(|row| &*row.request_id);
        (before.map(|before| first.unwrap_or(before)), next)
    };
    let newest = view.address("/requests");
    let address = |name: &str, id: &str| format!("{newest}&{name}={id}");
    let (later_text, earlier_text) = match (listing.searched_to.is_some(), is_forward) {
        (true, true) => ("← Search later requests", "Earlier requests →"),
        (true, false) => ("← Later requests", "Search earlier requests →"),
        (false, _) => ("← Later requests", "Earlier requests →"),
    };
    let previous = later.map(|id| {
        [
            ("« Newest", newest.clone()),
            (later_text, address("after", id)),
        ]
    });
    let next = earlier.map(|id| (earlier_text, address("before", id)));
    let here = match (before, after) {
        (Some(id), _) => address("before", id),
        (None, Some(id)) => address("after", id),
        (None, None) => newest.clone(),
    };
    let content = html! {
        main {
            div.head {
                h1 { "Requests" }
                (details::find_form())
            }
            (filters(&view, "/requests", &keys, &gateways))
            @if view.key_text.is_empty() {
                (list(&view, &listing, is_forward, gateways.len() > 1, &here))
                (page_links(previous.as_ref().map_or(&[], |links| links), "", next))
            }
        }
    };
    Ok(layout::operator_page(
        operator,
        200,
        "/requests",
        "Requests",
        &content,
    ))
}

/// The table. A request's page has the query of `here`, so that it leads back.
fn list(
    view: &UsageView,
    listing: &Listing,
    is_forward: bool,
    with_gateway: bool,
    here: &str,
) -> Markup {
    let columns = if with_gateway {
        COLUMNS.len() + 1
    } else {
        COLUMNS.len()
    };
    let time = format!("Time ({})", view.zone.name());
    let headings: Vec<Markup> = iter::once(time.as_str())
        .chain(COLUMNS)
        .map(heading)
        .collect();
    let rows = listing.rows.iter().map(|row| {
        cells(row, here, &view.zone)
            .into_iter()
            .take(columns)
            .collect()
    });
    let searched = listing.searched_to.as_ref().map(|last| {
        let way = if is_forward { "up" } else { "back" };
        let end = format::second(RequestId::time_of(last).unwrap_or(0), &view.zone);
        html! { "Searched " (way) " to " (end) " so far." }
    });
    html! {
        p.export {
            a href=(view.without_row_filters().address("/usage")) { "Figures" } " of this range. Export the rows: "
            a href=(view.address("/requests/export.csv")) { "CSV" } " "
            a href=(view.address("/requests/export.json")) { "JSON" }
        }
        @if listing.rows.is_empty() {
            section.empty {
                h2 { @if searched.is_some() { "None found yet" } @else { "No requests" } }
                p { @match searched { Some(searched) => (searched), None => "None matches the range and the filters." } }
            }
        } @else {
            (cards("requests", &headings[..columns], rows))
            @if let Some(searched) = searched { p.notice { (searched) } }
        }
    }
}

fn cells(row: &LedgerRow, here: &str, zone: &Zone) -> [Markup; COLUMNS.len() + 1] {
    let id = &row.request_id;
    // Its first digits are the time.
    let short_id = id
        .get(id.len().saturating_sub(6)..)
        .map_or(id.clone(), |end| format!("chatcmpl_…{end}"));
    [
        format::second(row.created, zone),
        html! { a href=(here.replacen("/requests", &format!("/requests/{id}"), 1)) { code { (short_id) } } },
        html! { a.text href=(format!("/keys/{}", row.key_id)) { (row.key_name) } },
        html! {
            (outcome(row.status, row.error_code.as_deref()))
            @if let Some(cause) = &row.cause { " " span.muted.cause { (cause) } }
        },
        html! { (figure(row.tokens.prompt_tokens)) },
        html! { (figure(row.tokens.completion_tokens)) },
        html! { (measured_duration(row.runtime_ms)) },
        html! { (measured_duration(row.duration_ms)) },
        html! { (gateway_name(&row.gateway)) },
    ]
}
