//! The columns of every list: keys, usage by any group, requests and the audit; and what is known
//! about one request.

use maud::html;

use super::format::{self, cells, csv_line};
use super::query::Query;
use super::{Cell, Facts, Table};
use crate::audit::AuditRow;
use crate::keys::{Budget, Key, KeyState, Permission, time_left};
use crate::ledger::{Grouping, LedgerRow, Sums, UsageRow};
use crate::text::{count, grouped};
use crate::when::Zone;

/// A key, and its sums of the last days.
pub type KeyRow = (Key, Sums);

pub fn keys<'a>(rows: &'a [KeyRow], now: i64, query: &'a Query) -> Table<'a, KeyRow> {
    let zone = &query.zone;
    let requests = move |key: &Key, outcome: &str| {
        let filter = [
            ("range", "30d"),
            ("key", key.id.as_str()),
            ("outcome", outcome),
        ];
        query.link("/requests", &filter)
    };
    Table::new(rows)
        .text("name", "Name", |(key, _)| {
            let name = Cell::name(&key.name).link(query.link(&format!("/keys/{}", key.id), &[]));
            let page = html! { (name.markup()) " " code.muted { (key.hint) } };
            Cell::text(&key.name).on_page(page)
        })
        .text("id", "Id", |(key, _)| Cell::code(&key.id))
        .text("secret", "Secret", |(key, _)| secret(key, zone))
        .text("state", "State", move |(key, _)| {
            let state = key.state(now).as_str();
            Cell::text(match key.revoked {
                None => state.to_owned(),
                time => format!("{state} {}", zone.format_minute(time)),
            })
        })
        .text("permissions", "Permissions", |(key, _)| {
            let permissions = Permission::join(&key.terms.permissions);
            let page = permissions.replace(',', ", ");
            Cell::text(permissions).on_page(html! { (page) })
        })
        .class("o")
        .text("limits", "Budget, limit", |(key, _)| limits(key))
        .text("created", "Created", |(key, _)| {
            Cell::minute(Some(key.created), zone)
        })
        .text("expires", "Expires", move |(key, _)| expiry(key, now, zone))
        .text("revoked", "Revoked", |(key, _)| {
            Cell::minute(key.revoked, zone)
        })
        .text("last used", "Last used", |(key, _)| {
            Cell::minute(key.last_used, zone)
        })
        .number("concurrent", "Limit", |(key, _)| {
            Cell::number(key.terms.concurrent.map(i64::from))
        })
        .text("budget", "Budget", |(key, _)| {
            let used = |Budget { tokens, per, used }| {
                format!("{} of {}/{}", grouped(used), grouped(tokens), per.as_str())
            };
            Cell::text(key.terms.budget.map_or("-".into(), used))
        })
        .number("requests", "Requests, 30\u{a0}d", move |(key, sums)| {
            Cell::number(Some(sums.requests)).link(requests(key, ""))
        })
        .number(
            "errors",
            "Errors, 30\u{a0}d",
            move |(key, sums)| match sums.errors {
                0 => Cell::number(Some(0)),
                errors => Cell::number(Some(errors)).link(requests(key, "failed")),
            },
        )
        .number("tokens", "Tokens, 30\u{a0}d", |(_, sums)| {
            Cell::number(Some(sums.total_tokens))
        })
}

fn secret(key: &Key, zone: &Zone) -> Cell {
    let present = Cell::code(&key.hint);
    let Some(old) = &key.overlap else {
        return present;
    };
    let ends = Cell::minute(Some(old.ends), zone);
    let former = Cell::text("and").and(Cell::code(&old.hint));
    present.and(former).and(Cell::text("until")).and(ends)
}

/// Ordered by the used share of the budget; a key without one has used less than nothing.
fn limits(key: &Key) -> Cell {
    let limit = key
        .terms
        .concurrent
        .map(|number| format!("{number} concurrent"));
    let page = html! {
        @if let Some(budget) = &key.terms.budget { (budget_bar(budget)) }
        @if let Some(limit) = limit { div.muted { (limit) } }
    };
    let used = key.terms.budget.map_or(-1, |budget| budget.percent());
    Cell::text("").on_page(page).ordered(used)
}

