//! The list of API keys: its filter, order and pages, and the usage of each key in the last 30
//! days.

use std::cmp::Ordering;
use std::collections::HashMap;

use maud::{Markup, html};

use crate::console::{
    html::{
        form::{Form, link},
        format::{self, or_never},
        table::{Pages, SortColumn, SortOrder, cards, choices, folded, hidden_fields},
    },
    layout,
    page::{Operator, PageResult},
};
use crate::database::Problem;
use crate::keys::{Budget, Key, KeyState, Permission, time_left};
use crate::ledger::{Filter, Span, Sums};
use crate::store::Store;
use crate::text::grouped;
use crate::when::{Range, When, Zone};

/// The days over which requests are counted: today and the days before it.
const COUNTED_DAYS: i64 = 30;

const KEYS_PER_PAGE: usize = 50;

const COLUMNS: [SortColumn; 8] = [
    (SortOrder::ascending("name"), "Name"),
    (SortOrder::ascending("permissions"), "Permissions"),
    (SortOrder::descending("budget"), "Budget, limit"),
    (SortOrder::ascending("end"), "Expires"),
    (SortOrder::descending("used"), "Last used"),
    (SortOrder::descending("requests"), "Requests, 30 d"),
    (SortOrder::descending("errors"), "Errors, 30 d"),
    (SortOrder::descending("tokens"), "Total tokens, 30 d"),
];

const DEFAULT_ORDER: SortOrder = SortOrder::descending("created");

type KeyEntry = (Sums, Key);

/// Compares two keys; equal ones are in the order of their ids.
fn compare(order: SortOrder, (sums_a, a): &KeyEntry, (sums_b, b): &KeyEntry) -> Ordering {
    // A key that never expires comes last.
    let end = |key: &Key| key.revoked.or(key.terms.expires).unwrap_or(i64::MAX);
    // A key without a budget has used less than nothing of it.
    let used_share = |key: &Key| key.terms.budget.map(|budget| budget.percent());
    let ascending = match order.column {
        "name" => a.name.to_lowercase().cmp(&b.name.to_lowercase()),
        "permissions" => {
            Permission::join(&a.terms.permissions).cmp(&Permission::join(&b.terms.permissions))
        }
        "budget" => used_share(a).cmp(&used_share(b)),
        "end" => end(a).cmp(&end(b)),
        "used" => a.last_used.cmp(&b.last_used),
        "requests" => sums_a.requests.cmp(&sums_b.requests),
        "errors" => sums_a.errors.cmp(&sums_b.errors),
        "tokens" => sums_a.total_tokens.cmp(&sums_b.total_tokens),
        _ => a.created.cmp(&b.created),
    };
    order.direct(ascending.then_with(|| a.id.cmp(&b.id)))
}

/// The filter, order and page of the list, as its address has them. The addresses of a key's pages
/// have them too, so that they lead back to the same list.
#[derive(Clone)]
pub struct KeyListView {
    filter: String,
    state: KeyState,
    order: SortOrder,
    /// The first page is 1.
    page: usize,
}

const LISTS: [(KeyState, &str); 3] = [
    (KeyState::Active, "Active"),
    (KeyState::Expired, "Expired"),
    (KeyState::Revoked, "Revoked"),
];

/// The list that a key is in: keys that expire soon are among the active ones.
fn list_state(key: &Key, now: i64) -> KeyState {
    match key.state(now) {
        KeyState::Expiring => KeyState::Active,
        state => state,
    }
}

impl KeyListView {
    /// Reads a query. Ignores what it does not understand.
    pub fn read(query: &Form) -> Self {
        let state =
            KeyState::parse(query.get("state")).filter(|state| *state != KeyState::Expiring);
        Self {
            filter: query.text("q", 64),
            state: state.unwrap_or(KeyState::Active),
            order: SortOrder::parse(query.get("sort"), &COLUMNS).unwrap_or(DEFAULT_ORDER),
            page: query.get("page").parse().unwrap_or(1).max(1),
        }
    }

    fn fields(&self) -> Vec<(&'static str, String)> {
        let state = Some(self.state).filter(|state| *state != KeyState::Active);
        let page = Some(self.page).filter(|page| *page != 1);
        vec![
            ("sort", self.order.field(DEFAULT_ORDER)),
            ("q", self.filter.clone()),
            ("state", state.map_or("", KeyState::as_str).to_owned()),
            ("page", page.map_or(String::new(), |page| page.to_string())),
        ]
    }

    /// The address of the list, or of a page that leads back to it.
    pub fn address(&self, path: &str) -> String {
        link(path, self.fields())
    }

    /// The address of a key's page. `page` is empty or begins with a slash.
    pub fn key_address(&self, id: &str, page: &str) -> String {
        self.address(&format!("/keys/{id}{page}"))
    }

    /// The address of the list after a change of a key. `change` is "changed" or "revoked".
    pub fn address_after(&self, change: &'static str, id: &str) -> String {
        let mut fields = self.fields();
        fields.push((change, id.to_owned()));
        link("/keys", fields)
    }
}

