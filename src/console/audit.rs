//! The audit page: every change of keys, settings and the password, and the sign-ins.

use maud::{Markup, html};

use super::html::form::link;
use super::html::format;
use super::html::table::{cards, choices, heading, page_links};
use super::layout;
use super::page::{Operator, PageResult};
use crate::audit::{AuditRow, AuditSubject};
use crate::id::has_shape;
use crate::when::Zone;

const ROWS_PER_PAGE: usize = 50;

const SUBJECTS: [(Option<AuditSubject>, &str); 4] = [
    (None, "All"),
    (Some(AuditSubject::Keys), "Keys"),
    (Some(AuditSubject::SignIns), "Sign-ins"),
    (Some(AuditSubject::Settings), "Settings"),
];

pub fn page(operator: &Operator) -> PageResult {
    let query = &operator.request.query;
    let before = Some(query.get("before")).filter(|id| has_shape(id, "audit_", 32));
    let about = AuditSubject::parse(query.get("about"));
    // With one row more than a page has, it is known whether there is another page.
    let audit = &operator.console.store.audit;
    let mut rows = audit.newest(about, before, ROWS_PER_PAGE as i64 + 1)?;
    let has_more = rows.len() > ROWS_PER_PAGE;
    rows.truncate(ROWS_PER_PAGE);
    let address = |about: Option<AuditSubject>, before: &str| {
        let about = about.map_or("", AuditSubject::as_str);
        link("/audit", [("about", about), ("before", before)])
    };
    let newest = before.map(|_| ("← Newest", address(about, "")));
    let earlier = rows.last().filter(|_| has_more);
    let earlier = earlier.map(|last| ("Earlier changes →", address(about, &last.id)));
    let zone = &operator.console.store.zone;
    let time = format!("Time ({})", zone.name());
    let content = html! {
        main {
            h1 { "Audit" }
            div.filters {
                (choices("About", SUBJECTS.into_iter().map(|(subject, name)| (address(subject, ""), name, subject == about))))
            }
            p.muted { "Every change, the newest first. Failed sign-ins are summed for up to 15 minutes." }
            @if rows.is_empty() {
                section.empty { h2 { "No rows" } p { "None matches." } }
            } @else {
                (cards("audit", &[&time, "Action", "By", "Key", "Details"].map(heading), rows.iter().map(|row| cells(row, zone))))
            }
            (page_links(newest.as_slice(), "", earlier))
        }
    };
    Ok(layout::operator_page(
        operator, 200, "/audit", "Audit", &content,
    ))
}

fn cells(row: &AuditRow, zone: &Zone) -> Vec<Markup> {
    vec![
        format::second(row.created, zone),
        html! { strong { (row.description()) } },
        html! { span.text { (row.actor) } " " span.muted { (row.via) } },
        html! {
            @if let (Some(id), Some(name)) = (&row.key_id, &row.key_name) { a.text href=(format!("/keys/{id}")) { (name) } }
        },
        html! { (row.details) },
    ]
}
