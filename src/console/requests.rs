//! The pages about requests: the list, the newest first, its export, and one request.

use std::time::Instant;

use maud::{Markup, html};

use super::filters::{self, Asked, MAX_LINES};
use super::page::{Operator, PageError, PageResult, redirect};
use crate::error::Problem;
use crate::http::Response;
use crate::id::{RequestId, has_shape};
use crate::ledger::{LedgerRow, Listing, RowFilter};
use crate::report::format;
use crate::report::query::Query;
use crate::report::rows::{self, request_csv, requests_csv_heading};
use crate::report::{facts_to_html, page_links};
use crate::store::Store;

const ROWS_PER_PAGE: usize = 50;

/// The rows that an export reads at a time: as many as the ledger searches.
const ROWS_PER_READ: usize = 2_000;

const COLUMNS: &str = "time,request,key,outcome,tokens in,tokens out,runtime,duration";

pub fn list(operator: &Operator) -> PageResult {
    let asked = filters::read(operator, "/requests")?;
    let content = html! {
        main {
            div.head {
                h1 { "Requests" }
                (find_form())
            }
            (asked.filters("/requests"))
            @if asked.unclear.is_none() { (listed(operator, &asked)?) }
        }
    };
    Ok(operator.page("Requests", &content))
}

/// The page of the list before an id, or after one. A request's page has its query, so that it leads
/// back.
fn listed(operator: &Operator, asked: &Asked) -> Result<Markup, PageError> {
    let query = &asked.query;
    let (ledger, filter) = (&operator.console.store.ledger, query.row_filter());
    let id = |name| Some(query.get(name)).filter(|id| !id.is_empty());
    let (before, after) = (id("before"), id("after"));
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
    let (later_text, earlier_text) = match (listing.searched_to.is_some(), is_forward) {
        (true, true) => ("← Search later requests", "Earlier requests →"),
        (true, false) => ("← Later requests", "Search earlier requests →"),
        (false, _) => ("← Later requests", "Earlier requests →"),
    };
    let to = |name: &'static str, id: &str| query.link("/requests", &[(name, id)]);
    let previous = later.map(|id| {
        [
            ("« Newest", to("before", "")),
            (later_text, to("after", id)),
        ]
    });
    let previous = previous.as_ref().map_or(&[][..], |links| links);
    let columns = match asked.gateways.len() {
        0 | 1 => COLUMNS.to_owned(),
        _ => format!("{COLUMNS},gateway"),
    };
    let searched = searched(&listing, is_forward, query);
    Ok(html! {
        p.export {
            a href=(query.link("/usage", &[])) { "Figures" } " of this range. Export the rows: "
            a href=(query.link("/requests/export.csv", &[])) { "CSV" }
        }
        @if listing.rows.is_empty() {
            section.empty {
                h2 { @if searched.is_some() { "None found yet" } @else { "No requests" } }
                p { @match searched { Some(searched) => (searched), None => "None matches the range and the filters." } }
            }
        } @else {
            (rows::requests(&listing.rows, query).html("requests", &columns))
            @if let Some(searched) = searched { p.notice { (searched) } }
        }
        (page_links(previous, "", earlier.map(|id| (earlier_text, to("before", id)))))
    })
}

/// How far a search has come that took too long.
fn searched(listing: &Listing, is_forward: bool, query: &Query) -> Option<Markup> {
    let last = listing.searched_to.as_deref()?;
    let way = if is_forward { "up" } else { "back" };
    let end = format::second(RequestId::time_of(last).unwrap_or(0), &query.zone);
    Some(html! { "Searched " (way) " to " (end) " so far." })
}

/// Finds the id in pasted text: an error message has words around it.
fn id_in(text: &str) -> Option<&str> {
    let start = text.find("chatcmpl_")?;
    let id = text.get(start..start + "chatcmpl_".len() + 32)?;
    has_shape(id, "chatcmpl_", 32).then_some(id)
}

