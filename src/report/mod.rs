//! A table of rows, for a terminal and for a page. Its columns make cells, which both render, each in
//! its way; the order and the pages of a long one are here, once.

pub mod format;
pub mod query;
pub mod rows;

use std::cmp::Ordering;

use maud::{Markup, html};

use self::query::Query;
use crate::text::{count, grouped};
use crate::when::Zone;

const ROWS_PER_PAGE: usize = 50;

/// A value: the text, what a page has in its place, and its place in an order.
pub struct Cell {
    text: String,
    page: Option<Markup>,
    /// The style sheet's class on the page.
    class: &'static str,
    address: Option<String>,
    order: Order,
}

#[derive(Debug, PartialEq, PartialOrd)]
enum Order {
    Missing,
    Number(f64),
    Text(String),
}

impl Cell {
    fn new(text: String, order: Order) -> Self {
        Self {
            text,
            page: None,
            class: "",
            address: None,
            order,
        }
    }

    pub fn text(text: impl Into<String>) -> Self {
        let text = text.into();
        let order = Order::Text(text.to_lowercase());
        Self::new(text, order)
    }

    /// A text that a person has chosen. A page breaks it anywhere, and after two lines in a list.
    pub fn name(text: &str) -> Self {
        Self::text(text).class("text")
    }

    /// An id or another word for programs.
    pub fn code(text: &str) -> Self {
        Self::text(text).on_page(html! { code { (text) } })
    }

    /// A value that can be ordered; a dash if it was not measured.
    fn measured<T>(
        value: Option<T>,
        text: impl Fn(T) -> String,
        order: impl Fn(&T) -> f64,
    ) -> Self {
        let place = value
            .as_ref()
            .map_or(Order::Missing, |value| Order::Number(order(value)));
        Self::new(value.map_or("-".into(), text), place)
    }

    pub fn number(number: Option<i64>) -> Self {
        Self::measured(number, grouped, |number| *number as f64)
    }

    pub fn duration(milliseconds: Option<f64>) -> Self {
        Self::measured(milliseconds, format::duration, |time| *time)
    }

    /// A part of a whole, in percent.
    pub fn share(part: i64, all: i64) -> Self {
        let whole = Some(all).filter(|all| *all > 0);
        Self::measured(
            whole,
            |all| format::rate(part, all),
            |all| part as f64 / *all as f64,
        )
    }

    /// A time to the second.
    pub fn second(time: i64, zone: &Zone) -> Self {
        let text = zone.iso(time).unwrap_or_default();
        Self::new(text, Order::Number(time as f64)).on_page(format::second(time, zone))
    }

    /// A time to the minute, of an event that may not have happened.
    pub fn minute(time: Option<i64>, zone: &Zone) -> Self {
        let order = time.map_or(Order::Missing, |time| Order::Number(time as f64));
        let page = format::or_never(time, |time| format::minute(time, zone));
        Self::new(zone.format_minute(time), order).on_page(page)
    }

    pub fn class(self, class: &'static str) -> Self {
        Self { class, ..self }
    }

    /// On a page, the value is a link.
    pub fn link(self, address: String) -> Self {
        Self {
            address: Some(address),
            ..self
        }
    }

    /// Replaces what a page has.
    pub fn on_page(self, page: Markup) -> Self {
        Self {
            page: Some(page),
            ..self
        }
    }

    pub fn ordered(self, number: i64) -> Self {
        Self {
            order: Order::Number(number as f64),
            ..self
        }
    }

    /// This value and another one after it.
    pub fn and(self, other: Self) -> Self {
        let page = html! { (self.markup()) " " (other.markup()) };
        let text = match other.text.as_str() {
            "" => self.text,
            text => format!("{} {text}", self.text),
        };
        Self::new(text, self.order).on_page(page)
    }

    pub fn markup(&self) -> Markup {
        let class = Some(self.class).filter(|class| !class.is_empty());
        let value = html! {
            @match &self.page {
                Some(page) => (page),
                None if self.order == Order::Missing => "–",
                None => (self.text),
            }
        };
        html! {
            @match (&self.address, class) {
                (Some(address), _) => a class=[class] href=(address) { (value) },
                (None, Some(class)) => span class=(class) { (value) },
                (None, None) => (value),
            }
        }
    }
}

struct Column<'a, R> {
    /// The heading in a terminal, and the word that an address has to sort by it.
    name: &'static str,
    /// The heading on a page.
    heading: String,
    is_number: bool,
    /// The style sheet's classes of its cells.
    class: &'static str,
    cell: Box<dyn Fn(&R) -> Cell + 'a>,
}

