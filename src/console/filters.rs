//! The filters of the usage and the requests pages.

use maud::{Markup, html};

use super::format;
use super::html_table::{choices, hidden_fields};
use super::usage_view::{CHOICES, CODES, UsageView};
use crate::error::FailureCause;
use crate::store::{Gateway, Key, Range};
use crate::text::count;

/// The most keys that are offered in a list. If there are more, the field is a search: a longer list makes the page exceed 60 KB.
const KEYS_OFFERED: usize = 40;

/// Links to ranges, a form for two times, and a form for the rest, for the page at `address`.
pub fn filters(view: &UsageView, address: &str, keys: &[Key], gateways: &[Gateway]) -> Markup {
    let [from, to] = view.times();
    let link = |choice: &'static str| UsageView { choice, ..view.clone() }.address(address);
    html! {
        div.filters {
            (choices("Range", CHOICES.into_iter().map(|(word, name)| (link(word), name, view.choice == word))))
            form.times method="get" action=(address) {
                (hidden_fields(view.fields(), &["range", "from", "to"]))
                @for (name, text, value) in [("from", "From", &from), ("to", "to", &to)] {
                    label for=(name) { (text) } input id=(name) type="datetime-local" name=(name) value=(value)
                        step=[(value.len() > "2026-11-16T13:00".len()).then_some(1)] required;
                }
                button type="submit" { "Show" }
            }
            form.pick method="get" action=(address) {
                (hidden_fields(view.fields(), &["key", "gateway", "outcome", "cause", "least", "most"]))
                (key_field(view, keys))
                @if gateways.len() > 1 {
                    label for="gateway" { "Gateway" }
                    select #gateway name="gateway" {
                        option value="" { "All gateways" }
                        @for Gateway { name, .. } in gateways { option selected[view.gateway.as_ref() == Some(name)] { (name) } }
                    }
                }
                label for="outcome" { "Outcome" }
                select #outcome name="outcome" {
                    @for (value, name) in [("", "All outcomes"), ("ok", "Succeeded"), ("failed", "Errors")] {
                        option value=(value) selected[view.outcome == value] { (name) }
                    }
                    @for code in CODES { option value=(code) selected[view.outcome == code] { (code) } }
                }
                @if address == "/requests" { (row_filters(view)) }
                button type="submit" { "Apply" }
            }
            (matching_keys(view, address, keys))
        }
    }
}

fn key_field(view: &UsageView, keys: &[Key]) -> Markup {
    let is_chosen = |key: &Key| view.key.as_ref() == Some(&key.id);
    let chosen = keys.iter().find(|key| is_chosen(key));
    html! {
        label for="key" { "Key" }
        @if keys.len() > KEYS_OFFERED {
            input #key type="search" name="key" placeholder="All keys" value=(chosen.map_or(&view.key_text, |key| &key.name));
        } @else {
            select #key name="key" {
                option value="" { "All keys" }
                @for key in keys { option value=(key.id) selected[is_chosen(key)] {
                    (key.name) @if key.revoked.is_some() { " (revoked)" }
                } }
            }
        }
    }
}

/// The filters that only rows have: sums have neither causes nor durations.
fn row_filters(view: &UsageView) -> Markup {
    html! {
        label for="cause" { "Cause" } input #cause name="cause" list="causes" value=(view.cause) placeholder="Any cause" autocomplete="off";
        datalist #causes { @for word in FailureCause::WORDS { option value=(word) {} } }
        @for (name, text, value) in [("least", "Took at least", view.least_ms), ("most", "at most", view.most_ms)] {
            label for=(name) { (text) } input id=(name) name=(name) type="number" min="0" max=(u32::MAX) value=[value] placeholder="ms";
        }
    }
}

/// Links to the keys whose names match the text in the key's field.
fn matching_keys(view: &UsageView, address: &str, keys: &[Key]) -> Markup {
    if view.key_text.is_empty() {
        return html! {};
    }
    let matching = view.matching_keys(keys);
    let of = |key: &Key| UsageView { key: Some(key.id.clone()), ..view.clone() }.address(address);
    html! {
        p.notice {
            @match matching.len() {
                0 => { "No key is named " span.text { (view.key_text) } ". These are the figures of all keys." }
                number => {
                    (count(number as i64, "key")) " match: "
                    @for (number, key) in matching.iter().take(KEYS_OFFERED).enumerate() {
                        @if number > 0 { ", " }
                        a.text href=(of(key)) { (key.name) }
                    }
                }
            }
        }
    }
}

pub fn range(view: &UsageView, now: i64) -> Markup {
    let Range { since, until } = view.range;
    let time = if since % 60 == 0 && until % 60 == 0 { format::minute } else { format::second };
    html! {
        @if view.is_extended {
            p.notice role="status" {
                "From and To are full hours now: retention has removed the requests of an hour that the range cut, and only its total is kept."
            }
        }
        p.muted.range { (time(since)) " to " @if until > now { "now" } @else { (time(until)) } ", UTC" }
    }
}