pub fn find(operator: &Operator) -> PageResult {
    let asked = operator.request.query.get("id");
    if let Some(id) = id_in(asked) {
        return Ok(redirect(&format!("/requests/{id}")));
    }
    let text = "A request's id is chatcmpl_ and 32 hexadecimal digits. It is in the answer, as id or request_id, and in \
                its header x-request-id.";
    Ok(missing(operator, asked, text))
}

/// The page of one request: what its cause means, where its time went, and its row.
pub fn page(operator: &Operator, id: &str) -> PageResult {
    let console = operator.console;
    let zone = &console.store.zone;
    let back = filters::query(operator, "/requests")?.link("/requests", &[]);
    let Some(row) = console.store.ledger.find_row(id)? else {
        return Ok(missing(
            operator,
            id,
            &format!("The ledger has no such request. {}", rows::NO_ROW),
        ));
    };
    let key = console.store.keys.get(&row.key_id)?;
    let has_gateways = console.config.database.file().is_none();
    let content = html! {
        main {
            p.crumbs { a href=(back) { "Requests" } " / Request" }
            h1.id { code { (row.request_id) } }
            p.lead { (rows::outcome(&row).markup()) " " (rows::meaning(&row)) }
            (timeline(&row))
            (facts_to_html(&rows::request(&row, key.as_ref(), has_gateways, zone)))
            p.muted { "What was asked and answered is kept nowhere. The service’s log has a line with the same id." }
        }
    };
    Ok(operator.page("Request", &content))
}

pub fn csv(operator: &Operator) -> PageResult {
    let asked = filters::read(operator, "/requests")?;
    let store = &operator.console.store;
    // The command's own limit is 100 rows; this is its highest.
    let command = "usage list --limit 100000 --csv";
    filters::export(operator, &asked, "usage", command, |deadline| {
        request_lines(store, &asked.query.row_filter(), deadline)
    })
}

/// The lines of an export; `None` if there are too many or the search takes too long.
fn request_lines(
    store: &Store,
    filter: &RowFilter,
    deadline: Instant,
) -> Result<Option<String>, Problem> {
    let (mut text, mut lines, mut after) = (requests_csv_heading(), 0, None);
    loop {
        let listing = store
            .ledger
            .oldest(filter, after.as_deref(), ROWS_PER_READ)?;
        for row in &listing.rows {
            text += &request_csv(row, &store.zone);
        }
        lines += listing.rows.len();
        after = listing.next;
        if lines > MAX_LINES || (after.is_some() && Instant::now() >= deadline) {
            return Ok(None);
        }
        if after.is_none() {
            return Ok(Some(text));
        }
    }
}

fn find_form() -> Markup {
    html! {
        form.find method="get" action="/requests/find" role="search" {
            label.unseen for="id" { "Find a request by its id" }
            input #id name="id" type="search" placeholder="Find a request: chatcmpl_…" required maxlength="4000" autocomplete="off" spellcheck="false";
            button type="submit" { "Find" }
        }
    }
}

fn missing(operator: &Operator, asked: &str, text: &str) -> Response {
    let content = html! {
        main.narrow {
            p.crumbs { a href="/requests" { "Requests" } " / Request" }
            h1 { "No such request" }
            p { code.text { (asked) } }
            p { (text) }
            (find_form())
        }
    };
    Response {
        status: 404,
        ..operator.page("No such request", &content)
    }
}

