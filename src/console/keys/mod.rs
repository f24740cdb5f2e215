//! The pages of the API keys: the list, with the usage of each in the last 30 days, and those that
//! create, change, rotate and revoke one.

mod form;

use std::collections::HashMap;

use maud::{Markup, html};

use self::form::WrongField;
use super::filters::{self, folded};
use super::page::{Operator, PageError, PageResult, copy_box, dialog, redirect};
use crate::checks::is_local;
use crate::error::Problem;
use crate::http::Response;
use crate::keys::{Budget, Key, KeyChanged, KeyState, Permission};
use crate::ledger::{Filter, Span, Sums};
use crate::report::choices;
use crate::report::format::minute;
use crate::report::query::{Form, Query, is_match};
use crate::report::rows::{self, KeyRow};
use crate::secret::{SecretDigest, new_secret, secret_hex};
use crate::store::Store;
use crate::text::{count, grouped};
use crate::when::{HOUR, Range, When, Zone};

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
fn query(operator: &Operator) -> Result<Query, PageError> {
    filters::query(operator, "/keys")
}

/// Returns the sums of keys over the counted days.
fn recent_sums(store: &Store, filter: Filter, now: i64) -> Result<HashMap<String, Sums>, Problem> {
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

pub fn list(operator: &Operator) -> PageResult {
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

/// The number of random bytes that identify a form for a new key.
const ONCE_BYTES: usize = 16;

pub fn new(operator: &Operator) -> PageResult {
    new_key(operator, &form::of_new_key(), None)
}

fn new_key(operator: &Operator, wanted: &Form, wrong: Option<&WrongField>) -> PageResult {
    let content = html! {
        form method="post" action="/keys" {
            input type="hidden" name="once" value=(secret_hex::<ONCE_BYTES>());
            (form::fields(wanted, None, wrong, &operator.console.store.zone))
            div.buttons {
                button.primary type="submit" { "Create key" }
                a.button href=(query(operator)?.link("/keys", &[])) { "Cancel" }
            }
        }
    };
    let page = dialog(Some(operator), "Create an API key", &content);
    Ok(checked(page, wrong))
}

/// A page with a form, of which a field may be wrong.
fn checked(page: Response, wrong: Option<&WrongField>) -> Response {
    let status = if wrong.is_some() { 400 } else { 200 };
    Response { status, ..page }
}

pub fn create(operator: &Operator) -> PageResult {
    let (request, store) = (operator.request, &operator.console.store);
    let wanted = &request.form;
    let (name, terms) = match form::check(wanted, None, request.now, &store.zone) {
        Ok(checked) => checked,
        Err(wrong) => return new_key(operator, wanted, Some(&wrong)),
    };
    let id = id_for(wanted.get("once")).ok_or_else(PageError::incomplete_form)?;
    let (secret, by) = (new_secret(), request.actor());
    if !store.keys.add(&id, &secret, &name, &terms, &by)? {
        return Ok(redirect(&format!("/keys?made={id}")));
    }
    log::info!("console: {id} was created");
    let example = example(operator, &terms.permissions, &secret);
    new_secret_page(operator, (&id, name.as_str()), &secret, &example)
}

/// The id of the key that a form creates. It is derived from the form's random number, so the
/// database refuses a second key from the same form, sent at the same time or after a restart.
fn id_for(once: &str) -> Option<String> {
    let is_ours = once.len() == 2 * ONCE_BYTES && once.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_ours.then(|| format!("key_{}", hex::encode(&SecretDigest::of(once).0[..8])))
}

/// The only page that ever has a secret. It ends with `more`.
fn new_secret_page(
    operator: &Operator,
    (id, name): (&str, &str),
    secret: &str,
    more: &Markup,
) -> PageResult {
    let content = html! {
        p { strong.text { (name) } " · " code { (id) } }
        p.notice role="status" { strong { "Copy it now." } " Not stored, so it can’t be displayed again." }
        (copy_box("The key", "secret", secret))
        (more)
        p { a.button.primary href=(query(operator)?.link("/keys", &[])) { "Done" } }
    };
    Ok(dialog(Some(operator), "The new key", &content))
}

/// The address, the model and a first request for a new key.
fn example(operator: &Operator, permissions: &[Permission], secret: &str) -> Markup {
    let request = operator.request;
    let authority = request.http.head.authority();
    let authorization = format!("-H 'Authorization: Bearer {secret}'");
    if !permissions.contains(&Permission::Completions) {
        let scheme = request.scheme();
        let command = format!("curl {scheme}://{authority}/metrics {authorization}");
        return copy_box("The metrics", "curl", &command);
    }
    let hosts = &operator.console.config.api_hosts;
    let host = hosts.first().map_or("localhost", String::as_str);
    // Over a network a key is sent by HTTPS only, also if the operator uses HTTP here.
    let scheme = if is_local(host) {
        request.scheme()
    } else {
        "https"
    };
    let authority = authority.parse().ok();
    let port = authority
        .filter(|_| scheme == request.scheme())
        .and_then(|own: ::http::uri::Authority| own.port_u16())
        .map_or(String::new(), |port| format!(":{port}"));
    let host = if host.contains(':') {
        format!("[{host}]")
    } else {
        host.to_owned()
    };
    let base = format!("{scheme}://{host}{port}/v1");
    let command = format!(
        "curl {base}/chat/completions \\\n  {authorization} \\\n  -H 'Content-Type: application/json' \\\n  \
         -d '{{\"model\": \"adriaticum\", \"messages\": [{{\"role\": \"user\", \"content\": \"Say hello.\"}}]}}'"
    );
    html! {
        (copy_box("Base URL", "base", &base))
        (copy_box("Model", "model", "adriaticum"))
        (copy_box("A first request", "curl", &command))
    }
}

fn find(operator: &Operator, id: &str) -> Result<Key, PageError> {
    let key = operator.console.store.keys.get(id)?;
    key.ok_or_else(PageError::not_found)
}

pub fn page(operator: &Operator, id: &str) -> PageResult {
    let key = find(operator, id)?;
    let present = form::of_key(&key, &operator.console.store.zone);
    key_page(operator, &key, &present, None)
}

/// Changes a key as the form says: the last change wins, and the audit has all of them.
pub fn change(operator: &Operator, id: &str) -> PageResult {
    let (request, store) = (operator.request, &operator.console.store);
    let (key, wanted) = (find(operator, id)?, &request.form);
    if key.revoked.is_some() {
        let text = "Nothing was changed. A revoked key stays as it is.";
        return Err(PageError::new(400, "The key is revoked", text));
    }
    let (name, terms) = match form::check(wanted, key.terms.expires, request.now, &store.zone) {
        Ok(checked) => checked,
        Err(wrong) => return key_page(operator, &key, wanted, Some(&wrong)),
    };
    let edit = move |key: &mut Key| {
        key.name = name.as_str().to_owned();
        key.terms = terms.clone();
    };
    let changed = store.keys.change(id, edit, &request.actor())?;
    done(operator, changed, id, "changed")
}

/// Leads to the list, which says what was done.
fn done(operator: &Operator, changed: KeyChanged, id: &str, what: &'static str) -> PageResult {
    if !matches!(changed, KeyChanged::Done) {
        return Err(PageError::not_found());
    }
    log::info!("console: {id} was {what}");
    Ok(redirect(&query(operator)?.link("/keys", &[(what, id)])))
}

/// Everything about a key, and the form that changes it. A revoked key has no form.
fn key_page(
    operator: &Operator,
    key: &Key,
    wanted: &Form,
    wrong: Option<&WrongField>,
) -> PageResult {
    let (now, list) = (operator.request.now, query(operator)?);
    let (store, zone) = (&operator.console.store, &operator.console.store.zone);
    let mut sums = recent_sums(store, Filter::of_key(&key.id), now)?;
    let row = [(key.clone(), sums.remove(&key.id).unwrap_or_default())];
    let revoked = match key.revoked {
        Some(_) => "revoked,",
        None => "",
    };
    let facts = format!(
        "secret,id,permissions,limits,created,{revoked}expires,last used,requests,errors,tokens"
    );
    let below = |page: &str| list.link(&format!("/keys/{}{page}", key.id), &[]);
    let content = html! {
        main.narrow {
            p.crumbs { a href=(list.link("/keys", &[])) { "Back to API keys" } }
            h1.text { (key.name) }
            (rows::keys(&row, now, &list).facts_html(&facts))
            p {
                a href=(format!("/usage?range=30d&key={}", key.id)) { "Its usage in the last 30 days" } "."
                @if let Some(Budget { used, per, .. }) = key.terms.budget {
                    " " (count(used, "token")) " of the budget used, which is renewed at " (minute(per.containing(now, zone).until, zone)) " " (zone.name()) "."
                }
            }
            @if key.revoked.is_none() {
                form method="post" action=(below("")) {
                    (form::fields(wanted, key.terms.expires, wrong, zone))
                    div.buttons {
                        button.primary type="submit" { "Save changes" }
                        a.button href=(list.link("/keys", &[])) { "Cancel" }
                        a.button href=(below("/rotate")) { "Rotate key" }
                        a.button.danger href=(below("/revoke")) { "Revoke key" }
                    }
                }
            }
        }
    };
    Ok(checked(operator.page(&key.name, &content), wrong))
}

/// Asks before a change. A revoked key is not changed any more: its page says so.
fn confirm(
    operator: &Operator,
    id: &str,
    (verb, class): (&str, &str),
    question: impl Fn(&Key, &Zone) -> Markup,
) -> PageResult {
    let (key, zone) = (find(operator, id)?, &operator.console.store.zone);
    let back = query(operator)?.link(&format!("/keys/{id}"), &[]);
    if key.revoked.is_some() {
        return Ok(redirect(&back));
    }
    let content = html! {
        form method="post" {
            (question(&key, zone))
            div.buttons {
                button class=(class) type="submit" { (verb) " key" }
                a.button href=(back) { "Cancel" }
            }
        }
    };
    let title = format!("{verb} {}?", key.name);
    Ok(dialog(Some(operator), &title, &content))
}

/// The times after which the former secret of a rotated key ends, in hours.
const OVERLAPS: [(i64, &str); 5] = [
    (0, "now"),
    (1, "in an hour"),
    (24, "in 24 hours"),
    (7 * 24, "in 7 days"),
    (30 * 24, "in 30 days"),
];

pub fn confirm_rotation(operator: &Operator, id: &str) -> PageResult {
    confirm(operator, id, ("Rotate", "primary"), |key, zone| {
        html! {
            p { "It gets a new secret. Its name, limits, budget and usage stay." }
            @if let Some(old) = &key.overlap {
                p {
                    "It was rotated before, and " code { (old.hint) } " is accepted until " (minute(old.ends, zone)) " " (zone.name())
                    ". Another rotation ends that one and " code { (key.hint) } " at once."
                }
                input type="hidden" name="ends" value="0";
            } @else {
                label for="ends" { "The present key " code { (key.hint) } " ends" }
                select #ends name="ends" {
                    @for (hours, text) in OVERLAPS { option value=(hours) { (text) } }
                }
            }
        }
    })
}

pub fn rotate(operator: &Operator, id: &str) -> PageResult {
    let (request, store) = (operator.request, &operator.console.store);
    let ends = request.form.get("ends");
    let overlap = OVERLAPS.iter().find(|(hours, _)| hours.to_string() == ends);
    let (hours, ends) = overlap.ok_or_else(PageError::incomplete_form)?;
    let (secret, overlap) = (new_secret(), Some(hours * HOUR).filter(|time| *time > 0));
    let (former, by) = (find(operator, id)?, request.actor());
    let rotated = store.keys.rotate(id, &secret, overlap, request.now, &by)?;
    match rotated {
        KeyChanged::Done => {}
        KeyChanged::NoSuchKey => return Err(PageError::not_found()),
        // It was revoked or rotated since: the page says so.
        KeyChanged::Meanwhile(_) => {
            let page = format!("/keys/{id}/rotate");
            return Ok(redirect(&query(operator)?.link(&page, &[])));
        }
    }
    log::info!("console: {id} was rotated");
    let former_end = html! { p { "The former one, " code { (former.hint) } ", ends " (ends) "." } };
    new_secret_page(operator, (id, &former.name), &secret, &former_end)
}

pub fn confirm_revocation(operator: &Operator, id: &str) -> PageResult {
    confirm(operator, id, ("Revoke", "danger"), |key, zone| {
        html! {
            p { "Every request with the key " code { (key.hint) } " will be refused, from the \
                 next one on. " strong { "This can’t be undone." } }
            p {
                @match key.last_used {
                    Some(time) => { "It was last used at " (minute(time, zone)) " " (zone.name()) ". Its requests stay in the ledger." },
                    None => "It was never used.",
                }
            }
        }
    })
}

pub fn revoke(operator: &Operator, id: &str) -> PageResult {
    let (request, store) = (operator.request, &operator.console.store);
    let revoked = store.keys.revoke(id, request.now, &request.actor())?;
    done(operator, revoked, id, "revoked")
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
