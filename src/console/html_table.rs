//! Tables that a narrow screen shows as cards, and headings that sort a table.

use maud::{Markup, html};

/// A table that a narrow screen shows as cards. The first cell names its row. With `display: block` some browsers no
/// longer tell screen readers that it is a table, so every element has its role.
pub fn cards(class: &str, headings: &[Markup], rows: impl Iterator<Item = Vec<Markup>>) -> Markup {
    html! {
        table class=(format!("cards {class}")) role="table" {
            thead role="rowgroup" { tr role="row" { @for heading in headings { (heading) } } }
            tbody role="rowgroup" {
                @for row in rows {
                    tr role="row" {
                        @for (number, cell) in row.into_iter().enumerate() {
                            @if number == 0 { th role="rowheader" scope="row" { (cell) } }
                            @else { td role="cell" { (cell) } }
                        }
                    }
                }
            }
        }
    }
}

pub fn heading(name: &str) -> Markup {
    html! { th role="columnheader" scope="col" { (name) } }
}

/// A heading with a link that sorts by its column. `sorted` is the value of `aria-sort`.
pub fn sort_heading(name: &str, address: &str, sorted: Option<&str>) -> Markup {
    html! { th role="columnheader" scope="col" aria-sort=[sorted] { a href=(address) { (name) } } }
}