/// Rows, and the columns that may be asked for by their names.
pub struct Table<'a, R> {
    rows: &'a [R],
    columns: Vec<Column<'a, R>>,
}

impl<'a, R> Table<'a, R> {
    pub fn new(rows: &'a [R]) -> Self {
        Self {
            rows,
            columns: Vec::new(),
        }
    }

    fn column(
        mut self,
        (name, heading): (&'static str, &str),
        is_number: bool,
        cell: impl Fn(&R) -> Cell + 'a,
    ) -> Self {
        self.columns.push(Column {
            name,
            heading: heading.to_owned(),
            is_number,
            class: if is_number { "n" } else { "" },
            cell: Box::new(cell),
        });
        self
    }

    pub fn text(self, name: &'static str, heading: &str, cell: impl Fn(&R) -> Cell + 'a) -> Self {
        self.column((name, heading), false, cell)
    }

    pub fn number(self, name: &'static str, heading: &str, cell: impl Fn(&R) -> Cell + 'a) -> Self {
        self.column((name, heading), true, cell)
    }

    /// Gives the last column other classes: `w` needs room, `o` is left out if there is little, and
    /// `bare` has no heading in a card because its values need none.
    pub fn class(mut self, class: &'static str) -> Self {
        if let Some(column) = self.columns.last_mut() {
            column.class = class;
        }
        self
    }

    /// The columns of these names, which are separated by commas.
    fn named(&self, names: &str) -> Vec<&Column<'a, R>> {
        let find = |name| self.columns.iter().find(|column| column.name == name);
        names.split(',').filter_map(find).collect()
    }

    /// Lays out rows for a terminal, with numbers aligned to the right.
    pub fn to_text(&self, names: &str) -> String {
        let columns = self.named(names);
        let heading = columns.iter().map(|column| column.name.to_owned());
        let mut lines = vec![heading.collect::<Vec<_>>()];
        for row in self.rows {
            lines.push(
                columns
                    .iter()
                    .map(|column| (column.cell)(row).text)
                    .collect(),
            );
        }
        let is_number = |place: usize| columns[place].is_number;
        lay_out(&lines, is_number)
    }

    /// The table on a page.
    pub fn html(&self, class: &str, names: &str) -> Markup {
        let rows: Vec<&R> = self.rows.iter().collect();
        cards(class, &self.named(names), &[], &rows)
    }

    /// What is known about the first row. Leaves out what is empty.
    pub fn facts_html(&self, names: &str) -> Markup {
        let facts = |row| {
            let columns = self.named(names).into_iter();
            columns.map(move |column| (column, (column.cell)(row).markup()))
        };
        html! {
            dl.facts {
                @for (column, cell) in self.rows.iter().take(1).flat_map(facts) {
                    @if !cell.0.is_empty() { dt { (column.heading) } dd { (cell) } }
                }
            }
        }
    }

    /// A page of the table in the order that a query asks for, `default` if it asks for none, with
    /// links to sort it and to its other pages. `noun` is what a row is.
    pub fn sorted_html(
        &self,
        class: &str,
        names: &str,
        (noun, default): (&str, &str),
        query: &Query,
        path: &str,
    ) -> Markup {
        let columns = self.named(names);
        let find = |sort| {
            columns
                .iter()
                .find(|column| column.name == read_sort(sort).0)
        };
        let asked = query.get("sort");
        let sort = if find(asked).is_some() {
            asked
        } else {
            default
        };
        let (by, (_, is_descending)) = (find(sort), read_sort(sort));
        let mut rows: Vec<(Option<Order>, &R)> = self
            .rows
            .iter()
            .map(|row| (by.map(|by| (by.cell)(row).order), row))
            .collect();
        rows.sort_by(|(one, _), (other, _)| {
            let (one, other) = if is_descending {
                (other, one)
            } else {
                (one, other)
            };
            one.partial_cmp(other).unwrap_or(Ordering::Equal)
        });
        let rows: Vec<&R> = rows.into_iter().map(|(_, row)| row).collect();
        let last = rows.len().div_ceil(ROWS_PER_PAGE).max(1);
        let page = query.get("page").parse().unwrap_or(1).clamp(1, last);
        let first = (page - 1) * ROWS_PER_PAGE;
        let on_page = &rows[first..rows.len().min(first + ROWS_PER_PAGE)];
        let address = |field, value: &str| query.link(path, &[(field, value)]) + "#list";
        let head = |column: &&Column<R>| {
            let clicked = after_click(sort, column.name, column.is_number);
            let is_default = clicked == default;
            Head {
                link: address("sort", if is_default { "" } else { &clicked }),
                arrow: match (column.name == read_sort(sort).0, is_descending) {
                    (false, _) => None,
                    (true, false) => Some("ascending"),
                    (true, true) => Some("descending"),
                },
            }
        };
        let heads: Vec<Head> = columns.iter().map(head).collect();
        let other = |page: usize| address("page", &page.to_string());
        let previous = (page > 1).then(|| ("← Previous", other(page - 1)));
        let next = (page < last).then(|| ("Next →", other(page + 1)));
        let position = format!("Page {page} of {last}, {}", count(rows.len() as i64, noun));
        let orders = columns.iter().zip(&heads);
        let orders = orders.map(|(column, head)| {
            (
                head.link.clone(),
                column.heading.as_str(),
                head.arrow.is_some(),
            )
        });
        html! {
            // Cards have no head to sort by.
            details.order {
                summary { "Order" @if let Some(by) = by { ": " (by.heading) } }
                (choices("Order", orders))
            }
            div #list { (cards(class, &columns, &heads, on_page)) }
            (page_links(previous.as_slice(), &position, next))
        }
    }
}