/// The used part of a budget, as a bar and in figures.
fn budget_bar(budget: &Budget) -> maud::Markup {
    let Budget { tokens, per, used } = *budget;
    html! {
        progress max=(tokens) value=(used.min(tokens)) class=[budget.is_nearly_used_up().then_some("bad")] aria-label="Used of the budget" {}
        (budget.percent()) "% of " (grouped(tokens)) " a " (per.as_str())
        @if budget.is_used_up() { " " span.badge.bad { "used up" } }
    }
}

/// The last day on which it is accepted. A key that never expires comes last.
fn expiry(key: &Key, now: i64, zone: &Zone) -> Cell {
    let expires = key.terms.expires;
    let page = html! {
        (format::or_never(expires, |time| format::date(time - 1, zone)))
        (expiry_badge(key, now))
    };
    Cell::minute(expires, zone)
        .on_page(page)
        .ordered(expires.unwrap_or(i64::MAX))
}

fn expiry_badge(key: &Key, now: i64) -> maud::Markup {
    html! {
        @match key.state(now) {
            KeyState::Expired => { " " span.badge.bad { "expired" } },
            KeyState::Expiring => { " " span.badge.warn { "expires in " (time_left(key.terms.expires.unwrap_or(now) - now)) } },
            KeyState::Active | KeyState::Revoked => {},
        }
    }
}

/// The figures of a group, as its fields.
pub const FIGURES: [&str; 6] = [
    "requests",
    "errors",
    "prompt_tokens",
    "completion_tokens",
    "total_tokens",
    "unmeasured",
];

/// The figures of groups, of which `all` is the sum.
pub fn usage<'a>(
    rows: &'a [UsageRow],
    by: &'a [Grouping],
    all: &'a Sums,
    query: &'a Query,
) -> Table<'a, UsageRow> {
    let mut table = Table::new(rows);
    for label in by.iter().flat_map(|by| by.labels()) {
        let heading = match *label {
            "name" => "Key",
            "day" => "Day",
            "error_code" => "Outcome",
            label => label,
        };
        table = table.text(label, heading, |row| group(row, label, query));
    }
    let requests = move |row: &UsageRow| {
        let (field, value) = filter(row, query);
        query.link("/requests", &[(field, &value)])
    };
    table
        .number("requests", "Requests", move |row| {
            Cell::number(Some(row.sums.requests)).link(requests(row))
        })
        .number("errors", "Errors", |row| {
            Cell::number(Some(row.sums.errors))
        })
        .number("succeeded", "Succeeded", |row| {
            Cell::share(row.all.succeeded(), row.all.requests)
        })
        .number("requests_share", "Share of requests", |row| {
            Cell::share(row.sums.requests, all.requests)
        })
        .number("prompt_tokens", "Tokens in", |row| figure(row, 0))
        .number("completion_tokens", "Tokens out", |row| figure(row, 1))
        .number("total_tokens", "Total tokens", |row| figure(row, 2))
        .number("share", "Share of tokens", |row| {
            match tokens(&row.sums)[2] {
                Some(total) => Cell::share(total, all.total_tokens),
                None => Cell::number(None),
            }
        })
        .number("unmeasured", "Unmeasured", |row| {
            Cell::number(Some(row.sums.unmeasured))
        })
}

/// The field of an address that selects a group.
fn filter(row: &UsageRow, query: &Query) -> (&'static str, String) {
    match row.labels.keys().next().map(String::as_str) {
        Some("key_id") => ("key", row.label("key_id").to_owned()),
        Some("day") => ("range", query.day_field(row.label("day"))),
        _ => match row.label("error_code") {
            "" => ("outcome", "ok".to_owned()),
            code => ("outcome", code.to_owned()),
        },
    }
}

