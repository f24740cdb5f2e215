//! The list of API keys: its filter, order and pages, and what each key did lately.

use std::cmp::Ordering;
use std::collections::HashMap;

use maud::{Markup, html};

use super::form::Form;
use super::page::{self, Part};
use super::table::{cards, sort_heading};
use super::visit::{Session, Visit};
use super::{Console, Stop};
use crate::http::Response;
use crate::store::{Filter, Key, KeyBudget, KeyState, Matching, Permission, Range, Span, Sums};
use crate::text::{grouped, percent_encoded};

/// The time over which requests are counted: today and the days before it.
const COUNTED_DAYS: i64 = 30;

/// How many keys a page has.
const ROWS: usize = 50;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Column {
    Name,
    Permissions,
    Created,
    /// When it expires or was revoked.
    End,
    LastUsed,
    Requests,
    Errors,
    Tokens,
}

/// The columns with their names in an address and, without those of `End`, on the page.
const COLUMNS: [(Column, &str, &str); 8] = [
    (Column::Name, "name", "Name"),
    (Column::Permissions, "permissions", "Permissions"),
    (Column::Created, "created", "Created"),
    (Column::End, "end", "Expires"),
    (Column::LastUsed, "used", "Last used"),
    (Column::Requests, "requests", "Requests"),
    (Column::Errors, "errors", "Errors"),
    (Column::Tokens, "tokens", "Tokens"),
];

impl Column {
    fn is_number(self) -> bool {
        matches!(self, Self::Requests | Self::Errors | Self::Tokens)
    }

    /// Whether the greatest value comes first when the column is chosen.
    fn begins_with_greatest(self) -> bool {
        self.is_number() || matches!(self, Self::Created | Self::LastUsed)
    }

    fn compare(self, (a, of_a): &Entry, (b, of_b): &Entry) -> Ordering {
        // A key that never expires comes last.
        let end = |key: &Key| key.revoked.or(key.expires).unwrap_or(i64::MAX);
        let by_column = match self {
            Self::Name => a.name.to_lowercase().cmp(&b.name.to_lowercase()),
            Self::Permissions => Permission::join(&a.permissions).cmp(&Permission::join(&b.permissions)),
            Self::Created => a.created.cmp(&b.created),
            Self::End => end(a).cmp(&end(b)),
            Self::LastUsed => a.last_used.cmp(&b.last_used),
            Self::Requests => of_a.requests.cmp(&of_b.requests),
            Self::Errors => of_a.errors.cmp(&of_b.errors),
            Self::Tokens => of_a.total_tokens.cmp(&of_b.total_tokens),
        };
        by_column.then_with(|| a.id.cmp(&b.id))
    }
}

type Entry = (Key, Sums);

/// What the list shows, as its address says it.
#[derive(Clone)]
struct ListView {
    filter: String,
    revoked: bool,
    column: Column,
    descending: bool,
    /// The first page is 1.
    page: usize,
}

impl ListView {
    /// Ignores what it does not understand.
    fn read(query: &Form) -> Self {
        let order = query.get("sort");
        let name = order.trim_start_matches('-');
        let known = COLUMNS.iter().find(|(_, known, _)| *known == name);
        let (column, descending) =
            known.map_or((Column::Created, true), |(column, ..)| (*column, order.starts_with('-')));
        Self {
            filter: query.get("q").trim().chars().take(64).collect(),
            revoked: query.get("state") == "revoked",
            column,
            descending,
            page: query.get("page").parse().unwrap_or(1).max(1),
        }
    }

    /// The value of `sort`.
    fn order(column: Column, descending: bool) -> String {
        let (_, name, _) = COLUMNS.into_iter().find(|(known, ..)| *known == column).unwrap_or(COLUMNS[0]);
        format!("{}{name}", if descending { "-" } else { "" })
    }

    fn address(&self) -> String {
        let mut address = format!("/keys?sort={}", Self::order(self.column, self.descending));
        if !self.filter.is_empty() {
            address += &format!("&q={}", percent_encoded(&self.filter));
        }
        if self.revoked {
            address += "&state=revoked";
        }
        if self.page > 1 {
            address += &format!("&page={}", self.page);
        }
        address
    }

    /// A part of the name, or of the id and the key's ends if it is not so short that most have it, or a permission.
    fn matches(&self, key: &Key) -> bool {
        let wanted = self.filter.to_lowercase();
        let is_part = |text: &str| wanted.len() >= 4 && text.contains(&wanted);
        key.name.to_lowercase().contains(&wanted)
            || is_part(&key.id)
            || key.hint.as_deref().is_some_and(is_part)
            || key.permissions.iter().any(|permission| permission.as_str() == wanted)
    }

    /// The same list in the order of a column; if it is in this order already, in the opposite one.
    fn sorted_by(&self, column: Column) -> Self {
        let descending = if self.column == column { !self.descending } else { column.begins_with_greatest() };
        Self { column, descending, page: 1, ..self.clone() }
    }
}