/// A heading that sorts by its column.
struct Head {
    link: String,
    /// The direction, if the table is in the order of this column.
    arrow: Option<&'static str>,
}

/// The first cell of each row names it. A narrow screen displays rows as cards: then some browsers no
/// longer report a table to screen readers, so every element has its role, and every cell its
/// heading.
fn cards<R>(class: &str, columns: &[&Column<R>], heads: &[Head], rows: &[&R]) -> Markup {
    let class_of = |column: &Column<R>| Some(column.class).filter(|class| !class.is_empty());
    html! {
        table class=(format!("cards {class}")) role="table" {
            thead role="rowgroup" { tr role="row" {
                @for (number, column) in columns.iter().enumerate() {
                    @let head = heads.get(number);
                    th role="columnheader" scope="col" class=[class_of(column)] aria-sort=[head.and_then(|head| head.arrow)] {
                        @match head { Some(head) => a href=(head.link) { (column.heading) }, None => (column.heading) }
                    }
                }
            } }
            tbody role="rowgroup" {
                @for row in rows {
                    tr role="row" {
                        @for (number, column) in columns.iter().enumerate() {
                            @let cell = (column.cell)(row).markup();
                            @if number == 0 { th role="rowheader" scope="row" { (cell) } }
                            @else { td role="cell" class=[class_of(column)] data-label=(column.heading) { (cell) } }
                        }
                    }
                }
            }
        }
    }
}

/// The column of an order, and true if it is descending. An address has it as `column` or `-column`.
fn read_sort(sort: &str) -> (&str, bool) {
    let column = sort.strip_prefix('-');
    (column.unwrap_or(sort), column.is_some())
}

/// The order after a click on a column: numbers are descending at first, and a second click reverses
/// the order.
fn after_click(sort: &str, column: &str, is_number: bool) -> String {
    let (sorted, is_descending) = read_sort(sort);
    let descends = if sorted == column {
        !is_descending
    } else {
        is_number
    };
    format!("{}{column}", if descends { "-" } else { "" })
}

