//! `keys`: creates, lists, changes and revokes API keys.

use super::args::missing;
use super::audit::actor;
use super::console::read_secret;
use super::{Args, CliError, open_store, open_with, print, print_json, text_table};
use crate::secret::{contains_secret, new_secret};
use crate::store::{
    Access, Budget, CONCURRENT_TAKES, Key, KeyBudget, KeyChange, KeyChanged, KeyName, KeyState, NewKey,
    Permission, SecretUse, Store, parse_concurrent,
};
use crate::text::grouped;
use crate::when::{self, When};

pub(super) const HELP: &str = "\
Creates, lists, changes and revokes API keys. A change takes effect with the next request.

Usage: adriaticum keys create NAME [--permission P]... [--expires WHEN] [--concurrent N] [--budget TOKENS/PERIOD]
       adriaticum keys list [--state STATE] [--json]
       adriaticum keys rename KEY NAME
       adriaticum keys revoke [KEY|SECRET]
       adriaticum keys set KEY [--permission P]... [--expires WHEN|never] [--concurrent N|none]
                              [--budget TOKENS/PERIOD|none]

create prints only the secret on standard output. The secret is not stored and can't be printed again.
set changes only what its options name. The permissions given replace those that the key has.
KEY is a key's id or its name, if no other key has that name. revoke also accepts the secret, which it reads from
standard input if it is - or not given.

Options:
  --permission P   completions (the default) or metrics; repeat the option to give both
  --expires WHEN   When the key expires: 12h, 90d, a date (YYYY-MM-DD, UTC), or never
  --concurrent N   How many of the key's requests a gateway processes at once, 1 to 10000; the others wait.
                   Default: any number
  --budget TOKENS/PERIOD
                   How many tokens the key may use in a calendar day or month, UTC, over all gateways: 50000/day or
                   1000000/month. Then it gets 403 until the next one begins. Default: none
  --state STATE    List only keys that are active, expiring (within ten days), expired or revoked
  --json           Print JSON
";

/// The options that create and set share. `None` is an option that was not given, `Some(None)` the word `never` or `none`.
struct KeyOptions {
    permissions: Vec<Permission>,
    expires: Option<Option<i64>>,
    concurrent: Option<Option<u32>>,
    budget: Option<Option<Budget>>,
}

impl KeyOptions {
    fn read(args: &Args, now: i64) -> Result<Self, CliError> {
        let mut permissions = Vec::new();
        for permission in args.values("permission", "completions or metrics", Permission::parse)? {
            if !permissions.contains(&permission) {
                permissions.push(permission);
            }
        }
        let expires =
            or_none(args, "expires", "never", When::TAKES, |text| Some(When::parse(text)?.ahead(now)))?;
        if expires.flatten().is_some_and(|expires| expires <= now) {
            return Err(CliError::Usage("--expires is in the past.".into()));
        }
        Ok(Self {
            permissions,
            expires,
            concurrent: or_none(args, "concurrent", "none", CONCURRENT_TAKES, parse_concurrent)?,
            budget: or_none(args, "budget", "none", Budget::TAKES, Budget::parse)?,
        })
    }
}

