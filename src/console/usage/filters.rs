//! The filters of the usage and the requests pages.

use maud::{Markup, html};

use super::view::{CHOICES, CODES, UsageView};
use crate::console::{
    html::{
        format,
        table::{choices, folded, hidden_fields},
    },
    keys::list::is_match,
};
use crate::error::FailureCause;
use crate::keys::Key;
use crate::ledger::Gateway;
use crate::text::count;
use crate::when::Range;

/// The most keys that are offered in a list. If there are more, the field is a search: a longer
/// list makes the page exceed 60 KB.
const KEYS_OFFERED: usize = 40;

/// Links to ranges, and a form for two times and the rest, for the page at `address`.
pub fn filters(view: &UsageView, address: &str, keys: &[Key], gateways: &[Gateway]) -> Markup {
    let [from, to] = view.times();
    let link = |choice: &'static str| {
        UsageView {
            choice,
            ..view.clone()
        }
        .address(address)
    };
    html! {
        (folded(&words(view, keys), &html! {
            (choices("Range", CHOICES.into_iter().map(|(word, name)| (link(word), name, view.choice == word))))
            form method="get" action=(address) {
                (hidden_fields(view.fields(), &["from", "to", "key", "gateway", "outcome", "cause", "least", "most"]))
                input type="hidden" name="displayed" value=(format!("{from} {to}"));
                @for (name, text, value) in [("from", "From", &from), ("to", "to", &to)] {
                    label for=(name) { (text) } input id=(name) type="datetime-local" name=(name) value=(value)
                        step=[(value.len() > "2026-11-16T13:00".len()).then_some(1)] required;
                }
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
        }))
        (matching_keys(view, address, keys))
    }
}

/// The range, and the filters that are set; those that are not are empty.
fn words(view: &UsageView, keys: &[Key]) -> [String; 7] {
    let range = CHOICES.into_iter().find(|(word, _)| *word == view.choice);
    let set = |name: &str, value: Option<String>| {
        value.map_or(String::new(), |value| format!("{name} {value}"))
    };
    let key = keys
        .iter()
        .find(|key| view.key.as_ref() == Some(&key.id))
        .map(
            |key| match keys.iter().filter(|other| other.name == key.name).count() {
                1 => key.name.clone(),
                _ => named(key),
            },
        );
    let outcome = match view.outcome.as_str() {
        "ok" => "succeeded",
        "failed" => "errors",
        code => code,
    };
    let time = |ms: Option<u32>| ms.map(|ms| format!("{ms} ms"));
    [
        range.map_or_else(|| view.dates().join(" to "), |(_, name)| name.to_owned()),
        set("key", key.or(view.key_name.clone())),
        set("gateway", view.gateway.clone()),
        outcome.to_owned(),
        view.cause.clone(),
        set("at least", time(view.least_ms)),
        set("at most", time(view.most_ms)),
    ]
}

/// A key's name, and what distinguishes it from others of that name.
fn named(key: &Key) -> String {
    format!("{} {}", key.name, key.hint)
}

fn key_field(view: &UsageView, keys: &[Key]) -> Markup {
    let is_chosen = |key: &Key| view.key.as_ref() == Some(&key.id);
    let chosen = keys.iter().find(|key| is_chosen(key));
    html! {
        label for="key" { "Key" }
        @if keys.len() > KEYS_OFFERED || (view.key.is_none() && !view.key_word().is_empty()) {
            input #key type="search" name="key" placeholder="All keys" maxlength="100" autocomplete="off"
                value=(chosen.map_or(view.key_word().to_owned(), named));
        } @else {
            select #key name="key" {
                option value="" { "All keys" }
                @for key in keys { option value=(key.id) selected[is_chosen(key)] {
                    (named(key)) @if key.revoked.is_some() { " (revoked)" }
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

/// Links to the keys that match the text in the key's field, if it does not mean one of them.
fn matching_keys(view: &UsageView, address: &str, keys: &[Key]) -> Markup {
    if view.key_text.is_empty() {
        return html! {};
    }
    let matching: Vec<&Key> = keys
        .iter()
        .filter(|key| is_match(key, &view.key_text))
        .collect();
    html! {
        p.notice {
            @match matching.len() {
                0 => { "No key is named " span.text { (view.key_text) } "." }
                number => {
                    (count(number as i64, "key")) " match. Choose one: "
                    @for (number, key) in matching.iter().take(KEYS_OFFERED).enumerate() {
                        @if number > 0 { ", " }
                        a.text href=(view.address_with(address, "key", &key.id)) { (named(key)) }
                    }
                }
            }
        }
    }
}

pub fn range(view: &UsageView, now: i64) -> Markup {
    let Range { since, until } = view.range;
    let time = if since % 60 == 0 && until % 60 == 0 {
        format::minute
    } else {
        format::second
    };
    html! {
        @if view.is_extended {
            p.notice role="status" {
                "From and To are whole days now: retention has removed the requests of a day that the range cut, and only its sums are kept."
            }
        }
        p.muted.range { (time(since, &view.zone)) " to " @if until > now { "now" } @else { (time(until, &view.zone)) } ", " (view.zone.name()) }
    }
}