fn lay_out(lines: &[Vec<String>], is_number: impl Fn(usize) -> bool) -> String {
    let width = |place: usize| lines.iter().map(|line| line[place].chars().count()).max();
    let columns = lines.first().map_or(0, Vec::len);
    let widths: Vec<usize> = (0..columns)
        .map(|place| width(place).unwrap_or(0))
        .collect();
    let mut text = String::new();
    for line in lines {
        let cells = line.iter().enumerate().map(|(place, cell)| {
            let width = widths[place];
            if is_number(place) {
                format!("{cell:>width$}")
            } else {
                format!("{cell:<width$}")
            }
        });
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}

/// What is known about one thing: names and values.
pub type Facts = Vec<(&'static str, Cell)>;

pub fn facts_to_text(facts: Facts) -> String {
    let line = |(name, cell): (&str, Cell)| vec![name.to_lowercase(), cell.text];
    lay_out(&facts.into_iter().map(line).collect::<Vec<_>>(), |_| false)
}

pub fn facts_to_html(facts: &Facts) -> Markup {
    html! {
        dl.facts { @for (name, cell) in facts { dt { (name) } dd { (cell.markup()) } } }
    }
}

/// Links of which one is chosen: address, text, and true for the chosen one.
pub fn choices<'t>(label: &str, links: impl Iterator<Item = (String, &'t str, bool)>) -> Markup {
    html! {
        nav.choices aria-label=(label) {
            @for (link, text, is_chosen) in links { a href=(link) aria-current=[is_chosen.then_some("true")] { (text) } }
        }
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
    use crate::report::query::tests::query;

    fn pairs(numbers: &[i64]) -> Vec<(String, i64)> {
        numbers
            .iter()
            .map(|number| (format!("name {number}"), *number))
            .collect()
    }

    fn table(rows: &[(String, i64)]) -> Table<'_, (String, i64)> {
        Table::new(rows)
            .text("name", "Name", |row| Cell::name(&row.0))
            .number("size", "Size", |row| {
                Cell::number(Some(row.1).filter(|size| *size > 0))
            })
    }

    #[test]
    fn columns_of_a_terminal_line_up() {
        let rows = [("één".to_owned(), 1_234), ("x".to_owned(), 0)];
        let table = table(&rows);
        assert_eq!(
            table.to_text("name,size"),
            "name   size\néén   1,234\nx         -\n"
        );
        assert_eq!(table.to_text("size"), " size\n1,234\n    -\n");
    }

    #[test]
    fn names_are_escaped_and_cells_have_their_heading() {
        let rows = [("<b>".to_owned(), 7)];
        let page = table(&rows).html("x", "name,size").into_string();
        assert!(
            page.contains(
                "<th role=\"rowheader\" scope=\"row\"><span class=\"text\">&lt;b&gt;</span></th>"
            ),
            "{page}"
        );
        assert!(
            page.contains("<td role=\"cell\" class=\"n\" data-label=\"Size\">7</td>"),
            "{page}"
        );
    }

    fn page(rows: &[(String, i64)], text: &str) -> String {
        let query = query("/keys", text, &Zone::utc());
        let page = table(rows).sorted_html("x", "name,size", ("key", "-size"), &query, "/keys");
        page.into_string()
    }

    #[test]
    fn every_column_sorts_both_ways() {
        let rows = pairs(&[20, 0, 30, 10]);
        for (text, expected) in [
            ("", "30 20 10 0"),
            ("sort=size", "0 10 20 30"),
            ("sort=name", "0 10 20 30"),
            ("sort=-name", "30 20 10 0"),
            ("sort=nonsense", "30 20 10 0"),
        ] {
            let page = page(&rows, text);
            let names = page.split("text\">name ").skip(1);
            let names: Vec<&str> = names.filter_map(|rest| rest.split('<').next()).collect();
            assert_eq!(names.join(" "), expected, "{text}");
        }
        let mut sort = "-size".to_owned();
        for (column, expected) in [
            ("size", "size"),
            ("size", "-size"),
            ("name", "name"),
            ("name", "-name"),
        ] {
            sort = after_click(&sort, column, column == "size");
            assert_eq!(sort, expected);
        }
        let page = page(&rows, "sort=name");
        assert!(page.contains("aria-sort=\"ascending\""), "{page}");
        assert!(page.contains("href=\"/keys?sort=-name#list\""), "{page}");
        assert!(
            page.contains("href=\"/keys#list\""),
            "the default order: {page}"
        );
    }

    #[test]
    fn every_row_is_on_one_page_and_any_number_leads_to_one() {
        let rows = pairs(&(1..=101).collect::<Vec<_>>());
        for (number, wanted, page_number, on_page) in [
            (50, "", 1, 50),
            (51, "2", 2, 1),
            (101, "3", 3, 1),
            (101, "99", 3, 1),
            (0, "2", 1, 0),
        ] {
            let text = page(&rows[..number], &format!("page={wanted}"));
            assert_eq!(
                text.matches("rowheader").count(),
                on_page,
                "{number} {wanted}"
            );
            let next = format!("/keys?page={}#list", page_number + 1);
            assert_eq!(text.contains(&next), number > 50 * page_number, "{text}");
            assert_eq!(text.contains("← Previous"), page_number > 1, "{text}");
            if number > 50 {
                let position = format!(
                    "Page {page_number} of {}, {number} keys",
                    number.div_ceil(50)
                );
                assert!(text.contains(&position), "{text}");
            }
        }
    }
}
