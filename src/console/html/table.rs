//! The tables of the console, and the links that sort, filter and page them.

use std::cmp::Ordering;
use std::ops::Range;

use maud::{Markup, Render, html};

use crate::text::count;

/// A column that a table can be sorted by: the order after the first click, and the heading.
pub type SortColumn = (SortOrder, &'static str);

/// The order of a table. An address has it as `sort=column`, or `sort=-column` if it is descending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SortOrder {
    pub column: &'static str,
    pub is_descending: bool,
}

impl SortOrder {
    pub const fn ascending(column: &'static str) -> Self {
        Self {
            column,
            is_descending: false,
        }
    }

    pub const fn descending(column: &'static str) -> Self {
        Self {
            column,
            is_descending: true,
        }
    }

    /// Reads the value of `sort`. Returns `None` if there is no such column.
    pub fn parse(text: &str, columns: &[SortColumn]) -> Option<Self> {
        let word = text.strip_prefix('-').unwrap_or(text);
        let (order, _) = columns.iter().find(|(order, _)| order.column == word)?;
        Some(Self {
            is_descending: word != text,
            ..*order
        })
    }

    /// Returns the order after a click on a column. A second click reverses it.
    pub fn after_click(self, first_click: Self) -> Self {
        if self.column == first_click.column {
            Self {
                is_descending: !self.is_descending,
                ..self
            }
        } else {
            first_click
        }
    }

    /// The value of `sort`; empty if this is the default order.
    pub fn field(self, default: Self) -> String {
        if self == default {
            String::new()
        } else {
            self.to_string()
        }
    }

    /// Turns an ascending order of two rows into this one.
    pub fn direct(self, ascending: Ordering) -> Ordering {
        if self.is_descending {
            ascending.reverse()
        } else {
            ascending
        }
    }

    /// A heading with a link that sorts by its column.
    pub fn heading(self, column: &str, text: &str, link: &str) -> Markup {
        let direction = if self.is_descending {
            "descending"
        } else {
            "ascending"
        };
        let sorted = (self.column == column).then_some(direction);
        html! { th role="columnheader" scope="col" aria-sort=[sorted] { a href=(link) { (text) } } }
    }
}

impl std::fmt::Display for SortOrder {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(
            f,
            "{}{}",
            if self.is_descending { "-" } else { "" },
            self.column
        )
    }
}

pub fn heading(name: &str) -> Markup {
    html! { th role="columnheader" scope="col" { (name) } }
}

/// A table that a narrow screen displays as cards. With `display: block` some browsers no longer
/// report it as a table to screen readers, so every element has its role.
pub fn cards(class: &str, headings: &[Markup], rows: impl Iterator<Item = Vec<Markup>>) -> Markup {
    table(&format!("cards {class}"), true, headings, rows)
}

/// A table that scrolls sideways on a narrow screen.
pub fn scrolling(
    class: &str,
    label: &str,
    headings: &[Markup],
    rows: impl Iterator<Item = Vec<Markup>>,
) -> Markup {
    html! {
        div.scroll tabindex="0" role="region" aria-label=(label) { (table(class, false, headings, rows)) }
    }
}

/// The first cell of each row names it.
pub fn table(
    class: &str,
    with_roles: bool,
    headings: &[Markup],
    rows: impl Iterator<Item = Vec<Markup>>,
) -> Markup {
    let role = |name: &'static str| with_roles.then_some(name);
    html! {
        table class=(class) role=[role("table")] {
            thead role=[role("rowgroup")] { tr role=[role("row")] { @for heading in headings { (heading) } } }
            tbody role=[role("rowgroup")] {
                @for row in rows {
                    tr role=[role("row")] {
                        @for (number, cell) in row.into_iter().enumerate() {
                            @if number == 0 { th role=[role("rowheader")] scope="row" { (cell) } }
                            @else { td role=[role("cell")] { (cell) } }
                        }
                    }
                }
            }
        }
    }
}

/// Links of which one is chosen: address, text, and true for the chosen one.
pub fn choices(label: &str, links: impl Iterator<Item = (String, impl Render, bool)>) -> Markup {
    html! {
        nav.choices aria-label=(label) {
            @for (link, text, is_chosen) in links { a href=(link) aria-current=[is_chosen.then_some("true")] { (text) } }
        }
    }
}