/// The figures of keys over the counted days.
pub fn figures(console: &Console, filter: Filter, now: i64) -> Result<HashMap<String, Sums>, Stop> {
    let day = Span::Day.seconds();
    let until = (now.div_euclid(day) + 1) * day;
    let range = Range { since: until - COUNTED_DAYS * day, until };
    let mut figures: HashMap<String, Sums> = HashMap::new();
    console.store.figures(Span::Day, range, filter, &Matching::Anything, |row| {
        figures.entry(row.key_id).or_default().add(&row.sums);
    })?;
    Ok(figures)
}

pub fn list(console: &Console, visit: &Visit, session: &Session) -> Result<Response, Stop> {
    let keys = console.store.list_keys()?;
    let mut view = ListView::read(&visit.query);
    let named =
        |what: &str| keys.iter().find(|key| key.id == visit.query.get(what)).map(|key| key.name.clone());
    let notice = html! {
        @if let Some(name) = named("changed") {
            p.notice role="status" { "Saved " strong.text { (name) } ". The change applies from the next request on." }
        } @else if let Some(name) = named("revoked") {
            p.notice role="status" { strong.text { (name) } " is revoked and refused from now on." }
        } @else if let Some(name) = named("made") {
            p.notice role="status" { "This form has already created " strong.text { (name) } ". Its secret can’t be \
                shown again. If you did not copy it, revoke the key and create another." }
        }
    };
    let revoked = keys.iter().filter(|key| key.revoked.is_some()).count();
    let active = keys.len() - revoked;
    let mut figures =
        if keys.is_empty() { HashMap::new() } else { figures(console, Filter::ALL, visit.now)? };
    let shown = keys.into_iter().filter(|key| key.revoked.is_some() == view.revoked && view.matches(key));
    let with_figures = |key: Key| {
        let sums = figures.remove(&key.id).unwrap_or_default();
        (key, sums)
    };
    let mut shown: Vec<Entry> = shown.map(with_figures).collect();
    shown.sort_by(|a, b| view.column.compare(a, b));
    if view.descending {
        shown.reverse();
    }
    let pages = shown.len().div_ceil(ROWS).max(1);
    view.page = view.page.min(pages);
    let first = (view.page - 1) * ROWS;
    let content = html! {
        main {
            div.head {
                h1 { "API Keys" }
                @if active > 0 { a.button.primary href="/keys/new" { "Create key" } }
            }
            (notice)
            @if active + revoked > 0 { (filters(&view, active, revoked)) }
            @if active == 0 && !view.revoked {
                section.empty {
                    h2 { @if revoked == 0 { "No keys yet" } @else { "No active keys" } }
                    p { "Every request to the API carries a key. Create one for each application or person, so \
                         that you can see what each uses, and revoke one without the others." }
                    a.button.primary href="/keys/new" { @if revoked == 0 { "Create the first key" } @else { "Create key" } }
                }
            } @else if shown.is_empty() {
                section.empty {
                    h2 { "No key matches" }
                    p { "The filter looks for a part of the name, of the id, of the key’s first or last digits, or for a permission." }
                    a.button href="/keys" { "Show all active keys" }
                }
            } @else {
                (table(&view, &shown[first..shown.len().min(first + ROWS)], visit.now))
                (page_links(&view, shown.len(), pages))
            }
        }
    };
    Ok(page::inside(&console.assets, session, Part::Keys, "API Keys", &content))
}

fn filters(view: &ListView, active: usize, revoked: usize) -> Markup {
    let tab = |name: &str, count: usize, is_revoked: bool| {
        let address = ListView { revoked: is_revoked, page: 1, ..view.clone() }.address();
        html! {
            a href=(address) aria-current=[(view.revoked == is_revoked).then_some("true")] { (name) " (" (count) ")" }
        }
    };
    html! {
        div.filters {
            @if revoked > 0 {
                nav.choices aria-label="State" { (tab("Active", active, false)) (tab("Revoked", revoked, true)) }
            }
            form method="get" action="/keys" role="search" {
                @if view.revoked { input type="hidden" name="state" value="revoked"; }
                label for="q" { "Filter" }
                input #q type="search" name="q" value=(view.filter) maxlength="64" placeholder="Name, id or permission";
                // A wide table has links in its head instead.
                label.order for="sort" { "Order" }
                select.order #sort name="sort" {
                    @for (column, _, name) in COLUMNS {
                        @let first = column.begins_with_greatest();
                        option value=(ListView::order(column, first)) selected[(column, first) == (view.column, view.descending)] { (name) }
                        @if column == view.column {
                            option value=(ListView::order(column, !first)) selected[view.descending != first] { (name) ", reversed" }
                        }
                    }
                }
                button type="submit" { "Apply" }
            }
        }
    }
}

fn table(view: &ListView, entries: &[Entry], now: i64) -> Markup {
    let heading = |(column, _, name): (Column, &str, &str)| {
        let sorted =
            (column == view.column).then_some(if view.descending { "descending" } else { "ascending" });
        let name = if column == Column::End && view.revoked { "Revoked" } else { name };
        sort_heading(name, &view.sorted_by(column).address(), sorted)
    };
    let class = if view.revoked { "keys revoked" } else { "keys" };
    html! {
        (cards(class, &COLUMNS.map(heading), entries.iter().map(|entry| cells(entry, now))))
        p.muted { "Requests, errors and tokens: " (COUNTED_DAYS) " days, today included." }
    }
}

