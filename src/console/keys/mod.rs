//! A key's pages: creating, changing, rotating and revoking it.

mod form;
pub mod list;

use maud::{Markup, html};

use self::form::{KeyForm, WrongField};
use self::list::{query, recent_sums};
use super::layout::{self, copy_box};
use super::page::{Operator, PageError, PageResult};
use crate::checks::is_local;
use crate::http::Request;
use crate::keys::{Key, KeyChanged, KeyState, Permission};
use crate::ledger::{Filter, Sums};
use crate::report::format::{self, or_never};
use crate::report::rows::{budget_bar, expiry_badge};
use crate::secret::{SecretDigest, new_secret, secret_hex};
use crate::text::{count, grouped};
use crate::when::{HOUR, Zone};

/// The number of random bytes that identify a form for a new key.
const ONCE_BYTES: usize = 16;

pub fn new(operator: &Operator) -> PageResult {
    let wanted = KeyForm::new(operator.request.now);
    form(operator, &wanted, None)
}

fn form(operator: &Operator, wanted: &KeyForm, wrong: Option<&WrongField>) -> PageResult {
    let content = html! {
        main.narrow {
            h1 { "Create an API key" }
            @if let Some((_, message)) = wrong { p.alert role="alert" { (message) } }
            form method="post" action="/keys" {
                input type="hidden" name="once" value=(secret_hex::<ONCE_BYTES>());
                (wanted.fields(None, wrong, &operator.console.store.zone))
                div.buttons {
                    button.primary type="submit" { "Create key" }
                    a.button href=(query(operator)?.link("/keys", &[])) { "Cancel" }
                }
            }
        }
    };
    let status = if wrong.is_some() { 400 } else { 200 };
    Ok(layout::operator_page(
        operator,
        status,
        "/keys",
        "Create an API key",
        &content,
    ))
}

pub fn create(operator: &Operator) -> PageResult {
    let request = operator.request;
    let wanted = KeyForm::read(&request.form, request.now);
    let store = &operator.console.store;
    let (name, terms) = match wanted.check(None, request.now, &store.zone) {
        Ok(checked) => checked,
        Err(wrong) => return form(operator, &wanted, Some(&wrong)),
    };
    let secret = new_secret();
    let id = id_for(request.form.get("once")).ok_or(PageError::IncompleteForm)?;
    if !store
        .keys
        .add(&id, &secret, &name, &terms, &request.actor())?
    {
        return Ok(layout::redirect(&format!("/keys?made={id}")));
    }
    log::info!("console: {id} was created");
    let content = html! {
        main.narrow {
            h1 { "Your new key" }
            p { strong.text { (wanted.name) } " · " code { (id) } }
            (only_time(&secret))
            (example(operator, &wanted.permissions, &secret))
            p { a.button.primary href="/keys" { "Done" } }
        }
    };
    Ok(layout::operator_page(
        operator,
        200,
        "/keys",
        "Your new key",
        &content,
    ))
}

/// The secret of a key, on the only page that ever has it.
fn only_time(secret: &str) -> Markup {
    html! {
        p.notice role="status" { strong { "Copy it now." } " Not stored, so it can’t be displayed again." }
        (copy_box("The key", "secret", secret))
    }
}

/// The id of the key that a form creates. It is derived from the form's random number, so the
/// database refuses a second key from the same form, sent at the same time or after a restart.
fn id_for(once: &str) -> Option<String> {
    let is_ours = once.len() == 2 * ONCE_BYTES && once.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_ours.then(|| format!("key_{}", hex::encode(&SecretDigest::of(once).0[..8])))
}

/// The address, the model and a first request for a new key.
fn example(operator: &Operator, permissions: &[Permission], secret: &str) -> Markup {
    let Request { head, client, .. } = operator.request.http;
    let authority = head.authority();
    let port = authority
        .rfind(':')
        .filter(|at| !authority[*at..].contains(']'))
        .map_or("", |at| &authority[at..]);
    let (scheme, https_port) = if client.secure {
        ("https", port)
    } else {
        ("http", "")
    };
    if permissions.contains(&Permission::Completions) {
        let hosts = &operator.console.config.api_hosts;
        let host = hosts.first().map_or("localhost", String::as_str);
        // Over a network a key is sent by HTTPS only, also if the operator uses HTTP here.
        let (scheme, port) = if is_local(host) {
            (scheme, port)
        } else {
            ("https", https_port)
        };
        let host = if host.contains(':') {
            format!("[{host}]")
        } else {
            host.to_owned()
        };
        let command = format!(
            "curl {scheme}://{host}{port}/v1/chat/completions \\\n  -H 'Authorization: Bearer {secret}' \\\n  \
             -H 'Content-Type: application/json' \\\n  -d '{{\"model\": \"adriaticum\", \"messages\": [{{\"role\": \
             \"user\", \"content\": \"Say hello.\"}}]}}'"
        );
        return html! {
            (copy_box("Base URL", "base", &format!("{scheme}://{host}{port}/v1")))
            (copy_box("Model", "model", "adriaticum"))
            (copy_box("A first request", "curl", &command))
        };
    }
    let command =
        format!("curl {scheme}://{authority}/metrics -H 'Authorization: Bearer {secret}'");
    copy_box("The metrics", "curl", &command)
}