/// What names a group, with a link to its figures.
fn group(row: &UsageRow, label: &'static str, query: &Query) -> Cell {
    let text = cells(row, [label]).concat();
    let (field, value) = filter(row, query);
    let name = match (text.as_str(), field) {
        ("", "outcome") => "succeeded",
        // A key without a name was removed from the database.
        ("", _) => &value,
        (text, _) => text,
    };
    let by = if field == "key" { "day" } else { "" };
    let address = query.link("/usage", &[(field, &value), ("by", by), ("sort", "")]);
    Cell::name(&text).on_page(html! { (name) }).link(address)
}

fn figure(row: &UsageRow, place: usize) -> Cell {
    Cell::number(tokens(&row.sums)[place])
}

/// The tokens in, out and in all. A sum is unknown, not zero, if no completion was measured; every
/// prompt has tokens.
pub fn tokens(sums: &Sums) -> [Option<i64>; 3] {
    let total = sums
        .measured()
        .filter(|total| *total > 0 || sums.succeeded() > 0);
    let prompt = total
        .and(Some(sums.prompt_tokens))
        .filter(|tokens| *tokens > 0);
    [prompt, total.and(Some(sums.completion_tokens)), total]
}

pub fn requests<'a>(rows: &'a [LedgerRow], query: &'a Query) -> Table<'a, LedgerRow> {
    let zone = &query.zone;
    let time = format!("Time ({})", zone.name());
    Table::new(rows)
        .text("time", &time, |row| Cell::second(row.created, zone))
        .text("request", "Request", |row| {
            let id = &row.request_id;
            // Its first digits are the time.
            let end = id.get(id.len().saturating_sub(6)..);
            let short = end.map_or(id.clone(), |end| format!("chatcmpl_…{end}"));
            let address = query.link(&format!("/requests/{id}"), &[]);
            let page = html! { code { (short) } };
            Cell::text(id).on_page(page).link(address)
        })
        .class("w bare")
        .text("key", "Key", |row| {
            Cell::name(&row.key_name).link(format!("/keys/{}", row.key_id))
        })
        .class("bare")
        .text("outcome", "Outcome", |row| {
            let cause = row.cause.as_deref().unwrap_or_default();
            outcome(row).and(Cell::text(cause).class("muted cause"))
        })
        .class("bare")
        .number("tokens in", "Tokens in", |row| {
            Cell::number(row.tokens.prompt_tokens)
        })
        .number("tokens out", "Tokens out", |row| {
            Cell::number(row.tokens.completion_tokens)
        })
        .number("tokens", "Total tokens", |row| {
            Cell::number(row.tokens.total_tokens)
        })
        .number("runtime", "Runtime", |row| Cell::duration(row.runtime_ms))
        .class("n o")
        .number("duration", "Total", |row| Cell::duration(row.duration_ms))
        .text("gateway", "Gateway", |row| {
            Cell::text(gateway_name(&row.gateway))
        })
        .class("n o")
}

/// Rows of a ledger that was moved here have no gateway.
fn gateway_name(name: &str) -> &str {
    if name.is_empty() { "–" } else { name }
}

pub fn outcome(row: &LedgerRow) -> Cell {
    let status = row.status.map(|status| status.to_string());
    let words: Vec<&str> = status
        .as_deref()
        .into_iter()
        .chain(row.error_code.as_deref())
        .collect();
    let is_good = row.status == Some(200);
    Cell::text(words.join(" ")).class(if is_good { "badge good" } else { "badge bad" })
}

/// Why the ledger may have no row of a request.
pub const NO_ROW: &str = "A request without a valid key leaves no row, nor does one to an unknown address, one too large, or \
     one that was refused under load; retention removes old rows. The log of the service has a line with the id of a \
     request that it refused.";

