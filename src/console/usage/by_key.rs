//! The table of the usage by key.

use std::cmp::Ordering;

use maud::{Markup, html};

use super::report::{KeyUsage, UsageReport, tokens};
use super::view::{COLUMNS, DEFAULT_ORDER, UsageView};
use crate::console::html::{
    format::{figure, rate},
    table::{Pages, SortOrder, scrolling},
};
use crate::text::grouped;

const KEYS_PER_PAGE: usize = 20;

/// Compares two keys; equal ones are in the order of their names.
fn compare(order: SortOrder, a: &KeyUsage, b: &KeyUsage) -> Ordering {
    let by_name = || (a.name.to_lowercase(), &a.id).cmp(&(b.name.to_lowercase(), &b.id));
    let figure = |key: &KeyUsage| match order.column {
        "requests" => key.selected.requests as f64,
        "success" => key.all.succeeded() as f64 / key.all.requests as f64,
        "in" => key.selected.prompt_tokens as f64,
        "out" => key.selected.completion_tokens as f64,
        _ => key.selected.total_tokens as f64,
    };
    let ascending = if order.column == "key" {
        by_name()
    } else {
        figure(a).total_cmp(&figure(b))
    };
    order.direct(ascending).then_with(by_name)
}

/// The section of the usage page.
pub fn section(view: &UsageView, report: &UsageReport, page: usize) -> Markup {
    let pages = Pages::new(report.keys.len(), KEYS_PER_PAGE, page);
    let address = |page: usize| format!("{}&page={page}#by-key", view.address("/usage"));
    html! {
        section #by-key {
            h2 { "By key" }
            (table(view, report, &pages))
            (pages.links("key", address))
        }
    }
}

fn table(view: &UsageView, report: &UsageReport, pages: &Pages) -> Markup {
    let mut keys: Vec<&KeyUsage> = report.keys.iter().collect();
    keys.sort_by(|a, b| compare(view.order, a, b));
    let headings = COLUMNS.map(|(first_click, heading)| {
        let sort = view.order.after_click(first_click).field(DEFAULT_ORDER);
        let link = view.address_with("/usage", "sort", &sort) + "#by-key";
        view.order.heading(first_click.column, heading, &link)
    });
    let cells = |key: &KeyUsage| {
        let KeyUsage {
            name,
            all,
            selected,
            ..
        } = key;
        let [prompt, completion, total] = tokens(selected);
        let address = |path| view.address_with(path, "key", &key.id);
        vec![
            html! { a.text href=(address("/usage")) { (name) } },
            html! { a href=(address("/requests")) { (grouped(selected.requests)) } },
            html! { (rate(all.succeeded(), all.requests)) },
            html! { (figure(prompt)) },
            html! { (figure(completion)) },
            html! { (figure(total)) },
            html! { (total.map_or("–".into(), |total| rate(total, report.all.total_tokens))) },
        ]
    };
    let rows = keys[pages.rows_on_page.clone()]
        .iter()
        .map(|key| cells(key));
    scrolling("by-key numbers", "Usage by key", &headings, rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::usage::bar_interval::BarInterval;
    use crate::console::usage::view::tests::view;
    use crate::ledger::Sums;

    fn key(name: &str, requests: i64, succeeded: i64, total_tokens: i64) -> KeyUsage {
        let sums = Sums {
            requests,
            errors: requests - succeeded,
            total_tokens,
            ..Sums::default()
        };
        KeyUsage {
            id: format!("key_{name}"),
            name: name.into(),
            all: sums.clone(),
            selected: sums,
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

    #[test]
    fn a_page_has_twenty_keys_and_leads_to_the_others() {
        let keys = (1..=21)
            .map(|number| key(&format!("name {number:02}"), 1, 1, 100 - number))
            .collect();
        let (errors, bars, durations) = Default::default();
        let [all, selected] = [Sums::default(), Sums::default()];
        let report = UsageReport {
            all,
            selected,
            step: BarInterval::Day,
            bars,
            errors,
            keys,
            durations,
        };
        let [first, last] =
            [1, 2].map(|page| section(&view("range=7d"), &report, page).into_string());
        assert!(
            first.contains("name 20<") && !first.contains("name 21<"),
            "{first}"
        );
        assert!(
            first.contains("href=\"/usage?range=7d&amp;page=2#by-key\""),
            "{first}"
        );
        assert!(
            last.contains("name 21<")
                && !last.contains("name 20<")
                && last.contains("Page 2 of 2, 21 keys"),
            "{last}"
        );
    }
}