/// Filters that a narrow screen folds away, behind a button that says what is set. A wide one
/// always shows them.
pub fn folded(set: &[String], filters: &Markup) -> Markup {
    let set: Vec<&str> = set
        .iter()
        .map(String::as_str)
        .filter(|words| !words.is_empty())
        .collect();
    html! {
        details.fold {
            summary { "Filters" @if !set.is_empty() { ": " (set.join(", ")) } }
            div.filters { (filters) }
        }
    }
}

/// The rest of a page's fields, for a form that asks for some of them.
pub fn hidden_fields(fields: Vec<(&str, String)>, asked: &[&str]) -> Markup {
    html! {
        @for (name, value) in fields {
            @if !value.is_empty() && !asked.contains(&name) { input type="hidden" name=(name) value=(value); }
        }
    }
}

/// The pages of a table that is in memory.
pub struct Pages {
    pub number: usize,
    last: usize,
    rows: usize,
    pub rows_on_page: Range<usize>,
}

impl Pages {
    /// The first page is 1.
    pub fn new(rows: usize, rows_per_page: usize, wanted: usize) -> Self {
        let last = rows.div_ceil(rows_per_page).max(1);
        let number = wanted.clamp(1, last);
        let first = (number - 1) * rows_per_page;
        Self {
            number,
            last,
            rows,
            rows_on_page: first..rows.min(first + rows_per_page),
        }
    }

    pub fn links(&self, noun: &str, address: impl Fn(usize) -> String) -> Markup {
        let previous = (self.number > 1).then(|| ("← Previous", address(self.number - 1)));
        let next = (self.number < self.last).then(|| ("Next →", address(self.number + 1)));
        let position = format!(
            "Page {} of {}, {}",
            self.number,
            self.last,
            count(self.rows as i64, noun)
        );
        page_links(previous.as_slice(), &position, next)
    }
}

/// The links to the other pages of a table, each with its text; nothing if there are none.
pub fn page_links(
    previous: &[(&str, String)],
    position: &str,
    next: Option<(&str, String)>,
) -> Markup {
    html! {
        @if !previous.is_empty() || next.is_some() {
            nav.pages aria-label="Pages" {
                @for (text, link) in previous { a.button href=(link) rel=[text.starts_with('←').then_some("prev")] { (text) } }
                @if !position.is_empty() { span.muted { (position) } }
                @if let Some((text, link)) = next { a.button href=(link) rel="next" { (text) } }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_on_one_page_and_any_number_leads_to_one() {
        for (rows, wanted, number, on_page) in [
            (0, 1, 1, 0..0),
            (20, 2, 1, 0..20),
            (21, 2, 2, 20..21),
            (41, 0, 1, 0..20),
            (41, usize::MAX, 3, 40..41),
        ] {
            let pages = Pages::new(rows, 20, wanted);
            assert_eq!(
                (pages.number, pages.rows_on_page.clone()),
                (number, on_page),
                "{rows} rows, page {wanted}"
            );
            let links = pages
                .links("key", |page| format!("/?page={page}"))
                .into_string();
            assert_eq!(
                links.contains(&format!("/?page={}\"", number + 1)),
                rows > 20 * number,
                "{links}"
            );
            assert_eq!(links.contains("← Previous"), number > 1, "{links}");
        }
    }

    #[test]
    fn a_second_click_reverses_the_order() {
        let columns = [
            (SortOrder::ascending("name"), "Name"),
            (SortOrder::descending("size"), "Size"),
        ];
        let mut order = SortOrder::parse("size", &columns).expect("a column");
        let mut orders = Vec::new();
        for clicked in [1, 1, 0, 0, 1] {
            order = order.after_click(columns[clicked].0);
            assert_eq!(SortOrder::parse(&order.to_string(), &columns), Some(order));
            orders.push(order.to_string());
        }
        assert_eq!(orders, ["-size", "size", "name", "-name", "-size"]);
        assert_eq!(
            [order.direct(Ordering::Less), order.direct(Ordering::Equal)],
            [Ordering::Greater, Ordering::Equal]
        );
        let sorted = columns.map(|(column, _)| {
            order
                .heading(column.column, "", "")
                .into_string()
                .contains("aria-sort=\"descending\"")
        });
        assert_eq!(sorted, [false, true]);
        for text in ["", "-", "nonsense", "--size"] {
            assert_eq!(SortOrder::parse(text, &columns), None, "{text}");
        }
    }
}
