//! Usage by key: a table on the usage page and, if there are many keys, on pages of its own.

use std::cmp::Ordering;

use maud::{Markup, html};

use super::format::figure;
use super::html_table::{SortColumn, SortOrder, page_links, scrolling};
use super::page_request::Operator;
use super::usage::{rate, tokens};
use super::usage_report::{KeyUsage, UsageReport};
use super::usage_view::UsageView;
use super::{PageError, PageResult, filters, layout};
use crate::text::{count, grouped};

/// The number of keys on the usage page, and on a page of this table.
const KEYS_ON_USAGE_PAGE: usize = 10;
const KEYS_PER_PAGE: usize = 100;

pub const COLUMNS: [SortColumn; 7] = [
    SortColumn { word: "key", heading: "Key", greatest_first: false },
    SortColumn { word: "requests", heading: "Requests", greatest_first: true },
    SortColumn { word: "success", heading: "Succeeded", greatest_first: true },
    SortColumn { word: "in", heading: "Tokens in", greatest_first: true },
    SortColumn { word: "out", heading: "Tokens out", greatest_first: true },
    SortColumn { word: "tokens", heading: "Total tokens", greatest_first: true },
    SortColumn { word: "share", heading: "Share of tokens", greatest_first: true },
];

pub const DEFAULT_ORDER: SortOrder = SortOrder { column: "tokens", is_descending: true };

/// Compares two keys; equal ones are in the order of their names.
fn compare(order: SortOrder, a: &KeyUsage, b: &KeyUsage) -> Ordering {
    let by_name = || (a.name.to_lowercase(), &a.id).cmp(&(b.name.to_lowercase(), &b.id));
    let figure = |key: &KeyUsage| match order.column {
        "requests" => key.shown.requests as f64,
        "success" => key.all.succeeded() as f64 / key.all.requests as f64,
        "in" => key.shown.prompt_tokens as f64,
        "out" => key.shown.completion_tokens as f64,
        _ => key.shown.total_tokens as f64,
    };
    let ascending = if order.column == "key" { by_name() } else { figure(a).total_cmp(&figure(b)) };
    order.direct(ascending).then_with(by_name)
}

/// The first keys, on the usage page.
pub fn section(view: &UsageView, report: &UsageReport) -> Markup {
    let all = report.keys.len();
    html! {
        section #by-key {
            h2 { "By key" }
            (table(view, report, "/usage", 0, KEYS_ON_USAGE_PAGE))
            @if all > KEYS_ON_USAGE_PAGE { p { a href=(view.address("/usage/keys")) { "All " (count(all as i64, "key")) " →" } } }
        }
    }
}

pub fn page(operator: &Operator) -> PageResult {
    let Operator { console, request, .. } = *operator;
    let keys = console.store.list_keys()?;
    let view = UsageView::of(operator)?.without_row_filters().with_key(&console.store, &keys)?;
    if !view.key_text.is_empty() {
        return Err(PageError::WhichKey);
    }
    let view = view.answerable(&console.store)?;
    let report = UsageReport::read(&console.store, &view, &keys, request.now)?;
    let pages = report.keys.len().div_ceil(KEYS_PER_PAGE).max(1);
    let number: usize = request.query.get("page").parse().unwrap_or(1).clamp(1, pages);
    let address = |number: usize| format!("{}&page={number}", view.address("/usage/keys"));
    let previous = (number > 1).then(|| ("← Previous keys", address(number - 1)));
    let next = (number < pages).then(|| ("More keys →", address(number + 1)));
    let content = html! {
        main {
            p.crumbs { a href=(view.address("/usage")) { "Usage" } " / By key" }
            h1 { "Usage by key" }
            (filters::range(&view, request.now))
            (table(&view, &report, "/usage/keys", (number - 1) * KEYS_PER_PAGE, KEYS_PER_PAGE))
            (page_links(previous.as_slice(), "", next))
        }
    };
    Ok(layout::operator_page(operator, "/usage", "Usage by key", &content))
}

fn table(view: &UsageView, report: &UsageReport, address: &str, skipped: usize, most: usize) -> Markup {
    let mut keys: Vec<&KeyUsage> = report.keys.iter().collect();
    keys.sort_by(|a, b| compare(view.order, a, b));
    let headings = COLUMNS.map(|column| {
        let sorted = UsageView { order: view.order.after_click(&column), ..view.clone() };
        view.order.heading(&column, column.heading, &format!("{}#by-key", sorted.address(address)))
    });
    let cells = |key: &KeyUsage| {
        let KeyUsage { name, all, shown, .. } = key;
        let [prompt, completion, total] = tokens(shown);
        let of_key = UsageView { key: Some(key.id.clone()), ..view.clone() };
        vec![
            html! { a.text href=(of_key.address("/usage")) { (name) } },
            html! { a href=(of_key.address("/requests")) { (grouped(shown.requests)) } },
            html! { (rate(all.succeeded(), all.requests)) },
            html! { (figure(prompt)) },
            html! { (figure(completion)) },
            html! { (figure(total)) },
            html! { (total.map_or("–".into(), |total| rate(total, report.all.total_tokens))) },
        ]
    };
    let rows = keys.into_iter().skip(skipped).take(most).map(cells);
    scrolling("by-key numbers", "Usage by key", &headings, rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Sums;

    fn key(name: &str, requests: i64, succeeded: i64, total_tokens: i64) -> KeyUsage {
        let sums = Sums { requests, errors: requests - succeeded, total_tokens, ..Sums::default() };
        KeyUsage {
            id: format!("key_{name}"),
            name: name.into(),
            all: sums.clone(),
            shown: sums,
            ..KeyUsage::default()
        }
    }

    #[test]
    fn every_column_sorts_both_ways() {
        let keys = [key("a", 5, 5, 10), key("B", 9, 3, 30), key("c", 1, 1, 20)];
        for (word, expected) in [
            ("", "B c a"),
            ("-tokens", "B c a"),
            ("tokens", "a c B"),
            ("-requests", "B a c"),
            ("requests", "c a B"),
            ("-success", "a c B"),
            ("key", "a B c"),
            ("-key", "c B a"),
            ("nonsense", "B c a"),
        ] {
            let order = SortOrder::parse(word, &COLUMNS).unwrap_or(DEFAULT_ORDER);
            let mut sorted: Vec<&KeyUsage> = keys.iter().collect();
            sorted.sort_by(|a, b| compare(order, a, b));
            let names: Vec<&str> = sorted.iter().map(|key| key.name.as_str()).collect();
            assert_eq!(names.join(" "), expected, "{word}");
        }
    }
}
