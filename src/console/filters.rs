//! The filters of the usage and the requests pages.

use maud::{Markup, html};

use super::page::{self, count};
use super::view::{CHOICES, CODES, Took, View};
use crate::error::FailureCause;
use crate::store::{Gateway, Key};

/// How many keys are offered in a list. Of more, one is searched for: a longer list makes the page exceed 60 KB.
const KEYS_OFFERED: usize = 40;

/// Links to ranges, a form for two times, and a form for the rest. `address` is the page that they lead to.
pub fn filters(view: &View, address: &str, keys: &[Key], gateways: &[Gateway]) -> Markup {
    let [from, to] = view.times();
    let link = |choice: &'static str| format!("{address}?{}", View { choice, ..view.clone() }.query());
    html! {
        div.filters {
            nav.choices aria-label="Range" {
                @for (word, name) in CHOICES {
                    a href=(link(word)) aria-current=[(view.choice == word).then_some("true")] { (name) }
                }
            }
            form.times method="get" action=(address) {
                (hidden(view, &["range", "from", "to"]))
                @for (name, text, value) in [("from", "From", &from), ("to", "to", &to)] {
                    label for=(name) { (text) } input id=(name) type="datetime-local" name=(name) value=(value) required;
                }
                button type="submit" { "Show" }
            }
            form.pick method="get" action=(address) {
                (hidden(view, &["key", "gateway", "outcome", "cause", "least", "most"]))
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
                @if address == "/requests" { (of_rows(view)) }
                button type="submit" { "Apply" }
            }
            (matching_keys(view, address, keys))
        }
    }
}

fn key_field(view: &View, keys: &[Key]) -> Markup {
    let chosen = keys.iter().find(|key| view.key.as_ref() == Some(&key.id));
    let is_chosen = |key: &Key| view.key.as_ref() == Some(&key.id);
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

/// The filters that only rows have: sums know neither causes nor durations.
fn of_rows(view: &View) -> Markup {
    let Took { least, most } = view.took;
    html! {
        label for="cause" { "Cause" } input #cause name="cause" list="causes" value=(view.cause) placeholder="Any cause" autocomplete="off";
        datalist #causes { @for word in FailureCause::WORDS { option value=(word) {} } }
        @for (name, text, value) in [("least", "Took at least", least), ("most", "at most", most)] {
            label for=(name) { (text) } input id=(name) name=(name) type="number" min="0" max=(u32::MAX) value=[value] placeholder="ms";
        }
    }
}

/// The keys that a text in the key's field may mean, if it is not one.
fn matching_keys(view: &View, address: &str, keys: &[Key]) -> Markup {
    if view.key_text.is_empty() {
        return html! {};
    }
    let matching = view.matching_keys(keys);
    let of = |key: &Key| View { key: Some(key.id.clone()), ..view.clone() }.query();
    html! {
        p.notice {
            @match matching.len() {
                0 => { "No key is named " span.text { (view.key_text) } ". These are the figures of all keys." }
                number => {
                    (count(number as i64, "key")) " match: "
                    @for (number, key) in matching.iter().take(KEYS_OFFERED).enumerate() {
                        @if number > 0 { ", " }
                        a.text href=(format!("{address}?{}", of(key))) { (key.name) }
                    }
                }
            }
        }
    }
}

/// The rest of a view, for a form that asks for some of its fields.
fn hidden(view: &View, asked: &[&str]) -> Markup {
    html! {
        @for (name, value) in view.fields() {
            @if !asked.contains(&name) { input type="hidden" name=(name) value=(value); }
        }
    }
}

/// The times that the figures are of.
pub fn range(view: &View, now: i64) -> Markup {
    let meaning = match view.choice {
        "7d" => ": today and the 6 days before it",
        "30d" => ": today and the 29 days before it",
        "90d" => ": today and the 89 days before it",
        _ => "",
    };
    let crate::store::Range { since, until } = view.covered;
    html! {
        p.muted.range {
            (page::time(since, false)) " to " @if until > now { "now" } @else { (page::time(until, false)) } ", UTC" (meaning)
        }
    }
}
