//! API Keys: who may ask.

use std::collections::HashMap;
use std::net::IpAddr;

use maud::{Markup, html};

use super::key_table::{counts, table};
use super::page::{self, Part, form_token};
use super::visit::{Session, Visit};
use super::{Console, Stop};
use crate::api::key::{SECRET_DIGITS, SECRET_PREFIX};
use crate::http::Response;
use crate::id::secret_hex;
use crate::store::{CONCURRENT_TAKES, Digest, Key, KeyName, NewKey, Permission, parse_concurrent};
use crate::when::{self, When};

/// The terms that are offered for a new key.
const TERMS: [(&str, &str); 6] = [
    ("", "Never"),
    ("7d", "In 7 days"),
    ("30d", "In 30 days"),
    ("90d", "In 90 days"),
    ("365d", "In a year"),
    ("date", "On a date"),
];

/// The random bytes that tell one form for a new key from another.
const ONCE_BYTES: usize = 16;

pub fn list(console: &Console, visit: &Visit, session: &Session) -> Result<Response, Stop> {
    let keys = console.store.list_keys()?;
    let counts = if keys.is_empty() { HashMap::new() } else { counts(console, visit.now)? };
    let (active, revoked): (Vec<&Key>, Vec<&Key>) = keys.iter().partition(|key| key.revoked.is_none());
    let named =
        |what: &str| keys.iter().find(|key| key.id == visit.query.get(what)).map(|key| key.name.as_str());
    let content = html! {
        main {
            div.head {
                h1 { "API Keys" }
                @if !active.is_empty() { a.button.primary href="/keys/new" { "Create key" } }
            }
            @if let Some(name) = named("renamed") {
                p.notice role="status" { "Renamed to " strong.text { (name) } "." }
            } @else if let Some(name) = named("revoked") {
                p.notice role="status" { strong.text { (name) } " is revoked and refused from now on." }
            } @else if let Some(name) = named("made") {
                p.notice role="status" { "This form has already created " strong.text { (name) } ". Its secret can’t be \
                    shown again. If you did not copy it, revoke the key and create another." }
            } @else if visit.query.has("bad") {
                p.alert role="alert" { "A key’s name has " (KeyName::TAKES) ". Nothing was changed." }
            }
            @if active.is_empty() {
                section.empty {
                    h2 { @if revoked.is_empty() { "No keys yet" } @else { "No active keys" } }
                    p { "Every request to the API carries a key. Create one for each application or person, so \
                         that you can see what each uses, and revoke one without the others." }
                    a.button.primary href="/keys/new" { @if revoked.is_empty() { "Create the first key" } @else { "Create key" } }
                }
            } @else {
                (table(&active, &counts, session, visit.now))
            }
            @if !revoked.is_empty() {
                details.fold {
                    summary { (page::count(revoked.len() as i64, "revoked key")) }
                    (table(&revoked, &counts, session, visit.now))
                }
            }
        }
    };
    Ok(page::inside(&console.assets, session, Part::Keys, "API Keys", &content))
}

pub fn new(console: &Console, session: &Session) -> Result<Response, Stop> {
    Ok(form(console, session, &Wanted::default(), None))
}