fn find(operator: &Operator, id: &str) -> Result<Key, PageError> {
    let key = operator.console.store.keys.get(id)?;
    key.ok_or(PageError::NotFound)
}

pub fn page(operator: &Operator, id: &str) -> PageResult {
    let key = find(operator, id)?;
    let present = KeyForm::from_key(&key, operator.request.now);
    key_page(operator, &key, &present, None)
}

/// Changes a key as the form says: the last change wins, and the audit has all of them.
pub fn change(operator: &Operator, id: &str) -> PageResult {
    let request = operator.request;
    let key = find(operator, id)?;
    let wanted = KeyForm::read(&request.form, request.now);
    let not_saved = |wrong| key_page(operator, &key, &wanted, Some(&wrong));
    if key.revoked.is_some() {
        return not_saved(("", "The key is revoked.".into()));
    }
    let store = &operator.console.store;
    let (name, terms) = match wanted.check(key.terms.expires, request.now, &store.zone) {
        Ok(checked) => checked,
        Err(wrong) => return not_saved(wrong),
    };
    let edit = move |key: &mut Key| {
        key.name = name.as_str().to_owned();
        key.terms = terms.clone();
    };
    match store.keys.change(id, edit, &request.actor())? {
        KeyChanged::Done => {
            log::info!("console: {id} was changed");
            Ok(layout::redirect(
                &query(operator)?.link("/keys", &[("changed", id)]),
            ))
        }
        KeyChanged::NoSuchKey | KeyChanged::Meanwhile(_) => Err(PageError::NotFound),
    }
}

