//! Usage by key: a table that can be sorted, on the usage page and, of many keys, on pages of its own.

use std::cmp::Ordering;

use maud::{Markup, html};

use super::figures::{Figures, KeyFigures};
use super::html_table::sort_heading;
use super::page::{self, Part, count, rounded};
use super::usage::{rate, tokens};
use super::view::View;
use super::visit::{ConsoleSession, Visit};
use super::{Console, PageError, filters};
use crate::http::Response;
use crate::text::grouped;

/// How many keys the usage page lists, and how many a page of its own.
const LISTED: usize = 10;
const PAGE: usize = 100;

/// What the table can be sorted by: the word in the address and the heading.
const COLUMNS: [(&str, &str); 8] = [
    ("key", "Key"),
    ("requests", "Requests"),
    ("success", "Succeeded"),
    ("in", "Tokens in"),
    ("out", "Tokens out"),
    ("tokens", "Total tokens"),
    ("runtime", "Runtime, p50"),
    ("share", "Share of tokens"),
];

/// An order of the keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    column: &'static str,
    is_descending: bool,
}

impl Default for Order {
    fn default() -> Self {
        Self { column: "tokens", is_descending: true }
    }
}

impl Order {
    /// Reads the word of a column, after a minus sign if it is descending.
    pub fn read(text: &str) -> Self {
        let word = text.strip_prefix('-').unwrap_or(text);
        let column = COLUMNS.iter().map(|(column, _)| *column).find(|column| *column == word);
        column.map_or_else(Self::default, |column| Self { column, is_descending: word != text })
    }

    /// What an address has of it, unless it is the usual one.
    pub fn word(self) -> Option<String> {
        let sign = if self.is_descending { "-" } else { "" };
        (self != Self::default()).then(|| format!("{sign}{}", self.column))
    }

    /// The order after a click on a column: names from A on, figures from the largest on, and the second click turns it.
    fn after(self, column: &'static str) -> Self {
        let is_descending = if self.column == column { !self.is_descending } else { column != "key" };
        Self { column, is_descending }
    }

    fn compare(self, a: &KeyFigures, b: &KeyFigures) -> Ordering {
        let by_name = || (a.name.to_lowercase(), &a.id).cmp(&(b.name.to_lowercase(), &b.id));
        let figure = |key: &KeyFigures| match self.column {
            "requests" => key.sums.requests as f64,
            "success" => key.sums.succeeded() as f64 / key.sums.requests as f64,
            "in" => key.sums.prompt_tokens as f64,
            "out" => key.sums.completion_tokens as f64,
            "runtime" => key.runtime.percentile(0.5).unwrap_or(-1.0),
            _ => key.sums.total_tokens as f64,
        };
        let order = match self.column {
            "key" => by_name(),
            _ => figure(a).total_cmp(&figure(b)),
        };
        (if self.is_descending { order.reverse() } else { order }).then_with(by_name)
    }

    fn aria(self, column: &str) -> Option<&'static str> {
        (self.column == column).then_some(if self.is_descending { "descending" } else { "ascending" })
    }
}

/// The first keys, on the usage page.
pub fn section(view: &View, figures: &Figures) -> Markup {
    let all = figures.keys.len();
    html! {
        section #by-key {
            h2 { "By key" }
            (table(view, figures, "/usage", 0, LISTED))
            @if all > LISTED { p { a href=(format!("/usage/keys?{}", view.query())) { "All " (count(all as i64, "key")) " →" } } }
        }
    }
}

pub fn page(console: &Console, visit: &Visit, session: &ConsoleSession) -> Result<Response, PageError> {
    let view = View::read(&visit.query, visit.now).of_sums();
    let figures = Figures::read(&console.store, &view, &console.store.list_keys()?)?;
    let number: usize =
        visit.query.get("page").parse().unwrap_or(1).clamp(1, figures.keys.len().div_ceil(PAGE).max(1));
    let address = |number: usize| format!("/usage/keys?{}&page={number}", view.query());
    let content = html! {
        main {
            p.crumbs { a href=(format!("/usage?{}", view.query())) { "Usage" } " / By key" }
            h1 { "Usage by key" }
            (filters::range(&view, visit.now))
            (table(&view, &figures, "/usage/keys", (number - 1) * PAGE, PAGE))
            nav.pages aria-label="Pages" {
                @if number > 1 { a.button href=(address(number - 1)) rel="prev" { "← Previous keys" } }
                @if figures.keys.len() > number * PAGE { a.button href=(address(number + 1)) rel="next" { "More keys →" } }
            }
        }
    };
    Ok(page::inside(console, session, Part::Usage, "Usage by key", &content))
}

fn table(view: &View, figures: &Figures, address: &str, skipped: usize, most: usize) -> Markup {
    let mut keys: Vec<&KeyFigures> = figures.keys.iter().collect();
    keys.sort_by(|a, b| view.order.compare(a, b));
    let sorted = |column| View { order: view.order.after(column), ..view.clone() }.query();
    let of = |key: &KeyFigures| View { key: Some(key.id.clone()), ..view.clone() }.query();
    html! {
        div.scroll tabindex="0" role="region" aria-label="Usage by key" {
            table.by-key {
                thead { tr {
                    @for (column, name) in COLUMNS {
                        (sort_heading(name, &format!("{address}?{}#by-key", sorted(column)), view.order.aria(column)))
                    }
                } }
                tbody {
                    @for key in keys.into_iter().skip(skipped).take(most) {
                        @let is_measured = key.sums.succeeded() > key.sums.unmeasured;
                        tr {
                            th scope="row" { a.text href=(format!("/usage?{}", of(key))) { (key.name) } }
                            td { a href=(format!("/requests?{}", of(key))) { (grouped(key.sums.requests)) } }
                            td { (rate(key.sums.succeeded(), key.sums.requests)) }
                            td { (tokens(key.sums.prompt_tokens, is_measured && key.sums.prompt_tokens > 0)) }
                            td { (tokens(key.sums.completion_tokens, is_measured)) }
                            td { (tokens(key.sums.total_tokens, is_measured)) }
                            td { (key.runtime.percentile(0.5).map_or("–".into(), rounded)) }
                            td { @if is_measured { (rate(key.sums.total_tokens, figures.all.total_tokens)) } @else { "–" } }
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Sums;

    fn key(name: &str, requests: i64, succeeded: i64, total_tokens: i64) -> KeyFigures {
        let sums = Sums { requests, errors: requests - succeeded, total_tokens, ..Sums::default() };
        KeyFigures { id: format!("key_{name}"), name: name.into(), sums, ..KeyFigures::default() }
    }

    #[test]
    fn every_column_sorts_both_ways_and_a_second_click_reverses() {
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
            let order = Order::read(word);
            let mut sorted: Vec<&KeyFigures> = keys.iter().collect();
            sorted.sort_by(|a, b| order.compare(a, b));
            let names: Vec<&str> = sorted.iter().map(|key| key.name.as_str()).collect();
            assert_eq!(names.join(" "), expected, "{word}");
            assert_eq!(Order::read(&order.word().unwrap_or_default()), order, "{word}");
        }
        let order = Order::default().after("requests");
        assert_eq!(
            (order.word().as_deref(), order.aria("requests")),
            (Some("-requests"), Some("descending"))
        );
        let again = order.after("requests");
        assert_eq!((again.word().as_deref(), again.aria("requests")), (Some("requests"), Some("ascending")));
        assert_eq!(again.after("key").aria("key"), Some("ascending"));
    }
}