/// Searches for a text in the name, in the id and the key's ends unless it is so short that most
/// have it, and compares it with the permissions.
pub fn is_match(key: &Key, text: &str) -> bool {
    let wanted = text.to_lowercase();
    let is_part = |text: &str| wanted.len() >= 4 && text.contains(&wanted);
    key.name.to_lowercase().contains(&wanted)
        || is_part(&key.id)
        || is_part(&key.hint)
        || key
            .terms
            .permissions
            .iter()
            .any(|permission| permission.as_str() == wanted)
}

/// Returns the sums of keys over the counted days.
pub fn recent_sums(
    store: &Store,
    filter: Filter,
    now: i64,
) -> Result<HashMap<String, Sums>, Problem> {
    let (zone, days) = (&store.zone, When::Days(COUNTED_DAYS));
    let range = Range {
        since: days.begin(now, zone).unwrap_or(i64::MIN),
        until: zone.day(now).until,
    };
    let mut figures: HashMap<String, Sums> = HashMap::new();
    store.ledger.figures(Span::Day, range, filter, |row| {
        figures.entry(row.key_id).or_default().add(&row.sums);
    })?;
    Ok(figures)
}

pub fn page(operator: &Operator) -> PageResult {
    let Operator {
        console, request, ..
    } = *operator;
    let keys = console.store.keys.list()?;
    let mut view = KeyListView::read(&request.query);
    let named = |what: &str| {
        keys.iter()
            .find(|key| key.id == request.query.get(what))
            .map(|key| key.name.clone())
    };
    let notice = html! {
        @if let Some(name) = named("changed") {
            p.notice.good role="status" { "Saved " strong.text { (name) } ". The change applies from the next request on." }
        } @else if let Some(name) = named("revoked") {
            p.notice.good role="status" { strong.text { (name) } " is revoked and refused from now on." }
        } @else if let Some(name) = named("made") {
            p.notice role="status" { "This form has already created " strong.text { (name) } ". Its secret can’t be \
                displayed again. If you did not copy it, revoke the key and create another." }
        }
    };
    let counts = LISTS.map(|(state, _)| {
        keys.iter()
            .filter(|key| list_state(key, request.now) == state)
            .count()
    });
    let [active, ..] = counts;
    let is_first = keys.is_empty();
    let mut sums = recent_sums(&console.store, Filter::ALL, request.now)?;
    let mut listed: Vec<KeyEntry> = keys
        .into_iter()
        .filter(|key| list_state(key, request.now) == view.state && is_match(key, &view.filter))
        .map(|key| (sums.remove(&key.id).unwrap_or_default(), key))
        .collect();
    listed.sort_by(|a, b| compare(view.order, a, b));
    let pages = Pages::new(listed.len(), KEYS_PER_PAGE, view.page);
    view.page = pages.number;
    let address = |page: usize| {
        KeyListView {
            page,
            ..view.clone()
        }
        .address("/keys")
    };
    let content = html! {
        main {
            div.head {
                h1 { "API Keys" }
                @if active > 0 { a.button.primary href=(view.address("/keys/new")) { "Create key" } }
            }
            (notice)
            @if !is_first { (filters(&view, counts)) }
            @if active == 0 && view.state == KeyState::Active {
                section.empty {
                    h2 { @if is_first { "No keys yet" } @else { "No active keys" } }
                    p { "Every request to the API carries a key. Create one for each application or person, so \
                         that you can see what each uses, and revoke one without the others." }
                    a.button.primary href="/keys/new" { @if is_first { "Create the first key" } @else { "Create key" } }
                }
            } @else if listed.is_empty() {
                section.empty {
                    h2 { "No key matches" }
                    p { "The filter looks for a part of the name, of the id, of the key’s first or last digits, or for a permission." }
                    a.button href="/keys" { "Show all active keys" }
                }
            } @else {
                (table(&view, &listed[pages.rows_on_page.clone()], request.now, &operator.console.store.zone))
                (pages.links("key", address))
            }
        }
    };
    Ok(layout::operator_page(
        operator, 200, "/keys", "API Keys", &content,
    ))
}

fn filters(view: &KeyListView, counts: [usize; 3]) -> Markup {
    let mut tabs = Vec::new();
    for ((state, name), count) in LISTS.into_iter().zip(counts) {
        if count > 0 || state == view.state || state == KeyState::Active {
            let address = KeyListView {
                state,
                page: 1,
                ..view.clone()
            }
            .address("/keys");
            let text = format!("{name} ({})", grouped(count as i64));
            tabs.push((address, text, state == view.state));
        }
    }
    let option = |order: SortOrder, name: &str, suffix: &str| {
        html! { option value=(order.to_string()) selected[order == view.order] { (name) (suffix) } }
    };
    let form = html! {
        form method="get" action="/keys" role="search" {
            (hidden_fields(view.fields(), &["q", "sort", "page"]))
            label for="q" { "Filter" }
            input #q type="search" name="q" value=(view.filter) maxlength="64" placeholder="Name, id or permission";
            // A wide table has links in its head instead.
            label.order for="sort" { "Order" }
            select.order #sort name="sort" {
                option value="" { "Newest first" }
                @for (order, heading) in COLUMNS {
                    (option(order, heading, ""))
                    @if order.column == view.order.column { (option(order.after_click(order), heading, ", reversed")) }
                }
            }
            button type="submit" { "Apply" }
        }
    };
    let by = COLUMNS
        .iter()
        .find(|(order, _)| order.column == view.order.column)
        .map_or(String::new(), |(_, heading)| format!("by {heading}"));
    html! {
        div.filters {
            @if tabs.len() > 1 { (choices("State", tabs.into_iter())) }
            (folded(&[view.filter.clone(), by], &form))
        }
    }
}