/// Everything about a key, and the form that changes it. A revoked key has no form.
fn key_page(
    operator: &Operator,
    key: &Key,
    wanted: &KeyForm,
    wrong: Option<&WrongField>,
) -> PageResult {
    let Operator {
        console, request, ..
    } = *operator;
    let filter = Filter::of_key(&key.id);
    let sums = recent_sums(&console.store, filter, request.now)?
        .remove(&key.id)
        .unwrap_or_default();
    let list = query(operator)?;
    let below = |page: &str| list.link(&format!("/keys/{}{page}", key.id), &[]);
    let status = if wrong.is_some() { 400 } else { 200 };
    let content = html! {
        main.narrow {
            p.crumbs { a href=(list.link("/keys", &[])) { "Back to API keys" } }
            h1.text { (key.name) }
            @if let Some((_, message)) = wrong { p.alert role="alert" { (message) " Nothing was changed." } }
            (facts(key, &sums, wrong.is_some() || key.revoked.is_some(), request.now, &console.store.zone))
            @if key.revoked.is_none() {
                form method="post" action=(below("")) {
                    (wanted.fields(key.terms.expires, wrong, &console.store.zone))
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
    Ok(layout::operator_page(
        operator, status, "/keys", &key.name, &content,
    ))
}

/// The facts about a key; with its terms, if the form has others or there is none.
fn facts(key: &Key, sums: &Sums, with_terms: bool, now: i64, zone: &Zone) -> Markup {
    let terms = &key.terms;
    let time = |time| or_never(time, |time| format::minute(time, zone));
    html! {
        dl.facts {
            dt { "Key" } dd { code { (key.hint) } }
            @if let Some(old) = &key.overlap {
                dt { "Replaced key" } dd { code { (old.hint) } ", accepted until " (format::minute(old.ends, zone)) }
            }
            dt { "Id" } dd { code { (key.id) } }
            dt { "Created" } dd { (format::minute(key.created, zone)) }
            @if key.revoked.is_some() { dt { "Revoked" } dd { (time(key.revoked)) } }
            @if with_terms { dt { "Permissions" } dd { (Permission::join(&terms.permissions).replace(',', ", ")) } }
            @if with_terms || key.state(now) != KeyState::Active { dt { "Expires" } dd { (time(terms.expires)) (expiry_badge(key, now)) } }
            @if with_terms {
                dt { "Concurrent requests" } dd { @match terms.concurrent { Some(number) => (number), None => "any number" } }
            }
            @if let Some(budget) = &terms.budget {
                dt { "Budget" }
                dd {
                    (budget_bar(budget)) br;
                    span.muted { (grouped(budget.used)) " used, renewed at " (format::minute(budget.per.containing(now, zone).until, zone)) " " (zone.name()) }
                }
            }
            dt { "Last used" } dd { (time(key.last_used)) }
            dt { "Last 30 days" }
            dd {
                @let filter = format!("range=30d&key={}", key.id);
                a href=(format!("/requests?{filter}")) { (count(sums.requests, "request")) } ", "
                a href=(format!("/requests?{filter}&outcome=failed")) { (count(sums.errors, "error")) } ", "
                a href=(format!("/usage?{filter}")) { (count(sums.total_tokens, "token")) }
            }
        }
    }
}

/// The times after which the former secret of a rotated key ends, in hours.
const OVERLAPS: [(i64, &str); 5] = [
    (0, "now"),
    (1, "in an hour"),
    (24, "in 24 hours"),
    (7 * 24, "in 7 days"),
    (30 * 24, "in 30 days"),
];

pub fn confirm_rotate(operator: &Operator, id: &str) -> PageResult {
    let back = query(operator)?.link(&format!("/keys/{id}"), &[]);
    let (key, zone) = (find(operator, id)?, &operator.console.store.zone);
    if key.revoked.is_some() {
        return Ok(layout::redirect(&back));
    }
    let content = html! {
        main.narrow {
            h1 { "Rotate " span.text { (key.name) } "?" }
            p { "It gets a new secret. Its name, limits, budget and usage stay." }
            form method="post" {
                @if let Some(old) = &key.overlap {
                    p {
                        "It was rotated before, and " code { (old.hint) } " is accepted until " (format::minute(old.ends, zone)) " " (zone.name())
                        ". Another rotation ends that one and " code { (key.hint) } " at once."
                    }
                    input type="hidden" name="ends" value="0";
                } @else {
                    label for="ends" { "The present key " code { (key.hint) } " ends" }
                    select #ends name="ends" {
                        @for (hours, text) in OVERLAPS { option value=(hours) { (text) } }
                    }
                }
                div.buttons {
                    button.primary type="submit" { "Rotate key" }
                    a.button href=(back) { "Cancel" }
                }
            }
        }
    };
    Ok(layout::operator_page(
        operator,
        200,
        "/keys",
        "Rotate a key",
        &content,
    ))
}

pub fn rotate(operator: &Operator, id: &str) -> PageResult {
    let (request, store) = (operator.request, &operator.console.store);
    let ends = request.form.get("ends");
    let overlap = OVERLAPS.iter().find(|(hours, _)| hours.to_string() == ends);
    let (hours, ends) = overlap.ok_or(PageError::IncompleteForm)?;
    let (secret, overlap) = (new_secret(), Some(hours * HOUR).filter(|time| *time > 0));
    let former = find(operator, id)?;
    match store
        .keys
        .rotate(id, &secret, overlap, request.now, &request.actor())?
    {
        KeyChanged::Done => {}
        KeyChanged::NoSuchKey => return Err(PageError::NotFound),
        // It was revoked or rotated since: the page says so.
        KeyChanged::Meanwhile(_) => {
            return Ok(layout::redirect(
                &query(operator)?.link(&format!("/keys/{id}/rotate"), &[]),
            ));
        }
    }
    log::info!("console: {id} was rotated");
    let content = html! {
        main.narrow {
            h1 { "The new secret" }
            p { strong.text { (former.name) } " · " code { (id) } }
            (only_time(&secret))
            p { "The former one, " code { (former.hint) } ", ends " (ends) "." }
            p { a.button.primary href=(query(operator)?.link(&format!("/keys/{id}"), &[])) { "Done" } }
        }
    };
    Ok(layout::operator_page(
        operator,
        200,
        "/keys",
        "The new secret",
        &content,
    ))
}

pub fn confirm_revoke(operator: &Operator, id: &str) -> PageResult {
    let back = query(operator)?.link(&format!("/keys/{id}"), &[]);
    let (key, zone) = (find(operator, id)?, &operator.console.store.zone);
    if key.revoked.is_some() {
        // The browser went back after the revocation: the key's page has its time.
        return Ok(layout::redirect(&back));
    }
    let content = html! {
        main.narrow {
            h1 { "Revoke " span.text { (key.name) } "?" }
            p { "Every request with the key " code { (key.hint) } " will be refused, from the \
                 next one on. " strong { "This can’t be undone." } }
            p {
                @match key.last_used {
                    Some(time) => { "It was last used at " (format::minute(time, zone)) " " (zone.name()) ". Its requests stay in the ledger." },
                    None => "It was never used.",
                }
            }
            form.buttons method="post" {
                button.danger type="submit" { "Revoke key" }
                a.button href=(back) { "Keep it" }
            }
        }
    };
    Ok(layout::operator_page(
        operator,
        200,
        "/keys",
        "Revoke a key",
        &content,
    ))
}

pub fn revoke(operator: &Operator, id: &str) -> PageResult {
    let request = operator.request;
    let keys = &operator.console.store.keys;
    let revoked = keys.revoke(id, request.now, &request.actor())?;
    if matches!(revoked, KeyChanged::NoSuchKey) {
        return Err(PageError::NotFound);
    }
    log::info!("console: {id} was revoked");
    Ok(layout::redirect(
        &query(operator)?.link("/keys", &[("revoked", id)]),
    ))
}