/// Returns `Some(None)` if the value of an option is the word `none`.
fn or_none<T>(
    args: &Args,
    option: &str,
    none: &str,
    takes: &str,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<Option<Option<T>>, CliError> {
    args.value(option, &format!("{takes}, or {none}"), |text| {
        if text == none { Some(None) } else { parse(text).map(Some) }
    })
}

pub(super) fn create(mut args: Args) -> Result<(), CliError> {
    let now = when::now();
    let [name] = args.words(["the new key's NAME"])?;
    let mut terms = KeyOptions::read(&args, now)?;
    let name = key_name(&name)?;
    if terms.permissions.is_empty() {
        terms.permissions.push(Permission::Completions);
    }
    let config = args.config()?;
    let store = open_with(&config, Access::Create)?;
    let secret = new_secret();
    let key = NewKey {
        name: &name,
        permissions: &terms.permissions,
        created: now,
        expires: terms.expires.flatten(),
        concurrent: terms.concurrent.flatten(),
        budget: terms.budget.flatten(),
    };
    let id = store.add_key(&secret, &key, &actor())?;
    print(&(secret + "\n"))?;
    eprintln!("Created {id} in {}. The secret above is not stored: save it now.", config.database_name());
    print_terms(&store, &id);
    warn_of_namesakes(&store, &id);
    Ok(())
}

pub(super) fn list(mut args: Args) -> Result<(), CliError> {
    let [] = args.words([])?;
    let state = args.value("state", "active, expiring, expired or revoked", KeyState::parse)?;
    let mut keys = open_store(&args.config()?)?.list_keys()?;
    let (is_empty, now) = (keys.is_empty(), when::now());
    keys.retain(|key| state.is_none_or(|state| key.state(now) == state));
    if args.flag("json") {
        return print_json(&keys);
    }
    match state {
        _ if is_empty => eprintln!("There are no keys yet. Create one: adriaticum keys create NAME"),
        Some(state) if keys.is_empty() => eprintln!("No key is {}.", state.as_str()),
        _ => {
            let heading = "id,name,secret,state,permissions,created,expires,last used,concurrent,budget";
            print(&text_table::with_heading(heading, keys.iter().map(|key| row(key, now))))?;
        }
    }
    Ok(())
}

fn row(key: &Key, now: i64) -> Vec<String> {
    let state = key.state(now).as_str();
    let used = |KeyBudget { budget, used }| {
        format!("{} of {}/{}", grouped(used), grouped(budget.tokens), budget.per.as_str())
    };
    vec![
        key.id.clone(),
        key.name.clone(),
        key.hint.clone().unwrap_or_else(|| "-".into()),
        key.revoked.map_or(state.into(), |time| format!("{state} {}", when::format_minute(Some(time)))),
        Permission::join(&key.permissions),
        when::format_minute(Some(key.created)),
        when::format_minute(key.expires),
        when::format_minute(key.last_used),
        key.concurrent.map_or_else(|| "-".into(), |number| number.to_string()),
        key.budget.map_or_else(|| "-".into(), used),
    ]
}

pub(super) fn rename(mut args: Args) -> Result<(), CliError> {
    let [text, name] = args.words(["KEY", "the new NAME"])?;
    let name = key_name(&name)?;
    let config = args.config()?;
    let store = open_with(&config, Access::Existing)?;
    let id = find(&store, &text, SecretUse::Refused)?.id;
    change(&store, &id, &[KeyChange::Name(name)])?;
    eprintln!("Renamed {id} in {}.", config.database_name());
    warn_of_namesakes(&store, &id);
    Ok(())
}

pub(super) fn revoke(mut args: Args) -> Result<(), CliError> {
    let text = match args.all_words()?.as_slice() {
        [] => None,
        [text] => Some(text.clone()),
        _ => return Err(CliError::Usage("one argument is too many.".into())),
    };
    // Standard input keeps a secret out of the list of processes and the history of the shell.
    let text = match text.filter(|text| text != "-") {
        Some(text) => text,
        None => read_secret("The key's secret, id or name: ")?.trim().to_owned(),
    };
    if text.is_empty() {
        return Err(missing("KEY or SECRET"));
    }
    let config = args.config()?;
    let (store, database) = (open_with(&config, Access::Existing)?, config.database_name());
    let Key { id, name, revoked, .. } = find(&store, &text, SecretUse::Accepted)?;
    if let Some(since) = revoked {
        eprintln!(
            "{id} ({name}) in {database} is revoked already, since {}.",
            when::format_minute(Some(since))
        );
        return Ok(());
    }
    store.revoke_key(&id, when::now(), &actor())?;
    eprintln!("Revoked {id} ({name}) in {database}.");
    Ok(())
}

pub(super) fn set(mut args: Args) -> Result<(), CliError> {
    let [text] = args.words(["KEY"])?;
    let terms = KeyOptions::read(&args, when::now())?;
    let permissions = Some(terms.permissions).filter(|permissions| !permissions.is_empty());
    let changes: Vec<KeyChange> = [
        permissions.map(KeyChange::Permissions),
        terms.expires.map(KeyChange::Expires),
        terms.concurrent.map(KeyChange::Concurrent),
        terms.budget.map(KeyChange::Budget),
    ]
    .into_iter()
    .flatten()
    .collect();
    if changes.is_empty() {
        let options = "--permission, --expires, --concurrent or --budget is missing.";
        return Err(CliError::Usage(options.into()));
    }
    let config = args.config()?;
    let store = open_with(&config, Access::Existing)?;
    let Key { id, revoked, .. } = find(&store, &text, SecretUse::Refused)?;
    if let Some(since) = revoked {
        let since = when::format_minute(Some(since));
        return Err(CliError::Failed(format!(
            "{id} is revoked since {since}, for good. Create another key: adriaticum keys create NAME"
        )));
    }
    change(&store, &id, &changes)?;
    eprintln!("Changed {id} in {}.", config.database_name());
    print_terms(&store, &id);
    Ok(())
}

/// Finds the one key that a text means.
pub(super) fn find(store: &Store, text: &str, secret: SecretUse) -> Result<Key, CliError> {
    let mut keys = store.resolve_key(text, secret)?;
    if keys.len() > 1 {
        let hint = |key: &Key| format!("{} ({})", key.id, key.hint.as_deref().unwrap_or("secret unknown"));
        let ids: Vec<String> = keys.iter().map(hint).collect();
        let count = ids.len();
        return Err(CliError::Failed(format!(
            "{count} keys have that name. Use the id: {}.",
            ids.join(", ")
        )));
    }
    keys.pop().ok_or_else(|| no_such_key(text, secret))
}

fn change(store: &Store, id: &str, changes: &[KeyChange]) -> Result<(), CliError> {
    match store.change_key(id, None, changes, &actor())? {
        KeyChanged::Done => Ok(()),
        KeyChanged::NoSuchKey | KeyChanged::Meanwhile(_) => Err(no_such_key(id, SecretUse::Refused)),
    }
}

/// Prints what a key may do. The command has done its work, so it does not fail if the key can't be read again.
fn print_terms(store: &Store, id: &str) {
    if let Ok(Some(key)) = store.key(id) {
        eprintln!("{}", key.in_words(when::now()));
    }
}

/// Warns if the name of a new or renamed key means other keys too.
fn warn_of_namesakes(store: &Store, id: &str) {
    let Ok(Some(key)) = store.key(id) else {
        return;
    };
    let mut others = store.resolve_key(&key.name, SecretUse::Refused).unwrap_or_default();
    others.retain(|other| other.id != id && other.revoked.is_none());
    if !others.is_empty() {
        let ids: Vec<String> = others.into_iter().map(|other| other.id).collect();
        eprintln!("Warning: this is also the name of {}. Commands need the id then.", ids.join(", "));
    }
}

fn key_name(text: &str) -> Result<KeyName, CliError> {
    KeyName::parse(text).ok_or_else(|| CliError::Usage(format!("a key's name has {}.", KeyName::TAKES)))
}

/// A text that may be a secret, whole or in part, is not repeated.
pub(super) fn no_such_key(text: &str, secret: SecretUse) -> CliError {
    let message = match secret {
        SecretUse::Accepted => "there is no key with that id, secret or name.".into(),
        SecretUse::Refused if contains_secret(text) => {
            "there is no key with that id or name; only keys revoke takes a secret.".into()
        }
        SecretUse::Refused => format!("there is no key {text:?}."),
    };
    CliError::Failed(format!("{message} List the keys: adriaticum keys list"))
}
