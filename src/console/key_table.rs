//! The list of API keys: its filter, order and pages, and what each key did lately.

use std::cmp::Ordering;
use std::collections::HashMap;

use maud::{Markup, html};

use super::form::Form;
use super::html_table::{cards, sort_heading};
use super::page::{self, Part};
use super::visit::{ConsoleSession, Visit};
use super::{Console, PageError};
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
    (Column::Requests, "requests", "Requests, 30 d"),
    (Column::Errors, "errors", "Errors, 30 d"),
    (Column::Tokens, "tokens", "Total tokens, 30 d"),
];

impl Column {
    fn is_number(self) -> bool {
        matches!(self, Self::Requests | Self::Errors | Self::Tokens)
    }

    /// Whether the greatest value comes first when the column is chosen.
    fn begins_with_greatest(self) -> bool {
        self.is_number() || matches!(self, Self::Created | Self::LastUsed)
    }

    fn compare(self, (a, of_a): &KeyEntry, (b, of_b): &KeyEntry) -> Ordering {
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

type KeyEntry = (Key, Sums);

/// What the list shows, as its address says it. The pages of a key carry it, so that they lead back to the same list.
#[derive(Clone)]
pub struct ListView {
    filter: String,
    state: ListedState,
    column: Column,
    descending: bool,
    /// The first page is 1.
    page: usize,
}

/// The lists of keys, each with its name in an address and on the page.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ListedState {
    /// Accepted keys, those that expire soon too.
    Active,
    Expired,
    Revoked,
}

impl ListedState {
    const ALL: [(Self, &str, &str); 3] = [
        (Self::Active, "active", "Active"),
        (Self::Expired, "expired", "Expired"),
        (Self::Revoked, "revoked", "Revoked"),
    ];