/// What is known about a request. `key` is its key as it is now.
pub fn request(row: &LedgerRow, key: Option<&Key>, has_gateways: bool, zone: &Zone) -> Facts {
    let key_name = Cell::name(&row.key_name).link(format!("/keys/{}", row.key_id));
    let mut name = key_name.and(Cell::text(format!("({})", row.key_id)).class("muted"));
    if let Some(key) = key.filter(|key| key.name != row.key_name) {
        name = name.and(Cell::text(format!("– now named {}", key.name)));
    }
    let mut facts = vec![
        ("Received", Cell::second(row.created, zone)),
        ("Key", name),
        ("Outcome", outcome(row)),
        ("Tokens in", Cell::number(row.tokens.prompt_tokens)),
        ("Tokens out", Cell::number(row.tokens.completion_tokens)),
        ("Total tokens", Cell::number(row.tokens.total_tokens)),
    ];
    if let Some(cause) = &row.cause {
        facts.insert(3, ("Cause", Cell::code(cause)));
    }
    for (name, time) in [
        ("In all", row.duration_ms),
        ("In the queue", row.queue_ms),
        ("Runtime", row.runtime_ms),
    ] {
        if time.is_some() {
            facts.push((name, Cell::duration(time)));
        }
    }
    if let Some(reason) = row.search_reason.as_deref() {
        facts.push((
            "Grounded",
            Cell::text(if row.grounded {
                "yes, in passages that Search found"
            } else {
                "no"
            }),
        ));
        facts.push(("Search", Cell::text(search(row, reason))));
    }
    if has_gateways {
        facts.push(("Gateway", Cell::name(gateway_name(&row.gateway))));
    }
    facts
}

/// The reason and the result of a search.
fn search(row: &LedgerRow, reason: &str) -> String {
    let why = match reason {
        "always" => "every request needs it",
        "match" => "a pattern matched",
        _ => "the model asked for it",
    };
    let found = match row.search_results {
        Some(found) => format!("{} found", count(found, "passage")),
        None => "unavailable".into(),
    };
    let time = format::measured_duration(row.search_ms);
    format!("asked, as {why}: {found}, {time}")
}

/// A sentence about the outcome of a request: what its cause means, with the next step.
pub fn meaning(row: &LedgerRow) -> String {
    let Some(code) = row.error_code.as_deref() else {
        let time = format::measured_duration(row.duration_ms);
        return format!("Answered in {time}.");
    };
    let backend = match code {
        "search_unavailable" => "Search",
        _ => "The runtime",
    };
    let failed =
        |what: &str| format!("{backend} {what}. The service’s log has the details, under this id.");
    match (code, row.cause.as_deref().unwrap_or_default()) {
        ("abandoned", _) => "The client closed its connection before there was an answer, often because its own timeout was \
             shorter. The work of the runtime was cancelled; what it had used by then is not known."
            .into(),
        (_, "budget") => "The key has used its budget. Raise it on the key’s page, or wait until it is renewed.".into(),
        (_, "permission") => "The key may not run completions. Give the client a key that has the permission.".into(),
        (_, "context") => "The prompt is longer than the model’s context: the client has to send less.".into(),
        (_, "content_type") => "The client has to send Content-Type: application/json.".into(),
        (_, "content_encoding") => "The client has to send its request without a Content-Encoding.".into(),
        (_, "body") => "The request’s body is not a JSON object.".into(),
        (_, "unknown_member") => "The request has a member that the API does not know; the answer named it.".into(),
        ("insufficient_permission", _) => "The key may not run completions, or had used its budget; the answer said which.".into(),
        ("invalid_request", "") => "The request broke a rule of the API; the answer named it.".into(),
        ("invalid_request", member) => format!("The member {member} of the request broke a rule of the API; the answer named the bound."),
        (_, "no_runtime") => "No runtime is configured: set runtime.url.".into(),
        (_, "panic") => "The service failed. Its log has the reason, under this id.".into(),
        (_, "disk_full") => "The ledger could not be written: the disk is full.".into(),
        (_, "database_busy") => "The ledger could not be written: the database was busy.".into(),
        (_, "database_lost") => "The ledger could not be written: the database did not answer.".into(),
        ("service_unavailable", _) => "The service could not do its part. Its log has the reason, under this id.".into(),
        (_, "refused") => failed("refused the connection"),
        (_, "unreachable") => failed("could not be reached"),
        (_, "timeout") => failed("did not answer in time"),
        (_, "broken") => failed("ended the connection before its answer was complete"),
        (_, "answer_too_large") => failed("sent an answer that was too large"),
        (_, "not_json") => failed("sent an answer that was not of the expected form"),
        (_, "no_text") => failed("sent an answer without text"),
        (_, "engines") => failed("found nothing, because its engines did not respond"),
        (_, "index") => failed("has no index that can be read"),
        (_, cause) => match cause.strip_prefix("status_") {
            Some(status) => failed(&format!("answered with HTTP status {status}")),
            None => failed("gave no usable answer"),
        },
    }
}