/// A bar with the parts of the request's time.
fn timeline(row: &LedgerRow) -> Markup {
    let Some(all) = row.duration_ms.filter(|all| *all > 0.0) else {
        return html! {};
    };
    let measured = [row.queue_ms, row.search_ms, row.runtime_ms];
    let measured: f64 = measured.into_iter().flatten().sum();
    let parts = [
        ("Queue", "t0", row.queue_ms),
        ("Gateway", "t1", Some((all - measured).max(0.0))),
        ("Search", "t2", row.search_ms),
        ("Runtime", "t3", row.runtime_ms),
    ];
    let scale = 1000.0 / all.max(measured).max(f64::MIN_POSITIVE);
    let (mut x, mut drawn) = (0.0, Vec::new());
    for (name, class, ms) in parts {
        // A part that was not measured has no place in the bar.
        let Some(ms) = ms else { continue };
        drawn.push((name, class, ms, x, ms * scale));
        x += ms * scale;
    }
    html! {
        figure.timeline {
            svg viewBox="0 0 1000 20" preserveAspectRatio="none" role="img" aria-label="Where the time went" {
                @for (name, class, ms, x, width) in &drawn {
                    rect class=(format!("f {class}")) x=(format!("{x:.1}")) width=(format!("{width:.1}")) height="20" { title { (name) ": " (format::duration(*ms)) } }
                }
            }
            ul.legend {
                @for (name, class, ms, _, _) in &drawn { li { span class=(format!("swatch {class}")) {} (name) " " (format::duration(*ms)) } }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::console::filters::LONGEST_SEARCH;
    use crate::ledger::Filter;
    use crate::store::tests::Temporary;
    use crate::when::Range;

    #[test]
    fn an_id_is_found_in_what_was_pasted() {
        let id = "chatcmpl_0123456789abcdef0123456789abcdef";
        for text in [
            id,
            &format!("  {id}\n"),
            &format!("{{\"request_id\": \"{id}\"}}"),
            &format!("é{id}."),
        ] {
            assert_eq!(id_in(text), Some(id), "{text}");
        }
        for text in [
            "",
            "chatcmpl_",
            "chatcmpl_0123",
            "chatcmpl_ZZ23456789abcdef0123456789abcdef",
            "chatcmpl_0123456789abcdef0123456789abcdeé",
        ] {
            assert_eq!(id_in(text), None, "{text}");
        }
    }

    /// Inserts rows of a second, of which the last is slow.
    fn insert(temporary: &Temporary, rows: usize) {
        temporary.store.tamper(&format!(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})
             INSERT INTO usage (request_id, key_id, key_name, created, status, duration_ms, day)
             SELECT printf('chatcmpl_%012x%020x', 150000, i), 'key_1', 'x', 150, 200,
             CASE i WHEN {rows} THEN 9000 ELSE 1 END, '1970-01-01' FROM n"
        ));
    }

    fn filter(least_ms: Option<u32>) -> RowFilter {
        let range = Range {
            since: 100,
            until: 200,
        };
        RowFilter {
            least_ms,
            ..RowFilter::of(range, Filter::ALL)
        }
    }

    #[test]
    fn an_export_has_a_bound() {
        let temporary = Temporary::sqlite();
        insert(&temporary, MAX_LINES);
        let lines = || {
            let deadline = Instant::now() + LONGEST_SEARCH;
            let lines = request_lines(&temporary.store, &filter(None), deadline);
            lines.expect("rows").map(|text| text.lines().count() - 1)
        };
        assert_eq!(lines(), Some(MAX_LINES));
        temporary.store.tamper(
            "INSERT INTO usage (request_id, key_id, key_name, created, status, day)
             VALUES ('chatcmpl_000000024abc', 'key_1', 'x', 150, 200, '1970-01-01')",
        );
        assert_eq!(lines(), None);
    }

    /// An export of few rows among many held one of the console's two threads until it found the
    /// first.
    #[test]
    fn an_export_ends_in_time() {
        let temporary = Temporary::sqlite();
        insert(&temporary, 2 * ROWS_PER_READ + 1);
        for (time, expected) in [
            (LONGEST_SEARCH, Some(2 * ROWS_PER_READ + 1)),
            (Duration::ZERO, None),
        ] {
            let all = filter(None);
            let lines = request_lines(&temporary.store, &all, Instant::now() + time);
            let found = lines.expect("rows").map(|text| text.lines().count() - 1);
            assert_eq!(found, expected);
        }
        let slow = filter(Some(5000));
        let lines = request_lines(&temporary.store, &slow, Instant::now());
        assert_eq!(
            lines.expect("rows").map(|text| text.lines().count() - 1),
            Some(1)
        );
    }
}