/// A page has fifty rows of these and stays below 60 KB, so they have no more markup than they need.
fn cells((key, sums): &Entry, now: i64) -> Vec<Markup> {
    let date =
        |time: Option<i64>| html! { @match time { Some(time) => (page::date(time)), None => "never" } };
    vec![
        html! {
            a.text href=(format!("/keys/{}", key.id)) { (key.name) }
            " " code.muted { (key.hint.as_deref().unwrap_or(&key.id)) }
        },
        html! {
            (key.permissions.iter().map(|permission| permission.as_str()).collect::<Vec<_>>().join(", "))
            @if let Some(number) = key.concurrent { span.muted { " " (number) " at once" } }
            @if let Some(budget) = &key.budget {
                " " span.muted { (budget.percent()) "% of " (grouped(budget.budget.tokens)) "/" (budget.budget.per.as_str()) }
                (budget_badge(budget))
            }
        },
        date(Some(key.created)),
        html! {
            (date(key.revoked.or(key.expires)))
            (expiry_badge(key, now))
        },
        html! { @match key.last_used { Some(time) => (page::time(time, false)), None => "never" } },
        html! { a href=(format!("/usage?range=30d&key={}", key.id)) { (grouped(sums.requests)) } },
        html! { (grouped(sums.errors)) },
        html! { (grouped(sums.total_tokens)) },
    ]
}

pub fn expiry_badge(key: &Key, now: i64) -> Markup {
    html! {
        @match key.state(now) {
            KeyState::Expired => { " " span.badge.bad { "expired" } },
            KeyState::Expiring => { " " span.badge.warn { "expiring" } },
            KeyState::Active | KeyState::Revoked => {},
        }
    }
}

pub fn budget_badge(budget: &KeyBudget) -> Markup {
    html! {
        @if budget.is_used_up() { " " span.badge.bad { "used up" } }
        @else if budget.is_nearly_used_up() { " " span.badge.warn { "nearly used up" } }
    }
}

fn page_links(view: &ListView, keys: usize, pages: usize) -> Markup {
    let link = |page: usize, name: &str| {
        html! { a.button href=(ListView { page, ..view.clone() }.address()) { (name) } }
    };
    html! {
        @if pages > 1 {
            nav.pages aria-label="Pages" {
                @if view.page > 1 { (link(view.page - 1, "← Previous")) }
                span.muted { "Page " (view.page) " of " (pages) ", " (page::count(keys as i64, "key")) }
                @if view.page < pages { (link(view.page + 1, "Next →")) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(query: &str) -> ListView {
        ListView::read(&Form::parse(query))
    }

    fn entry(id: &str, name: &str, expires: Option<i64>, requests: i64) -> Entry {
        let key = Key {
            id: format!("key_{id}"),
            name: name.into(),
            expires,
            hint: Some(format!("adr_{id}…c41d")),
            ..Key::example()
        };
        (key, Sums { requests, ..Sums::default() })
    }

    #[test]
    fn an_address_leads_back_to_itself() {
        for address in ["/keys?sort=name", "/keys?sort=-tokens&q=a%20b&state=revoked&page=3"] {
            assert_eq!(view(address.split_once('?').expect("a query").1).address(), address);
        }
        for nonsense in ["", "sort=nonsense&page=0&state=x&q=+", "sort=-&page=-1"] {
            assert_eq!(view(nonsense).address(), "/keys?sort=-created", "{nonsense}");
        }
        let other = view("sort=name&page=2").sorted_by(Column::Requests);
        assert_eq!(other.address(), "/keys?sort=-requests");
        assert_eq!(other.sorted_by(Column::Requests).address(), "/keys?sort=requests");
    }

    #[test]
    fn order_and_filter() {
        let entries = [
            entry("a", "billing", Some(9), 7),
            entry("b", "Ana’s laptop", None, 900),
            entry("c", "crawler", Some(5), 7),
        ];
        let order = |column: Column| {
            let mut sorted: Vec<&Entry> = entries.iter().collect();
            sorted.sort_by(|a, b| column.compare(a, b));
            sorted.iter().map(|(key, _)| &key.id[4..]).collect::<String>()
        };
        assert_eq!(order(Column::Name), "bac", "without regard to case");
        assert_eq!(order(Column::End), "cab", "never is last");
        assert_eq!(order(Column::Requests), "acb", "equal ones by their id");
        let found = |filter: &str| {
            let view = view(&format!("q={}", percent_encoded(filter)));
            entries
                .iter()
                .filter(|(key, _)| view.matches(key))
                .map(|(key, _)| &key.id[4..])
                .collect::<String>()
        };
        for (filter, ids) in [
            ("", "abc"),
            ("ANA’S", "b"),
            ("key_c", "c"),
            ("adr_a", "a"),
            ("adr", ""),
            ("completions", "abc"),
            ("x", ""),
        ] {
            assert_eq!(found(filter), ids, "{filter}");
        }
    }
}