pub fn audit<'a>(rows: &'a [AuditRow], zone: &'a Zone) -> Table<'a, AuditRow> {
    let time = format!("Time ({})", zone.name());
    Table::new(rows)
        .text("time", &time, |row| Cell::second(row.created, zone))
        .text("action", "Action", |row| {
            let action = row.description();
            Cell::text(&action).on_page(html! { strong { (action) } })
        })
        .class("bare")
        .text("via", "Via", |row| Cell::text(&row.via))
        .text("by", "By", |row| {
            let page = html! { span.text { (row.actor) } " " span.muted { (row.via) } };
            Cell::text(&row.actor).on_page(page)
        })
        .class("bare")
        .text("key", "Key", |row| match (&row.key_id, &row.key_name) {
            (Some(id), Some(name)) => Cell::text(format!("{id} ({name})"))
                .on_page(html! { a.text href=(format!("/keys/{id}")) { (name) } }),
            _ => Cell::text("-").on_page(html! {}),
        })
        .class("bare")
        .text("details", "Details", |row| Cell::text(&row.details))
        .class("w bare")
}

/// A file of comma-separated values.
pub fn csv(columns: &[&str], lines: impl IntoIterator<Item = Vec<String>>) -> String {
    let lines = lines.into_iter().map(|cells| csv_line(&cells));
    csv_line(columns) + &lines.collect::<String>()
}

/// The first line of a CSV file of requests.
pub fn requests_csv_heading() -> String {
    let times = ["created_utc", "created_local"].map(String::from);
    csv_line_with_times(LedgerRow::fields().map(String::from).collect(), times)
}

pub fn request_csv(row: &LedgerRow, zone: &Zone) -> String {
    let times = [&Zone::utc(), zone].map(|zone| zone.iso(row.created).unwrap_or_default());
    csv_line_with_times(cells(row, LedgerRow::fields()), times)
}

/// The fields of the ledger and, beside the Unix time, times that a spreadsheet understands, of UTC
/// and of the database's zone.
fn csv_line_with_times(mut cells: Vec<String>, times: [String; 2]) -> String {
    let created = LedgerRow::fields()
        .position(|name| name == "created")
        .expect("a row has its time");
    cells.splice(created + 1..created + 1, times);
    csv_line(&cells)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_has_one_meaning() {
        for (code, cause, expected) in [
            ("invalid_request", "max_tokens", "The member max_tokens"),
            (
                "invalid_request",
                "context",
                "longer than the model’s context",
            ),
            ("insufficient_permission", "budget", "has used its budget"),
            (
                "insufficient_permission",
                "permission",
                "may not run completions.",
            ),
            ("insufficient_permission", "", "or had used its budget"),
            (
                "inference_error",
                "timeout",
                "The runtime did not answer in time.",
            ),
            (
                "inference_error",
                "status_503",
                "The runtime answered with HTTP status 503.",
            ),
            ("inference_error", "", "The runtime gave no usable answer."),
            (
                "search_unavailable",
                "refused",
                "Search refused the connection.",
            ),
            ("service_unavailable", "disk_full", "the disk is full"),
            ("service_unavailable", "", "could not do its part"),
            ("abandoned", "cancelled", "The client closed its connection"),
        ] {
            let row = LedgerRow {
                error_code: Some(code.into()),
                cause: Some(cause.to_owned()).filter(|cause| !cause.is_empty()),
                ..LedgerRow::default()
            };
            let text = meaning(&row);
            assert!(text.contains(expected), "{code} {cause}: {text}");
        }
        let row = LedgerRow {
            status: Some(200),
            duration_ms: Some(1_234.0),
            ..LedgerRow::default()
        };
        assert_eq!(meaning(&row), "Answered in 1.23 s.");
    }
}
