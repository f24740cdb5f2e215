//! Audit: who changed what.

use maud::{Markup, html};

use super::page::{self, Part};
use super::visit::{ConsoleSession, Visit};
use super::{Console, PageError, html_table};
use crate::http::Response;
use crate::id::has_shape;
use crate::store::{AuditRow, AuditSubject};

/// How many rows a page has.
const ROWS: usize = 50;

pub fn page(console: &Console, visit: &Visit, session: &ConsoleSession) -> Result<Response, PageError> {
    let before = Some(visit.query.get("before")).filter(|id| has_shape(id, "audit_", 32));
    // One more tells whether there is another page.
    let about = AuditSubject::ALL.into_iter().find(|subject| subject.as_str() == visit.query.get("about"));
    let mut rows = console.store.newest_audit(about, before, ROWS as i64 + 1)?;
    let has_more = rows.len() > ROWS;
    rows.truncate(ROWS);
    let address = |about: Option<AuditSubject>, before: Option<&str>| {
        let about = about.map(|subject| format!("about={}", subject.as_str()));
        let fields: Vec<String> = about.into_iter().chain(before.map(|id| format!("before={id}"))).collect();
        format!("/audit?{}", fields.join("&")).trim_end_matches('?').to_owned()
    };
    let choices = [
        (None, "All"),
        (Some(AuditSubject::Keys), "Keys"),
        (Some(AuditSubject::SignIns), "Sign-ins"),
        (Some(AuditSubject::Settings), "Settings"),
    ];
    let content = html! {
        main {
            h1 { "Audit" }
            div.filters {
                nav.choices aria-label="About" {
                    @for (subject, name) in choices { a href=(address(subject, None)) aria-current=[(subject == about).then_some("true")] { (name) } }
                }
            }
            p.muted { "Who changed what, the newest first. Failed sign-ins are summed for up to 15 minutes." }
            @if rows.is_empty() {
                section.empty { h2 { "No rows" } p { "None matches." } }
            } @else {
                (html_table::cards("audit", &["Time (UTC)", "Action", "By", "Key", "Details"].map(html_table::heading), rows.iter().map(cells)))
            }
            @if has_more || before.is_some() {
                nav.pages aria-label="Pages" {
                    @if before.is_some() { a.button href=(address(about, None)) { "← Newest" } }
                    @if let Some(last) = rows.last().filter(|_| has_more) {
                        a.button href=(address(about, Some(&last.id))) rel="next" { "Earlier changes →" }
                    }
                }
            }
        }
    };
    Ok(page::inside(console, session, Part::Audit, "Audit", &content))
}

fn cells(row: &AuditRow) -> Vec<Markup> {
    vec![
        page::time(row.created, true),
        html! { strong { (row.description()) } },
        html! { span.text { (row.actor) } " " span.muted { (row.via) } },
        html! {
            @if let (Some(id), Some(name)) = (&row.key_id, &row.key_name) { a.text href=(format!("/keys/{id}")) { (name) } }
        },
        html! { (row.details) },
    ]
}