/// The name of a field, and what is wrong with its value.
type WrongField = (&'static str, String);

/// What was filled in.
struct Wanted {
    name: String,
    permissions: Vec<Permission>,
    expires: String,
    date: String,
    concurrent: String,
}

impl Default for Wanted {
    fn default() -> Self {
        Self {
            name: String::new(),
            permissions: vec![Permission::Completions],
            expires: String::new(),
            date: String::new(),
            concurrent: String::new(),
        }
    }
}

impl Wanted {
    fn read(visit: &Visit) -> Self {
        Self {
            name: visit.form.get("name").trim().to_owned(),
            permissions: Permission::ALL
                .into_iter()
                .filter(|known| visit.form.all("permission").any(|word| word == known.as_str()))
                .collect(),
            expires: visit.form.get("expires").to_owned(),
            date: visit.form.get("date").to_owned(),
            concurrent: visit.form.get("concurrent").trim().to_owned(),
        }
    }

    /// The name, the end and the limit of the new key.
    fn check(&self, now: i64) -> Result<(KeyName, Option<i64>, Option<u32>), WrongField> {
        let name = KeyName::parse(&self.name)
            .ok_or_else(|| ("name", format!("The name has {}.", KeyName::TAKES)))?;
        if self.permissions.is_empty() {
            return Err(("permission", "Choose at least one permission.".into()));
        }
        let expires = match self.expires.as_str() {
            "" => None,
            "date" => Some(
                When::parse(&self.date)
                    .filter(|when| matches!(when, When::Date(_)))
                    .ok_or_else(|| ("date", "Give the date as YYYY-MM-DD.".to_owned()))?,
            ),
            term => Some(When::parse(term).ok_or_else(|| ("expires", "Choose when it expires.".to_owned()))?),
        };
        let expires = expires.map(|when| when.ahead(now));
        if expires.is_some_and(|expires| expires <= now) {
            return Err(("date", "The date lies in the past.".into()));
        }
        let concurrent = match self.concurrent.as_str() {
            "" => None,
            text => Some(parse_concurrent(text).ok_or_else(|| {
                ("concurrent", format!("Requests at once: {CONCURRENT_TAKES}, or leave it empty."))
            })?),
        };
        Ok((name, expires, concurrent))
    }
}

fn form(console: &Console, session: &Session, wanted: &Wanted, wrong: Option<(&str, &str)>) -> Response {
    let invalid = |field: &str| wrong.filter(|(name, _)| *name == field).map(|_| "true");
    let content = html! {
        main.narrow {
            h1 { "Create an API key" }
            @if let Some((_, told)) = wrong { p.alert #wrong role="alert" { (told) } }
            form method="post" action="/keys" {
                (form_token(session))
                input type="hidden" name="once" value=(secret_hex::<ONCE_BYTES>());
                label for="name" { "Name" }
                input #name name="name" value=(wanted.name) required maxlength="64" autocomplete="off" autofocus
                    aria-describedby="name-help" aria-invalid=[invalid("name")];
                p.help #name-help { "What will use it, so that you know it again: “billing service”, “Ana’s laptop”." }
                fieldset aria-invalid=[invalid("permission")] {
                    legend { "Permissions" }
                    @for (permission, told) in [(Permission::Completions, "run completions"), (Permission::Metrics, "read the metrics of this host, for monitoring")] {
                        label.choice {
                            input type="checkbox" name="permission" value=(permission.as_str()) checked[wanted.permissions.contains(&permission)];
                            span { strong { (permission.as_str()) } " – " (told) }
                        }
                    }
                }
                label for="expires" { "Expires" }
                select #expires name="expires" {
                    @for (value, told) in TERMS { option value=(value) selected[wanted.expires == value] { (told) } }
                }
                div.date {
                    label for="date" { "Date, if it expires on one (UTC)" }
                    input #date type="date" name="date" value=(wanted.date) min=(&when::shown(Some(when::now()))[..10]) aria-invalid=[invalid("date")];
                }
                label for="concurrent" { "Requests at once" }
                input #concurrent name="concurrent" value=(wanted.concurrent) inputmode="numeric" autocomplete="off"
                    aria-describedby="concurrent-help" aria-invalid=[invalid("concurrent")];
                p.help #concurrent-help { "More than these wait for their turn. Empty: any number." }
                div.buttons {
                    button.primary type="submit" { "Create key" }
                    a.button href="/keys" { "Cancel" }
                }
            }
        }
    };
    let mut response = page::inside(&console.assets, session, Part::Keys, "Create an API key", &content);
    if wrong.is_some() {
        response.status = 400;
    }
    response
}

pub fn create(console: &Console, visit: &Visit, session: &Session) -> Result<Response, Stop> {
    let wanted = Wanted::read(visit);
    let (name, expires, concurrent) = match wanted.check(visit.now) {
        Ok(good) => good,
        Err((field, told)) => return Ok(form(console, session, &wanted, Some((field, &told)))),
    };
    let secret = SECRET_PREFIX.to_owned() + &secret_hex::<{ SECRET_DIGITS / 2 }>();
    let id = id_for(visit.form.get("once")).ok_or(Stop::Stale)?;
    let permissions = &wanted.permissions;
    let key = NewKey { name: &name, permissions, created: visit.now, expires, concurrent };
    if !console.store.add_key_as(&id, &secret, &key)? {
        return Ok(page::redirect(&format!("/keys?made={id}")));
    }
    log::info!("console: {id} was created");
    let content = html! {
        main.narrow {
            h1 { "Your new key" }
            p { strong.text { (wanted.name) } " · " code { (id) } }
            p.notice role="status" { strong { "Copy it now." } " It is not kept, so it can’t be shown again." }
            (copied("The key", "secret", &secret))
            (example(console, visit, &wanted.permissions, &secret))
            p { a.button.primary href="/keys" { "Done" } }
        }
    };
    Ok(page::inside(&console.assets, session, Part::Keys, "Your new key", &content))
}

/// The id of the key that a form creates. It follows from the number that the form was shown with, so the database
/// refuses a second key from the same form, sent at the same time or after a restart.
fn id_for(once: &str) -> Option<String> {
    let is_ours = once.len() == 2 * ONCE_BYTES && once.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_ours.then(|| format!("key_{}", hex::encode(&Digest::of(once).bytes()[..8])))
}

/// What to do with a new key.
fn example(console: &Console, visit: &Visit, permissions: &[Permission], secret: &str) -> Markup {
    let authority = visit.request.head.authority();
    let port =
        authority.rfind(':').filter(|at| !authority[*at..].contains(']')).map_or("", |at| &authority[at..]);
    let scheme = visit.scheme();
    let https_port = if visit.request.client.secure { port } else { "" };
    if permissions.contains(&Permission::Completions) {
        let host = console.config.api_hosts.first().map_or("localhost", String::as_str);
        // Over a network a key is sent by HTTPS only, however the operator came here.
        let (scheme, port) = if is_local(host) { (scheme, port) } else { ("https", https_port) };
        let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        let command = format!(
            "curl {scheme}://{host}{port}/v1/chat/completions \\\n  -H 'Authorization: Bearer {secret}' \\\n  \
             -H 'Content-Type: application/json' \\\n  -d '{{\"model\": \"adriaticum\", \"messages\": [{{\"role\": \
             \"user\", \"content\": \"Say hello.\"}}]}}'"
        );
        return copied("A first request", "curl", &command);
    }
    copied(
        "The metrics",
        "curl",
        &format!("curl {scheme}://{authority}/metrics -H 'Authorization: Bearer {secret}'"),
    )
}

/// Whether a name or an address leads to this host and nowhere else.
fn is_local(host: &str) -> bool {
    let is_loopback = |address: IpAddr| address.is_loopback();
    host == "localhost" || host.ends_with(".localhost") || host.parse().is_ok_and(is_loopback)
}

/// A text to be copied; the button is there where a script is.
fn copied(title: &str, id: &str, text: &str) -> Markup {
    html! {
        div.copy {
            h2 { (title) }
            pre tabindex="0" aria-label=(title) { code #(id) { (text) } }
            button type="button" data-copy=(id) hidden { "Copy" }
        }
    }
}

pub fn rename(console: &Console, visit: &Visit, _: &Session, id: &str) -> Result<Response, Stop> {
    let Some(name) = KeyName::parse(visit.form.get("name").trim()) else {
        return Ok(page::redirect("/keys?bad=name"));
    };
    match console.store.rename_key(id, &name)? {
        true => {
            log::info!("console: a key was renamed");
            Ok(page::redirect(&format!("/keys?renamed={id}")))
        }
        false => Err(Stop::NotFound),
    }
}

pub fn confirm_revoke(console: &Console, session: &Session, id: &str) -> Result<Response, Stop> {
    let keys = console.store.list_keys()?;
    let key = keys.iter().find(|key| key.id == id && key.revoked.is_none()).ok_or(Stop::NotFound)?;
    let content = html! {
        main.narrow {
            h1 { "Revoke " span.text { (key.name) } "?" }
            p { "Every request with the key " code { (key.hint.as_deref().unwrap_or(&key.id)) } " will be refused, from the \
                 next one on. " strong { "This can’t be undone." } }
            p {
                @match key.last_used {
                    Some(time) => { "It was last used at " (page::time(time, false)) " UTC." },
                    None => "It was never used.",
                }
                " What it has used stays in the ledger."
            }
            form.buttons method="post" {
                (form_token(session))
                button.danger type="submit" { "Revoke " (key.name) }
                a.button href="/keys" { "Keep it" }
            }
        }
    };
    Ok(page::inside(&console.assets, session, Part::Keys, "Revoke a key", &content))
}

pub fn revoke(console: &Console, visit: &Visit, id: &str) -> Result<Response, Stop> {
    match console.store.revoke_key(id, visit.now)? {
        true => {
            log::info!("console: {id} was revoked");
            Ok(page::redirect(&format!("/keys?revoked={id}")))
        }
        false => Err(Stop::NotFound),
    }
}
