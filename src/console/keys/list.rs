//! The list of API keys, with the usage of each in the last 30 days.

use std::collections::HashMap;

use maud::{Markup, html};

use crate::console::filters::{self, folded};
use crate::console::page::{Operator, PageError, PageResult};
use crate::database::Problem;
use crate::keys::{Key, KeyState};
use crate::ledger::{Filter, Span, Sums};
use crate::report::choices;
use crate::report::query::{Query, is_match};
use crate::report::rows::{self, KeyRow};
use crate::store::Store;
use crate::text::grouped;
use crate::when::{Range, When};

/// The days over which requests are counted: today and the days before it.
const COUNTED_DAYS: When = When::Days(30);

/// The lists, as an address names them.
const LISTS: [(KeyState, &str, &str); 3] = [
    (KeyState::Active, "", "Active"),
    (KeyState::Expired, "expired", "Expired"),
    (KeyState::Revoked, "revoked", "Revoked"),
];

/// The list that a key is in: keys that expire soon are among the active ones.
fn list_state(key: &Key, now: i64) -> KeyState {
    match key.state(now) {
        KeyState::Expiring => KeyState::Active,
        state => state,
    }
}

/// The query of the list. The addresses of a key's pages have it too, so that they lead back.
pub fn query(operator: &Operator) -> Result<Query, PageError> {
    filters::query(operator, "/keys")
}

/// Returns the sums of keys over the counted days.
pub fn recent_sums(
    store: &Store,
    filter: Filter,
    now: i64,
) -> Result<HashMap<String, Sums>, Problem> {
    let range = Range {
        since: COUNTED_DAYS.begin(now, &store.zone).unwrap_or(i64::MIN),
        until: store.zone.day(now).until,
    };
    let mut sums: HashMap<String, Sums> = HashMap::new();
    store.ledger.figures(Span::Day, range, filter, |row| {
        sums.entry(row.key_id).or_default().add(&row.sums);
    })?;
    Ok(sums)
}

pub fn page(operator: &Operator) -> PageResult {
    let (store, now) = (&operator.console.store, operator.request.now);
    let (keys, query) = (store.keys.list()?, query(operator)?);
    let (state, wanted) = (query.state(), query.get("q"));
    let is_in = |state: KeyState| move |key: &&Key| list_state(key, now) == state;
    let counts = LISTS.map(|(state, ..)| keys.iter().filter(is_in(state)).count());
    let mut sums = recent_sums(store, Filter::ALL, now)?;
    // The newest first.
    let listed = keys.iter().rev().filter(is_in(state));
    let listed: Vec<KeyRow> = listed
        .filter(|key| is_match(key, wanted))
        .map(|key| (key.clone(), sums.remove(&key.id).unwrap_or_default()))
        .collect();
    let end = match state {
        KeyState::Revoked => "revoked",
        _ => "expires",
    };
    let columns = format!("name,permissions,limits,{end},last used,requests,errors,tokens");
    let (is_first, has_active) = (keys.is_empty(), counts[0] > 0);
    let content = html! {
        main {
            div.head {
                h1 { "API Keys" }
                @if has_active { a.button.primary href=(query.link("/keys/new", &[])) { "Create key" } }
            }
            (notice(operator, &keys))
            @if !is_first { (lists_and_filter(&query, counts)) }
            @if !has_active && state == KeyState::Active {
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
                (rows::keys(&listed, now, &query).sorted_html("keys", &columns, ("key", ""), &query, "/keys"))
            }
        }
    };
    Ok(operator.page("API Keys", &content))
}

/// What was done to a key before.
fn notice(operator: &Operator, keys: &[Key]) -> Markup {
    let named = |what: &str| {
        let id = operator.request.query.get(what);
        keys.iter().find(|key| key.id == id).map(|key| &key.name)
    };
    html! {
        @if let Some(name) = named("changed") {
            p.notice.good role="status" { "Saved " strong.text { (name) } ". The change applies from the next request on." }
        } @else if let Some(name) = named("revoked") {
            p.notice.good role="status" { strong.text { (name) } " is revoked and refused from now on." }
        } @else if let Some(name) = named("made") {
            p.notice role="status" { "This form has already created " strong.text { (name) } ". Its secret can’t be \
                displayed again. If you did not copy it, revoke the key and create another." }
        }
    }
}

/// Links to the lists that have keys, and the filter.
fn lists_and_filter(query: &Query, counts: [usize; 3]) -> Markup {
    let (chosen, wanted) = (query.state(), query.get("q"));
    let counted = LISTS.into_iter().zip(counts);
    let lists: Vec<_> = counted
        .filter(|((state, ..), count)| *count > 0 || [chosen, KeyState::Active].contains(state))
        .map(|((state, word, name), count)| {
            let text = format!("{name} ({})", grouped(count as i64));
            (
                query.link("/keys", &[("state", word)]),
                text,
                state == chosen,
            )
        })
        .collect();
    let links = lists.iter();
    let links =
        links.map(|(address, text, is_chosen)| (address.clone(), text.as_str(), *is_chosen));
    let set: Vec<String> = match wanted {
        "" => Vec::new(),
        _ => vec![wanted.to_owned()],
    };
    let form = html! {
        form method="get" action="/keys" role="search" {
            (query.form("/keys", &["q"]))
            label for="q" { "Filter" }
            input #q type="search" name="q" value=(wanted) maxlength="64" placeholder="Name, id or permission";
            button type="submit" { "Apply" }
        }
    };
    html! {
        div.filters {
            @if lists.len() > 1 { (choices("State", links)) }
            (folded(&set, &form))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::KeyTerms;
    use crate::report::query::tests::query;
    use crate::when::Zone;

    #[test]
    fn order_and_filter() {
        let entry = |id: &str, name: &str, expires, requests| {
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
            let sums = Sums {
                requests,
                ..Sums::default()
            };
            (key, sums)
        };
        let entries = [
            entry("a", "billing", Some(9), 7),
            entry("b", "Ana’s laptop", None, 900),
            entry("c", "crawler", Some(5), 7),
        ];
        for (order, expected) in [
            ("name", "bac"),
            ("expires", "cab"),
            ("requests", "acb"),
            ("-requests", "bac"),
            ("nonsense", "abc"),
        ] {
            let query = query("/keys", &format!("sort={order}"), &Zone::utc());
            let table = rows::keys(&entries, 1, &query);
            let page = table.sorted_html("", "name,expires,requests", ("key", ""), &query, "/keys");
            let page = page.into_string();
            let ids = page.split("/keys/key_").skip(1).map(|rest| &rest[..1]);
            assert_eq!(ids.collect::<String>(), expected, "{order}");
        }
        let found = |filter: &str| {
            let found = entries.iter().filter(|(key, _)| is_match(key, filter));
            found.map(|(key, _)| &key.id[4..]).collect::<String>()
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
