//! The page of one request, and the search for it by its id.

use maud::{Markup, html};

use crate::config::GroundingMode;
use crate::console::{
    html::format::{self, figure, measured_duration},
    layout,
    page::{Operator, PageError, PageResult},
};
use crate::http::Response;
use crate::id::has_shape;
use crate::ledger::LedgerRow;
use crate::text::count;

pub fn is_id(text: &str) -> bool {
    has_shape(text, "chatcmpl_", 32)
}

/// Finds the id in pasted text: an error message has words around it.
fn id_in(text: &str) -> Option<&str> {
    let start = text.find("chatcmpl_")?;
    let id = text.get(start..start + "chatcmpl_".len() + 32)?;
    is_id(id).then_some(id)
}

pub fn find(operator: &Operator) -> PageResult {
    let asked = operator.request.query.get("id");
    if let Some(id) = id_in(asked) {
        return Ok(layout::redirect(&format!("/requests/{id}")));
    }
    let text = "A request's id is chatcmpl_ and 32 hexadecimal digits. It is in the answer, as id or request_id, and in \
                its header x-request-id.";
    Ok(missing(operator, asked, text))
}

pub fn page(operator: &Operator, id: &str) -> PageResult {
    let console = operator.console;
    if !is_id(id) {
        return Err(PageError::NotFound);
    }
    let Some(row) = console.store.ledger.find_row(id)? else {
        let text = "The ledger has no such request. One without a valid key leaves no row, nor does one to an unknown \
                    address, one too large, or one that was turned away under load; and old rows may have been removed \
                    (usage.retention_days).";
        return Ok(missing(operator, id, text));
    };
    let (key, zone) = (console.store.keys.get(&row.key_id)?, &console.store.zone);
    let content = html! {
        main {
            p.crumbs { a href=(operator.request.with_query("/requests")) { "Requests" } " / Request" }
            h1.id { code { (row.request_id) } }
            p.lead { (outcome(row.status, row.error_code.as_deref())) " " (summary(&row)) }
            @if let Some(text) = advice(&row) { p.notice { (text) } }
            (timeline(&row))
            dl.facts {
                dt { "Received" } dd { (format::second(row.created, zone)) " " (zone.name()) }
                dt { "Key" } dd {
                    a href=(format!("/keys/{}", row.key_id)) { span.text { (row.key_name) } } " "
                    code.muted { (row.key_id) }
                    @if let Some(key) = key.filter(|key| key.name != row.key_name) { " – now named " span.text { (key.name) } }
                }
                @if let Some(cause) = &row.cause { dt { "Cause" } dd { code { (cause) } } }
                dt { "Tokens in" } dd { (figure(row.tokens.prompt_tokens)) }
                dt { "Tokens out" } dd { (figure(row.tokens.completion_tokens)) }
                dt { "Total tokens" } dd { (figure(row.tokens.total_tokens)) }
                @if row.search_reason.is_some() || console.config.search.grounding != GroundingMode::Off {
                    dt { "Grounded" } dd { @if row.grounded { "yes, in passages that Search found" } @else { "no" } }
                    dt { "Search" } dd { (search(&row)) }
                }
                @if console.config.database.file().is_none() { dt { "Gateway" } dd.text { (gateway_name(&row.gateway)) } }
            }
            p.muted { "What was asked and answered is kept nowhere. The service’s log has a line with the same id." }
        }
    };
    Ok(layout::operator_page(
        operator,
        200,
        "/requests",
        "Request",
        &content,
    ))
}

pub fn find_form() -> Markup {
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
    layout::operator_page(operator, 404, "/requests", "No such request", &content)
}

/// Rows of a ledger that was moved here have no gateway.
pub fn gateway_name(name: &str) -> &str {
    if name.is_empty() { "–" } else { name }
}

pub fn outcome(status: Option<i64>, code: Option<&str>) -> Markup {
    html! {
        @match (status, code) {
            (Some(200), _) => span.badge.good { "200" },
            (status, code) => span.badge.bad { @if let Some(status) = status { (status) " " } (code.unwrap_or("")) },
        }
    }
}

/// A sentence about the outcome.
fn summary(row: &LedgerRow) -> String {
    match (row.status, row.error_code.as_deref(), row.duration_ms) {
        (None, Some("abandoned"), _) => {
            "The client closed its connection before there was an answer. Nothing was sent.".into()
        }
        (None, _, _) => "The service ended before it was answered. Nothing was sent.".into(),
        (Some(200), _, Some(ms)) => format!("Answered in {}.", format::duration(ms)),
        (Some(status), _, Some(ms)) => {
            let before = match row.runtime_ms {
                Some(_) => "",
                None => ", before the runtime was asked",
            };
            format!(
                "Answered with {status} after {}{before}.",
                format::duration(ms)
            )
        }
        (Some(status), _, None) => format!("Answered with {status}."),
    }
}

/// The explanation of an error code, with the next step.
fn advice(row: &LedgerRow) -> Option<&'static str> {
    Some(match row.error_code.as_deref()? {
        "insufficient_permission" if row.cause.as_deref() == Some("budget") => {
            "The key has used its budget. Raise it on the key’s page, or wait until it is renewed."
        }
        "invalid_request" => {
            "The client’s request broke a rule of the API, or the prompt was longer than the model’s context. The answer \
             named the member and the bound; the client has to change what it sends."
        }
        "insufficient_permission" => {
            "The key may not run completions, or had used its budget. The answer said which. Give the client a key that \
             has the permission, or this key a larger budget."
        }
        "inference_error" => {
            "The runtime could not be reached, took too long or gave no usable answer. The service’s log has the \
             reason, under this id; Status shows whether it answers now."
        }
        "search_unavailable" => {
            "The answer needed Search, which could not be asked or gave no usable reply."
        }
        "service_unavailable" => {
            "The service could not do its part: no runtime is configured, or the ledger could not be written. Its log \
             has the reason, under this id."
        }
        "interrupted" => {
            "The service, of an earlier version, was killed or lost power. What the runtime has used is not known."
        }
        "abandoned" => {
            "The client closed its connection, often because its own timeout was shorter than the answer took. The \
             runtime’s work was cancelled; what it had used by then is not known."
        }
        _ => return None,
    })
}

/// The reason and the result of a search.
fn search(row: &LedgerRow) -> String {
    let why = match row.search_reason.as_deref() {
        None => return "not asked".into(),
        Some("always") => "every request needs it",
        Some("match") => "a pattern matched",
        Some(_) => "the model asked for it",
    };
    let found = match row.search_results {
        Some(found) => format!("{} found", count(found, "passage")),
        None => "unavailable".into(),
    };
    format!(
        "asked, as {why}: {found}, {}",
        measured_duration(row.search_ms)
    )
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
    use super::*;

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
        assert!(!is_id("chatcmpl_0123456789abcdef0123456789abcdef0"));
    }
}