fn table(view: &KeyListView, entries: &[KeyEntry], now: i64, zone: &Zone) -> Markup {
    let is_revoked = view.state == KeyState::Revoked;
    let headings = COLUMNS.map(|(first_click, heading)| {
        let sorted = KeyListView {
            order: view.order.after_click(first_click),
            page: 1,
            ..view.clone()
        };
        let heading = match heading {
            "Expires" if is_revoked => "Revoked",
            heading => heading,
        };
        view.order
            .heading(first_click.column, heading, &sorted.address("/keys"))
    });
    let rows = entries.iter().map(|entry| cells(view, entry, now, zone));
    cards(
        if is_revoked { "keys revoked" } else { "keys" },
        &headings,
        rows,
    )
}

/// A page has fifty rows of these and stays below 60 KB, so they have no more markup than they
/// need.
fn cells(view: &KeyListView, (sums, key): &KeyEntry, now: i64, zone: &Zone) -> Vec<Markup> {
    vec![
        html! {
            a.text href=(view.key_address(&key.id, "")) { (key.name) }
            " " code.muted { (key.hint) }
        },
        html! { (Permission::join(&key.terms.permissions).replace(',', ", ")) },
        html! {
            @if let Some(budget) = &key.terms.budget { (budget_bar(budget)) " " }
            @if let Some(number) = key.terms.concurrent { span.muted { (number) " concurrent" } }
        },
        html! {
            (or_never(key.revoked.or(key.terms.expires), |time| format::date(time, zone)))
            (expiry_badge(key, now))
        },
        or_never(key.last_used, |time| format::minute(time, zone)),
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
            KeyState::Expiring => { " " span.badge.warn { "expires in " (time_left(key.terms.expires.unwrap_or(now) - now)) } },
            KeyState::Active | KeyState::Revoked => {},
        }
    }
}

/// The used part of a budget, as a bar and in figures.
pub fn budget_bar(budget: &Budget) -> Markup {
    let Budget { tokens, per, used } = *budget;
    html! {
        progress max=(tokens) value=(used.min(tokens)) class=[budget.is_nearly_used_up().then_some("bad")] aria-label="Used of the budget" {}
        (budget.percent()) "% of " (grouped(tokens)) " a " (per.as_str())
        @if budget.is_used_up() { " " span.badge.bad { "used up" } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::KeyTerms;

    fn view(query: &str) -> KeyListView {
        KeyListView::read(&Form::parse(query))
    }

    fn entry(id: &str, name: &str, expires: Option<i64>, requests: i64) -> KeyEntry {
        let key = Key {
            id: format!("key_{id}"),
            name: name.into(),
            hint: format!("adr_{id}…c41d"),
            terms: KeyTerms {
                expires,
                ..KeyTerms::example()
            },
            ..Key::example()
        };
        (
            Sums {
                requests,
                ..Sums::default()
            },
            key,
        )
    }

    #[test]
    fn an_address_leads_back_to_itself() {
        for address in [
            "/keys?sort=name",
            "/keys?sort=-tokens&q=a%20b&state=revoked&page=3",
        ] {
            assert_eq!(
                view(address.split_once('?').expect("a query").1).address("/keys"),
                address
            );
        }
        for nonsense in ["", "sort=nonsense&page=0&state=x&q=+", "sort=-&page=-1"] {
            assert_eq!(view(nonsense).address("/keys"), "/keys", "{nonsense}");
        }
    }

    #[test]
    fn order_and_filter() {
        let entries = [
            entry("a", "billing", Some(9), 7),
            entry("b", "Ana’s laptop", None, 900),
            entry("c", "crawler", Some(5), 7),
        ];
        let order = |sort: &str| {
            let mut sorted: Vec<&KeyEntry> = entries.iter().collect();
            sorted.sort_by(|a, b| compare(view(&format!("sort={sort}")).order, a, b));
            sorted
                .iter()
                .map(|(_, key)| &key.id[4..])
                .collect::<String>()
        };
        assert_eq!(order("name"), "bac", "without regard to case");
        assert_eq!(order("end"), "cab", "never is last");
        assert_eq!(order("requests"), "acb", "equal ones by their id");
        assert_eq!(order("-requests"), "bca", "and the reverse");
        let found = |filter: &str| {
            let found = entries.iter().filter(|(_, key)| is_match(key, filter));
            found.map(|(_, key)| &key.id[4..]).collect::<String>()
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