    fn of(key: &Key, now: i64) -> Self {
        match key.state(now) {
            KeyState::Active | KeyState::Expiring => Self::Active,
            KeyState::Expired => Self::Expired,
            KeyState::Revoked => Self::Revoked,
        }
    }
}

impl ListView {
    /// Ignores what it does not understand.
    pub fn read(query: &Form) -> Self {
        let order = query.get("sort");
        let name = order.trim_start_matches('-');
        let known = COLUMNS.iter().find(|(_, known, _)| *known == name);
        let (column, descending) =
            known.map_or((Column::Created, true), |(column, ..)| (*column, order.starts_with('-')));
        Self {
            filter: query.get("q").trim().chars().take(64).collect(),
            state: ListedState::ALL
                .into_iter()
                .find(|(_, word, _)| *word == query.get("state"))
                .map_or(ListedState::Active, |(state, ..)| state),
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
        self.with("/keys", None)
    }

    /// An address that carries this view, and perhaps the id of a key that something was done to.
    pub fn with(&self, path: &str, done: Option<(&str, &str)>) -> String {
        let state =
            ListedState::ALL.into_iter().find(|(state, ..)| *state == self.state).map(|(_, word, _)| word);
        let fields = [
            ("sort", Some(Self::order(self.column, self.descending)).filter(|order| order != "-created")),
            ("q", Some(percent_encoded(&self.filter)).filter(|filter| !filter.is_empty())),
            ("state", state.map(String::from).filter(|state| state != "active")),
            ("page", Some(self.page.to_string()).filter(|page| page != "1")),
        ];
        let done = done.map(|(name, id)| (name, Some(id.to_owned())));
        let fields: Vec<String> = fields
            .into_iter()
            .chain(done)
            .filter_map(|(name, value)| Some(format!("{name}={}", value?)))
            .collect();
        format!("{path}?{}", fields.join("&")).trim_end_matches('?').to_owned()
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
pub fn figures(console: &Console, filter: Filter, now: i64) -> Result<HashMap<String, Sums>, PageError> {
    let day = Span::Day.seconds();
    let until = (now.div_euclid(day) + 1) * day;
    let range = Range { since: until - COUNTED_DAYS * day, until };
    let mut figures: HashMap<String, Sums> = HashMap::new();
    console.store.figures(Span::Day, range, filter, &Matching::Anything, |row| {
        figures.entry(row.key_id).or_default().add(&row.sums);
    })?;
    Ok(figures)
}

pub fn list(console: &Console, visit: &Visit, session: &ConsoleSession) -> Result<Response, PageError> {
    let keys = console.store.list_keys()?;
    let mut view = ListView::read(&visit.query);
    let named =
        |what: &str| keys.iter().find(|key| key.id == visit.query.get(what)).map(|key| key.name.clone());
    let notice = html! {
        @if let Some(name) = named("changed") {
            p.notice.good role="status" { "Saved " strong.text { (name) } ". The change applies from the next request on." }
        } @else if let Some(name) = named("revoked") {
            p.notice.good role="status" { strong.text { (name) } " is revoked and refused from now on." }
        } @else if let Some(name) = named("made") {
            p.notice role="status" { "This form has already created " strong.text { (name) } ". Its secret can’t be \
                shown again. If you did not copy it, revoke the key and create another." }
        }
    };
    let counts = ListedState::ALL
        .map(|(state, ..)| keys.iter().filter(|key| ListedState::of(key, visit.now) == state).count());
    let [active, ..] = counts;
    let is_first = keys.is_empty();
    let mut figures =
        if keys.is_empty() { HashMap::new() } else { figures(console, Filter::ALL, visit.now)? };
    let shown =
        keys.into_iter().filter(|key| ListedState::of(key, visit.now) == view.state && view.matches(key));
    let with_figures = |key: Key| {
        let sums = figures.remove(&key.id).unwrap_or_default();
        (key, sums)
    };
    let mut shown: Vec<KeyEntry> = shown.map(with_figures).collect();
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
            @if !is_first { (filters(&view, counts)) }
            @if active == 0 && view.state == ListedState::Active {
                section.empty {
                    h2 { @if is_first { "No keys yet" } @else { "No active keys" } }
                    p { "Every request to the API carries a key. Create one for each application or person, so \
                         that you can see what each uses, and revoke one without the others." }
                    a.button.primary href="/keys/new" { @if is_first { "Create the first key" } @else { "Create key" } }
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
    Ok(page::inside(console, session, Part::Keys, "API Keys", &content))
}

fn filters(view: &ListView, counts: [usize; 3]) -> Markup {
    let tabs = ListedState::ALL.into_iter().zip(counts);
    let tabs: Vec<_> = tabs
        .filter(|((state, ..), count)| *count > 0 || *state == view.state || *state == ListedState::Active)
        .collect();
    html! {
        div.filters {
            @if tabs.len() > 1 {
                nav.choices aria-label="State" {
                    @for ((state, _, name), count) in &tabs {
                        a href=(ListView { state: *state, page: 1, ..view.clone() }.address()) aria-current=[(view.state == *state).then_some("true")] {
                            (name) " (" (grouped(*count as i64)) ")"
                        }
                    }
                }
            }
            form method="get" action="/keys" role="search" {
                @for (state, word, _) in ListedState::ALL {
                    @if state == view.state && state != ListedState::Active { input type="hidden" name="state" value=(word); }
                }
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

fn table(view: &ListView, entries: &[KeyEntry], now: i64) -> Markup {
    let heading = |(column, _, name): (Column, &str, &str)| {
        let sorted =
            (column == view.column).then_some(if view.descending { "descending" } else { "ascending" });
        let name = if column == Column::End && view.state == ListedState::Revoked { "Revoked" } else { name };
        sort_heading(name, &view.sorted_by(column).address(), sorted)
    };
    let class = if view.state == ListedState::Revoked { "keys revoked" } else { "keys" };
    html! {
        (cards(class, &COLUMNS.map(heading), entries.iter().map(|entry| cells(view, entry, now))))
        p.muted { "30 d: today and the 29 days before it." }
    }
}

/// A page has fifty rows of these and stays below 60 KB, so they have no more markup than they need.
fn cells(view: &ListView, (key, sums): &KeyEntry, now: i64) -> Vec<Markup> {
    let date =
        |time: Option<i64>| html! { @match time { Some(time) => (page::date(time)), None => "never" } };
    vec![
        html! {
            a.text href=(view.with(&format!("/keys/{}", key.id), None)) { (key.name) }
            " " code.muted { (key.hint.as_deref().unwrap_or(&key.id)) }
        },
        html! {
            (key.permissions.iter().map(|permission| permission.as_str()).collect::<Vec<_>>().join(", "))
            @if let Some(number) = key.concurrent { span.muted { " " (number) " concurrent" } }
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
        html! { a href=(format!("/requests?range=30d&key={}", key.id)) { (grouped(sums.requests)) } },
        html! {
            @if sums.errors > 0 { a href=(format!("/requests?range=30d&key={}&outcome=failed", key.id)) { (grouped(sums.errors)) } }
            @else { "0" }
        },
        html! { (grouped(sums.total_tokens)) },
    ]
}

pub fn expiry_badge(key: &Key, now: i64) -> Markup {
    html! {
        @match key.state(now) {
            KeyState::Expired => { " " span.badge.bad { "expired" } },
            KeyState::Expiring => {
                @let days = (key.expires.unwrap_or(now) - now + 86_399) / 86_400;
                " " span.badge.warn { "expires in " (page::count(days, "day")) }
            },
            KeyState::Active | KeyState::Revoked => {},
        }
    }
}

pub fn budget_badge(budget: &KeyBudget) -> Markup {
    html! {
        @if budget.is_used_up() { " " span.badge.bad { "budget used up" } }
        @else if budget.is_nearly_used_up() { " " span.badge.warn { "budget " (budget.percent()) " %" } }
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

    fn entry(id: &str, name: &str, expires: Option<i64>, requests: i64) -> KeyEntry {
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
            assert_eq!(view(nonsense).address(), "/keys", "{nonsense}");
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
            let mut sorted: Vec<&KeyEntry> = entries.iter().collect();
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
