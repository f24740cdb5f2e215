//! Audit: who changed what.

use maud::html;

use super::page::{self, Part};
use super::visit::{Session, Visit};
use super::{Console, Stop};
use crate::http::Response;
use crate::id::has_shape;

/// How many rows a page has.
const ROWS: usize = 50;

pub fn page(console: &Console, visit: &Visit, session: &Session) -> Result<Response, Stop> {
    let before = Some(visit.query.get("before")).filter(|id| has_shape(id, "audit_", 32));
    // One more tells whether there is another page.
    let mut rows = console.store.newest_audit(before, ROWS as i64 + 1)?;
    let has_more = rows.len() > ROWS;
    rows.truncate(ROWS);
    let content = html! {
        main {
            h1 { "Audit" }
            p.muted { "Who changed what, the newest first. Failed sign-ins are summed for up to 15 minutes." }
            @if rows.is_empty() {
                section.empty { h2 { "No rows" } p { "There is nothing before this." } }
            } @else {
                table.cards.audit role="table" {
                    thead role="rowgroup" {
                        tr role="row" {
                            @for name in ["Time", "Action", "By", "Key", "Details"] {
                                th role="columnheader" scope="col" { (name) }
                            }
                        }
                    }
                    tbody role="rowgroup" {
                        @for row in &rows {
                            tr role="row" {
                                td role="cell" { (page::time(row.created, true)) }
                                td role="cell" { strong { (row.description()) } }
                                td role="cell" { span.text { (row.actor) } " " span.muted { (row.via) } }
                                td role="cell" {
                                    @if let (Some(id), Some(name)) = (&row.key_id, &row.key_name) {
                                        a.text href=(format!("/keys/{id}")) { (name) }
                                    }
                                }
                                td.text role="cell" { (row.details) }
                            }
                        }
                    }
                }
            }
            @if has_more || before.is_some() {
                p.pages {
                    @if before.is_some() { a href="/audit" { "Newest" } " " }
                    @if let Some(last) = rows.last().filter(|_| has_more) {
                        a href=(format!("/audit?before={}", last.id)) { "Earlier changes" }
                    }
                }
            }
        }
    };
    Ok(page::inside(&console.assets, session, Part::Audit, "Audit", &content))
}
