//! `keys`: creates, lists, changes and revokes API keys.

use super::audit::actor;
use super::{Args, CliError, open_store, open_to_read, open_with, print, print_json, text_table};
use crate::api::key::{SECRET_DIGITS, SECRET_PREFIX};
use crate::secret::secret_hex;
use crate::store::{
    Access, Budget, CONCURRENT_TAKES, Key, KeyBudget, KeyChange, KeyChanged, KeyName, KeyState, NewKey,
    Permission, Store, parse_concurrent,
};
use crate::text::grouped;
use crate::when::{self, When};

pub(super) const HELP: &str = "\
Creates, lists, changes and revokes API keys. A change takes effect with the next request.

Usage: adriaticum keys create NAME [--permission P]... [--expires WHEN] [--concurrent N] [--budget TOKENS/PERIOD]
       adriaticum keys list [--state STATE] [--json]
       adriaticum keys rename ID NAME
       adriaticum keys revoke ID
       adriaticum keys set ID [--permission P]... [--expires WHEN|never] [--concurrent N|none]
                              [--budget TOKENS/PERIOD|none]

create prints only the secret on standard output. The secret is not stored and can't be printed again.
set changes only what its options name. The permissions given replace those that the key has.

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
    let secret = SECRET_PREFIX.to_owned() + &secret_hex::<{ SECRET_DIGITS / 2 }>();
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
    Ok(())
}

pub(super) fn list(mut args: Args) -> Result<(), CliError> {
    let [] = args.words([])?;
    let state = args.value("state", "active, expiring, expired or revoked", KeyState::parse)?;
    let mut keys = open_to_read(&args.config()?)?.list_keys()?;
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
    let [id, name] = args.words(["the key's ID", "its new NAME"])?;
    let name = key_name(&name)?;
    let config = args.config()?;
    change(&open_store(&config)?, &id, &[KeyChange::Name(name)])?;
    eprintln!("Renamed {id} in {}.", config.database_name());
    Ok(())
}

pub(super) fn revoke(mut args: Args) -> Result<(), CliError> {
    let [id] = args.words(["the key's ID"])?;
    let config = args.config()?;
    let (store, database) = (open_store(&config)?, config.database_name());
    if let Some(since) = find(&store, &id)?.revoked {
        eprintln!("{id} in {database} is revoked already, since {}.", when::format_minute(Some(since)));
        return Ok(());
    }
    store.revoke_key(&id, when::now(), &actor())?;
    eprintln!("Revoked {id} in {database}.");
    Ok(())
}

pub(super) fn set(mut args: Args) -> Result<(), CliError> {
    let [id] = args.words(["the key's ID"])?;
    let terms = KeyOptions::read(&args, when::now())?;
    let mut changes = Vec::new();
    let mut changed = Vec::new();
    if !terms.permissions.is_empty() {
        changed.push(format!("permissions {}", Permission::join(&terms.permissions)));
        changes.push(KeyChange::Permissions(terms.permissions));
    }
    if let Some(expires) = terms.expires {
        changed.push(format!(
            "expires {}",
            expires.map_or("never".into(), |time| when::format_minute(Some(time)))
        ));
        changes.push(KeyChange::Expires(expires));
    }
    if let Some(concurrent) = terms.concurrent {
        changed.push(format!("concurrent {}", concurrent.map_or("none".into(), |number| number.to_string())));
        changes.push(KeyChange::Concurrent(concurrent));
    }
    if let Some(budget) = terms.budget {
        changed.push(format!("budget {}", budget.map_or("none".into(), |budget| budget.to_string())));
        changes.push(KeyChange::Budget(budget));
    }
    if changes.is_empty() {
        let options = "--permission, --expires, --concurrent or --budget is missing.";
        return Err(CliError::Usage(options.into()));
    }
    let config = args.config()?;
    let store = open_store(&config)?;
    if let Some(since) = find(&store, &id)?.revoked {
        let since = when::format_minute(Some(since));
        return Err(CliError::Failed(format!(
            "{id} is revoked since {since}, for good. Create another key: adriaticum keys create NAME"
        )));
    }
    change(&store, &id, &changes)?;
    eprintln!("Changed {id} in {}: {}.", config.database_name(), changed.join(", "));
    Ok(())
}

fn find(store: &Store, id: &str) -> Result<Key, CliError> {
    store.key(id)?.ok_or_else(|| no_such_key(id))
}

fn change(store: &Store, id: &str, changes: &[KeyChange]) -> Result<(), CliError> {
    match store.change_key(id, None, changes, &actor())? {
        KeyChanged::Done => Ok(()),
        KeyChanged::NoSuchKey | KeyChanged::Meanwhile(_) => Err(no_such_key(id)),
    }
}

fn key_name(text: &str) -> Result<KeyName, CliError> {
    KeyName::parse(text).ok_or_else(|| CliError::Usage(format!("a key's name has {}.", KeyName::TAKES)))
}

pub(super) fn no_such_key(id: &str) -> CliError {
    CliError::Failed(format!("there is no key {id:?}. List the keys: adriaticum keys list"))
}
