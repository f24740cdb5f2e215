//! The table of API keys, and how many requests each made.

use std::collections::HashMap;

use maud::{Markup, html};

use super::page::{self, form_token};
use super::visit::Session;
use super::{Console, Stop};
use crate::store::{Filter, Key, Range, Span};
use crate::text::grouped;

/// The time over which requests are counted in the table, in days.
const COUNTED_DAYS: i64 = 30;

/// How many requests each key made lately.
pub fn counts(console: &Console, now: i64) -> Result<HashMap<String, i64>, Stop> {
    let day = Span::Day.seconds();
    let until = (now.div_euclid(day) + 1) * day;
    let mut counts = HashMap::new();
    let range = Range { since: until - COUNTED_DAYS * day, until };
    console.store.figures(Span::Day, range, Filter::ALL, |figures| {
        *counts.entry(figures.key_id).or_default() += figures.sums.requests;
    })?;
    Ok(counts)
}

pub fn table(keys: &[&Key], counts: &HashMap<String, i64>, session: &Session, now: i64) -> Markup {
    let is_revoked = keys.iter().all(|key| key.revoked.is_some());
    html! {
        table.cards role="table" {
            thead role="rowgroup" {
                tr role="row" {
                    th role="columnheader" scope="col" { "Name" }
                    th role="columnheader" scope="col" { "Key" }
                    th role="columnheader" scope="col" { "Permissions" }
                    th role="columnheader" scope="col" { "Created" }
                    th role="columnheader" scope="col" { @if is_revoked { "Revoked" } @else { "Expires" } }
                    th role="columnheader" scope="col" { "Last used" }
                    th.number role="columnheader" scope="col" { "Requests, " (COUNTED_DAYS) " days" }
                    @if !is_revoked { th role="columnheader" scope="col" { span.unseen { "Actions" } } }
                }
            }
            tbody role="rowgroup" {
                @for key in keys { (row(key, counts.get(&key.id).copied().unwrap_or(0), session, now)) }
            }
        }
    }
}

fn row(key: &Key, requests: i64, session: &Session, now: i64) -> Markup {
    let has_expired = key.expires.is_some_and(|expires| expires <= now);
    html! {
        tr role="row" #(key.id) {
            th.name role="rowheader" scope="row" {
                span.text { (key.name) }
                @if has_expired && key.revoked.is_none() { " " span.badge.bad { "expired" } }
            }
            td role="cell" data-label="Key" {
                @if let Some(hint) = &key.hint { code { (hint) } br; }
                code.muted { (key.id) }
            }
            td role="cell" data-label="Permissions" {
                @for permission in &key.permissions { span.badge { (permission.as_str()) } " " }
                @if key.permissions.is_empty() { "none" }
                @if let Some(number) = key.concurrent { span.muted { (number) " at once" } }
            }
            td role="cell" data-label="Created" { (page::date(key.created)) }
            td role="cell" data-label=(if key.revoked.is_some() { "Revoked" } else { "Expires" }) {
                @match key.revoked.or(key.expires) {
                    Some(time) => (page::date(time)),
                    None => "never",
                }
            }
            td role="cell" data-label="Last used" {
                @match key.last_used {
                    Some(time) => (page::time(time, false)),
                    None => "never",
                }
            }
            td.number role="cell" data-label=(format!("Requests, {COUNTED_DAYS} days")) {
                a href=(format!("/usage?range=30d&key={}", key.id)) aria-label=(format!("{} by {}", page::count(requests, "request"), key.name)) {
                    (grouped(requests))
                }
            }
            @if key.revoked.is_none() {
                td.actions role="cell" {
                    details.menu {
                        summary aria-label=(format!("Rename {}", key.name)) { "Rename" }
                        form method="post" action=(format!("/keys/{}/rename", key.id)) {
                            (form_token(session))
                            label for=(format!("name-{}", key.id)) { "New name" }
                            input #(format!("name-{}", key.id)) name="name" value=(key.name) required maxlength="64" autocomplete="off";
                            button.primary type="submit" { "Save" }
                        }
                    }
                    a.danger href=(format!("/keys/{}/revoke", key.id)) aria-label=(format!("Revoke {}", key.name)) { "Revoke" }
                }
            }
        }
    }
}
