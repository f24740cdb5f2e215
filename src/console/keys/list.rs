//! The list of API keys, with the usage of each in the last 30 days.

use std::collections::HashMap;

use maud::{Markup, html};

use crate::console::{
    filters::{self, folded},
    layout,
    page::{Operator, PageError, PageResult},
};
use crate::database::Problem;
use crate::keys::{Key, KeyState};
use crate::ledger::{Filter, Span, Sums};
use crate::report::query::{Query, is_match};
use crate::report::rows::{self, KeyRow};
use crate::report::table::choices;
use crate::store::Store;
use crate::text::grouped;
use crate::when::{Range, When};

/// The days over which requests are counted: today and the days before it.
const COUNTED_DAYS: i64 = 30;

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
    let (zone, days) = (&store.zone, When::Days(COUNTED_DAYS));
    let range = Range {
        since: days.begin(now, zone).unwrap_or(i64::MIN),
        until: zone.day(now).until,
    };
    let mut sums: HashMap<String, Sums> = HashMap::new();
    store.ledger.figures(Span::Day, range, filter, |row| {
        sums.entry(row.key_id).or_default().add(&row.sums);
    })?;
    Ok(sums)
}

pub fn page(operator: &Operator) -> PageResult {
    let Operator {
        console, request, ..
    } = *operator;
    let (keys, query) = (console.store.keys.list()?, query(operator)?);
    let (state, wanted) = (query.state(), query.get("q"));
    let notice = notice(operator, &keys);
    let counts = LISTS.map(|(state, _)| {
        let is_in_list = |key: &&Key| list_state(key, request.now) == state;
        keys.iter().filter(is_in_list).count()
    });
    let [active, ..] = counts;
    let is_first = keys.is_empty();
    let mut sums = recent_sums(&console.store, Filter::ALL, request.now)?;
    let is_listed = |key: &Key| list_state(key, request.now) == state && is_match(key, wanted);
    let mut listed: Vec<KeyRow> = keys
        .into_iter()
        .filter(is_listed)
        .map(|key| {
            let sums = sums.remove(&key.id).unwrap_or_default();
            (key, sums)
        })
        .collect();
    // The newest first.
    listed.reverse();
    let end = if state == KeyState::Revoked {
        "revoked"
    } else {
        "expires"
    };
    let columns = format!("name,permissions,limits,{end},last used,requests,errors,tokens");
    let content = html! {
        main {
            div.head {
                h1 { "API Keys" }
                @if active > 0 { a.button.primary href=(query.link("/keys/new", &[])) { "Create key" } }
            }
            (notice)
            @if !is_first { (filters(&query, counts)) }
            @if active == 0 && state == KeyState::Active {
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
                (rows::keys(&listed, request.now, &query).sorted_html("keys", &columns, ("key", ""), &query, "/keys"))
            }
        }
    };
    Ok(layout::operator_page(
        operator, 200, "/keys", "API Keys", &content,
    ))
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

fn filters(query: &Query, counts: [usize; 3]) -> Markup {
    let chosen = query.state();
    let mut lists = Vec::new();
    for ((state, name), count) in LISTS.into_iter().zip(counts) {
        if count > 0 || state == chosen || state == KeyState::Active {
            let word = if state == KeyState::Active {
                ""
            } else {
                state.as_str()
            };
            let address = query.link("/keys", &[("state", word)]);
            lists.push((
                address,
                format!("{name} ({})", grouped(count as i64)),
                state == chosen,
            ));
        }
    }
    let wanted = query.get("q");
    let form = html! {
        form method="get" action="/keys" role="search" {
            (query.form("/keys", &["q"]))
            label for="q" { "Filter" }
            input #q type="search" name="q" value=(wanted) maxlength="64" placeholder="Name, id or permission";
            button type="submit" { "Apply" }
        }
    };
    let set: Vec<String> = Some(wanted.to_owned())
        .filter(|text| !text.is_empty())
        .into_iter()
        .collect();
    html! {
        div.filters {
            @if lists.len() > 1 { (choices("State", lists.iter().map(|(address, name, is_chosen)| (address.clone(), name.as_str(), *is_chosen)))) }
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
